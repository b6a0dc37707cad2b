"""Who a node is: kept on disk, private, never shared between two processes; an epoch that rises."""

import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvservice.model.errors import ConfigError, DiskError
from kvservice.peers.member import NodeId
from kvservice.peers.node_uuid import identity_on, open_state_folder, passing_identity
from kvservice.storage.disk import Disk, RealDisk


@contextmanager
def folder(path: Path) -> Iterator[Disk]:
    disk = open_state_folder(path, "a test")
    try:
        yield disk
    finally:
        disk.close()


def boot(path: Path, now_ns: int = 1000) -> NodeId:
    with folder(path) as disk:
        return identity_on(disk, now_ns)


def test_a_uuid_stays_and_the_epoch_rises_though_the_clock_jumps_back(tmp_path: Path) -> None:
    boots = [boot(tmp_path / "state", now_ns) for now_ns in (1000, 2000, 500, 500)]
    assert len({one.uuid for one in boots}) == 1
    assert [one.epoch for one in boots] == [1000, 2000, 2001, 2002]


def test_two_folders_are_two_nodes_and_no_folder_is_another_node_each_time(tmp_path: Path) -> None:
    uuids = {boot(tmp_path / "a").uuid, boot(tmp_path / "b").uuid, passing_identity(1).uuid, passing_identity(1).uuid}
    assert len(uuids) == 4


def test_an_epoch_that_is_settled_elsewhere_is_taken(tmp_path: Path) -> None:
    with folder(tmp_path / "state") as disk:
        assert identity_on(disk, 1000, boot_epoch=77).epoch == 77
        assert not disk.exists("epoch")


def test_the_file_is_private_and_beside_what_an_ssd_tier_keeps(tmp_path: Path) -> None:
    boot(tmp_path / "state")
    assert stat.S_IMODE((tmp_path / "state" / "node.json").stat().st_mode) == 0o600
    disk = RealDisk(tmp_path / "state")
    assert identity_on(disk, 1).uuid == boot(tmp_path / "state").uuid
    disk.close()


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b'{"version": 1}', b'{"version": 2, "uuid": "x"}', b'{"version": 1, "uuid": 5}', b"[" * 9999],
)
def test_a_damaged_file_makes_a_new_node_and_says_so(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    first = boot(tmp_path / "state")
    (tmp_path / "state" / "node.json").write_bytes(damage)
    second = boot(tmp_path / "state")
    assert second.uuid != first.uuid
    assert second.epoch > first.epoch
    assert "node.json is damaged" in caplog.text
    assert boot(tmp_path / "state").uuid == second.uuid


def test_what_a_crash_in_the_middle_leaves_does_not_matter(tmp_path: Path) -> None:
    first = boot(tmp_path / "state")
    (tmp_path / "state" / "node.json.new").write_bytes(b'{"version": 1, "uu')
    assert boot(tmp_path / "state").uuid == first.uuid


def test_a_file_that_cannot_be_read_stops_the_boot(tmp_path: Path) -> None:
    boot(tmp_path / "state")
    (tmp_path / "state" / "node.json").unlink()
    (tmp_path / "state" / "node.json").mkdir()
    with pytest.raises(DiskError, match=r"node\.json"):
        boot(tmp_path / "state")


def test_a_second_process_with_the_folder_is_refused_by_name(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from kvservice.peers.node_uuid import open_state_folder\n"
        "disk = open_state_folder(pathlib.Path(sys.argv[1]), 'the first')\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        (sys.executable, "-c", code, str(tmp_path / "state")), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"locked\n"
        with pytest.raises(ConfigError, match=rf"in use by the first \(process {first.pid}\)"):
            open_state_folder(tmp_path / "state", "the second")
        first.communicate()
    boot(tmp_path / "state")


def test_a_copied_folder_has_the_same_uuid_which_the_others_find_out(tmp_path: Path) -> None:
    first = boot(tmp_path / "state", 1000)
    (tmp_path / "copy").mkdir()
    for file in (tmp_path / "state").iterdir():
        (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
    second = boot(tmp_path / "copy", 1000)
    assert second.uuid == first.uuid
    assert second.epoch > first.epoch
    fields = json.loads((tmp_path / "copy" / "node.json").read_text())
    assert fields == {"version": 1, "uuid": str(first.uuid)}
