"""What a node answers has the schema that is given to others, and every metric is in the page that tells of them."""

import importlib.util
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvservice.accounting import OTHER, AccountLimits, Accounts
from kvservice.stats.answers import Resting
from kvservice.stats.http import DocumentCollector
from kvservice.stats.metrics import METRICS
from kvservice.stats.reference import GROUPS, reference
from kvservice.stats.schema import DOCUMENTS, schema_of, schema_text
from tests.server.builders import World, make_identity, make_meta, make_planes
from tests.server.http_world import http_of
from tests.server.ssd_world import SsdWorld, written

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
IDENTITY = make_identity()
QUERIES = {"stats": "/stats", "plan": "/plan", "curves": "/curves", "families": "/families"}


def problems(value: Any, schema: Mapping[str, Any], top: Mapping[str, Any], where: str = "$") -> Iterator[str]:
    """What is wrong with a document. Names that the schema does not know are wrong too."""
    if "$ref" in schema:
        schema = top["$defs"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        found = [list(problems(value, one, top, where)) for one in schema["anyOf"]]
        yield from [] if not all(found) else [f"{where}: none of {len(found)} fits: {found}"]
        return
    kinds: Any = {"string": str, "boolean": bool, "integer": int, "number": (int, float), "array": list,
                  "object": dict, "null": type(None)}  # fmt: skip
    is_flag = isinstance(value, bool) and schema["type"] != "boolean"
    if is_flag or not isinstance(value, kinds[schema["type"]]):
        yield f"{where}: {value!r} is no {schema['type']}"
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from problems(one, schema["items"], top, f"{where}[{index}]")
    elif isinstance(value, dict):
        yield from (f"{where}.{name} is missing" for name in set(schema.get("required", ())) - set(value))
        for name, one in value.items():
            below = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            yield from [f"{where}.{name} is unknown"] if below is None else problems(one, below, top, f"{where}.{name}")


def check(name: str, document: Any) -> None:
    """By our own reading, and by the library where it is installed."""
    schema = json.loads((DEPLOY / "schemas" / f"{name}.json").read_text())
    assert list(problems(document, schema, schema)) == []
    if importlib.util.find_spec("jsonschema"):
        import jsonschema  # type: ignore[import-untyped, unused-ignore]

        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.Draft202012Validator(schema).validate(document)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_files_are_what_the_types_say(name: str) -> None:
    text = (DEPLOY / "schemas" / f"{name}.json").read_text()
    assert text == schema_text(DOCUMENTS[name]), "run: python -m kvservice.stats.schema deploy/schemas"


def test_the_page_of_metrics_is_what_the_table_says() -> None:
    text = (DEPLOY / "metrics.md").read_text()
    assert text == reference().rstrip("\n") + "\n", "run: python -m kvservice.stats.reference deploy/metrics.md"
    assert {spec.path[0] for spec in METRICS} == set(GROUPS), "every metric has a heading"
    assert all(f"| `{spec.name}` |" in text for spec in METRICS)


@pytest.mark.parametrize("name", QUERIES)
async def test_a_live_document_has_its_schema_before_traffic_and_after(name: str) -> None:
    async with SsdWorld() as world, http_of(world.node) as http:
        check(name, (await http.get(QUERIES[name])).json)
        client = world.client(IDENTITY, make_identity(tenant="b"))
        for history in ((), ("a",), ("b",)):
            meta = make_meta(IDENTITY, history=history)
            await client.store(meta, make_planes(), prefill_s=0.1)
            await client.find(meta)
        await client.find(make_meta(IDENTITY, "nothing"))
        await world.node.fold_pending()
        await written(world)
        check(name, (await http.get(QUERIES[name])).json)


def test_a_wrong_document_is_told() -> None:
    schema = schema_of(DOCUMENTS["curves"])
    found = "\n".join(problems({"scope": 1, "more": 2, "bytes": ["x"]}, schema, schema))
    for words in ("$.scope: 1 is no string", "$.more is unknown", "$.bytes[0]", "$.scopes is missing"):
        assert words in found


# Metrics


async def test_labels_are_bounded_and_a_scrape_is_quick_with_a_thousand_namespaces() -> None:
    world = World()
    world.node.accounts = Accounts(AccountLimits())
    identities = [replace(make_identity(tenant=f"t{number % 50}"), salt=str(number)) for number in range(1000)]
    for first in range(0, 1000, 50):
        client = world.client(*identities[first : first + 50])
        for identity in identities[first : first + 50]:
            await client.find(make_meta(identity))
    registry = CollectorRegistry()
    registry.register(DocumentCollector(world.node.stats_document))
    text = Resting(lambda: generate_latest(registry), world.clock)
    seconds = []
    for _ in range(5):
        world.clock.now_s += 1.0
        began_s = time.perf_counter()
        found = text.get()
        seconds.append(time.perf_counter() - began_s)
    families = {family.name: family for family in text_string_to_metric_families(found.decode())}
    labels = {one.labels["namespace"] for one in families["kvservice_namespace_info"].samples}
    assert len(labels) == 33
    assert OTHER in labels
    tenants = families["kvservice_tenant_answered_tokens"].samples
    assert len({one.labels["tenant"] for one in tenants}) == 17
    assert sum(one.value for one in tenants) == 16000
    assert min(seconds) < 0.1, "0.02 on a quiet machine"


async def test_texts_of_clients_cannot_break_the_metrics() -> None:
    world = World()
    evil = 'a"} 1\nkvservice_x{b="\\'
    identity = replace(make_identity(tenant=evil), model=evil)
    await world.client(identity).find(make_meta(identity))
    async with http_of(world.node) as http:
        text = (await http.get("/metrics")).body.decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert evil in {one.labels["tenant"] for one in families["kvservice_tenant_answered_tokens"].samples}
        assert "kvservice_x" not in families
        check("stats", (await http.get("/stats")).json)
