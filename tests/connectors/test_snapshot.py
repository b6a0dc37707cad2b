"""A snapshot of an engine's rows: stored later, whatever the engine does meanwhile, within a budget of bytes."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kvservice.client import RoundPrompt, StoreOutcome, StoreRequest
from kvservice.client.connectors.vllm.paged import EnginePaged
from kvservice.client.connectors.vllm.snapshot import Snapshot
from kvservice.client.connectors.vllm.staging import Staging
from kvservice.client.paged import layer_rotations
from kvservice.client.store import store_round
from kvservice.model.errors import InvalidInputError, NonFiniteError, SlotError
from tests.client.builders import POLICY, Engine, assert_equal_bits, make_identity, make_prompt
from tests.client.conftest import Connect, local, local_node
from tests.connectors.packed_engine import GEOMETRIES, PackedEngine, found, hostile_rows, make_plain, store_family
from tests.kernels.builders import PACKINGS

__all__ = ["local", "local_node"]  # fixtures

IDENTITY = make_identity(GEOMETRIES["gqa-bf16"])
TOKEN_BYTES = IDENTITY.geometry.token_bytes
ROOM = 1 << 20


def make_prompts() -> list[RoundPrompt]:
    return [make_prompt(IDENTITY, private=private, seed=private) for private in (7, 12, 3)]


def allocate(plain: Engine, prompts: list[RoundPrompt]) -> list[Tensor]:
    return [plain.allocate(prompt.token_count) for prompt in prompts]


def begin(paged: EnginePaged, slots: list[Tensor], staging: Staging) -> Snapshot:
    snapshot = Snapshot.begin(paged, IDENTITY, [one.numpy() for one in slots], staging)
    assert snapshot is not None
    return snapshot


@pytest.mark.parametrize("layers_at_a_time", [None, 1, 2])
@pytest.mark.parametrize("packing", PACKINGS)
def test_what_was_taken_is_stored_though_the_engine_goes_on(
    local: Connect, packing: str, layers_at_a_time: int | None
) -> None:
    client, prompts = local(IDENTITY), make_prompts()
    plain = make_plain(IDENTITY.geometry, seed=3)
    packed = PackedEngine(plain, packing)
    slots = allocate(plain, prompts)
    staging = Staging(ROOM)
    snapshot = begin(packed.paged, slots, staging)
    while not snapshot.is_complete:
        snapshot.take(layers_at_a_time)
    packed.memory.fill_(float("nan"))
    requests = [StoreRequest(prompt, snapshot.slots_of(index)) for index, prompt in enumerate(prompts)]
    results = store_round(client.session, IDENTITY, snapshot, requests, None)
    assert {one.outcome for result in results for one in result.segments} == {StoreOutcome.MASTER}
    assert staging.used_bytes == sum(prompt.token_count for prompt in prompts) * TOKEN_BYTES
    snapshot.close()
    other = make_plain(IDENTITY.geometry, seed=4)
    again = allocate(other, prompts)
    with found(client, prompts) as plans:
        assert [plan.exact_prefix_tokens for plan in plans] == [prompt.token_count for prompt in prompts]
        client.restore(plans, other.planes, again).wait()
    for one, place in zip(again, slots, strict=True):
        assert_equal_bits(other.rows(one), plain.rows(place))


def test_a_refreshed_round_is_stored_as_mirrors_of_what_was_found(local: Connect) -> None:
    client = local(IDENTITY)
    store_family(client, IDENTITY)
    prompt = make_prompt(IDENTITY, private=15, shared=(21, 12), seed=30, policy=POLICY)
    plain = make_plain(IDENTITY.geometry, seed=6)
    slots = plain.allocate(prompt.token_count)
    with found(client, [prompt]) as plans:
        client.restore(plans, plain.planes, [slots]).wait()
        plain.change(slots[[16, 40]])
        snapshot = begin(PackedEngine(plain, "amx").paged, [slots], Staging(ROOM))
        snapshot.take()
        request = StoreRequest(prompt, snapshot.slots_of(0), plans[0], is_refreshed=True)
        (result,) = store_round(client.session, IDENTITY, snapshot, [request], None)
    assert [one.outcome for one in result.segments][-2:] == [StoreOutcome.MIRROR] * 2
    other = make_plain(IDENTITY.geometry, seed=7)
    again = other.allocate(prompt.token_count)
    with found(client, [prompt]) as plans:
        client.restore(plans, other.planes, [again]).wait()
    assert_equal_bits(other.rows(again), plain.rows(slots))


def test_rows_left_out_have_no_slot_and_take_no_room() -> None:
    plain = make_plain(IDENTITY.geometry)
    slots = [torch.tensor([-1, 200, 3, -1, 7]), torch.full((4,), -1), torch.tensor([3, 0])]
    staging = Staging(5 * TOKEN_BYTES)
    snapshot = begin(PackedEngine(plain, "amx").paged, slots, staging)
    assert [snapshot.slots_of(index).tolist() for index in range(3)] == [[-1, 0, 1, -1, 2], [-1] * 4, [3, 4]]
    assert (snapshot.slot_count, staging.used_bytes) == (5, 5 * TOKEN_BYTES)
    assert snapshot.rotations == layer_rotations(IDENTITY)
    snapshot.take()
    out = [np.zeros((2, plane.row_elements), np.uint16) for plane in IDENTITY.geometry.planes]
    for layer, wanted in enumerate(plain.rows(torch.tensor([0, 7]))):
        assert snapshot.gather_layer(layer, np.array([4, 2]), out) == 0
        for one, rows in zip(out, wanted, strict=True):
            np.testing.assert_array_equal(one, rows.flatten(1).numpy().view(np.uint16))


def test_without_room_there_is_no_snapshot_and_room_comes_back_once() -> None:
    plain = make_plain(IDENTITY.geometry)
    paged = PackedEngine(plain, "vec").paged
    staging = Staging(10 * TOKEN_BYTES)
    first = begin(paged, [torch.arange(6)], staging)
    assert Snapshot.begin(paged, IDENTITY, [np.arange(5)], staging) is None
    first.close()
    first.close()
    assert staging.used_bytes == 0
    second = begin(paged, [torch.arange(5)], staging)
    assert staging.used_bytes == 6 * TOKEN_BYTES, "the memory of the first, once more"
    second.close()


def test_an_empty_snapshot_is_one() -> None:
    snapshot = begin(PackedEngine(make_plain(IDENTITY.geometry), "amx").paged, [torch.tensor([-1])], Staging(0))
    snapshot.take()
    assert (snapshot.is_complete, snapshot.slot_count, snapshot.slots_of(0).tolist()) == (True, 0, [-1])
    snapshot.close()


def test_values_that_are_not_finite_are_not_stored(local: Connect) -> None:
    client, (prompt, *_) = local(IDENTITY), make_prompts()
    plain = make_plain(IDENTITY.geometry)
    hostile_rows(plain)
    snapshot = begin(PackedEngine(plain, "amx").paged, allocate(plain, [prompt]), Staging(ROOM))
    snapshot.take()
    with pytest.raises(NonFiniteError):
        store_round(client.session, IDENTITY, snapshot, [StoreRequest(prompt, snapshot.slots_of(0))], None)


def test_slots_outside_the_engine_are_refused() -> None:
    snapshot = begin(PackedEngine(make_plain(IDENTITY.geometry), "amx").paged, [torch.tensor([256])], Staging(ROOM))
    with pytest.raises(SlotError):
        snapshot.take()
    snapshot.close()


def test_a_snapshot_is_not_written(local: Connect) -> None:
    snapshot = begin(PackedEngine(make_plain(IDENTITY.geometry), "amx").paged, [torch.arange(3)], Staging(ROOM))
    with pytest.raises(InvalidInputError, match="not written"):
        snapshot.prepare(None, [], [])  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="not written"):
        snapshot.finish_layer(0)
    snapshot.settle()


def test_only_what_was_taken_is_read() -> None:
    snapshot = begin(PackedEngine(make_plain(IDENTITY.geometry), "amx").paged, [torch.arange(3)], Staging(ROOM))
    snapshot.take(1)
    out = [np.zeros((1, plane.row_elements), np.uint16) for plane in IDENTITY.geometry.planes]
    snapshot.gather_layer(0, np.array([2]), out)
    with pytest.raises(AssertionError, match="layer 1 was not taken"):
        snapshot.gather_layer(1, np.array([2]), out)
    snapshot.close()
    with pytest.raises(AssertionError, match="closed"):
        snapshot.gather_layer(0, np.array([2]), out)
