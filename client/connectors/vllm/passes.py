"""Collective passes inside the engine: all prompts that a step orders are restored and refreshed together.

    a thread:             look all up in one call, lease, restore every master once to all its prompts, layer by layer
    the engine's thread:  a layer's refresh once the layer is in place, in slices, between the engine's own steps
    a thread:             store what was refreshed, from a snapshot of its rows

One pass at a time, in order. Whatever goes wrong in one, its prompts are reported as failed once nothing is written to
their blocks any more, and the engine computes them.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvservice.client.connectors.breaker import BreakerState
from kvservice.client.connectors.vllm.link import Link
from kvservice.client.connectors.vllm.loads import Load, Loads
from kvservice.client.connectors.vllm.metadata import LoadOrder, RefreshOrder
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm.paged import EnginePaged
from kvservice.client.connectors.vllm.staging import Staging
from kvservice.client.reuse.engine import Engine
from kvservice.model.errors import KVServiceError, UnavailableError
from kvservice.model.identity import Identity

if TYPE_CHECKING:
    from kvservice.client.connectors.vllm.pass_work import Made, PassWork
    from kvservice.client.connectors.vllm.snapshot import Snapshot
    from kvservice.client.paged import PagedMemory
    from kvservice.client.reuse.collective import Member
    from kvservice.client.reuse.refresh import Refreshed

IDLE_SLICE_S = 0.25
"""How long a pass goes on while the engine has nothing to compute: meanwhile it hears of no new request."""
SNAPSHOT_LAYERS = 8
"""Copied between two looks at the clock."""
THREADS = 2
"""One brings the next pass while the other stores the last."""

log = logging.getLogger("vllm.kvservice")


class RunningEngine(Engine, Protocol):
    """An engine that says when one of its layers runs for us."""

    @property
    def is_running(self) -> bool:
        """True while what the engine tells its connector is about our rows."""
        ...


MakeEngine = Callable[[], RunningEngine]


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of one prompt."""

    order: RefreshOrder
    is_failed: bool


@dataclass(eq=False, slots=True)
class _Pass:
    """``work``: set by the bringing thread once it is known what goes where; ``error``: what it failed with.
    ``is_brought``: that thread is done, well or not.
    """

    orders: tuple[RefreshOrder, ...]
    loads: tuple[Load | None, ...]
    deadline_s: float
    work: "PassWork | None" = None
    error: BaseException | None = None
    is_brought: threading.Event = field(default_factory=threading.Event)
    is_planned: threading.Event = field(default_factory=threading.Event)
    steps: "Generator[int, None, tuple[Refreshed, ...]] | None" = None
    members: "list[Member]" = field(default_factory=list)
    layer: int | None = None
    snapshot: "Snapshot | None" = None
    makes: "list[list[Made]]" = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        """True once the next thing that the engine's thread does would not wait."""
        if self.error is not None:
            return self.is_brought.is_set() and self._are_loads_over
        if self.layer is None or self.work is None:
            return self.is_planned.is_set() and self._are_loads_over
        return self.work.restore.is_layer_over(self.layer)

    @property
    def _are_loads_over(self) -> bool:
        return all(load is None or load.wait(0) for load in self.loads)

    def end_loads(self) -> None:
        """Nothing is loaded any more once this returns."""
        for load in self.loads:
            if load is not None:
                load.end()

    def exact_ends(self) -> list[int]:
        """Per prompt, up to where its exact rows are in place."""
        pairs = zip(self.orders, self.loads, strict=True)
        return [order.load.start if load is None else load.good_end for order, load in pairs]


