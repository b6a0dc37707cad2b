"""What comes from elsewhere: nothing that was deleted comes back, nothing stays leased, nobody is held up."""

import asyncio
import dataclasses
import logging
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from kvservice.caches import Space
from kvservice.limits import NodeLimits
from kvservice.model.cache import CacheMeta, MasterReference
from kvservice.model.errors import ConfigError, KVServiceError, NotListedError
from kvservice.model.plan import Outcome
from kvservice.model.segment import SegmentId
from kvservice.peers.directory import Directory, DirectoryLimits
from kvservice.peers.member import Address, Facts, Listing, NodeId, Roll
from kvservice.sharing import fetches
from kvservice.sharing.cold import ColdPlace
from kvservice.sharing.fetches import fault_of
from kvservice.sharing.place import Offer, Place, Question
from kvservice.storage.buffer import Bytes
from kvservice.storage.remote.contract import RemoteName, RemoteRecord, Wanted
from kvservice.storage.remote.unreachable import UnreachableError
from kvservice.wire.v1 import cache_pb2 as wire
from tests.server.builders import (
    Planes,
    cache_of,
    diff_of,
    make_identity,
    make_meta,
    make_planes,
    make_relative,
    other_context,
    query,
)
from tests.sharing.shelf import SharingWorld, Shelf

IDENTITY = make_identity()
META = make_meta(IDENTITY)
PLANES = make_planes(seed=3)


class SlowShelf(Shelf):
    """Knows its answer, and gives it once ``answers`` is set. ``forgets``: does a delete delete here?"""

    def __init__(self) -> None:
        super().__init__()
        self.was_asked, self.answers = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self.forgets = True

    async def find(self, wanted: Sequence[Wanted]) -> list[list[RemoteRecord]]:
        found = await super().find(wanted)
        self.was_asked.set()
        await self.answers.wait()
        return found

    async def delete(self, name: RemoteName) -> bool:
        return await super().delete(name) if self.forgets else True

    def ask_slowly(self) -> None:
        """The next question is answered late; what was found meanwhile stays readable, as leased records do."""
        self.was_asked.clear()
        self.answers.clear()
        self.forgets = False


class Leased:
    """What a place offers, and how often it was let go of: each record once, in the end."""

    def __init__(self, place: Place) -> None:
        self.records: list[RemoteRecord] = []
        self.let_go = Counter[int]()
        self._find, self._let_go = place.find, place.let_go
        place.find, place.let_go = self._found, self._over  # type: ignore[method-assign]

    async def _found(self, questions: Sequence[Question], ahead_bytes: int = 0) -> list[Offer | None]:
        offers = await self._find(questions, ahead_bytes)
        copies = [one and Offer(_copy(one.record), one.master and _copy(one.master)) for one in offers]
        self.records += [two for one in copies if one for two in (one.record, one.master) if two]
        return copies

    def _over(self, records: Iterable[RemoteRecord]) -> None:
        several = list(records)
        self.let_go.update(map(id, several))
        self._let_go(several)

    def check(self) -> None:
        assert self.records
        assert {self.let_go[id(one)] for one in self.records} == {1}


def _copy(record: RemoteRecord) -> RemoteRecord:
    return dataclasses.replace(record)


def leased(world: SharingWorld, index: int = 0) -> Leased:
    assert world.node.sharing is not None
    return Leased(world.node.sharing.directory.everywhere()[index])


def mirror_of(reference: MasterReference, name: str = "other") -> tuple[CacheMeta, Planes, object]:
    meta = make_meta(IDENTITY, history=(name,), master=reference)
    planes = make_relative(IDENTITY, PLANES, META.position, meta.position, rows=(3,))
    return meta, planes, diff_of(IDENTITY, PLANES, META.position, planes, meta.position)


async def filled(*shelves: Shelf, mirrors: int = 0) -> list[CacheMeta]:
    """META and so many mirrors of it, on every shelf; what these are."""
    metas: list[CacheMeta] = []
    for shelf in shelves:
        async with SharingWorld(shelf) as world:
            client = world.client()
            reference = await client.store(META, PLANES)
            several = [mirror_of(reference, f"m{index}") for index in range(mirrors)]
            for one in several:
                await client.store(*one)
            await world.pushed()
            metas = [meta for meta, _, _ in several]
        shelf.fault = None
    return metas


# Deletes


async def test_what_is_deleted_while_it_is_asked_for_does_not_come_back() -> None:
    shelf = SlowShelf()
    await filled(shelf)
    async with SharingWorld(shelf, push="off") as world:
        reader, deleter = world.client(), world.client()
        shelf.ask_slowly()
        lookup = asyncio.ensure_future(reader.find(META))
        await shelf.was_asked.wait()
        shelf.answers.set()
        await deleter.delete(META)
        found, _ = await lookup
        await world.arrived()
        assert found.outcome == Outcome.MISS
        assert cache_of(world, META) is None
        world.check()


