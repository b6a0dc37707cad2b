"""What is the same over every engine, on the plainest one: deadlines, breaker, verification, counts."""

import asyncio

import numpy as np
import pytest

from kvservice.model.errors import (
    CapacityError,
    CorruptError,
    InvalidInputError,
    NotOwnedError,
    RecordTooLargeError,
    StaleEpochError,
    UnavailableError,
)
from kvservice.storage.remote.breaker import Breaker, BreakerState
from kvservice.storage.remote.contract import RemoteTier
from kvservice.storage.remote.label import LABEL_BYTES
from kvservice.storage.remote.tier import Deadline, ObjectTier
from tests.remote.naive import DictObjects
from tests.remote.records import DEEP, LARGE, Target, fetch, find_one, make_record, same, wanted
from tests.remote.test_faults import Clock

LONG_S, SHORT_S = 30.0, 0.05


def made(deadline_s: float = LONG_S, clock: Clock | None = None, **how: int) -> tuple[ObjectTier, DictObjects]:
    objects = DictObjects(**how)
    return ObjectTier(objects, "dict://here", Deadline(deadline_s, 1e9), Breaker(clock or Clock())), objects


async def test_the_naive_engine_keeps_the_contract() -> None:
    tier, _ = made()
    place: RemoteTier = tier
    for size in (LARGE, DEEP):
        name, record = make_record(context=size[0], size=size)
        assert await place.store(name, record, 2.0)
        assert not await place.store(name, record, 3.0)
        found = await find_one(place, name)
        assert found is not None
        assert found.prefill_s == 2.0
        assert same((await fetch(place, found)).bytes, record)
    (others,) = await place.find([wanted(make_record(context=77)[0], others_max=9)])
    assert [one.name.context[0] for one in others] == [DEEP[0] & 255, LARGE[0]]
    assert await place.delete(others[0].name)
    assert not await place.delete(others[0].name)
    await place.close()


async def test_a_head_that_is_read_twice_is_read_whole_the_second_time() -> None:
    tier, objects = made()
    name, record = make_record(size=DEEP)
    await tier.store(name, record, 0.0)
    await find_one(tier, name)
    assert objects.calls == ["create", "first_bytes", "first_bytes"]


async def test_a_damaged_answer_whose_object_is_whole_is_not_forgotten() -> None:
    tier, objects = made()
    name, record = make_record()
    await tier.store(name, record, 0.0)
    whole = objects.kept[name]
    answers = [whole.copy(), whole]
    answers[0][100] ^= 1
    original = objects.first_bytes

    async def damaged_once(names: list[object], most: int) -> object:
        objects.kept[name] = answers.pop(0)
        return await original([name], most)

    objects.first_bytes = damaged_once  # type: ignore[method-assign, assignment]
    assert await find_one(tier, name) is not None
    assert tier.counts.corrupt == 0
    assert "delete" not in objects.calls


async def test_a_lie_that_cannot_be_forgotten_is_still_a_miss() -> None:
    tier, objects = made()
    name, record = make_record()
    await tier.store(name, record, 0.0)
    objects.kept[name][LABEL_BYTES + 40] ^= 1

    async def refuse(_: object) -> bool:
        raise NotOwnedError("read only")

    objects.delete = refuse  # type: ignore[method-assign, assignment]
    assert await find_one(tier, name) is None
    assert tier.counts.corrupt == 1
    assert tier.breaker.state is BreakerState.CLOSED


async def test_one_deadline_for_any_number_of_keys() -> None:
    clock = Clock()
    tier, objects = made(SHORT_S, clock)
    name, _ = make_record()
    objects.hangs = True
    for _ in range(16):
        with pytest.raises(UnavailableError):
            await find_one(tier, name)
    assert objects.calls == ["first_bytes"]
    assert (tier.counts.timed_out, tier.counts.refused_by_breaker) == (1, 15)
    objects.hangs = False
    with pytest.raises(UnavailableError, match="not asked for a while"):
        await find_one(tier, name)
    clock.now_s += 5.0
    assert await find_one(tier, name) is None


async def test_calls_at_once_run_into_one_deadline_together() -> None:
    tier, objects = made(SHORT_S)
    objects.hangs = True
    names = [make_record(context=context)[0] for context in range(16)]
    answers = await asyncio.gather(*(find_one(tier, name) for name in names), return_exceptions=True)
    assert all(isinstance(answer, UnavailableError) for answer in answers)
    assert tier.breaker.opened == 1


