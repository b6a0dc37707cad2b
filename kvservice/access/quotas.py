"""How many bytes each tenant may have in each tier. State only, owned by the loop; the tiers' own parts enforce it.

A quota counts what a tenant's records take, each rounded up to whole pages of 4 KiB: reserved and hidden ones too,
since they fill the tier as much as others. Records in cold storage count as long as they are.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvservice.model.errors import QuotaError


@dataclass(frozen=True, slots=True)
class Quota:
    """Most bytes of one tenant by tier; None: no limit but the tier's own size."""

    host_bytes: int | None = None
    ssd_bytes: int | None = None
    remote_bytes: int | None = None


NO_QUOTA = Quota()


@dataclass(frozen=True, slots=True)
class QuotaTable:
    """Quotas by tenant; ``default``: of the others, each for itself."""

    by_tenant: Mapping[str, Quota] = field(default_factory=dict)
    default: Quota = NO_QUOTA

    def of(self, tenant: str) -> Quota:
        """The quota of a tenant."""
        return self.by_tenant.get(tenant, self.default)

    @property
    def is_empty(self) -> bool:
        """Is nobody limited?"""
        return not self.by_tenant and self.default == NO_QUOTA


class Quotas:
    """The table in force, which may change under way, and what tenants have in cold storage."""

    def __init__(self, table: QuotaTable | None = None) -> None:
        self.table = table or QuotaTable()
        self.remote_used = Counter[str]()
        self.refused = Counter[str]()

    def of(self, tenant: str) -> Quota:
        """The quota of a tenant."""
        return self.table.of(tenant)

    def take_remote(self, tenant: str, record_bytes: int) -> bool:
        """May a record of the tenant be put into cold storage? If so it counts, until ``give_back_remote``.

        What this node put there since its start counts: cold storage is not walked to find out what others put.
        """
        limit = self.of(tenant).remote_bytes
        if limit is not None and self.remote_used[tenant] + record_bytes > limit:
            self.refused["remote"] += 1
            return False
        self.remote_used[tenant] += record_bytes
        return True

    def give_back_remote(self, tenant: str, record_bytes: int) -> None:
        """A record was deleted from cold storage, or did not get there."""
        self.remote_used[tenant] = max(self.remote_used[tenant] - record_bytes, 0)

    def refusal(self, tier: str, tenant: str, wanted: int, limit: int, fixed: int) -> QuotaError:
        """Counts a refusal and says why: ``fixed`` bytes of the tenant may not go."""
        self.refused[tier] += 1
        return QuotaError(
            f"tenant {tenant!r} may have {limit} bytes in tier {tier}; {wanted} more do not fit beside {fixed} that are"
            " leased or being written; release leases, store less, or have its quota raised"
        )