class Passes:
    """Passes under way. ``begin``, ``advance``, ``take`` and ``close`` on the engine's thread.

    ``refusal``: why this engine refreshes nothing, once that is known; its passes fail from then on.
    """

    def __init__(
        self,
        link: Link,
        identity: Identity,
        paged: EnginePaged,
        loads: Loads,
        make_engine: MakeEngine,
        staging: Staging,
        counts: Counts,
        *,
        deadline_s: float,
        is_deterministic: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.refusal = ""
        self._link = link
        self._identity = identity
        self._paged = paged
        self._loads = loads
        self._make_engine = make_engine
        self._staging = staging
        self._counts = counts
        self._deadline_s = deadline_s
        self._is_deterministic = is_deterministic
        self._clock = clock
        self._engine: RunningEngine | None = None
        self._memory: PagedMemory | None = None
        self._workers: ThreadPoolExecutor | None = None
        self._under_way: deque[_Pass] = deque()
        self._ended: list[Ended] = []
        self._news = threading.Event()

    def warm_up(self) -> None:
        """Have a thread prepare what the first pass needs; returns at once."""
        self._threads().submit(self._warm_up)

    @property
    def is_idle(self) -> bool:
        """True if no pass is under way."""
        return not self._under_way

    @property
    def is_running(self) -> bool:
        """True while one of the engine's layers runs for a pass."""
        return self._engine is not None and self._engine.is_running

    def begin(self, orders: Sequence[RefreshOrder]) -> None:
        """All prompts of one step are one pass; its bytes are on their way when this returns."""
        if self.refusal:
            self._ended.extend(Ended(order, is_failed=True) for order in orders)
            return
        try:
            loads = tuple(self._load_exact(order) for order in orders)
            one = _Pass(tuple(orders), loads, self._clock() + self._deadline_s)
            self._threads().submit(self._bring, one, self._paged.fence())
        except Exception:  # the engine waits for ever for a pass of which it hears nothing
            log.exception("kvservice: a round's prompts are computed, their pass could not begin")
            self._counts.add("hook_errors")
            self._ended.extend(Ended(order, is_failed=True) for order in orders)
            return
        self._under_way.append(one)

    def advance(self, budget_s: float, wait_s: float = 0.0) -> None:
        """Go on for so long, at least by a layer, as far as bytes are in place; wait for them so long, once."""
        if not self._under_way:
            return
        began_s = self._clock()
        while self._under_way:
            one = self._under_way[0]
            if not one.is_ready:
                if one.error is None and self._clock() > one.deadline_s:
                    one.error = UnavailableError(f"a pass's bytes took longer than {self._deadline_s:g} s")
                    one.end_loads()
                    continue
                if wait_s <= 0:
                    break
                self._news.wait(wait_s)
                self._news.clear()
                wait_s = 0.0
                continue
            if self._go_on(one):
                self._under_way.popleft()
            if self._clock() - began_s >= budget_s:
                break
        self._counts.add("pass_seconds", self._clock() - began_s)

    def take(self) -> list[Ended]:
        """Prompts whose pass has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Let what is being brought and stored come to its end."""
        if self._workers is not None:
            self._workers.shutdown(wait=True, cancel_futures=True)
        for one in self._under_way:
            self._give_up(one)
        self._under_way.clear()
        self._link.close()

    # ------------------------------------------------------------------ the engine's thread

    def _load_exact(self, order: RefreshOrder) -> Load | None:
        """Begin to load the private history's chunks, which need no pass."""
        load = order.load
        if not load.chunks:
            return None
        exact = LoadOrder(load.request_id, load.start, order.exact_end, load.chunks, load.block_ids, is_async=False)
        return self._loads.submit(exact)

    def _go_on(self, one: _Pass) -> bool:
        """The next thing to do for a pass that is ready; True once the pass has ended."""
        if one.error is None:
            try:
                return self._step(one)
            except Exception as error:  # noqa: BLE001  whatever goes wrong, the engine computes these prompts
                one.error = error
        if not one.is_brought.is_set():
            return False  # rows are still being written: wait for the end of that
        self._fail(one, one.error)
        return True

    def _step(self, one: _Pass) -> bool:
        if one.snapshot is not None:
            one.snapshot.take(SNAPSHOT_LAYERS)
            if one.snapshot.is_complete:
                self._finish(one)
            return one.snapshot.is_complete
        if one.steps is None:
            one.steps = self._start(one)
        else:
            assert one.work is not None
            assert one.layer is not None
            one.work.restore.wait_for_layer(one.layer)  # raises what the restore failed with
        try:
            one.layer = next(one.steps)
        except StopIteration as done:
            self._refreshed(one, done.value)
            return one.snapshot is None
        return False

    def _start(self, one: _Pass) -> "Generator[int, None, tuple[Refreshed, ...]]":
        from kvservice.client.reuse.collective import refresh_round_by_layer

        if self._engine is None:
            self._engine = self._find_engine()
        assert one.work is not None
        one.members = one.work.members(one.exact_ends())
        policy = one.orders[0].prompt.policy  # check layers are the engine's: equal in all of them
        assert policy is not None
        return refresh_round_by_layer(
            self._engine, one.members, policy.check_layer, is_deterministic=self._is_deterministic
        )

    def _find_engine(self) -> RunningEngine:
        try:
            return self._make_engine()
        except KVServiceError as error:
            self.refusal = str(error)
            log.warning("kvservice: reuse at other positions refused, exact reuse goes on: %s", error)
            raise

    def _refreshed(self, one: _Pass, done: "tuple[Refreshed, ...]") -> None:
        """All layers are done: count, and begin to copy what is to be stored."""
        from kvservice.client.connectors.vllm.pass_work import row_counts
        from kvservice.client.connectors.vllm.snapshot import Snapshot

        assert one.work is not None
        restored, refreshed, computed = row_counts(one.members, [result.picked for result in done])
        self._counts.add("rows_restored", restored)
        self._counts.add("rows_refreshed", refreshed)
        self._counts.add("rows_computed", computed)
        one.makes = one.work.makes([result.picked for result in done])
        if any(one.makes) and self._link.breaker.state is not BreakerState.OPEN:
            slots = [prompt.snapshot_slots(own) for prompt, own in zip(one.work.prompts, one.makes, strict=True)]
            one.snapshot = Snapshot.begin(self._paged, self._identity, slots, self._staging)
            if one.snapshot is None:
                self._counts.add("saves_no_room", sum(map(len, one.makes)))
        if one.snapshot is None:
            self._finish(one)

    def _finish(self, one: _Pass) -> None:
        assert one.work is not None
        if one.snapshot is None:
            one.work.plans.close()
        else:
            self._threads().submit(self._store, one, one.work, one.snapshot)
        self._counts.add("passes")
        self._ended.extend(Ended(order, is_failed=False) for order in one.orders)

    def _fail(self, one: _Pass, error: BaseException) -> None:
        self._counts.add("passes_failed")
        names = ", ".join(order.load.request_id for order in one.orders)
        if isinstance(error, KVServiceError):
            log.info("kvservice: requests %s are computed, their pass failed: %s", names, error)
        else:
            log.error("kvservice: requests %s are computed, their pass failed", names, exc_info=error)
            self._counts.add("hook_errors")
        self._give_up(one)
        self._ended.extend(Ended(order, is_failed=True) for order in one.orders)

    def _give_up(self, one: _Pass) -> None:
        if one.steps is not None:
            one.steps.close()
        if one.snapshot is not None:
            one.snapshot.close()
        if one.work is not None:
            one.work.plans.close()

    def _threads(self) -> ThreadPoolExecutor:
        if self._workers is None:
            self._workers = ThreadPoolExecutor(THREADS, thread_name_prefix="kvservice-pass")
        return self._workers

    # ------------------------------------------------------------------ other threads

    def _warm_up(self) -> None:
        from kvservice.client.connectors.vllm.warm_up import warm_up

        try:
            warm_up(self._paged, self._identity)
        except Exception:  # a thread's top: the first pass will say what is wrong, and to whom it matters
            log.exception("kvservice: the dry run of a pass failed")
            self._counts.add("hook_errors")

    def _bring(self, one: _Pass, fence: Callable[[], None]) -> None:
        """Find, lease and restore what a pass needs. Never raises."""
        from kvservice.client.connectors.vllm.pass_work import PassWork

        try:
            with self._link.session() as session:
                one.work = PassWork.plan(session, self._paged_memory(), self._paged, one.orders)
                self._link.breaker.succeeded(0.0)  # it answers; how long a disk takes says nothing of that
                self._tell(one.is_planned)
                fence()  # blocks may have been another request's a moment ago
                one.work.bring()
        except BaseException as error:  # noqa: BLE001  a thread's top: the engine's thread gets it
            one.error = one.error or error
        self._tell(one.is_brought)

    def _paged_memory(self) -> "PagedMemory":
        from kvservice.client.connectors.vllm.engine_memory import engine_memory

        if self._memory is None:
            self._memory = engine_memory(self._paged, self._identity)
        return self._memory

    def _tell(self, event: threading.Event) -> None:
        event.set()
        self._news.set()

    def _store(self, one: _Pass, work: "PassWork", snapshot: "Snapshot") -> None:
        """Store what was refreshed as runs and rows against the masters it came from. Never raises."""
        from kvservice.client.connectors.vllm.pass_store import store_pass

        try:
            if not self._link.is_current(work.session):
                raise UnavailableError("the session that its masters were leased in is lost")  # noqa: TRY301
            with self._link.session():
                store_pass(work.session, self._identity, work, one.makes, snapshot, self._counts)
                self._link.breaker.succeeded(0.0)
        except KVServiceError as error:
            log.info("kvservice: a round's mirrors were not stored: %s", error)
            self._counts.add("saves_dropped", sum(map(len, one.makes)))
        except Exception:  # a thread's top: the next pass may do better
            log.exception("kvservice: a round's mirrors were not stored")
            self._counts.add("hook_errors")
        finally:
            snapshot.close()
            work.plans.close()