async def test_fetches_that_wait_for_their_turn_behind_a_lost_place_fail_without_asking() -> None:
    tier, objects = made(SHORT_S)
    name, record = make_record()
    await tier.store(name, record, 0.0)
    found = await find_one(tier, name)
    assert found is not None
    objects.hangs = True
    answers = await asyncio.gather(*(fetch(tier, found) for _ in range(20)), return_exceptions=True)
    assert all(isinstance(answer, UnavailableError) for answer in answers)
    assert objects.calls.count("read") == 8


async def test_a_fetch_does_not_wait_behind_stores() -> None:
    tier, objects = made()
    name, record = make_record()
    await tier.store(name, record, 0.0)
    found = await find_one(tier, name)
    assert found is not None
    objects.hangs = True
    stores = [asyncio.create_task(tier.store(*make_record(context=context), 0.0)) for context in range(1, 30)]
    while objects.calls.count("create") < 5:
        objects.was_called.clear()
        await objects.was_called.wait()
    objects.hangs = False
    assert same((await fetch(tier, found)).bytes, record)
    assert objects.calls.count("create") == 5
    for store in stores:
        store.cancel()
    await asyncio.wait(stores)


async def test_a_fetch_of_which_nothing_arrives_any_more_ends() -> None:
    tier, objects = made(0.2)
    name, record = make_record(size=LARGE)
    await tier.store(name, record, 0.0)
    found = await find_one(tier, name)
    assert found is not None
    objects.pauses = asyncio.Semaphore(3)
    target = Target(found)
    with pytest.raises(UnavailableError, match="fetch"):
        await tier.fetch(found, target.bytes, target.on_piece)
    assert len(target.pieces) == 3
    assert tier.counts.timed_out == 1
    assert (target.bytes[3 << 20 :] == 0xEE).all()


@pytest.mark.parametrize("error", [NotOwnedError("no"), CapacityError("full"), StaleEpochError("gone")])
async def test_an_answer_that_says_no_is_an_answer(error: CapacityError) -> None:
    tier, objects = made()
    name, record = make_record()
    objects.fails = error
    for _ in range(9):
        with pytest.raises(type(error)):
            await tier.store(name, record, 0.0)
    assert tier.breaker.state is BreakerState.CLOSED


async def test_errors_that_come_at_once_are_forgiven_a_few_times() -> None:
    tier, objects = made()
    name, _ = make_record()
    objects.fails = UnavailableError("refused")
    for _ in range(9):
        with pytest.raises(UnavailableError):
            await find_one(tier, name)
    assert (len(objects.calls), tier.counts.failed, tier.counts.refused_by_breaker) == (3, 3, 6)


async def test_a_record_that_is_too_large_or_has_another_name_is_never_sent() -> None:
    tier, objects = made(record_bytes_max=500)
    name, record = make_record()
    with pytest.raises(RecordTooLargeError, match="dict://here keeps up to 500"):
        await tier.store(name, record, 0.0)
    with pytest.raises(InvalidInputError):
        await tier.store(make_record(context=3)[0], record, 0.0)
    with pytest.raises(InvalidInputError, match="not"):
        await tier.store(name, np.concatenate([record, record]), 0.0)
    damaged = record.copy()
    damaged[50] ^= 1
    with pytest.raises(CorruptError):
        await tier.store(name, damaged, 0.0)
    assert objects.calls == []


async def test_a_fetch_needs_the_whole_records_room() -> None:
    tier, _ = made()
    name, record = make_record()
    await tier.store(name, record, 0.0)
    found = await find_one(tier, name)
    assert found is not None
    for length, start in (
        (len(record) - 1, 0),
        (len(record) + 1, 0),
        (len(record), -1),
        (len(record), len(record) + 1),
    ):
        with pytest.raises(InvalidInputError, match="does not go into"):
            await tier.fetch(found, np.zeros(length, np.uint8), lambda begin, end: None, start)


@pytest.mark.parametrize("prefill_s", [float("nan"), float("inf"), -1.0])
async def test_a_time_that_is_none_is_kept_as_unknown(prefill_s: float) -> None:
    tier, _ = made()
    name, record = make_record()
    await tier.store(name, record, prefill_s)
    found = await find_one(tier, name)
    assert found is not None
    assert found.prefill_s == 0.0


async def test_a_cancelled_caller_is_no_failure_of_the_place() -> None:
    tier, objects = made()
    objects.hangs = True
    task = asyncio.create_task(find_one(tier, make_record()[0]))
    await objects.was_called.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert tier.breaker.state is BreakerState.CLOSED
    assert tier.counts.timed_out == 0


async def test_a_place_that_does_not_close_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    tier, objects = made(SHORT_S)
    objects.hangs = True
    await tier.close()
    assert "did not close" in caplog.text
