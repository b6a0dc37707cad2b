"""How bytes are cut into frames over a unix socket, and what writing them costs."""

import threading
from itertools import pairwise

import numpy as np
import pytest

from kvservice.peers import two_threads
from kvservice.peers.frames import DATA_BYTES_MAX
from kvservice.peers.streams_channel import Source
from kvservice.peers.streams_local_channel import ASK_BUFFER_BYTES, FIRST_LENT_BYTES, LENT_BYTES_MAX, LocalChannel
from kvservice.storage import mapping
from kvservice.storage.arena import Arena, AttachedArenas
from tests.peers.local_world import ends
from tests.peers.test_local_channel import hand_over, own
from tests.storage.page_faults import CountingTables, needs_advice

__all__ = ["own"]  # a fixture


def test_what_is_lent_is_cut_into_larger_frames_but_for_the_first_and_other_bytes(own: Arena) -> None:
    with ends(own) as (channel, _):
        mine, others = Source(own.view.data, own.descriptor(), 0), Source(memoryview(b""))
        total = FIRST_LENT_BYTES + 2 * LENT_BYTES_MAX + 1
        bounds = [0, FIRST_LENT_BYTES, FIRST_LENT_BYTES + LENT_BYTES_MAX, total - 1, total]
        assert channel.frames_of(mine, 0, total) == list(pairwise(bounds))
        assert channel.frames_of(mine, 0, 5) == [(0, 5)]
        assert channel.frames_of(mine, 5, 9) == [(5, 9)]
        assert channel.frames_of(others, 0, total, total // 2 + 1) == [(0, total // 2 + 1), (total // 2 + 1, total)]


@needs_advice
@pytest.mark.parametrize("is_lent", [True, False])
def test_what_comes_is_written_to_pages_that_were_made_ready(monkeypatch: pytest.MonkeyPatch, is_lent: bool) -> None:
    """Into an arena that is not prefaulted. What is left are faults of reading: one maps 16 pages."""
    tables, count = CountingTables(), 4 * DATA_BYTES_MAX
    monkeypatch.setattr(mapping, "_PAGE_TABLES", tables)
    monkeypatch.setattr(two_threads, "_CORES", 1)  # the faults of this thread are counted
    peer, own = Arena(count, is_prefaulted=True), Arena(count)
    peer.view[:] = np.arange(count, dtype=np.int64).astype(np.uint8)
    with ends(own) as (channel, other):
        hand_over(other, count, [peer.read_only_descriptor()])
        channel.receive_arena()
        source = Source(peer.view.data, peer.descriptor() if is_lent else -1)
        owner = LocalChannel(other, peer, AttachedArenas(), ASK_BUFFER_BYTES)
        sending = threading.Thread(target=send_all, args=(owner, source, count))
        sending.start()
        faults = tables.faults_of(lambda: receive_all(channel, own))
        sending.join()
    assert faults <= count // 4096 // 8
    assert np.array_equal(own.view, peer.view)


def send_all(owner: LocalChannel, source: Source, count: int) -> None:
    for first, last in owner.frames_of(source, 0, count):
        owner.send_data(3, source, first, last)


def receive_all(channel: LocalChannel, own: Arena) -> None:
    at = 0
    while at < own.bytes:
        end = at + channel.receive_header().payload_bytes
        channel.receive_pieces(own.view.data, at, end, lambda *_: None)
        at = end
