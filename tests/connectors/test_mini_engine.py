"""Both sides together in an engine with vLLM's protocol that checks every row: seeded, with everything going wrong."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvservice.app import Service
from kvservice.client.connectors.breaker import BreakerState
from kvservice.storage.record_header import MAGIC
from tests.client.builders import make_settings
from tests.connectors.mini_engine import FakePaged, FakeRequest, MiniEngine, Sides, engine_identity, requests

BLOCKS = 64
MODELS = itertools.count()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One for all tests: each is another model."""
    with Service(make_settings(tmp_path_factory.mktemp("service"))) as service:
        yield service


@pytest.fixture
def model() -> str:
    return f"model {next(MODELS)}"


def address_of(service: Service) -> str:
    return f"unix:{service.addresses.socket}"


def run_all(
    service: Service, model: str, asked: list[FakeRequest], *, blocks: int = BLOCKS, seed: int = 0, **options: Any
) -> Sides:
    """A new engine runs the requests, and ends."""
    paged = FakePaged(blocks, seed)
    sides = Sides(address_of(service), paged, identity=engine_identity(model), **options)
    engine = MiniEngine(sides, paged, blocks=blocks, seed=seed)
    for request in asked:
        engine.add(request)
    engine.run()
    close(sides)
    return sides


def close(sides: Sides) -> None:
    """Whatever happened, nothing is left behind."""
    assert sides.scheduler.leases_held == 0
    sides.close()
    assert sides.counts.total("hook_errors") == 0
    assert sides.saves.bytes_waiting == 0


@pytest.mark.parametrize("is_async", [True, False])
def test_a_second_engine_loads_what_the_first_computed(service: Service, model: str, is_async: bool) -> None:
    first = run_all(service, model, list(requests(3, tokens=30, shared=16)))
    assert first.counts.total("chunks_saved") == 2 + 3 * 3, "two shared, then one, the tail, and one with outputs"
    second = run_all(service, model, list(requests(3, tokens=30, shared=16)), seed=1, is_async=is_async)
    assert second.counts.total("tokens_loaded") == 3 * 28
    assert second.counts.total("loads_failed") == 0
    assert second.counts.total("chunks_saved") == 0


def test_what_was_said_is_found_in_the_next_turn(service: Service, model: str) -> None:
    first = FakeRequest("first", list(range(1, 21)), max_tokens=13)
    run_all(service, model, [first])
    second = FakeRequest("second", [*first.all_token_ids, *range(500, 510)])
    sides = run_all(service, model, [second])
    assert sides.counts.total("tokens_loaded") == 32


def test_another_salt_finds_nothing(service: Service, model: str) -> None:
    for salt, tokens in (("a", 0), ("b", 0), ("a", 28)):
        asked = FakeRequest("one", list(range(1, 31)), cache_salt=salt)
        assert run_all(service, model, [asked]).counts.total("tokens_loaded") == tokens


def test_after_a_reset_nothing_of_before_is_found(service: Service, model: str) -> None:
    paged = FakePaged(BLOCKS)
    sides = Sides(address_of(service), paged, identity=engine_identity(model))
    engine = MiniEngine(sides, paged, blocks=BLOCKS)
    run_round(engine, "a", shared=0)
    assert sides.scheduler.reset()
    sides.chains.reset()
    run_round(engine, "b", shared=0)
    assert sides.counts.total("tokens_loaded") == 0
    run_round(engine, "c", shared=0)
    assert sides.counts.total("tokens_loaded") > 0
    close(sides)


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_preemption_and_block_reuse_never_make_a_wrong_row(
    service: Service, model: str, seed: int, is_async: bool
) -> None:
    paged = FakePaged(24, seed)
    sides = Sides(address_of(service), paged, identity=engine_identity(model), is_async=is_async)
    engine = MiniEngine(sides, paged, blocks=24, seed=seed)
    for number in range(3):
        for request in requests(6, tokens=37, shared=20, seed=seed, prefix=f"{number}-"):
            request.max_tokens = 12
            engine.add(request)
        engine.run()
    assert engine.preemptions > 0
    assert sides.counts.total("tokens_loaded") > 0
    close(sides)


