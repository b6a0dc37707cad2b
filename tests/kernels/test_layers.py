"""Many layers in one call give the reference's bits, whatever the batches; a section that lies is refused."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvservice.kernels import cpu, cpu_loops, reference
from kvservice.kernels.shapes import KernelInputError, MirrorRows, PlaneShape, Rotation, Target
from tests.kernels.builders import (
    SHAPES,
    TORCH_DTYPES,
    Bits,
    make_mirror,
    make_paged,
    make_rotation,
    random_bits,
    tensor,
    to_torch,
)

BLOCK_SIZE = 4
Bytes = npt.NDArray[np.uint8]
Sections = npt.NDArray[np.int64]


@dataclass
class Layers:
    """A master and mirrors of several layers, as records hold them, and where they go."""

    dtype: str
    shapes: list[PlaneShape]
    rotations: list[Rotation]
    master: list[list[Bits]]
    mirrors: list[list[MirrorRows] | None]
    targets: list[Target]
    tokens: int

    def make_paged(self) -> list[list[Bits]]:
        blocks = self.tokens * len(self.targets) // BLOCK_SIZE + 1
        return [
            make_paged(blocks, BLOCK_SIZE, self.shapes[0], self.dtype, "plain", len(self.shapes)) for _ in self.master
        ]

    def dense(self) -> cpu.DenseLayers:
        """All layers behind one another, 64 bytes of something else before each."""
        parts = [np.zeros(64, np.uint8)]
        for planes in self.master:
            parts += [plane.view(np.uint8).ravel() for plane in planes] + [parts[0]]
        lengths = [plane.nbytes for plane in self.master[0]]
        offsets = np.cumsum([0, *lengths[:-1]]).tolist()
        return cpu.DenseLayers(np.concatenate(parts), 64, sum(lengths) + 64, offsets)

    def restore(self, paged: list[list[Bits]], cuts: list[int]) -> None:
        memory = [cpu.paged_layer(planes, self.shapes, planes[0].dtype) for planes in paged]
        table = cpu.paged_layers(memory, self.shapes, self.rotations, self.dtype)
        positions = [mirror[0].position if mirror else None for mirror in self.mirrors]
        prepared = cpu.prepare_restore(self.tokens, 100, self.targets, table, positions)
        master = self.dense()
        for first, end in zip([0, *cuts], [*cuts, len(paged)], strict=True):
            opened = prepared.open_mirrors(
                first, [read(one[first:], table, self.tokens) if one else None for one in self.mirrors]
            )
            prepared.restore_layers(first, end, master, opened)

    def restore_in_parts(self, paged: list[list[Bits]], step: int) -> None:
        """``step`` rows of the segment at a time, all layers, each part a segment of its own."""
        memory = [cpu.paged_layer(planes, self.shapes, planes[0].dtype) for planes in paged]
        table = cpu.paged_layers(memory, self.shapes, self.rotations, self.dtype)
        positions = [mirror[0].position if mirror else None for mirror in self.mirrors]
        mirrors = [read(one, table, self.tokens) if one else None for one in self.mirrors]
        whole = self.dense()
        for first in range(0, self.tokens, step):
            end = min(first + step, self.tokens)
            targets = [Target(one.position, one.slots[first:end].copy()) for one in self.targets]
            prepared = cpu.prepare_restore(end - first, 100, targets, table, positions)
            parts = [one and one.take_rows(first, end, table.row_bytes) for one in mirrors]
            offsets = [at + first * int(size) for at, size in zip(whole.plane_offsets, table.row_bytes, strict=True)]
            master = cpu.DenseLayers(whole.buffer, whole.start, whole.layer_stride, offsets)
            prepared.restore_layers(0, len(paged), master, prepared.open_mirrors(0, parts))

    def restore_by_reference(self, paged: list[list[Bits]]) -> None:
        for layer, planes in enumerate(paged):
            targets = [
                Target(one.position, one.slots, to_torch(mirror[layer], self.dtype) if mirror else None)
                for one, mirror in zip(self.targets, self.mirrors, strict=True)
            ]
            master = [tensor(plane, self.dtype) for plane in self.master[layer]]
            views = [tensor(plane, self.dtype) for plane in planes]
            reference.restore_layer(master, 100, as_torch(targets), views, self.shapes, self.rotations[layer])


def as_torch(targets: list[Target]) -> list[Target]:
    return [Target(one.position, torch.from_numpy(one.slots), one.mirror) for one in targets]


def read(mirror: list[MirrorRows], table: cpu.PagedLayers, tokens: int) -> cpu.MirrorLayers:
    buffer, sections = write_sections(mirror)
    return cpu.MirrorLayers.read(buffer, sections, table, tokens)


def write_sections(mirror: list[MirrorRows]) -> tuple[Bytes, Sections]:
    """A mirror's sections on 64 bytes, as ``storage/FORMAT.md`` says, and where each begins and ends."""
    parts: list[Bytes] = []
    sections, at = [], 0
    for layer in mirror:
        section = np.empty(0, np.uint8)
        if any(len(runs) for runs in layer.runs):
            counts = np.array([len(runs) for runs in layer.runs], np.int32)
            head = np.concatenate([counts, *(runs.ravel() for runs in layer.runs)]).view(np.uint8)
            head = np.pad(head, (0, -len(head) % 16))
            section = np.concatenate([head, *(rows.view(np.uint8).ravel() for rows in layer.rows)])
        sections.append((at, at + len(section)))
        parts.append(np.pad(section, (0, -len(section) % 64), constant_values=0xA5))
        at += len(parts[-1])
    return np.concatenate(parts), np.array(sections, np.int64)


