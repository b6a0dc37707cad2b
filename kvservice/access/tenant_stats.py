"""What a caller that is no admin is told of a node: its own tenants' figures and quotas, nothing that others move."""

import json
from typing import TYPE_CHECKING

from kvservice import __version__
from kvservice.access.gate import Gate
from kvservice.access.principal import Principal

if TYPE_CHECKING:
    from kvservice.node import Node


def tenant_stats_json(node: "Node", gate: Gate, principal: Principal) -> str:
    """As JSON. ``by_tenant`` and ``by_namespace``: as in the whole document, of those that have names there."""
    from kvservice.accounting import OTHER
    from kvservice.stats.accounting_document import namespaces_document, tenants_document

    def is_own(tenant: str) -> bool:
        return tenant != OTHER and principal.may(tenant)

    spaces = namespaces_document(node).items()
    document = {
        "version": __version__,
        "boot_epoch": node.boot_epoch,
        "principal": principal.name,
        "by_tenant": {name: one for name, one in tenants_document(node).items() if is_own(name)},
        "by_namespace": {name: one for name, one in spaces if is_own(one["tenant"])},
        "quotas": {name: quota_document(node, gate, name) for name in sorted(principal.tenants or ())},
    }
    return json.dumps(document)


def quota_document(node: "Node", gate: Gate, tenant: str) -> dict[str, dict[str, int | None]]:
    """By tier what a tenant takes and what it may take, None: no limit."""
    quota, room = gate.quotas.of(tenant), node.allocation.room
    return {
        "host": {"taken_bytes": room.host_taken(tenant), "limit_bytes": quota.host_bytes},
        "ssd": {"taken_bytes": room.ssd_taken(tenant), "limit_bytes": quota.ssd_bytes},
        "remote": {"taken_bytes": gate.quotas.remote_used[tenant], "limit_bytes": quota.remote_bytes},
    }
