"""Restoring a round: the right bits in the right slots, or nothing written at all."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.app import LocalNode
from kvservice.client import Client, PartKind, Plans, PromptPlan, RoundPrompt
from kvservice.client.restore import RestoreWork, layer_batches
from kvservice.model.cache import CacheKind
from kvservice.model.errors import (
    CorruptError,
    GeometryMismatchError,
    InvalidIdentityError,
    InvalidInputError,
    LeaseExpiredError,
    SlotError,
    TokenCountError,
)
from kvservice.model.geometry import Geometry, attention_geometry, latent_geometry
from kvservice.model.plan import Location, Match, MissReason, Outcome, PlannedSegment
from kvservice.storage.record import RecordReader
from tests.client.builders import (
    GEOMETRIES,
    POLICY,
    Engine,
    assert_equal_bits,
    bits_of,
    make_identity,
    make_prompt,
    make_settings,
    make_tokens,
    moved_rows,
)
from tests.client.conftest import Connect

IDENTITY = make_identity()


def stored(client: Client, prompt: RoundPrompt, seed: int = 0) -> tuple[Engine, torch.Tensor]:
    """The engine and slots that a prompt was stored from."""
    identity = client.session.identity
    engine = Engine(identity.geometry, seed=seed)
    slots = engine.allocate(prompt.token_count)
    client.store(prompt, engine.planes, slots)
    return engine, slots


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("private", [3, 20])
def test_a_moved_restore_is_what_the_rotation_law_says(local: Connect, name: str, private: int) -> None:
    identity = make_identity(GEOMETRIES[name])
    client = local(identity)
    first = make_prompt(identity, private=8, seed=1, policy=POLICY)
    second = make_prompt(identity, private=private, seed=2, policy=POLICY)
    source, stored_slots = stored(client, first)
    engine = Engine(identity.geometry, seed=5)
    slots = engine.allocate(second.token_count)
    before = engine.rows(slots[:private])
    with client.lookup([second]) as plans:
        restore = client.restore(plans, engine.planes, [slots])
        restore.wait()
        assert [(span.match, span.is_moved) for span in restore.spans[0]] == [(Match.SHIFTED, True)] * 2
    assert_equal_bits(engine.rows(slots[private:]), moved_rows(identity, source.rows(stored_slots[8:]), private - 8))
    assert_equal_bits(engine.rows(slots[:private]), before)


def test_a_mirror_is_restored_elsewhere_from_its_parts(local: Connect) -> None:
    client = local(IDENTITY)
    first, second, third = (
        make_prompt(IDENTITY, private=4 * count, shared=(12,), seed=count, policy=POLICY) for count in (1, 2, 3)
    )
    source, source_slots = stored(client, first)
    engine = Engine(IDENTITY.geometry, seed=2)
    slots = engine.allocate(second.token_count)
    with client.lookup([second]) as plans:
        client.restore(plans, engine.planes, [slots]).wait()
        engine.change(slots[10:12])
        client.store(second, engine.planes, slots, base=plans[0], is_refreshed=True)
    parts = [(PartKind.PRIVATE, make_tokens(12, 9)), (PartKind.PRIVATE, second.tokens[4:8])]
    third = RoundPrompt.from_parts(
        IDENTITY.namespace(), [*parts, (PartKind.SHARED, second.tokens[8:])], policy=POLICY, chunk_tokens=4
    )
    target = engine.allocate(third.token_count)
    with client.lookup([third]) as plans:
        client.restore(plans, engine.planes, [target]).wait()
        assert plans[0].spans(Match.SHIFTED)[0].affinity == 1
    expected = moved_rows(IDENTITY, source.rows(source_slots[4:]), 12)
    replaced = moved_rows(IDENTITY, engine.rows(slots[10:12]), 8)
    for layer, planes in enumerate(replaced):
        for plane, rows in enumerate(planes):
            expected[layer][plane][2:4] = rows
    assert_equal_bits(engine.rows(target[16:]), expected)


def test_all_prompts_of_a_round_are_served_by_one_read_of_a_master(local: Connect) -> None:
    client = local(IDENTITY)
    source, source_slots = stored(client, make_prompt(IDENTITY, private=8, seed=1, policy=POLICY))
    prompts = [make_prompt(IDENTITY, private=private, seed=private, policy=POLICY) for private in (1, 5, 9, 13)]
    engine = Engine(IDENTITY.geometry, seed=5, blocks=64)
    slots = [engine.allocate(prompt.token_count) for prompt in prompts]
    with client.lookup(prompts) as plans:
        client.restore(plans, engine.planes, slots).wait()
        assert len({planned.record for plan in plans for _, planned in plan.hits}) == 2
    for private, one in zip((1, 5, 9, 13), slots, strict=True):
        expected = moved_rows(IDENTITY, source.rows(source_slots[8:]), private - 8)
        assert_equal_bits(engine.rows(one[private:]), expected)


def test_local_rows_are_left_out(local: Connect) -> None:
    client = local(IDENTITY)
    prompt = make_prompt(IDENTITY)
    source, source_slots = stored(client, prompt)
    engine = Engine(IDENTITY.geometry, seed=7)
    slots = engine.allocate(prompt.token_count)
    before = engine.rows(slots[:6])
    given_slots = slots.clone()
    given_slots[:6] = -1
    with client.lookup([prompt]) as plans:
        restore = client.restore(plans, engine.planes, [given_slots])
        restore.wait()
    assert_equal_bits(engine.rows(slots[:6]), before)
    assert_equal_bits(engine.rows(slots[6:]), source.rows(source_slots[6:]))
    assert restore.spans[0][0].start == 4  # the chunk before is local altogether


def test_layers_are_waited_for_one_by_one(local: Connect) -> None:
    client = local(IDENTITY)
    prompt = make_prompt(IDENTITY)
    source, source_slots = stored(client, prompt)
    engine = Engine(IDENTITY.geometry, seed=7)
    slots = engine.allocate(prompt.token_count)
    may_go_on = threading.Event()
    told: list[tuple[int, int]] = []

    def on_progress(done: int, of: int) -> None:
        told.append((done, of))
        may_go_on.wait(5)

    with client.lookup([prompt]) as plans:
        restore = client.restore(plans, engine.planes, [slots], on_progress=on_progress)
        restore.wait_for_layer(0)
        assert not restore.is_done
        assert_equal_bits(engine.rows(slots)[:1], source.rows(source_slots)[:1])
        may_go_on.set()
        restore.wait()
        assert restore.is_done
        with pytest.raises(InvalidInputError):
            restore.wait_for_layer(3)
    assert told == [(1, 3), (3, 3)]


def test_restores_run_at_the_same_time(local: Connect) -> None:
    client = local(IDENTITY)
    prompts = [make_prompt(IDENTITY, private=20, seed=seed) for seed in range(4)]
    sources = [stored(client, prompt, seed) for seed, prompt in enumerate(prompts)]

    def restore(index: int) -> None:
        engine = Engine(IDENTITY.geometry, seed=50 + index)
        slots = engine.allocate(prompts[index].token_count)
        for _ in range(5):
            engine.change(slots)
            with client.lookup([prompts[index]]) as plans:
                client.restore(plans, engine.planes, [slots], verify=True).wait()
            source, source_slots = sources[index]
            assert_equal_bits(engine.rows(slots)[:], source.rows(source_slots))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(restore, range(4)))
    assert client.session.leases_held == 0


def test_prompts_of_other_identities_find_nothing(local: Connect) -> None:
    other = make_identity(weights="r2")
    client, stranger = local(IDENTITY), local(other)
    prompt = make_prompt(IDENTITY)
    stored(client, prompt)
    with stranger.lookup([make_prompt(other)]) as plans:
        assert {one.miss_reason for one in plans[0].plan.segments} <= {
            MissReason.UNKNOWN_NAMESPACE,
            MissReason.UNKNOWN_SEGMENT,
        }
    with pytest.raises(InvalidIdentityError, match="not registered"):
        stranger.lookup([prompt])
    stranger.session.register(IDENTITY)
    with stranger.lookup([prompt]) as plans:
        assert plans.hit_tokens == prompt.token_count


def test_one_call_serves_one_identity(local: Connect) -> None:
    other = make_identity(weights="r2")
    client = local(IDENTITY, other)
    prompts = [make_prompt(IDENTITY), make_prompt(other)]
    engine = Engine(IDENTITY.geometry)
    with client.lookup(prompts) as plans, pytest.raises(InvalidInputError, match="share a namespace"):
        client.restore(plans, engine.planes, [engine.allocate(prompt.token_count) for prompt in prompts])


def test_bad_input_writes_nothing(local: Connect) -> None:
    client = local(IDENTITY)
    prompts = [make_prompt(IDENTITY, private=4, seed=1), make_prompt(IDENTITY, private=4, seed=2)]
    for prompt in prompts:
        stored(client, prompt)
    engine = Engine(IDENTITY.geometry, seed=3)
    good = [engine.allocate(prompt.token_count) for prompt in prompts]
    before = [[bits_of(plane).clone() for plane in layer] for layer in engine.planes]
    with client.lookup(prompts) as plans:
        for change, error in BAD_SLOTS:
            with pytest.raises(error):
                client.restore(plans, engine.planes, change([one.clone() for one in good]))
        for wrong in (engine.planes[:-1], [layer[:1] for layer in engine.planes], as_float(engine), narrow(engine)):
            with pytest.raises(GeometryMismatchError):
                client.restore(plans, wrong, good)
    assert_equal_bits([[bits_of(plane) for plane in layer] for layer in engine.planes], before)


Slots = list[torch.Tensor]


def put(value: int) -> Callable[[Slots], Slots]:
    def change(slots: Slots) -> Slots:
        slots[1][5] = value
        return slots

    return change


def share_a_slot(slots: Slots) -> Slots:
    slots[1][0] = slots[0][0]
    return slots


BAD_SLOTS: list[tuple[Callable[[Slots], Slots], type[Exception]]] = [
    (lambda slots: slots[:1], TokenCountError),
    (lambda slots: [slots[0], slots[1][:-1]], TokenCountError),
    (lambda slots: [slots[0], slots[1].to(torch.int32)], InvalidInputError),
    (put(32 * 4), SlotError),
    (put(-2), SlotError),
    (put(1 << 40), SlotError),
    (share_a_slot, SlotError),
]


def as_float(engine: Engine) -> list[list[torch.Tensor]]:
    return [[plane.float() for plane in layer] for layer in engine.planes]


def narrow(engine: Engine) -> list[list[torch.Tensor]]:
    return [[plane[..., :4] for plane in layer] for layer in engine.planes]


def test_closed_plans_cannot_be_restored(local: Connect) -> None:
    client = local(IDENTITY)
    prompt = make_prompt(IDENTITY)
    stored(client, prompt)
    engine = Engine(IDENTITY.geometry)
    with client.lookup([prompt]) as plans:
        pass
    with pytest.raises(LeaseExpiredError):
        client.restore(plans, engine.planes, [engine.allocate(prompt.token_count)])


def test_a_lease_lost_under_way_fails_the_restore(local: Connect) -> None:
    client = local(IDENTITY)
    prompt = make_prompt(IDENTITY)
    stored(client, prompt)
    engine = Engine(IDENTITY.geometry)
    with client.lookup([prompt]) as plans:
        restore = client.restore(
            plans, engine.planes, [engine.allocate(prompt.token_count)], on_progress=lambda *_: plans.close()
        )
        restore.wait_for_layer(0)
        with pytest.raises(LeaseExpiredError):
            restore.wait()


def test_nothing_found_is_nothing_to_do(local: Connect) -> None:
    client = local(IDENTITY)
    prompt = make_prompt(IDENTITY)
    engine = Engine(IDENTITY.geometry)
    with client.lookup([prompt]) as plans:
        assert {one.outcome for one in plans[0].plan.segments} == {Outcome.MISS}
        restore = client.restore(plans, engine.planes, [engine.allocate(prompt.token_count)])
        restore.wait()
    assert restore.spans == ((),)
    with client.lookup([]) as nothing:
        client.restore(nothing, engine.planes, []).wait()


def test_corrupt_bytes_are_named(local: Connect, local_node: LocalNode) -> None:
    client = local(IDENTITY)
    prompt = make_prompt(IDENTITY)
    stored(client, prompt)
    engine = Engine(IDENTITY.geometry)
    slots = [engine.allocate(prompt.token_count)]
    with client.lookup([prompt]) as plans:
        place = plans[0].plan.segments[2].record
        assert place is not None
        local_node.arena[place.extent.end - 70] ^= 1
        restore = client.restore(plans, engine.planes, slots, verify=True)
        with pytest.raises(CorruptError, match=str(prompt.key(2))):
            restore.wait()
        local_node.arena[place.extent.offset + 30] ^= 1
        with pytest.raises(CorruptError, match=str(prompt.key(2))):
            client.restore(plans, engine.planes, slots)


def test_a_run_table_that_lies_is_named_and_nothing_is_written(local: Connect, local_node: LocalNode) -> None:
    """Without checksums too: the tables of all layers are read before the first layer is written."""
    client = local(IDENTITY)
    first, second = (make_prompt(IDENTITY, private=4, shared=(12,), seed=seed, policy=POLICY) for seed in (1, 2))
    stored(client, first)
    engine = Engine(IDENTITY.geometry, seed=2)
    slots = engine.allocate(second.token_count)
    with client.lookup([second]) as plans:
        client.restore(plans, engine.planes, [slots]).wait()
        engine.change(slots[10:12])
        client.store(second, engine.planes, slots, base=plans[0], is_refreshed=True)
    before = [[bits_of(plane).clone() for plane in layer] for layer in engine.planes]
    with client.lookup([second]) as plans:
        place = plans[0].plan.segments[-1].record
        assert place is not None
        record = local_node.arena[place.extent.offset : place.extent.end]
        reader = RecordReader(record)
        assert reader.meta.kind is CacheKind.MIRROR
        record[reader.layout.section_offsets[2] + 8] = 0xFF  # the first row of a run, beyond the segment
        with pytest.raises(CorruptError, match=f"{reader.meta.key}, layer 2: runs must be sorted"):
            client.restore(plans, engine.planes, [slots]).wait()
    assert_equal_bits([[bits_of(plane) for plane in layer] for layer in engine.planes], before)


class FakeWork:
    """A restore of 28 layers of half a megabyte, of which only some are there at first."""

    layer_bytes = 1 << 19

    def __init__(self, batch_bytes_max: int, step: int) -> None:
        self.memory = SimpleNamespace(batch_bytes_max=batch_bytes_max)
        self._step = step

    def open_layers(self, first: int, layers: int) -> int:
        return min(layers, first + self._step)


@pytest.mark.parametrize(
    ("batch_bytes_max", "step", "verify", "ends"),
    [
        (16 << 20, 28, False, [1, 5, 25, 28]),
        (4 << 20, 28, False, [1, 5, 13, 21, 28]),
        (16 << 20, 28, True, [1, *range(3, 28, 2), 28]),
        (16 << 20, 10, False, [1, 5, 10, 20, 28]),
        (0, 28, False, list(range(1, 29))),
    ],
)
def test_batches_grow_and_hold_only_layers_that_are_there(
    batch_bytes_max: int, step: int, verify: bool, ends: list[int]
) -> None:
    work = cast("RestoreWork", FakeWork(batch_bytes_max, step))
    found = list(layer_batches(work, 28, verify=verify))
    assert [end for _, end in found] == ends
    assert [first for first, _ in found] == [0, *ends[:-1]]


def test_a_plan_that_names_another_record_is_refused(local: Connect) -> None:
    client = local(IDENTITY)
    prompt = make_prompt(IDENTITY)
    stored(client, prompt)
    engine = Engine(IDENTITY.geometry)
    with client.lookup([prompt]) as plans:
        first, second, *rest = plans[0].plan.segments
        for wrong in (second.record, replace_generation(first)):
            segments = (replace(first, record=wrong), second, *rest)
            lying = PromptPlan(prompt, replace(plans[0].plan, segments=segments))
            with pytest.raises(CorruptError, match=str(prompt.key(0))):
                client.restore(
                    Plans(client.session, plans.lease, [lying]), engine.planes, [engine.allocate(prompt.token_count)]
                )


def replace_generation(planned: PlannedSegment) -> Location:
    assert planned.record is not None
    return replace(planned.record, generation=planned.record.generation ^ 1)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    layers = draw(st.integers(1, 3))
    if draw(st.booleans()):
        rotary = 2 * draw(st.integers(1, 8))
        return latent_geometry(layers=layers, latent_size=draw(st.integers(1, 40)), rotary_size=rotary, dtype=dtype)
    head_size = draw(st.integers(2, 40))
    rotary = 2 * draw(st.integers(0, head_size // 2))
    return attention_geometry(
        layers=layers, heads=draw(st.integers(1, 3)), head_size=head_size, dtype=dtype, rotary_size=rotary
    )


@settings(max_examples=40, deadline=None)
@given(geometries(), st.data())
def test_storing_then_restoring_is_the_identity(shared_client: Client, geometry: Geometry, data: st.DataObject) -> None:
    """Any geometry, any positions, any rows refreshed: what the engine held is what comes back."""
    seed = data.draw(st.integers(0, 2**31))
    identity = make_identity(geometry, salt=f"{seed}")
    shared_client.session.register(identity)
    shared = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    lengths = [data.draw(st.integers(0, 12)) for _ in range(2)]
    prompts = [
        make_prompt(identity, private=private, shared=shared, seed=seed % 1000 + index, policy=POLICY)
        for index, private in enumerate(lengths)
    ]
    engine = Engine(geometry, blocks=64, seed=seed % 1000)
    kept = [engine.allocate(prompt.token_count) for prompt in prompts]
    shared_client.store(prompts[0], engine.planes, kept[0])
    with shared_client.lookup(prompts[1:]) as plans:
        shared_client.restore(plans, engine.planes, kept[1:]).wait()
        changed = data.draw(st.sets(st.integers(0, prompts[1].token_count - 1), max_size=6))
        engine.change(kept[1][sorted(changed)])
        shared_client.store(prompts[1], engine.planes, kept[1], base=plans[0], is_refreshed=True)
    other = Engine(geometry, blocks=64, seed=seed % 1000 + 1)
    found = [other.allocate(prompt.token_count) for prompt in prompts]
    with shared_client.lookup(prompts) as plans:
        assert_complete(plans[0].hit_tokens, prompts[0])
        shared_client.restore(plans, other.planes, found, verify=True).wait()
    assert_equal_bits(other.rows(found[0]), engine.rows(kept[0]))
    if prompts[0].tokens != prompts[1].tokens:
        assert_equal_bits(other.rows(found[1]), engine.rows(kept[1]))
    shared_client.delete(namespace=identity.namespace())


def assert_complete(hit_tokens: int, prompt: RoundPrompt) -> None:
    assert hit_tokens == prompt.token_count


@pytest.fixture(scope="module")
def shared_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with LocalNode(make_settings(tmp_path_factory.mktemp("node"))) as node, Client.in_process(node, IDENTITY) as client:
        yield client
