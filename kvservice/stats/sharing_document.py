"""The parts of the stats document that tell of other places: what was brought, what was given, who is there."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from kvservice.lookup import FROM_REMOTE
from kvservice.peers.member import MemberState
from kvservice.peers.packed_counters import PackedCounters
from kvservice.peers.routes_log import MediumDocument, RouteLog
from kvservice.stats.others_document import OtherDocument

if TYPE_CHECKING:
    from kvservice.node import Node

STATES = tuple(state for state in MemberState if state is not MemberState.LEFT)


class RemoteDocument(TypedDict):
    """Counters of questions to other places and of what came; ``running`` is how many are on their way now.

    ``asked``: segments that nothing here answered well; ``found``: those that a place offered. ``computed_sooner``:
    left where they were. ``refused``: offers that were not what was asked, or that there was no room for.
    ``unreachable``: questions without an answer in time. ``done``, ``failed``: records.
    """

    asked: int
    found: int
    computed_sooner: int
    refused: int
    unreachable: int
    begun: int
    done: int
    failed: int
    record_bytes: int
    seconds: float
    running: int


class PushesDocument(TypedDict):
    """Counters of records given to other places; ``queued`` is how many wait."""

    stored: int
    existed: int
    refused: int
    failed: int
    dropped: int
    record_bytes: int
    seconds: float
    queued: int


class NetworkDocument(TypedDict):
    """Who is there. ``members``: by state, this node too if it is one. ``lost``: peers that are left alone for now.

    ``peer_connections``: others' to this node; ``peer_refused``: callers turned away at the peer port. ``media`` and
    ``reasons``: how bytes came, and why that way; ``given_media`` and ``given_reasons``: how what is given went, where
    a medium is chosen for it. ``packed_bytes``: of records that came or went as 8 bits a value, ``packed_wire_bytes``:
    what they took on the wire. ``others``: all other nodes and cold storage, one by one.
    """

    members: dict[str, int]
    lost: int
    peer_connections: int
    peer_refused: int
    media: dict[str, MediumDocument]
    reasons: dict[str, int]
    given_media: dict[str, MediumDocument]
    given_reasons: dict[str, int]
    packed_bytes: int
    packed_wire_bytes: int
    others: list[OtherDocument]


def nobody() -> NetworkDocument:
    """Of a node that shares with nobody."""
    return network_document(dict.fromkeys(STATES, 0), 0, 0, 0, RouteLog(), RouteLog(), PackedCounters())


def network_document(
    members: dict[MemberState, int],
    lost: int,
    connections: int,
    refused: int,
    log: RouteLog,
    given: RouteLog,
    packed: PackedCounters,
    others: Sequence[OtherDocument] = (),
) -> NetworkDocument:
    """All names are there, whatever was seen so far. ``log``: of what came; ``given``: of what went."""
    routes, given_routes = log.document(), given.document()
    return {
        "members": {state.value: members.get(state, 0) for state in STATES},
        "lost": lost,
        "peer_connections": connections,
        "peer_refused": refused,
        "media": routes["media"],
        "reasons": routes["reasons"],
        "given_media": given_routes["media"],
        "given_reasons": given_routes["reasons"],
        "packed_bytes": packed.packed_bytes,
        "packed_wire_bytes": packed.packed_wire_bytes,
        "others": list(others),
    }


def remote_document(node: "Node") -> RemoteDocument:
    """What came."""
    remote = node.counters.remote
    return {
        "asked": remote.asked,
        "found": remote.found,
        "computed_sooner": remote.computed_sooner,
        "refused": remote.refused,
        "unreachable": remote.unreachable,
        "begun": remote.begun,
        "done": remote.done,
        "failed": remote.failed,
        "record_bytes": remote.record_bytes,
        "seconds": round(remote.seconds, 6),
        "running": sum(load.source == FROM_REMOTE for load in node.catalog.arriving.values()),
    }


def pushes_document(node: "Node") -> PushesDocument:
    """What was given."""
    pushes = node.counters.pushes
    return {
        "stored": pushes.stored,
        "existed": pushes.existed,
        "refused": pushes.refused,
        "failed": pushes.failed,
        "dropped": pushes.dropped,
        "record_bytes": pushes.record_bytes,
        "seconds": round(pushes.seconds, 6),
        "queued": 0 if node.sharing is None else node.sharing.pushes.waiting,
    }
