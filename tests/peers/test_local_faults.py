"""A node of this host in a process of its own, which is stopped and killed while its memory is read."""

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvservice.config import process_environment
from kvservice.model.errors import CapacityError, CorruptError, UnavailableError
from kvservice.peers.call import SilentError
from kvservice.peers.host import Room
from kvservice.peers.host_node import NodeSession
from kvservice.peers.member import LocalAddress
from kvservice.peers.streams_limits import LinkLimits
from kvservice.storage.arena import Arena, AttachedArenas
from kvservice.storage.buffer import Bytes
from tests.freezing import freeze
from tests.peers import peer_process
from tests.peers.local_world import local_link, met_node
from tests.peers.stream_world import (
    HASTY,
    PATIENT,
    fetch_verified,
    fetched_at_last,
    find_record,
    link_to,
    settled,
)
from tests.peers.test_local_streams import give
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
        freeze(process.pid)
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
        freeze(process.pid)
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


@pytest.mark.parametrize(("at", "is_memory_wanting"), [(0, False), (MIB, False), (3 * MIB, False), (0, True)])
async def test_an_error_in_the_middle_keeps_nobodys_memory_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, is_memory_wanting: bool
) -> None:
    """Not until the collector comes, which may be long: errors stand in cycles with the calls that they ended."""
    attach, mapped = AttachedArenas.attach, list["weakref.ref[Bytes]"]()

    def note(self: AttachedArenas, descriptor: int, count: int) -> Bytes:
        view = attach(self, descriptor, count)
        mapped.append(weakref.ref(view))
        return view

    monkeypatch.setattr(AttachedArenas, "attach", note)

    def refuse(start: int, end: int) -> None:
        if start <= at < end and not is_memory_wanting:
            raise CorruptError("wrong")

    def prefault(target: memoryview) -> None:
        if is_memory_wanting:
            raise MemoryError

    async with met_node(tmp_path) as met:
        gc.collect()
        gc.disable()
        try:
            async with local_link(met) as link:
                record = await find_record(link, met.owner, await met.owner.store("one"))
                mapped.clear()
                monkeypatch.setattr("kvservice.peers.streams_local_channel.prefault", prefault)
                with pytest.raises(CapacityError if is_memory_wanting else CorruptError):
                    await link.fetch(record, np.zeros(record.record_bytes, np.uint8), refuse)
            await settled(lambda: bool(mapped) and not any(one() is not None for one in mapped))
        finally:
            gc.enable()


async def test_who_gives_a_large_record_waits_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is lent at once, and nothing tells how far the other side is."""
    monkeypatch.setattr("kvservice.peers.streams_client.UNSEEN_BYTES_PER_S", MIB // 4)
    async with met_node(tmp_path) as met, local_link(met, limits=LinkLimits(deadline_s=0.2)) as link:
        commit = NodeSession.commit

        def take_time(self: NodeSession, room: Room, header_checksum: int) -> int:
            threading.Event().wait(0.6)
            return commit(self, room, header_checksum)

        monkeypatch.setattr(NodeSession, "commit", take_time)
        meta, view = await give(met, link, "given")
        assert np.array_equal(met.owner.bytes_of(meta), view)
