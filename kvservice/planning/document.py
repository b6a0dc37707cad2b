"""The answer of GET /plan, one JSON object. Its schema is the types below. Sizes are bytes; None: not known.

Of a measured plan ``what_if`` is None unless it was asked for; before any traffic it is all there is, of the model that
was asked about, or else of one that an engine has registered.
"""

from typing import TypedDict


class WindowDocument(TypedDict):
    """What the curve rests on. ``rate``: share of the segments that was watched.

    ``seconds``: since its first lookup; of older lookups half counts in every ``half_life_s``.
    """

    scope: str
    seconds: float
    half_life_s: float
    references: int
    segments_watched: int
    rate: float


class SizesDocument(TypedDict):
    """What one pair of sizes finds. Ratios are of all lookups of segments, and never fall with the size.

    ``policy``: "simulated" if the order of eviction in force was, else "lru": reuse distances. ``error``: two standard
    errors of ``hit_ratio``; ``error_covers``: that of the "sample" of segments, or of the "sample and simulation". Not
    that traffic changes, nor that a size is beyond all that were simulated.
    """

    host_bytes: int
    ssd_bytes: int
    host_hit_ratio: float
    ssd_hit_ratio: float
    hit_ratio: float
    error: float
    error_covers: str
    policy: str
    prefill_saved_s_per_hour: float
    prefill_lost_s_per_hour: float


class StorageDocument(TypedDict):
    """What bytes stand for. ``dense_bytes_per_token`` without mirrors; ``mirror_gain``: dense bytes over stored ones;
    ``dedup_gain``: caches that were wanted over those written, since the others were there. Both of the whole node.

    ``working_set_bytes``: what finds 90, 99 and all of what can be found, by reuse distance.
    """

    bytes_per_token: float | None
    dense_bytes_per_token: float | None
    mirror_gain: float | None
    dedup_gain: float | None
    working_set_bytes: dict[str, int]


class EnduranceDocument(TypedDict):
    """Writes to SSD at the planned sizes, against ``rated_dwpd`` whole writes of it a day. ``life_share``: 1 is all.

    ``rests_on``: "written", measured on the tier there is, or "published": there is none yet, and all that is published
    would be written, mirrors before they are folded.
    """

    ssd_bytes: int
    written_bytes_per_day: float
    dwpd: float
    rated_dwpd: float
    life_share: float
    rests_on: str


class BreakEvenDocument(TypedDict):
    """A tier must give this many bytes a second for loading to be quicker than prefill."""

    bandwidth_bytes_per_s: float
    prefill_tokens_per_s: float
    is_prefill_measured: bool
    ssd_bytes_per_s: float | None


class WhatIfDocument(TypedDict):
    """Closed forms of a round of agents that read each other's outputs; see planning/closed_forms.py."""

    bytes_per_token: int
    tokens_per_agent: int
    dense_bytes: int
    stored_bytes: int
    ratio: float
    ratio_limit: float | None
    mirror_bytes: int
    prefill_tokens: int
    prefill_tokens_without: int
    prefill_saved_s: float | None
    break_even_bytes_per_s: float | None
    rounds_in_host: float | None
    notes: list[str]


class PlanDocument(TypedDict):
    """All of it. ``is_measured``: is there traffic enough? If not, ``missing`` says what is missing.

    ``assumes``: of a tenant's or a namespace's plan, in words: as if it had the node alone; else empty. What is only
    known of the whole node is None there: gains, endurance, the speed of the SSD. ``what_if_of``: whose model it is, in
    words; empty without a what-if.
    """

    is_measured: bool
    missing: str
    assumes: str
    window: WindowDocument | None
    observed_hit_ratio: float | None
    now: SizesDocument | None
    planned: SizesDocument | None
    storage: StorageDocument | None
    endurance: EnduranceDocument | None
    break_even: BreakEvenDocument | None
    what_if: WhatIfDocument | None
    what_if_of: str
    advice: list[str]
