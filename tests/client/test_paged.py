"""An engine's paged KV as the kernels see it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.client.device_paged import DevicePaged, host_tensor
from kvservice.client.paged import (
    CpuPaged,
    Slots,
    check_moves,
    check_paged_kv,
    check_target_slots,
    layer_rotations,
    prompt_slots,
)
from kvservice.kernels.shapes import KernelInputError, check_slots
from kvservice.model.cache import CacheMeta
from kvservice.model.errors import GeometryMismatchError, InvalidInputError, SlotError
from kvservice.model.segment import CacheKey, ContextId, SegmentId
from kvservice.storage.record import RecordReader, RecordWriter, master_layout
from tests.client.builders import GEOMETRIES, Engine, make_identity, short_sighted_identity

IDENTITY = make_identity()


def test_views_are_kept_only_for_the_very_same_tensors() -> None:
    engine = Engine(IDENTITY.geometry)
    memory = CpuPaged(engine.planes, IDENTITY)
    assert memory.is_of(engine.planes, IDENTITY)
    assert memory.is_of([list(layer) for layer in engine.planes], IDENTITY)
    assert not memory.is_of(engine.planes, make_identity())
    assert not memory.is_of(engine.planes[:-1], IDENTITY)
    assert not memory.is_of([layer[:1] for layer in engine.planes], IDENTITY)
    assert not memory.is_of([[plane.clone() for plane in layer] for layer in engine.planes], IDENTITY)
    engine.planes[0][0].set_(torch.zeros_like(engine.planes[0][0]).untyped_storage())  # the engine moved its memory
    assert not memory.is_of(engine.planes, IDENTITY)


def test_planes_must_have_equally_many_slots() -> None:
    engine = Engine(IDENTITY.geometry)
    engine.planes[1][1] = engine.planes[1][1][:-1]
    with pytest.raises(GeometryMismatchError, match="equally many slots"):
        check_paged_kv(engine.planes, IDENTITY.geometry)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_any_strides_will_do(name: str) -> None:
    geometry = GEOMETRIES[name]
    identity = make_identity(geometry)
    engine = Engine(geometry)
    strided = [[plane.transpose(1, 2).contiguous().transpose(1, 2) for plane in layer] for layer in engine.planes]
    slots = engine.allocate(9)
    for layer, expected in enumerate(engine.rows(slots)):
        kind = np.uint16 if geometry.element_bytes == 2 else np.uint32
        out = [np.zeros((9, plane.row_elements), kind) for plane in geometry.planes]
        assert CpuPaged(strided, identity).gather_layer(layer, slots.numpy(), out) == 0
        for found, rows in zip(out, expected, strict=True):
            assert np.array_equal(found, rows.flatten(1).numpy().view(kind))


def test_read_only_host_memory_becomes_a_tensor_without_a_copy() -> None:
    rows = np.arange(12, dtype=np.uint16).reshape(3, 4)
    tensor = host_tensor(rows, torch.float16)
    rows[1, 2] = 77
    rows.flags.writeable = False
    assert np.array_equal(tensor.view(torch.int16).numpy().view(np.uint16), rows)
    assert host_tensor(rows[:0], torch.float16).shape == (0, 4)
    assert host_tensor(rows, torch.float16).data_ptr() == rows.ctypes.data


class FakeStream:
    """A CUDA stream that notes whether it was waited for."""

    is_done = False

    def synchronize(self) -> None:
        self.is_done = True


def test_settling_waits_for_copies_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = object.__new__(DevicePaged)  # no GPU is needed to see whom it waits for
    streams = FakeStream(), FakeStream()
    for name, stream in zip(("copies", "kernels"), streams, strict=True):
        monkeypatch.setattr(memory, name, stream, raising=False)
    memory.settle()
    assert [stream.is_done for stream in streams] == [True, True]


def test_slots_are_the_librarys_own_copy() -> None:
    """The caller may change its tensor as soon as ``restore`` has returned, and while it is being checked."""
    tensor = torch.arange(8)
    for own in (tensor, tensor[::2], tensor.numpy(), tensor.numpy()[::2]):
        found = prompt_slots(own, len(own))
        assert not np.shares_memory(found, tensor.numpy())
        assert found.flags.c_contiguous
        assert found.tolist() == own.tolist()


@pytest.mark.parametrize("kind", [torch.int32, torch.float32, torch.bool])
def test_slots_of_another_type_are_refused(kind: torch.dtype) -> None:
    for requires_grad in {False, kind.is_floating_point}:
        with pytest.raises(InvalidInputError, match="slots must be int64"):
            prompt_slots(torch.zeros(8, dtype=kind, requires_grad=requires_grad), 8)


columns = st.lists(st.lists(st.integers(-2, 131), max_size=6), max_size=4)


@settings(max_examples=300, deadline=None)
@given(columns, st.sampled_from([0, 1, 63, 64, 65, 127, 128, 130]))
def test_slots_are_refused_as_the_reference_says(slots: list[list[int]], slot_count: int) -> None:
    arrays = [np.array(one, np.int64) for one in slots]
    complaint = complaint_of(check_slots, arrays, slot_count)
    assert complaint_of(check_target_slots, arrays, slot_count) == (complaint and f"{complaint}; nothing was written")


def complaint_of(check: Callable[[list[Slots], int], None], slots: list[Slots], slot_count: int) -> str:
    try:
        check(slots, slot_count)
    except (KernelInputError, SlotError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("slot", [-(1 << 63), -2, 1 << 40, (1 << 63) - 1])
def test_slots_far_outside_are_refused(slot: int) -> None:
    with pytest.raises(SlotError, match="nothing was written"):
        check_target_slots([np.array([slot])], 8)


def test_layers_that_rotate_alike_share_their_rotation() -> None:
    rotations = layer_rotations(IDENTITY)
    assert len(rotations) == IDENTITY.geometry.layers
    assert len({id(one) for one in rotations}) == 1


def test_every_rotation_and_every_move_is_checked() -> None:
    far, near = layer_rotations(short_sighted_identity(reach=40))[0], layer_rotations(IDENTITY)[0]
    check_moves([near, far], [0, 40, -40])
    for moves in ([41], [0, -41]):
        check_moves([near], moves)
        with pytest.raises(InvalidInputError, match="nothing was written"):
            check_moves([near, far], moves)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_places_of_a_master_are_where_its_planes_are(name: str) -> None:
    geometry = GEOMETRIES[name]
    key = CacheKey(SegmentId(bytes(32)), ContextId(bytes(32)))
    meta = CacheMeta(make_identity(geometry).namespace(), key, 5, 7, geometry)
    layout = master_layout(meta)
    record = np.zeros(layout.record_bytes + 64, np.uint8)
    record = record[-record.ctypes.data % 64 :][: layout.record_bytes]
    RecordWriter(record, meta, layout).finish()
    reader = RecordReader(record)
    places = reader.master_places()
    for layer in range(geometry.layers):
        for plane, offset in zip(reader.master_planes(layer), places.plane_offsets, strict=True):
            at = places.start + layer * places.layer_stride + offset
            assert plane.ctypes.data == reader.buffer.ctypes.data + at
