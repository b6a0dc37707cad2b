"""Bytes as Arrow batches of one uint8 column, without a copy, and our errors as Flight's. Needs pyarrow."""

from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError
from pyarrow import flight

from kvservice.model.errors import (
    InvalidInputError,
    KVServiceError,
    UnauthenticatedError,
    UnavailableError,
    error_from_code,
)
from kvservice.peers.call import SilentError
from kvservice.peers.flight_words import BATCH_BYTES_MAX, COLUMN
from kvservice.peers.streams_messages import encode_error
from kvservice.storage.buffer import Bytes
from kvservice.wire.v1 import peer_pb2 as wire

SCHEMA = pa.schema([pa.field(COLUMN, pa.uint8(), nullable=False)])
FLIGHT_ERRORS = (pa.ArrowException, OSError, ValueError)
"""What calls of pyarrow.flight raise; its errors are of the first kind but for a few."""


def whole_of(view: memoryview) -> Any:
    """A pyarrow buffer of all of ``view``, which is kept alive by every batch of it that somebody still sends."""
    return pa.py_buffer(view)


def batch_of(whole: Any, start: int, end: int) -> Any:
    """Bytes [start, end) as a batch; no copy."""
    column = pa.Array.from_buffers(pa.uint8(), end - start, [None, whole.slice(start, end - start)])
    return pa.RecordBatch.from_arrays([column], schema=SCHEMA)


def bytes_of(batch: Any) -> Bytes:
    """The bytes of a batch that came from another node; no copy. Raises InvalidInputError for anything else."""
    if batch.num_columns != 1 or batch.num_rows > BATCH_BYTES_MAX:
        raise InvalidInputError(f"a batch of {batch.num_columns} columns and {batch.num_rows} rows: not of a record")
    column = batch.column(0)
    if column.type != pa.uint8() or column.null_count:
        raise InvalidInputError(f"a batch of {column.type} with {column.null_count} nulls: not of a record")
    if not batch.num_rows:
        return np.empty(0, np.uint8)
    data = column.buffers()[1]
    if data is None or column.offset + len(column) > data.size:
        raise InvalidInputError("a batch says more bytes than it has")
    return np.frombuffer(data, np.uint8, len(column), column.offset)


def to_flight(error: KVServiceError) -> Exception:
    """The Flight error that says the same to another node; the text stands in its extra info alone."""
    kind = flight.FlightUnauthenticatedError if isinstance(error, UnauthenticatedError) else flight.FlightServerError
    raised: Exception = kind(f"kvservice: {error.code}", encode_error(error).SerializeToString())
    return raised


def from_flight(error: BaseException, where: str, deadline_s: float) -> KVServiceError:
    """Our error for what a call of ``where`` raised."""
    said = _said(getattr(error, "extra_info", b""))
    if said is not None:
        return error_from_code(said.code, said.message)
    if isinstance(error, flight.FlightTimedOutError):
        return SilentError(f"{where} did not answer within {deadline_s:g} s")
    if isinstance(error, flight.FlightUnavailableError):
        return UnavailableError(f"{where} cannot be reached over Flight: {_short(error)}")
    return UnavailableError(f"{where} broke off a Flight call: {_short(error)}")


def is_answer(error: BaseException) -> bool:
    """Did the other node say it, rather than that nobody did?"""
    return _said(getattr(error, "extra_info", b"")) is not None


def _said(extra: bytes | None) -> wire.PeerError | None:
    said = wire.PeerError()
    try:
        said.ParseFromString(extra or b"")
    except DecodeError:
        return None
    return said if said.code else None


def _short(error: BaseException) -> str:
    return str(error).partition(". gRPC client debug")[0][:300]
