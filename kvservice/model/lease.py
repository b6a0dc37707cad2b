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

    ``deadline_s`` is on the monotonic clock of the process that made the object, and means nothing elsewhere. The
    service's says when the lease ends unless renewed. A client's counts from before it asked, so it never lies later
    than the service's, and is not moved by renewals: whether the lease is held now is the session's to say.
    """

    id: LeaseId
    session: SessionId
    boot_epoch: BootEpoch
    deadline_s: float
