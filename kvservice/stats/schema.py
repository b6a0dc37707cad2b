"""JSON schemas of what a node answers over HTTP, made of the same types that the code is checked against.

`python -m kvservice.stats.schema FOLDER` writes them; deploy/schemas holds them, and a test compares.
"""

import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from kvservice.page.families_document import FamiliesDocument
from kvservice.planning.document import PlanDocument
from kvservice.planning.measuring import CurvesDocument
from kvservice.stats.document import NodeDocument
from kvservice.stats.explain_document import ExplainDocument

DIALECT = "https://json-schema.org/draft/2020-12/schema"
DOCUMENTS: Mapping[str, type] = {
    "stats": NodeDocument,
    "plan": PlanDocument,
    "curves": CurvesDocument,
    "explain": ExplainDocument,
    "families": FamiliesDocument,
}
"""By the path that answers with it."""
_PLAIN = {str: "string", bool: "boolean", int: "integer", float: "number"}


def schema_of(document: type) -> dict[str, Any]:
    """The JSON schema of a TypedDict. Names may be added to a document; those that are there stay."""
    definitions: dict[str, Any] = {}
    _define(document, definitions)
    top = definitions.pop(document.__name__)
    return {"$schema": DIALECT, "title": document.__name__, **top, "$defs": dict(sorted(definitions.items()))}


def schema_text(document: type) -> str:
    """The same as the text of a file."""
    return json.dumps(schema_of(document), indent=2) + "\n"


def _define(document: type, definitions: dict[str, Any]) -> None:
    if document.__name__ in definitions:
        return
    definitions[document.__name__] = {}
    hints = get_type_hints(document)
    definitions[document.__name__] = {
        "description": " ".join((document.__doc__ or "").split()),
        "type": "object",
        "properties": {name: _schema(hint, definitions) for name, hint in hints.items()},
        "required": list(hints),
    }


def _schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if hint is type(None):
        return {"type": "null"}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if is_typeddict(hint):
        _define(hint, definitions)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    origin, inner = get_origin(hint), get_args(hint)
    if origin is list:
        return {"type": "array", "items": _schema(inner[0], definitions)}
    if origin is dict and inner[0] is str:
        return {"type": "object", "additionalProperties": _schema(inner[1], definitions)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(one, definitions) for one in inner]}
    raise TypeError(f"{hint} has no place in a document; write a TypedDict, a list, a dict of texts or a plain type")


def main(folder: str) -> None:
    """Write a file a document."""
    for name, document in DOCUMENTS.items():
        (Path(folder) / f"{name}.json").write_text(schema_text(document))


if __name__ == "__main__":
    main(sys.argv[1])
