"""Grafana's dashboard and Prometheus's alerts: every metric, label and value that they name is one that a node has."""

import json
import re
import subprocess
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.page.builders import PageWorld

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD, ALERTS = DEPLOY / "grafana/kvservice.json", DEPLOY / "prometheus/alerts.yml"
ADDED = {"job", "instance"}
"""Labels that Prometheus adds to what it scrapes."""
GRAFANA_ONLY = {"$__rate_interval": "5m", "$job": "kvservice", "$instance": ".*"}
Labels = Mapping[str, set[str]]


@pytest.fixture(scope="module")
def metrics() -> Labels:
    """Names of samples as a node shows them from zero, and per name what its labels may be: ``label=value``."""
    with PageWorld(lookups=5) as page, urllib.request.urlopen(f"http://{page.address}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    found: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        found.setdefault(family.name, set())
        for sample in family.samples:
            found[sample.name] |= {f"{name}={value}" for name, value in sample.labels.items()}
    return found


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    for rule in alerts():
        yield rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_what_an_expression_names_is_there(title: str, expression: str, metrics: Labels) -> None:
    for name, value in GRAFANA_ONLY.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, title
    selectors = re.findall(r"\b(kvservice_\w+)(?:\{([^}]*)\})?", expression)
    assert selectors or re.search(r"\bup\{", expression), title
    for name, matchers in selectors:
        assert name in metrics, f"{title}: there is no metric {name}"
        for label, operator, value in re.findall(r'(\w+)\s*(=~|=)\s*"([^"]*)"', matchers):
            if label in ADDED:
                continue
            known = {one.partition("=")[2] for one in metrics[name] if one.startswith(f"{label}=")}
            wanted = {value} if operator == "=" else None
            assert known, f"{title}: {name} has no label {label}"
            for one in value.split("|") if wanted is None else wanted:
                assert any(re.fullmatch(one, text) for text in known), f"{title}: {name} has no {label}={one}"
    _check_groups(title, expression, {name for name, _ in selectors}, metrics)


def _check_groups(title: str, expression: str, names: set[str], metrics: Labels) -> None:
    there = {one.partition("=")[0] for name in names for one in metrics[name]} | ADDED
    for clause in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        labels = {label.strip() for label in clause.split(",")}
        assert labels <= there, f"{title}: none of its metrics has {labels - there}"


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_an_expression_is_well_formed(title: str, expression: str) -> None:
    """What can be seen without Prometheus; `make check-alerts` asks its own promtool."""
    bare = re.sub(r'"[^"]*"', '""', expression)
    for opening, closing in ("()", "{}", "[]"):
        assert bare.count(opening) == bare.count(closing), title
    assert expression.count('"') % 2 == 0, title
    for name in re.findall(r"(?:rate|increase)\((kvservice_\w+)", expression):
        assert name.endswith(("_total", "_bucket", "_count", "_sum")), f"{title}: {name} is no counter"


def test_alerts_say_what_is_wrong_and_what_to_do() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names)) > 10
    for rule in alerts():
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]
        assert "instance" in rule["annotations"]["summary"], rule["alert"]
        labels = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        kept = re.search(r"\bby \(([^)]*)\)", rule["expr"])
        if kept:
            assert labels <= set(kept[1].replace(" ", "").split(",")), rule["alert"]


def test_every_alert_is_spoken_of_in_the_alerts_own_tests() -> None:
    text = (DEPLOY / "prometheus/alerts_test.yml").read_text()
    yaml.safe_load(text)
    assert [rule["alert"] for rule in alerts() if rule["alert"] not in text] == []


def test_prometheus_scrapes_the_port_that_a_node_listens_on() -> None:
    from kvservice.config import Settings

    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    (scrape,) = config["scrape_configs"]
    assert scrape["job_name"] == "kvservice"
    assert scrape["static_configs"][0]["targets"] == [f"{Settings().host}:{Settings().http_port}"]
    assert config["rule_files"] == [ALERTS.name]


def test_the_dashboard_is_what_its_program_writes() -> None:
    program = DEPLOY / "grafana/dashboard.py"
    written = subprocess.run([sys.executable, "-P", program], capture_output=True, text=True, check=True, timeout=60)
    assert DASHBOARD.read_text() == written.stdout, f"run: python {program} > {DASHBOARD}"


def test_panels_have_places_of_their_own() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(x + place["x"], y + place["y"]) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(?!__)(\w+)", json.dumps(dashboard["panels"]))) <= names
