"""The layout of an engine's KV blocks, learnt by writing coded rows with the engine's own write operation.

    block := block_elements storage values, densely packed; a value's place is perm[plane][token in block][head * dim]

Records hold rows, ``[plane][token][head][dim]``; an engine packs blocks as its kernels like (vLLM on AMX: pairs of
dimensions of many tokens). The place of a value is learnt, checked with other values, or refused; it is never guessed.
Moves bits, never values, so that a NaN's payload and a negative zero stay what they are.
"""

import ctypes
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvservice.kernels.shapes import Bits
from kvservice.model.errors import GeometryMismatchError, KVServiceError, SlotError

Slots = Tensor | Bits
"""int64 [tokens]: block number * block size + place in the block."""

_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_CODE_BASE = 128
"""1 + digit / 128 is exact in bfloat16, float16 and float32, is no NaN, no denormal and never zero."""


class UnknownLayoutError(KVServiceError):
    """The engine's block layout cannot be learnt; nothing of it can be reused. Says which layer and why."""

    code = "UNKNOWN_LAYOUT"


@dataclass(frozen=True, slots=True)
class _Strides:
    """A permutation table that is a nest of equal steps: copying along strides is 5 times as fast as by index."""

    offset: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]

    def of(self, blocks: Tensor) -> Tensor:
        """The rows of contiguous ``blocks`` ``[n, block_elements]`` as a view ``[n, *sizes]``."""
        place = blocks.storage_offset() + self.offset
        return blocks.as_strided((blocks.shape[0], *self.sizes), (blocks.stride(0), *self.steps), place)