def make_layers(
    seed: int, *, geometry: str = "gqa", dtype: str = "bfloat16", layers: int = 3, tokens: int = 19, targets: int = 2
) -> Layers:
    rng = np.random.default_rng(seed)
    shapes = SHAPES[geometry]
    size = shapes[0].rotary_size
    kinds = [make_rotation(size, is_interleaved=False), make_rotation(size, is_interleaved=True), Rotation(())]
    rotations = [kinds[int(rng.integers(0, 3))] for _ in range(layers)]
    master = [
        [random_bits(rng, (tokens, shape.heads * shape.head_size), dtype) for shape in shapes] for _ in range(layers)
    ]
    mirrors: list[list[MirrorRows] | None] = []
    for _ in range(targets):
        of_layers = [make_mirror(rng, shapes, tokens, dtype) for _ in range(layers)]
        for one in of_layers:
            one.position = of_layers[0].position
        mirrors.append(of_layers if rng.random() < 0.6 else None)
    free = rng.permutation(tokens * targets)
    places = []
    for i_target in range(targets):
        slots = free[i_target * tokens : (i_target + 1) * tokens].astype(np.int64)
        slots[rng.random(tokens) < 0.1] = -1
        places.append(Target(int(rng.integers(0, 5000)), slots))
    return Layers(dtype, shapes, rotations, master, mirrors, places, tokens)


cases = st.builds(
    make_layers,
    st.integers(0, 2**32 - 1),
    geometry=st.sampled_from(sorted(SHAPES)),
    dtype=st.sampled_from(sorted(TORCH_DTYPES)),
    layers=st.integers(1, 5),
    tokens=st.integers(1, 24),
    targets=st.integers(0, 3),
)


def assert_restores(case: Layers, cuts: list[int]) -> None:
    wanted, written = case.make_paged(), case.make_paged()
    case.restore_by_reference(wanted)
    case.restore(written, cuts)
    for left, right in zip(written, wanted, strict=True):
        for ours, theirs in zip(left, right, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases, st.data())
