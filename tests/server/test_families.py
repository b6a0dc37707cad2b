"""Folding and elections: less is stored, every bit comes back, and the master is the member nearest to the others."""

import asyncio
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvservice import folding
from kvservice.limits import NodeLimits
from kvservice.model.cache import CacheMeta
from kvservice.model.errors import InvalidInputError, LimitError
from kvservice.model.identity import Identity
from tests.server.builders import (
    Client,
    GatedWorker,
    Planes,
    World,
    cache_of,
    diff_of,
    equal_planes,
    make_identity,
    make_meta,
    make_planes,
    make_relative,
    until_parked,
)

IDENTITY = make_identity()
META = make_meta(IDENTITY)


def relative(meta: CacheMeta, *, rows: Sequence[int] = (), seed: int = 1, base: Planes | None = None) -> Planes:
    """What ``base``, computed at position 0, is at the position of ``meta``, with some rows of its own."""
    return make_relative(IDENTITY, base or make_planes(), 0, meta.position, rows=rows, seed=seed)


async def assert_reads(world: World, client: Client, meta: CacheMeta, planes: Planes) -> bool:
    """The cache reads back bit for bit; is it a mirror?"""
    found, lease = await client.find(meta)
    assert lease, meta
    assert equal_planes(world.read(IDENTITY, found), planes)
    await client.release(lease)
    return bool(found.master_context)


async def test_the_first_cache_of_a_segment_is_a_master_and_not_folded() -> None:
    world = World()
    client = world.client()
    await client.store(META, make_planes())
    assert await world.node.fold_pending() == 0
    assert not await assert_reads(world, client, META, make_planes())


async def test_a_near_dense_cache_becomes_a_mirror_in_the_background() -> None:
    world = World()
    client = world.client()
    await client.store(META, make_planes())
    meta = make_meta(IDENTITY, history=["a", "b"])
    planes = relative(meta, rows=[2, 3, 9])
    await client.store(meta, planes)
    assert not await assert_reads(world, client, meta, planes)
    used = world.node.tier.used_bytes
    assert await world.node.fold_pending() == 1
    assert await assert_reads(world, client, meta, planes)
    assert world.node.tier.used_bytes < used
    assert world.node.counters.folds.folded == 1
    world.check()


async def test_a_far_dense_cache_stays_the_master_of_a_group_of_its_own() -> None:
    world = World()
    client = world.client()
    await client.store(META, make_planes())
    meta = make_meta(IDENTITY, history=["a"])
    await client.store(meta, make_planes(seed=8))
    await world.node.fold_pending()
    assert not await assert_reads(world, client, meta, make_planes(seed=8))
    assert world.node.counters.folds.kept == 1
    assert world.node.catalog.totals.groups == 2
    world.check()


@pytest.mark.parametrize(("rows", "is_mirror"), [(6, True), (8, False)])
async def test_a_mirror_is_kept_only_if_it_is_at_most_half(rows: int, is_mirror: bool) -> None:
    world = World()
    client = world.client()
    await client.store(META, make_planes())
    meta = make_meta(IDENTITY, history=["a"])
    planes = relative(meta, rows=range(rows))
    await client.store(meta, planes)
    await world.node.fold_pending()
    assert await assert_reads(world, client, meta, planes) is is_mirror


async def test_a_dense_cache_is_folded_onto_the_nearest_master() -> None:
    world = World()
    client = world.client()
    far, near = make_planes(seed=3), make_planes(seed=4)
    await client.store(META, far)
    other = make_meta(IDENTITY, history=["x"])
    await client.store(other, relative(other, base=near))
    meta = make_meta(IDENTITY, history=["a", "b"])
    await world.node.fold_pending()
    # From the master's own rows: what was moved twice is rounded twice, and no longer equal bit for bit.
    planes = make_relative(IDENTITY, relative(other, base=near), other.position, meta.position, rows=[1])
    await client.store(meta, planes)
    await world.node.fold_pending()
    cache = cache_of(world, meta)
    assert cache is not None
    assert cache.master is cache_of(world, other)
    assert await assert_reads(world, client, meta, planes)
    world.check()


async def test_a_lease_on_the_dense_record_survives_the_fold() -> None:
    world = World()
    client = world.client()
    await client.store(META, make_planes())
    meta = make_meta(IDENTITY, history=["a"])
    planes = relative(meta, rows=[5])
    await client.store(meta, planes)
    found, lease = await client.find(meta)
    await world.node.fold_pending()
    assert equal_planes(world.read(IDENTITY, found), planes)
    assert await assert_reads(world, client, meta, planes), "new lookups get the mirror"
    assert len(world.node.catalog.hidden) == 1
    world.check()
    await client.release(lease)
    assert not world.node.catalog.hidden
    world.check()


