"""The request log as an Arrow table, and that as a file: for pandas, DuckDB, Polars and the like. Needs pyarrow.

One row a segment that a lookup asked for, in the order in which they were answered:

    time           timestamp[us, UTC]     when its prompt was answered
    call           uint64                 the lookup, rising; one lookup has all prompts of a round
    prompt         uint32                 the prompt, rising
    namespace      dictionary<string>     digest in hexadecimal; empty: not registered, or more than 4,096 in the rows
    tenant, model  dictionary<string>     of its identity, 128 characters at most
    segment        fixed_size_binary[16]  the start of the segment's id
    context        fixed_size_binary[16]  the start of the first context that would answer it as it is; zero: none
    position       uint32                 of its first token in the prompt
    tokens         uint32
    answer         dictionary<string>     host, ssd, remote, moved, miss or error: see kvservice/accounting.py
    reason         dictionary<string>     the tier it came from; or why it was not found
    match          dictionary<string>     exact, refreshed, shifted or none
    affinity       uint8                  segments right before it that agree, of what was found; 255 is that or more
    record_bytes   uint64                 of the record that was found, without its master's

The file's metadata say how many rows before the first are lost (``lost``).
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvservice.accounting import ANSWER_PLACES, MATCH_PLACES, NAME_OF_PLACE, PLACES
from kvservice.model.errors import ConfigError
from kvservice.request_log import FIELDS, Snapshot

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = {"parquet": "application/vnd.apache.parquet", "arrow": "application/vnd.apache.arrow.file"}
COLUMNS = (
    "time", "call", "prompt", "namespace", "tenant", "model", "segment", "context", "position", "tokens", "answer",
    "reason", "match", "affinity", "record_bytes",
)  # fmt: skip
_ANSWER_OF_PLACE = {place: answer for answer, places in ANSWER_PLACES.items() for place in places}
_MATCH_OF_PLACE = {place: match.name.lower() for match, places in MATCH_PLACES.items() for place in places}


def require_pyarrow() -> Any:
    """The module. Raises ConfigError without it."""
    try:
        import pyarrow as pa
    except ModuleNotFoundError as error:
        raise ConfigError("exporting the request log needs pyarrow: pip install 'kvservice[log]'") from error
    return pa


def log_table(snapshot: Snapshot) -> "pa.Table":
    """The rows of a snapshot. Raises ConfigError without pyarrow."""
    pa = require_pyarrow()
    rows = np.frombuffer(snapshot.rows, np.dtype(list(FIELDS)))
    named, place = snapshot.namespaces, rows["place"]
    columns = {
        "time": pa.array(rows["time_us"].astype(np.int64), pa.timestamp("us", "UTC")),
        **{name: pa.array(np.ascontiguousarray(rows[name])) for name in ("call", "prompt")},
        **{
            name: _texts(rows["namespace"], [getattr(one, field) for one in named])
            for name, field in (("namespace", "digest"), ("tenant", "tenant"), ("model", "model"))
        },
        **{name: _digests(rows[name]) for name in ("segment", "context")},
        **{name: pa.array(np.ascontiguousarray(rows[name])) for name in ("position", "tokens")},
        "answer": _texts(place, [_ANSWER_OF_PLACE.get(one, "") for one in range(PLACES)]),
        "reason": _texts(place, [NAME_OF_PLACE.get(one, "") for one in range(PLACES)]),
        "match": _texts(place, [_MATCH_OF_PLACE.get(one, "none") for one in range(PLACES)]),
        **{name: pa.array(np.ascontiguousarray(rows[name])) for name in ("affinity", "record_bytes")},
    }
    return pa.table(columns).replace_schema_metadata({"lost": str(snapshot.lost)})


def log_file(snapshot: Snapshot, kind: str) -> bytes:
    """The same as a file of a kind of FORMATS. Raises ConfigError without pyarrow."""
    table = log_table(snapshot)
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    if kind == "parquet":
        pq.write_table(table, sink, compression="zstd")
    else:
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _texts(numbers: npt.NDArray[Any], texts: list[str]) -> Any:
    """Equal texts become one entry of the dictionary."""
    pa = require_pyarrow()
    known = list(dict.fromkeys(texts))
    place_of = {text: index for index, text in enumerate(known)}
    indices = np.array([place_of[text] for text in texts], np.int32)[numbers]
    return pa.DictionaryArray.from_arrays(pa.array(indices), pa.array(known, pa.string()))


def _digests(column: npt.NDArray[Any]) -> Any:
    pa = require_pyarrow()
    content = np.ascontiguousarray(column).tobytes()
    return pa.Array.from_buffers(pa.binary(column.itemsize), len(column), [None, pa.py_buffer(content)])
