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
        ({"host": "example"}, "loopback"),
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


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "TiB", "8388608TiB"])
def test_sizes_beyond_every_file_are_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="too large"):
        parse_bytes(text)


def test_fewer_than_forty_settings_each_with_a_reason() -> None:
    specs = dataclasses.fields(Settings)
    assert len(specs) < 40
    assert all(spec.metadata["why"] for spec in specs)


def test_default_socket_lies_in_the_users_runtime_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert Settings().socket_path == tmp_path / "kvservice.sock"
    assert Settings().data_socket_path == tmp_path / "kvservice.sock.data"
