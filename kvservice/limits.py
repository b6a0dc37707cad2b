"""Every limit of a node, named. Reaching one is an answer to the caller (LimitError), never a crash or a wait."""

from dataclasses import dataclass

from kvservice.model.lease import LEASE_TTL_S_MAX
from kvservice.model.limits import IDENTITIES_PER_SESSION_MAX

ANGLE_MAX = float(2**25)
"""Radians. A cache that turns further at its position can never be moved exactly. kvservice.kernels.rotation has the
same number and the reason; a node that never folds does not import kernels, so it stands here again, and a test
compares the two."""


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """Bounds of queues, loops, messages and waits.

    ``reserve_items_max``: items of one Reserve, Commit or Abort.
    ``lookup_segments_max``: segments of one Lookup. ``lookup_slice``: segments answered before other calls get a turn;
    ``explain_segments_max`` and ``explain_slice``: likewise of Explain, which costs 0.2 ms a segment.
    ``departures_max``: keys that went lately and are remembered for Explain, 34 bytes each.
    ``candidates_max``: members of a family that are ranked for a shifted use, the most recently used ones.
    ``masters_tried_max``: masters that a dense cache is compared with before it is folded.
    ``mirror_share_max``: a mirror is kept if its record is at most this share of the dense one.
    """

    lookup_segments_max: int = 65536
    lookup_slice: int = 512
    explain_segments_max: int = 8192
    explain_slice: int = 8
    departures_max: int = 65536
    reserve_items_max: int = 4096
    sessions_max: int = 4096
    client_name_chars_max: int = 256
    identities_per_session_max: int = IDENTITIES_PER_SESSION_MAX
    leases_per_session_max: int = 65536
    reservations_per_session_max: int = 65536
    lease_ttl_s: float = 30.0
    lease_ttl_s_max: float = LEASE_TTL_S_MAX
    candidates_max: int = 64
    evictions_per_reserve_max: int = 65536
    fold_queue_max: int = 65536
    ssd_queue_max: int = 65536
    masters_tried_max: int = 8
    round_members_max: int = 4096
    election_candidates_max: int = 128
    mirror_share_max: float = 0.5
    verify_job_bytes: int = 64 << 20
    upkeep_interval_s: float = 1.0