async def test_a_mirror_whose_master_is_deleted_while_it_is_asked_for_is_a_miss() -> None:
    shelf = SlowShelf()
    (meta,) = await filled(shelf, mirrors=1)
    async with SharingWorld(shelf, push="off") as world:
        reader, deleter = world.client(), world.client()
        shelf.ask_slowly()
        lookup = asyncio.ensure_future(reader.find(meta))
        await shelf.was_asked.wait()
        shelf.answers.set()
        await deleter.call("Delete", wire.DeleteRequest(namespace=META.namespace))
        found, _ = await lookup
        await world.arrived()
        assert found.outcome == Outcome.MISS
        assert cache_of(world, META) is None


async def test_a_question_that_begins_while_a_delete_runs_brings_nothing_of_it() -> None:
    shelf, holding = SlowShelf(), asyncio.Event()
    await filled(shelf)
    async with SharingWorld(shelf, push="off") as world:
        reader, deleter = world.client(), world.client()
        shelf.forgets = False
        place = shelf.delete

        async def delete(name: RemoteName) -> bool:
            await holding.wait()
            return await place(name)

        shelf.delete = delete  # type: ignore[method-assign]
        deleting = asyncio.ensure_future(deleter.delete(META))
        for _ in range(10):
            await asyncio.sleep(0)
        found, _ = await reader.find(META)
        assert found.outcome == Outcome.MISS
        holding.set()
        await deleting
        assert (await reader.find(META))[0].outcome == Outcome.HIT  # this shelf forgets nothing


async def test_deleting_a_namespace_deletes_it_in_cold_storage_too() -> None:
    shelf = Shelf()
    await filled(shelf, mirrors=2)
    async with SharingWorld(shelf) as world:
        client = world.client()
        world.limit_cold(IDENTITY.tenant, 1 << 30)
        mine = make_meta(IDENTITY, "mine")
        await client.store(mine, PLANES)
        await world.pushed()
        assert len(shelf.records) == 4
        assert world.quotas.remote_used[IDENTITY.tenant] > 0
        await client.call("Delete", wire.DeleteRequest(namespace=META.namespace))
        assert not shelf.records
        assert world.quotas.remote_used[IDENTITY.tenant] == 0
        assert (await client.find(META))[0].outcome == Outcome.MISS


async def test_storage_that_cannot_list_loses_what_is_held_here_and_the_delete_says_what_it_keeps() -> None:
    shelf = Shelf()
    await filled(shelf)
    shelf.features = dataclasses.replace(shelf.features, lists_segments=False)
    async with SharingWorld(shelf) as world:
        client, mine = world.client(), make_meta(IDENTITY, "mine")
        await client.store(mine, PLANES)
        await world.pushed()
        with pytest.raises(NotListedError, match="shelf"):
            await client.call("Delete", wire.DeleteRequest(namespace=META.namespace))
        assert [name.segment for name in shelf.records] == [META.key.segment]
        assert cache_of(world, mine) is None


# Leases at the owner


async def test_every_offered_record_is_let_go_of_once() -> None:
    shelf = Shelf()
    metas = await filled(shelf, mirrors=4)
    async with SharingWorld(shelf, push="off") as world:
        client, ledger = world.client(), leased(world)
        for meta in metas:  # the master is here from the second one on
            assert (await client.find(meta))[0].outcome == Outcome.HIT
        await world.arrived()
        ledger.check()


async def test_two_questions_for_the_same_leave_nothing_leased() -> None:
    shelf = SlowShelf()
    metas = await filled(shelf, mirrors=1)
    async with SharingWorld(shelf, push="off") as world:
        ledger = leased(world)
        shelf.ask_slowly()
        lookups = [asyncio.ensure_future(world.client().find(metas[0])) for _ in range(3)]
        await shelf.was_asked.wait()
        shelf.answers.set()
        await asyncio.gather(*lookups)
        await world.arrived()
        ledger.check()


async def test_what_is_refused_or_has_no_room_is_let_go_of() -> None:
    shelf = Shelf()
    metas = await filled(shelf, mirrors=1)
    async with SharingWorld(shelf, push="off", arena_bytes=4096) as world:
        ledger = leased(world)
        assert (await world.client().find(metas[0]))[0].outcome == Outcome.MISS
        await world.arrived()
        ledger.check()


async def test_what_is_asked_for_again_is_let_go_of_once() -> None:
    bad, good = Shelf(), Shelf()
    (meta,) = await filled(bad, good, mirrors=1)
    bad.change = _spoil
    async with SharingWorld(bad, good, push="off") as world:
        client, ledgers = world.client(), [leased(world, index) for index in range(2)]
        await client.find(meta)
        await world.arrived()
        for ledger in ledgers:
            ledger.check()


def _spoil(start: int, piece: Bytes) -> None:
    if start:
        piece[0] ^= 1


# Questions


