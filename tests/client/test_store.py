"""Storing from paged KV: masters, mirrors, refusals, and nothing published when something is wrong."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvservice.app import LocalNode
from kvservice.client import Client, PartKind, Plans, RoundPrompt, Session, StoreOutcome, StoreRequest
from kvservice.client.store_draft import Draft
from kvservice.model.errors import (
    CapacityError,
    CorruptError,
    GeometryMismatchError,
    InvalidInputError,
    LeaseExpiredError,
    NonFiniteError,
    NotOwnedError,
    SlotError,
    TokenCountError,
    UnavailableError,
)
from kvservice.model.identity import Identity
from kvservice.model.plan import Match
from kvservice.wire.v1 import cache_pb2 as wire
from tests.client.builders import (
    ARENA_BYTES,
    GEOMETRIES,
    POLICY,
    Engine,
    assert_equal_bits,
    make_identity,
    make_prompt,
    short_sighted_identity,
)
from tests.client.conftest import Connect

MASTER, MIRROR = StoreOutcome.MASTER, StoreOutcome.MIRROR
EXISTS, REFUSED = StoreOutcome.EXISTS, StoreOutcome.REFUSED


def store_whole(client: Client, identity: Identity, prompt: RoundPrompt, seed: int = 0) -> tuple[Engine, torch.Tensor]:
    """Store a prompt as an engine that computed it in full would; returns the engine and the prompt's slots."""
    engine = Engine(identity.geometry, seed=seed)
    slots = engine.allocate(prompt.token_count)
    result = client.store(prompt, engine.planes, slots)
    assert {one.outcome for one in result.segments} <= {MASTER, EXISTS}
    return engine, slots


def restore_into(client: Client, plans: Plans, engine: Engine, prompts: Sequence[RoundPrompt]) -> list[torch.Tensor]:
    """Restore plans to fresh slots of an engine."""
    slots = [engine.allocate(prompt.token_count) for prompt in prompts]
    client.restore(plans, engine.planes, slots).wait()
    return slots


def outcomes(result: Any) -> list[StoreOutcome]:
    return [one.outcome for one in result.segments]


@pytest.mark.parametrize("name", GEOMETRIES)
def test_what_was_stored_is_what_comes_back(connect: Connect, name: str) -> None:
    identity = make_identity(GEOMETRIES[name])
    prompt = make_prompt(identity)
    client = connect(identity)
    engine, slots = store_whole(client, identity, prompt)
    other = Engine(identity.geometry, seed=1)
    with client.lookup([prompt]) as plans:
        assert plans[0].exact_prefix_tokens == prompt.token_count
        (found,) = restore_into(client, plans, other, [prompt])
    assert_equal_bits(other.rows(found), engine.rows(slots))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_refreshed_prompt_comes_back_from_mirrors(connect: Connect, name: str) -> None:
    identity = make_identity(GEOMETRIES[name])
    client = connect(identity)
    first = make_prompt(identity, private=8, seed=1, policy=POLICY)
    second = make_prompt(identity, private=5, seed=2, policy=POLICY)
    store_whole(client, identity, first)
    engine = Engine(identity.geometry, seed=2)
    with client.lookup([second]) as plans:
        assert [span.match for span in plans[0].spans()] == [Match.SHIFTED] * 2
        (slots,) = restore_into(client, plans, engine, [second])
        engine.change(slots[[6, 12]])
        result = client.store(second, engine.planes, slots, base=plans[0], is_refreshed=True)
    assert outcomes(result) == [MASTER, MASTER, MIRROR, MIRROR]
    again = Engine(identity.geometry, seed=3)
    with client.lookup([second]) as plans:
        assert [span.match for span in plans[0].spans()] == [Match.EXACT] * 2 + [Match.REFRESHED] * 2
        (found,) = restore_into(client, plans, again, [second])
    assert_equal_bits(again.rows(found), engine.rows(slots))


def test_refreshed_caches_never_answer_exact_prompts(local: Connect) -> None:
    identity = make_identity()
    client = local(identity)
    refreshed = make_prompt(identity, policy=POLICY)
    engine = Engine(identity.geometry)
    client.store(refreshed, engine.planes, engine.allocate(refreshed.token_count), is_refreshed=True)
    with client.lookup([make_prompt(identity)]) as plans:
        assert plans[0].hit_tokens == 10  # the private history, computed before anything was reused


