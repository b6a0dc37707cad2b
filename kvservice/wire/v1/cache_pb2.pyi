from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CacheKey(_message.Message):
    __slots__ = ("segment", "context")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    segment: bytes
    context: bytes
    def __init__(self, segment: _Optional[bytes] = ..., context: _Optional[bytes] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("offset", "length")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class ItemError(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("hello", "register")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    register: RegisterIdentities
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., register: _Optional[_Union[RegisterIdentities, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("client_name", "wants_write", "identities")
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    WANTS_WRITE_FIELD_NUMBER: _ClassVar[int]
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    client_name: str
    wants_write: bool
    identities: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, client_name: _Optional[str] = ..., wants_write: bool = ..., identities: _Optional[_Iterable[str]] = ...) -> None: ...

class RegisterIdentities(_message.Message):
    __slots__ = ("identities",)
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    identities: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, identities: _Optional[_Iterable[str]] = ...) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("welcome", "registered")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    registered: Registered
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., registered: _Optional[_Union[Registered, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("session_id", "boot_epoch", "namespaces", "limits", "arena", "version")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    boot_epoch: int
    namespaces: _containers.RepeatedScalarFieldContainer[bytes]
    limits: Limits
    arena: Arena
    version: str
    def __init__(self, session_id: _Optional[bytes] = ..., boot_epoch: _Optional[int] = ..., namespaces: _Optional[_Iterable[bytes]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., arena: _Optional[_Union[Arena, _Mapping]] = ..., version: _Optional[str] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespaces: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("lookup_segments_max", "reserve_items_max", "lease_ttl_s_max", "record_bytes_max")
    LOOKUP_SEGMENTS_MAX_FIELD_NUMBER: _ClassVar[int]
    RESERVE_ITEMS_MAX_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_MAX_FIELD_NUMBER: _ClassVar[int]
    RECORD_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    lookup_segments_max: int
    reserve_items_max: int
    lease_ttl_s_max: float
    record_bytes_max: int
    def __init__(self, lookup_segments_max: _Optional[int] = ..., reserve_items_max: _Optional[int] = ..., lease_ttl_s_max: _Optional[float] = ..., record_bytes_max: _Optional[int] = ...) -> None: ...

class Arena(_message.Message):
    __slots__ = ("bytes", "data_socket")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_SOCKET_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    data_socket: str
    def __init__(self, bytes: _Optional[int] = ..., data_socket: _Optional[str] = ...) -> None: ...

class SessionRef(_message.Message):
    __slots__ = ("session_id", "boot_epoch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    boot_epoch: int
    def __init__(self, session_id: _Optional[bytes] = ..., boot_epoch: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("session", "prompts", "lease_ttl_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    prompts: _containers.RepeatedCompositeFieldContainer[PromptQuery]
    lease_ttl_s: float
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., prompts: _Optional[_Iterable[_Union[PromptQuery, _Mapping]]] = ..., lease_ttl_s: _Optional[float] = ...) -> None: ...

class PromptQuery(_message.Message):
    __slots__ = ("namespace", "segments")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    segments: _containers.RepeatedCompositeFieldContainer[SegmentQuery]
    def __init__(self, namespace: _Optional[bytes] = ..., segments: _Optional[_Iterable[_Union[SegmentQuery, _Mapping]]] = ...) -> None: ...

class SegmentQuery(_message.Message):
    __slots__ = ("segment", "accepted_contexts", "position", "tokens", "may_shift", "affinity_min")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAY_SHIFT_FIELD_NUMBER: _ClassVar[int]
    AFFINITY_MIN_FIELD_NUMBER: _ClassVar[int]
    segment: bytes
    accepted_contexts: _containers.RepeatedScalarFieldContainer[bytes]
    position: int
    tokens: int
    may_shift: bool
    affinity_min: int
    def __init__(self, segment: _Optional[bytes] = ..., accepted_contexts: _Optional[_Iterable[bytes]] = ..., position: _Optional[int] = ..., tokens: _Optional[int] = ..., may_shift: bool = ..., affinity_min: _Optional[int] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("lease", "prompts")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    lease: LeaseGrant
    prompts: _containers.RepeatedCompositeFieldContainer[PromptReply]
    def __init__(self, lease: _Optional[_Union[LeaseGrant, _Mapping]] = ..., prompts: _Optional[_Iterable[_Union[PromptReply, _Mapping]]] = ...) -> None: ...

class LeaseGrant(_message.Message):
    __slots__ = ("id", "ttl_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    id: int
    ttl_s: float
    def __init__(self, id: _Optional[int] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class PromptReply(_message.Message):
    __slots__ = ("segments", "pinned_reason")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    PINNED_REASON_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[SegmentReply]
    pinned_reason: str
    def __init__(self, segments: _Optional[_Iterable[_Union[SegmentReply, _Mapping]]] = ..., pinned_reason: _Optional[str] = ...) -> None: ...

class SegmentReply(_message.Message):
    __slots__ = ("outcome", "match", "miss_reason", "context", "provenance", "position", "affinity", "record", "master", "master_context")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    AFFINITY_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    MASTER_FIELD_NUMBER: _ClassVar[int]
    MASTER_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    outcome: int
    match: int
    miss_reason: int
    context: bytes
    provenance: str
    position: int
    affinity: int
    record: Location
    master: Location
    master_context: bytes
    def __init__(self, outcome: _Optional[int] = ..., match: _Optional[int] = ..., miss_reason: _Optional[int] = ..., context: _Optional[bytes] = ..., provenance: _Optional[str] = ..., position: _Optional[int] = ..., affinity: _Optional[int] = ..., record: _Optional[_Union[Location, _Mapping]] = ..., master: _Optional[_Union[Location, _Mapping]] = ..., master_context: _Optional[bytes] = ...) -> None: ...

class Location(_message.Message):
    __slots__ = ("tier", "extent", "generation")
    TIER_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    tier: int
    extent: Extent
    generation: int
    def __init__(self, tier: _Optional[int] = ..., extent: _Optional[_Union[Extent, _Mapping]] = ..., generation: _Optional[int] = ...) -> None: ...

class AwaitRequest(_message.Message):
    __slots__ = ("session", "lease_id", "step")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    lease_id: int
    step: int
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., lease_id: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class AwaitReply(_message.Message):
    __slots__ = ("arrivals", "step", "pending")
    ARRIVALS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    arrivals: _containers.RepeatedCompositeFieldContainer[Arrival]
    step: int
    pending: int
    def __init__(self, arrivals: _Optional[_Iterable[_Union[Arrival, _Mapping]]] = ..., step: _Optional[int] = ..., pending: _Optional[int] = ...) -> None: ...

class Arrival(_message.Message):
    __slots__ = ("offset", "layers", "error")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    offset: int
    layers: int
    error: ItemError
    def __init__(self, offset: _Optional[int] = ..., layers: _Optional[int] = ..., error: _Optional[_Union[ItemError, _Mapping]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session", "items")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    items: _containers.RepeatedCompositeFieldContainer[ReserveItem]
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., items: _Optional[_Iterable[_Union[ReserveItem, _Mapping]]] = ...) -> None: ...

class ReserveItem(_message.Message):
    __slots__ = ("namespace", "key", "record_bytes", "master_context", "master_generation", "prefill_s")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    RECORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MASTER_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MASTER_GENERATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    key: CacheKey
    record_bytes: int
    master_context: bytes
    master_generation: int
    prefill_s: float
    def __init__(self, namespace: _Optional[bytes] = ..., key: _Optional[_Union[CacheKey, _Mapping]] = ..., record_bytes: _Optional[int] = ..., master_context: _Optional[bytes] = ..., master_generation: _Optional[int] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[ReserveOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[ReserveOutcome, _Mapping]]] = ...) -> None: ...

class ReserveOutcome(_message.Message):
    __slots__ = ("reserved", "exists", "error")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    EXISTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    reserved: Reservation
    exists: bool
    error: ItemError
    def __init__(self, reserved: _Optional[_Union[Reservation, _Mapping]] = ..., exists: bool = ..., error: _Optional[_Union[ItemError, _Mapping]] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("id", "extent")
    ID_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    id: int
    extent: Extent
    def __init__(self, id: _Optional[int] = ..., extent: _Optional[_Union[Extent, _Mapping]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session", "items")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    items: _containers.RepeatedCompositeFieldContainer[CommitItem]
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., items: _Optional[_Iterable[_Union[CommitItem, _Mapping]]] = ...) -> None: ...

class CommitItem(_message.Message):
    __slots__ = ("reservation_id", "header_checksum")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    HEADER_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    header_checksum: int
    def __init__(self, reservation_id: _Optional[int] = ..., header_checksum: _Optional[int] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[CommitOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[CommitOutcome, _Mapping]]] = ...) -> None: ...

class CommitOutcome(_message.Message):
    __slots__ = ("generation", "error")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    generation: int
    error: ItemError
    def __init__(self, generation: _Optional[int] = ..., error: _Optional[_Union[ItemError, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("session", "reservation_ids")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_IDS_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    reservation_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., reservation_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...

class CommitRoundRequest(_message.Message):
    __slots__ = ("session", "round", "namespace", "members")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    round: str
    namespace: bytes
    members: _containers.RepeatedCompositeFieldContainer[CacheKey]
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., round: _Optional[str] = ..., namespace: _Optional[bytes] = ..., members: _Optional[_Iterable[_Union[CacheKey, _Mapping]]] = ...) -> None: ...

class CommitRoundReply(_message.Message):
    __slots__ = ("elections", "bytes_before", "bytes_after")
    ELECTIONS_FIELD_NUMBER: _ClassVar[int]
    BYTES_BEFORE_FIELD_NUMBER: _ClassVar[int]
    BYTES_AFTER_FIELD_NUMBER: _ClassVar[int]
    elections: _containers.RepeatedCompositeFieldContainer[Election]
    bytes_before: int
    bytes_after: int
    def __init__(self, elections: _Optional[_Iterable[_Union[Election, _Mapping]]] = ..., bytes_before: _Optional[int] = ..., bytes_after: _Optional[int] = ...) -> None: ...

class Election(_message.Message):
    __slots__ = ("segment", "master_context", "candidates")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    MASTER_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    segment: bytes
    master_context: bytes
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    def __init__(self, segment: _Optional[bytes] = ..., master_context: _Optional[bytes] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("context", "deviation", "is_mirror", "record_bytes")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    DEVIATION_FIELD_NUMBER: _ClassVar[int]
    IS_MIRROR_FIELD_NUMBER: _ClassVar[int]
    RECORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    context: bytes
    deviation: float
    is_mirror: bool
    record_bytes: int
    def __init__(self, context: _Optional[bytes] = ..., deviation: _Optional[float] = ..., is_mirror: bool = ..., record_bytes: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("session", "lease_ids", "lease_ttl_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    lease_ttl_s: float
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., lease_ids: _Optional[_Iterable[int]] = ..., lease_ttl_s: _Optional[float] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("renewed",)
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    renewed: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, renewed: _Optional[_Iterable[bool]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session", "lease_ids")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: int
    def __init__(self, released: _Optional[int] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("session", "keys", "namespace")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    keys: _containers.RepeatedCompositeFieldContainer[CacheKey]
    namespace: bytes
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., keys: _Optional[_Iterable[_Union[CacheKey, _Mapping]]] = ..., namespace: _Optional[bytes] = ...) -> None: ...

class DeleteReply(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: int
    def __init__(self, deleted: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("session", "namespace", "keys")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    namespace: bytes
    keys: _containers.RepeatedCompositeFieldContainer[CacheKey]
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., namespace: _Optional[bytes] = ..., keys: _Optional[_Iterable[_Union[CacheKey, _Mapping]]] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, outcomes: _Optional[_Iterable[int]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("session", "prompts", "asks_others")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    ASKS_OTHERS_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    prompts: _containers.RepeatedCompositeFieldContainer[PromptQuery]
    asks_others: bool
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., prompts: _Optional[_Iterable[_Union[PromptQuery, _Mapping]]] = ..., asks_others: bool = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("prompts", "namespaces", "remembered_s", "has_ssd")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_S_FIELD_NUMBER: _ClassVar[int]
    HAS_SSD_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[PromptExplanation]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceExplanation]
    remembered_s: float
    has_ssd: bool
    def __init__(self, prompts: _Optional[_Iterable[_Union[PromptExplanation, _Mapping]]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceExplanation, _Mapping]]] = ..., remembered_s: _Optional[float] = ..., has_ssd: bool = ...) -> None: ...

class PromptExplanation(_message.Message):
    __slots__ = ("segments",)
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[SegmentExplanation]
    def __init__(self, segments: _Optional[_Iterable[_Union[SegmentExplanation, _Mapping]]] = ...) -> None: ...

class NamespaceExplanation(_message.Message):
    __slots__ = ("namespace", "pinned_reason", "held_segments", "lengths", "known")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PINNED_REASON_FIELD_NUMBER: _ClassVar[int]
    HELD_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    pinned_reason: str
    held_segments: int
    lengths: _containers.RepeatedCompositeFieldContainer[SegmentLength]
    known: _containers.RepeatedCompositeFieldContainer[KnownIdentity]
    def __init__(self, namespace: _Optional[bytes] = ..., pinned_reason: _Optional[str] = ..., held_segments: _Optional[int] = ..., lengths: _Optional[_Iterable[_Union[SegmentLength, _Mapping]]] = ..., known: _Optional[_Iterable[_Union[KnownIdentity, _Mapping]]] = ...) -> None: ...

class SegmentLength(_message.Message):
    __slots__ = ("tokens", "segments")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    segments: int
    def __init__(self, tokens: _Optional[int] = ..., segments: _Optional[int] = ...) -> None: ...

class KnownIdentity(_message.Message):
    __slots__ = ("identity", "segments")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    identity: str
    segments: int
    def __init__(self, identity: _Optional[str] = ..., segments: _Optional[int] = ...) -> None: ...

class SegmentExplanation(_message.Message):
    __slots__ = ("reason", "match", "found", "age_s", "detail", "is_of_other_context", "contexts", "nearest", "held_tokens", "places")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    IS_OF_OTHER_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    NEAREST_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    reason: int
    match: int
    found: HeldCache
    age_s: float
    detail: str
    is_of_other_context: bool
    contexts: int
    nearest: _containers.RepeatedCompositeFieldContainer[HeldCache]
    held_tokens: int
    places: _containers.RepeatedCompositeFieldContainer[PlaceExplanation]
    def __init__(self, reason: _Optional[int] = ..., match: _Optional[int] = ..., found: _Optional[_Union[HeldCache, _Mapping]] = ..., age_s: _Optional[float] = ..., detail: _Optional[str] = ..., is_of_other_context: bool = ..., contexts: _Optional[int] = ..., nearest: _Optional[_Iterable[_Union[HeldCache, _Mapping]]] = ..., held_tokens: _Optional[int] = ..., places: _Optional[_Iterable[_Union[PlaceExplanation, _Mapping]]] = ...) -> None: ...

class PlaceExplanation(_message.Message):
    __slots__ = ("name", "state", "is_answering", "answer", "age_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    IS_ANSWERING_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    is_answering: bool
    answer: int
    age_s: float
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., is_answering: bool = ..., answer: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class HeldCache(_message.Message):
    __slots__ = ("context", "position", "provenance", "kind", "tiers", "is_arriving", "preceding", "affinity")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    IS_ARRIVING_FIELD_NUMBER: _ClassVar[int]
    PRECEDING_FIELD_NUMBER: _ClassVar[int]
    AFFINITY_FIELD_NUMBER: _ClassVar[int]
    context: bytes
    position: int
    provenance: str
    kind: int
    tiers: _containers.RepeatedScalarFieldContainer[int]
    is_arriving: bool
    preceding: int
    affinity: int
    def __init__(self, context: _Optional[bytes] = ..., position: _Optional[int] = ..., provenance: _Optional[str] = ..., kind: _Optional[int] = ..., tiers: _Optional[_Iterable[int]] = ..., is_arriving: bool = ..., preceding: _Optional[int] = ..., affinity: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...
