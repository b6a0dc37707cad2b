"""The shared nodes as a directory of places: who owns a segment, over which links, and cold storage behind all of them.

Knows addresses from a source of members, and who answers there from greetings. This node may be one of the members: it
is never linked to itself, and what it owns it gives to cold storage and, once it is hot, to the next owners.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from kvservice.model.errors import ConfigError, KVServiceError
from kvservice.model.segment import SegmentId
from kvservice.peers.directory import Change, Directory, Member
from kvservice.peers.locality import local_address
from kvservice.peers.member import Address, Facts, FlightAddress, LocalAddress, MemberState
from kvservice.peers.membership import Membership, MemberSource
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

    def doubt(self) -> None:
        """The peer is lost over another one: it has less than a deadline to show that it is there."""


Where = Address | LocalAddress
OpenLink = Callable[[Any, OnChange], Link]
"""Makes a link to such an address. Raises ConfigError where this node can make none."""
MakePlace = Callable[[Medium, Link], RoutedPlace]


@dataclass(frozen=True, slots=True)
class FurtherWay:
    """Besides the first one to a node. Its place has it as long as it is answered."""

    where: Where
    link: Link


_LOG = logging.getLogger(__name__)


class Cluster:
    """See ``kvservice.sharing.place.Directory``. Lives on the loop that starts it.

    ``openers``: what makes links, by medium; one that is not there is not used. Streams and Arrow Flight lead to listed
    addresses. Further ways are Flight, to nodes that say they have such a port, and shared memory, to nodes that say
    where they can be met on this host (``met_at``). ``own``: what this node says of itself. ``is_self``: does an
    address lead here? ``make_place``: of the first link to a node. ``cold``: storage behind all nodes.
    """

    def __init__(
        self,
        source: MemberSource,
        directory: Directory,
        openers: Mapping[Medium, OpenLink],
        own: Callable[[], Facts],
        is_self: Callable[[Address], bool],
        make_place: MakePlace,
        cold: Place | None = None,
        clock: Callable[[], float] = time.monotonic,
        met_at: Callable[[Facts], LocalAddress | None] = local_address,
    ) -> None:
        self.directory = directory
        self.links: dict[Address, Link] = {}
        self.further: dict[Address, dict[Medium, FurtherWay]] = {}
        """By the address of the first one."""
        self.places: dict[Address, RoutedPlace] = {}
        self.cold = cold
        self._membership = Membership(source, directory, self._note_change)
        self._openers = openers
        self._met_at = met_at
        self._own = own
        self._is_self = is_self
        self._make_place = make_place
        self._clock = clock
        self._pings: dict[Address, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_live: Callable[[], None] = _nothing
        """Told when a member is live that was not, or drains: others own its segments now."""
        self.on_emptied: Callable[[str], None] = _nothing_of
        """Told the name of a place that may hold less than before: its node booted again, or left."""
        self._without: dict[Where, float] = {}
        self._further_pings: set[Link] = set()
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

    def standing(self, segment: SegmentId) -> list[tuple[Member, Place | None, bool]]:
        """Who owns a segment, whatever its state, and who else is asked for it; is it this node?"""
        members = self.directory.standing(segment)
        return [(one, self.places.get(one.address), self._is_us(one)) for one in members]

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
            for further in self._further_links(address):
                self._ask_further(further)

    def _ask_further(self, link: Link) -> None:
        if link.is_answering and link not in self._further_pings:  # a lost one knocks by itself
            self._further_pings.add(link)
            self._do(self._ping_further(link))

    def _further_links(self, address: Address) -> list[Link]:
        return [way.link for way in self.further.get(address, {}).values()]

    def _link(self, address: Address) -> Link | None:
        """The first link there; None: this node can make none, for want of pyarrow."""
        link = self.links.get(address)
        if link is None and not self._is_without(address):
            try:
                link = self._open(address)
            except ConfigError as error:
                self._note_without(address, error)
        return link

    def _is_without(self, address: Where) -> bool:
        return self._without.get(address, -math.inf) > self._clock() - WITHOUT_S

    def _note_without(self, address: Where, error: ConfigError) -> None:
        self._without = {one: since_s for one, since_s in self._without.items() if self._is_without(one)}
        self._without[address] = self._clock()
        _LOG.warning("%s is not used: %s", address, error)

    def _open(self, address: Address) -> Link:
        medium = Medium.FLIGHT if isinstance(address, FlightAddress) else Medium.STREAM
        if medium not in self._openers:
            raise ConfigError(f"{address} is an address of a kind that this node does not use ({medium})")
        link = self.links[address] = self._openers[medium](address, partial(self._tell, address))
        self.places[address] = self._make_place(medium, link)
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
            if not isinstance(address, FlightAddress):  # over Flight it is told to those too who would be refused
                self._use(address, Medium.SHARED_MEMORY, self._met_at(facts))
            return
        others = [link for link in self._further_links(address) if link.is_answering]
        if not others:
            self._lose(address)
            return
        for link in others:
            link.doubt()
        self._do(self._look(address, others))

    def _tell_further(self, address: Address, medium: Medium, where: Where, facts: Facts | None) -> None:
        """What another one hears: it is used once it was answered, and not while it is lost. Silence in shared memory
        is that of a process, whatever way leads to it."""
        way, place = self.further.get(address, {}).get(medium), self.places.get(address)
        if way is None or place is None or way.where != where:  # it was given up meanwhile
            return
        if facts is not None:
            place.add_way(medium, way.link)
            self._hear(address, facts)
            return
        place.remove_way(medium)
        first = self.links[address]
        if not any(link.is_answering for link in (first, *self._further_links(address))):
            self._lose(address)
        elif medium is Medium.SHARED_MEMORY:
            first.doubt()

    def _use_flight(self, address: Address, port: int) -> None:
        """The node there says that it speaks Arrow Flight at this port of the same host; 0: not any more."""
        self._use(address, Medium.FLIGHT, FlightAddress(address.host, port) if port else None)

    def _use(self, address: Address, medium: Medium, where: Where | None) -> None:
        """There is a further way to the node there; None: not any more."""
        place, ways = self.places.get(address), self.further.get(address, {})
        known = ways.get(medium)
        is_first = place is not None and known is None and medium in place.ways
        is_off = medium not in self._openers or (where is not None and self._is_without(where))
        if place is None or is_first or is_off or where == (None if known is None else known.where):
            return
        if known is not None:
            del ways[medium]
            place.remove_way(medium)
            place.unused.discard(known.link)
            _close(known.link)
        if where is not None:
            try:
                link = self._openers[medium](where, partial(self._tell_further, address, medium, where))
            except ConfigError as error:
                self._note_without(where, error)
                return
            self.further.setdefault(address, {})[medium] = FurtherWay(where, link)
            place.unused.add(link)
            self._ask_further(link)

    async def _look(self, address: Address, links: Sequence[Link]) -> None:
        """Is who was lost over the first way still there?"""
        found = await asyncio.gather(*(link.ping() for link in links), return_exceptions=True)
        for link, result in zip(links, found, strict=True):
            if not isinstance(result, BaseException):
                return
            if not isinstance(result, KVServiceError):
                raise result
            _LOG.info("%s does not answer either: %s", link.name, result)
        self._lose(address)

    async def _ping_further(self, link: Link) -> None:
        try:
            await link.ping()
        except KVServiceError as error:
            _LOG.info("%s does not answer: %s", link.name, error)
        finally:
            self._further_pings.discard(link)

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
            if change.after in (MemberState.LIVE, MemberState.DRAINING):
                self.on_live()
        elif all(one.address != member.address for one in self.directory.members):
            self._unlink(member)

    def _unlink(self, member: Member) -> None:
        """Nobody else is known at its address."""
        self.links.pop(member.address, None)
        self.further.pop(member.address, None)
        place = self.places.pop(member.address, None)
        if place is not None:
            _close(place)


def _close(one: Carrier) -> None:
    """In the background; nobody uses it any more."""
    asyncio.ensure_future(one.close()).add_done_callback(_ignore)


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