async def test_pinned_caches_at_other_positions_are_not_folded() -> None:
    identity = make_identity(is_pinned=True)
    world = World()
    client = world.client(identity)
    await client.store(make_meta(identity), make_planes())
    same, other = make_meta(identity, provenance="hkvd:0.02"), make_meta(identity, history=["a"])
    await client.store(same, make_planes())
    await client.store(other, make_planes())
    await world.node.fold_pending()
    assert cache_of(world, same).master is not None  # type: ignore[union-attr]
    assert cache_of(world, other).master is None  # type: ignore[union-attr]
    world.check()


async def test_a_full_queue_leaves_caches_dense_and_says_so() -> None:
    world = World(limits=NodeLimits(fold_queue_max=1))
    client = world.client()
    for name in ((), ("a",), ("b",)):
        await client.store(make_meta(IDENTITY, history=name), make_planes())
    assert (len(world.node.families.queue), world.node.counters.folds.dropped) == (1, 1)


async def test_a_cache_that_cannot_be_restored_exactly_is_never_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "_restores", lambda *_: False)
    world = World()
    client = world.client()
    await client.store(META, make_planes())
    meta = make_meta(IDENTITY, history=["a"])
    await client.store(meta, relative(meta))
    await world.node.fold_pending()
    assert not await assert_reads(world, client, meta, relative(meta))
    assert world.node.counters.folds.refused == 1
    world.check()


async def test_a_diff_that_misses_a_row_is_caught_before_it_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvservice.kernels import cpu

    honest = cpu.diff_layer
    monkeypatch.setattr(cpu, "diff_layer", lambda *args: [runs[:-1] for runs in honest(*args)])
    world = World()
    client = world.client()
    await client.store(META, make_planes())
    meta = make_meta(IDENTITY, history=["a"])
    await client.store(meta, relative(meta, rows=[4]))
    await world.node.fold_pending()
    assert not await assert_reads(world, client, meta, relative(meta, rows=[4]))
    assert world.node.counters.folds.refused == 1
    world.check()


@pytest.mark.parametrize("victim", ["member", "master"])
async def test_corrupt_bytes_are_quarantined_not_folded(victim: str) -> None:
    world = World()
    client = world.client()
    await client.store(META, make_planes())
    meta = make_meta(IDENTITY, history=["a"])
    await client.store(meta, relative(meta))
    hurt, left = (meta, META) if victim == "member" else (META, meta)
    cache = cache_of(world, hurt)
    assert cache is not None
    world.arena.view[cache.offset + cache.record_bytes // 2] ^= 1
    await world.node.fold_pending()
    assert cache_of(world, hurt) is None
    assert not await assert_reads(world, client, left, make_planes() if left is META else relative(meta))
    assert world.node.counters.corrupt == {"host": 1, "ssd": 0, "remote": 0}
    world.check()


@pytest.mark.parametrize("what", ["member", "master", "session"])
@pytest.mark.parametrize("jobs", [0, 1, 2])
async def test_what_goes_away_while_it_is_folded_leaves_nothing_behind(what: str, jobs: int) -> None:
    worker = GatedWorker()
    world = World(worker=worker)
    client = world.client()
    meta = make_meta(IDENTITY, history=["a"])
    for one, planes in ((META, make_planes()), (meta, relative(meta))):
        store = asyncio.create_task(client.store(one, planes))
        await until_parked(worker)
        worker.release()
        await store
    fold = asyncio.create_task(world.node.fold_pending())
    for _ in range(jobs):
        await until_parked(worker)
        worker.release()
    await until_parked(worker)
    if what == "session":
        client.close()
    else:
        await client.delete(meta if what == "member" else META)
    world.check()
    while not fold.done():
        while worker.parked:
            worker.release()
        await asyncio.sleep(0)
    world.check()
    assert world.is_empty_handed()
    left = {"member": [META], "master": [meta], "session": [META, meta]}[what]
    assert [one for one in (META, meta) if cache_of(world, one) is not None] == left


async def test_a_cancelled_fold_gives_back_what_it_took() -> None:
    worker = GatedWorker()
    world = World(worker=worker)
    client = world.client()
    meta = make_meta(IDENTITY, history=["a"])
    for one, planes in ((META, make_planes()), (meta, relative(meta))):
        store = asyncio.create_task(client.store(one, planes))
        await until_parked(worker)
        worker.release()
        await store
    fold = asyncio.create_task(world.node.fold_pending())
    for _ in range(2):
        await until_parked(worker)
        worker.release()
    await until_parked(worker)
    assert world.node.allocation.unpublished, "the mirror is being written"
    fold.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fold
    assert world.is_empty_handed()
    world.check()


# Rounds


def brute_force_totals(identity: Identity, caches: Sequence[tuple[CacheMeta, Planes]]) -> list[float]:
    """Total deviation of each cache to all others in float64, from the definition and without our kernels."""
    moved = [
        [
            _moved_values(identity, planes, meta.position, layer)
            for layer in folding.check_layers(identity.geometry.layers)
        ]
        for meta, planes in caches
    ]
    return [sum(float(((np.array(one) - np.array(other)) ** 2).sum()) for other in moved) for one in moved]


def _moved_values(identity: Identity, planes: Planes, position: int, layer: int) -> npt.NDArray[np.float64]:
    keys, values = (_floats(bits) for bits in planes[layer])
    plane = identity.geometry.planes[0]
    heads = keys.reshape(-1, plane.heads, plane.head_size)
    angles = -position * np.array(identity.rope[layer].frequencies)
    half = plane.rotary_size // 2
    first, second = heads[..., :half], heads[..., half:]
    turned = np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=-1
    )
    return np.stack([turned.reshape(keys.shape), values])


