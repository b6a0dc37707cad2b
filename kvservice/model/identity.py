"""Identity: everything that decides what KV bytes mean. Its digest is the namespace; two caches are
interchangeable only inside one namespace. Never uses Python's ``hash``: keys are equal in every process.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import NewType, TypeVar

from blake3 import blake3

from kvservice.model.errors import InvalidIdentityError
from kvservice.model.geometry import Geometry, Plane
from kvservice.model.rope import Rope

Namespace = NewType("Namespace", bytes)
T = TypeVar("T")

FORMAT_VERSION = 1
INT8 = "int8"
"""Lossy storage: every head of every row is rounded to 8 bits a value when it is stored; see kernels/cpu_int8.py."""
INT8_DTYPES = ("bfloat16", "float16")
IDENTITY_BYTES_MAX = 1 << 20
OPTIONAL = ("adapter", "kv_scales", "shard", "salt", "lossy", "format_version")
"""Fields that an identity's JSON may leave out."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: its name and the digest of its weights (a name alone may be reused)."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of every row this engine rank holds."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.tp_rank < self.tp_size and 0 <= self.pp_rank < self.pp_size):
            raise InvalidIdentityError(f"shard ranks must lie below their sizes: {self}")


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be equal for two engines to share KV bytes.

    ``weights``: revision or digest of the weights. ``kv_scales``: policy and digest of KV scales, "none" for
    unscaled types. ``rope``: one descriptor a layer. ``salt``: a caller's own separation inside its tenant.
    ``lossy``: how stored rows may differ from the engine's: not at all (empty), or INT8.
    """

    tenant: str
    model: str
    weights: str
    geometry: Geometry
    rope: tuple[Rope, ...]
    adapter: Adapter | None = None
    kv_scales: str = "none"
    shard: Shard = Shard()
    salt: str = ""
    lossy: str = ""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for name in ("tenant", "model", "weights", "kv_scales"):
            if not getattr(self, name):
                raise InvalidIdentityError(f"identity: {name!r} is missing; without it caches of two engines could mix")
        if self.adapter is not None and not (self.adapter.name and self.adapter.digest):
            raise InvalidIdentityError("identity: an adapter needs a name and the digest of its weights")
        if len(self.rope) != self.geometry.layers:
            raise InvalidIdentityError(
                f"identity: {len(self.rope)} RoPE descriptors for {self.geometry.layers} layers; give one a layer"
            )
        if self.format_version != FORMAT_VERSION:
            raise InvalidIdentityError(f"identity: format version {self.format_version} is not {FORMAT_VERSION}")
        self._check_rotary_sizes()
        if self.lossy not in ("", INT8):
            raise InvalidIdentityError(f"identity: lossy is {self.lossy!r}; leave it empty, or use {INT8!r}")
        if self.lossy and self.geometry.dtype not in INT8_DTYPES:
            raise InvalidIdentityError(
                f"identity: lossy {self.lossy} is for {' and '.join(INT8_DTYPES)}, the KV is {self.geometry.dtype}; "
                "leave `lossy` empty"
            )

    def _check_rotary_sizes(self) -> None:
        for layer, rope in enumerate(self.rope):
            for plane in self.geometry.planes:
                wants = plane.rotary_size if rope.frequencies else 0
                if wants and rope.rotary_size != wants:
                    raise InvalidIdentityError(
                        f"identity: layer {layer} rotates {rope.rotary_size} elements, "
                        f"plane {plane.name!r} says {plane.rotary_size}"
                    )

    @property
    def is_lossy(self) -> bool:
        """May what comes back differ from what the engine computed?"""
        return bool(self.lossy)

    @property
    def pinned_reason(self) -> str:
        """Why caches of this identity cannot be moved; empty if they can."""
        return next((rope.pinned_reason for rope in self.rope if rope.is_pinned), "")

    def canonical_json(self) -> str:
        """The one JSON text of this identity: sorted keys, no spaces, ASCII, shortest floats; ``lossy`` only if set."""
        named = asdict(self)
        if not self.lossy:
            del named["lossy"]
        return json.dumps(named, sort_keys=True, separators=(",", ":"), allow_nan=False)

    def namespace(self) -> Namespace:
        """BLAKE3-256 of the canonical JSON."""
        return namespace_of_json(self.canonical_json())


def namespace_of_json(canonical: str) -> Namespace:
    """The namespace of an identity given as canonical JSON."""
    return Namespace(blake3(b"kvservice identity\0" + canonical.encode()).digest())


def identity_from_json(text: str) -> Identity:
    """Read an identity. Raises InvalidIdentityError for a missing, unknown or malformed field."""
    if len(text) > IDENTITY_BYTES_MAX:
        raise InvalidIdentityError(f"identity: {len(text)} characters, the limit is {IDENTITY_BYTES_MAX}")
    try:
        identity = _identity(_object(json.loads(text), "identity"))
        identity.canonical_json().encode()  # what cannot be written down again cannot be part of a key
    except InvalidIdentityError:
        raise
    except (ValueError, OverflowError, RecursionError) as error:
        raise InvalidIdentityError(f"identity is no JSON that can be a key: {error}") from error
    return identity


def _identity(raw: Mapping[str, object]) -> Identity:
    _check_names(raw, Identity, "identity", optional=OPTIONAL)
    values = dict(raw)
    geometry = _object(values.pop("geometry"), "geometry")
    rope = values.pop("rope")
    if not isinstance(rope, list):
        raise InvalidIdentityError("identity: rope must be a list with one descriptor a layer")
    adapter, shard = values.pop("adapter", None), values.pop("shard", None)
    return _build(
        Identity,
        {
            **values,
            "geometry": _geometry(geometry),
            "rope": tuple(_rope(_object(item, "rope")) for item in rope),
            "adapter": None if adapter is None else _build(Adapter, _object(adapter, "adapter")),
            "shard": Shard() if shard is None else _build(Shard, _object(shard, "shard")),
        },
    )


def _geometry(raw: Mapping[str, object]) -> Geometry:
    planes = raw.get("planes")
    if not isinstance(planes, list):
        raise InvalidIdentityError("identity: geometry.planes must be a list")
    return _build(Geometry, {**raw, "planes": tuple(_build(Plane, _object(p, "plane")) for p in planes)})


def _rope(raw: Mapping[str, object]) -> Rope:
    frequencies = raw.get("frequencies")
    if not isinstance(frequencies, list) or not all(isinstance(f, int | float) for f in frequencies):
        raise InvalidIdentityError("identity: rope.frequencies must be a list of numbers")
    return _build(Rope, {**raw, "frequencies": tuple(float(f) for f in frequencies)})


def _object(raw: object, name: str) -> Mapping[str, object]:
    if not isinstance(raw, dict):
        raise InvalidIdentityError(f"identity: {name} must be an object, it is {type(raw).__name__}")
    return raw


def _check_names(raw: Mapping[str, object], kind: type, name: str, optional: tuple[str, ...] = ()) -> None:
    known = {f.name for f in fields(kind)}
    missing, unknown = known - raw.keys() - set(optional), raw.keys() - known
    if missing or unknown:
        raise InvalidIdentityError(f"{name}: missing fields {sorted(missing)}, unknown fields {sorted(unknown)}")


def _build(kind: type[T], values: Mapping[str, object]) -> T:
    """Make a dataclass whose every annotated field has the type it says; a wrong one is the caller's error."""
    for spec in fields(kind):  # type: ignore[arg-type]
        value = values.get(spec.name)
        if spec.name in values and spec.type in (int, str, float, bool) and type(value) is not spec.type:
            raise InvalidIdentityError(f"identity: {spec.name} must be a {spec.type.__name__}, it is {value!r}")
    try:
        return kind(**values)
    except TypeError as error:
        raise InvalidIdentityError(f"identity: {error}") from error