def test_a_mirror_of_a_mirror_refers_to_the_master(local: Connect) -> None:
    identity = make_identity()
    client = local(identity)
    first, second = (make_prompt(identity, private=4, shared=(12,), seed=seed, policy=POLICY) for seed in (1, 2))
    parts = [(PartKind.PRIVATE, [5, 6, 7]), (PartKind.PRIVATE, second.tokens[:4]), (PartKind.SHARED, second.tokens[4:])]
    third = RoundPrompt.from_parts(identity.namespace(), parts, policy=POLICY, chunk_tokens=4)  # nearest to the second
    store_whole(client, identity, first)
    engine = Engine(identity.geometry, seed=5)
    for prompt, changed in ((second, 9), (third, 12)):
        with client.lookup([prompt]) as plans:
            found_mirror = plans[0].plan.segments[-1].reference is not None
            assert found_mirror == (prompt is third)
            (slots,) = restore_into(client, plans, engine, [prompt])
            engine.change(slots[changed : changed + 1])
            result = client.store(prompt, engine.planes, slots, base=plans[0], is_refreshed=True)
        assert outcomes(result)[-1] is MIRROR
    with client.lookup([third]) as plans:
        reference = plans[0].plan.segments[-1].reference
        assert reference is not None
        assert reference.context == first.key(1).context
        (again,) = restore_into(client, plans, engine, [third])
    assert_equal_bits(engine.rows(again), engine.rows(slots))


def test_what_differs_in_most_rows_is_stored_dense(local: Connect) -> None:
    identity = make_identity()
    client = local(identity)
    first, second = (make_prompt(identity, private=8, seed=seed, policy=POLICY) for seed in (1, 2))
    store_whole(client, identity, first)
    engine = Engine(identity.geometry, seed=2)
    slots = engine.allocate(second.token_count)
    with client.lookup([second]) as plans:
        result = client.store(second, engine.planes, slots, base=plans[0])
    assert outcomes(result) == [MASTER] * 4


def test_what_is_held_is_not_stored_again(local: Connect) -> None:
    identity = make_identity()
    client = local(identity)
    prompt = make_prompt(identity)
    engine, slots = store_whole(client, identity, prompt)
    assert set(outcomes(client.store(prompt, engine.planes, slots))) == {EXISTS}
    with client.lookup([prompt]) as plans:
        result = client.store(prompt, engine.planes, slots, base=plans[0])
    assert set(outcomes(result)) == {EXISTS}
    assert result.stored_bytes == 0
    assert len(result.keys) == len(prompt.segments)


def test_one_key_is_stored_once_a_round(local: Connect) -> None:
    identity = make_identity()
    client = local(identity)
    prompt = make_prompt(identity)
    engine = Engine(identity.geometry)
    requests = [StoreRequest(prompt, engine.allocate(prompt.token_count), segments=[0, 1]) for _ in range(2)]
    results = client.store_round(requests, engine.planes)
    assert [outcomes(result) for result in results] == [[MASTER] * 2, [EXISTS] * 2]


def test_progress_is_told(local: Connect) -> None:
    identity = make_identity()
    client = local(identity)
    prompt = make_prompt(identity)
    engine = Engine(identity.geometry)
    told: list[tuple[int, int]] = []
    client.store(
        prompt, engine.planes, engine.allocate(prompt.token_count), on_progress=lambda done, of: told.append((done, of))
    )
    assert told == [(done, 5) for done in (1, 2, 3, 4, 5)]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("plane", [0, 1])
def test_values_that_are_not_finite_are_never_stored(local: Connect, plane: int, value: float) -> None:
    identity = make_identity()
    client = local(identity)
    prompt = make_prompt(identity)
    engine = Engine(identity.geometry)
    slots = engine.allocate(prompt.token_count)
    engine.planes[1][plane].flatten(0, 1)[slots[-1], 0, 3] = value
    with pytest.raises(NonFiniteError, match="layer 1: 1 values"):
        client.store(prompt, engine.planes, slots)
    with client.lookup([prompt]) as plans:
        assert plans.hit_tokens == 0
    assert_nothing_is_held(client)


