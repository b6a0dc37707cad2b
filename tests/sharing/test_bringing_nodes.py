"""The same among real nodes: owners with storage behind them, members that come and go, tokens that are exchanged."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvservice.app import LocalNode
from kvservice.model.cache import CacheMeta, MasterReference
from kvservice.model.errors import UnavailableError
from kvservice.model.plan import Outcome
from kvservice.peers.routes import Router
from kvservice.peers.routes_log import Medium
from kvservice.sharing.cluster import Cluster
from kvservice.sharing.routed import RoutedPlace
from kvservice.storage.record import master_layout, mirror_layout
from kvservice.storage.remote.contract import RemoteRecord
from kvservice.wire.v1 import cache_pb2 as wire
from tests.access.certificates import Authority
from tests.client.builders import free_port, make_settings
from tests.server.builders import (
    Planes,
    diff_of,
    encode_key,
    make_identity,
    make_meta,
    make_planes,
    make_relative,
    query,
    write_record,
)
from tests.sharing.nodes import (
    PATIENT,
    addresses,
    held,
    live,
    prompt_of,
    shared_node,
    sidecar,
    until,
    worker,
)
from tests.sharing.shelf import Shelf, _opened
from tests.sharing.test_secured import guarded, outside, refusals

SMALL = make_identity()
META = make_meta(SMALL)
PLANES = make_planes(seed=3)


def put_cold(node: LocalNode, shelf: Shelf) -> None:
    """Have a shelf behind a shared node, as ``cold`` would."""
    place = RoutedPlace(Router(time.monotonic), {Medium.COLD: _opened(shelf, None)})
    node.on_loop(lambda one: setattr(one.sharing.directory, "cold", place) if one.sharing else None)


def cluster_of(node: LocalNode) -> Cluster:
    cluster = node.peers.cluster
    assert cluster is not None
    return cluster


class Caller:
    """Makes single calls of an engine, so that a test sees each."""

    def __init__(self, node: LocalNode) -> None:
        self.node = node
        hello = wire.Hello(client_name="test", wants_write=True, identities=[SMALL.canonical_json()])
        welcome = node.open_session(hello)
        self.session = wire.SessionRef(session_id=welcome.session_id, boot_epoch=welcome.boot_epoch)

    def call(self, name: str, request: Any) -> Any:
        request.session.CopyFrom(self.session)
        return self.node.call(name, request)

    def store(self, meta: CacheMeta, planes: Planes, runs: Any = None) -> MasterReference:
        layout = master_layout(meta) if meta.master is None else mirror_layout(meta, runs)
        item = wire.ReserveItem(namespace=meta.namespace, key=encode_key(meta.key), record_bytes=layout.record_bytes)
        if meta.master is not None:
            item.master_context, item.master_generation = meta.master.context, meta.master.generation
        reserved = self.call("Reserve", wire.ReserveRequest(items=[item])).outcomes[0].reserved
        view = self.node.arena[reserved.extent.offset : reserved.extent.offset + reserved.extent.length]
        checksum = write_record(view, meta, planes, runs)
        commit = wire.CommitItem(reservation_id=reserved.id, header_checksum=checksum)
        (outcome,) = self.call("Commit", wire.CommitRequest(items=[commit])).outcomes
        assert not outcome.error.code, outcome.error
        return MasterReference(meta.key.context, outcome.generation)

    def store_mirror(self, reference: MasterReference, name: str = "other") -> CacheMeta:
        meta = make_meta(SMALL, history=(name,), master=reference)
        planes = make_relative(SMALL, PLANES, META.position, meta.position, rows=(3,))
        self.store(meta, planes, diff_of(SMALL, PLANES, META.position, planes, meta.position))
        return meta

    def find(self, meta: CacheMeta) -> Outcome:
        """Found here, and whole?"""
        reply, step = self.call("Lookup", wire.LookupRequest(prompts=[query(meta)])), 0
        while reply.lease.id:
            arrived = self.call("Await", wire.AwaitRequest(lease_id=reply.lease.id, step=step))
            step = arrived.step
            if not arrived.pending:
                self.call("Release", wire.ReleaseRequest(lease_ids=[reply.lease.id]))
                break
        return Outcome(reply.prompts[0].segments[0].outcome)

    def delete(self, *metas: CacheMeta) -> None:
        self.call("Delete", wire.DeleteRequest(keys=[encode_key(meta.key) for meta in metas]))


def pushed(node: LocalNode) -> None:
    def is_idle() -> bool:
        return bool(node.on_loop(lambda one: one.sharing is not None and one.sharing.pushes.is_idle))

    until(is_idle, "an empty queue")


class FrozenShelf(Shelf):
    """Answers no question before ``answers`` is set; any thread may."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()

    async def find(self, wanted: Any) -> list[list[RemoteRecord]]:
        found = await super().find(wanted)
        await asyncio.to_thread(self.answers.wait, 30.0)
        return found


