"""An engine's memory in whatever packing, restored to and stored from like plain paged memory, bit for bit."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kvservice.app import LocalNode
from kvservice.client import StoreOutcome, StoreRequest
from kvservice.client.connectors.vllm.engine_memory import PackedPaged, engine_memory, plane_views
from kvservice.client.connectors.vllm.layout import UnknownLayoutError
from kvservice.client.device_paged import DevicePaged
from kvservice.client.paged import CpuPaged
from kvservice.client.restore import plan_restore
from kvservice.client.store import store_round
from kvservice.kernels import cpu_packed
from kvservice.kernels.shapes import Bits, Target
from kvservice.model.cache import CacheKind
from kvservice.model.errors import CorruptError, GeometryMismatchError, InvalidInputError, SlotError
from kvservice.model.geometry import attention_geometry
from kvservice.storage.record import RecordReader
from tests.client.builders import POLICY, Engine, assert_equal_bits, make_identity, make_prompt
from tests.client.conftest import Connect, local, local_node
from tests.connectors.packed_engine import (
    BLOCK_SIZE,
    GEOMETRIES,
    PackedEngine,
    all_rows,
    found,
    hostile_rows,
    make_plain,
    restore,
    store_family,
)
from tests.kernels.builders import PACKINGS

__all__ = ["local", "local_node"]  # fixtures

IDENTITY = make_identity(GEOMETRIES["gqa-bf16"])
STRIDED = ("vec", "rows")
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=[None, 1, 5, 40], ids=["one piece", "row by row", "few rows", "few targets"])
def scratch_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many rows fit the scratch memory."""
    if request.param is not None:
        sizes = {name: max(one.row_bytes(plane) for plane in one.planes) for name, one in GEOMETRIES.items()}
        name = request.node.callspec.params.get("name", "gqa-bf16")
        monkeypatch.setattr(cpu_packed, "STREAM_BYTES_MIN", request.param * sizes[name] + 1)


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("packing", ["amx", "shuffled"])
@pytest.mark.usefixtures("scratch_rows")
def test_a_round_is_restored_to_packed_blocks_as_to_plain_ones(local: Connect, packing: str, name: str) -> None:
    check_round(local, packing, name, "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("packing", STRIDED)
def test_a_round_is_restored_to_strided_blocks_as_to_plain_ones(
    local: Connect, packing: str, name: str, device: str
) -> None:
    check_round(local, packing, name, device)


def check_round(local: Connect, packing: str, name: str, device: str) -> None:
    """Masters moved to several prompts, mirrors at their place and moved, rows left out, other rows untouched."""
    identity = make_identity(GEOMETRIES[name])
    client = local(identity)
    prompts = store_family(client, identity)[1:]
    prompts += [make_prompt(identity, private=private, shared=(21, 12), seed=20, policy=POLICY) for private in (3, 5)]
    plain = make_plain(identity.geometry, seed=5)
    packed = PackedEngine(plain, packing, device=device)
    memory = engine_memory(packed.paged, identity)
    slots = [plain.allocate(prompt.token_count) for prompt in prompts]
    slots[0][[2, 7, 9, -1]] = -1
    slots[3][:] = -1
    with found(client, prompts) as plans:
        masters = [plan.plan.segments[-1].reference for plan in plans]
        assert any(masters), "mirrors are among what is found"
        client.restore(plans, plain.planes, slots).wait()
        restore(client, plans, memory, slots)
    assert_equal_bits(all_rows(packed), all_rows(plain))


def test_the_way_is_chosen_by_the_layout() -> None:
    plain = make_plain(IDENTITY.geometry)
    kinds = {packing: type(engine_memory(PackedEngine(plain, packing).paged, IDENTITY)) for packing in PACKINGS}
    assert kinds == {"amx": PackedPaged, "vec": CpuPaged, "rows": CpuPaged, "shuffled": PackedPaged}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_device_only_strided_planes_are_taken() -> None:
    plain = make_plain(IDENTITY.geometry)
    assert isinstance(engine_memory(PackedEngine(plain, "rows", device="cuda").paged, IDENTITY), DevicePaged)
    with pytest.raises(UnknownLayoutError, match="cuda"):
        engine_memory(PackedEngine(plain, "amx", device="cuda").paged, IDENTITY)


@pytest.mark.parametrize("packing", STRIDED)
def test_strided_planes_are_views_of_the_engines_memory(packing: str) -> None:
    plain = make_plain(IDENTITY.geometry)
    packed = PackedEngine(plain, packing)
    views = plane_views(packed.paged, IDENTITY)
    assert views is not None
    before = all_rows(packed)
    for layer, planes in enumerate(views):
        for plane, rows in zip(planes, before[layer], strict=True):
            assert torch.equal(plane.reshape(rows.shape).view(rows.dtype), rows)
            plane.zero_()
    assert not any(rows.any() for planes in all_rows(packed) for rows in planes)


def test_other_caches_than_the_identitys_are_refused() -> None:
    paged = PackedEngine(make_plain(IDENTITY.geometry), "amx").paged
    for geometry in (
        attention_geometry(layers=2, heads=2, head_size=16, dtype="bfloat16"),
        attention_geometry(layers=3, heads=2, head_size=8, dtype="bfloat16"),
        attention_geometry(layers=3, heads=2, head_size=16, dtype="float16"),
    ):
        with pytest.raises(GeometryMismatchError, match="identity says"):
            engine_memory(paged, make_identity(geometry))


@pytest.mark.parametrize("is_hostile", [False, True])
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_are_gathered_with_a_count_of_what_is_not_finite(packing: str, name: str, is_hostile: bool) -> None:
    identity = make_identity(GEOMETRIES[name])
    plain = make_plain(identity.geometry)
    if is_hostile:
        hostile_rows(plain)
    memory, slots = engine_memory(PackedEngine(plain, packing).paged, identity), plain.allocate(77).numpy()
    for layer, wanted in enumerate(plain.rows(torch.from_numpy(slots))):
        out = [
            np.empty((77, plane.row_elements), f"u{identity.geometry.element_bytes}")
            for plane in identity.geometry.planes
        ]
        count = memory.gather_layer(layer, slots, out)
        values = [rows.view(plain.planes[0][0].dtype).float() for rows in wanted]
        assert count == sum(int((~torch.isfinite(one)).sum()) for one in values)
        assert (count > 0) == is_hostile
        for plane, rows in zip(out, wanted, strict=True):
            np.testing.assert_array_equal(plane, rows.flatten(1).numpy().view(plane.dtype))


@pytest.mark.parametrize("packing", PACKINGS)
def test_what_is_stored_from_packed_blocks_comes_back(local: Connect, packing: str) -> None:
    client = local(IDENTITY)
    plain = make_plain(IDENTITY.geometry, seed=3)
    memory = engine_memory(PackedEngine(plain, packing).paged, IDENTITY)
    prompts = [make_prompt(IDENTITY, private=private, seed=private) for private in (7, 12)]
    slots = [plain.allocate(prompt.token_count) for prompt in prompts]
    requests = [StoreRequest(prompt, one) for prompt, one in zip(prompts, slots, strict=True)]
    results = store_round(client.session, IDENTITY, memory, requests, None)
    assert {one.outcome for result in results for one in result.segments} == {StoreOutcome.MASTER}
    other = make_plain(IDENTITY.geometry, seed=4)
    again = [other.allocate(prompt.token_count) for prompt in prompts]
    with found(client, prompts) as plans:
        client.restore(plans, other.planes, again).wait()
    for one, place in zip(again, slots, strict=True):
        assert_equal_bits(other.rows(one), plain.rows(place))


def test_restores_of_two_threads_share_the_scratch_memory(local: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_packed, "STREAM_BYTES_MIN", 7 * 64)
    client = local(IDENTITY)
    prompts = store_family(client, IDENTITY)
    plain = make_plain(IDENTITY.geometry, seed=5)
    packed = PackedEngine(plain, "amx")
    memory = engine_memory(packed.paged, IDENTITY)
    slots = [plain.allocate(prompt.token_count) for prompt in prompts]

    def run(index: int) -> None:
        for _ in range(5):
            with found(client, [prompts[index]]) as plans:
                restore(client, plans, memory, [slots[index]])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, range(4)))
    with found(client, prompts) as plans:
        client.restore(plans, plain.planes, slots).wait()
    assert_equal_bits(all_rows(packed), all_rows(plain))