def test_a_record_that_does_not_fit_is_refused_and_the_rest_is_stored(local: Connect) -> None:
    identity = make_identity()
    client = local(identity)
    tokens = ARENA_BYTES // identity.geometry.token_bytes + 1
    prompt = make_prompt(identity, private=4, shared=(tokens,))
    engine = Engine(identity.geometry, blocks=tokens // 4 + 2)
    result = client.store(prompt, engine.planes, engine.allocate(prompt.token_count))
    assert outcomes(result) == [MASTER, REFUSED]
    assert isinstance(result.segments[1].error, CapacityError)


def test_bad_input_stores_nothing(local: Connect) -> None:
    identity = make_identity()
    client = local(identity)
    prompt = make_prompt(identity)
    engine = Engine(identity.geometry)
    slots = engine.allocate(prompt.token_count)
    outside, left_out = slots.clone(), slots.clone()
    outside[3], left_out[3] = engine.slot_count, -1
    for wrong, error in (
        (slots[:-1], TokenCountError),
        (slots.to(torch.int32), InvalidInputError),
        (outside, SlotError),
        (left_out, SlotError),
    ):
        with pytest.raises(error):
            client.store(prompt, engine.planes, wrong)
    with pytest.raises(GeometryMismatchError):
        client.store(prompt, engine.planes[:-1], slots)
    with pytest.raises(GeometryMismatchError):
        client.store(prompt, [[plane.float() for plane in layer] for layer in engine.planes], slots)
    with pytest.raises(InvalidInputError, match="without a reuse policy"):
        client.store(prompt, engine.planes, slots, is_refreshed=True)
    with pytest.raises(InvalidInputError, match="segments"):
        client.store(prompt, engine.planes, slots, segments=[9])
    assert_nothing_is_held(client)


def test_a_base_must_be_leased_and_of_the_same_prompt(local: Connect) -> None:
    identity = make_identity()
    client = local(identity)
    prompt, other = make_prompt(identity), make_prompt(identity, seed=4)
    engine, slots = store_whole(client, identity, prompt)
    with client.lookup([prompt]) as plans, pytest.raises(InvalidInputError, match="another prompt"):
        client.store(other, engine.planes, slots, base=plans[0])
    with pytest.raises(LeaseExpiredError):
        client.store(prompt, engine.planes, slots, base=plans[0])


def test_no_mirror_is_made_of_a_base_whose_bytes_changed(local: Connect, local_node: LocalNode) -> None:
    identity = make_identity()
    client = local(identity)
    first, second = (make_prompt(identity, private=4, shared=(12,), seed=seed, policy=POLICY) for seed in (1, 2))
    store_whole(client, identity, first)
    engine = Engine(identity.geometry, seed=3)
    with client.lookup([second]) as plans:
        (slots,) = restore_into(client, plans, engine, [second])
        place = plans[0].plan.segments[-1].record
        assert place is not None
        local_node.arena[place.extent.end - 70] ^= 1
        with pytest.raises(CorruptError, match=str(first.key(1))):
            client.store(second, engine.planes, slots, base=plans[0], is_refreshed=True)
    assert_nothing_is_held(client)


def test_no_mirror_is_made_of_a_base_whose_lease_was_lost(local: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = make_identity()
    client = local(identity)
    first, second = (make_prompt(identity, private=4, seed=seed, policy=POLICY) for seed in (1, 2))
    store_whole(client, identity, first)
    engine = Engine(identity.geometry, seed=3)
    with client.lookup([second]) as plans:
        (slots,) = restore_into(client, plans, engine, [second])
        monkeypatch.setattr(Draft, "find_diff", lambda *_: plans.close())
        with pytest.raises(LeaseExpiredError):
            client.store(second, engine.planes, slots, base=plans[0], is_refreshed=True)
    assert_nothing_is_held(client)


def test_a_mirror_whose_master_goes_before_the_commit_is_stored_dense(
    local: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = make_identity()
    client = local(identity)
    first, second = (make_prompt(identity, private=4, shared=(12,), seed=seed, policy=POLICY) for seed in (1, 2))
    store_whole(client, identity, first)
    engine = Engine(identity.geometry, seed=3)
    commit, told = Session.commit, list[tuple[int, int]]()

    def commit_after_a_deletion(session: Session, items: Sequence[wire.CommitItem]) -> list[wire.CommitOutcome]:
        client.delete([first.key(1)])
        return commit(session, items)

    with client.lookup([second]) as plans:
        (slots,) = restore_into(client, plans, engine, [second])
        monkeypatch.setattr(Session, "commit", commit_after_a_deletion)
        result = client.store(
            second,
            engine.planes,
            slots,
            base=plans[0],
            is_refreshed=True,
            on_progress=lambda done, of: told.append((done, of)),
        )
    assert outcomes(result) == [MASTER, MASTER]
    assert result.segments[1].record_bytes > 12 * identity.geometry.token_bytes
    assert told == [(1, 2), (2, 2)]
    again = Engine(identity.geometry, seed=4)
    with client.lookup([second]) as plans:
        (found,) = restore_into(client, plans, again, [second])
    assert_equal_bits(again.rows(found), engine.rows(slots))
    assert_nothing_is_held(client)


def test_a_lost_commit_leaves_what_was_published_before_it(local: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = make_identity()
    client = local(identity)
    client.session.limits.reserve_items_max = 2
    prompt = make_prompt(identity)
    engine = Engine(identity.geometry)
    slots = engine.allocate(prompt.token_count)
    call, commits = Session._call, list[str]()

    def lose_the_second_commit(session: Session, name: str, *arguments: Any) -> Any:
        commits.extend([name] * (name == "Commit"))
        if name == "Commit" and len(commits) == 2:
            raise UnavailableError("lost")
        return call(session, name, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_call", lose_the_second_commit)
        with pytest.raises(UnavailableError):
            client.store(prompt, engine.planes, slots)
    assert_nothing_is_held(client)
    assert outcomes(client.store(prompt, engine.planes, slots)) == [EXISTS] * 2 + [MASTER] * 3


def test_a_base_too_far_away_is_named(local: Connect) -> None:
    identity = short_sighted_identity(reach=40)
    client = local(identity)
    first, second = (
        make_prompt(identity, private=private, shared=(12,), seed=private, policy=POLICY) for private in (8, 52)
    )
    store_whole(client, identity, first)
    engine = Engine(identity.geometry, seed=3)
    slots = engine.allocate(second.token_count)
    with client.lookup([second]) as plans:
        assert plans.hit_tokens == 12
        with pytest.raises(InvalidInputError, match=r"leave it out.*nothing was stored"):
            client.store(second, engine.planes, slots, base=plans[0], is_refreshed=True)
    assert_nothing_is_held(client)


def test_a_position_pinned_identity_stores_no_moved_mirrors(local: Connect) -> None:
    identity = make_identity(is_pinned=True)
    client = local(identity)
    first, second = (make_prompt(identity, private=8, seed=seed, policy=POLICY) for seed in (1, 2))
    store_whole(client, identity, first)
    engine = Engine(identity.geometry, seed=3)
    with client.lookup([second]) as plans:
        (slots,) = restore_into(client, plans, engine, [second])
        result = client.store(second, engine.planes, slots, base=plans[0], is_refreshed=True)
        assert plans[0].hit_tokens == 11  # same position: a shifted use that moves nothing
    assert outcomes(result) == [MASTER, MASTER, MIRROR, MIRROR]
    with client.lookup([make_prompt(identity, private=9, seed=7, policy=POLICY)]) as plans:
        assert plans[0].hit_tokens == 0
        assert plans[0].plan.pinned_reason


def test_a_session_that_only_reads_stores_nothing(connect: Connect) -> None:
    identity = make_identity()
    prompt = make_prompt(identity)
    engine, slots = store_whole(connect(identity), identity, prompt)
    reader = connect(identity, is_writer=False)
    with pytest.raises(InvalidInputError, match="only reads"):
        reader.store(prompt, engine.planes, slots)
    reader.session.is_writer = True  # the node does not take the client's word for it
    refused = reader.store(make_prompt(identity, seed=9), engine.planes, slots)
    assert {type(one.error) for one in refused.segments} == {NotOwnedError}
    with pytest.raises(ValueError, match="read-only"):
        reader.session.arena[0] = 1
    with reader.lookup([prompt]) as plans:
        assert plans.hit_tokens == prompt.token_count


def test_a_round_elects_its_masters(local: Connect) -> None:
    identity = make_identity()
    client = local(identity)
    prompts = [make_prompt(identity, private=4, shared=(16,), seed=seed, policy=POLICY) for seed in range(3)]
    results = []
    for seed, prompt in enumerate(prompts):
        engine = Engine(identity.geometry, seed=seed)
        results.append(client.store(prompt, engine.planes, engine.allocate(prompt.token_count)))
    reply = client.commit_round("round 1", results)
    assert [len(election.candidates) for election in reply.elections] == [3]


def test_deleting(local: Connect) -> None:
    identity = make_identity()
    client = local(identity)
    prompt = make_prompt(identity)
    store_whole(client, identity, prompt)
    assert client.delete([prompt.key(4)]) == 1
    assert client.delete([prompt.key(4)]) == 0
    assert client.delete() == 4
    with pytest.raises(InvalidInputError):
        client.delete([prompt.key(0)], namespace=client.namespace)


def assert_nothing_is_held(client: Client) -> None:
    stats = flat(client.stats())
    for name in ("leases", "reservations"):
        assert [value for key, value in stats.items() if key.endswith(name)] == [0], stats


def flat(document: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(document, dict):
        return {prefix: document}
    return {key: value for name, part in document.items() for key, value in flat(part, f"{prefix}.{name}").items()}


def test_nodes_in_a_process_are_local(local_node: LocalNode) -> None:
    assert local_node.arena.flags.writeable
