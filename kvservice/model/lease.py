"""Leases: a lookup's promise that what it found stays readable."""

from dataclasses import dataclass
from typing import NewType

LeaseId = NewType("LeaseId", int)
SessionId = NewType("SessionId", bytes)
BootEpoch = NewType("BootEpoch", int)
"""Rises with every start of a service; handles of another epoch are void."""

LEASE_TTL_S_MAX = 600.0


@dataclass(frozen=True, slots=True)
class Lease:
    """Held by a session, renewed, released by id, freed when the session ends or at ``deadline_s``.

    ``deadline_s`` is on the service's monotonic clock; only the service compares it.
    """

    id: LeaseId
    session: SessionId
    boot_epoch: BootEpoch
    deadline_s: float
