"""Members from etcd: every node keeps a key alive by a lease, everybody watches them.

    PREFIX/members/UUID := {"version": 1, "epoch", "address", "name", "weight", "draining", "empty_since",
                            "flight"?}                                                              with a lease
    PREFIX/epochs/UUID  := decimal epoch of the last boot that was let in                                   for good

``empty_since``: seconds since 1970, null if not said. ``flight``: its Flight port, if it has one. What is read is
hostile until checked. A key is put only by a transaction over both: so a twin of a live node is refused, and so is a
zombie that lost its lease to a later boot.
"""

import asyncio
import json
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from kvservice.model.errors import (
    ConfigError,
    InvalidInputError,
    KVServiceError,
    NotOwnedError,
    StaleEpochError,
    UnavailableError,
)
from kvservice.peers.backoff import Backoff
from kvservice.peers.etcd_gateway import CompactedError, EtcdGateway, KeyEvent, KeyValue
from kvservice.peers.fence import twin_error, zombie_error
from kvservice.peers.member import Address, Facts, Listing, NodeId, Roll, SourceState, parse_address

VERSION = 1
LEASE_TTL_S = 10
TRIES_MAX = 8

log = logging.getLogger(__name__)


def encode_member(address: Address, facts: Facts, now_s: float) -> bytes:
    """The value of a member's key. ``now_s``: seconds since 1970."""
    fields = {
        "version": VERSION,
        "epoch": facts.node.epoch,
        "address": str(address),
        "name": facts.name,
        "weight": facts.weight,
        "draining": facts.is_draining,
        "empty_since": None if facts.empty_s is None else now_s - facts.empty_s,
    }
    if facts.flight_port:
        fields["flight"] = facts.flight_port
    return json.dumps(fields, sort_keys=True).encode()


def decode_member(uuid: str, value: bytes, now_s: float) -> Listing:
    """The member that a key stands for. Raises ConfigError for what is none, or of another version."""
    try:
        fields = json.loads(value)
        if fields["version"] != VERSION:
            raise ConfigError(f"version {fields['version']!r}, this program reads {VERSION}; upgrade one of the two")
        since = fields["empty_since"]
        facts = Facts(
            NodeId(UUID(uuid), _typed(fields, "epoch", int)),
            _typed(fields, "name", str),
            float(_typed(fields, "weight", int, float)),
            _typed(fields, "draining", bool),
            None if since is None else max(0.0, now_s - _typed(fields, "empty_since", int, float)),
            _typed(fields, "flight", int) if "flight" in fields else 0,
        )
        return Listing(parse_address(_typed(fields, "address", str)), facts)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ConfigError(f"member {uuid[:40]!r} in etcd cannot be read: {error}") from error


def _typed(fields: dict[str, Any], name: str, *kinds: type) -> Any:
    value = fields[name]
    if type(value) not in kinds:
        raise InvalidInputError(f"{name} is {value!r}")
    return value


