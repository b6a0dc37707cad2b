"""Words of membership: who a node is, where it answers, and what a source of members says. Data only."""

import ipaddress
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Self
from uuid import UUID

from kvservice.model.errors import ConfigError

FLIGHT = "flight://"
PORT_MAX = 65535
HOST_CHARS_MAX = 253
NAME_CHARS_MAX = 128
BOOT_ID_CHARS_MAX = 64
LOCAL_PATH_BYTES_MAX = 107
"""What the kernel takes for the path of a unix socket."""
WEIGHT_MAX = 1e18
EPOCH_MAX = (1 << 63) - 1
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9])?")


class NodeId(NamedTuple):
    """One boot of one node: a uuid that it keeps on disk, and an epoch that rises with every boot. Never an address."""

    uuid: UUID
    epoch: int

    def __str__(self) -> str:
        return f"{self.uuid} (epoch {self.epoch})"


class Address(NamedTuple):
    """Where something answers over TCP. It says nothing of who that is."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """From ``host:port``, or ``[::1]:port``. Raises ConfigError."""
        host, colon, port = text.strip().rpartition(":")
        if not colon or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= PORT_MAX:
            raise ConfigError(f"{text!r} is not an address: write host:port, with a port of 1 to {PORT_MAX}")
        is_bracketed = host.startswith("[") and host.endswith("]")
        return cls(_checked_host(host[1:-1] if is_bracketed else host, text, is_bracketed=is_bracketed), int(port))


class FlightAddress(Address):
    """Where a node speaks Arrow Flight, and maybe nothing else. One port is one service: it equals no other address."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{FLIGHT}{super().__str__()}"


class LocalAddress(NamedTuple):
    """A unix socket of this host, at which nodes read each other's arenas, and which boot of a node must be there."""

    path: str
    node: NodeId

    def __str__(self) -> str:
        return f"unix:{self.path}"


def parse_address(text: str) -> Address:
    """From ``host:port``, or ``flight://host:port``. Raises ConfigError."""
    text = text.strip()
    if text.startswith(FLIGHT):
        return FlightAddress(*Address.parse(text.removeprefix(FLIGHT)))
    return Address.parse(text)


def _checked_host(host: str, text: str, *, is_bracketed: bool) -> str:
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        if not is_bracketed and len(host) <= HOST_CHARS_MAX and _HOST.fullmatch(host):
            return host.lower()
        raise ConfigError(f"{text!r} is not an address: {host!r} is neither a host's name nor an IP address") from None
    if parsed.version == 6 and not is_bracketed:
        raise ConfigError(f"{text!r} is not an address: write an IPv6 address in brackets, such as [::1]:7000")
    return str(parsed)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a node says of itself, in a greeting or in etcd.

    ``weight``: its share of the segments, in proportion to others'; all nodes use one unit (bytes they can hold).
    ``empty_s``: seconds since it began empty, None if it does not say; a node that found its caches on SSD again
    counts from when those began. ``is_draining``: it takes no new caches and will leave. ``flight_port``: where it also
    speaks Arrow Flight, at the same host; 0: nowhere. ``local_path``: a unix socket for nodes of the same host, whose
    kernel calls its boot ``boot_id``; empty: none.
    """

    node: NodeId
    name: str = ""
    weight: float = 1.0
    is_draining: bool = False
    empty_s: float | None = None
    flight_port: int = 0
    boot_id: str = ""
    local_path: str = ""

    def __post_init__(self) -> None:
        is_right = (
            0 <= self.node.epoch <= EPOCH_MAX
            and len(self.name) <= NAME_CHARS_MAX
            and self.name.isprintable()
            and 0 < self.weight <= WEIGHT_MAX
            and (self.empty_s is None or self.empty_s >= 0)
            and 0 <= self.flight_port <= PORT_MAX
            and len(self.boot_id) <= BOOT_ID_CHARS_MAX
            and self.boot_id.isprintable()
            and is_local_path(self.local_path)
        )
        if not is_right:
            raise ConfigError(
                f"node {self.node.uuid} says what cannot be: epoch {self.node.epoch}, weight {self.weight}, "
                f"empty for {self.empty_s} s, Flight port {self.flight_port}, a name of {len(self.name)} characters, "
                f"a socket at {self.local_path[:LOCAL_PATH_BYTES_MAX]!r}; give it other settings"
            )


def is_local_path(text: str) -> bool:
    """Can this be the path of a unix socket that others are told of? Empty: there is none."""
    is_short = len(text) <= LOCAL_PATH_BYTES_MAX and len(text.encode(errors="replace")) <= LOCAL_PATH_BYTES_MAX
    return not text or (is_short and text.startswith("/") and text.isprintable())


class MemberState(StrEnum):
    """Where a member stands."""

    LIVE = "live"
    DRAINING = "draining"
    """Answers reads, takes no new caches, will leave."""
    DISCONNECTED = "disconnected"
    """Not there, not forgotten: it keeps its segments for a grace time, and reads of them miss at once."""
    LEFT = "left"
    """Gone: its segments have other owners."""


class SourceState(StrEnum):
    """What a source of members last answered."""

    STARTING = "starting"
    LISTED = "listed"
    EMPTY = "empty"
    """It answered that there is nobody."""
    UNREACHABLE = "unreachable"
    """It did not answer; nothing is known."""


@dataclass(frozen=True, slots=True)
class Listing:
    """One member as its source names it. ``facts`` is None where the source knows addresses only."""

    address: Address
    facts: Facts | None = None


@dataclass(frozen=True, slots=True)
class Roll:
    """All members that a source names at one moment; ``reason`` says why if there are none."""

    state: SourceState
    listings: tuple[Listing, ...] = ()
    reason: str = ""

    @classmethod
    def of(cls, listings: "list[Listing] | tuple[Listing, ...]", nobody: str) -> Self:
        """A roll of what was found; ``nobody``: the reason if that is nothing."""
        if listings:
            return cls(SourceState.LISTED, tuple(listings))
        return cls(SourceState.EMPTY, reason=nobody)
