"""That a node's accounts add up, between any two steps."""

from typing import Any

from kvservice.node import Node


def check_accounts(node: Node) -> None:
    """All that was asked is accounted for, by the node, by tenants and by namespaces; so is all that is held."""
    document: Any = node.stats_document()
    all_of_it, totals = document["accounting"], node.catalog.totals
    by_tenant, by_namespace = list(document["by_tenant"].values()), list(document["by_namespace"].values())
    assert all_of_it["asked_segments"] == sum(all_of_it["segments"].values())
    assert all_of_it["asked_tokens"] == sum(all_of_it["tokens"].values())
    assert sum(all_of_it["moved_tokens"].values()) == all_of_it["tokens"]["moved"]
    assert sum(all_of_it["missed_tokens"].values()) == all_of_it["tokens"]["miss"]
    assert sum(all_of_it["error_tokens"].values()) == all_of_it["tokens"]["error"]
    found = sum(all_of_it["tokens"][name] for name in ("host", "ssd", "remote", "moved"))
    assert all_of_it["exact_tokens"] + all_of_it["lossy_tokens"] == found
    lookups = document["lookups"]
    matched = lookups["exact"] + lookups["rounded"] + lookups["refreshed"] + lookups["shifted"]
    assert lookups["asked"] == matched + sum(lookups["missed"].values()) + lookups["broken_off"]
    for parts in (by_tenant, by_namespace):
        for name in ("exact_tokens", "lossy_tokens"):
            assert sum(part[name] for part in parts) == all_of_it[name], name
        for unit in ("segments", "tokens"):
            for name, count in all_of_it[unit].items():
                assert sum(part[unit][name] for part in parts) == count, (unit, name)
        held = [part["held"] for part in parts]
        for tier, size in (("host", totals.host_bytes), ("ssd", totals.ssd_bytes)):
            assert sum(one["bytes_by_tier"][tier] for one in held) == size
            assert all(one["bytes_by_tier"][tier] >= 0 for one in held)
        for kind, size in (("master", totals.master_bytes), ("mirror", totals.mirror_bytes)):
            assert sum(one["bytes_by_kind"][kind] for one in held) == size
            assert all(one["bytes_by_kind"][kind] >= 0 for one in held)
