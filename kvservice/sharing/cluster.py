"""The shared nodes as a directory of places: who owns a segment, over which links, and cold storage behind all of them.

Knows addresses from a source of members, and who answers there from greetings. This node may be one of the members: it
is never linked to itself, and what it owns it gives to cold storage and, once it is hot, to the next owners.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from kvservice.model.errors import ConfigError, KVServiceError
from kvservice.model.segment import SegmentId
from kvservice.peers.directory import Change, Directory, Member
from kvservice.peers.member import Address, Facts, FlightAddress, MemberState
from kvservice.peers.membership import Membership, MemberSource
from kvservice.peers.routes import Router
from kvservice.peers.routes_log import Medium
from kvservice.sharing.place import HOT_USES, Carrier, Place
from kvservice.sharing.routed import RoutedPlace

KNOCK_S = 0.25
"""How often addresses are looked through for some that nobody answers at."""
ASK_S = 2.0
"""How often every peer is asked what it says of itself: that it drains, or that it is not there any more."""
WITHOUT_S = 30.0
"""An address to which no link could be made is tried again after so long: a file may be back."""
OnChange = Callable[[Facts | None], None]


class Link(Carrier, Protocol):
    """A carrier that knows whether its peer is there. It tells OnChange what the peer says of itself, None: it is lost.

    Once it is lost it knocks by itself.
    """

    @property
    def is_answering(self) -> bool:
        """Is it worth asking, as far as is known?"""

    async def ping(self) -> float:
        """Seconds of a round trip; also learns what the peer says of itself now."""


class DoubtfulLink(Link, Protocol):
    """A second link to a peer."""

    def doubt(self) -> None:
        """The peer is lost over the first one."""


OpenLink = Callable[[Address, OnChange], Link]
OpenFlight = Callable[[FlightAddress, OnChange], DoubtfulLink]
_LOG = logging.getLogger(__name__)


class Cluster:
    """See ``kvservice.sharing.place.Directory``. Lives on the loop that starts it.

    ``open_link(address, on_change)`` makes a link of streams, ``open_flight`` one of Arrow Flight: for addresses that
    say so, and as a second way to nodes that say they have such a port. None: it is not used. ``own``: what this node
    says of itself. ``is_self``: does an address lead here? ``cold``: storage behind all nodes.
    """

    def __init__(
        self,
        source: MemberSource,
        directory: Directory,
        open_link: OpenLink,
        own: Callable[[], Facts],
        is_self: Callable[[Address], bool],
        router: Router,
        cold: Place | None = None,
        clock: Callable[[], float] = time.monotonic,
        open_flight: OpenFlight | None = None,
    ) -> None:
        self.directory = directory
        self.links: dict[Address, Link] = {}
        self.flights: dict[Address, tuple[FlightAddress, DoubtfulLink]] = {}
        """Second ways, by the address of the first one."""
        self.places: dict[Address, RoutedPlace] = {}
        self.cold = cold
        self._membership = Membership(source, directory, self._note_change)
        self._open_link, self._open_flight = open_link, open_flight
        self._own = own
        self._is_self = is_self
        self._router = router
        self._clock = clock
        self._pings: dict[Address, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_live: Callable[[], None] = _nothing
        """Told when a member is live that was not."""
        self.on_emptied: Callable[[str], None] = _nothing_of
        """Told the name of a place that may hold less than before: its node booted again, or left."""
        self._without: dict[Address, float] = {}
        self._flight_pings: set[DoubtfulLink] = set()
        self._knocking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Ask who is there, greet them and go on so. That nobody answers is no error."""
        await self._membership.start()
        self._knocking = asyncio.create_task(self._knock_forever())

    async def stop(self) -> None:
        """Stop following; links are closed with the places (``everywhere``). Safe to call twice."""
        tasks = [task for task in (self._knocking, *self._pings.values(), *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._membership.stop()

    # Who has what

    def sources(self, segment: SegmentId) -> list[Place]:
        """See Directory: owners, then cold storage."""
        return [*self._places(self.directory.owners(segment).read), *self.behind(segment)]

    def behind(self, _: SegmentId) -> list[Place]:
        """See Directory."""
        return [] if self.cold is None else [self.cold]

    def storages(self) -> list[Place]:
        """See Directory."""
        return [] if self.cold is None else [self.cold]

    def homes(self, segment: SegmentId, uses: int) -> list[Place]:
        """See Directory: the owner; of the owner's own the next owners, for what is hot, and cold storage."""
        write = self.directory.owners(segment).write
        if not write:
            return []
        if not self._is_us(write[0]):
            return self._places(write[:1])
        replicas: Sequence[Place] = self._places(write[1:]) if uses >= HOT_USES else ()
        return [*replicas, *self.behind(segment)]

    def everywhere(self) -> list[Place]:
        """See Directory. Members that are not there now are told too, in vain."""
        return [*self.places.values(), *(() if self.cold is None else (self.cold,))]

    def _places(self, members: Sequence[Member]) -> list[Place]:
        found = (self.places.get(member.address) for member in members if not self._is_us(member))
        return [place for place in found if place is not None]

    def _is_us(self, member: Member) -> bool:
        return member.node.uuid == self._own().node.uuid

    # Who is there

    def tell_own(self) -> None:
        """What this node says of itself has changed."""
        uuid = self._own().node.uuid
        for address in [one.address for one in self.directory.members if one.node.uuid == uuid]:
            self._hear(address, self._own())

    async def _knock_forever(self) -> None:
        asked_s = -math.inf
        while True:
            is_due = self._clock() >= asked_s + ASK_S
            if is_due:
                asked_s = self._clock()
            unlinked = [one.address for one in self.directory.members if one.address not in self.links]
            self._knock(list(dict.fromkeys([*self.directory.to_greet(), *unlinked, *(self.links if is_due else ())])))
            await asyncio.sleep(KNOCK_S)

    def _knock(self, addresses: Sequence[Address]) -> None:
        for address in addresses:
            if self._is_self(address):
                self._hear(address, self._own())
                continue
            link = self._link(address)
            if link is None:
                continue
            if link.is_answering and address not in self._pings:  # a lost one knocks by itself
                self._pings[address] = asyncio.create_task(self._ping(address, link))
            _, flight = self.flights.get(address, (None, None))
            if flight is not None and flight.is_answering and flight not in self._flight_pings:
                self._flight_pings.add(flight)
                self._do(self._ping_flight(flight))

    def _link(self, address: Address) -> Link | None:
        """The first link there; None: this node can make none, for want of pyarrow."""
        link = self.links.get(address)
        if link is None and not self._is_without(address):
            try:
                link = self._open(address)
            except ConfigError as error:
                self._note_without(address, error)
        return link

    def _is_without(self, address: Address) -> bool:
        return self._without.get(address, -math.inf) > self._clock() - WITHOUT_S

    def _note_without(self, address: Address, error: ConfigError) -> None:
        self._without = {one: since_s for one, since_s in self._without.items() if self._is_without(one)}
        self._without[address] = self._clock()
        _LOG.warning("%s is not used: %s", address, error)

    def _open(self, address: Address) -> Link:
        link: Link
        tell = partial(self._tell, address)
        if not isinstance(address, FlightAddress):
            medium, link = Medium.STREAM, self._open_link(address, tell)
        elif self._open_flight is not None:
            medium, link = Medium.FLIGHT, self._open_flight(address, tell)
        else:
            raise ConfigError(f"{address} is an address of Arrow Flight, which this node does not use")
        self.links[address] = link
        self.places[address] = RoutedPlace(self._router, {medium: link})
        return link

    async def _ping(self, address: Address, link: Link) -> None:
        try:
            await link.ping()
        except KVServiceError as error:
            _LOG.info("%s does not answer yet: %s", link.name, error)
            await asyncio.sleep(KNOCK_S)
        finally:
            self._pings.pop(address, None)

    def _tell(self, address: Address, facts: Facts | None) -> None:
        """What the first link hears of its peer."""
        if facts is not None:
            self._hear(address, facts)
            self._use_flight(address, facts.flight_port)
            return
        _, flight = self.flights.get(address, (None, None))
        if flight is None or not flight.is_answering:
            self._lose(address)
        else:
            flight.doubt()
            self._do(self._look(address, flight))

    def _tell_flight(self, address: Address, facts: Facts | None) -> None:
        """What the second one hears."""
        link = self.links.get(address)
        if facts is not None:
            self._hear(address, facts)
        elif link is not None and not link.is_answering:
            self._lose(address)

    def _use_flight(self, address: Address, port: int) -> None:
        """The node there says that it speaks Arrow Flight at this port of the same host; 0: not any more."""
        known, flight = self.flights.get(address, (None, None))
        there = FlightAddress(address.host, port) if port else None
        is_off = self._open_flight is None or isinstance(address, FlightAddress)
        is_off = is_off or (there is not None and self._is_without(there))
        if self._open_flight is None or is_off or there == known or address not in self.places:
            return
        if flight is not None:
            del self.flights[address]
            self.places[address].ways.pop(Medium.FLIGHT, None)
            self._do(flight.close())
        if there is not None:
            try:
                link = self._open_flight(there, partial(self._tell_flight, address))
            except ConfigError as error:
                self._note_without(there, error)
                return
            self.flights[address] = there, link
            self.places[address].add_way(Medium.FLIGHT, link)

    async def _look(self, address: Address, flight: DoubtfulLink) -> None:
        """Is who was lost over its stream still there?"""
        try:
            await flight.ping()
        except KVServiceError as error:
            _LOG.info("%s does not answer either: %s", flight.name, error)
            self._lose(address)

    async def _ping_flight(self, flight: DoubtfulLink) -> None:
        try:
            await flight.ping()
        except KVServiceError as error:
            _LOG.info("%s does not answer: %s", flight.name, error)
        finally:
            self._flight_pings.discard(flight)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _lose(self, address: Address) -> None:
        for member in self.directory.members:
            if member.address == address:
                self._membership.lost(member.node)

    def _hear(self, address: Address, facts: Facts) -> None:
        try:
            self._membership.heard(address, facts)
        except ConfigError as error:  # a twin; the directory remembers why and says so
            _LOG.warning("the node at %s is not used: %s", address, error)
        except KVServiceError as error:
            _LOG.warning("the node at %s is not used for now: %s", address, error)

    def _note_change(self, change: Change) -> None:
        member, place = change.member, self.places.get(change.member.address)
        if place is not None and (change.has_rebooted or change.after is MemberState.LEFT):
            self.on_emptied(place.name)
        if change.after is not MemberState.LEFT:
            if not self._is_us(member):
                self._link(member.address)
                self._use_flight(member.address, member.flight_port)
            if change.after is MemberState.LIVE:
                self.on_live()
        elif all(one.address != member.address for one in self.directory.members):
            self._unlink(member)

    def _unlink(self, member: Member) -> None:
        """Nobody else is known at its address."""
        self.links.pop(member.address, None)
        self.flights.pop(member.address, None)
        place = self.places.pop(member.address, None)
        if place is not None:
            task = asyncio.ensure_future(place.close())
            task.add_done_callback(_ignore)


def _nothing() -> None:
    return


def _nothing_of(_: str) -> None:
    return


def _ignore(task: "asyncio.Future[None]") -> None:
    with suppress(asyncio.CancelledError):
        task.exception()


class Alone:
    """A directory without nodes: cold storage only."""

    def __init__(self, cold: Place) -> None:
        self.cold = cold

    def sources(self, _: SegmentId) -> list[Place]:
        """See Directory."""
        return [self.cold]

    def behind(self, _: SegmentId) -> list[Place]:
        """See Directory."""
        return [self.cold]

    def storages(self) -> list[Place]:
        """See Directory."""
        return [self.cold]

    def homes(self, _: SegmentId, __: int) -> list[Place]:
        """See Directory."""
        return [self.cold]

    def everywhere(self) -> list[Place]:
        """See Directory."""
        return [self.cold]
