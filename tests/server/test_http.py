"""The HTTP side: three views of one document that cannot disagree."""

import json
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvservice.__main__ import main
from kvservice.app import Service
from kvservice.config import Settings
from kvservice.stats.metrics import METRICS


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    socket = tmp_path_factory.mktemp("http") / "k.sock"
    settings = Settings(socket=str(socket), grpc_port=-1, http_port=0, host_bytes=1 << 22)
    with Service(settings) as service:
        yield service.addresses.http_port


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
        text: bytes = reply.read()
    return text.decode()


def test_healthz_says_ok(port: int) -> None:
    assert json.loads(get(port, "/healthz")) == {"status": "ok"}


def test_every_metric_is_there_from_zero_and_parses(port: int) -> None:
    families = {family.name: family for family in text_string_to_metric_families(get(port, "/metrics"))}
    assert set(families) == {spec.name.removesuffix("_total") for spec in METRICS}
    assert families["kvservice_host_capacity_bytes"].samples[0].value == 1 << 22
    assert families["kvservice_lookup_segments"].samples[0].value == 0
    kinds = {sample.labels["kind"] for sample in families["kvservice_caches"].samples}
    assert kinds == {"master", "mirror", "hidden"}
    reasons = {sample.labels["reason"] for sample in families["kvservice_lookup_missed"].samples}
    assert "unknown_segment" in reasons


def test_stats_and_metrics_tell_the_same(port: int) -> None:
    document = json.loads(get(port, "/stats"))
    families = {family.name: family for family in text_string_to_metric_families(get(port, "/metrics"))}
    for spec in METRICS:
        found = families[spec.name.removesuffix("_total")]
        assert found.type == spec.kind
        if spec.name == "kvservice_uptime_seconds" or spec.is_histogram:
            continue
        samples = {tuple(one.labels[label] for label in spec.labels): one.value for one in found.samples}
        assert samples == dict(spec.samples(document)), spec.name


def test_ages_of_what_is_evicted_are_a_histogram(port: int) -> None:
    families = {family.name: family for family in text_string_to_metric_families(get(port, "/metrics"))}
    samples = families["kvservice_eviction_age_seconds"].samples
    assert {one.name.rpartition("_")[2] for one in samples} == {"bucket", "count", "sum"}
    assert {one.labels["tier"] for one in samples} == {"host", "ssd"}
    assert {"1", "604800", "+Inf"} <= {one.labels["le"] for one in samples if "le" in one.labels}


def test_unknown_paths_are_not_found(port: int) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(port, "/nothing")


def test_the_stats_command_prints_tiers_lookups_and_the_last_start(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stats", "--http", f"127.0.0.1:{port}"]) == 0
    printed = capsys.readouterr().out
    for words in ("Tiers", "host", "Segments", "in memory", "on SSD", "no SSD tier", "quarantined"):
        assert words in printed
    for words in ("Tokens", "remote", "0.0% found exactly"):
        assert words in printed
    assert main(["stats", "--http", f"127.0.0.1:{port}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recovery"]["kind"] == "none"


def test_the_stats_command_says_when_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--http", "127.0.0.1:1"]) == 1
    assert "kvservice serve" in capsys.readouterr().err
