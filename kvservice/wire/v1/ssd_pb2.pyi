from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class SsdRecord(_message.Message):
    __slots__ = ("record_bytes", "generation", "header_checksum", "sequence", "prefill_s", "is_deleted", "provenance", "position", "tokens", "preceding", "master_context", "master_generation")
    RECORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HEADER_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    IS_DELETED_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRECEDING_FIELD_NUMBER: _ClassVar[int]
    MASTER_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MASTER_GENERATION_FIELD_NUMBER: _ClassVar[int]
    record_bytes: int
    generation: int
    header_checksum: int
    sequence: int
    prefill_s: float
    is_deleted: bool
    provenance: str
    position: int
    tokens: int
    preceding: bytes
    master_context: bytes
    master_generation: int
    def __init__(self, record_bytes: _Optional[int] = ..., generation: _Optional[int] = ..., header_checksum: _Optional[int] = ..., sequence: _Optional[int] = ..., prefill_s: _Optional[float] = ..., is_deleted: bool = ..., provenance: _Optional[str] = ..., position: _Optional[int] = ..., tokens: _Optional[int] = ..., preceding: _Optional[bytes] = ..., master_context: _Optional[bytes] = ..., master_generation: _Optional[int] = ...) -> None: ...

class SsdNote(_message.Message):
    __slots__ = ("kind", "extent_bytes", "sequence", "payload")
    KIND_FIELD_NUMBER: _ClassVar[int]
    EXTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    kind: int
    extent_bytes: int
    sequence: int
    payload: bytes
    def __init__(self, kind: _Optional[int] = ..., extent_bytes: _Optional[int] = ..., sequence: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...
