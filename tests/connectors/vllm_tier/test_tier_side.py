"""The tier with a real service: what is stored is found, leased and loaded; what is missing, late or wrong is not."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvservice.app import Service
from kvservice.client.connectors.breaker import BreakerState
from kvservice.client.connectors.vllm_tier.lookups import Verdict
from kvservice.client.connectors.vllm_tier.metrics import COUNTERS, GAUGES
from kvservice.client.connectors.vllm_tier.transfers import Order
from kvservice.client.opaque import FoundRows
from kvservice.client.session import Session
from kvservice.model.errors import InvalidInputError, UnavailableError
from tests.client.builders import make_settings
from tests.connectors.vllm_tier.tier_world import (
    ROW_BYTES,
    TOKENS,
    Clock,
    World,
    content_of,
    make_key,
    until,
)

KEYS = [make_key(number) for number in range(1, 12)]
HIT, MISS, LATER = Verdict.HIT, Verdict.MISS, Verdict.LATER
MakeWorld = Callable[..., World]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(make_settings(tmp_path_factory.mktemp("service"))) as service:
        yield service


@pytest.fixture
def make_world(service: Service, request: pytest.FixtureRequest) -> Iterator[MakeWorld]:
    """Makes tiers of one tenant, the test's own."""
    worlds: list[World] = []

    def make(**options: Any) -> World:
        address = options.pop("address", f"unix:{service.addresses.socket}")
        worlds.append(World(address, request.node.name, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.side.close()


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world()


def test_what_one_engine_stored_another_loads(make_world: MakeWorld) -> None:
    first, second = make_world(), make_world()
    assert first.store(KEYS).is_good
    assert second.side.ask("reader", KEYS[0]) is LATER
    assert second.answers(KEYS) == [HIT] * len(KEYS)
    job = second.load(KEYS)
    assert job.is_good
    assert all(second.memory.holds(key, chunk) for chunk, key in enumerate(KEYS))
    assert second.total("rows_loaded") == second.total("rows_hit_host") == len(KEYS)
    assert second.total("bytes_loaded") == first.total("bytes_stored") == len(KEYS) * ROW_BYTES
    assert second.total("tokens_loaded") == second.total("tokens_asked") == len(KEYS) * TOKENS
    assert first.total("rows_stored") == len(KEYS)
    assert second.total("load_seconds") > 0


def test_what_nobody_stored_is_a_miss_and_every_question_counts_once(world: World) -> None:
    world.store(KEYS[:3])
    for _ in range(2):
        assert world.answers(KEYS[:5]) == [HIT] * 3 + [MISS] * 2
    assert world.total("rows_asked") == 5
    assert (world.total("rows_hit_host"), world.total("rows_missed")) == (3, 2)


def test_a_step_asks_in_one_call_for_all_its_requests(world: World) -> None:
    for number, key in enumerate(KEYS):
        assert world.side.ask(f"request {number}", key) is LATER
    world.side.flush()
    until(lambda: world.side.ask("request 0", KEYS[0]) is MISS)
    assert world.total("lookups") == 1


def test_what_is_promised_is_leased_until_it_is_loaded(world: World) -> None:
    world.store(KEYS)
    world.answers(KEYS)
    assert world.leases == 1
    world.load(KEYS[:4])
    assert world.leases == 1, "the others are promised still"
    world.load(KEYS[4:])
    until(lambda: world.leases == 0)


@pytest.mark.parametrize("is_running", [True, False])
def test_what_is_promised_is_let_go_when_the_request_ends_or_runs(world: World, is_running: bool) -> None:
    world.store(KEYS)
    world.answers(KEYS, request="one")
    world.answers(KEYS, request="other")
    for request in ("one", "other"):
        assert world.leases > 0
        if is_running:
            world.side.flush([request])
        else:
            world.side.ended(request)
    until(lambda: world.leases == 0)


def test_misses_hold_no_lease_and_are_asked_anew_by_the_next_request(world: World) -> None:
    world.answers(KEYS, request="one")
    world.store(KEYS)
    assert world.leases == 0
    assert world.answers(KEYS, request="one") == [MISS] * len(KEYS)
    assert world.answers(KEYS, request="two") == [HIT] * len(KEYS)


def test_a_preempted_request_is_told_what_is_there_now(world: World) -> None:
    world.answers(KEYS)
    world.side.flush(["reader"])
    world.store(KEYS)
    assert world.answers(KEYS) == [HIT] * len(KEYS)


def test_a_request_that_ends_before_its_answer_leaves_nothing(world: World) -> None:
    world.store(KEYS)
    world.side.ask("reader", KEYS[0])
    world.side.flush()
    world.side.ended("reader")
    world.side.ask("early", KEYS[1])
    world.side.ended("early")
    world.side.flush()
    world.answers(KEYS[2:3], request="last")
    world.side.ended("last")
    until(lambda: world.leases == 0)


def test_a_load_without_a_promise_finds_its_rows_itself(world: World) -> None:
    world.store(KEYS[:9])
    world.answers(KEYS[:3])
    job = world.load(KEYS)
    assert job.is_done == [True] * 9 + [False] * 2
    until(lambda: world.leases == 0)


def flip(world: World, key: bytes) -> None:
    """Change one bit of a row in the service's memory."""
    ((found, _),) = world.side._stored.find([key])
    with found:
        place = found._places[0][1]
        assert place is not None
        found._session._transport.arena()[place.extent.offset + place.extent.length - 64] ^= 1


def test_a_wrong_row_is_not_loaded_and_the_request_is_not_sent_for_it_again(make_world: MakeWorld) -> None:
    writer, world = make_world(), make_world()
    writer.store(KEYS)
    flip(writer, KEYS[5])
    assert world.answers(KEYS) == [HIT] * len(KEYS)
    job = world.load(KEYS)
    assert job.failed == [KEYS[5]]
    assert not job.is_good
    assert all(world.memory.holds(key, chunk) for chunk, key in enumerate(KEYS) if chunk != 5)
    assert world.answers([KEYS[5]]) == [MISS]
    assert world.answers([KEYS[5]], request="another") == [MISS], "the node was told"
    assert (world.total("rows_corrupt"), world.total("rows_load_failed")) == (1, 1)


def away(self: FoundRows, *args: Any, **options: Any) -> None:
    raise UnavailableError("planted by the test")


def test_a_request_whose_load_failed_is_not_told_again_that_it_is_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.store(KEYS)
    world.answers(KEYS)
    with monkeypatch.context() as patch:
        patch.setattr(FoundRows, "read", away)
        assert world.load(KEYS).failed == KEYS
    assert world.answers(KEYS) == [MISS] * len(KEYS), "or it would be sent for it for ever"
    assert world.answers(KEYS, request="another") == [HIT] * len(KEYS)
    assert world.total("rows_load_failed") == len(KEYS)
    assert world.total("rows_corrupt") == 0


def test_a_service_that_fails_loads_is_left_alone_for_a_while(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(breaker_failures_max=2)
    world.store(KEYS)
    world.answers(KEYS)
    monkeypatch.setattr(FoundRows, "read", away)
    world.load(KEYS[:8])
    assert world.side._found.breaker.opened == 0, "one trouble, however many rows"
    world.load(KEYS[8:])
    assert world.side._found.breaker.opened == 1


def test_rows_that_are_not_read_by_the_deadline_have_failed(make_world: MakeWorld) -> None:
    clock = Clock()
    world = make_world(parts={"clock": clock}, load_deadline_s=10)
    world.store(KEYS)
    world.answers(KEYS)
    row = world.side._row

    def late(chunk: int) -> Any:
        clock.now_s += 4.0  # of 10
        return row(chunk)

    world.side._transfers._rows = late
    assert 1 <= len(world.load(KEYS).done) <= 4
    assert world.total("rows_load_failed") >= 7


def test_slow_stores_open_the_breaker_of_stores_alone(make_world: MakeWorld) -> None:
    world = make_world(breaker_slow_s=1e-9, breaker_failures_max=2)
    for key in KEYS[:2]:
        assert world.store([key]).is_good
    assert world.side._stored.breaker.state is BreakerState.OPEN
    assert world.side._found.breaker.state is BreakerState.CLOSED


def test_an_answer_that_is_late_is_a_miss_and_what_it_found_is_let_go(make_world: MakeWorld) -> None:
    gate, entered, clock = threading.Event(), threading.Event(), Clock()
    world = make_world(parts={"clock": clock})
    world.store(KEYS)
    find = world.side._found._find

    def slow(session: Session, keys: Any) -> Any:
        entered.set()
        gate.wait()
        return find(session, keys)

    world.side._found._find = slow  # type: ignore[method-assign]
    assert [world.side.ask("reader", key) for key in KEYS] == [LATER] * len(KEYS)
    world.side.flush()
    entered.wait()
    clock.now_s += world.options.lookup_deadline_s + 0.1
    assert [world.side.ask("reader", key) for key in KEYS] == [MISS] * len(KEYS)
    assert world.total("lookups_late") == 1, "one call did not come back"
    gate.set()
    until(lambda: world.total("lookups") == 1)
    until(lambda: world.leases == 0)
    assert world.total("rows_missed") == world.total("rows_asked") == len(KEYS)


def test_without_a_service_all_is_a_miss_and_stores_are_dropped_at_once(make_world: MakeWorld, tmp_path: Path) -> None:
    world = make_world(address=f"unix:{tmp_path}/nobody.sock", breaker_failures_max=2)
    for number in range(2):
        assert world.answers(KEYS, request=f"request {number}") == [MISS] * len(KEYS)
        assert not any(world.store(KEYS).is_done)
    assert world.side._found.breaker.state is BreakerState.OPEN
    assert world.side.ask("reader", KEYS[0]) is MISS, "at once, without asking anybody"
    world.side.store(Order(7, "writer", KEYS, range(len(KEYS))))
    assert [job.order.number for job in world.side.take_finished()] == [7], "at once"
    assert world.total("rows_store_dropped") == 3 * len(KEYS)
    figures = world.side.figures()
    assert figures is not None
    assert figures["breaker_lookups"] == figures["breaker_stores"] == BreakerState.OPEN


def test_a_service_that_comes_is_found_again_by_itself(make_world: MakeWorld, tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    world = make_world(address=f"unix:{settings.socket}", breaker_failures_max=1, breaker_pause_s=0.01)
    world.answers(KEYS)
    world.store(KEYS)
    assert world.side._found.breaker.state is BreakerState.OPEN
    with Service(settings):
        until(lambda: {one.breaker.state for one in (world.side._found, world.side._stored)} == {BreakerState.CLOSED})
        assert world.store(KEYS).is_good
        assert world.answers(KEYS, request="next") == [HIT] * len(KEYS)
        world.side.ended("next")
    world.answers(KEYS, request="after")
    assert world.total("hook_errors") == 0


def test_what_was_promised_by_a_service_that_restarted_is_not_a_hit(make_world: MakeWorld, tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    world = make_world(address=f"unix:{settings.socket}")
    with Service(settings):
        world.store(KEYS)
        assert world.answers(KEYS) == [HIT] * len(KEYS)
        promises = world.side._lookups.take("reader", KEYS[:3])
    with Service(settings):
        world.answers([make_key(99)], request="finds out")
        assert [world.side.ask("reader", key) for key in KEYS[3:]] == [MISS] * (len(KEYS) - 3)
        world.side._transfers.load(Order(9, "reader", KEYS[:3], range(3)), promises)
        assert not any(world.finished(9).is_done), "a load that comes then fails, and nothing else"


def test_more_than_may_wait_is_not_stored(make_world: MakeWorld) -> None:
    world = make_world(stores_waiting_max=5)
    assert not any(world.store(KEYS).is_done)
    assert world.store(KEYS[:5]).is_good
    assert world.total("rows_store_dropped") == len(KEYS)


def test_rows_that_the_service_refuses_are_failures_of_their_own(make_world: MakeWorld, tmp_path: Path) -> None:
    settings = make_settings(tmp_path, host_bytes=1 << 20)
    with Service(settings):
        world = make_world(address=f"unix:{settings.socket}")
        failed = 0
        for start in range(0, 100, 25):
            keys = [make_key(number) for number in range(start, start + 25)]
            failed += len(world.store(keys).failed)
            world.answers(keys)  # leased: nothing of it can go
        assert 0 < failed < 100
        assert world.total("rows_store_failed") == failed
        assert world.side._stored.breaker.state is BreakerState.CLOSED, "it is full, not away"


def test_rows_on_ssd_are_found_there_and_loaded(make_world: MakeWorld, tmp_path: Path) -> None:
    ssd = {"ssd_folder": str(tmp_path / "ssd"), "ssd_bytes": 64 << 20, "ssd_free_floor_bytes": 0}
    settings = make_settings(tmp_path, **ssd)
    with Service(settings):
        assert make_world(address=f"unix:{settings.socket}").store(KEYS).is_good
    with Service(settings):
        world = make_world(address=f"unix:{settings.socket}")
        assert world.answers(KEYS) == [HIT] * len(KEYS)
        assert world.load(KEYS).is_good
        assert all(world.memory.holds(key, chunk) for chunk, key in enumerate(KEYS))
        assert world.total("rows_hit_ssd") == len(KEYS)
        until(lambda: world.leases == 0)
        world.side.close()


def test_a_drain_waits_for_the_row_that_is_being_copied_and_cancels_what_has_not_begun(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(load_threads=1)
    world.store(KEYS)
    world.answers(KEYS)
    gate, entered = threading.Event(), threading.Event()
    read = FoundRows.read

    def slow(self: FoundRows, *args: Any, **kwargs: Any) -> None:
        entered.set()
        gate.wait()
        read(self, *args, **kwargs)

    monkeypatch.setattr(FoundRows, "read", slow)
    world.side.load(Order(5, "reader", KEYS, range(len(KEYS))))
    entered.wait()
    drained = threading.Event()

    def wait() -> None:
        world.side.drain()
        drained.set()

    drain = threading.Thread(target=wait)
    drain.start()
    assert not drained.wait(0.05)
    gate.set()
    drain.join()
    (job,) = world.side.take_finished()
    assert job.done == KEYS[:1]
    assert world.memory.holds(KEYS[0], 0)
    assert world.side.rows_waiting == 0


def test_after_a_reset_nothing_of_before_is_found_and_nothing_new_is_shared(make_world: MakeWorld) -> None:
    world, other = make_world(), make_world()
    world.store(KEYS)
    world.answers(KEYS)
    world.side.drain()
    until(lambda: world.leases == 0)
    assert world.answers(KEYS, request="next") == [MISS] * len(KEYS)
    new = [make_key(number) for number in range(20, 24)]
    world.store(new)
    assert world.answers(new, request="mine") == [HIT] * len(new)
    assert other.answers(new) == [MISS] * len(new)
    assert other.answers(KEYS) == [HIT] * len(KEYS)


def test_a_reset_of_unchanged_weights_may_keep_what_is_stored(make_world: MakeWorld) -> None:
    world = make_world(keeps_on_reset=True)
    world.store(KEYS)
    world.side.drain()
    assert world.answers(KEYS) == [HIT] * len(KEYS)


def test_a_closed_tier_holds_no_view_of_the_memory(world: World) -> None:
    world.store(KEYS)
    world.answers(KEYS)
    world.load(KEYS)
    world.side.close()
    world.memory.unmap()
    world.side.close()


def test_a_copy_that_does_not_end_keeps_the_memory_mapped(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "kvservice.client.connectors.vllm_tier.transfers."
    monkeypatch.setattr(module + "FLUSH_TIMEOUT_S", 0.01)
    monkeypatch.setattr(module + "STOP_TIMEOUT_S", 0.01)
    world, gate = make_world(), threading.Event()
    monkeypatch.setattr(world.side._stored, "put", lambda rows: gate.wait() and [])
    world.side.store(Order(1, "writer", KEYS, range(len(KEYS))))
    with pytest.raises(UnavailableError, match="must stay mapped"):
        world.side.close()
    gate.set()


def test_keys_that_are_no_digests_are_neither_asked_for_nor_stored(make_world: MakeWorld) -> None:
    weak = [make_key(number, hash_bytes=16) for number in range(3)]
    world, private = make_world(), make_world(is_shared=False)
    assert not any(world.store(weak).is_done)
    assert world.answers(weak) == [MISS] * 3
    assert world.total("rows_refused") == 6
    assert private.store(weak).is_good
    assert private.answers(weak) == [HIT] * 3


def test_private_tiers_do_not_meet(make_world: MakeWorld) -> None:
    from tests.connectors.vllm_tier.tier_world import make_config

    one = make_world(is_shared=False)
    other = make_world(is_shared=False, config=make_config(engine_id="e2"))
    one.store(KEYS)
    assert other.answers(KEYS) == [MISS] * len(KEYS)


def test_a_round_larger_than_a_call_may_be_is_split(world: World) -> None:
    world.store(KEYS)
    world.answers([make_key(50)], request="opens the session")
    session = world.side._found._link._session
    assert session is not None
    session._welcome.limits.lookup_segments_max = 4
    assert world.answers([*KEYS, make_key(60)]) == [HIT] * len(KEYS) + [MISS]
    assert world.load(KEYS).is_good
    until(lambda: world.leases == 0)


def test_figures_are_there_from_the_start_and_told_once(world: World) -> None:
    assert set(world.counts.totals()) >= set(COUNTERS)
    figures = world.side.figures()
    assert figures == dict.fromkeys(GAUGES, 0)
    assert world.side.figures() is None
    world.store(KEYS[:1])
    told = world.side.figures()
    assert told is not None
    assert told["rows_stored"] == 1


def test_a_view_that_is_not_what_vllm_promises_is_refused(make_world: MakeWorld) -> None:
    from kvservice.client.connectors.vllm_tier.side import _rows_of

    with pytest.raises(InvalidInputError, match="1 dimensions"):
        _rows_of(memoryview(bytearray(8)))
    with pytest.raises(InvalidInputError, match="there is no chunk 99"):
        make_world().side._row(99)


def test_a_broken_session_maker_costs_misses_only(make_world: MakeWorld) -> None:
    def broken(name: str, is_writer: bool) -> Session:
        raise RuntimeError("planted")

    world = make_world(parts={"open_session": broken})
    assert world.answers(KEYS) == [MISS] * len(KEYS)
    assert not any(world.store(KEYS).is_done)
    assert not any(world.load(KEYS).is_done)
    assert world.total("hook_errors") > 0


def test_content_differs_from_key_to_key() -> None:
    assert (content_of(KEYS[0]) != content_of(KEYS[1])).any()
