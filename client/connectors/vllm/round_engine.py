"""A refresh on vLLM's own layers: the engine's modules, kernels and weights on rows that we choose.

Every run of neighbouring rows is one "sequence" over its prompt's block table, so that all that a model does inside a
layer is done by the model. No second forward pass is written here, and nothing is known of any model: before a model
is used, its own forward pass and ours must write the same bits into scratch blocks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from kvservice.client.connectors.vllm.engine_layers import EngineLayers, NoRefreshError
from kvservice.client.connectors.vllm.layout import scratch_blocks
from kvservice.client.connectors.vllm.paged import EnginePaged, Place
from kvservice.client.reuse.engine import Planes, Rows
from kvservice.model.errors import SlotError

__all__ = ["NoRefreshError", "VllmEngine"]

NO_SLOT: Final = -1
"""vLLM's own padding: rows that are computed and not stored. That a backend skips it is checked, see `_check`."""


class VllmEngine:
    """Implements ``reuse.engine.Engine``. The engine's thread only; changes nothing but rows it is told to write.

    ``hidden`` is ``[rows, 2, width]`` in the model's dtype, hidden states and residual, on the engine's device; before
    layer 0 the second half means nothing. ``is_running``: one of our layers runs, so that what vLLM calls of a
    connector meanwhile (``wait_for_layer_load``, ``save_kv_layer``) is about our rows and none of its own.
    """

    def __init__(self, model: EngineLayers, paged: EnginePaged) -> None:
        self.is_running = False
        self._model = model
        self._paged = paged
        self._unit = paged.layouts[0].block_size  # the kernels' blocks; the scheduler's may be several of them
        self._names = [attention.layer_name for attention in model.attentions]
        self._tables: WeakKeyDictionary[Rows, Tensor] = WeakKeyDictionary()
        self._last: tuple[ref[Rows], Tensor, _Call] | None = None

    @classmethod
    def of(cls, runner: Any, vllm_config: Any, paged: EnginePaged) -> "VllmEngine":
        """The engine of ``runner`` (``plugin.find_runner``), whose registered KV is ``paged``.

        Runs the model twice on about a block of tokens, in scratch memory. Raises NoRefreshError.
        """
        model = EngineLayers.of(runner, vllm_config, paged)
        try:
            with _scratch_caches(model.attentions) as memory:
                caches = [whole[1:] for whole in memory]
                scratch = EnginePaged(caches, paged.layouts, paged.indices, paged.block_size, paged.geometry)
                _check(cls(model, scratch), memory)
        except _FOREIGN_ERRORS as error:
            raise NoRefreshError(f"its layers cannot be called one by one: {type(error).__name__}: {error}") from error
        return cls(model, paged)

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return len(self._model.layers)

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states [rows, 2, width] before layer 0 of token ids int64 [rows]."""
        with self._running():
            hidden = self._model.inner.embed_input_ids(tokens.to(self._model.device))
            return torch.stack((hidden, torch.zeros_like(hidden)), 1)

    def probe(self, layer: int, hidden: Tensor, rows: Rows) -> Planes:
        """Fresh K and V [rows, heads, head_size] in the KV dtype: the layer is left at its attention's door."""
        from vllm.forward_context import set_forward_context

        attention = self._model.attentions[layer]
        with self._running(), set_forward_context(None, self._model.config, num_tokens=len(rows), skip_compiled=True):
            keys, values = _stopped_at(attention, lambda: self._call(layer, hidden, rows.positions))
            shape = (len(rows), attention.num_kv_heads, attention.head_size)
            dtype = self._paged.caches[layer].dtype
            return keys.reshape(shape).to(dtype).contiguous(), values.reshape(shape).to(dtype).contiguous()

    def run_layer(self, layer: int, hidden: Tensor, rows: Rows, is_written: Tensor) -> Tensor:
        """Store the flagged rows, attend, return the hidden states [rows, 2, width] behind the layer.

        The last layer only stores: nobody needs a state behind it, since the engine computes the prompt's last token
        itself. There ``hidden`` is returned as it is, the states *before* that layer.
        Raises SlotError when a row's slot is not where its prompt's block table has it; nothing is written then.
        """
        if layer == self.layers - 1:
            self._store(layer, hidden, rows, is_written)
            return hidden
        parts = []
        for call in self._calls_of(rows, is_written):
            with self._running(), self._context(call):
                parts.append(torch.stack(self._call(layer, hidden[call.cut], call.positions), 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_rows(self, layer: int, slots: Tensor) -> Planes:
        """Copies of K and V [rows, heads, head_size] at ``slots`` int64 [rows], on the engine's device."""
        cache, attention = self._paged.caches[layer], self._model.attentions[layer]
        shape = (2, len(slots), attention.num_kv_heads, attention.head_size)
        keys, values = torch.empty(shape, dtype=cache.dtype, device=cache.device)
        self._paged.gather(layer, Place(slots.contiguous()), (keys.flatten(1), values.flatten(1)))
        return keys, values

    def write_rows(self, layer: int, slots: Tensor, planes: Planes) -> None:
        """Store K and V at ``slots`` int64 [rows], no slot twice."""
        rows = [plane.contiguous().flatten(1) for plane in planes]
        self._paged.scatter(layer, Place(slots.contiguous()), rows)

    def _block_tables(self, rows: Rows) -> Tensor:
        """Made, and the slots checked, once for rows that go through many layers: it takes 0.4 ms."""
        known = self._tables.get(rows)
        if known is None:
            known = self._tables[rows] = _block_tables(rows, self._unit)
        return known

    def _calls_of(self, rows: Rows, is_written: Tensor) -> Iterator["_Call"]:
        """The rows in pieces that the device's buffers take, each with what its attention sees, made just before it is
        used: some backends keep that in buffers which the next one is written to. What was made last serves the next
        layer too, if it is of the same rows: making it takes an eighth of a layer's time.
        """
        last = self._last
        if last is not None and last[0]() is rows and last[1] is is_written:
            yield last[2]
            return
        tables, cuts = self._block_tables(rows), self._cuts(rows)
        for cut in cuts:
            self._last = None
            call = self._prepared(_part(rows, cut), is_written[cut], tables, cut)
            self._last = (ref(rows), is_written, call) if len(cuts) == 1 else None
            yield call

    def _prepared(self, rows: Rows, is_written: Tensor, tables: Tensor, cut: slice) -> "_Call":
        slots = torch.where(is_written, rows.slots, NO_SLOT).to(self._model.device)
        return _Call(cut, rows.positions, slots, self._model.builder.build(0, _metadata(rows, slots, tables)))

    def _store(self, layer: int, hidden: Tensor, rows: Rows, is_written: Tensor) -> None:
        self._block_tables(rows)  # checks the slots
        attention = self._model.attentions[layer]
        slots = torch.where(is_written, rows.slots, NO_SLOT).to(self._model.device)
        for cut in self._cuts(rows):
            keys, values = self.probe(layer, hidden[cut], _part(rows, cut))
            with self._running():
                attention.impl.do_kv_cache_update(attention, keys, values, attention.kv_cache, slots[cut])

    def _call(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The layer on copies: fused operations work in place."""
        copies = hidden.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        residual = copies[1] if layer else None
        found: tuple[Tensor, Tensor] = self._model.layers[layer](positions.to(self._model.device), copies[0], residual)
        return found

    @contextmanager
    def _running(self) -> Iterator[None]:
        was_running, self.is_running = self.is_running, True
        try:
            with torch.inference_mode():
                yield
        finally:
            self.is_running = was_running

    @contextmanager
    def _context(self, call: "_Call") -> Iterator[None]:
        """The forward context in which attention sees these rows. It nests, and puts back what was there."""
        from vllm.forward_context import get_forward_context, set_forward_context

        with set_forward_context(
            dict.fromkeys(self._names, call.metadata),
            self._model.config,
            num_tokens=len(call.positions),
            slot_mapping=dict.fromkeys(self._names, call.slots),
            skip_compiled=True,
        ):
            # Else, with torch before 2.11, experts are found by counting calls from the first layer on.
            get_forward_context().all_moe_layers = None
            yield

    def _cuts(self, rows: Rows) -> list[slice]:
        """The rows in pieces that the device's buffers can take, in order: a later row needs the earlier ones."""
        count = len(rows)
        rows_max, runs_max = self._model.rows_max or count, self._model.runs_max or count
        starts = _run_starts(rows)
        cuts: list[slice] = []
        first = 0
        while first < count:
            later = starts[starts > first]
            end = int(later[runs_max - 1]) if len(later) >= runs_max else count
            cuts.append(slice(first, min(end, first + rows_max)))
            first = cuts[-1].stop
        return cuts


class _Call(NamedTuple):
    """Rows that go through a layer together. ``cut``: which they are of all; ``positions`` and ``slots``: int64 [rows];
    ``metadata``: what the attention backend makes of their places. Nothing here keeps the rows themselves alive."""

    cut: slice
    positions: Tensor
    slots: Tensor
    metadata: Any


def _block_tables(rows: Rows, unit: int) -> Tensor:
    """int32 [prompts, blocks]: each prompt's blocks up to its last row here, then zeros. Raises SlotError."""
    counts = torch.bincount(rows.prompts, minlength=len(rows.prompt_slots))
    lasts = rows.positions[(counts.cumsum(0) - 1).clamp(min=0)]
    blocks = torch.where(counts > 0, lasts // unit + 1, 0).tolist()
    firsts = torch.zeros((len(blocks), max(blocks)), dtype=torch.int64)
    for prompt, (slots, used) in enumerate(zip(rows.prompt_slots, blocks, strict=True)):
        firsts[prompt, :used] = slots[: used * unit : unit]
    expected = firsts[rows.prompts, rows.positions // unit] + rows.positions % unit
    if bool((firsts < 0).any()) or bool((firsts % unit).any()) or not torch.equal(expected, rows.slots):
        raise SlotError(f"a prompt's slots are not those of whole blocks of {unit}; give it the engine's own")
    return (firsts // unit).to(torch.int32)


def _metadata(rows: Rows, slots: Tensor, tables: Tensor) -> Any:
    """vLLM's ``CommonAttentionMetadata``. A run ends at its last row; the causal mask does the rest."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = _run_starts(rows)
    bounds = torch.cat((starts, torch.tensor([len(rows)]))).to(torch.int32)
    lengths = (rows.positions[bounds[1:].long() - 1] + 1).to(torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=bounds.to(slots.device),
        query_start_loc_cpu=bounds,
        seq_lens=lengths.to(slots.device),
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(starts),
        num_actual_tokens=len(rows),
        max_query_len=int((bounds[1:] - bounds[:-1]).max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=tables[rows.prompts[starts]].to(slots.device),
        slot_mapping=slots,
        positions=rows.positions.to(slots.device),
    )


def _run_starts(rows: Rows) -> Tensor:
    """Index of each row that does not follow the one before it in the same prompt."""
    is_start = torch.ones(len(rows), dtype=torch.bool)
    is_start[1:] = (rows.prompts[1:] != rows.prompts[:-1]) | (rows.positions[1:] != rows.positions[:-1] + 1)
    return is_start.nonzero().flatten()


def _part(rows: Rows, cut: slice) -> Rows:
    if cut.start == 0 and cut.stop == len(rows):
        return rows
    return Rows(rows.positions[cut], rows.slots[cut], rows.prompts[cut], rows.prompt_slots)


class _DoorError(Exception):
    """Raised at an attention module's door, to leave its layer there."""


def _stopped_at(attention: Any, call: Callable[[], object]) -> tuple[Tensor, Tensor]:
    """The keys and values with which ``call`` comes to this attention module, which it does not enter."""
    found: list[Tensor] = []

    def stop(module: Any, arguments: tuple[Any, ...], words: dict[str, Any]) -> None:
        found.extend((*arguments, *(words[name] for name in ("query", "key", "value") if name in words))[1:3])
        raise _DoorError

    hook = attention.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        call()
    except _DoorError:
        pass
    finally:
        hook.remove()
    if len(found) != 2:
        raise NoRefreshError(f"{attention.layer_name} was not called with a query, keys and values")
    return found[0], found[1]


_FOREIGN_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
_SCRATCH_BLOCKS: Final = 3


@contextmanager
def _scratch_caches(attentions: tuple[Any, ...]) -> Iterator[list[Tensor]]:
    """Meanwhile the modules write to zeroed blocks of ours, shaped and packed like the engine's.

    Yields the memory of each, ``_SCRATCH_BLOCKS`` and one that lies before them and belongs to nobody.
    """
    theirs = [attention.kv_cache for attention in attentions]
    memory = [scratch_blocks(cache, 1 + _SCRATCH_BLOCKS) for cache in theirs]
    try:
        for attention, whole in zip(attentions, memory, strict=True):
            attention.kv_cache = whole[1:]
        yield memory
    finally:
        for attention, cache in zip(attentions, theirs, strict=True):
            attention.kv_cache = cache


def _check(engine: VllmEngine, memory: list[Tensor]) -> None:
    """Raise NoRefreshError unless calling layers one by one writes what the model's own forward pass writes.

    Catches what a model does between its layers, embeddings scaled elsewhere, probes that miss a rotation, and
    operations that store a row which has no slot.
    """
    unit = engine._unit
    tokens = unit + unit // 2 + 1
    rows = Rows.at(torch.arange(tokens), torch.cat((torch.arange(unit) + 2 * unit, torch.arange(unit)))[:tokens])
    ids = (torch.arange(tokens) + 1) % engine._model.config.model_config.get_vocab_size()
    is_written = torch.ones(tokens, dtype=torch.bool)
    (call,) = engine._calls_of(rows, is_written)
    with engine._running(), engine._context(call):
        engine._model.inner.forward(ids.to(engine._model.device), rows.positions.to(engine._model.device), None)
    theirs = [whole.clone() for whole in memory]
    for whole in memory:
        whole.zero_()
    hidden = engine.embed(ids)
    for layer in range(engine.layers):
        fresh = engine.probe(layer, hidden, rows)
        hidden = engine.run_layer(layer, hidden, rows, is_written)
        if not torch.equal(theirs[layer], memory[layer]):
            raise NoRefreshError(f"layer {layer} called by itself writes other KV than within the model")
        if not all(map(torch.equal, fresh, engine.read_rows(layer, rows.slots))):
            raise NoRefreshError(f"layer {layer} gives its attention other keys and values than it stores")
    for layer in (0, engine.layers - 1):
        engine.run_layer(layer, engine.embed(ids.flip(0)), rows, ~is_written)
        if not torch.equal(theirs[layer], memory[layer]):
            raise NoRefreshError(f"layer {layer} stores rows that have no slot (slot {NO_SLOT})")