def test_batches_of_layers_write_the_reference_bits(case: Layers, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(case.master) - 1)), max_size=3)) - {len(case.master)})
    assert_restores(case, cuts)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases, st.integers(1, 24))
def test_parts_of_a_segment_with_its_mirrors_write_the_reference_bits(case: Layers, step: int) -> None:
    wanted, written = case.make_paged(), case.make_paged()
    case.restore_by_reference(wanted)
    case.restore_in_parts(written, step)
    for left, right in zip(written, wanted, strict=True):
        for ours, theirs in zip(left, right, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_rows_fetched_ahead_past_many_runs_have_the_reference_bits() -> None:
    for geometry, tokens in (("gqa", 1200), ("small", 700)):
        assert_restores(make_layers(5, geometry=geometry, tokens=tokens, layers=4), [1, 3])


def test_mirrors_opened_once_serve_every_batch() -> None:
    case = make_layers(8, layers=4)
    case.mirrors = [[make_mirror(np.random.default_rng(3), case.shapes, 19, "bfloat16")] * 4, None]
    wanted, written = case.make_paged(), case.make_paged()
    case.restore_by_reference(wanted)
    memory = [cpu.paged_layer(planes, case.shapes, planes[0].dtype) for planes in written]
    table = cpu.paged_layers(memory, case.shapes, case.rotations, case.dtype)
    assert case.mirrors[0] is not None
    prepared = cpu.prepare_restore(19, 100, case.targets, table, [case.mirrors[0][0].position, None])
    opened = prepared.open_mirrors(1, [read(case.mirrors[0][1:], table, 19), None])
    whole = prepared.open_mirrors(0, [read(case.mirrors[0], table, 19), None])
    for first, end, mirrors in ((2, 4, opened), (0, 1, whole), (1, 2, opened)):
        prepared.restore_layers(first, end, case.dense(), mirrors)
    for left, right in zip(written, wanted, strict=True):
        np.testing.assert_array_equal(left, right)
    with pytest.raises(KernelInputError, match=r"layers 0\.\.2 of mirrors opened for 1\.\.4"):
        prepared.restore_layers(0, 2, case.dense(), opened)
    with pytest.raises(KernelInputError, match="1 mirrors for 2 targets"):
        prepared.open_mirrors(0, [None])


def test_addresses_are_never_floating_point() -> None:
    """numba makes a float64 of an address (uint64) and an int64; beyond 2^53 such an address would be another."""
    assert_restores(make_layers(2), [1])
    signatures = [str(one) for one in cpu_loops.restore_layers.signatures]
    assert signatures
    assert not [one for one in signatures if "float" in one]
    assert isinstance(make_layers(2).dense().words_at, int)


def test_a_master_outside_its_buffer_is_refused_before_anything_is_written() -> None:
    case = make_layers(1, layers=3)
    paged = case.make_paged()
    before = [[plane.copy() for plane in planes] for planes in paged]
    memory = [cpu.paged_layer(planes, case.shapes, planes[0].dtype) for planes in paged]
    table = cpu.paged_layers(memory, case.shapes, case.rotations, case.dtype)
    prepared = cpu.prepare_restore(case.tokens, 100, case.targets, table)
    good = case.dense()
    for bad in (
        cpu.DenseLayers(good.buffer[:-65], good.start, good.layer_stride, good.plane_offsets),
        cpu.DenseLayers(good.buffer, good.start + 65, good.layer_stride, good.plane_offsets),
    ):
        with pytest.raises(KernelInputError, match="layer 2, plane 1: its 19 rows lie outside"):
            prepared.restore_layers(0, 3, bad)
    with pytest.raises(KernelInputError, match="layer 0, plane 0"):
        prepared.restore_layers(0, 3, cpu.DenseLayers(good.buffer, -1, good.layer_stride, good.plane_offsets))
    for first, end in ((0, 4), (-1, 2), (2, 1)):
        with pytest.raises(KernelInputError, match=f"layers {first}"):
            prepared.restore_layers(first, end, good)
    with pytest.raises(KernelInputError, match="contiguous"):
        cpu.DenseLayers(good.buffer[::2], 0, 0, [0, 0])
    for left, right in zip(paged, before, strict=True):
        np.testing.assert_array_equal(left, right)


def make_table(case: Layers) -> cpu.PagedLayers:
    memory = [cpu.paged_layer(planes, case.shapes, planes[0].dtype) for planes in case.make_paged()]
    return cpu.paged_layers(memory, case.shapes, case.rotations, case.dtype)


def word(section: Bytes, index: int, value: int) -> None:
    section[4 * index : 4 * index + 4] = np.array([value], np.int32).view(np.uint8)


@pytest.mark.parametrize(
    ("index", "value"),
    [(0, -1), (0, 3), (0, 1 << 30), (1, 1), (2, -1), (2, 9), (3, 0), (3, -1), (3, 1 << 30), (4, 2), (4, 0), (5, 19)],
)
def test_a_section_that_lies_is_refused(index: int, value: int) -> None:
    """Words: two counts, then (first, count) of plane 0: (2, 1), (5, 2), and of plane 1."""
    case = make_layers(1)
    runs = np.array([[2, 1], [5, 2]], np.int32)
    rows = [plane[:3].copy() for plane in case.master[0]]
    buffer, sections = write_sections([MirrorRows(0, [runs, runs], rows)] * 2)
    table = make_table(case)
    whole = cpu.MirrorLayers.read(buffer, sections, table, 19)
    assert whole.run_ends.tolist() == [[2, 4], [6, 8]]
    np.testing.assert_array_equal(whole.runs, np.concatenate([runs] * 4))
    for (begin, end), bounds in zip(sections, whole.row_bounds, strict=True):
        found = [buffer[first:behind] for first, behind in bounds]
        for left, right in zip(found, rows, strict=True):
            np.testing.assert_array_equal(left, right.view(np.uint8).ravel())
        assert bounds[-1, 1] == end > begin
    word(buffer[sections[1, 0] :], index, value)
    with pytest.raises(KernelInputError, match="section 1"):
        cpu.MirrorLayers.read(buffer, sections, table, 19)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_any_bytes_are_a_mirror_or_refused(seed: int, small: int) -> None:
    """Whatever is read as a table, what comes of it lies inside the section."""
    rng = np.random.default_rng(seed)
    case, table = CASE, TABLE
    buffer = rng.integers(0, 4 if small else 256, 256, dtype=np.uint8)
    buffer[1::4] = buffer[2::4] = buffer[3::4] = 0 if small > 1 else buffer[3::4]
    sections = np.sort(rng.integers(-8 if small == 3 else 0, 260, (1, 2)), axis=1)
    try:
        found = cpu.MirrorLayers.read(buffer, sections, table, case.tokens)
    except KernelInputError:
        return
    assert 0 <= sections[0, 0] <= found.row_bounds.min()
    assert found.row_bounds.max() <= sections[0, 1] <= len(buffer)
    assert found.run_ends[-1, -1] == len(found.runs)


CASE = make_layers(4, geometry="small", dtype="float32", layers=1)
TABLE = make_table(CASE)


def test_tables_of_other_kinds_are_refused() -> None:
    buffer, words = np.zeros(64, np.uint8), np.zeros((1, 2), np.int64)
    bounds, runs = np.zeros((1, 2, 2), np.int64), np.zeros((0, 2), np.int32)
    for bad in (
        (bounds, runs, words[:, :1]),
        (bounds, runs.astype(np.int64), words),
        (bounds.astype(float), runs, words),
    ):
        with pytest.raises(KernelInputError):
            cpu.MirrorLayers(buffer, *bad)
    with pytest.raises(KernelInputError, match="give one each"):
        cpu.paged_layers(TABLE.kept, CASE.shapes, [], CASE.dtype)