@pytest.mark.parametrize("is_whole_namespace", [False, True])
def test_an_owner_that_is_told_to_delete_deletes_in_storage_behind_it(tmp_path: Path, is_whole_namespace: bool) -> None:
    port, shelf = free_port(), Shelf()
    with (
        shared_node(tmp_path / "s", port, shared=addresses(port)) as owner,
        sidecar(tmp_path / "a", port) as node,
    ):
        until(lambda: len(live(owner)) == 1, "the owner itself")
        put_cold(owner, shelf)
        engine = Caller(node)
        engine.store(META, PLANES)
        pushed(node)
        until(lambda: bool(shelf.records), "a record in cold storage")
        pushed(owner)
        if is_whole_namespace:
            engine.call("Delete", wire.DeleteRequest(namespace=META.namespace))
        else:
            engine.delete(META)
        assert (held(node), held(owner), len(shelf.records)) == (0, 0, 0)
        assert engine.find(META) is Outcome.MISS


def test_a_mirror_does_not_bring_its_deleted_master_back(tmp_path: Path) -> None:
    port = free_port()
    with (
        shared_node(tmp_path / "s", port),
        sidecar(tmp_path / "a", port) as first,
        sidecar(tmp_path / "b", port) as second,
    ):
        writer, reader = Caller(first), Caller(second)
        mirror = writer.store_mirror(writer.store(META, PLANES))
        pushed(first)
        writer.delete(META)
        assert reader.find(mirror) is Outcome.MISS
        assert reader.find(META) is Outcome.MISS


def test_nothing_stays_leased_at_the_owner_after_rounds_with_mirrors(tmp_path: Path) -> None:
    port = free_port()
    with shared_node(tmp_path / "s", port) as owner, sidecar(tmp_path / "a", port, push="off") as node:
        reader, writer = Caller(node), Caller(owner)
        reference = writer.store(META, PLANES)
        for index in range(5):
            assert reader.find(writer.store_mirror(reference, f"m{index}")) is Outcome.HIT
        until(lambda: owner.on_loop(lambda one: not one.leases.live), "an owner without leases")
        assert owner.on_loop(lambda one: one.catalog.totals.held_bytes) == 0


def test_slow_storage_behind_an_owner_does_not_make_the_owner_look_lost(tmp_path: Path) -> None:
    port, shelf = free_port(), FrozenShelf()
    with (
        shared_node(tmp_path / "s", port, shared=addresses(port)) as owner,
        sidecar(tmp_path / "a", port, peer_deadline_s=3.0) as node,
        worker(node) as reader,
        worker(owner) as own,
    ):
        until(lambda: len(live(owner)) == 1, "the owner itself")
        put_cold(owner, shelf)
        own.store(prompt_of(1))
        own.pushed()
        owner.on_loop(lambda one: [one.catalog.evict_host() for _ in range(20)])
        assert held(owner) == 0
        own.store(prompt_of(2))
        shelf.answers.clear()
        assert reader.restore(prompt_of(1)) is None
        assert len(live(node)) == 1
        assert reader.restore(prompt_of(2)) is not None
        shelf.answers.set()
        until(lambda: held(owner) > 0 and not owner.on_loop(lambda one: one.catalog.arriving), "what was asked for")
        asked = shelf.asked
        assert reader.restore(prompt_of(1)) is not None
        assert shelf.asked == asked, "brought behind the first question, for the next asker"


