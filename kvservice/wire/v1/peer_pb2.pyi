from kvservice.wire.v1 import cache_pb2 as _cache_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerFacts(_message.Message):
    __slots__ = ("uuid", "epoch", "name", "weight", "is_draining", "empty_s", "flight_port", "boot_id", "local_path")
    UUID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    EMPTY_S_FIELD_NUMBER: _ClassVar[int]
    FLIGHT_PORT_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PATH_FIELD_NUMBER: _ClassVar[int]
    uuid: bytes
    epoch: int
    name: str
    weight: float
    is_draining: bool
    empty_s: float
    flight_port: int
    boot_id: str
    local_path: str
    def __init__(self, uuid: _Optional[bytes] = ..., epoch: _Optional[int] = ..., name: _Optional[str] = ..., weight: _Optional[float] = ..., is_draining: bool = ..., empty_s: _Optional[float] = ..., flight_port: _Optional[int] = ..., boot_id: _Optional[str] = ..., local_path: _Optional[str] = ...) -> None: ...

class PeerHello(_message.Message):
    __slots__ = ("facts", "token", "session", "version")
    FACTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    facts: PeerFacts
    token: str
    session: bytes
    version: str
    def __init__(self, facts: _Optional[_Union[PeerFacts, _Mapping]] = ..., token: _Optional[str] = ..., session: _Optional[bytes] = ..., version: _Optional[str] = ...) -> None: ...

class PeerWelcome(_message.Message):
    __slots__ = ("facts", "session", "version", "limits")
    FACTS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    facts: PeerFacts
    session: bytes
    version: str
    limits: PeerLimits
    def __init__(self, facts: _Optional[_Union[PeerFacts, _Mapping]] = ..., session: _Optional[bytes] = ..., version: _Optional[str] = ..., limits: _Optional[_Union[PeerLimits, _Mapping]] = ...) -> None: ...

class PeerLimits(_message.Message):
    __slots__ = ("find_queries_max", "record_bytes_max", "fetch_bytes_max", "fetches_max")
    FIND_QUERIES_MAX_FIELD_NUMBER: _ClassVar[int]
    RECORD_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    FETCH_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    FETCHES_MAX_FIELD_NUMBER: _ClassVar[int]
    find_queries_max: int
    record_bytes_max: int
    fetch_bytes_max: int
    fetches_max: int
    def __init__(self, find_queries_max: _Optional[int] = ..., record_bytes_max: _Optional[int] = ..., fetch_bytes_max: _Optional[int] = ..., fetches_max: _Optional[int] = ...) -> None: ...

