"""What both doors to LMCache do, on a real service: exact bytes or an answer that says no, always one answer."""

import json
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvservice.app import Service
from kvservice.client.connectors.breaker import Breaker, BreakerState
from kvservice.client.connectors.lmcache.exchange import Exchange
from kvservice.client.connectors.lmcache.identity import Owner
from kvservice.client.connectors.lmcache.vault import Named, Place, Stored, Vault
from kvservice.client.session import Session
from kvservice.model.errors import CapacityError, KVServiceError, UnavailableError
from tests.client.builders import make_settings
from tests.connectors.lmcache.builders import (
    ANSWER_TIMEOUT_S,
    WHERE,
    answer_of,
    connected,
    make_exchange,
    make_kind,
    make_options,
    named,
)

SIZE = 256


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(make_settings(tmp_path)) as service:
        yield service


@pytest.fixture
def exchange(service: Service) -> Iterator[Exchange]:
    with connected(service) as exchange:
        yield exchange


def content(seed: int, size: int = SIZE) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def store(exchange: Exchange, *seeds: int) -> list[KVServiceError | None]:
    keys = [b"%d" % seed for seed in seeds]
    stored = answer_of(lambda done: exchange.store(named(*keys), [content(seed) for seed in seeds], done))
    return [one.error for one in stored]


def lookup(exchange: Exchange, *seeds: int, lock_s: float | None = None) -> list[bool]:
    keys = [b"%d" % seed for seed in seeds]
    found: list[bool] = answer_of(lambda done: exchange.lookup(seeds, named(*keys), done, lock_s=lock_s))
    return found


def load(exchange: Exchange, *seeds: int) -> tuple[list[bool], list[bytes]]:
    targets = [bytearray(SIZE) for _ in seeds]
    loaded = answer_of(lambda done: exchange.load(list(zip(seeds, targets, strict=True)), done))
    return loaded, [bytes(target) for target in targets]


def is_open(breaker: Breaker) -> bool:
    return breaker.state is BreakerState.OPEN


def leases(exchange: Exchange) -> int:
    """How many the service knows of, once what was let go of has been told."""
    stats = exchange._lookups.submit(lambda: exchange._vault.link.run(lambda session: session.stats_json())).result()
    return int(json.loads(stats)["handles"]["leases"])


def count(exchange: Exchange, name: str) -> int:
    return int(str(exchange.status()[name]))


def test_what_was_stored_is_found_locked_loaded_and_unlocked(exchange: Exchange) -> None:
    assert store(exchange, 1, 2, 3) == [None] * 3
    assert lookup(exchange, 1, 9, 3) == [True, False, True]
    assert leases(exchange) == 1
    assert load(exchange, 1, 3) == ([True, True], [content(1), content(3)])
    exchange.unlock([1])
    assert leases(exchange) == 1
    exchange.unlock([3])
    assert leases(exchange) == count(exchange, "locks") == 0
    assert count(exchange, "bytes_loaded") == count(exchange, "bytes_stored") - SIZE == 2 * SIZE


def test_what_was_there_already_is_held_but_not_counted_as_stored(exchange: Exchange) -> None:
    store(exchange, 1)
    stored = answer_of(lambda done: exchange.store(named(b"1", b"2"), [content(1), content(2)], done))
    assert stored == [Stored(existed=True), Stored()]
    assert (count(exchange, "objects_existed"), count(exchange, "bytes_stored")) == (1, 2 * SIZE)


def test_what_is_not_locked_is_not_loaded(exchange: Exchange) -> None:
    store(exchange, 1)
    assert load(exchange, 1) == ([False], [bytes(SIZE)])
    exchange.unlock([1, 1])


def test_objects_of_other_kinds_are_other_objects(exchange: Exchange) -> None:
    store(exchange, 1)
    for kind in (make_kind(rank=1, world_size=2), make_kind(model="other"), make_kind(512)):
        assert answer_of(partial(exchange.lookup, [1], named(b"1", kind=kind))) == [False]


def test_one_lookup_may_ask_for_several_kinds(exchange: Exchange) -> None:
    kinds = [make_kind(world_size=2, rank=rank) for rank in (0, 1)]

    def prepare() -> Sequence[Named]:
        return [Named(kinds[0], b"a"), Named(kinds[1], b"a"), Named(kinds[1], b"b")]

    buffers = [content(1), content(2), content(3)]
    assert answer_of(lambda done: exchange.store(prepare, buffers, done)) == [Stored()] * 3
    assert answer_of(lambda done: exchange.lookup((1, 2, 3), prepare, done)) == [True] * 3
    assert load(exchange, 3, 1, 2) == ([True] * 3, [buffers[2], buffers[0], buffers[1]])
    exchange.unlock((1, 2, 3))
    assert leases(exchange) == 0