@dataclass(frozen=True, eq=False, slots=True)
class BlockLayout:
    """Where a token's values lie in a block of one layer's cache.

    ``perm_k``, ``perm_v``: int64 ``[block_size, heads * head_size]``, element offset inside a block of every value, on
    the cache's device. ``block_elements``: elements of a block, K and V. Immutable; safe from any thread.
    """

    perm_k: Tensor
    perm_v: Tensor
    block_elements: int
    _strides: tuple[_Strides | None, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_strides", tuple(_strides_of(perm) for perm in (self.perm_k, self.perm_v)))

    @property
    def block_size(self) -> int:
        """Tokens of a block, as the kernels see it; the scheduler's blocks may be several of them in a row."""
        return self.perm_k.shape[0]

    @property
    def row_elements(self) -> int:
        """Elements of a row: heads * head size."""
        return self.perm_k.shape[1]

    def gather(self, cache: Tensor, slots: Slots, out: Sequence[Bits | Tensor]) -> None:
        """Copy the rows at ``slots`` to ``out``, in place when it returns.

        ``out``: K, then V: storage bits ``[tokens, heads * head_size]``, contiguous, as numpy uint16 or uint32 arrays
        or as tensors of the cache's or an integer type. Raises SlotError, GeometryMismatchError; nothing is written.
        Whole blocks in a row (a chunk) take the fast way.
        """
        blocks, where = self.blocks_of(cache), self._where(cache, slots)
        if any(isinstance(plane, np.ndarray) and not plane.flags.writeable for plane in out):
            raise GeometryMismatchError("rows cannot be gathered into read-only memory")
        targets = self._rows(out, len(where), blocks.dtype)
        if (numbers := self._whole_blocks(where)) is not None:
            copied = blocks.index_select(0, numbers)
            for perm, strides, target in zip((self.perm_k, self.perm_v), self._strides, targets, strict=True):
                if strides is not None:
                    target.view(-1, *strides.sizes).copy_(strides.of(copied))
                else:
                    target.view(len(numbers), -1).copy_(copied[:, perm.view(-1)])
            return
        number, inside = (where // self.block_size)[:, None], where % self.block_size
        for perm, target in zip((self.perm_k, self.perm_v), targets, strict=True):
            target.copy_(blocks[number, perm[inside]])

    def scatter(self, cache: Tensor, slots: Slots, planes: Sequence[Bits | Tensor]) -> None:
        """Write rows, given as ``gather`` gives them, to ``slots``; what lies beside them is untouched.

        No slot may be there twice. Raises SlotError, GeometryMismatchError; nothing is written then.
        """
        blocks, where = self.blocks_of(cache), self._where(cache, slots)
        sources = self._rows(planes, len(where), blocks.dtype)
        if (numbers := self._whole_blocks(where)) is not None:
            packed = torch.empty((len(numbers), self.block_elements), dtype=blocks.dtype, device=blocks.device)
            for perm, strides, source in zip((self.perm_k, self.perm_v), self._strides, sources, strict=True):
                if strides is not None:
                    strides.of(packed).copy_(source.view(-1, *strides.sizes))
                else:
                    packed[:, perm.view(-1)] = source.view(len(numbers), -1).to(packed.device)
            blocks.index_copy_(0, numbers, packed)
            return
        number, inside = (where // self.block_size)[:, None], where % self.block_size
        for perm, source in zip((self.perm_k, self.perm_v), sources, strict=True):
            blocks[number, perm[inside]] = source.to(blocks.device)

    def blocks_of(self, cache: Tensor) -> Tensor:
        """The cache as storage bits ``[blocks, block_elements]``, a view. Raises GeometryMismatchError."""
        if not _is_dense(cache) or cache[0].numel() != self.block_elements:
            raise GeometryMismatchError(
                f"a cache of shape {tuple(cache.shape)} has no blocks of {self.block_elements} elements; "
                "it is not the tensor whose layout was learnt"
            )
        return _block_rows(cache)

    def _where(self, cache: Tensor, slots: Slots) -> Tensor:
        where = torch.as_tensor(slots, dtype=torch.int64)
        if where.ndim != 1 or (len(where) and not 0 <= int(where.min()) <= int(where.max()) < self._slot_count(cache)):
            raise SlotError(f"slots must be one row of numbers from 0 to {self._slot_count(cache) - 1}")
        return where.to(cache.device)

    def _slot_count(self, cache: Tensor) -> int:
        return cache.shape[0] * self.block_size

    def _whole_blocks(self, where: Tensor) -> Tensor | None:
        """The block numbers if the slots are whole blocks, each from its first slot to its last."""
        size = self.block_size
        if not len(where) or len(where) % size:
            return None
        starts = where[::size]
        expected = starts[:, None] + torch.arange(size, device=where.device)
        is_whole = bool((starts % size == 0).all()) and torch.equal(where.view(-1, size), expected)
        return starts // size if is_whole else None

    def _rows(self, planes: Sequence[Bits | Tensor], tokens: int, dtype: torch.dtype) -> list[Tensor]:
        rows = [_storage_bits(plane) for plane in planes]
        wanted = ((tokens, self.row_elements), dtype, True)
        found = [(tuple(one.shape), one.dtype, one.is_contiguous()) for one in rows]
        if found != [wanted, wanted]:
            raise GeometryMismatchError(f"rows of K and V must be contiguous {wanted[0]} of {dtype}, they are {found}")
        return rows


def learn_layout(attention_module: Any, cache: Tensor) -> BlockLayout:
    """Learn the layout of ``cache``, the tensor registered for this attention module: blocks first.

    Nothing of it is changed: the probe writes to blocks of its own. Takes 1-5 ms. Raises UnknownLayoutError.
    """
    name = getattr(attention_module, "layer_name", type(attention_module).__name__)
    if not isinstance(cache, Tensor):
        raise UnknownLayoutError(f"{name}: its cache is a {type(cache).__name__}, not one tensor; nothing is reused")
    heads, head_size = int(attention_module.num_kv_heads), int(attention_module.head_size)
    _check_kind(name, attention_module, cache, heads, head_size)
    try:
        perm_k, perm_v = _probe(attention_module, cache, heads, head_size)
        layout = BlockLayout(perm_k, perm_v, cache[0].numel())
        _check_learnt(layout, attention_module, cache, heads, head_size)
    except UnknownLayoutError as error:
        raise UnknownLayoutError(f"{name}: {error}; nothing is reused") from error
    except _FOREIGN_ERRORS as error:
        raise UnknownLayoutError(f"{name}: its write operation cannot be probed: {error}; nothing is reused") from error
    return layout


def learn_layouts(modules: Mapping[str, Any], caches: Mapping[str, Tensor]) -> dict[str, BlockLayout]:
    """One layout for every cache, by layer name; probes once for every distinct kind. Raises UnknownLayoutError."""
    known: dict[Hashable, BlockLayout] = {}
    found = {}
    for name, cache in caches.items():
        if name not in modules:
            raise UnknownLayoutError(f"{name}: there is no attention module of this name; nothing is reused")
        kind = _kind(modules[name], cache)
        if kind not in known:
            known[kind] = learn_layout(modules[name], cache)
        found[name] = known[kind]
    return found


_FOREIGN_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)


def _kind(module: Any, cache: Any) -> Hashable:
    """What decides a layout. Equal kinds are probed once."""
    if not isinstance(cache, Tensor):
        return id(cache)
    writer = (type(getattr(module, "impl", None)), getattr(module, "isa", ""), module.num_kv_heads, module.head_size)
    return (*writer, cache.shape[1:], cache.stride()[1:], cache.dtype, cache.device)


def _check_kind(name: str, module: Any, cache: Tensor, heads: int, head_size: int) -> None:
    reason = ""
    if cache.dtype not in _BITS:
        reason = f"KV of type {cache.dtype} has scales outside the block"
    elif not callable(getattr(getattr(module, "impl", None), "do_kv_cache_update", None)):
        reason = "its attention backend has no write operation (do_kv_cache_update)"
    elif int(getattr(module, "head_size_v", head_size)) != head_size:
        reason = f"K heads of {head_size} and V heads of {module.head_size_v} elements differ"
    elif cache.ndim < 2 or not cache.shape[0] or not _is_dense(cache):
        reason = f"a block of shape {tuple(cache.shape[1:])}, strides {cache.stride()[1:]} is not densely packed"
    elif cache[0].numel() % (2 * heads * head_size):
        reason = f"a block of {cache[0].numel()} elements is not whole tokens of {heads} x {head_size}"
    if reason:
        raise UnknownLayoutError(f"{name}: {reason}; nothing is reused")


def _probe(module: Any, cache: Tensor, heads: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Write every element's number, digit by digit, and read where the digits went."""
    elements = cache[0].numel()
    tokens = elements // (2 * heads * head_size)
    codes = torch.arange(elements, device=cache.device).view(2, tokens, heads, head_size)
    slots = torch.arange(tokens, device=cache.device)
    found = torch.zeros(elements, dtype=torch.int64, device=cache.device)
    weight = 1
    while weight < elements:
        rows = (1 + (codes // weight) % _CODE_BASE / _CODE_BASE).to(cache.dtype)
        scratch = scratch_blocks(cache, 1)
        module.impl.do_kv_cache_update(module, rows[0].contiguous(), rows[1].contiguous(), scratch, slots)
        digits = (_block_values(scratch)[0].double() - 1) * _CODE_BASE
        if not torch.equal(digits, digits.round()):
            raise UnknownLayoutError("its write operation changes values (quantised, or scaled)")
        found += digits.long() * weight
        weight *= _CODE_BASE
    if not torch.equal(found.sort().values, torch.arange(elements, device=cache.device)):
        raise UnknownLayoutError("its write operation does not fill a block one to one (padding, or shared places)")
    places = torch.empty_like(found)
    places[found] = torch.arange(elements, device=cache.device)
    perm = places.view(2, tokens, heads * head_size)
    return perm[0].contiguous(), perm[1].contiguous()


def _check_learnt(layout: BlockLayout, module: Any, cache: Tensor, heads: int, head_size: int) -> None:
    """Other values, other slots: what the engine writes we read, and what we write is what the engine writes."""
    size = layout.block_size
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(3 * size, generator=generator)[: 2 * size + 1].to(cache.device)
    rows = torch.randn(2, len(slots), heads, head_size, generator=generator).to(cache.dtype).to(cache.device)
    theirs, ours = scratch_blocks(cache, 3), scratch_blocks(cache, 3)
    module.impl.do_kv_cache_update(module, rows[0].contiguous(), rows[1].contiguous(), theirs, slots)
    wanted = [_storage_bits(plane.reshape(len(slots), -1)) for plane in rows]
    read = [torch.empty_like(plane) for plane in wanted]
    layout.gather(theirs, slots, read)
    layout.scatter(ours, slots, wanted)
    is_read = all(torch.equal(one, other) for one, other in zip(read, wanted, strict=True))
    if not is_read or not torch.equal(_block_rows(theirs), _block_rows(ours)):
        raise UnknownLayoutError("a block's layout depends on more than the place in the block")


def scratch_blocks(cache: Tensor, blocks: int) -> Tensor:
    """Zeroed blocks of our own, packed like the cache's."""
    elements = cache[0].numel()
    memory = torch.zeros(blocks * elements, dtype=cache.dtype, device=cache.device)
    return memory.as_strided((blocks, *cache.shape[1:]), (elements, *cache.stride()[1:]))


def _is_dense(cache: Tensor) -> bool:
    """True if a block's elements lie in one run of memory, in whatever order."""
    step = 1
    inside = zip(cache.stride()[1:], cache.shape[1:], strict=True)
    for stride, size in sorted((stride, size) for stride, size in inside if size != 1):
        if stride != step:
            return False
        step *= size
    return cache.stride(0) >= step or cache.shape[0] == 1


def _block_values(cache: Tensor) -> Tensor:
    return cache.as_strided((cache.shape[0], cache[0].numel()), (cache.stride(0), 1), cache.storage_offset())


def _block_rows(cache: Tensor) -> Tensor:
    values = _block_values(cache)
    return values.view(_BITS[cache.dtype])


def _storage_bits(plane: Bits | Tensor) -> Tensor:
    """Rows as an integer tensor over the same memory. Rows in an arena may be read-only; nothing here writes those."""
    if isinstance(plane, Tensor):
        return plane.view(_BITS.get(plane.dtype, plane.dtype))
    if not plane.flags.c_contiguous:
        raise GeometryMismatchError(f"rows of K and V must be contiguous, these have strides {plane.strides}")
    if not plane.flags.writeable:  # torch warns of a read-only array, and has no other way to take one
        plane = _writable_view(plane)
    return torch.from_numpy(plane.view(f"int{plane.itemsize * 8}"))


def _writable_view(plane: Bits) -> Bits:
    """The same memory; ``plane`` must be kept as long as this is used."""
    if not plane.nbytes:
        return np.empty_like(plane)
    memory = (ctypes.c_ubyte * plane.nbytes).from_address(plane.ctypes.data)
    view: Bits = np.frombuffer(memoryview(memory), plane.dtype).reshape(plane.shape)
    return view


def _strides_of(perm: Tensor) -> _Strides | None:
    """The table as a nest of equal steps, outermost first; None if it is none, or a nest too deep to be fast."""
    places = perm.reshape(-1)
    sizes: list[int] = []
    steps: list[int] = []
    while len(places) > 1 and len(sizes) < _NEST_MAX:
        step = int(places[1] - places[0])
        breaks = (places[1:] - places[:-1] != step).nonzero()
        size = int(breaks[0]) + 1 if len(breaks) else len(places)
        if len(places) % size:
            return None
        sizes.append(size)
        steps.append(step)
        nest = places.view(-1, size)
        if not torch.equal(nest, nest[:, :1] + step * torch.arange(size, device=places.device)):
            return None
        places = nest[:, 0]
    if len(places) > 1:
        return None
    return _Strides(int(places[0]), tuple(reversed(sizes)), tuple(reversed(steps)))


_NEST_MAX = 6
