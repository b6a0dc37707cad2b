"""The real vLLM at a service that asks who calls: let in by a token, shut out in mid-run, back by itself."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvservice.client.session import Session
from kvservice.client.shared_memory import SharedMemoryTransport
from kvservice.model.geometry import opaque_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import opaque_rope
from tests.access.certificates import Authority
from tests.access.files import section, write
from tests.client.builders import free_port
from tests.vllm.legs import CHUNK, ServiceProcess, make_prompts, run_leg, running_service, stepwise_leg
from tests.vllm.test_connector import FRESH
from tests.vllm.test_shared_cache import told

OLD, NEW = "the old token", "the new token"
PROMPTS = make_prompts()
READY_S = 60.0


def rules(token: str) -> str:
    return section("engine", '"default"', token=token)


def wait_for_engine(service: ServiceProcess) -> None:
    """Until the engine's lookups, which ask again by themselves, have a session. Loads get theirs with the first."""
    deadline_s = time.monotonic() + READY_S
    looker = Identity("tests", "looker", "none", opaque_geometry(1), (opaque_rope(),))
    with Session(SharedMemoryTransport(service.address), [looker], is_writer=False) as session:
        while json.loads(session.stats_json())["handles"]["sessions"] < 2:
            assert time.monotonic() < deadline_s, "the engine did not come back"
            threading.Event().wait(0.2)


def test_the_end_of_a_token_costs_an_engine_its_cache_until_there_is_a_new_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    authority, port, token, identity = Authority(tmp_path / "ca"), free_port(), tmp_path / "token", tmp_path / "id.json"
    own, access = authority.issue("node"), write(tmp_path / "access.toml", rules(OLD))
    token.write_text(OLD)
    connector: dict[str, Any] = {
        "address": f"localhost:{port}",
        "token": f"file:{token}",
        "tls_ca": str(authority.cert),
        "chunk_tokens": CHUNK,
        "breaker_failures_max": 2,
        "breaker_pause_s": 0.1,
        "identity_file": str(identity),
    }
    flags = ("--tls-cert", str(own.cert), "--tls-key", str(own.key), "--access-file", str(access))
    with (
        running_service("--grpc-port", str(port), *flags) as service,
        stepwise_leg(tiny_model, [PROMPTS] * 4, connector=connector, engine=FRESH, is_settled=True) as leg,
    ):
        leg.wait()
        leg.go_on()  # stored
        leg.wait()
        write(access, rules(NEW))
        told(service, "reload", "POST")
        leg.go_on()  # shut out
        leg.wait()
        token.write_text(NEW)
        wait_for_engine(service)
        leg.go_on()  # let in again; the loads of before have to notice first
        leg.wait()
        leg.go_on()
        result = leg.result()
    runs = [run["tokens"] for run in result.runs]
    assert runs == [run_leg(tiny_model, PROMPTS).tokens] * 4
    assert result.runs[1]["cached"] == [0] * 4
    assert result.runs[3]["cached"] == [192] * 4
    assert result.counts["hook_errors"] == 0
    lines = [line for line in result.log.splitlines() if "no session with" in line]
    assert 1 <= len(lines) <= 2, "once for the scheduler's side, once for the worker's"
    assert all("not a caller that this node knows" in line and str(token) in line for line in lines)
    assert "there is a session with" in result.log
    for text in (result.log, identity.read_text()):
        assert OLD not in text
        assert NEW not in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"token": "s3cret"}, 'token must be "file:/path"'),
        ({"tls_ca": "/nowhere/ca.pem"}, "cannot read /nowhere/ca.pem"),
    ],
)
def test_what_an_engine_cannot_show_stops_its_start(tiny_model: Path, options: dict[str, str], says: str) -> None:
    with pytest.raises(AssertionError) as raised:
        run_leg(tiny_model, PROMPTS, connector={"address": "localhost:50151", **options})
    assert says in str(raised.value)
