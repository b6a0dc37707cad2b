"""The answer of GET /families: committed rounds, and families with their masters and mirrors. Bounded.

A node may hold a million families, and its one thread makes this answer: so many of the newest are looked at, the
largest of those are shown, and of a family so many members. The answer says what it looked at. Sizes are bytes.
"""

import heapq
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, TypedDict

from kvservice.caches import Cache, Family, Space, group_of
from kvservice.model.errors import InvalidInputError
from kvservice.round_history import RoundRecord

if TYPE_CHECKING:
    from kvservice.node import Node

COUNT, COUNT_MAX = 12, 24
"""Families and rounds that are shown, unless ``count`` says otherwise."""
FAMILIES_LOOKED_MAX = 2048
ROUND_FAMILIES_MAX = 8
GROUPS_MAX = 4
MEMBERS_MAX = 64
"""Of one family that are looked at, the most recently used ones."""
MIRRORS_SHOWN_MAX = 24
TEXT_CHARS_MAX = 128


class GroupDocument(TypedDict):
    """A master and its mirrors. ``mirror_sizes``: of the first MIRRORS_SHOWN_MAX, the largest first.

    ``dense_bytes``: what all of them stand for; ``uses``: lookups that one of them answered. ``host_bytes`` and
    ``ssd_bytes``: of their records in each tier. ``provenance``: of the master; empty: exact.
    """

    master_bytes: int
    position: int
    provenance: str
    mirrors: int
    mirror_bytes: int
    mirror_sizes: list[int]
    dense_bytes: int
    host_bytes: int
    ssd_bytes: int
    uses: int


class FamilyDocument(TypedDict):
    """All caches of one segment. ``members`` of them; the groups are of the first ``looked_at`` alone, largest first,
    at most GROUPS_MAX of ``group_count``. ``record_bytes``: of all those groups, with masters that are hidden."""

    segment: str
    namespace: str
    tenant: str
    model: str
    tokens: int
    members: int
    looked_at: int
    record_bytes: int
    dense_bytes: int
    group_count: int
    groups: list[GroupDocument]


class RoundDocument(TypedDict):
    """A round that was committed ``age_s`` ago: ``members`` caches of ``segments`` segments, ``elections`` of which got
    a master; bytes before and after. ``families``: the first ROUND_FAMILIES_MAX that are still there."""

    name: str
    age_s: float
    namespace: str
    members: int
    segments: int
    elections: int
    bytes_before: int
    bytes_after: int
    families: list[FamilyDocument]


class FamiliesDocument(TypedDict):
    """All of it. ``families_looked_at`` of ``family_count``, the newest; ``rounds`` of ``round_count``."""

    families: list[FamilyDocument]
    families_looked_at: int
    family_count: int
    rounds: list[RoundDocument]
    round_count: int


def families_of(node: "Node", query: Mapping[str, str]) -> FamiliesDocument:
    """The answer to a query with ``count`` or without. Raises InvalidInputError."""
    count, catalog, history = _count(query), node.catalog, node.families.history
    looked_at = list(_newest(catalog.spaces.values()))
    return {
        "families": [_family(one) for one in heapq.nlargest(count, looked_at, _dense_bytes)],
        "families_looked_at": len(looked_at),
        "family_count": catalog.totals.families,
        "rounds": [_round(node, record) for record in history.newest(count)],
        "round_count": history.committed,
    }


def _count(query: Mapping[str, str]) -> int:
    unknown = sorted(query.keys() - {"count"})
    if unknown:
        raise InvalidInputError(f"{unknown[0]!r} is no parameter of /families; there is count")
    text = query.get("count", str(COUNT))
    if not (text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= COUNT_MAX):
        raise InvalidInputError(f"count = {text!r}: it must be 1 to {COUNT_MAX}")
    return int(text)


def _newest(spaces: Collection[Space]) -> Iterator[Family]:
    each = max(FAMILIES_LOOKED_MAX // max(len(spaces), 1), 1)
    for space in islice(spaces, FAMILIES_LOOKED_MAX):
        yield from islice(reversed(space.families.values()), each)


def _dense_bytes(family: Family) -> int:
    return len(family.members) * family.tokens * family.space.token_bytes


def _family(family: Family) -> FamilyDocument:
    looked_at = list(family.recent(MEMBERS_MAX))
    members: dict[Cache, list[Cache]] = {}
    for cache in looked_at:
        members.setdefault(cache.head, []).append(cache)
    groups = [_group(head, ours) for head, ours in members.items()]
    groups.sort(key=lambda group: group["dense_bytes"], reverse=True)
    identity = family.space.identity
    return {
        "segment": family.segment.hex(),
        "namespace": family.space.namespace.hex(),
        "tenant": _text(identity.tenant),
        "model": _text(identity.model),
        "tokens": family.tokens,
        "members": len(family.members),
        "looked_at": len(looked_at),
        "record_bytes": sum(group["master_bytes"] + group["mirror_bytes"] for group in groups),
        "dense_bytes": _dense_bytes(family),
        "group_count": len(groups),
        "groups": groups[:GROUPS_MAX],
    }


def _group(head: Cache, members: list[Cache]) -> GroupDocument:
    """Of a head, which may be hidden, and those of its published members that were looked at."""
    sizes = sorted((cache.record_bytes for cache in members if cache is not head), reverse=True)
    group = group_of(head)
    return {
        "master_bytes": head.record_bytes,
        "position": head.position,
        "provenance": _text(head.provenance),
        "mirrors": len(sizes),
        "mirror_bytes": sum(sizes),
        "mirror_sizes": sizes[:MIRRORS_SHOWN_MAX],
        "dense_bytes": sum(cache.dense_bytes for cache in members),
        "host_bytes": group.host_bytes,
        "ssd_bytes": group.ssd_bytes,
        "uses": group.uses,
    }


def _round(node: "Node", record: RoundRecord) -> RoundDocument:
    space = node.catalog.spaces.get(record.namespace)
    found = () if space is None else (space.families.get(segment) for segment in record.segments)
    there = [family for family in found if family is not None]
    return {
        "name": _text(record.name),
        "age_s": round(max(node.uptime_s - record.at_s, 0.0), 3),
        "namespace": record.namespace.hex(),
        "members": record.members,
        "segments": record.segment_count,
        "elections": record.elections,
        "bytes_before": record.bytes_before,
        "bytes_after": record.bytes_after,
        "families": [_family(family) for family in there[:ROUND_FAMILIES_MAX]],
    }


def _text(text: str) -> str:
    """A client's text, cut: it may be a megabyte."""
    return text if len(text) <= TEXT_CHARS_MAX else text[: TEXT_CHARS_MAX - 1] + "\u2026"
