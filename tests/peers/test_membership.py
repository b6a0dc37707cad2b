"""A membership follows its source: changes are told, failures are named, and it ends without leaving tasks."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

import pytest

from kvservice.model.errors import ConfigError, UnavailableError
from kvservice.peers.directory import Change, Directory
from kvservice.peers.member import MemberState, Roll, SourceState
from kvservice.peers.membership import Membership
from kvservice.peers.static import StaticSource
from tests.peers.members import EMPTY, LIMITS, UNREACHABLE, ManualClock, facts, node_id, place, roll


class ScriptedSource:
    """Rolls that a test hands in; an exception is raised to who watches."""

    name = "scripted"

    def __init__(self, first: Roll | Exception, *, knows_liveness: bool = True) -> None:
        self.knows_liveness = knows_liveness
        self.first = first
        self.script: asyncio.Queue[Roll | Exception] = asyncio.Queue()
        self.watched = self.closed = 0

    async def members(self) -> Roll:
        if isinstance(self.first, Exception):
            raise self.first
        return self.first

    async def watch(self) -> AsyncGenerator[Roll]:
        self.watched += 1
        while True:
            found = await self.script.get()
            if isinstance(found, Exception):
                raise found
            yield found

    async def close(self) -> None:
        self.closed += 1


class World:
    def __init__(self, source: ScriptedSource) -> None:
        self.source, self.clock = source, ManualClock()
        self.changes: list[Change] = []
        self.directory = Directory(self.clock, knows_liveness=source.knows_liveness, limits=LIMITS)
        self.membership = Membership(source, self.directory, self.changes.append, tick_s=0.01, draw=lambda: 0.0)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not holds():  # noqa: ASYNC110  what others do is looked at from outside
                await asyncio.sleep(0.002)


async def test_every_change_is_told_and_time_passes_by_itself() -> None:
    world = World(ScriptedSource(roll(facts(1))))
    await world.membership.start()
    assert [one.after for one in world.changes] == [MemberState.LIVE]
    await world.source.script.put(roll(facts(1), facts(2)))
    await world.until(lambda: len(world.changes) == 2)
    await world.source.script.put(roll(facts(1)))
    await world.until(lambda: len(world.changes) == 3)
    world.clock.pass_(LIMITS.grace_s)
    await world.until(lambda: world.changes[-1].after is MemberState.LEFT)
    await world.membership.stop()
    await world.membership.stop()
    assert len(asyncio.all_tasks()) == 1


async def test_a_source_that_breaks_is_named_watched_anew_and_forgets_nobody(caplog: pytest.LogCaptureFixture) -> None:
    world = World(ScriptedSource(roll(facts(1))))
    await world.membership.start()
    await world.source.script.put(UnavailableError("the cable was pulled"))
    await world.until(lambda: world.directory.source_state is SourceState.UNREACHABLE)
    assert "members from scripted: unreachable (the cable was pulled)" in caplog.text
    await world.until(lambda: world.source.watched == 2)
    await world.source.script.put(roll(facts(1), facts(2)))
    await world.until(lambda: world.directory.source_state is SourceState.LISTED)
    assert [one.name for one in world.directory.members] == ["n1", "n2"]
    await world.membership.stop()


@pytest.mark.parametrize(("first", "state"), [(EMPTY, SourceState.EMPTY), (UNREACHABLE, SourceState.UNREACHABLE)])
async def test_a_start_without_an_answer_is_no_error_and_says_why(
    first: Roll, state: SourceState, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(ScriptedSource(first))
    await world.membership.start()
    assert world.directory.source_state is state
    assert first.reason in caplog.text
    await world.source.script.put(first)
    await world.source.script.put(roll(facts(1)))
    await world.until(lambda: bool(world.changes))
    await world.membership.stop()
    assert [one.levelname for one in caplog.records].count("WARNING") == 1


async def test_a_start_that_no_waiting_mends_is_an_error() -> None:
    world = World(ScriptedSource(ConfigError("user refused")))
    with pytest.raises(ConfigError, match="user refused"):
        await world.membership.start()
    await world.membership.stop()
    assert world.source.closed == 1


async def test_greetings_are_told_and_refusals_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world = World(ScriptedSource(roll(1, 2), knows_liveness=False))
    await world.membership.start()
    world.membership.heard(place(1), facts(1))
    with pytest.raises(ConfigError, match="same uuid"):
        world.membership.heard(place(2), facts(1, epoch=2))
    world.membership.lost(node_id(1))
    assert [one.after for one in world.changes] == [MemberState.LIVE, MemberState.DISCONNECTED]
    assert "member n1 at 127.0.0.1:7001: live -> disconnected" in caplog.text
    await world.source.script.put(roll(facts(3), facts(3, epoch=0)))
    await world.source.script.put(roll(facts(3), facts(3, epoch=0)))
    await world.until(lambda: world.source.script.empty())
    await world.membership.stop()
    assert caplog.text.count("refused: node") == 1


async def test_a_static_list_is_followed_without_end() -> None:
    clock, changes = ManualClock(), list[Change]()
    directory = Directory(clock, knows_liveness=False)
    membership = Membership(StaticSource([place(1)]), directory, changes.append)
    await membership.start()
    assert directory.to_greet() == [place(1)]
    membership.heard(place(1), facts(1))
    assert len(changes) == 1
    await membership.stop()
