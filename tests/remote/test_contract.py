"""The contract, held by every engine against its real server."""

import asyncio
import itertools
import threading

import numpy as np
import pytest

from kvservice.model.errors import InvalidInputError, UnavailableError
from kvservice.storage.record import read_head
from kvservice.storage.remote.contract import RemoteName, RemoteTier
from kvservice.storage.remote.tier import ObjectTier
from tests.descriptors import opened_for_good
from tests.remote.places import AVAILABLE, SERVERS, Place, missing
from tests.remote.records import DEEP, LARGE, SMALL, Target, fetch, find_one, make_record, same, wanted
from tests.remote.servers import give_up
from tests.storage.conftest import RecordBuilder


@pytest.mark.parametrize("kind", [*SERVERS])
def test_this_kind_of_place_is_tested_here(request: pytest.FixtureRequest, kind: str) -> None:
    if kind not in AVAILABLE:
        give_up(request, f"{kind}: not installed are {', '.join(missing(kind))}; none of its tests were run")


@pytest.mark.parametrize("size", [SMALL, LARGE, DEEP], ids=["small", "large", "deep"])
async def test_what_was_stored_comes_back_bit_for_bit(tier: RemoteTier, size: tuple[int, int]) -> None:
    name, record = make_record(size=size)
    assert await tier.store(name, record, 1.25)
    found = await find_one(tier, name)
    assert found is not None
    assert (found.name, found.record_bytes, found.prefill_s) == (name, len(record), 1.25)
    target = await fetch(tier, found)
    assert same(target.bytes, record)
    assert target.layers[-1] == size[0]


async def test_a_mirror_comes_back_with_the_master_it_names(tier: RemoteTier) -> None:
    record = RecordBuilder().small_mirror()
    meta = read_head(record).meta
    name = RemoteName(meta.namespace, meta.key.segment, meta.key.context)
    assert await tier.store(name, record, 0.0)
    found = await find_one(tier, name)
    assert found is not None
    assert found.head.meta == meta
    assert found.head.meta.master == RecordBuilder.reference
    assert same((await fetch(tier, found)).bytes, record)


async def test_layers_are_usable_before_the_last_one_came(tier: RemoteTier) -> None:
    name, record = make_record(size=LARGE)
    await tier.store(name, record, 0.0)
    found = await find_one(tier, name)
    assert found is not None
    target = await fetch(tier, found)
    assert any(0 < layers < LARGE[0] for layers in target.layers), target.layers
    ordered = sorted(target.pieces)
    assert ordered[0][0] == 0
    assert ordered[-1][1] == len(record)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ordered))


async def test_a_fetch_starts_where_it_is_told_to(tier: RemoteTier) -> None:
    name, record = make_record(size=LARGE)
    await tier.store(name, record, 0.0)
    found = await find_one(tier, name)
    assert found is not None
    for start in (len(record) - 1, 5_000_001, 4 << 20):
        target = np.full(len(record), 0xEE, np.uint8)
        pieces: list[tuple[int, int]] = []
        await tier.fetch(found, target, lambda *piece, pieces=pieces: pieces.append(piece), start)
        assert min(pieces)[0] == start
        assert same(target[start:], record[start:])
        assert (target[:start] == 0xEE).all()


async def test_named_contexts_come_in_the_order_asked(tier: RemoteTier) -> None:
    names = []
    for context in range(4):
        name, record = make_record(context=context)
        names.append(name)
        if context != 2:
            assert await tier.store(name, record, 0.0)
    answers = await tier.find([wanted(names[3], names[2], names[0]), wanted(names[2]), wanted(names[1])])
    assert [[one.name for one in several] for several in answers] == [[names[3], names[0]], [], [names[1]]]


async def test_other_contexts_are_found_newest_first(tier: RemoteTier, place: Place) -> None:
    if not tier.features.lists_segments:
        pytest.skip(f"{tier.name} cannot list")
    names = [make_record(context=context)[0] for context in range(5)]
    for context in range(5):
        await tier.store(*make_record(context=context), 0.0)
    await tier.store(*make_record(segment=9, context=6), 0.0)
    (found,) = await tier.find([wanted(names[2], others_max=2)])
    assert found[0].name == names[2]
    assert len(found) == 3
    if tier.name != "s3":  # moto's clock has whole seconds
        assert [one.name for one in found[1:]] == [names[4], names[3]]
    (everything,) = await tier.find([wanted(names[2], others_max=50)])
    assert {one.name for one in everything} == set(names)


async def test_the_first_record_of_a_name_stays(tier: RemoteTier) -> None:
    name, record = make_record(size=LARGE)
    assert await tier.store(name, record, 1.0)
    assert not await tier.store(*make_record(size=LARGE, seed=1), 2.0)
    found = await find_one(tier, name)
    assert found is not None
    assert found.prefill_s == 1.0
    assert same((await fetch(tier, found)).bytes, record)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
