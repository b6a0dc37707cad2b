"""Builders for kernel tests: geometries, hostile bit patterns, paged memory of any layout, restores to run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from torch import Tensor

from kvservice.kernels.shapes import MirrorRows, Plane, PlaneShape, Rotation, Target

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LAYOUTS = ("plain", "heads_first", "interleaved", "element_apart", "tokens_innermost")
POISON = {"bfloat16": 0x7FA5, "float16": 0x7DA5, "float32": 0x7FA5A5A5}
"""NaN patterns that no operation gives: an output element left out keeps one."""

Bits = npt.NDArray[Any]


def bits_type(dtype: str) -> type:
    return np.uint32 if dtype == "float32" else np.uint16


def random_bits(rng: np.random.Generator, size: tuple[int, ...], dtype: str, *, hostile: float = 0.05) -> Bits:
    """Normal values; a share of them any bit pattern, zeros of both signs, infinities, subnormals, NaN payloads."""
    values = rng.standard_normal(size).astype(np.float32)
    if dtype == "float16":
        plain = values.astype(np.float16).view(np.uint16)
    else:
        plain = values.view(np.uint32) if dtype == "float32" else (values.view(np.uint32) >> 16).astype(np.uint16)
    width = 32 if dtype == "float32" else 16
    anything = rng.integers(0, 1 << width, size, dtype=np.uint64).astype(plain.dtype)
    special = np.array([0, 1, 2, 3], plain.dtype)[rng.integers(0, 4, size)]
    special |= (rng.integers(0, 2, size) << (width - 1)).astype(plain.dtype)
    infinity = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}[dtype]
    special = np.where(rng.random(size) < 0.3, np.array(infinity, plain.dtype), special)
    chosen = np.where(rng.random(size) < 0.5, anything, special)
    return np.ascontiguousarray(np.where(rng.random(size) < hostile, chosen, plain))


def tensor(values: Bits, dtype: str) -> Tensor:
    """A torch view of storage bits."""
    signed = values.view(np.int32 if dtype == "float32" else np.int16)
    return torch.from_numpy(signed).view(TORCH_DTYPES[dtype])


def tensor_bits(values: Tensor) -> Bits:
    """Storage bits of a tensor, on the host."""
    wide = values.dtype == torch.float32
    signed = values.cpu().view(torch.int32 if wide else torch.int16).numpy()
    return signed.view(np.uint32 if wide else np.uint16)


def make_paged(blocks: int, block_size: int, shape: Plane, dtype: str, layout: str, planes: int) -> list[Bits]:
    """Per plane a poisoned view ``[blocks, block_size, heads, head_size]`` of one storage, in one of ``LAYOUTS``."""
    heads, size = shape.heads, shape.head_size
    forms: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        # storage shape, and which axes of it are (plane, block, offset, head, element)
        "plain": ((planes, blocks, block_size, heads, size), (0, 1, 2, 3, 4)),
        "heads_first": ((planes, blocks, heads, block_size, size), (0, 1, 3, 2, 4)),
        "interleaved": ((blocks, block_size, heads, planes, size), (3, 0, 1, 2, 4)),
        "element_apart": ((blocks, planes, block_size, heads, size, 3), (1, 0, 2, 3, 4)),
        "tokens_innermost": ((blocks, planes, heads, size, block_size), (1, 0, 4, 2, 3)),
    }
    form, axes = forms[layout]
    storage: Bits = np.full(form, POISON[dtype], bits_type(dtype))
    if layout == "element_apart":
        storage = storage[..., 1]
    return list(np.moveaxis(storage, axes, (0, 1, 2, 3, 4)))


PACKINGS = ("amx", "vec", "rows", "shuffled")
SHAPES: dict[str, list[PlaneShape]] = {
    "mha": [PlaneShape(2, 64, 0, 64), PlaneShape(2, 64)],
    "gqa": [PlaneShape(1, 128, 0, 128), PlaneShape(1, 128)],
    "small": [PlaneShape(3, 8, 0, 8), PlaneShape(3, 8)],
    "partial": [PlaneShape(2, 48, 0, 20), PlaneShape(2, 48)],
    "odd": [PlaneShape(2, 15, 3, 10), PlaneShape(2, 15)],
    "latent": [PlaneShape(1, 96, 32, 64)],
}


def make_perms(packing: str, block_size: int, heads: int, head_size: int) -> list[npt.NDArray[np.int64]]:
    """Where K's and V's values lie in a block, int64 ``[block_size, heads * head_size]``.

    ``amx``: K as pairs of dimensions of 16 tokens, V as pairs of tokens of 16 dimensions, as vLLM on AMX (block_size
    and head_size by 16). ``vec``: per head all tokens of K, dimension by dimension, then V's rows. ``rows``: whole
    rows. ``shuffled``: anywhere.
    """
    token, head, at = np.ix_(*(np.arange(count, dtype=np.int64) for count in (block_size, heads, head_size)))
    plane, base = block_size * head_size, head * 2 * block_size * head_size
    match packing:
        case "amx":
            keys = base + token // 16 * 16 * head_size + at // 2 * 32 + token % 16 * 2 + at % 2
            values = base + plane + at // 16 * 16 * block_size + token // 2 * 32 + at % 16 * 2 + token % 2
        case "vec":
            keys, values = base + at * block_size + token, base + plane + token * head_size + at
        case "rows":
            keys = (token * heads + head) * head_size + at
            values = keys + plane * heads
        case _:
            found = np.random.default_rng(7).permutation(2 * heads * plane).reshape(2, block_size, heads, head_size)
            keys, values = found
    return [perm.reshape(block_size, heads * head_size) for perm in (keys, values)]


def make_rotation(size: int, *, is_interleaved: bool) -> Rotation:
    return Rotation(tuple(10000.0 ** (-2 * i / size) for i in range(size // 2)), is_interleaved)


@dataclass
class Restore:
    """One restore to run: planes and targets as storage bits."""

    dtype: str
    shapes: list[PlaneShape]
    rotation: Rotation
    master: list[Bits]
    master_position: int
    targets: list[Target]
    layout: str
    blocks: int
    block_size: int

    def make_paged(self) -> list[Bits]:
        return make_paged(self.blocks, self.block_size, self.shapes[0], self.dtype, self.layout, len(self.shapes))

    def torch_targets(self, device: str = "cpu") -> list[Target]:
        return [
            Target(
                one.position,
                torch.from_numpy(one.slots).to(device),
                one.mirror and to_torch(one.mirror, self.dtype, device),
            )
            for one in self.targets
        ]

    def torch_master(self, device: str = "cpu") -> list[Tensor]:
        return [tensor(plane, self.dtype).to(device) for plane in self.master]


def to_torch(mirror: MirrorRows, dtype: str, device: str = "cpu") -> MirrorRows:
    return MirrorRows(mirror.position, mirror.runs, [tensor(rows, dtype).to(device) for rows in mirror.rows])


def make_runs(rng: np.random.Generator, tokens: int, share: float) -> npt.NDArray[np.int32]:
    """Runs of a random set of rows; neighbouring rows sometimes in one run, sometimes in two."""
    rows = np.flatnonzero(rng.random(tokens) < share)
    runs: list[list[int]] = []
    for row in rows.tolist():
        if runs and sum(runs[-1]) == row and rng.random() < 0.7:
            runs[-1][1] += 1
        else:
            runs.append([row, 1])
    return np.array(runs, np.int32).reshape(-1, 2)


def make_mirror(rng: np.random.Generator, restore_shapes: list[PlaneShape], tokens: int, dtype: str) -> MirrorRows:
    share = float(rng.choice([0.0, 0.1, 0.5, 1.0]))
    runs = [make_runs(rng, tokens, share) for _ in restore_shapes]
    rows = [
        random_bits(rng, (int(one[:, 1].sum()), shape.heads * shape.head_size), dtype)
        for one, shape in zip(runs, restore_shapes, strict=True)
    ]
    return MirrorRows(int(rng.integers(0, 5000)), runs, rows)


def make_restore(
    seed: int,
    *,
    geometry: str = "mha",
    dtype: str = "bfloat16",
    layout: str = "plain",
    is_interleaved: bool = False,
    tokens: int = 19,
    targets: int = 2,
    block_size: int = 4,
) -> Restore:
    rng = np.random.default_rng(seed)
    shapes = SHAPES[geometry]
    master = [random_bits(rng, (tokens, shape.heads * shape.head_size), dtype) for shape in shapes]
    master_position = int(rng.integers(0, 5000))
    blocks = (tokens * max(targets, 1)) // block_size + 2
    free = rng.permutation(blocks * block_size)
    made = []
    for i_target in range(targets):
        slots = free[i_target * tokens : (i_target + 1) * tokens].astype(np.int64)
        slots[rng.random(tokens) < 0.1] = -1
        mirror = make_mirror(rng, shapes, tokens, dtype) if rng.random() < 0.6 else None
        places = [master_position, int(rng.integers(0, 5000)), mirror.position if mirror else 7]
        made.append(Target(int(rng.choice(places)), slots, mirror))
    rotary = shapes[0].rotary_size
    rotation = make_rotation(rotary, is_interleaved=is_interleaved)
    return Restore(dtype, shapes, rotation, master, master_position, made, layout, blocks, block_size)


restores = st.builds(
    make_restore,
    st.integers(0, 2**32 - 1),
    geometry=st.sampled_from(sorted(SHAPES)),
    dtype=st.sampled_from(sorted(TORCH_DTYPES)),
    layout=st.sampled_from(LAYOUTS),
    is_interleaved=st.booleans(),
    tokens=st.integers(0, 24),
    targets=st.integers(0, 4),
    block_size=st.sampled_from([1, 3, 16]),
)
