"""A node under any order of calls, with workers that finish when they like and sessions that break at any step.

After every step all invariants hold, and every live lease reads the bits that were stored.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvservice.model.cache import CacheMeta, MasterReference
from kvservice.model.errors import KVServiceError
from kvservice.model.plan import Match
from kvservice.model.segment import CacheKey, ContextId, SegmentId
from kvservice.sessions import Session
from kvservice.wire.v1 import cache_pb2 as wire
from tests.server.builders import (
    Client,
    GatedWorker,
    Planes,
    World,
    cache_of,
    check_node,
    diff_of,
    encode_key,
    equal_planes,
    make_identity,
    make_meta,
    make_planes,
    make_relative,
    query,
)

IDENTITY = make_identity()
NAMES = range(3)
HISTORIES: tuple[tuple[str, ...], ...] = ((), ("a",), ("b",), ("c",), ("d",), ("a", "b"))
NEAR, FAR = make_planes(), make_planes(seed=1)
BASES = [NEAR, FAR, make_relative(IDENTITY, NEAR, 0, 0, rows=[0, 1])]
METAS = [make_meta(IDENTITY, name, history) for name in NAMES for history in HISTORIES]
ARENA_BYTES = 9 * 12288  # a dense record takes three pages: evictions are the rule
TTL_S = 10.0
ROWS = st.lists(st.integers(0, 15), max_size=8, unique=True)


@dataclass
class Leased:
    """What a lease promised to a client: records and the bits they stand for."""

    client: Client
    deadline_s: float
    found: list[tuple[wire.SegmentReply, Planes]]


class NodeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.worker = GatedWorker()
        self.clients: list[Client] = []
        self.leases: dict[int, Leased] = {}
        self.stored: dict[CacheKey, Planes] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self.attached: list[Session] = []
        self.seed = 0

    @initialize()
    def start(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.world = self.loop.run_until_complete(self._make_world())
        self.clients.append(self.world.client())

    async def _make_world(self) -> World:
        return World(arena_bytes=ARENA_BYTES, worker=self.worker)

    def run(self, call: Any) -> Any:
        """Run a call that needs no worker to its end."""
        return self.loop.run_until_complete(call)

    def begin(self, call: Any) -> None:
        """Start a call that may have to wait for the worker."""
        self.tasks.append(self.loop.create_task(call))
        self.spin()

    def spin(self) -> None:
        async def turns() -> None:
            for _ in range(12):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.remove(task)
            if not task.cancelled():
                error = task.exception()
                assert error is None or isinstance(error, KVServiceError), error

    def client(self, index: int) -> Client:
        return self.clients[index % len(self.clients)]

    # Sessions

    @precondition(lambda self: len(self.clients) < 3)
    @rule()
    def open_session(self) -> None:
        self._open_session()

    def _open_session(self) -> None:
        self.clients.append(self.world.client())

    @precondition(lambda self: len(self.attached) < 4)
    @rule(index=st.integers(0, 2))
    def open_connection(self, index: int) -> None:
        self._open_connection(index)

    def _open_connection(self, index: int) -> None:
        session = self.client(index).session
        self.world.node.store.attach(session)
        self.attached.append(session)

    @rule(index=st.integers(0, 9))
    def close_connection(self, index: int) -> None:
        self._close_connection(index)

    def _close_connection(self, index: int) -> None:
        if self.attached:
            self.world.node.store.detach(self.attached.pop(index % len(self.attached)))

    @rule(index=st.integers(0, 2))
    def lose_session(self, index: int) -> None:
        client = self.client(index)
        client.close()
        self.clients.remove(client)
        self.leases = {id_: one for id_, one in self.leases.items() if one.client is not client}
        if not self.clients:
            self.clients.append(self.world.client())

    # Writing

    async def _commit(self, client: Client, meta: CacheMeta, planes: Planes, runs: Any = None) -> None:
        try:
            begun = await client.begin(meta, planes, runs)
        except AssertionError:
            return  # it exists, or there is no room
        self.stored[meta.key] = planes
        await client.commit(*begun)

    @rule(index=st.integers(0, 2), meta=st.sampled_from(METAS), base=st.sampled_from(BASES), rows=ROWS)
    def store_dense(self, index: int, meta: CacheMeta, base: Planes, rows: Sequence[int]) -> None:
        self.seed += 1
        planes = make_relative(IDENTITY, base, 0, meta.position, rows=rows, seed=self.seed)
        self.begin(self._commit(self.client(index), meta, planes))

    @rule(index=st.integers(0, 2), meta=st.sampled_from(METAS), rows=ROWS, pick=st.integers(0, 4))
    def store_mirror(self, index: int, meta: CacheMeta, rows: Sequence[int], pick: int) -> None:
        masters = [one for one in METAS if one.key.segment == meta.key.segment and self._is_master(one)]
        if not masters:
            return
        master = masters[pick % len(masters)]
        cache, base = cache_of(self.world, master), self.stored[master.key]
        assert cache is not None
        self.seed += 1
        planes = make_relative(IDENTITY, base, master.position, meta.position, rows=rows, seed=self.seed)
        runs = diff_of(IDENTITY, base, master.position, planes, meta.position)
        mirror = replace(meta, master=MasterReference(master.key.context, cache.generation))
        self.begin(self._commit(self.client(index), mirror, planes, runs))

    def _is_master(self, meta: CacheMeta) -> bool:
        cache = cache_of(self.world, meta)
        return cache is not None and cache.master is None

    @rule(index=st.integers(0, 2), meta=st.sampled_from(METAS), commits=st.booleans())
    def write_nonsense(self, index: int, meta: CacheMeta, commits: bool) -> None:
        client = self.client(index)
        outcome = self.run(client.reserve(meta, 9000))
        if commits and outcome.WhichOneof("outcome") == "reserved":
            self.begin(client.commit(outcome.reserved.id, 0))

    @rule(index=st.integers(0, 2))
    def abort_all(self, index: int) -> None:
        client = self.client(index)
        ids = list(self.world.node.sessions.open[client.id].reservations)  # type: ignore[index]
        self.run(client.call("Abort", wire.AbortRequest(reservation_ids=ids)))

    # Reading

    @rule(index=st.integers(0, 2), metas=st.lists(st.sampled_from(METAS), min_size=1, max_size=4), shift=st.booleans())
    def look_up(self, index: int, metas: Sequence[CacheMeta], shift: bool) -> None:
        client = self.client(index)
        reply = self.run(client.lookup(*(query(meta, may_shift=shift) for meta in metas), ttl_s=TTL_S))
        found = []
        for meta, prompt in zip(metas, reply.prompts, strict=True):
            answer = prompt.segments[0]
            if answer.match == Match.NONE:
                continue
            assert shift or answer.match == Match.EXACT
            key = CacheKey(SegmentId(meta.key.segment), ContextId(answer.context))
            assert answer.match == Match.SHIFTED or key == meta.key
            found.append((answer, self.stored[key]))
        assert bool(found) == bool(reply.lease.id)
        self._expire()
        if found:
            self.leases[reply.lease.id] = Leased(client, self.world.clock.now_s + TTL_S, found)

    @rule(index=st.integers(0, 9))
    def release(self, index: int) -> None:
        self._expire()
        if self.leases:
            id_ = sorted(self.leases)[index % len(self.leases)]
            assert self.run(self.leases.pop(id_).client.release(id_)) == 1

    @rule(index=st.integers(0, 9))
    def renew(self, index: int) -> None:
        self._expire()
        if self.leases:
            id_ = sorted(self.leases)[index % len(self.leases)]
            leased = self.leases[id_]
            reply = self.run(leased.client.call("Renew", wire.RenewRequest(lease_ids=[id_], lease_ttl_s=TTL_S)))
            assert list(reply.renewed) == [True]
            leased.deadline_s = self.world.clock.now_s + TTL_S

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.world.clock.now_s += seconds
        self.world.node.expire()
        self._expire()
        assert set(self.world.node.leases.live) == set(self.leases)

    def _expire(self) -> None:
        now_s = self.world.clock.now_s
        self.leases = {id_: one for id_, one in self.leases.items() if one.deadline_s > now_s}

    # Upkeep

    @rule(index=st.integers(0, 2), metas=st.lists(st.sampled_from(METAS), min_size=1, max_size=3))
    def delete(self, index: int, metas: Sequence[CacheMeta]) -> None:
        self.run(self.client(index).delete(*metas))

    @rule()
    def fold(self) -> None:
        self.begin(self.world.node.fold_pending())

    @rule(index=st.integers(0, 2), name=st.sampled_from(NAMES))
    def commit_round(self, index: int, name: int) -> None:
        metas = [meta for meta in METAS if cache_of(self.world, meta) is not None]
        members = [encode_key(meta.key) for meta in metas[name:]]
        request = wire.CommitRoundRequest(round="r", namespace=IDENTITY.namespace(), members=members)
        self.begin(self.client(index).call("CommitRound", request))

    @precondition(lambda self: self.worker.parked)
    @rule(jobs=st.integers(1, 5))
    def let_the_worker_finish(self, jobs: int) -> None:
        self._release_jobs(jobs)

    def _release_jobs(self, jobs: int) -> None:
        for _ in range(jobs):
            if self.worker.parked:
                self.worker.release()
                self.spin()

    @precondition(lambda self: self.tasks)
    @rule(index=st.integers(0, 9))
    def cancel_a_call(self, index: int) -> None:
        self._cancel(index)

    def _cancel(self, index: int) -> None:
        if self.tasks:
            self.tasks[index % len(self.tasks)].cancel()
            self.spin()

    @rule(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 80))
    def much_happens(self, seed: int, steps: int) -> None:
        """Hypothesis makes short stories; full tiers, rounds and rebased mirrors take long ones."""
        rng = random.Random(seed)
        for _ in range(steps):
            self._one_of_all(rng)
            self.all_invariants_hold()
            self.every_live_lease_reads_what_was_stored()

    def _one_of_all(self, rng: random.Random) -> None:
        index, meta, few = rng.randrange(10), rng.choice(METAS), rng.sample(METAS, rng.randint(1, 4))
        rows = rng.sample(range(16), rng.choice([0, 0, 1, 2, 5, 12]))
        actions: list[tuple[int, Callable[[], None]]] = [
            (6, lambda: NodeMachine.store_dense(self, index, meta, rng.choice([NEAR, *BASES]), rows)),
            (4, lambda: NodeMachine.store_mirror(self, index, meta, rows, index)),
            (8, lambda: self._release_jobs(rng.randint(1, 4))),
            (6, lambda: NodeMachine.look_up(self, index, few, rng.random() < 0.5)),
            (5, lambda: NodeMachine.release(self, index)),
            (1, lambda: NodeMachine.renew(self, index)),
            (1, lambda: NodeMachine.let_time_pass(self, rng.choice([1.0, 11.0]))),
            (1, lambda: NodeMachine.delete(self, index, few[:1])),
            (2, lambda: NodeMachine.fold(self)),
            (2, lambda: NodeMachine.commit_round(self, index, index % 2)),
            (1, lambda: NodeMachine.write_nonsense(self, index, meta, rng.random() < 0.5)),
            (rng.random() < 0.2, lambda: NodeMachine.lose_session(self, index)),
            (len(self.attached) < 4, lambda: self._open_connection(index)),
            (1, lambda: self._close_connection(index)),
            (rng.random() < 0.3, lambda: self._cancel(index)),
            (len(self.clients) < 3, self._open_session),
        ]
        (action,) = rng.choices([action for _, action in actions], [weight for weight, _ in actions])
        action()

    # What must hold

    @invariant()
    def all_invariants_hold(self) -> None:
        check_node(self.world.node)

    @invariant()
    def only_what_a_process_may_still_write_strays(self) -> None:
        ids = {session.id for session in self.attached if session.id not in self.world.node.sessions.open}
        assert self.world.node.store.strays.keys() <= ids

    @invariant()
    def every_live_lease_reads_what_was_stored(self) -> None:
        for leased in self.leases.values():
            for answer, planes in leased.found:
                assert equal_planes(self.world.read(IDENTITY, answer), planes)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for client in self.clients:
            client.close()
        while self.attached:
            self._close_connection(0)
        while self.tasks:
            while self.worker.parked:
                self.worker.release()
            self.spin()
        node = self.world.node
        check_node(node)
        assert self.world.is_empty_handed()
        assert not node.sessions.open
        while node.catalog.evict_host():
            check_node(node)
        assert node.tier.used_bytes == 0
        assert not node.catalog.spaces
        self.loop.close()
        asyncio.set_event_loop(None)


NodeMachine.TestCase.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_any_order_of_calls = NodeMachine.TestCase
