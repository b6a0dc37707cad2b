"""Engines at a service that asks who they are: let in by a token or a certificate, shut out in mid-run, back again."""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvservice.client.connectors.breaker import BreakerState
from kvservice.client.connectors.vllm_tier.lookups import Verdict
from tests.access.certificates import Authority
from tests.access.files import section
from tests.access.guarded import Guarded, guarded
from tests.connectors.lmcache.builders import ANSWER_TIMEOUT_S, answer_of, make_exchange, named
from tests.connectors.mini_engine import FakePaged, MiniEngine, Sides, engine_identity, requests
from tests.connectors.vllm_tier.tier_world import World, make_key

BLOCKS = 64
MODELS = itertools.count()
OLD, NEW = "the old token", "the new token"
TRIES_MAX = 1000


def rules(token: str = OLD, **more: str) -> str:
    """An access file that lets one engine in."""
    return section("engine", '"test"', token=token, **more)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Guarded]:
    with guarded(tmp_path, access=rules()) as world:
        yield world


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(OLD)
    return path


def secured(world: Guarded, token: Path) -> dict[str, Any]:
    """The options of a door to it."""
    return {"address": world.grpc, "token": f"file:{token}", "tls_ca": str(world.authority.cert)}


class Engine:
    """A mini engine that is asked the same again and again."""

    def __init__(self, options: dict[str, Any], model: str) -> None:
        paged = FakePaged(BLOCKS)
        identity = engine_identity(model)
        self.sides = Sides(options.pop("address"), paged, identity=identity, **options)
        self._engine = MiniEngine(self.sides, paged, blocks=BLOCKS)
        self._rounds = itertools.count()

    def ask(self) -> float:
        """Run some requests; every row of them is checked. How many tokens were loaded for them."""
        before = self.sides.counts.total("tokens_loaded")
        for request in requests(2, tokens=30, shared=16, prefix=f"{next(self._rounds)}-"):
            self._engine.add(request)
        self._engine.run()
        return self.sides.counts.total("tokens_loaded") - before

    def ask_until(self, condition: Callable[[float], bool]) -> None:
        """Go on asking until it is so of what was loaded."""
        for _ in range(TRIES_MAX):
            if condition(self.ask()):
                return
            threading.Event().wait(0.005)
        raise AssertionError("it did not come to that")

    def close(self) -> None:
        self.sides.close()
        assert self.sides.counts.total("hook_errors") == 0


@pytest.fixture
def make_engine() -> Iterator[Callable[[dict[str, Any]], Engine]]:
    """Makes engines of one model."""
    made: list[Engine] = []
    model = f"secured {next(MODELS)}"

    def make(options: dict[str, Any]) -> Engine:
        made.append(Engine(options, model))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