async def test_of_many_that_create_one_name_one_wins(place: Place, size: tuple[int, int]) -> None:
    tiers = [await place.open() for _ in range(3)]
    records = [make_record(size=size, seed=seed) for seed in range(6)]
    won = await asyncio.gather(*(tiers[at % 3].store(*records[at], float(at)) for at in range(6)))
    assert any(won)
    if tiers[0].name != "s3":  # moto looks whether the name is taken and creates it in two steps; S3 in one
        assert sum(won) == 1
    kept = set()
    for tier in tiers:
        found = await find_one(tier, records[0][0])
        assert found is not None
        assert won[int(found.prefill_s)]
        assert same((await fetch(tier, found)).bytes, records[int(found.prefill_s)][1])
        kept.add(found.prefill_s)
    assert len(kept) == 1


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
async def test_a_deleted_name_is_gone_and_can_be_stored_again(tier: RemoteTier, size: tuple[int, int]) -> None:
    name, record = make_record(size=size)
    assert not await tier.delete(name)
    await tier.store(name, record, 0.0)
    found = await find_one(tier, name)
    assert await tier.delete(name)
    assert await find_one(tier, name) is None
    assert (await tier.find([wanted(make_record(context=9)[0], others_max=9)])) == [[]]
    assert not await tier.delete(name)
    assert found is not None
    with pytest.raises(Exception, match="gone"):
        await fetch(tier, found)
    assert await tier.store(*make_record(size=size, seed=4), 0.0)
    assert await find_one(tier, name) is not None


async def test_what_on_piece_raises_ends_the_fetch(tier: RemoteTier) -> None:
    name, record = make_record(size=LARGE)
    await tier.store(name, record, 0.0)
    found = await find_one(tier, name)
    assert found is not None
    told: list[int] = []

    def refuse(start: int, end: int) -> None:
        told.append(start)
        if len(told) > 1:
            raise InvalidInputError("no more")

    with pytest.raises(InvalidInputError, match="no more"):
        await fetch(tier, found, refuse)
    told_then = len(told)
    assert same((await fetch(tier, found)).bytes, record)  # it was not the place's fault: still there
    assert len(told) == told_then


async def test_a_cancelled_fetch_writes_nothing_more(tier: RemoteTier) -> None:
    name, record = make_record(size=LARGE)
    await tier.store(name, record, 0.0)
    found = await find_one(tier, name)
    assert found is not None
    target = Target(found)
    first = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_piece(start: int, end: int) -> None:
        loop.call_soon_threadsafe(first.set)
        target.on_piece(start, end)

    task = asyncio.create_task(tier.fetch(found, target.bytes, on_piece))
    await first.wait()
    task.cancel()
    await asyncio.wait([task])
    target.bytes[:] = 0x11
    for _ in range(3):
        assert same((await fetch(tier, found)).bytes, record)
    assert (target.bytes == 0x11).all()


async def test_sixteen_keys_are_one_find(tier: ObjectTier) -> None:
    records = [make_record(context=context) for context in range(16)]
    for at, (name, record) in enumerate(records):
        await tier.store(name, record, float(at))
    found = await tier.find([wanted(name) for name, _ in records])
    assert [one.prefill_s for (one,) in found] == list(range(16))
    assert (tier.counts.stored, tier.counts.found, tier.counts.absent) == (16, 16, 0)


async def test_a_record_is_kept_under_its_own_name_only(tier: RemoteTier) -> None:
    name, record = make_record()
    with pytest.raises(InvalidInputError, match="own name"):
        await tier.store(make_record(context=1)[0], record, 0.0)
    assert await find_one(tier, name) is None


async def test_opening_and_closing_leaves_no_thread_and_no_descriptor(place: Place) -> None:
    if place.url.startswith(("mooncake", "memory")):
        pytest.skip("the library keeps threads of its own, or the place has one client only")

    async def use() -> None:
        tier = await place.open()
        await tier.store(*make_record(size=LARGE), 0.0)
        found = await find_one(tier, make_record()[0])
        assert found is not None
        await fetch(tier, found)
        await tier.close()
        del tier

    before = set(threading.enumerate())

    def ours() -> set[threading.Thread]:
        return {one for one in threading.enumerate() if one.name.startswith("kvservice-")} - before

    await use()
    descriptors = len(opened_for_good())
    for _ in range(5):
        await use()
    for _ in range(1000):
        if not ours():
            break
        await asyncio.to_thread(lambda: None)
    assert not ours()
    assert len(opened_for_good()) <= descriptors + 1


async def test_a_closed_tier_answers_nothing(tier: RemoteTier) -> None:
    await tier.close()
    await tier.close()
    with pytest.raises(UnavailableError, match="closed"):
        await tier.find([wanted(make_record()[0])])
