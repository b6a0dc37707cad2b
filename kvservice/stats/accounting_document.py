"""The parts of the stats document that tell what became of every segment that was asked for, and whose bytes are held.

asked = host + ssd + remote + moved + miss + error          in segments, and in tokens; see kvservice/accounting.py
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from kvservice.accounting import (
    ANSWER_PLACES,
    ERROR_PLACES,
    MISS_PLACES,
    MISSED,
    MOVED_PLACES,
    OTHER,
    LedgerSum,
    count_at,
)
from kvservice.model.identity import Namespace
from kvservice.totals import Totals

if TYPE_CHECKING:
    from kvservice.node import Node


class AnswersDocument(TypedDict):
    """What became of what was asked for.

    host, ssd, remote: found in the context asked for, and from where its bytes come: ssd if any have to be read, remote
    is another node's memory. moved: found in another context, in any tier. miss: nothing that would have answered is
    held. error: held and not to be had, or a wrong question.
    """

    host: int
    ssd: int
    remote: int
    moved: int
    miss: int
    error: int


class AccountingDocument(TypedDict):
    """Counters of all lookups. ``asked_segments`` are counted as questions come in, the rest as they are answered.

    ``moved_tokens``: by where the bytes come from. ``missed_tokens`` and ``error_tokens``: by reason.
    ``exact_tokens``: found with exact KV of the context asked for; ``lossy_tokens``: found with an approximation, that
    is refreshed, moved, or of a namespace that rounds what it stores; each ratio is that over all tokens asked for, 0
    before the first.
    """

    asked_segments: int
    asked_tokens: int
    segments: AnswersDocument
    tokens: AnswersDocument
    moved_tokens: dict[str, int]
    missed_tokens: dict[str, int]
    error_tokens: dict[str, int]
    exact_tokens: int
    lossy_tokens: int
    exact_ratio: float
    lossy_ratio: float


class HeldDocument(TypedDict):
    """Records that are held: published ones by kind, all by tier. ``dense_bytes``: what published ones stand for."""

    bytes_by_kind: dict[str, int]
    bytes_by_tier: dict[str, int]
    dense_bytes: int
    caches: int
    families: int


class TenantDocument(TypedDict):
    """One tenant, or all that have no name of their own together. Counters begin when it gets its name."""

    asked_segments: int
    asked_tokens: int
    segments: AnswersDocument
    tokens: AnswersDocument
    exact_tokens: int
    lossy_tokens: int
    held: HeldDocument


class NamespaceDocument(TenantDocument):
    """One namespace, likewise. ``lossy``: how it rounds what it stores, empty: not at all. ``tenant``, ``model`` and
    ``lossy`` are other if it has no name."""

    tenant: str
    model: str
    lossy: str


def node_ledger(node: "Node") -> LedgerSum:
    """All answers of a node."""
    return LedgerSum(node.accounts)


def accounting_document(node: "Node", ledger: LedgerSum) -> AccountingDocument:
    """``ledger``: of the whole node."""
    tokens, asked_tokens = ledger.tokens, sum(ledger.tokens)
    exact, lossy = ledger.exact_tokens, ledger.lossy_tokens
    return {
        "asked_segments": node.counters.lookups.asked,
        "asked_tokens": asked_tokens,
        "segments": _answers(ledger.segments),
        "tokens": _answers(tokens),
        "moved_tokens": {name: count_at(tokens, places) for name, places in MOVED_PLACES.items()},
        "missed_tokens": {name: tokens[MISS_PLACES[reason]] for reason, name in MISSED.items()},
        "error_tokens": {name: tokens[place] for name, place in ERROR_PLACES.items()},
        "exact_tokens": exact,
        "lossy_tokens": lossy,
        "exact_ratio": round(exact / asked_tokens, 6) if asked_tokens else 0.0,
        "lossy_ratio": round(lossy / asked_tokens, 6) if asked_tokens else 0.0,
    }


def namespaces_document(node: "Node") -> dict[str, NamespaceDocument]:
    """By digest, in hexadecimal; what has no name under OTHER. The sums over all are the node's."""
    catalog, found, rest = node.catalog, dict[str, NamespaceDocument](), _copy(node.catalog.totals)
    for namespace, ledger in node.accounts.named.items():
        space = catalog.spaces.get(Namespace(namespace))
        held = Totals() if space is None else space.totals
        _take(rest, held)
        answers = _tenant(LedgerSum([ledger]), held)
        found[ledger.namespace] = {**answers, "tenant": ledger.tenant, "model": ledger.model, "lossy": ledger.lossy}
    nameless = LedgerSum(one for one in node.accounts if one.namespace == OTHER)
    found[OTHER] = {**_tenant(nameless, rest), "tenant": OTHER, "model": OTHER, "lossy": OTHER}
    return found


def tenants_document(node: "Node") -> dict[str, TenantDocument]:
    """By name; what has no name under OTHER. The sums over all are the node's."""
    found, rest = dict[str, TenantDocument](), _copy(node.catalog.totals)
    for name in node.accounts.tenants:
        held = node.catalog.tenants.get(name) or Totals()
        _take(rest, held)
        found[name] = _tenant(LedgerSum(one for one in node.accounts if one.tenant == name), held)
    found[OTHER] = _tenant(LedgerSum(one for one in node.accounts if one.tenant == OTHER), rest)
    return found


def _tenant(ledger: LedgerSum, held: Totals) -> TenantDocument:
    return {
        "asked_segments": sum(ledger.segments),
        "asked_tokens": sum(ledger.tokens),
        "segments": _answers(ledger.segments),
        "tokens": _answers(ledger.tokens),
        "exact_tokens": ledger.exact_tokens,
        "lossy_tokens": ledger.lossy_tokens,
        "held": {
            "bytes_by_kind": {"master": held.master_bytes, "mirror": held.mirror_bytes},
            "bytes_by_tier": {"host": held.host_bytes, "ssd": held.ssd_bytes},
            "dense_bytes": held.dense_bytes,
            "caches": held.masters + held.mirrors,
            "families": held.families,
        },
    }


def _answers(counts: Sequence[int]) -> AnswersDocument:
    return {
        "host": count_at(counts, ANSWER_PLACES["host"]),
        "ssd": count_at(counts, ANSWER_PLACES["ssd"]),
        "remote": count_at(counts, ANSWER_PLACES["remote"]),
        "moved": count_at(counts, ANSWER_PLACES["moved"]),
        "miss": count_at(counts, ANSWER_PLACES["miss"]),
        "error": count_at(counts, ANSWER_PLACES["error"]),
    }


_SUMMED = ("master_bytes", "mirror_bytes", "dense_bytes", "host_bytes", "ssd_bytes", "masters", "mirrors", "families")


def _copy(totals: Totals) -> Totals:
    found = Totals()
    for name in _SUMMED:
        setattr(found, name, getattr(totals, name))
    return found


def _take(totals: Totals, part: Totals) -> None:
    for name in _SUMMED:
        setattr(totals, name, getattr(totals, name) - getattr(part, name))