def test_another_owner_finds_nothing(service: Service, exchange: Exchange) -> None:
    store(exchange, 1)
    with connected(service, weights="r2") as other:
        assert lookup(other, 1) == [False]


def test_a_lost_lease_fails_the_load_and_never_gives_other_bytes(exchange: Exchange) -> None:
    store(exchange, 1)
    assert lookup(exchange, 1) == [True]
    exchange._vault.link.run(Session.reconnect)
    assert load(exchange, 1) == ([False], [bytes(SIZE)])
    exchange.unlock([1])
    assert lookup(exchange, 1) == [True]
    assert load(exchange, 1)[0] == [True]


def test_a_flipped_byte_is_not_loaded_and_not_found_again(exchange: Exchange) -> None:
    store(exchange, 1, 2)
    assert lookup(exchange, 1, 2) == [True, True]
    with exchange.holds.reading(1) as place:
        assert place is not None
        location = place.found._places[place.index][1]
        assert location is not None
        exchange._vault.link.run(lambda session: flip(session, location.extent.end - 1))
    assert load(exchange, 1, 2)[0] == [False, True]
    exchange.unlock([1, 2])
    assert lookup(exchange, 1, 2) == [False, True]
    assert count(exchange, "objects_corrupt") == 1


def flip(session: Session, offset: int) -> None:
    session.arena[offset] ^= 1


def test_locks_that_nobody_gives_back_are_given_up(service: Service) -> None:
    now_s = [1000.0]
    options = make_options(f"unix:{service.addresses.socket}", lookup_deadline_s=1e6)
    exchange = Exchange(Vault.connect(options, Owner.of(options, WHERE), "tests"), options, clock=lambda: now_s[0])
    store(exchange, 1)
    assert lookup(exchange, 1) == [True]
    now_s[0] += options.lock_s - 1
    exchange._reap()
    assert count(exchange, "locks") == 1
    now_s[0] += 1
    exchange._reap()
    assert (count(exchange, "locks"), count(exchange, "locks_reaped"), leases(exchange)) == (0, 1, 0)
    exchange.close()


