"""Geometry: what the bytes of one token are, as planes.

MHA and GQA have two planes a layer, K and V; MLA has one latent plane. All layers of a geometry are alike:
an engine whose layers differ (hybrids) registers one identity for each group of like layers.
"""

from dataclasses import dataclass

from kvservice.model.errors import InvalidIdentityError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Storage types that kernels compute with."""
OPAQUE_DTYPE = "uint8"
"""Storage type of rows whose meaning only their writer knows: stored and given back as they are."""
STORAGE_BYTES = DTYPE_BYTES | {OPAQUE_DTYPE: 1}


@dataclass(frozen=True, slots=True)
class Plane:
    """One plane of a layer: ``[tokens, heads, head_size]``.

    The elements ``[rotary_offset, rotary_offset + rotary_size)`` of every head rotate with the position, the rest
    is copied. V has ``rotary_size`` 0.
    """

    name: str
    heads: int
    head_size: int
    rotary_offset: int = 0
    rotary_size: int = 0

    def __post_init__(self) -> None:
        if not self.name or self.heads < 1 or self.head_size < 1:
            raise InvalidIdentityError(f"plane {self.name!r}: name, heads and head_size must be given and positive")
        inside = self.rotary_offset >= 0 and self.rotary_offset + self.rotary_size <= self.head_size
        if not inside or self.rotary_size < 0 or self.rotary_size % 2:
            raise InvalidIdentityError(
                f"plane {self.name!r}: the rotary part [{self.rotary_offset}, +{self.rotary_size}) must be even "
                f"and lie inside the head of {self.head_size}"
            )

    @property
    def row_elements(self) -> int:
        """Elements of one row: one token's values in this plane of one layer."""
        return self.heads * self.head_size


@dataclass(frozen=True, slots=True)
class Geometry:
    """Layers, planes and storage type of a cache."""

    layers: int
    dtype: str
    planes: tuple[Plane, ...]

    def __post_init__(self) -> None:
        if self.dtype not in STORAGE_BYTES:
            raise InvalidIdentityError(f"KV dtype {self.dtype!r} is not supported; use one of {sorted(STORAGE_BYTES)}")
        if self.layers < 1 or not self.planes:
            raise InvalidIdentityError("a geometry needs at least one layer and one plane")
        if len({plane.name for plane in self.planes}) != len(self.planes):
            raise InvalidIdentityError("plane names of a geometry must differ")
        if self.is_opaque and any(plane.rotary_size for plane in self.planes):
            raise InvalidIdentityError(f"opaque rows ({OPAQUE_DTYPE}) have no part that rotates; rotary_size must be 0")

    @property
    def is_opaque(self) -> bool:
        """True if the rows are another program's bytes: no kernel is ever asked for them."""
        return self.dtype == OPAQUE_DTYPE

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return STORAGE_BYTES[self.dtype]

    def row_bytes(self, plane: Plane) -> int:
        """Bytes of one row of ``plane``."""
        return plane.row_elements * self.element_bytes

    @property
    def token_layer_bytes(self) -> int:
        """Bytes of one token in one layer, all planes."""
        return sum(self.row_bytes(plane) for plane in self.planes)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers and planes."""
        return self.token_layer_bytes * self.layers


def attention_geometry(
    *, layers: int, heads: int, head_size: int, dtype: str, rotary_size: int | None = None
) -> Geometry:
    """Geometry of multi-head or grouped-query attention; ``heads`` are KV heads, ``rotary_size`` defaults to all."""
    rotary = head_size if rotary_size is None else rotary_size
    key = Plane("k", heads, head_size, rotary_size=rotary)
    return Geometry(layers, dtype, (key, Plane("v", heads, head_size)))


def latent_geometry(*, layers: int, latent_size: int, rotary_size: int, dtype: str) -> Geometry:
    """Geometry of multi-head latent attention: ``latent_size`` copied elements, then ``rotary_size`` rotating ones."""
    plane = Plane("latent", 1, latent_size + rotary_size, rotary_offset=latent_size, rotary_size=rotary_size)
    return Geometry(layers, dtype, (plane,))


def opaque_geometry(row_bytes: int) -> Geometry:
    """Geometry of objects of ``row_bytes`` bytes in another program's layout: one layer, one plane, one row each."""
    return Geometry(1, OPAQUE_DTYPE, (Plane("rows", 1, row_bytes),))
