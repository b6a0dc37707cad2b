"""The connector inside vLLM's worker: loads into the engine's blocks, saves out of them. Runs on the engine's thread.

Copies happen elsewhere, except gathering rows to be saved: that must be done before the engine uses the blocks again.
Imports no engine.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvservice.client.connectors.vllm.layout import UnknownLayoutError, learn_layouts
from kvservice.client.connectors.vllm.loads import Load, Loads
from kvservice.client.connectors.vllm.metadata import IDLE_WAIT_S, NOTHING, LoadOrder, StepOrders, WorkerNotice
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm.paged import EnginePaged, Place
from kvservice.client.connectors.vllm.passes import IDLE_SLICE_S, Passes
from kvservice.client.connectors.vllm.saves import Saves
from kvservice.client.connectors.vllm.staging import Gathered
from kvservice.model.identity import Identity

MakeLoads = Callable[[EnginePaged], Loads]
MakePasses = Callable[[EnginePaged, Loads, Mapping[str, Any]], Passes]
"""For the engine's paged KV and its registered caches by layer name."""

log = logging.getLogger("vllm.kvservice")


class WorkerSide:
    """All hooks of the worker's role. One thread, the engine's.

    ``layer_names``: in the order of a record's sections. ``modules``: the engine's attention modules by layer name.
    ``groups``: KV cache groups of the engine; with more than one, failures are told by request and not by block.
    """

    def __init__(
        self,
        identity: Identity,
        layer_names: Sequence[str],
        modules: Mapping[str, Any],
        block_size: int,
        groups: int,
        make_loads: MakeLoads,
        saves: Saves,
        counts: Counts,
        clock: Callable[[], float] = time.monotonic,
        make_passes: MakePasses | None = None,
        slice_s: float = 0.05,
    ) -> None:
        self._identity = identity
        self._layer_names = tuple(layer_names)
        self._modules = modules
        self._block_size = block_size
        self._groups = groups
        self._make_loads = make_loads
        self._saves = saves
        self._counts = counts
        self._clock = clock
        self._make_passes = make_passes
        self._slice_s = slice_s
        self._loads: Loads | None = None
        self._passes: Passes | None = None
        self._paged: EnginePaged | None = None
        self._refusal = ""
        self._is_told = False
        self._reuse_told = ""
        self._orders = NOTHING
        self._began_s = 0.0
        self._step_loads: list[Load] = []
        self._saving: Gathered | None = None
        self._place: Place | None = None
        self._layers_gathered: set[int] = set()
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._copied: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._loaded: list[str] = []

    def register(self, caches: Mapping[str, Any]) -> None:
        """The engine's paged KV, by layer name. Learns its layout; a refusal is logged once and told the scheduler."""
        try:
            ours = {name: caches[name] for name in self._layer_names}
            layouts = learn_layouts(self._modules, ours)
        except KeyError as error:
            self._refuse(f"the engine registered no KV cache for layer {error}")
            return
        except UnknownLayoutError as error:
            self._refuse(str(error))
            return
        tensors = tuple(ours[name] for name in self._layer_names)
        self._paged = EnginePaged(
            tensors,
            tuple(layouts[name] for name in self._layer_names),
            {name: index for index, name in enumerate(self._layer_names)},
            self._block_size,
            self._identity.geometry,
        )
        self._loads = self._make_loads(self._paged)
        if self._make_passes is not None:
            self._passes = self._make_passes(self._paged, self._loads, ours)
            self._passes.warm_up()

    # ------------------------------------------------------------------ a step

    def bind(self, orders: StepOrders) -> None:
        """The step's orders. What an earlier step left unfinished, since its forward failed, is dropped."""
        self._drop_saving()
        self._layers_gathered = set()
        self._step_loads = []
        self._orders = orders
        self._copied.update(order.request_id for order in orders.saves if order.is_last)
        self._began_s = self._clock()

    def start_loads(self) -> None:
        """Begin the step's loads. One that cannot begin is reported as failed, like any other."""
        for order in self._orders.loads:
            load = self._submit(order)
            if load is None:
                self._fail(order.request_id, order.block_ids, is_async=order.is_async)
            elif not order.is_async:
                self._step_loads.append(load)
        self._refresh()

    def _refresh(self) -> None:
        """Begin the step's pass, and give those under way a slice: a long one if nothing else is to be computed."""
        orders, passes = self._orders.refreshes, self._passes
        if passes is None:
            for order in orders:
                self._fail(order.load.request_id, order.load.block_ids, is_async=True)
            return
        if orders:
            passes.begin(orders)
        if not passes.is_idle:
            is_idle = self._orders.is_idle
            passes.advance(IDLE_SLICE_S if is_idle else self._slice_s, IDLE_WAIT_S if is_idle else 0.0)

    @property
    def _is_refreshing(self) -> bool:
        """True while the engine's layers run for a pass: its hooks are about that pass's rows then."""
        return self._passes is not None and self._passes.is_running

    def wait_for_layer(self, layer_name: str) -> None:
        """Return once the step's own loads have this layer in place, or have failed."""
        if not self._step_loads or self._paged is None or self._is_refreshing:
            return
        layer = self._paged.indices.get(layer_name)
        if layer is None:
            return
        for load in self._step_loads:
            if not load.wait_for_layer(layer, max(load.deadline_s - self._clock(), 0)):
                load.end()

    def save_layer(self, layer_name: str) -> None:
        """Gather the layer's rows of the chunks that are finished in this step."""
        if not self._orders.saves or self._paged is None or self._is_refreshing:
            return
        layer = self._paged.indices.get(layer_name)
        if layer is not None:
            self._gather(layer)

    def finish_saves(self) -> None:
        """Gather what is missing, and hand the chunks over, unless a load of this step failed: then none is sound."""
        if not self._orders.saves or self._paged is None:
            return
        for layer in range(len(self._paged.caches)):
            self._gather(layer)
        if any(self._is_failed(load) for load in self._step_loads):
            self._drop_saving()
        if self._saving is None:
            return
        seconds = self._clock() - self._began_s
        for draft in self._saving.drafts:  # a decoding step says nothing about what computing a chunk costs
            tokens = draft.order.chunk.tokens
            draft.prefill_s = seconds * tokens / self._orders.tokens if self._orders.tokens * 2 >= tokens else 0.0
        self._saves.hand_over(self._saving)
        self._saving = None
        self._counts.set("save_bytes_waiting", self._saves.bytes_waiting)

    def preempted(self) -> None:
        """Blocks may be given to others now. Nothing is gathered between steps, so what is left here is dropped."""
        self._drop_saving()

    # ------------------------------------------------------------------ what came of it

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose asynchronous load has ended since the last call, and those of them that failed."""
        self._collect()
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        return finished, failed

    def take_copied(self) -> set[str]:
        """Requests that are over and whose blocks this step was the last to read, whatever came of it."""
        copied, self._copied = self._copied, set()
        return copied

    def take_bad_blocks(self) -> set[int]:
        """Blocks that loads which ended left unfilled, since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_notice(self) -> WorkerNotice | None:
        """What the scheduler's side has to know besides."""
        loaded, self._loaded = self._loaded, []
        refusal = "" if self._is_told else self._refusal
        self._is_told = self._is_told or bool(self._refusal)
        settled = self._saves.take_settled()
        reuse = "" if self._passes is None or self._reuse_told else self._passes.refusal
        self._reuse_told = self._reuse_told or reuse
        if not (refusal or loaded or settled or reuse):
            return None
        return WorkerNotice(refusal, tuple(loaded), settled, reuse)

    def close(self) -> None:
        """Store what waits, end threads and sessions."""
        self._saves.close()
        if self._passes is not None:
            self._passes.close()
        if self._loads is not None:
            self._loads.close()

    def _submit(self, order: LoadOrder) -> Load | None:
        try:
            return None if self._loads is None else self._loads.submit(order)
        except Exception:  # the engine waits for ever for a load of which it hears nothing
            log.exception("kvservice: request %s is computed, its load could not begin", order.request_id)
            self._counts.add("hook_errors")
            return None

    def _collect(self) -> None:
        is_waiting = self._orders.is_idle and (self._passes is None or self._passes.is_idle)
        if is_waiting and self._loads is not None:
            self._loads.wait_for_end(IDLE_WAIT_S)
        ended, self._step_loads = self._step_loads, []
        for load in ended:
            self._is_failed(load)  # waits for its end: the step has used all of its layers
        ended += [load for load in self._loads.take() if load.order.is_async] if self._loads is not None else []
        for load in ended:
            order = load.order
            if load.is_failed:
                self._fail(order.request_id, load.bad_blocks(self._block_size), is_async=order.is_async)
            elif order.is_async:
                self._finished.add(order.request_id)
            else:
                self._loaded.append(order.request_id)

        for one in () if self._passes is None else self._passes.take():
            request_id = one.order.load.request_id
            if one.is_failed:
                self._fail(request_id, one.order.load.block_ids, is_async=True)
            else:
                self._finished.add(request_id)

    def _fail(self, request_id: str, blocks: Sequence[int] | set[int], *, is_async: bool) -> None:
        """vLLM knows failures by block, and where block ids are ambiguous by request."""
        if self._groups == 1 and blocks:
            self._bad_blocks.update(blocks)
        else:
            self._failed.add(request_id)
        if is_async:
            self._finished.add(request_id)
        else:
            self._loaded.append(request_id)

    def _is_failed(self, load: Load) -> bool:
        if not load.wait(max(load.deadline_s - self._clock(), 0)):
            load.end()
        return load.is_failed

    def _gather(self, layer: int) -> None:
        if layer in self._layers_gathered:
            return
        assert self._paged is not None
        began_s = self._clock()
        if not self._layers_gathered:
            self._begin_saving(self._paged)
        self._layers_gathered.add(layer)
        if self._saving is not None and self._place is not None:
            self._paged.gather(layer, self._place, self._saving.planes[layer])
        self._counts.add("gather_seconds", self._clock() - began_s)

    def _begin_saving(self, paged: EnginePaged) -> None:
        self._drop_saving()  # of an attempt that failed half-way
        self._saving = saving = self._saves.begin(self._orders.saves)
        if saving is not None:
            orders = [draft.order for draft in saving.drafts]
            self._place = Place.joined(paged.place(one.block_ids, one.skip, one.chunk.tokens) for one in orders)

    def _drop_saving(self) -> None:
        if self._saving is not None:
            self._saves.drop(self._saving)
        self._saving = None

    def _refuse(self, why: str) -> None:
        self._refusal = why
        log.warning("kvservice: no reuse with this engine: %s", why)