class EtcdSource:
    """The members below a prefix. ``clock``: seconds since 1970, for how long a node has been filling."""

    name = "etcd"
    knows_liveness = True

    def __init__(
        self,
        gateway: EtcdGateway,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._gateway, self._clock, self._sleep = gateway, clock, sleep
        self._backoff = Backoff(draw)
        self._prefix = f"{gateway.place.prefix}/members/".encode()
        self._values: dict[bytes, bytes] = {}
        self._unread: set[bytes] = set()

    async def members(self) -> Roll:
        """Who is listed now. Raises ConfigError if etcd refuses us."""
        try:
            await self._list()
        except NotOwnedError as error:
            raise ConfigError(str(error)) from error
        except KVServiceError as error:
            return Roll(SourceState.UNREACHABLE, reason=str(error))
        return self._roll()

    async def watch(self) -> AsyncGenerator[Roll]:
        """A roll now and after every change; UNREACHABLE while etcd is not there, and all anew when it is back."""
        while True:
            try:
                revision = await self._list()
                yield self._roll()
                self._backoff.reset()
                async with aclosing(self._gateway.watch(self._prefix, revision + 1)) as batches:
                    async for events in batches:
                        self._follow(events)
                        yield self._roll()
            except CompactedError as error:
                log.info("members from etcd are listed anew: %s", error)
            except KVServiceError as error:
                yield Roll(SourceState.UNREACHABLE, reason=str(error))
                await self._sleep(self._backoff.next_s())

    async def close(self) -> None:
        """Close the gateway."""
        await self._gateway.close()

    async def _list(self) -> int:
        revision, found = await self._gateway.list_keys(self._prefix)
        self._values = {one.key: one.value for one in found}
        return revision

    def _follow(self, events: list[KeyEvent]) -> None:
        for key, value in events:
            if value is None:
                self._values.pop(key, None)
            else:
                self._values[key] = value

    def _roll(self) -> Roll:
        listings = []
        for key, value in sorted(self._values.items()):
            try:
                listings.append(decode_member(key[len(self._prefix) :].decode(errors="replace"), value, self._clock()))
                self._unread.discard(key)
            except ConfigError as error:
                if key not in self._unread:
                    self._unread.add(key)
                    log.warning("%s; it is left out", error)
        self._unread &= self._values.keys()
        return Roll.of(listings, f"no node has registered below {self._prefix.decode()} in etcd")


@dataclass(slots=True)
class _Held:
    """What etcd holds of our uuid."""

    member: KeyValue | None
    epoch: KeyValue | None


class EtcdRegistration:
    """Keeps this node's key alive. Lives on the loop that starts it.

    ``facts`` says what the node is now. ``on_refused`` hears, once and on the loop, that this boot may not go on: a
    later boot is there, or a twin; the registration has ended then. ``clock``: seconds since 1970.
    """

    def __init__(
        self,
        gateway: EtcdGateway,
        address: Address,
        facts: Callable[[], Facts],
        *,
        clock: Callable[[], float],
        on_refused: Callable[[KVServiceError], None],
        ttl_s: int = LEASE_TTL_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        assert ttl_s >= 1, ttl_s
        self._gateway, self._address, self._facts = gateway, address, facts
        self._clock, self._on_refused, self._ttl_s, self._sleep = clock, on_refused, ttl_s, sleep
        uuid, prefix = facts().node.uuid, gateway.place.prefix
        self._member_key, self._epoch_key = f"{prefix}/members/{uuid}".encode(), f"{prefix}/epochs/{uuid}".encode()
        self._backoff = Backoff(draw, first_s=min(1.0, ttl_s / 10), max_s=ttl_s / 2)
        self._lease = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def is_registered(self) -> bool:
        """Does etcd list this node, as far as is known?"""
        return self._lease != 0

    async def start(self) -> None:
        """Register, and go on doing so in the background. That etcd is away is no error: it is tried again.

        Raises ConfigError if a twin of this node is live (after it was watched for a lease's time) or etcd refuses us,
        StaleEpochError if a later boot of this node was let in.
        """
        assert self._task is None, "a registration is started once"
        try:
            await self._register()
        except NotOwnedError as error:
            raise ConfigError(str(error)) from error
        except (StaleEpochError, ConfigError):
            raise
        except KVServiceError as error:
            log.warning("this node is not registered yet: %s", error)
        self._task = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Take the node out at once, if etcd answers; its lease ends by itself otherwise. Safe to call twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._give_up_lease()
        await self._gateway.close()

    async def update(self) -> None:
        """Tell everybody what ``facts`` says now, such as that this node drains. Raises KVServiceError."""
        if self._lease:  # otherwise it is told when the node registers
            await self._put(self._lease)

    async def _keep(self) -> None:
        while True:
            try:
                await self._sleep(self._ttl_s / 3 if self._lease else self._backoff.next_s())
                if self._lease and not await self._gateway.keep_alive(self._lease):
                    log.warning("this node's lease in etcd ran out: it registers anew")
                    self._lease = 0
                if not self._lease:
                    await self._register()
            except (StaleEpochError, ConfigError) as error:
                self._lease = 0
                log.exception("this node may not be a member any more")
                self._on_refused(error)
                return
            except KVServiceError as error:
                log.warning("etcd, which lists this node: %s", error)
                await self._sleep(self._backoff.next_s())

    async def _register(self) -> None:
        await self._wait_for_twin()
        lease = await self._gateway.grant(self._ttl_s)
        try:
            await self._put(lease)
        except BaseException:
            self._lease = lease
            await self._give_up_lease()
            raise
        self._lease = lease
        self._backoff.reset()
        log.info("this node is registered in etcd as %s", self._member_key.decode())

    async def _wait_for_twin(self) -> None:
        """Another boot's key ends within its lease's time if that boot is dead; a live twin keeps it."""
        begun_s, patience_s = self._clock(), 1.5 * self._ttl_s + 1
        while True:
            other = self._other_boot(await self._held())
            if other is None:
                return
            if self._clock() - begun_s > patience_s:
                node, where = other
                raise twin_error(self._facts().node, str(self._address), node, str(where))
            await self._sleep(self._ttl_s / 5)

    def _other_boot(self, held: _Held) -> tuple[NodeId, Address] | None:
        """An earlier boot of this uuid that is listed at another address; StaleEpochError for a later one."""
        own = self._facts().node
        if held.epoch is not None:
            last = int(held.epoch.value) if held.epoch.value.isdigit() else 0
            if last > own.epoch:
                raise zombie_error(own, str(self._address), last)
        if held.member is None:
            return None
        try:
            listing = decode_member(str(own.uuid), held.member.value, self._clock())
        except ConfigError:
            return None  # whatever wrote that is no boot of ours
        assert listing.facts is not None
        if listing.facts.node.epoch == own.epoch or listing.address == self._address:
            return None  # we hold that port now: who had it is gone
        return listing.facts.node, listing.address

    async def _held(self) -> _Held:
        member, epoch = await self._gateway.get([self._member_key, self._epoch_key])
        return _Held(member, epoch)

    async def _put(self, lease: int) -> None:
        """Put both keys, if nobody did in between."""
        for _ in range(TRIES_MAX):
            held, facts = await self._held(), self._facts()
            other = self._other_boot(held)
            if other is not None:
                raise twin_error(facts.node, str(self._address), other[0], str(other[1]))
            expected = {
                key: 0 if one is None else one.mod_revision
                for key, one in ((self._member_key, held.member), (self._epoch_key, held.epoch))
            }
            value = encode_member(self._address, facts, self._clock())
            values = {self._member_key: (value, lease), self._epoch_key: (b"%d" % facts.node.epoch, 0)}
            if await self._gateway.put_if(expected, values):
                return
        raise UnavailableError(f"{self._member_key.decode()} in etcd was changed by somebody else, again and again")

    async def _give_up_lease(self) -> None:
        lease, self._lease = self._lease, 0
        if lease:
            try:
                await self._gateway.revoke(lease)
            except KVServiceError as error:
                log.warning("this node's lease in etcd ends in %d s by itself: %s", self._ttl_s, error)