def damage(sides: Sides, engine: MiniEngine) -> None:
    """Turn a bit somewhere in a record of ours."""
    session = sides.saves._link._session
    if session is None:
        return
    places = range(0, len(session.arena), 4096)
    records = [at for at in places if session.arena[at : at + len(MAGIC)].tobytes() == MAGIC]
    ours = bytes(sides.identity.namespace())
    records = [at for at in records if ours in session.arena[at : at + 200].tobytes()]
    if records:
        at = engine.random.choice(records) + engine.random.randrange(300, 1500)
        session.arena[at] ^= 1 << engine.random.randrange(8)


def disturb(sides: Sides, engine: MiniEngine, *, is_damaging: bool) -> None:
    """Between two steps: users that leave, preemptions, wrong bytes."""
    dice = engine.random.random()
    everyone = [*engine.running, *engine.waiting, *engine.loading]
    if dice < 0.05 and everyone:
        chosen = engine.random.choice(everyone)
        if chosen.status != "aborted":
            engine.abort(chosen)
    elif dice < 0.15 and engine.running:
        engine.preempt(engine.random.choice(engine.running))
    elif dice < 0.4 and is_damaging:
        damage(sides, engine)


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_no_row_is_ever_wrong_whatever_happens(service: Service, model: str, seed: int, is_async: bool) -> None:
    paged = FakePaged(40, seed)
    sides = Sides(address_of(service), paged, identity=engine_identity(model), is_async=is_async)
    engine = MiniEngine(sides, paged, blocks=40, seed=seed)
    number = 0
    while number < 6 or (number < 60 and not sides.counts.total("loads_failed")):  # whether damage is read is chance
        for request in requests(5, tokens=41, shared=20, seed=seed, prefix=f"{number}-"):
            engine.add(request)
        while engine.waiting or engine.running or engine.loading:
            disturb(sides, engine, is_damaging=number > 0)
            if not engine.step():
                threading.Event().wait(0.0005)
        number += 1
    assert sides.counts.total("loads_failed") > 0, "the test has damaged nothing that was read"
    assert sides.counts.total("tokens_recomputed") > 0
    assert sides.counts.total("tokens_loaded") > 0
    close(sides)


@pytest.mark.parametrize("is_async", [True, False])
def test_the_service_may_go_and_come_at_any_time(tmp_path: Path, is_async: bool) -> None:
    settings = make_settings(tmp_path)
    paged = FakePaged(BLOCKS)
    sides = Sides(f"unix:{settings.socket}", paged, is_async=is_async, lookup_deadline_s=0.2)
    engine = MiniEngine(sides, paged, blocks=BLOCKS)
    with Service(settings):
        for name in ("a", "b"):
            run_round(engine, name)
            assert wait_for(lambda: sides.saves.bytes_waiting == 0)
        loaded = sides.counts.total("tokens_loaded")
        assert loaded > 0
        for request in requests(4, tokens=41, shared=20, prefix="c"):
            engine.add(request)
        for _ in range(5):
            engine.step()
    engine.run()  # it went away under way
    run_round(engine, "d")
    with Service(settings):
        assert wait_for(lambda: sides.breaker.state is BreakerState.CLOSED or probe(sides))
        before = sides.counts.total("tokens_loaded")
        run_round(engine, "e")
        assert wait_for(lambda: sides.saves.bytes_waiting == 0)
        run_round(engine, "f")
        assert sides.counts.total("tokens_loaded") > before
        close(sides)


def run_round(engine: MiniEngine, prefix: str, shared: int = 20) -> None:
    """Four requests; where they share a head, a later one may load what an earlier one has just stored."""
    for request in requests(4, tokens=41, shared=shared, prefix=prefix):
        engine.add(request)
    engine.run()


def probe(sides: Sides) -> bool:
    """The idle threads do this by themselves, once a second."""
    sides.lookups._link.probe()
    return sides.breaker.state is BreakerState.CLOSED


def wait_for(condition: Any) -> bool:
    """True once it holds; False if it does not within half a minute at least."""
    pause = threading.Event()
    return any(condition() or pause.wait(0.01) for _ in range(3000))
