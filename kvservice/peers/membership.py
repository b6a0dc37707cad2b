"""Membership: keeps a directory by a source of members, on the event loop. Sources: static.py, dns.py, etcd.py."""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from kvservice.model.errors import KVServiceError
from kvservice.peers.backoff import Backoff
from kvservice.peers.directory import Change, Directory
from kvservice.peers.member import Address, Facts, MemberState, NodeId, Roll, SourceState

TICK_S = 0.5

log = logging.getLogger(__name__)


class MemberSource(Protocol):
    """Says who is a member. ``knows_liveness``: who is listed lives, and who is not, does not."""

    @property
    def name(self) -> str:
        """One word, for messages and metrics."""

    @property
    def knows_liveness(self) -> bool:
        """See the class."""

    async def members(self) -> Roll:
        """Who is listed now. That nobody answers is a roll too; raises ConfigError for what no waiting mends."""

    def watch(self) -> AsyncGenerator[Roll]:
        """A whole roll now, and one after every change, without end. Raises KVServiceError for what it cannot mend."""

    async def close(self) -> None:
        """End what is open. Safe to call twice."""


class Membership:
    """A source and the directory that follows it. Lives on the loop that starts it.

    ``on_change`` hears of every change, on the loop; it must not raise. ``tick_s``: how often time alone is looked at.
    """

    def __init__(
        self,
        source: MemberSource,
        directory: Directory,
        on_change: Callable[[Change], None],
        *,
        tick_s: float = TICK_S,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.directory = directory
        self._source = source
        self._on_change = on_change
        self._tick_s = tick_s
        self._backoff = Backoff(draw)
        self._tasks: list[asyncio.Task[None]] = []
        self._said = SourceState.STARTING

    async def start(self) -> None:
        """Ask the source once, then follow it in the background. Raises ConfigError; that it is away is no error."""
        assert not self._tasks, "a membership is started once"
        self._apply(await self._source.members())
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._tick())]

    async def stop(self) -> None:
        """Stop following and close the source. Safe to call twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self._source.close()

    def heard(self, address: Address, facts: Facts) -> None:
        """See Directory.heard."""
        self._tell(self.directory.heard(address, facts))

    def lost(self, node: NodeId) -> None:
        """See Directory.lost."""
        self._tell(self.directory.lost(node))

    async def _follow(self) -> None:
        while True:
            try:
                async with aclosing(self._source.watch()) as rolls:
                    async for roll in rolls:
                        self._apply(roll)
                        self._backoff.reset()
            except KVServiceError as error:
                self._apply(Roll(SourceState.UNREACHABLE, reason=str(error)))
            await asyncio.sleep(self._backoff.next_s())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            self._tell(self.directory.advance())

    def _apply(self, roll: Roll) -> None:
        before = set(self.directory.refused.items())
        self._tell(self.directory.apply(roll))
        if roll.state is not self._said:
            self._said = roll.state
            is_good = roll.state is SourceState.LISTED
            log.log(
                logging.INFO if is_good else logging.WARNING,
                "members from %s: %s%s",
                self._source.name,
                roll.state,
                f" ({roll.reason}); the last known ones stay for a while" if roll.reason else "",
            )
        for address, reason in set(self.directory.refused.items()) - before:
            log.warning("member at %s refused: %s", address, reason)

    def _tell(self, changes: list[Change]) -> None:
        for change in changes:
            level = logging.WARNING if change.after is MemberState.DISCONNECTED else logging.INFO
            log.log(level, "member %s: %s", change.member, _text(change))
            self._on_change(change)


def _text(change: Change) -> str:
    if change.has_rebooted:
        return f"booted again, epoch {change.member.node.epoch}"
    return f"{change.before or 'new'} -> {change.after}"