@pytest.mark.parametrize("bad", [-2, 256])
def test_slots_outside_are_refused_before_anything_is_written(local: Connect, bad: int) -> None:
    client = local(IDENTITY)
    prompt = store_family(client, IDENTITY)[0]
    plain = make_plain(IDENTITY.geometry)
    packed = PackedEngine(plain, "amx")
    memory = engine_memory(packed.paged, IDENTITY)
    slots = plain.allocate(prompt.token_count)
    slots[11] = bad
    with found(client, [prompt]) as plans:
        with pytest.raises(SlotError):
            restore(client, plans, memory, [slots])
        good = plan_restore(client.session, plans, [plain.allocate(prompt.token_count)], memory)
        master = good.masters[1][0].master
        for wrong in (slots[8:29].numpy(), slots[8:28].numpy(), slots[8:29].numpy().astype(np.int32)):
            with pytest.raises(InvalidInputError, match="nothing was written"):
                memory.prepare(master, [Target(8, wrong)], [None])
    assert_equal_bits(all_rows(packed), all_rows(plain))


def test_a_run_table_that_lies_is_named_and_nothing_is_written(local: Connect, local_node: LocalNode) -> None:
    client = local(IDENTITY)
    prompt = store_family(client, IDENTITY)[1]
    plain = make_plain(IDENTITY.geometry)
    packed = PackedEngine(plain, "amx")
    memory = engine_memory(packed.paged, IDENTITY)
    with found(client, [prompt]) as plans:
        place = plans[0].plan.segments[-1].record
        assert place is not None
        record = local_node.arena[place.extent.offset : place.extent.end]
        reader = RecordReader(record)
        assert reader.meta.kind is CacheKind.MIRROR
        record[reader.layout.section_offsets[2] + 8] = 0xFF  # the first row of a run, beyond the segment
        with pytest.raises(CorruptError, match=f"{reader.meta.key}, layer 2: runs must be sorted"):
            restore(client, plans, memory, [plain.allocate(prompt.token_count)])
    assert_equal_bits(all_rows(packed), all_rows(plain))


