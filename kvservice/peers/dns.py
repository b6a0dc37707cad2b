"""Members from DNS: the addresses behind a name, or the services that it lists. Asked again and again.

    dns:NAME:PORT      A and AAAA records of NAME, by the system's resolver (so /etc/hosts counts too)
    srv:NAME           SRV records, which bring ports; needs dnspython. Priority and weight are not looked at: who
                       owns a segment must not depend on who asks

That a name has no addresses is the roll EMPTY, that no server answers is UNREACHABLE. DNS knows addresses; who is
there, a greeting says.
"""

import asyncio
import importlib
import random
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from kvservice.model.errors import ConfigError, UnavailableError
from kvservice.peers.member import Address, Listing, Roll, SourceState

POLL_S = 5.0
DEADLINE_S = 3.0
ADDRESSES_MAX = 256
_NOBODY = {socket.EAI_NONAME, socket.EAI_NODATA}


class Resolver(Protocol):
    """Asks DNS. ``name``: what is asked for, for messages."""

    @property
    def name(self) -> str:
        """See the class."""

    async def resolve(self, deadline_s: float) -> list[Address]:
        """All addresses, none if the name has none. Raises UnavailableError if nobody answers."""

    def close(self) -> None:
        """Give up what is held. Safe to call twice."""


def parse_resolver(text: str) -> Resolver:
    """The resolver of ``dns:NAME:PORT`` or ``srv:NAME``. Raises ConfigError, also where dnspython is missing."""
    kind, _, rest = text.strip().partition(":")
    if kind == "dns":
        return HostResolver(Address.parse(rest))
    if kind == "srv" and rest:
        return ServiceResolver(rest)
    raise ConfigError(f"{text!r} names no DNS records: write dns:NAME:PORT or srv:_SERVICE._tcp.NAME")


class HostResolver:
    """A and AAAA records of a name, all with one port.

    getaddrinfo(3) cannot be given up: it runs in a thread of its own, and while one hangs no other is begun.
    """

    def __init__(self, place: Address) -> None:
        self.name = str(place)
        self._place = place
        self._thread = ThreadPoolExecutor(1, "kvservice-dns")
        self._asking: asyncio.Future[list[Any]] | None = None

    async def resolve(self, deadline_s: float) -> list[Address]:
        """See Resolver."""
        if self._asking is None:
            loop, (host, port) = asyncio.get_running_loop(), self._place
            self._asking = loop.run_in_executor(self._thread, _getaddrinfo, host, port)
        asking = self._asking
        done, _ = await asyncio.wait((asking,), timeout=deadline_s)
        if not done:
            raise UnavailableError(
                f"DNS did not answer for {self._place.host} within {deadline_s:g} s; see resolv.conf"
            )
        self._asking = None
        try:
            found = asking.result()
        except socket.gaierror as error:
            if error.errno in _NOBODY:
                return []
            raise UnavailableError(f"DNS for {self._place.host}: {error.strerror}; see /etc/resolv.conf") from error
        except (OSError, UnicodeError) as error:
            raise UnavailableError(f"DNS for {self._place.host}: {error}") from error
        return list(dict.fromkeys(Address(str(one[4][0]), self._place.port) for one in found))

    def close(self) -> None:
        """See Resolver."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _getaddrinfo(host: str, port: int) -> list[Any]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


class ServiceResolver:
    """SRV records of a name. ``nameserver``: asked instead of those of /etc/resolv.conf; an IP address."""

    def __init__(self, name: str, nameserver: Address | None = None) -> None:
        self.name = name
        try:
            # typed as Any: dnspython is optional
            self._resolver: Any = importlib.import_module("dns.asyncresolver").Resolver(configure=nameserver is None)
            self._errors: Any = importlib.import_module("dns.exception")
            self._nobody: Any = importlib.import_module("dns.resolver")
        except ModuleNotFoundError as error:
            raise ConfigError("srv: needs dnspython: pip install 'kvservice[dns]', or use dns:NAME:PORT") from error
        if nameserver is not None:
            self._resolver.nameservers, self._resolver.port = [nameserver.host], nameserver.port

    async def resolve(self, deadline_s: float) -> list[Address]:
        """See Resolver."""
        try:
            answer = await self._resolver.resolve(self.name, "SRV", lifetime=deadline_s)
            found = [Address(str(one.target).rstrip(".").lower(), one.port) for one in answer]
            return list(dict.fromkeys(one for one in found if one.host))  # the target "." says: no such service
        except (self._nobody.NXDOMAIN, self._nobody.NoAnswer):
            return []
        except (self._errors.DNSException, OSError) as error:
            raise UnavailableError(f"DNS for the services of {self.name}: {error}") from error

    def close(self) -> None:
        """See Resolver."""


class DnsSource:
    """What a resolver finds, every ``poll_s`` seconds, more or less a fifth."""

    name = "dns"
    knows_liveness = False

    def __init__(
        self,
        resolver: Resolver,
        *,
        poll_s: float = POLL_S,
        deadline_s: float = DEADLINE_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._resolver = resolver
        self._poll_s, self._deadline_s = poll_s, deadline_s
        self._sleep, self._draw = sleep, draw

    async def members(self) -> Roll:
        """Who is found now."""
        try:
            addresses = await self._resolver.resolve(self._deadline_s)
        except UnavailableError as error:
            return Roll(SourceState.UNREACHABLE, reason=str(error))
        listings = [Listing(address) for address in sorted(addresses)[:ADDRESSES_MAX] if address.port > 0]
        return Roll.of(listings, f"DNS has no addresses for {self._resolver.name}; is the name right, is a node ready?")

    async def watch(self) -> AsyncGenerator[Roll]:
        """A roll now and after every change; servers answer in any order."""
        last = None
        while True:
            roll = await self.members()
            if roll != last:
                yield roll
            last = roll
            await self._sleep(self._poll_s * (0.8 + 0.4 * self._draw()))

    async def close(self) -> None:
        """Give up the resolver."""
        self._resolver.close()