class PeerArena(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class PeerLent(_message.Message):
    __slots__ = ("offset", "bytes")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    offset: int
    bytes: int
    def __init__(self, offset: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class PeerPacked(_message.Message):
    __slots__ = ("dtype", "head_size", "heads")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    head_size: int
    heads: int
    def __init__(self, dtype: _Optional[str] = ..., head_size: _Optional[int] = ..., heads: _Optional[int] = ...) -> None: ...

class PeerError(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class PeerFind(_message.Message):
    __slots__ = ("identities", "queries", "lease_ttl_s", "wait_s", "ahead_bytes")
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    AHEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    identities: _containers.RepeatedScalarFieldContainer[str]
    queries: _containers.RepeatedCompositeFieldContainer[PeerQuery]
    lease_ttl_s: float
    wait_s: float
    ahead_bytes: int
    def __init__(self, identities: _Optional[_Iterable[str]] = ..., queries: _Optional[_Iterable[_Union[PeerQuery, _Mapping]]] = ..., lease_ttl_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., ahead_bytes: _Optional[int] = ...) -> None: ...

class PeerQuery(_message.Message):
    __slots__ = ("namespace", "segment", "accepted_contexts", "position", "tokens", "may_shift", "affinity_min", "marks")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAY_SHIFT_FIELD_NUMBER: _ClassVar[int]
    AFFINITY_MIN_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    segment: bytes
    accepted_contexts: _containers.RepeatedScalarFieldContainer[bytes]
    position: int
    tokens: int
    may_shift: bool
    affinity_min: int
    marks: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., segment: _Optional[bytes] = ..., accepted_contexts: _Optional[_Iterable[bytes]] = ..., position: _Optional[int] = ..., tokens: _Optional[int] = ..., may_shift: bool = ..., affinity_min: _Optional[int] = ..., marks: _Optional[bytes] = ...) -> None: ...

class PeerFound(_message.Message):
    __slots__ = ("lease_id", "ttl_s", "answers")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    ttl_s: float
    answers: _containers.RepeatedCompositeFieldContainer[PeerAnswer]
    def __init__(self, lease_id: _Optional[int] = ..., ttl_s: _Optional[float] = ..., answers: _Optional[_Iterable[_Union[PeerAnswer, _Mapping]]] = ...) -> None: ...

class PeerAnswer(_message.Message):
    __slots__ = ("match", "miss_reason", "affinity", "record", "master")
    MATCH_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    AFFINITY_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    MASTER_FIELD_NUMBER: _ClassVar[int]
    match: int
    miss_reason: int
    affinity: int
    record: PeerHead
    master: PeerHead
    def __init__(self, match: _Optional[int] = ..., miss_reason: _Optional[int] = ..., affinity: _Optional[int] = ..., record: _Optional[_Union[PeerHead, _Mapping]] = ..., master: _Optional[_Union[PeerHead, _Mapping]] = ...) -> None: ...

class PeerHead(_message.Message):
    __slots__ = ("head", "prefill_s", "ahead_bytes")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    AHEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    head: bytes
    prefill_s: float
    ahead_bytes: int
    def __init__(self, head: _Optional[bytes] = ..., prefill_s: _Optional[float] = ..., ahead_bytes: _Optional[int] = ...) -> None: ...

class PeerFetch(_message.Message):
    __slots__ = ("identities", "namespace", "key", "generation", "lease_id", "start", "leased", "takes_packed")
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    TAKES_PACKED_FIELD_NUMBER: _ClassVar[int]
    identities: _containers.RepeatedScalarFieldContainer[str]
    namespace: bytes
    key: _cache_pb2.CacheKey
    generation: int
    lease_id: int
    start: int
    leased: PeerLeased
    takes_packed: bool
    def __init__(self, identities: _Optional[_Iterable[str]] = ..., namespace: _Optional[bytes] = ..., key: _Optional[_Union[_cache_pb2.CacheKey, _Mapping]] = ..., generation: _Optional[int] = ..., lease_id: _Optional[int] = ..., start: _Optional[int] = ..., leased: _Optional[_Union[PeerLeased, _Mapping]] = ..., takes_packed: bool = ...) -> None: ...

class PeerLeased(_message.Message):
    __slots__ = ("session", "lease_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    lease_id: int
    def __init__(self, session: _Optional[bytes] = ..., lease_id: _Optional[int] = ...) -> None: ...

class PeerStore(_message.Message):
    __slots__ = ("identities", "namespace", "key", "record_bytes", "master_context", "master_generation", "prefill_s", "packs")
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    RECORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MASTER_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MASTER_GENERATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    PACKS_FIELD_NUMBER: _ClassVar[int]
    identities: _containers.RepeatedScalarFieldContainer[str]
    namespace: bytes
    key: _cache_pb2.CacheKey
    record_bytes: int
    master_context: bytes
    master_generation: int
    prefill_s: float
    packs: bool
    def __init__(self, identities: _Optional[_Iterable[str]] = ..., namespace: _Optional[bytes] = ..., key: _Optional[_Union[_cache_pb2.CacheKey, _Mapping]] = ..., record_bytes: _Optional[int] = ..., master_context: _Optional[bytes] = ..., master_generation: _Optional[int] = ..., prefill_s: _Optional[float] = ..., packs: bool = ...) -> None: ...

class PeerGo(_message.Message):
    __slots__ = ("takes_packed",)
    TAKES_PACKED_FIELD_NUMBER: _ClassVar[int]
    takes_packed: bool
    def __init__(self, takes_packed: bool = ...) -> None: ...

class PeerCommit(_message.Message):
    __slots__ = ("header_checksum",)
    HEADER_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    header_checksum: int
    def __init__(self, header_checksum: _Optional[int] = ...) -> None: ...

class PeerStored(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class PeerDelete(_message.Message):
    __slots__ = ("identities", "namespace", "keys", "is_whole_namespace")
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    IS_WHOLE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    identities: _containers.RepeatedScalarFieldContainer[str]
    namespace: bytes
    keys: _containers.RepeatedCompositeFieldContainer[_cache_pb2.CacheKey]
    is_whole_namespace: bool
    def __init__(self, identities: _Optional[_Iterable[str]] = ..., namespace: _Optional[bytes] = ..., keys: _Optional[_Iterable[_Union[_cache_pb2.CacheKey, _Mapping]]] = ..., is_whole_namespace: bool = ...) -> None: ...

class PeerRenew(_message.Message):
    __slots__ = ("lease_ids", "lease_ttl_s")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    lease_ttl_s: float
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ..., lease_ttl_s: _Optional[float] = ...) -> None: ...

class PeerRelease(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PeerCount(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...