MakeEngine = Callable[[dict[str, Any]], Engine]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of the connector."""
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING and "kvservice" in one.name]


def test_an_engine_with_a_token_stores_and_another_loads(
    world: Guarded, token: Path, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (make_engine(secured(world, token)) for _ in range(2))
    first.ask()
    assert first.sides.counts.total("chunks_saved") > 0
    assert second.ask() > 0
    assert told(caplog) == []


def test_a_certificate_says_who_an_engine_is(tmp_path: Path, make_engine: MakeEngine) -> None:
    callers = Authority(tmp_path / "callers")
    own = callers.issue("engine.example", is_client=True)
    access = rules(more='certificates = ["engine.example"]')
    with guarded(tmp_path, access=access, tls_client_ca=str(callers.cert)) as world:
        shown = {"client_cert": str(own.cert), "client_key": str(own.key)}
        engine = make_engine({"address": world.grpc, "tls_ca": str(world.authority.cert), **shown})
        engine.ask()
        assert engine.ask() > 0


@pytest.mark.parametrize(
    ("after", "says"),
    [
        (rules(NEW), "not a caller that this node knows"),
        (rules(expires="2020-01-01T00:00:00Z"), "has expired"),
        (section("engine", '"other"', token=OLD), "not tenant 'test'"),
    ],
    ids=["withdrawn", "expired", "another tenant's"],
)
def test_an_engine_that_is_shut_out_computes_says_so_once_and_comes_back(
    world: Guarded,
    token: Path,
    make_engine: MakeEngine,
    caplog: pytest.LogCaptureFixture,
    after: str,
    says: str,
) -> None:
    engine = make_engine(secured(world, token))
    engine.ask()
    assert engine.ask() > 0
    world.allow(after)
    engine.ask_until(lambda loaded: engine.sides.breaker.state is BreakerState.OPEN)
    for _ in range(5):
        assert engine.ask() == 0
    (line,) = told(caplog)
    assert says in line
    assert "goes on without cache" in line
    assert (str(token) in line) == ("tenant" not in says)
    token.write_text(NEW)
    world.allow(rules(NEW))
    engine.ask_until(lambda loaded: loaded > 0)
    assert [world.grpc in one and "again" in one for one in told(caplog)[1:]] == [True]
    assert not [one for one in caplog.messages if OLD in one or NEW in one]


def test_a_token_is_exchanged_under_a_running_engine(
    world: Guarded, token: Path, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(secured(world, token))
    engine.ask()
    token.write_text(NEW)
    world.allow(rules(NEW))
    engine.ask_until(lambda loaded: loaded > 0)
    assert told(caplog) == []


def test_a_token_file_that_goes_in_mid_run_costs_the_cache_only(
    world: Guarded, token: Path, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(secured(world, token))
    engine.ask()
    token.unlink()
    world.allow(rules(NEW))  # ends the session
    engine.ask_until(lambda loaded: engine.sides.breaker.state is BreakerState.OPEN)
    (line,) = told(caplog)
    assert f"cannot read {token}" in line
    token.write_text(NEW)
    engine.ask_until(lambda loaded: loaded > 0)


def test_a_service_of_another_authority_is_not_believed_and_the_log_says_why(
    world: Guarded, token: Path, tmp_path: Path, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    other = Authority(tmp_path / "other")
    engine = make_engine({**secured(world, token), "tls_ca": str(other.cert)})
    assert engine.ask() == 0
    (line,) = told(caplog)
    assert "CERTIFICATE_VERIFY_FAILED" in line


def test_without_a_token_an_engine_computes_and_the_log_says_why(
    world: Guarded, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine({"address": world.grpc, "tls_ca": str(world.authority.cert)})
    assert engine.ask() == 0
    (line,) = told(caplog)
    assert "give a token of its access file" in line


def test_the_tier_shows_the_token_too_and_comes_back(
    world: Guarded, token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [make_key(number) for number in range(3)]
    options = secured(world, token)
    tier = World(options.pop("address"), "test", breaker_pause_s=0.02, **options)
    try:
        assert tier.store(keys).is_good
        assert tier.answers(keys) == [Verdict.HIT] * 3
        assert tier.load(keys).is_good
        world.allow(rules(NEW))
        assert tier.answers(keys, request="another") == [Verdict.MISS] * 3
        assert not tier.store(keys).is_good
        (line,) = told(caplog)
        assert "not a caller that this node knows" in line
        token.write_text(NEW)
        tries = (tier.answers(keys, request=f"try {number}") for number in range(TRIES_MAX))
        assert [Verdict.HIT] * 3 in tries
        assert tier.total("hook_errors") == 0
    finally:
        tier.side.close()


def test_the_doors_to_lmcache_show_the_token_too_and_come_back(
    world: Guarded, token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = secured(world, token)
    exchange = make_exchange(
        options.pop("address"), tenant="test", breaker_pause_s=0.02, breaker_slow_s=ANSWER_TIMEOUT_S, **options
    )

    def lookup() -> list[bool]:
        found: list[bool] = answer_of(lambda done: exchange.lookup([1], named(b"1"), done))
        exchange.unlock([1])
        return found

    try:
        (stored,) = answer_of(lambda done: exchange.store(named(b"1"), [bytes(256)], done))
        assert stored.error is None
        assert lookup() == [True]
        world.allow(rules(NEW))
        assert lookup() == [False]
        (line,) = told(caplog)
        assert "not a caller that this node knows" in line
        token.write_text(NEW)
        assert [True] in (lookup() for _ in range(TRIES_MAX))
        assert exchange.status()["hook_errors"] == 0
    finally:
        exchange.close()