# ---------------------------------------------------------------------- rows by place


def random_planes(engine: Engine, count: int) -> list[Bits]:
    generator = np.random.default_rng(5)
    kind = np.dtype(f"u{engine.geometry.element_bytes}")
    shapes = [(count, plane.row_elements) for plane in engine.geometry.planes]
    return [generator.integers(0, np.iinfo(kind).max, shape, kind, endpoint=True) for shape in shapes]


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize(("skip", "count"), [(0, 64), (3, 50), (17, 1), (0, 0)])
@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_by_place_are_what_the_layout_says(packing: str, skip: int, count: int, as_tensors: bool) -> None:
    plain = make_plain(IDENTITY.geometry)
    ours, theirs = (PackedEngine(plain, packing, scheduler_blocks=2) for _ in "ab")
    place = ours.paged.place([5, 0, 3], skip, count)
    rows = random_planes(plain, count)
    given = [torch.from_numpy(one.view(np.int16)).view(torch.bfloat16) for one in rows] if as_tensors else rows
    for layer in range(3):
        ours.paged.scatter(layer, place, given)
        theirs.paged.layouts[layer].scatter(theirs.paged.caches[layer], place.slots, rows)
        read = [np.zeros_like(one) for one in rows]
        ours.paged.gather(layer, place, read)
        for one, other in zip(read, rows, strict=True):
            np.testing.assert_array_equal(one, other)
    assert torch.equal(ours.memory.view(torch.int16), theirs.memory.view(torch.int16))


def test_places_and_rows_that_do_not_fit_are_refused() -> None:
    plain = make_plain(IDENTITY.geometry)
    packed = PackedEngine(plain, "amx")
    right = random_planes(plain, BLOCK_SIZE)
    place = packed.paged.place([2], 0, BLOCK_SIZE)
    for bad in (packed.paged.place([16], 0, BLOCK_SIZE), packed.paged.place([-1], 0, BLOCK_SIZE)):
        for move in (packed.paged.gather, packed.paged.scatter):
            with pytest.raises(SlotError):
                move(0, bad, right)
    wrong = [plane[:-1] for plane in right], [plane.astype(np.uint32) for plane in right], [right[0][:, ::2]] * 2
    for rows in wrong:
        for move in (packed.paged.gather, packed.paged.scatter):
            with pytest.raises(GeometryMismatchError):
                move(0, place, rows)
    assert_equal_bits(all_rows(packed), all_rows(plain))
