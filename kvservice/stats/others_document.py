"""The part of the stats document that names other nodes, one by one: who each is, how bytes come from it, and why."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypedDict
from uuid import UUID

from kvservice.peers.member import Address, MemberState
from kvservice.peers.routes import Router
from kvservice.peers.routes_log import Choice, Medium
from kvservice.sharing.routed import RoutedPlace

if TYPE_CHECKING:
    from kvservice.sharing.cluster import Cluster

NAMED_MAX, UNMET_MAX = 64, 16
"""0.05-0.1 ms each. Of more members those that are not live come first; all are counted by state."""
UNMET, COLD = "unmet", "cold"
"""Beside the states of members: an address at which nobody was met yet, and storage that is no node."""


class WayDocument(TypedDict):
    """One medium. ``latency_s``, ``bytes_per_s``: as measured over ``transfers`` of them; 0: guesses.

    Of the node's last 1,024 decisions those for this way: ``chosen``, how many ``failed``, the ``bytes`` that were
    moved, and ``reasons`` why it was chosen.
    """

    latency_s: float
    bytes_per_s: float
    transfers: int
    chosen: int
    failed: int
    bytes: int
    reasons: dict[str, int]


class OtherDocument(TypedDict):
    """Another node, or cold storage. ``name``: what it says, or its address. ``state``: live, draining, disconnected or
    left; unmet: nobody was met there; cold: it is no node. ``problem``: why it is not used; empty: none is known.

    ``warmth``: the share of its weight that it has now. ``brought_bytes``: that came from there, also of records that
    did not arrive whole; ``given``, ``given_bytes``: what it took. Both since the address was first used. ``ways``: by
    medium, those by which it comes now. ``given_ways``: the same of what is given, where a medium is chosen for it.
    """

    uuid: str
    name: str
    address: str
    state: str
    is_answering: bool
    problem: str
    warmth: float
    brought_bytes: int
    given: int
    given_bytes: int
    ways: dict[str, WayDocument]
    given_ways: dict[str, WayDocument]


def others_document(
    cluster: "Cluster | None", storages: Iterable[object], router: Router, given: Router, own: UUID
) -> list[OtherDocument]:
    """All but this node (``own``), in bounds: members first, then who left, whom nobody met, and cold storage.

    ``router``: of what comes; ``given``: of what goes.
    """
    routes = _Routes(_Decisions(router), _Decisions(given))
    found = [] if cluster is None else list(_nodes(cluster, routes, own))
    cold = [place for place in storages if isinstance(place, RoutedPlace)]
    return found + [_other(place.name, COLD, place, routes) for place in cold]


class _Decisions:
    """What one router knows of all ways, looked through once."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._transfers = {(one["peer"], one["medium"]): one["transfers"] for one in router.document()}
        self._decisions: dict[tuple[str, Medium], list[Choice]] = {}
        for choice in router.log.kept:
            self._decisions.setdefault((choice.peer, choice.medium), []).append(choice)

    def ways(self, peer: str, media: Iterable[Medium]) -> dict[str, WayDocument]:
        """By medium, those of one place."""
        return {medium.value: self._way(peer, medium) for medium in media}

    def _way(self, peer: str, medium: Medium) -> WayDocument:
        speed, choices = self._router.speed(peer, medium), self._decisions.get((peer, medium), [])
        return {
            "latency_s": round(speed.latency_s, 9),
            "bytes_per_s": round(speed.bytes_per_s, 1),
            "transfers": self._transfers.get((peer, medium.value), 0),
            "chosen": len(choices),
            "failed": sum(one.has_failed for one in choices),
            "bytes": sum(one.bytes for one in choices if one.actual_s is not None and not one.has_failed),
            "reasons": dict(Counter(one.why.value for one in choices)),
        }


class _Routes(NamedTuple):
    """Of what comes, and of what is given."""

    come: _Decisions
    given: _Decisions


def _nodes(cluster: "Cluster", routes: _Routes, own: UUID) -> Iterator[OtherDocument]:
    directory, places = cluster.directory, cluster.places
    warmths = {one["uuid"]: one["warmth"] for one in directory.document()}
    members = [one for one in directory.members if one.node.uuid != own]
    if len(members) > NAMED_MAX:
        members = sorted(members, key=lambda one: one.state is MemberState.LIVE and one.is_answering)[:NAMED_MAX]
    known = [(one, places.get(one.address)) for one in members]
    for member, place in (*known, *((one, None) for one in directory.departed.values())):
        one = _other(str(member.address), member.state, place, routes)
        one["uuid"], one["name"] = str(member.node.uuid), member.name or one["name"]
        one["warmth"] = warmths.get(one["uuid"], 0.0)
        one["is_answering"] = member.is_answering
        one["problem"] = directory.refused.get(member.address, "")
        yield one
    for address in _unmet(cluster)[:UNMET_MAX]:
        one = _other(str(address), UNMET, places.get(address), routes)
        one["problem"] = directory.refused.get(address, "")
        yield one


def _unmet(cluster: "Cluster") -> list[Address]:
    known = {one.address for one in cluster.directory.members}
    return [one for one in cluster.directory.to_greet() if one not in known]


def _other(address: str, state: str, place: RoutedPlace | None, routes: _Routes) -> OtherDocument:
    is_cold = state == COLD
    return {
        "uuid": "",
        "name": address,
        "address": address,
        "state": str(state),
        "is_answering": is_cold,
        "problem": "",
        "warmth": float(is_cold),
        "brought_bytes": 0 if place is None else place.brought_bytes,
        "given": 0 if place is None else place.given,
        "given_bytes": 0 if place is None else place.given_bytes,
        "ways": {} if place is None else routes.come.ways(place.name, place.media),
        "given_ways": {} if place is None else routes.given.ways(place.name, place.given_media),
    }