async def test_a_space_that_went_with_its_session_gets_nothing_from_a_late_answer() -> None:
    shelf = SlowShelf()
    await filled(shelf)
    async with SharingWorld(shelf, push="off") as world:
        client, ledger = world.client(), leased(world)
        shelf.ask_slowly()
        lookup = asyncio.ensure_future(client.find(META))
        await shelf.was_asked.wait()
        client.close()
        shelf.answers.set()
        with pytest.raises(KVServiceError):
            await lookup
        await world.arrived()
        assert world.node.tier.used_bytes == 0
        ledger.check()
        world.check()


class CountingShelf(Shelf):
    """``turns_before``: how many turns others had before it was first asked."""

    turns = turns_before = 0

    async def find(self, wanted: Sequence[Wanted]) -> list[list[RemoteRecord]]:
        self.turns_before = self.turns_before or self.turns
        return await super().find(wanted)

    async def take_turns(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)


async def test_a_long_lookup_lets_others_in_before_places_are_asked() -> None:
    shelf = CountingShelf()
    async with SharingWorld(shelf, limits=NodeLimits(lookup_slice=4)) as world:
        client, prompt = world.client(), query(META)
        one = prompt.segments[0]
        segments = [wire.SegmentQuery(segment=other_context(index), tokens=one.tokens) for index in range(40)]
        prompt = wire.PromptQuery(namespace=prompt.namespace, segments=segments)
        turns = asyncio.ensure_future(shelf.take_turns())
        await client.lookup(prompt)
        turns.cancel()
        assert shelf.turns_before >= 18, "ten turns while questions are made, ten while places are ranked"
        assert world.node.counters.remote.asked == 40


async def test_no_more_are_asked_of_a_place_at_a_time_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches, "FETCHES_MAX", 3)
    shelf, metas = Shelf(), [make_meta(IDENTITY, index) for index in range(10)]
    async with SharingWorld(shelf) as world:
        for meta in metas:
            await world.client().store(meta, PLANES)
        await world.pushed()
    shelf.fault = None
    async with SharingWorld(shelf) as world:
        shelf.gate.clear()
        await world.client().lookup(*map(query, metas))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(shelf.fetched) == 3
        shelf.gate.set()
        await world.arrived()
        assert len(shelf.fetched) == world.node.counters.remote.done == 10


async def test_only_segments_that_somebody_was_asked_for_are_counted_as_asked() -> None:
    async with SharingWorld() as world:
        await world.client().find(META)
        assert world.node.counters.remote.asked == 0


def test_with_one_member_nobody_is_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Directory(lambda: 0.0, knows_liveness=False, limits=DirectoryLimits())
    address = Address("10.0.0.1", 1)
    facts = Facts(NodeId(uuid.uuid4(), 1), "a")
    directory.apply(Roll.of([Listing(address, facts)], ""))
    directory.heard(address, facts)

    def rank(*_: object) -> list[int]:
        raise AssertionError("one candidate was ranked")

    monkeypatch.setattr("kvservice.peers.directory.rank", rank)
    owners = directory.owners(SegmentId(bytes(32)))
    assert [one.address for one in owners.read] == [one.address for one in owners.write] == [address]


async def test_a_master_behind_the_end_of_its_identity_is_refused() -> None:
    shelf = Shelf()
    (meta,) = await filled(shelf, mirrors=1)
    async with SharingWorld(shelf, push="off") as world:
        world.client()
        space: Space = next(iter(world.node.catalog.spaces.values()))
        records = [shelf.record(name) for name in shelf.records]
        mirror = next(one for one in records if one.head.meta.master is not None)
        master = next(one for one in records if one.head.meta.master is None)
        far = dataclasses.replace(master.head.meta, position=space.end_max)
        beyond = dataclasses.replace(master, head=dataclasses.replace(master.head, meta=far))
        question = Question(space, meta.key.segment, query(meta).segments[0], b"")
        assert fault_of(question, Offer(mirror, master), 1 << 20) == ""
        assert "behind what this identity can have" in fault_of(question, Offer(mirror, beyond), 1 << 20)


class _AtOnce:
    def __init__(self, _: object) -> None:
        return

    def next_s(self) -> float:
        return 0.0


async def test_storage_that_turns_out_to_be_wrongly_set_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[KVServiceError] = [UnreachableError("away"), ConfigError("no such bucket"), UnreachableError("away")]
    shelf = Shelf()

    async def open_tier() -> Shelf:
        if answers:
            raise answers.pop(0)
        return shelf

    monkeypatch.setattr("kvservice.sharing.cold.Backoff", _AtOnce)
    place = ColdPlace("shelf", open_tier)
    with caplog.at_level(logging.INFO, "kvservice.sharing.cold"):
        await place.open()
        assert place._opening is not None
        await place._opening
    said = {record.getMessage(): record.levelname for record in caplog.records}
    assert said["shelf is not open yet: no such bucket"] == "WARNING"
    assert said["shelf is not open yet: away"] == "INFO"