def _floats(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float64]:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("seed", range(6))
async def test_the_member_with_the_lowest_deviation_from_the_others_is_elected(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world = World()
    client = world.client()
    caches = []
    for number in range(5):
        meta = make_meta(IDENTITY, history=[f"{seed}/{number}", "x"][: 1 + number % 2])
        rows = rng.choice(16, int(rng.integers(0, 6)), replace=False)
        caches.append((meta, relative(meta, rows=rows.tolist(), seed=int(rng.integers(1000)))))
        await client.store(*caches[-1])
    reply = await client.commit_round(IDENTITY, *(meta for meta, _ in caches))
    expected = brute_force_totals(IDENTITY, caches)
    by_context = {bytes(meta.key.context): total for (meta, _), total in zip(caches, expected, strict=True)}
    (election,) = reply.elections
    # Keys are moved and rounded to bfloat16 first (8 bits): a relative 2^-8 of a value, of small differences more.
    for candidate in election.candidates:
        assert candidate.deviation == pytest.approx(by_context[candidate.context], rel=0.02)
    lowest, second = sorted(expected)[:2]
    assert by_context[election.master_context] <= lowest * 1.02
    if second > lowest * 1.02:
        assert by_context[election.master_context] == lowest
    world.check()
    for meta, planes in caches:
        await assert_reads(world, client, meta, planes)


async def test_a_round_folds_the_losers_and_says_what_it_saved() -> None:
    world = World()
    client = world.client()
    caches = []
    for number in range(4):
        meta = make_meta(IDENTITY, history=[number])
        caches.append((meta, relative(meta, rows=[number])))
        await client.store(*caches[-1])
    reply = await client.commit_round(IDENTITY, *(meta for meta, _ in caches))
    (election,) = reply.elections
    assert sum(candidate.is_mirror for candidate in election.candidates) == 3
    assert reply.bytes_after < reply.bytes_before / 2
    assert reply.bytes_after == sum(candidate.record_bytes for candidate in election.candidates)
    for meta, planes in caches:
        assert await assert_reads(world, client, meta, planes) is (meta.key.context != election.master_context)
    assert await world.node.fold_pending() == 3, "what the round did is not done again"
    assert world.node.counters.folds.folded == 3
    world.check()


async def test_equal_candidates_are_settled_by_the_lowest_key() -> None:
    world = World()
    client = world.client()
    metas = [make_meta(IDENTITY, provenance=f"p{number}") for number in range(4)]
    for meta in metas:
        await client.store(meta, make_planes())
    (election,) = (await client.commit_round(IDENTITY, *metas)).elections
    assert election.master_context == min(meta.key.context for meta in metas)


async def test_the_mirrors_of_a_master_that_lost_are_rebased() -> None:
    world = World()
    client = world.client()
    first, old_planes, new_base = make_meta(IDENTITY, history=["first"]), make_planes(), make_planes()
    for bits in (bits for layer in new_base for bits in layer):
        bits[:2] = 0
    reference = await client.store(first, old_planes)
    mirrors, fresh = [], []
    for number in range(2):
        meta = make_meta(IDENTITY, history=[f"m{number}"], master=reference)
        planes = make_relative(IDENTITY, old_planes, 0, 0, rows=[7 + number])
        await client.store(meta, planes, diff_of(IDENTITY, old_planes, first.position, planes, meta.position))
        mirrors.append((meta, planes))
    for number in range(3):
        meta = make_meta(IDENTITY, history=[f"f{number}"])
        fresh.append((meta, make_relative(IDENTITY, new_base, 0, 0, rows=[4] if number == 2 else [])))
        await client.store(*fresh[-1])
    found, lease = await client.find(mirrors[0][0])
    reply = await client.commit_round(IDENTITY, *(meta for meta, _ in fresh))
    (election,) = reply.elections
    assert election.master_context != first.key.context
    winner = next(meta for meta, _ in fresh if meta.key.context == election.master_context)
    for meta, _ in (*mirrors, (first, old_planes)):
        cache = cache_of(world, meta)
        assert cache is not None
        assert cache.master is cache_of(world, winner)
    assert equal_planes(world.read(IDENTITY, found), mirrors[0][1]), "the lease still reads the old pair"
    world.check()
    await client.release(lease)
    for meta, planes in (*mirrors, *fresh, (first, old_planes)):
        await assert_reads(world, client, meta, planes)
    assert world.node.counters.rebased == 2
    assert not world.node.catalog.hidden
    world.check()


async def test_a_group_that_does_not_save_on_the_new_master_stays_whole() -> None:
    world = World()
    client = world.client()
    old_planes = make_planes()
    reference = await client.store(META, old_planes)
    mirror = make_meta(IDENTITY, history=["m"], master=reference)
    planes = relative(mirror, rows=range(5))
    await client.store(mirror, planes, diff_of(IDENTITY, old_planes, 0, planes, mirror.position))
    fresh = []
    for number in range(3):
        meta = make_meta(IDENTITY, history=[f"f{number}", "y"])
        fresh.append((meta, relative(meta, rows=range(9, 15), seed=5)))  # 6 + 5 rows away from the mirror: too far
        await client.store(*fresh[-1])
    reply = await client.commit_round(IDENTITY, *(meta for meta, _ in fresh))
    assert reply.elections[0].master_context != META.key.context
    cache = cache_of(world, mirror)
    assert cache is not None
    assert cache.master is cache_of(world, META)
    world.check()
    for meta, stored in ((mirror, planes), (META, old_planes), *fresh):
        await assert_reads(world, client, meta, stored)


async def test_a_round_that_names_unknown_caches_is_refused_and_names_them() -> None:
    world = World()
    client = world.client()
    await client.store(META, make_planes())
    unknown = make_meta(IDENTITY, history=["nobody"])
    with pytest.raises(InvalidInputError, match=str(unknown.key)):
        await client.commit_round(IDENTITY, META, unknown)


async def test_a_round_of_single_caches_elects_nobody() -> None:
    world = World()
    client = world.client()
    await client.store(META, make_planes())
    reply = await client.commit_round(IDENTITY, META)
    assert (len(reply.elections), reply.bytes_before) == (0, reply.bytes_after)


async def test_rounds_are_bounded() -> None:
    world = World(limits=NodeLimits(round_members_max=3, election_candidates_max=1))
    client = world.client()
    metas = [make_meta(IDENTITY, history=[name]) for name in "ab"]
    for meta in metas:
        await client.store(meta, make_planes())
    with pytest.raises(LimitError):
        await client.commit_round(IDENTITY, *metas)
    with pytest.raises(LimitError):
        await client.commit_round(IDENTITY, *metas, *metas)


async def test_pinned_candidates_are_compared_only_where_they_stand() -> None:
    identity = make_identity(is_pinned=True)
    world = World()
    client = world.client(identity)
    metas = [make_meta(identity, history=history) for history in ((), ("a",), ("b",), ("c", "d"))]
    for meta in metas:
        await client.store(meta, make_planes())
    reply = await client.commit_round(identity, *metas)
    assert [len(election.candidates) for election in reply.elections] == [2]
    assert [cache_of(world, meta).master is None for meta in metas].count(False) == 1  # type: ignore[union-attr]
    world.check()


async def test_other_calls_go_on_while_a_round_is_at_work() -> None:
    worker = GatedWorker()
    world = World(worker=worker)
    client = world.client()
    metas = [make_meta(IDENTITY, history=[name]) for name in "abc"]
    for meta in metas:
        store = asyncio.create_task(client.store(meta, relative(meta)))
        await until_parked(worker)
        worker.release()
        await store
    commit_round = asyncio.create_task(client.commit_round(IDENTITY, *metas))
    steps = 0
    while not commit_round.done():
        while worker.parked:
            world.check()
            assert await assert_reads(world, client, metas[steps % 3], relative(metas[steps % 3])) in (True, False)
            worker.release()
            steps += 1
        await asyncio.sleep(0)
    assert steps > 4
    assert world.is_empty_handed()
    world.check()