def test_a_lookup_is_answered_by_its_deadline_and_what_comes_later_is_let_go(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, find = threading.Event(), Vault.find

    def slow(vault: Vault, wanted: Sequence[Named]) -> list[Place | None]:
        assert may_go_on.wait(ANSWER_TIMEOUT_S)
        return find(vault, wanted)

    with connected(service, lookup_deadline_s=0.05) as exchange:
        store(exchange, 1)
        monkeypatch.setattr(Vault, "find", slow)
        assert lookup(exchange, 1) == [False]
        may_go_on.set()
        assert leases(exchange) == count(exchange, "locks") == 0
        assert count(exchange, "lookups_late") == 1


def test_behind_an_open_breaker_lookups_are_answered_at_once_and_one_finds_out(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()

    def stuck(vault: Vault, wanted: Sequence[Named]) -> list[Place | None]:
        assert may_go_on.wait(ANSWER_TIMEOUT_S)
        return [None] * len(wanted)

    pause_s, now_s = 5.0, [0.0]
    options = make_options(f"unix:{service.addresses.socket}", breaker_failures_max=1, lookup_deadline_s=0.05)
    breaker = Breaker(lambda: now_s[0], failures_max=1, pause_s=pause_s)
    vault = Vault.connect(options, Owner.of(options, WHERE), "tests")
    vault.link.breaker = breaker
    exchange = Exchange(vault, options)
    store(exchange, 1)
    with monkeypatch.context() as patched:
        patched.setattr(Vault, "find", stuck)
        assert lookup(exchange, 1) == [False]
        assert is_open(breaker)
        assert lookup(exchange, 1) == [False], "though the thread is stuck"
        may_go_on.set()
        exchange._lookups.submit(int).result(ANSWER_TIMEOUT_S)
    assert lookup(exchange, 1) == [False]
    assert count(exchange, "lookups_failed") == 2
    now_s[0] += pause_s
    assert lookup(exchange, 1) == [False], "this one has the service asked"
    exchange._lookups.submit(int).result(ANSWER_TIMEOUT_S)
    assert not is_open(breaker)
    exchange.close()


def test_a_load_after_its_deadline_is_not_begun(service: Service) -> None:
    now_s = [0.0]
    options = make_options(f"unix:{service.addresses.socket}", lookup_deadline_s=1e6)
    exchange = Exchange(Vault.connect(options, Owner.of(options, WHERE), "tests"), options, clock=lambda: now_s[0])
    store(exchange, 1)
    lookup(exchange, 1)
    blocked = threading.Event()
    for _ in range(options.load_threads):
        exchange._loads.submit(blocked.wait)

    def begin(done: object) -> None:
        exchange.load([(1, bytearray(SIZE))], done)  # type: ignore[arg-type]
        now_s[0] += options.load_deadline_s
        blocked.set()

    assert answer_of(begin) == [False]
    assert count(exchange, "loads_late") == 1
    exchange.close()


def test_a_service_that_is_away_is_an_answer_and_is_found_again_when_it_is_back(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    exchange = make_exchange(f"unix:{tmp_path}/kv.sock", breaker_pause_s=0.01, breaker_failures_max=2)
    assert lookup(exchange, 1) == [False]
    assert isinstance(store(exchange, 1)[0], UnavailableError)
    with Service(settings):
        while store(exchange, 1) != [None]:  # the breaker's pause is 10 ms
            threading.Event().wait(0.01)
        assert lookup(exchange, 1) == [True]
    loaded, read = load(exchange, 1)  # the mapping is there still, and the bytes are checked
    assert (loaded, read) in (([False], [bytes(SIZE)]), ([True], [content(1)]))
    exchange.unlock([1])
    assert lookup(exchange, 1) == [False]
    assert count(exchange, "lookups_failed") >= 2
    exchange.close()


def test_more_than_may_wait_is_answered_at_once(service: Service) -> None:
    with connected(service, waiting_max=1) as exchange:
        blocked, running = threading.Event(), threading.Event()

        def prepare() -> Sequence[Named]:
            running.set()
            assert blocked.wait(ANSWER_TIMEOUT_S)
            return named(b"1")()

        answers: list[list[Stored]] = []
        exchange.store(prepare, [content(1)], answers.append)
        assert running.wait(ANSWER_TIMEOUT_S)
        assert isinstance(store(exchange, 2)[0], UnavailableError)
        assert lookup(exchange, 1) == [False]
        assert count(exchange, "tasks_refused") == 2
        blocked.set()


def test_closing_answers_what_waits(service: Service) -> None:
    exchange = make_exchange(f"unix:{service.addresses.socket}")
    blocked, answers = threading.Event(), list[list[Stored]]()
    exchange._stores.submit(blocked.wait)
    exchange.store(named(b"1"), [content(1)], answers.append)
    closer = threading.Thread(target=exchange.close)
    closer.start()
    while not answers:
        threading.Event().wait(0.01)
    blocked.set()
    closer.join(ANSWER_TIMEOUT_S)
    assert isinstance(answers[0][0].error, UnavailableError)
    assert isinstance(store(exchange, 1)[0], UnavailableError)
    assert lookup(exchange, 1) == load(exchange, 1)[0] == [False]
    exchange.unlock([1])


def test_an_error_nobody_expected_is_an_answer(exchange: Exchange, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Sequence[Named]:
        raise RuntimeError("planted by the test")

    assert answer_of(lambda done: exchange.lookup([1], broken, done)) == [False]
    assert isinstance(answer_of(lambda done: exchange.store(broken, [b""], done))[0].error, UnavailableError)
    assert answer_of(lambda done: exchange.delete(broken, done)) is False
    assert count(exchange, "hook_errors") == 3
    assert "planted by the test" in caplog.text


def test_a_chunk_that_finds_no_room_is_refused_by_itself(exchange: Exchange) -> None:
    large = make_kind(1 << 24)

    def prepare() -> Sequence[Named]:
        return [Named(large, b"huge"), Named(make_kind(), b"1")]

    huge, small = answer_of(lambda done: exchange.store(prepare, [bytes(1 << 24), content(1)], done))
    assert isinstance(huge.error, CapacityError)
    assert small == Stored()
    assert (count(exchange, "objects_refused"), count(exchange, "objects_stored")) == (1, 1)


def test_eight_bits_without_scales_are_not_kept_and_not_looked_for(
    exchange: Exchange, caplog: pytest.LogCaptureFixture
) -> None:
    kind = make_kind(layout=(("float8_e4m3fn", (SIZE,)),))
    keys = named(b"1", kind=kind)
    (refused,) = answer_of(lambda done: exchange.store(keys, [content(1)], done))
    assert "kv_scales" in str(refused.error)
    for _ in range(2):
        assert answer_of(lambda done: exchange.lookup([1], keys, done)) == [False]
    assert caplog.text.count("no chunks of org/model") == 1


def test_what_is_deleted_is_not_found(exchange: Exchange) -> None:
    store(exchange, 1, 2)
    assert answer_of(lambda done: exchange.delete(named(b"1", b"3"), done)) is True
    assert lookup(exchange, 1, 2) == [False, True]
    assert count(exchange, "objects_deleted") == 1


def test_the_services_room_is_asked_for_on_another_thread(exchange: Exchange) -> None:
    store(exchange, 1)
    assert exchange.room().capacity_bytes == 0
    assert answer_of(exchange.ping) is True
    room = exchange.room()
    assert 0 < room.used_bytes < room.capacity_bytes
