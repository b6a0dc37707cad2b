"""A node of this host in a process of its own, which is stopped and killed while its memory is read."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvservice.config import process_environment
from kvservice.model.errors import UnavailableError
from kvservice.peers.call import SilentError
from kvservice.peers.member import LocalAddress
from kvservice.storage.arena import Arena
from tests.peers import peer_process
from tests.peers.stream_world import HASTY, PATIENT, fetch_verified, fetched_at_last, link_to
from tests.peers.test_stream_faults import MIB, ROOT, record_there


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(MIB)
    yield arena
    arena.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", LocalAddress]]:
    path = tmp_path / "kv.sock.peers"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.peers.peer_process", "local", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=process_environment({"PYTHONPATH": str(ROOT)}),
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "0\n"
        yield process, LocalAddress(str(path), peer_process.LOCAL)
    finally:
        process.kill()
        process.communicate(timeout=60)


async def test_a_stopped_node_costs_one_deadline_and_comes_back(
    other: tuple["subprocess.Popen[str]", LocalAddress], arena: Arena
) -> None:
    process, address = other
    async with link_to(address, limits=HASTY, arena=arena) as link:
        record = await record_there(link, peer_process.meta())
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(SilentError):
            await fetch_verified(link, record)
        for _ in range(16):
            with pytest.raises(UnavailableError, match="left alone"):
                await fetch_verified(link, record)
        assert link.counters.expired <= link.breaker.opened == 1
        os.kill(process.pid, signal.SIGCONT)
        assert np.count_nonzero(await fetched_at_last(link, record))


async def test_who_is_doubted_is_asked_at_once_and_not_waited_for_long(
    other: tuple["subprocess.Popen[str]", LocalAddress], arena: Arena
) -> None:
    process, address = other
    async with link_to(address, limits=HASTY, arena=arena) as link:
        record = await record_there(link, peer_process.meta())
        link.doubt()
        assert np.count_nonzero(await fetch_verified(link, record)), "it answers"
        os.kill(process.pid, signal.SIGSTOP)
        link.doubt()
        with pytest.raises(UnavailableError, match="left alone"):
            await fetch_verified(link, record)
        assert link.counters.expired == 1, "the ping, before anything else was asked"


async def test_a_node_that_is_killed_in_the_middle_of_a_record(
    other: tuple["subprocess.Popen[str]", LocalAddress], arena: Arena
) -> None:
    """What was lent can still be read: the memory lives as long as a descriptor of it."""
    process, address = other
    async with link_to(address, limits=PATIENT, arena=arena) as link:
        record = await record_there(link, peer_process.meta())
        target = np.zeros(record.record_bytes, np.uint8)

        def on_piece(start: int, end: int) -> None:
            if process.poll() is None:
                process.kill()
                process.wait(60)

        try:
            await link.fetch(record, target, on_piece)
        except UnavailableError:
            pass
        else:
            assert np.count_nonzero(target[-MIB:])
        with pytest.raises(UnavailableError):
            await link.ping()
