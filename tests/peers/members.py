"""Builders of the membership tests: nodes, listings and a clock that only moves when told."""

import uuid
from uuid import UUID

from kvservice.peers.directory import Directory, DirectoryLimits
from kvservice.peers.member import Address, Facts, Listing, NodeId, Roll, SourceState
from kvservice.peers.weights import Ramp

GRACE_S, WARM_S = 60.0, 160.0
LIMITS = DirectoryLimits(grace_s=GRACE_S, ramp=Ramp(WARM_S, 16))


class ManualClock:
    """Seconds that never pass by themselves."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def pass_(self, seconds: float) -> None:
        self.now_s += seconds


def node_uuid(number: int) -> UUID:
    return uuid.uuid5(uuid.NAMESPACE_OID, f"node {number}")


def node_id(number: int, epoch: int = 1) -> NodeId:
    return NodeId(node_uuid(number), epoch)


def place(number: int) -> Address:
    return Address("127.0.0.1", 7000 + number)


def facts(
    number: int, epoch: int = 1, *, weight: float = 1.0, is_draining: bool = False, empty_s: float | None = None
) -> Facts:
    return Facts(node_id(number, epoch), f"n{number}", weight, is_draining, empty_s)


def roll(*members: Facts | int) -> Roll:
    """A roll of nodes at their places: numbers where the source knows addresses only."""
    listings = [
        Listing(place(one)) if isinstance(one, int) else Listing(place(int(one.name[1:])), one) for one in members
    ]
    return Roll.of(listings, "nobody, for a test")


EMPTY = Roll(SourceState.EMPTY, reason="nobody, for a test")
UNREACHABLE = Roll(SourceState.UNREACHABLE, reason="away, for a test")


def static_directory(clock: ManualClock, *numbers: int, limits: DirectoryLimits = LIMITS) -> Directory:
    """A directory of nodes that were listed and greeted at its start."""
    directory = Directory(clock, knows_liveness=False, limits=limits)
    directory.apply(roll(*numbers))
    for number in numbers:
        directory.heard(place(number), facts(number))
    return directory


def etcd_directory(clock: ManualClock, *members: Facts, limits: DirectoryLimits = LIMITS) -> Directory:
    directory = Directory(clock, knows_liveness=True, limits=limits)
    directory.apply(roll(*members))
    return directory


def names(members: tuple[object, ...]) -> list[str]:
    return [getattr(one, "name", "") for one in members]


def segment(number: int) -> bytes:
    return uuid.uuid5(uuid.NAMESPACE_URL, f"segment {number}").bytes * 2
