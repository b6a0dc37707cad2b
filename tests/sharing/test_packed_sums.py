"""What went as 8 bits is told for good: links come and go, the sums stay."""

import gc

from kvservice.peers.packed_counters import PackedCounters
from kvservice.sharing.packed_sums import PackedSums
from kvservice.stats.metrics import METRICS
from tests.server.builders import World


class Link:
    """Counts, as links do; and knows itself, as they do."""

    def __init__(self, sums: PackedSums) -> None:
        self.counters, self.me = PackedCounters(), self
        sums.watch(self, self.counters)


def test_the_sums_are_over_links_and_ports() -> None:
    sums = PackedSums()
    links = [Link(sums) for _ in range(2)]
    for link in links:
        link.counters.note_packed(100, 51)
    ports = [PackedCounters(10, 6), PackedCounters(1, 1)]
    assert sums.total(ports) == PackedCounters(211, 109)
    assert sums.total(ports) == PackedCounters(211, 109), "asking changes nothing"


def test_they_do_not_fall_when_links_go_and_keep_nothing_of_them() -> None:
    sums = PackedSums()
    for _ in range(3):
        link = Link(sums)
        link.counters.note_packed(100, 51)
        before = sums.total([])
        del link
        gc.collect()
        assert sums.total([]) == before
    last = Link(sums)
    assert len(sums._links) == 1
    last.counters.note_packed(1, 1)
    assert sums.total([]) == PackedCounters(301, 154)


def test_they_are_told_from_the_start() -> None:
    document = World().node.stats_document()
    told = {one.name: dict(one.samples(document)) for one in METRICS if "packed" in one.name}
    assert told == {"kvservice_peer_packed_bytes_total": {(): 0}, "kvservice_peer_packed_wire_bytes_total": {(): 0}}
