"""``kvservice plan``: flags to a question, over HTTP to a node, or answered here from a model's config.json."""

import argparse
import json
import urllib.parse
from typing import Any

from kvservice.model.errors import InvalidInputError
from kvservice.planning.closed_forms import what_if
from kvservice.planning.flags import HELP, NAMES
from kvservice.planning.model_config import read_model
from kvservice.planning.report import print_plan, print_what_if
from kvservice.planning.request import parse_request, round_of, size_of, speed_of
from kvservice.stats.asking import HttpNode

HTTP_TIMEOUT_S = 10.0


def run(parsed: argparse.Namespace) -> int:
    """Print the plan; 0, or 1 if there is no data yet. Raises InvalidInputError, UnavailableError."""
    values = {name: getattr(parsed, f"plan_{name}") for name in NAMES}
    query = {name: value for name, value in values.items() if value is not None}
    if parsed.model:
        return _closed_forms(parsed.model, query, as_json=parsed.json)
    parse_request(query)
    document = ask(HttpNode.of_flags(parsed), query)
    if parsed.json:
        print(json.dumps(document, indent=2))  # noqa: T201  a command line prints
    else:
        print_plan(document)
    return 0 if document["is_measured"] or document["what_if"] else 1


def _closed_forms(path: str, query: dict[str, str], *, as_json: bool) -> int:
    allowed = {"host", "dtype", *HELP} - {"ssd", "dwpd", "tenant", "namespace"}
    if query.keys() - allowed:
        raise InvalidInputError(f"with --model there is no {', '.join(sorted(query.keys() - allowed))}")
    host_bytes = size_of(query["host"], 0, "host") if "host" in query else 0
    if "host" in query and not host_bytes:
        raise InvalidInputError(
            f"host = {query['host']!r}: without a node there is no present size; write one in bytes"
        )
    document = what_if(read_model(path, query.get("dtype", "")), round_of(query), speed_of(query), host_bytes)
    if as_json:
        print(json.dumps(document, indent=2))  # noqa: T201  a command line prints
    else:
        print_what_if(document)
    return 0


def ask(node: HttpNode, query: dict[str, str]) -> Any:
    """What a node answers. Raises InvalidInputError, or as ``HttpNode.answer``."""
    return node.answer(f"/plan?{urllib.parse.urlencode(query)}", HTTP_TIMEOUT_S)
