"""Builders of the client tests: identities, prompts, paged KV full of seeded values, and nodes to talk to."""

import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvservice.client import PartKind, ReusePolicy, RoundPrompt
from kvservice.config import Settings
from kvservice.kernels import reference
from kvservice.kernels.rotation import ANGLE_MAX
from kvservice.kernels.shapes import Rotation
from kvservice.model.geometry import Geometry, Plane, attention_geometry, latent_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import Rope, pinned, rope_from_parameters

ARENA_BYTES = 8 << 20
BLOCK_SIZE = 4
TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BITS_DTYPES = {2: torch.int16, 4: torch.int32}

GEOMETRIES = {
    "gqa-bf16": attention_geometry(layers=3, heads=2, head_size=8, dtype="bfloat16"),
    "mqa-fp16": attention_geometry(layers=2, heads=1, head_size=64, dtype="float16"),
    "gqa-fp32": attention_geometry(layers=2, heads=2, head_size=8, dtype="float32"),
    "partial-rotary": attention_geometry(layers=2, heads=2, head_size=16, dtype="bfloat16", rotary_size=6),
    "mla-bf16": latent_geometry(layers=2, latent_size=32, rotary_size=16, dtype="bfloat16"),
}
"""The shapes that caches come in."""

POLICY = ReusePolicy("hkvd:0.02", check_layer=1)
SEPARATOR = (7, 9)
Part = tuple[PartKind, Sequence[int]]


def make_settings(folder: Path, **changes: object) -> Settings:
    """A node's settings with its sockets in ``folder``, without TCP or HTTP."""
    values: dict[str, object] = {
        "socket": str(folder / "kv.sock"),
        "grpc_port": -1,
        "http_port": -1,
        "host_bytes": ARENA_BYTES,
        "worker_threads": 1,
    }
    return Settings(**(values | changes))  # type: ignore[arg-type]


def make_identity(geometry: Geometry | None = None, *, is_pinned: bool = False, **changes: str) -> Identity:
    """An identity whose layers rotate what the geometry says."""
    geometry = geometry or GEOMETRIES["gqa-bf16"]
    size = max(plane.rotary_size for plane in geometry.planes)
    rope = pinned("dynamic", "for a test") if is_pinned else _rope(size)
    names = {"tenant": "test", "model": "tiny", "weights": "r1"} | changes
    return Identity(geometry=geometry, rope=(rope,) * geometry.layers, **names)  # type: ignore[arg-type]


def _rope(size: int) -> Rope:
    if size == 0:
        return Rope("none", False, 0, ())
    return rope_from_parameters({"rope_theta": 10000.0}, head_size=size, max_positions=4096)


def short_sighted_identity(reach: int) -> Identity:
    """An identity whose keys turn so fast that the kernels cannot move them by more than ``reach`` positions."""
    geometry = GEOMETRIES["gqa-bf16"]
    rope = Rope("default", False, 8, (ANGLE_MAX / reach, 1.0, 0.5, 0.25))
    return Identity(geometry=geometry, rope=(rope,) * geometry.layers, tenant="test", model="fast", weights="r1")


def make_tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids that differ from seed to seed."""
    return [int(token) for token in np.random.default_rng(seed).integers(100, 50_000, count)]


def make_prompt(
    identity: Identity,
    *,
    private: int = 10,
    shared: Sequence[int] = (6, 5),
    seed: int = 0,
    policy: ReusePolicy | None = None,
    chunk_tokens: int = 4,
) -> RoundPrompt:
    """A private history that depends on the seed, then shared segments that do not."""
    parts: list[Part] = [(PartKind.PRIVATE, make_tokens(private, seed))]
    parts += [(PartKind.SHARED, make_tokens(count, 1000 + index)) for index, count in enumerate(shared)]
    return RoundPrompt.from_parts(identity.namespace(), parts, policy=policy, chunk_tokens=chunk_tokens)


class Engine:
    """Paged KV of an engine, per layer and plane ``[blocks, block_size, heads, head_size]``, every bit random."""

    def __init__(self, geometry: Geometry, *, blocks: int = 32, seed: int = 0) -> None:
        self.geometry = geometry
        self._generator = torch.Generator().manual_seed(seed)
        self.slot_count = blocks * BLOCK_SIZE
        self.planes = [
            [self._random((blocks, BLOCK_SIZE, plane.heads, plane.head_size)) for plane in geometry.planes]
            for _ in range(geometry.layers)
        ]
        self._free = torch.randperm(self.slot_count, generator=self._generator)

    def allocate(self, tokens: int) -> Tensor:
        """Slots int64 ``[tokens]``, scattered, none given out twice."""
        assert len(self._free) >= tokens, "the test needs a larger engine"
        taken, self._free = self._free[:tokens], self._free[tokens:]
        return taken.clone()

    def rows(self, slots: Tensor) -> list[list[Tensor]]:
        """Copies of what is stored, bits, per layer and plane ``[rows, heads, head_size]``."""
        return [[bits_of(plane).flatten(0, 1)[slots].clone() for plane in layer] for layer in self.planes]

    def change(self, slots: Tensor) -> None:
        """Give the rows at these slots new values, in every layer and plane."""
        for layer in self.planes:
            for plane in layer:
                plane.flatten(0, 1)[slots] = self._random((len(slots), *plane.shape[2:]))

    def _random(self, shape: Sequence[int]) -> Tensor:
        values = torch.randn(tuple(shape), generator=self._generator)
        return values.to(TORCH_DTYPES[self.geometry.dtype])


def bits_of(tensor: Tensor) -> Tensor:
    """The storage bits, so that comparisons see NaNs and signed zeros too."""
    return tensor.view(BITS_DTYPES[tensor.element_size()])


def assert_equal_bits(left: Sequence[Sequence[Tensor]], right: Sequence[Sequence[Tensor]]) -> None:
    """Every layer and plane is the same, bit for bit."""
    for layer, (ours, theirs) in enumerate(zip(left, right, strict=True)):
        for plane, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(one, other), (
                f"layer {layer}, plane {plane} differs in {int((one != other).sum())} places"
            )


def moved_rows(identity: Identity, rows: Sequence[Sequence[Tensor]], by: int) -> list[list[Tensor]]:
    """What the reference kernel makes of rows that move by so many positions."""
    return [
        [_moved(identity, rope, plane, one, by) for plane, one in zip(identity.geometry.planes, planes, strict=True)]
        for rope, planes in zip(identity.rope, rows, strict=True)
    ]


def _moved(identity: Identity, rope: Rope, plane: Plane, rows: Tensor, by: int) -> Tensor:
    rotation = Rotation(rope.frequencies, rope.is_interleaved)
    values = rows.flatten(1).view(TORCH_DTYPES[identity.geometry.dtype])
    return bits_of(reference.move_rows(values, 0, by, plane, rotation)).view_as(rows)


def free_port() -> int:
    """A TCP port that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
