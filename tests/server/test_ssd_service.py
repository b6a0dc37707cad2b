"""The SSD tier of the real service on a real disk: start, stop, start again, and what stops a start."""

from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from kvservice.app import LocalNode, Service
from kvservice.config import Settings
from kvservice.model.errors import ConfigError, KVServiceError, UnavailableError
from kvservice.stats.report import stats_tables
from kvservice.storage.slab import SLAB_NAME
from kvservice.wire.v1 import cache_pb2

MIB = 1 << 20


def settings(folder: Path, **changes: object) -> Settings:
    values: dict[str, object] = {
        "socket": str(folder / "k.sock"), "grpc_port": -1, "http_port": -1, "host_bytes": 4 * MIB,
        "ssd_folder": str(folder / "ssd"), "ssd_bytes": 8 * MIB, "ssd_free_floor_bytes": 0,
    }  # fmt: skip
    return Settings(**values | changes)  # type: ignore[arg-type]


def recovery(node: LocalNode) -> str:
    return node.stats()["recovery"]["kind"]


def test_a_start_is_new_then_clean(tmp_path: Path) -> None:
    with LocalNode(settings(tmp_path)) as node:
        assert recovery(node) == "new"
    assert sorted(path.name for path in (tmp_path / "ssd").iterdir()) == ["CLEAN", "epoch", "index", "lock", SLAB_NAME]
    with LocalNode(settings(tmp_path)) as node:
        assert recovery(node) == "clean"
        console = Console(record=True, width=120)
        console.print(stats_tables(node.stats()))
        assert "clean: 0 records" in console.export_text()


def test_a_second_service_on_the_folder_is_told_who_holds_it(tmp_path: Path) -> None:
    with Service(settings(tmp_path)), pytest.raises(ConfigError, match=f"kvservice at {tmp_path}/k.sock"):
        LocalNode(settings(tmp_path, socket=str(tmp_path / "other.sock"))).__enter__()
    with LocalNode(settings(tmp_path)):
        pass


@pytest.mark.parametrize("change", ["shrunk", "grown", "not a slab", "smaller setting"])
def test_a_slab_that_is_not_what_it_was_stops_the_start_and_stays_as_it_is(tmp_path: Path, change: str) -> None:
    with LocalNode(settings(tmp_path)):
        pass
    slab, wanted = tmp_path / "ssd" / SLAB_NAME, settings(tmp_path)
    if change == "shrunk":
        _resize(slab, 4 * MIB)
    elif change == "grown":
        _resize(slab, 9 * MIB)
    elif change == "not a slab":
        slab.write_bytes(b"something else" * 1000)
    else:
        wanted = settings(tmp_path, ssd_bytes=4 * MIB)
    before = slab.read_bytes()
    with pytest.raises(ConfigError, match="slab"):
        LocalNode(wanted).__enter__()
    assert slab.read_bytes() == before
    with pytest.raises(ConfigError, match="slab"):
        LocalNode(wanted).__enter__()  # the lock was given back


def test_a_folder_that_cannot_be_made_stops_the_start_and_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder"):
        LocalNode(settings(tmp_path, ssd_folder=str(tmp_path / "missing" / "ssd"))).__enter__()


def opened_files() -> list[str]:
    """What this process has open now; a descriptor may go while it is looked at."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(descriptor.readlink()))
    return found


def _resize(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


@pytest.mark.parametrize("change", [{"host_bytes": 1 << 50}, {"kill_point": "nowhere:1"}])
def test_a_start_that_fails_leaves_nothing_open_and_the_next_one_works(
    tmp_path: Path, change: dict[str, object]
) -> None:
    with LocalNode(settings(tmp_path)):
        pass
    with pytest.raises(KVServiceError):
        LocalNode(settings(tmp_path, **change)).__enter__()
    assert not [one for one in opened_files() if one.startswith(str(tmp_path / "ssd"))]
    with LocalNode(settings(tmp_path)) as node:
        assert recovery(node) in ("clean", "checked")


def test_a_node_that_has_ended_says_so_instead_of_keeping_callers(tmp_path: Path) -> None:
    with LocalNode(settings(tmp_path)) as node:
        pass
    with pytest.raises(UnavailableError, match="ended"):
        node.call("Stats", cache_pb2.StatsRequest())
