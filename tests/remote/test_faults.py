"""Servers that freeze, die, forget, fill up or refuse: a miss in bounded time, and work that goes on by itself."""

import numpy as np
import pytest

from kvservice.model.errors import CapacityError, KVServiceError, NotOwnedError, UnavailableError
from kvservice.storage.remote.breaker import Breaker, BreakerState
from kvservice.storage.remote.contract import RemoteRecord
from kvservice.storage.remote.tier import ObjectTier
from tests.remote.places import MooncakePlace, Place, RedisPlace
from tests.remote.records import LARGE, Target, fetch, find_one, make_record, same, wanted

SHORT_S = 0.5


class Clock:
    """Time for breakers, which tests move on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def opened(place: Place, clock: Clock, deadline_s: float = SHORT_S) -> ObjectTier:
    return await place.open(deadline_s, Breaker(clock, pause_s=1.0))


async def stored(tier: ObjectTier, context: int = 0) -> RemoteRecord:
    """A large record that is found."""
    name, record = make_record(context=context, size=LARGE)
    assert await tier.store(name, record, 0.0)
    found = await find_one(tier, name)
    assert found is not None
    return found


async def test_sixteen_keys_of_a_frozen_server_cost_one_deadline(own_place: Place) -> None:
    clock = Clock()
    tier = await opened(own_place, clock)
    names = []
    for context in range(16):
        name, record = make_record(context=context)
        names.append(name)
        assert await tier.store(name, record, float(context))
    assert own_place.server is not None
    own_place.server.stop()
    for name in names:
        with pytest.raises(UnavailableError):
            await find_one(tier, name)
    assert (tier.counts.timed_out, tier.counts.refused_by_breaker) == (1, 15)
    clock.now_s += 1.0
    with pytest.raises(UnavailableError):  # the probe
        await find_one(tier, names[0])
    assert (tier.counts.timed_out, tier.counts.refused_by_breaker) == (2, 15)

    own_place.server.go_on()
    clock.now_s += 2.0
    for at, name in enumerate(names):  # every answer belongs to its own question
        found = await find_one(tier, name)
        assert found is not None
        assert (found.name, found.prefill_s) == (name, at)
    assert tier.breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize("harm", ["kill", "stop"])
async def test_a_server_lost_in_mid_fetch_ends_it_and_nothing_is_written_later(own_place: Place, harm: str) -> None:
    tier = await opened(own_place, Clock(), 2.0)
    found = await stored(tier)
    target = Target(found)
    pieces: list[tuple[int, int]] = []

    def on_piece(start: int, end: int) -> None:
        if not pieces:
            getattr(own_place.holder, harm)()
        pieces.append((start, end))
        target.on_piece(start, end)

    with pytest.raises(KVServiceError):
        await tier.fetch(found, target.bytes, on_piece)
    assert max(target.layers) < LARGE[0]
    if harm == "stop":
        own_place.holder.go_on()
    told = np.zeros(len(target.bytes), bool)
    for start, end in pieces:
        told[start:end] = True
    assert (target.bytes[~told] == 0xEE).all()


async def test_a_server_that_restarts_with_nothing_is_a_miss_and_takes_records_again(own_place: Place) -> None:
    clock = Clock()
    tier = await opened(own_place, clock, 5.0)
    name, record = make_record()
    assert await tier.store(name, record, 0.0)
    found = await stored(tier, 1)
    own_place.restart()
    for _ in range(100):  # what was connected notices, on the first call or after a while
        clock.now_s += 60.0
        try:
            if await find_one(tier, name) is None and await tier.store(name, record, 3.0):
                break
        except (UnavailableError, CapacityError):
            continue
    again = await find_one(tier, name)
    assert again is not None
    assert again.prefill_s == 3.0
    assert same((await fetch(tier, again)).bytes, record)
    with pytest.raises(KVServiceError, match="gone"):
        await fetch(tier, found)


async def test_a_dead_server_is_asked_a_few_times_and_then_left_alone(own_place: Place) -> None:
    tier = await opened(own_place, Clock(), 5.0)
    name, _ = make_record()
    assert await find_one(tier, name) is None
    assert own_place.server is not None
    own_place.server.kill()
    for _ in range(16):
        with pytest.raises(UnavailableError):
            await find_one(tier, name)
    assert tier.breaker.state is BreakerState.OPEN
    assert tier.counts.failed + tier.counts.timed_out <= 3
    assert tier.counts.refused_by_breaker >= 13


async def test_a_full_redis_says_so_and_keeps_what_it_has(own_place: Place) -> None:
    if not isinstance(own_place, RedisPlace):
        pytest.skip("Redis only")
    tier = await own_place.open()
    name, record = make_record()
    assert await tier.store(name, record, 0.0)
    with own_place.client() as client:
        client.config_set("maxmemory", "4mb")
    with pytest.raises(CapacityError, match="full"):
        await tier.store(*make_record(context=1, size=LARGE), 0.0)
    assert await find_one(tier, name) is not None
    assert tier.breaker.state is BreakerState.CLOSED


async def test_a_full_pool_says_so_and_leaves_no_half_record(own_place: Place) -> None:
    if not isinstance(own_place, MooncakePlace):
        pytest.skip("Mooncake only")
    tier = await own_place.open()
    held: list[RemoteRecord] = []
    reason = ""
    while not reason and len(held) < 40:
        try:
            held.append(await stored(tier, len(held)))
        except CapacityError as error:
            reason = str(error)
        await tier.find([wanted(*(one.name for one in held))])  # what was looked for is leased and makes no room
    assert "full" in reason
    assert 10 < len(held) < 40
    assert await find_one(tier, make_record(context=len(held))[0]) is None
    assert tier.breaker.state is BreakerState.CLOSED


async def test_rights_that_are_taken_away_are_told_apart_from_a_lost_server(own_place: Place) -> None:
    if not isinstance(own_place, RedisPlace):
        pytest.skip("Redis only")
    tier = await own_place.open()
    name, record = make_record()
    with own_place.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-set")
    with pytest.raises(NotOwnedError, match="refuses our credentials"):
        await tier.store(name, record, 0.0)
    assert await find_one(tier, name) is None
    assert tier.breaker.state is BreakerState.CLOSED


async def test_what_the_foreign_library_does_to_signals_leaves_ours_alone(own_place: Place) -> None:
    import asyncio
    import os
    import signal

    heard = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.set)
    previous = signal.getsignal(signal.SIGTERM)
    try:
        await own_place.open()
        assert signal.getsignal(signal.SIGTERM) is previous
        os.kill(os.getpid(), signal.SIGUSR1)
        async with asyncio.timeout(10):
            await heard.wait()
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)