def test_a_delete_that_storage_behind_the_owner_is_slow_with_says_so_and_goes_on(tmp_path: Path) -> None:
    port, shelf = free_port(), FrozenShelf()
    with (
        shared_node(tmp_path / "s", port, shared=addresses(port)) as owner,
        sidecar(tmp_path / "a", port, peer_deadline_s=3.0) as node,
    ):
        until(lambda: len(live(owner)) == 1, "the owner itself")
        put_cold(owner, shelf)
        engine = Caller(node)
        engine.store(META, PLANES)
        pushed(node)
        until(lambda: bool(shelf.records), "a record in cold storage")
        shelf.answers.clear()
        with pytest.raises(UnavailableError, match="storage behind it"):
            engine.delete(META)
        assert len(live(node)) == 1
        assert (held(node), held(owner), len(shelf.records)) == (0, 0, 1)
        shelf.answers.set()
        until(lambda: not shelf.records, "the end of the delete")
        engine.delete(META)
        assert engine.find(META) is Outcome.MISS


@pytest.mark.heavy
def test_who_left_does_not_take_along_the_link_of_who_is_there_now(tmp_path: Path) -> None:
    port = free_port()
    settings = make_settings(tmp_path, shared=addresses(port), member_grace_s=4.0, **PATIENT)
    with LocalNode(settings) as node, worker(node) as reader:
        with shared_node(tmp_path / "s1", port):
            until(lambda: len(live(node)) == 1, "the first one")
        until(lambda: not live(node), "its end")
        with shared_node(tmp_path / "s2", port) as second, worker(second) as own:
            own.store(prompt_of(1))
            until(lambda: len(live(node)) == 1, "the second one")
            cluster = cluster_of(node)
            until(lambda: node.on_loop(lambda _: len(cluster.directory.members)) == 1, "the end of the first one")
            assert node.on_loop(lambda _: len(cluster.places)) == 1
            assert reader.restore(prompt_of(1)) is not None


def test_a_live_member_without_a_place_gets_one(tmp_path: Path) -> None:
    port = free_port()
    with shared_node(tmp_path / "s", port), sidecar(tmp_path / "a", port) as node:
        cluster = cluster_of(node)

        def lose() -> list[Any]:
            cluster.links.clear()
            lost = list(cluster.places.values())
            cluster.places.clear()
            return lost

        lost = node.on_loop(lambda _: lose())
        until(lambda: node.on_loop(lambda _: len(cluster.places)) == 1, "a place for it")
        for place in lost:
            node.run_on_loop(place.close())


@pytest.mark.heavy
def test_who_listens_hears_when_a_member_is_live_and_when_one_booted_again(tmp_path: Path) -> None:
    port, heard = free_port(), list[str]()
    with LocalNode(make_settings(tmp_path, shared=addresses(port), **PATIENT)) as node:
        cluster = cluster_of(node)
        cluster.on_live = lambda: heard.append("live")
        cluster.on_emptied = heard.append
        for _ in range(2):
            with shared_node(tmp_path / "s", port):
                until(lambda: len(live(node)) == 1, "the shared node")
            until(lambda: not live(node), "its end")
        assert heard.count("live") == 2
        assert heard.count(f"node 127.0.0.1:{port}") == 1


def test_a_token_that_is_mended_is_shown_without_a_restart(tmp_path: Path) -> None:
    authority, port = Authority(tmp_path / "ca"), free_port()
    with (
        guarded(tmp_path / "shared", port, authority, '"*"'),
        outside(tmp_path / "a", port, authority.cert, "expired") as node,
    ):
        until(lambda: refusals(node, port) > 0, "a refusal")
        (tmp_path / "a" / "token").write_text("let me in\n")
        until(lambda: bool(live(node)), "a node that is let in")


@pytest.mark.parametrize("name", ["token", "ca"])
def test_a_file_that_is_away_for_a_moment_is_read_once_it_is_back(tmp_path: Path, name: str) -> None:
    authority, port, ca = Authority(tmp_path / "authority"), free_port(), tmp_path / "ca.pem"
    ca.write_bytes(authority.cert.read_bytes())
    with outside(tmp_path / "a", port, ca, "let me in") as node:
        path = tmp_path / "a" / "token" if name == "token" else ca
        saved = path.read_bytes()
        path.unlink()
        with guarded(tmp_path / "shared", port, authority, '"*"'):
            until(lambda: _has_failed(node, port), "a refusal")
            assert not live(node)
            path.write_bytes(saved)
            until(lambda: bool(live(node)), "the shared node")


def _has_failed(node: LocalNode, port: int) -> bool:
    reason = next((link for at, link in cluster_of(node).links.items() if at.port == port), None)
    return reason is not None and not reason.is_answering
