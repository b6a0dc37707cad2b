"""Settings: every source, every bad value, and the annotated example."""

import argparse
import dataclasses
from pathlib import Path

import pytest

from kvservice.config import Settings, add_flags, load_settings, parse_bytes, settings_from_flags
from kvservice.model.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_file_shows_every_setting_with_its_default() -> None:
    file = ROOT / "deploy/kvservice.toml"
    assert load_settings({}, file=file, environment={}) == Settings()
    text = file.read_text()
    assert not [spec.name for spec in dataclasses.fields(Settings) if f"\n{spec.name} = " not in text]


def test_flags_win_over_environment_and_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text('host_bytes = "2MiB"\nsessions_max = 5\nlog_level = "ERROR"\n')
    environment = {"KVSERVICE_SESSIONS_MAX": "6", "KVSERVICE_LOG_LEVEL": "DEBUG", "HOME": "/x"}
    settings = load_settings({"log_level": "WARNING"}, file=file, environment=environment)
    assert (settings.host_bytes, settings.sessions_max, settings.log_level) == (2 << 20, 6, "WARNING")


def test_flags_are_parsed_to_the_settings_types() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    parsed = parser.parse_args(["--host-bytes", "3MiB", "--is-prefaulted", "true", "--lease-ttl-s", "2.5"])
    settings = settings_from_flags(parsed)
    assert (settings.host_bytes, settings.is_prefaulted, settings.lease_ttl_s) == (3 << 20, True, 2.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"host_byte": "1"}, "unknown settings host_byte"),
        ({"host_bytes": "lots"}, "not a size"),
        ({"host_bytes": "1KiB"}, "at least 1MiB"),
        ({"host": "0.0.0.0"}, "loopback"),
        ({"host": "example"}, "an address of this machine"),
        ({"grpc_port": "70000"}, "grpc_port"),
        ({"grpc_port": "x"}, "must be a number"),
        ({"lease_ttl_s": "0"}, "lease_ttl_s"),
        ({"worker_threads": "0"}, "worker_threads"),
        ({"sessions_max": "0"}, "sessions_max"),
        ({"is_prefaulted": "maybe"}, "true or false"),
        ({"log_level": "LOUD"}, "log_level"),
    ],
)
def test_a_bad_setting_stops_the_boot_and_is_named(values: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(values, environment={})


def test_a_wrong_type_in_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text("socket = 5\n")
    with pytest.raises(ConfigError, match="socket"):
        load_settings({}, file=file, environment={})


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load_settings({}, file=tmp_path / "missing.toml", environment={})


def test_sizes_are_read_with_units() -> None:
    assert [parse_bytes(text) for text in ("7", "1KiB", "1.5GiB", "2 TiB")] == [7, 1024, 3 << 29, 2 << 40]


TLS = {"tls_cert": "c", "tls_key": "k"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"host": "0.0.0.0"} | TLS, "access_file"),
        ({"host": "0.0.0.0", "access_file": "a"}, "tls_cert"),
        ({"host": "::", "http_port": "-1"}, "loopback"),
        ({"peer_host": "10.0.0.1", "peer_port": "0"}, "peer_host"),
        ({"tls_cert": "c"}, "tls_key"),
        ({"tls_key": "k"}, "tls_key"),
        ({"tls_client_ca": "a"}, "tls_client_ca"),
        ({"peer_port": "-2"}, "peer_port"),
        ({"flight_port": "65536"}, "flight_port"),
        ({"peer_host": "10.0.0.1", "flight_port": "0"}, "peer_host"),
        ({"peer_host": "10.0.0.1", "flight_port": "0", "access_file": "a"} | TLS, "tls_client_ca"),
        ({"shared": "flight://a.example"}, "flight://host:port"),
        ({"peer_host": "name"}, "peer_host"),
        ({"replicas": "0"}, "replicas"),
        ({"push": "often"}, "back, through or off"),
        ({"peer_deadline_s": "0"}, "peer_deadline_s"),
        ({"etcd": "etcd:2379"}, "etcd"),
        ({"cold": "bucket"}, "cold"),
        ({"shared": "a b:1"}, "shared"),
        ({"shared": "a.example"}, "shared"),
        ({"shared": "etcd"}, "shared"),
        ({"shared": "a.example:1", "etcd": "https://etcd.example:2379"}, "left out with setting etcd"),
        ({"member_grace_s": "0"}, "member_grace_s"),
        ({"member_warm_s": "-1"}, "member_warm_s"),
        ({"node_name": "a b"}, "node_name"),
    ],
)
def test_a_node_that_others_reach_is_guarded_and_its_peers_are_spelt_right(
    values: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(values, environment={})


@pytest.mark.parametrize(
    "values",
    [
        {"host": "0.0.0.0", "access_file": "a"} | TLS,
        {"host": "::1"},
        {"host": "10.0.0.1", "insecure_plaintext": "true"},
        {"host": "10.0.0.1", "grpc_port": "-1", "http_port": "-1"},
        {"peer_host": "0.0.0.0", "peer_port": "0", "access_file": "a", "tls_client_ca": "c"} | TLS,
        {"shared": "a.example:50153, [::1]:50153,10.0.0.1:1"},
        {"peer_host": "0.0.0.0", "flight_port": "0", "access_file": "a", "tls_client_ca": "c"} | TLS,
        {"peer_host": "10.0.0.1", "flight_port": "0", "insecure_plaintext": "true"},
        {"shared": "a.example:50153,flight://[::1]:50154"},
        {"shared": "dns:cache.example:50153"},
        {"shared": "srv:_kvservice._tcp.cache.example"},
        {"etcd": "https://etcd.example:2379/"},
        {"cold": "s3://bucket/prefix?endpoint=http://127.0.0.1:9000"},
        {"cold": "file:///folder", "push": "off", "replicas": "2", "node_name": "node-1.a"},
    ],
)
def test_what_is_guarded_and_well_spelt_is_taken(values: dict[str, str]) -> None:
    load_settings(values, environment={})


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "TiB", "8388608TiB"])
def test_sizes_beyond_every_file_are_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="too large"):
        parse_bytes(text)


def test_fewer_than_fifty_settings_each_with_a_reason() -> None:
    specs = dataclasses.fields(Settings)
    assert len(specs) < 50
    assert all(spec.metadata["why"] for spec in specs)


def test_default_socket_lies_in_the_users_runtime_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert Settings().socket_path == tmp_path / "kvservice.sock"
    assert Settings().data_socket_path == tmp_path / "kvservice.sock.data"
