"""Members from a list in the settings, ``host:port,flight://host:port``. A greeting says who is there."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from kvservice.model.errors import ConfigError
from kvservice.peers.member import Address, Listing, Roll, parse_address

ADDRESSES_MAX = 256


def parse_addresses(text: str) -> tuple[Address, ...]:
    """The addresses of a list. Raises ConfigError for an empty one, one twice, or too many."""
    addresses = tuple(parse_address(part) for part in text.split(",") if part.strip())
    if not addresses:
        raise ConfigError(f"{text!r} names no node: write host:port,host:port")
    twice = sorted({str(one) for one in addresses if addresses.count(one) > 1})
    if twice:
        raise ConfigError(f"{', '.join(twice)} stands twice in {text!r}; name every node once")
    if len(addresses) > ADDRESSES_MAX:
        raise ConfigError(f"{len(addresses)} nodes are named, the limit is {ADDRESSES_MAX}")
    return addresses


class StaticSource:
    """A list that never changes."""

    name = "static"
    knows_liveness = False

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._roll = Roll.of([Listing(address) for address in addresses], "the list names no node")

    async def members(self) -> Roll:
        """The list."""
        return self._roll

    async def watch(self) -> AsyncGenerator[Roll]:
        """The list, once; then nothing, until it is cancelled."""
        yield self._roll
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing is open."""
