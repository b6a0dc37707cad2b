from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlaneShape(_message.Message):
    __slots__ = ("name", "heads", "head_size", "rotary_offset", "rotary_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    ROTARY_OFFSET_FIELD_NUMBER: _ClassVar[int]
    ROTARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    heads: int
    head_size: int
    rotary_offset: int
    rotary_size: int
    def __init__(self, name: _Optional[str] = ..., heads: _Optional[int] = ..., head_size: _Optional[int] = ..., rotary_offset: _Optional[int] = ..., rotary_size: _Optional[int] = ...) -> None: ...

class GeometryShape(_message.Message):
    __slots__ = ("layers", "dtype", "planes")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    layers: int
    dtype: str
    planes: _containers.RepeatedCompositeFieldContainer[PlaneShape]
    def __init__(self, layers: _Optional[int] = ..., dtype: _Optional[str] = ..., planes: _Optional[_Iterable[_Union[PlaneShape, _Mapping]]] = ...) -> None: ...

class MasterReference(_message.Message):
    __slots__ = ("context", "generation")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    context: bytes
    generation: int
    def __init__(self, context: _Optional[bytes] = ..., generation: _Optional[int] = ...) -> None: ...

class RecordHeader(_message.Message):
    __slots__ = ("namespace", "segment", "context", "provenance", "position", "tokens", "geometry", "preceding", "master", "section_bytes", "section_checksums")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    PRECEDING_FIELD_NUMBER: _ClassVar[int]
    MASTER_FIELD_NUMBER: _ClassVar[int]
    SECTION_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECTION_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    segment: bytes
    context: bytes
    provenance: str
    position: int
    tokens: int
    geometry: GeometryShape
    preceding: bytes
    master: MasterReference
    section_bytes: _containers.RepeatedScalarFieldContainer[int]
    section_checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, namespace: _Optional[bytes] = ..., segment: _Optional[bytes] = ..., context: _Optional[bytes] = ..., provenance: _Optional[str] = ..., position: _Optional[int] = ..., tokens: _Optional[int] = ..., geometry: _Optional[_Union[GeometryShape, _Mapping]] = ..., preceding: _Optional[bytes] = ..., master: _Optional[_Union[MasterReference, _Mapping]] = ..., section_bytes: _Optional[_Iterable[int]] = ..., section_checksums: _Optional[_Iterable[int]] = ...) -> None: ...
