"""Records: what is written is what is read, and the bytes are pinned."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.model.cache import CacheMeta, MasterReference
from kvservice.model.errors import InvalidInputError
from kvservice.model.geometry import DTYPE_BYTES, Geometry, Plane, attention_geometry, latent_geometry
from kvservice.model.segment import ContextId
from kvservice.storage.buffer import Bytes, Runs, StorageBits
from kvservice.storage.record import (
    PREFIX_BYTES,
    SECTION_ALIGNMENT,
    RecordReader,
    RecordWriter,
    header_of_meta,
    master_layout,
    meta_of_header,
    mirror_layout,
    parse_header,
    read_head,
    record_generation,
)

if TYPE_CHECKING:
    from tests.storage.conftest import RecordBuilder

GOLDEN_MASTER = (
    "4b56535245430d0a01000100c70000008001000000000000168f414f2d04d20d0a206e6e6e6e6e6e6e6e6e6e6e6e6e6e"
    "6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e122073737373737373737373737373737373737373737373737373737373"
    "737373731a2063636363636363636363636363636363636363636363636363636363636363632211686b76643a302e30"
    "322f636865636b3d31280730023a200802120862666c6f617431361a090a016b1001180228021a070a01761001180242"
    "10382062797465732e6e65617265737421520210105a10917a33e9e1243fea282a4f1f204f2da7000000000000000000"
    "000000000000000000000000000000001100120021002200110112012101220100000000000000000000000000000000"
    "000000000000000000000000000000000000000000000000000000000000000011101210211022101111121121112211"
    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
)
GOLDEN_MIRROR = (
    "4b56535245430d0a01000200e1000000800100000000000007cc6f368d01769e0a206e6e6e6e6e6e6e6e6e6e6e6e6e6e"
    "6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e122073737373737373737373737373737373737373737373737373737373"
    "737373731a206363636363636363636363636363636363636363636363636363636363636363280730043a2008021208"
    "62666c6f617431361a090a016b1001180228021a070a0176100118024210382062797465732e6e656172657374214a2b"
    "0a206d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d11efcdab8967452301520200305a"
    "10c294d3380580062d009f902a5a3d9d5300000000000000000000000000000000000000000000000000000000000000"
    "000000000000000000000000000000000000000000000000000000000000000002000000010000000000000001000000"
    "020000000200000003000000010000001100120021002200310032004100420000000000000000000000000000000000"
)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    names = draw(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3, unique=True))
    sizes = st.integers(1, 5)
    planes = tuple(Plane(name, draw(sizes), draw(sizes)) for name in names)
    return Geometry(draw(st.integers(1, 4)), draw(st.sampled_from(sorted(DTYPE_BYTES))), planes)


@st.composite
def run_tables(draw: st.DrawFn, tokens: int) -> Runs:
    """Sorted, disjoint runs inside [0, tokens), from a set of replaced rows; neighbours are sometimes left apart."""
    pairs: list[list[int]] = []
    for row in sorted(draw(st.sets(st.integers(0, tokens - 1)))):
        if pairs and sum(pairs[-1]) == row and draw(st.booleans()):
            pairs[-1][1] += 1
        else:
            pairs.append([row, 1])
    return np.array(pairs, np.int32).reshape(len(pairs), 2)


@st.composite
def runs_of_caches(draw: st.DrawFn, meta: CacheMeta) -> list[list[Runs]]:
    planes, layers = len(meta.geometry.planes), meta.geometry.layers
    return [[draw(run_tables(meta.tokens)) for _ in range(planes)] for _ in range(layers)]


def random_rows(seed: int, shape: tuple[int, ...], bits: np.dtype[np.unsignedinteger[Any]]) -> StorageBits:
    return np.random.default_rng(seed).integers(0, np.iinfo(bits).max, shape, bits, endpoint=True)


@settings(deadline=None)
@given(geometry=geometries(), tokens=st.integers(1, 9), position=st.integers(0, 2**32 - 1), provenance=st.text())
def test_master_comes_back_as_it_was_written(
    build: "RecordBuilder", geometry: Geometry, tokens: int, position: int, provenance: str
) -> None:
    meta = build.meta(geometry=geometry, tokens=tokens, position=position, provenance=provenance)
    layout = master_layout(meta)
    buffer = np.full(layout.record_bytes, 0xEE, np.uint8)
    writer = RecordWriter(buffer, meta, layout)
    written = []
    for layer in range(geometry.layers):
        for number, plane in enumerate(writer.master_planes(layer)):
            rows = random_rows(layer * 8 + number, plane.shape, plane.dtype)
            plane[...] = rows
            written.append(rows)
    record = writer.finish()
    reader = RecordReader(buffer)
    reader.verify()
    read = [plane for layer in range(geometry.layers) for plane in reader.master_planes(layer)]
    assert all(np.array_equal(one, other) for one, other in zip(written, read, strict=True))
    assert (reader.meta, reader.layout) == (meta, layout)
    assert (reader.header_checksum, reader.generation) == (record.header_checksum, record.generation)


@settings(deadline=None)
@given(data=st.data(), geometry=geometries(), tokens=st.integers(1, 12), generation=st.integers(0, 2**64 - 1))
def test_mirror_comes_back_as_it_was_written(
    build: "RecordBuilder", data: st.DataObject, geometry: Geometry, tokens: int, generation: int
) -> None:
    reference = MasterReference(ContextId(b"m" * 32), generation)
    meta = build.meta(geometry=geometry, tokens=tokens, master=reference)
    runs = data.draw(runs_of_caches(meta))
    layout = mirror_layout(meta, runs)
    buffer = np.full(layout.record_bytes + 100, 0xEE, np.uint8)  # an extent may be longer than its record
    writer = RecordWriter(buffer, meta, layout)
    written = []
    for layer in range(geometry.layers):
        views = writer.mirror_rows(layer, runs[layer])
        for number, view in enumerate(views):
            view[...] = random_rows(layer * 8 + number, view.shape, view.dtype)
        written.append([view.copy() for view in views])
    writer.finish()
    reader = RecordReader(buffer)
    reader.verify()
    assert (reader.meta, reader.layout) == (meta, layout)
    for layer in range(geometry.layers):
        found_runs, found_rows = reader.mirror(layer)
        for wanted, found in zip([*runs[layer], *written[layer]], [*found_runs, *found_rows], strict=True):
            np.testing.assert_array_equal(found, wanted)
            assert found.shape == wanted.shape


@settings(deadline=None)
@given(geometry=geometries(), tokens=st.integers(1, 9), checksum=st.integers(0, 2**64 - 1))
def test_header_size_does_not_depend_on_checksums(
    build: "RecordBuilder", geometry: Geometry, tokens: int, checksum: int
) -> None:
    meta, sizes = build.meta(geometry=geometry, tokens=tokens), [tokens] * geometry.layers
    header = header_of_meta(meta, sizes, [checksum] * geometry.layers)
    assert header.ByteSize() == header_of_meta(meta, sizes, [0] * geometry.layers).ByteSize()
    assert meta_of_header(parse_header(header.SerializeToString())) == meta


def test_equal_content_gives_equal_bytes_whatever_the_buffer_held(build: "RecordBuilder") -> None:
    meta = build.meta()
    layout = master_layout(meta)
    records: list[Bytes] = []
    for dirt in (0x00, 0xFF):
        buffer = np.full(layout.record_bytes, dirt, np.uint8)
        writer = RecordWriter(buffer, meta, layout)
        for layer in range(meta.geometry.layers):
            for plane in writer.master_planes(layer):
                plane[...] = 3
        writer.finish()
        records.append(buffer)
    np.testing.assert_array_equal(records[0], records[1])


def test_equal_mirrors_give_equal_bytes_whatever_the_buffer_held(build: "RecordBuilder") -> None:
    meta, none = build.mirror_meta(), build.runs()
    runs = [[none, none], [build.runs((0, 1), (3, 2)), none]]
    layout = mirror_layout(meta, runs)
    records: list[Bytes] = []
    for dirt in (0x00, 0xFF):
        buffer = np.full(layout.record_bytes, dirt, np.uint8)
        writer = RecordWriter(buffer, meta, layout)
        for rows in writer.mirror_rows(1, runs[1]):
            rows[...] = 3
        writer.finish()
        records.append(buffer)
    np.testing.assert_array_equal(records[0], records[1])


def test_sections_are_aligned_and_offsets_follow_from_sizes(build: "RecordBuilder") -> None:
    geometry = attention_geometry(layers=3, heads=1, head_size=3, dtype="float16", rotary_size=2)
    layout = master_layout(build.meta(tokens=7, geometry=geometry))
    assert layout.section_bytes == (84, 84, 84)
    assert all(offset % SECTION_ALIGNMENT == 0 for offset in layout.section_offsets)
    assert layout.section_offsets[0] - (PREFIX_BYTES + layout.header_bytes) < SECTION_ALIGNMENT
    assert np.diff([*layout.section_offsets, layout.record_bytes]).tolist() == [128, 128, 128]


def test_layers_without_runs_take_no_bytes(build: "RecordBuilder") -> None:
    reader = RecordReader(build.small_mirror())
    assert reader.layout.section_bytes == (0, 80)  # counts 8, runs 16, pad 8, rows 3 x 16
    runs, rows = reader.mirror(0)
    assert [len(found) for found in runs] == [0, 0]
    assert [found.shape for found in rows] == [(0, 8), (0, 8)]
    assert [found.shape for found in reader.mirror(1)[1]] == [(3, 8), (0, 8)]


def test_views_lie_in_the_buffer(build: "RecordBuilder") -> None:
    buffer = build.master(build.meta())
    reader = RecordReader(buffer)
    assert all(np.shares_memory(plane, buffer) for plane in reader.master_planes(1))
    assert reader.section(1).nbytes == sum(plane.nbytes for plane in reader.master_planes(1))


def test_latent_plane_of_float32(build: "RecordBuilder") -> None:
    geometry = latent_geometry(layers=1, latent_size=4, rotary_size=2, dtype="float32")
    reader = RecordReader(build.master(build.meta(geometry=geometry)))
    (plane,) = reader.master_planes(0)
    assert (plane.dtype, plane.shape) == (np.dtype(np.uint32), (5, 6))
    assert reader.meta.geometry == geometry


def test_head_is_read_from_a_buffer_that_ends_behind_it(build: "RecordBuilder") -> None:
    record = build.master(build.meta())
    whole = RecordReader(record)
    head = read_head(record[: PREFIX_BYTES + whole.layout.header_bytes].copy())
    assert head == whole.head
    assert head.generation == record_generation(whole.section_checksums)


def test_generation_depends_on_content_only(build: "RecordBuilder") -> None:
    one, moved = RecordReader(build.master(build.meta())), RecordReader(build.master(build.meta(position=9)))
    other = RecordReader(build.master(build.meta(), seed=1))
    assert one.generation == moved.generation != other.generation
    assert one.header_checksum != moved.header_checksum


def test_nothing_is_readable_between_construction_and_finish(build: "RecordBuilder") -> None:
    meta = build.meta()
    buffer = build.master(meta)
    RecordWriter(buffer, meta, master_layout(meta))
    with pytest.raises(Exception, match="not a record"):
        RecordReader(buffer)


@pytest.mark.parametrize(
    "pairs",
    [[(0, 0)], [(-1, 2)], [(4, 2)], [(2, 1), (0, 1)], [(0, 2), (1, 1)], [(2**31 - 1, 2**31 - 1)], [(0, -1)]],
    ids=["empty", "before", "behind", "unsorted", "overlap", "overflow", "negative"],
)
def test_bad_runs_are_refused(build: "RecordBuilder", pairs: list[tuple[int, int]]) -> None:
    bad = [[build.runs(), build.runs()], [build.runs(), build.runs(*pairs)]]
    with pytest.raises(InvalidInputError, match="sorted, disjoint"):
        mirror_layout(build.mirror_meta(), bad)


def test_runs_of_the_wrong_shape_or_number_are_refused(build: "RecordBuilder") -> None:
    meta, none = build.mirror_meta(), build.runs()
    with pytest.raises(InvalidInputError, match="int32"):
        mirror_layout(meta, [[none, none], [none, np.zeros((1, 2), np.int64)]])
    with pytest.raises(InvalidInputError, match="1 layers"):
        mirror_layout(meta, [[none, none]])
    with pytest.raises(InvalidInputError, match="3 planes"):
        mirror_layout(meta, [[none, none], [none, none, none]])


def test_layouts_refuse_the_other_kind(build: "RecordBuilder") -> None:
    with pytest.raises(InvalidInputError, match="MIRROR"):
        master_layout(build.mirror_meta())
    with pytest.raises(InvalidInputError, match="MASTER"):
        mirror_layout(build.meta(), [])


def test_metas_the_format_has_no_room_for_are_refused(build: "RecordBuilder") -> None:
    wide = attention_geometry(layers=1, heads=1 << 10, head_size=1 << 10, dtype="float32")
    for meta, message in [
        (build.meta(tokens=0), "0 tokens"),
        (build.meta(segment=b"short"), "digest"),
        (build.meta(position=-1), "no room"),
        (build.meta(position=1 << 32), "no room"),
        (build.meta(preceding=(b"too short",)), "marks"),
        (build.meta(preceding=(b"8 bytes.",) * 33), "marks"),
        (build.meta(provenance="x" * (1 << 16)), "header of"),
        (build.meta(tokens=1 << 20, geometry=wide), "cut the segment"),
    ]:
        with pytest.raises(InvalidInputError, match=message):
            master_layout(meta)


def test_writer_refuses_buffers_it_cannot_fill(build: "RecordBuilder") -> None:
    meta = build.meta()
    layout = master_layout(meta)
    room = np.zeros(layout.record_bytes + 16, np.uint8)
    with pytest.raises(InvalidInputError, match="do not fit"):
        RecordWriter(room[: layout.record_bytes - 1], meta, layout)
    with pytest.raises(InvalidInputError, match="16-byte"):
        RecordWriter(room[1:], meta, layout)
    with pytest.raises(InvalidInputError, match="flat"):
        RecordWriter(room[::2], meta, layout)
    room.flags.writeable = False
    with pytest.raises(InvalidInputError, match="read-only"):
        RecordWriter(room, meta, layout)


def test_writer_refuses_other_runs_than_it_was_laid_out_for(build: "RecordBuilder") -> None:
    meta, none = build.mirror_meta(), build.runs()
    layout = mirror_layout(meta, [[none, none], [build.runs((1, 2)), none]])
    writer = RecordWriter(np.zeros(layout.record_bytes, np.uint8), meta, layout)
    with pytest.raises(InvalidInputError, match="laid out"):
        writer.mirror_rows(1, [build.runs((1, 3)), none])
    with pytest.raises(AssertionError, match="not written"):
        writer.finish()


def test_bytes_of_the_format_are_pinned(build: "RecordBuilder") -> None:
    """A change here is a new format version: records on disk and on the wire have these bytes."""
    geometry = attention_geometry(layers=2, heads=1, head_size=2, dtype="bfloat16")
    meta = build.meta(tokens=2, geometry=geometry, provenance="hkvd:0.02/check=1")
    layout = master_layout(meta)
    master = np.empty(layout.record_bytes, np.uint8)
    writer = RecordWriter(master, meta, layout)
    for layer in range(2):
        for number, plane in enumerate(writer.master_planes(layer)):
            plane[...] = [[0x1000 * layer + 0x100 * number + 16 * row + column for column in (1, 2)] for row in (1, 2)]
    writer.finish()
    assert master.tobytes().hex() == GOLDEN_MASTER


def test_bytes_of_a_mirror_are_pinned(build: "RecordBuilder") -> None:
    geometry = attention_geometry(layers=2, heads=1, head_size=2, dtype="bfloat16")
    meta, none = build.mirror_meta(tokens=4, geometry=geometry), build.runs()
    runs = [[none, none], [build.runs((0, 1), (2, 2)), build.runs((3, 1))]]
    layout = mirror_layout(meta, runs)
    mirror = np.empty(layout.record_bytes, np.uint8)
    writer = RecordWriter(mirror, meta, layout)
    writer.mirror_rows(0, runs[0])
    keys, values = writer.mirror_rows(1, runs[1])
    keys[...] = [[0x11, 0x12], [0x21, 0x22], [0x31, 0x32]]
    values[...] = [[0x41, 0x42]]
    writer.finish()
    assert mirror.tobytes().hex() == GOLDEN_MIRROR
