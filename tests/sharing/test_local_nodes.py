"""Real nodes of one host: what one has, another reads in its memory, and over TCP as soon as that does not go."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvservice.app import LocalNode
from kvservice.model.cache import Tier
from kvservice.model.errors import CorruptError
from kvservice.peers.routes_log import Choice, Medium, Why
from kvservice.peers.streams_client import PeerLink
from kvservice.peers.streams_local_server import LocalServer
from tests.access.certificates import Authority
from tests.client.builders import assert_equal_bits, free_port
from tests.freezing import freeze
from tests.sharing.nodes import (
    Worker,
    held,
    live,
    prompt_of,
    shared_node,
    sidecar,
    until,
    without_shared_memory,
    worker,
)
from tests.sharing.test_processes import serving
from tests.sharing.test_secured import TENANT, guarded, outside


def ways(node: LocalNode) -> set[Medium]:
    cluster = node.peers.cluster
    assert cluster is not None
    return {medium for place in cluster.places.values() for medium in place.ways}


def meet(*nodes: LocalNode) -> None:
    for node in nodes:
        until(lambda node=node: Medium.SHARED_MEMORY in ways(node), "a way in shared memory")  # type: ignore[misc]


def choices(node: LocalNode, medium: Medium) -> list[Choice]:
    return [one for one in node.peers.router.log.kept if one.medium is medium]


def links(node: LocalNode) -> list[PeerLink]:
    cluster = node.peers.cluster
    assert cluster is not None
    first = list(cluster.links.values())
    further = [way.link for some in cluster.further.values() for way in some.values()]
    return [link for link in (*first, *further) if isinstance(link, PeerLink)]


@contextmanager
def two_sidecars(folder: Path) -> Iterator[tuple[LocalNode, LocalNode, LocalNode, Worker, Worker]]:
    """A shared node, two sidecars of it, and a worker at each."""
    port = free_port()
    with (
        shared_node(folder / "shared", port) as shared,
        sidecar(folder / "a", port) as first,
        sidecar(folder / "b", port) as second,
        worker(first) as writer,
        worker(second) as reader,
    ):
        yield shared, first, second, writer, reader


def local_server(node: LocalNode) -> LocalServer:
    found = node.peers._local_server
    assert found is not None
    return found


def test_what_is_given_and_found_goes_through_shared_memory(tmp_path: Path) -> None:
    with two_sidecars(tmp_path) as (shared, first, second, writer, reader):
        meet(first, second)
        rows = writer.store(prompt_of(1))
        writer.pushed()
        server = local_server(shared)
        assert server.counters.taken == held(shared) == held(first)
        found = reader.restore(prompt_of(1))
        assert found is not None
        assert found[1] == {Tier.REMOTE}
        assert_equal_bits(found[0], rows)
        assert server.counters.sent == held(shared)
        assert {one.medium for one in second.peers.router.log.kept} == {Medium.SHARED_MEMORY}
        document = second.peers.figures()
        assert document["media"]["shared_memory"]["choices"] == held(shared)


def others_arenas() -> int:
    """Descriptors in this process of arenas that may only be read: those that were handed over."""
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of the listing itself
            is_arena, info = "kvservice-arena" in str(one.readlink()), Path("/proc/self/fdinfo", one.name).read_text()
            flags = next(int(line.split()[1], 8) for line in info.splitlines() if line.startswith("flags:"))
            found += is_arena and flags & os.O_ACCMODE == os.O_RDONLY
    return found


def test_when_the_socket_is_gone_the_stream_takes_over(tmp_path: Path) -> None:
    with two_sidecars(tmp_path) as (shared, first, second, writer, reader):
        meet(first, second)
        rows = writer.store(prompt_of(1))
        writer.pushed()
        assert others_arenas() >= 4, "each side has the other's"
        local_server(shared).stop()
        found = reader.restore(prompt_of(1))
        assert found is not None
        assert_equal_bits(found[0], rows)
        assert choices(second, Medium.STREAM)
        assert live(second)
        writer.store(prompt_of(2), seed=2)
        writer.pushed()
        assert held(shared) == held(first)
        until(lambda: Medium.SHARED_MEMORY not in ways(second), "the word that it is gone")
    until(lambda: not [one for one in threading.enumerate() if "unix:" in one.name], "the end of all threads")
    assert others_arenas() == 0


def test_a_way_that_ends_in_the_middle_of_a_record_is_gone_on_with_over_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = list[int]()
    fetch = PeerLink.fetch

    async def end_in_the_middle(self, record, target, on_piece, start=0):  # type: ignore[no-untyped-def]
        """Every record over shared memory loses its socket at its first piece."""

        def told(first: int, end: int) -> None:
            on_piece(first, end)
            if not ended:
                ended.append(end)
                local_server(shared).stop()

        is_local = self.name.startswith("node unix:")
        await fetch(self, record, target, told if is_local else on_piece, start)

    monkeypatch.setattr(PeerLink, "fetch", end_in_the_middle)
    monkeypatch.setattr("kvservice.peers.streams_channel.PIECE_BYTES", 4096)
    monkeypatch.setattr("kvservice.peers.streams_channel.DATA_BYTES_MAX", 4096)
    with two_sidecars(tmp_path) as (shared, first, second, writer, reader):
        meet(first, second)
        rows = writer.store(prompt_of(1, tokens=800))
        writer.pushed()
        found = reader.restore(prompt_of(1, tokens=800))
        assert found is not None
        assert_equal_bits(found[0], rows)
        assert ended
        assert any(one.has_failed for one in choices(second, Medium.SHARED_MEMORY))
        assert any(one.why in (Why.FALLBACK, Why.ONLY) for one in choices(second, Medium.STREAM))


def test_a_corrupt_byte_in_shared_memory_is_never_served(tmp_path: Path) -> None:
    with two_sidecars(tmp_path) as (shared, _, second, writer, reader):
        meet(second)
        writer.store(prompt_of(1))
        writer.pushed()
        for space in shared.on_loop(lambda node: list(node.catalog.spaces.values())):
            for cache in space.caches():
                shared.arena[cache.extent.offset + cache.record_bytes - 5] ^= 1
        with pytest.raises(CorruptError):  # at the layer that is wrong, rather than a wrong row
            reader.restore(prompt_of(1))
        assert second.on_loop(lambda node: node.counters.corrupt["remote"]) > 0


@pytest.mark.parametrize("without", ["socket", "boot"])
def test_what_cannot_be_met_here_is_shared_with_over_tcp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    port = free_port()
    if without == "socket":
        without_shared_memory(monkeypatch)
    else:
        monkeypatch.setattr("kvservice.sharing.network.boot_id", lambda: "of another host")
    with (
        shared_node(tmp_path / "shared", port) as shared,
        sidecar(tmp_path / "a", port) as first,
        worker(first) as writer,
    ):
        rows = writer.store(prompt_of(1))
        writer.pushed()
        with sidecar(tmp_path / "b", port) as second, worker(second) as reader:
            found = reader.restore(prompt_of(1))
            assert found is not None
            assert_equal_bits(found[0], rows)
            assert {one.medium for one in second.peers.router.log.kept} == {Medium.STREAM}
        assert ways(first) == {Medium.STREAM}
        assert held(shared) == held(first)


@pytest.mark.parametrize("who", ["shared", "sidecar"])
def test_a_node_that_shares_no_memory_lends_none_and_reads_none(tmp_path: Path, who: str) -> None:
    port = free_port()
    with (
        shared_node(tmp_path / "shared", port, shares_memory=who != "shared") as shared,
        sidecar(tmp_path / "a", port, shares_memory=who != "sidecar") as node,
        worker(shared) as writer,
        worker(node) as reader,
    ):
        assert (
            (tmp_path / "shared/kv.sock.peers").exists() is bool(shared.peers.facts().local_path) is (who != "shared")
        )
        rows = writer.store(prompt_of(1))
        found = reader.restore(prompt_of(1))
        assert found is not None
        assert_equal_bits(found[0], rows)
        assert {one.medium for one in node.peers.router.log.kept} == ways(node) == {Medium.STREAM}


@pytest.mark.parametrize(("tenants", "is_met"), [('"*"', True), (f'"{TENANT}"', False)])
def test_the_way_is_told_to_those_who_may_see_every_tenant(tmp_path: Path, tenants: str, is_met: bool) -> None:
    port, authority = free_port(), Authority(tmp_path / "ca")
    with (
        guarded(tmp_path / "shared", port, authority, tenants) as shared,
        outside(tmp_path / "a", port, authority.cert, "let me in") as first,
        worker(first) as writer,
    ):
        until(lambda: bool(live(first)), "the shared node")
        if is_met:
            meet(first)
        writer.store(prompt_of(1))
        writer.pushed()
        assert held(shared) == held(first)
        assert bool(local_server(shared).counters.taken) is is_met
        assert (Medium.SHARED_MEMORY in ways(first)) is is_met


@pytest.mark.heavy
def test_a_frozen_node_costs_one_deadline_whatever_ways_lead_to_it(tmp_path: Path) -> None:
    port = free_port()
    with (
        serving(tmp_path / "shared", port) as process,
        sidecar(tmp_path / "a", port, peer_deadline_s=1.0) as first,
        sidecar(tmp_path / "b", port, peer_deadline_s=1.0) as second,
        worker(first) as writer,
        worker(second) as reader,
    ):
        meet(first, second)
        rows = writer.store(prompt_of(2), 2)
        writer.pushed()
        freeze(process.pid)
        for seed in range(16):
            assert reader.restore(prompt_of(100 + seed)) is None
        assert sum(link.counters.expired for link in links(second)) <= 5, "a call, and pings"
        process.send_signal(signal.SIGCONT)
        until(lambda: bool(live(second)), "the node that was frozen")
        until(lambda: reader.restore(prompt_of(2)) is not None, "its caches")
        found = reader.restore(prompt_of(2))
        assert found is not None
        assert_equal_bits(found[0], rows)
