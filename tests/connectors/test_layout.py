"""Layouts learnt from fake engines: plain, packed, padded, quantised. Bits are moved, values never looked at."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvservice.client.connectors.vllm.layout import BlockLayout, UnknownLayoutError, learn_layout, learn_layouts
from kvservice.model.errors import GeometryMismatchError, SlotError

BLOCKS, HEADS, BLOCK_SIZE, HEAD_SIZE = 6, 3, 8, 4
BITS: dict[torch.dtype, Any] = {torch.bfloat16: np.uint16, torch.float16: np.uint16, torch.float32: np.uint32}

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]


@dataclass
class FakeAttention:
    """An attention module whose write operation is ``write(key, value, cache, slots)``."""

    write: Write
    num_kv_heads: int = HEADS
    head_size: int = HEAD_SIZE
    layer_name: str = "model.layers.0.self_attn.attn"
    calls: int = field(default=0)

    @property
    def impl(self) -> Any:
        def do_kv_cache_update(
            layer: object, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
        ) -> None:
            assert layer is self
            self.calls += 1
            self.write(key, value, kv_cache, slot_mapping)

        return SimpleNamespace(do_kv_cache_update=do_kv_cache_update)


def write_heads_first(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """[blocks, heads, 2 * tokens, head size]: per head all K rows, then all V rows, as vLLM's "vec" does."""
    both = cache.view(cache.shape[0], HEADS, 2 * BLOCK_SIZE, HEAD_SIZE)
    block, inside = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    both[block, :, inside] = key
    both[block, :, inside + BLOCK_SIZE] = value


def write_packed(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """K as pairs of dimensions of all tokens, V as pairs of tokens: what vLLM's AMX packing looks like."""
    block, inside = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    flat = cache.view(cache.shape[0], HEADS, 2, -1)
    keys = flat[:, :, 0].view(-1, HEADS, HEAD_SIZE // 2, BLOCK_SIZE, 2)
    values = flat[:, :, 1].view(-1, HEADS, BLOCK_SIZE // 2, HEAD_SIZE, 2)
    keys[block, :, :, inside] = key.reshape(-1, HEADS, HEAD_SIZE // 2, 2)
    values[block, :, inside // 2, :, inside % 2] = value


SHUFFLED = torch.randperm(2 * HEADS * BLOCK_SIZE * HEAD_SIZE, generator=torch.Generator().manual_seed(3))


def write_shuffled(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """No nest of equal steps at all."""
    flat, rows = cache.view(cache.shape[0], -1), torch.stack([key, value]).flatten(2)
    where = SHUFFLED.to(slots.device).view(2, BLOCK_SIZE, HEADS * HEAD_SIZE)[:, slots % BLOCK_SIZE]
    flat[(slots // BLOCK_SIZE)[None, :, None], where] = rows


def write_tokens_first(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """The cache is a transposed view: [blocks, heads, tokens, K and V] over tokens first, as on a GPU."""
    block, inside = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    cache[block, :, inside] = torch.cat([key, value], dim=2)


WRITERS = {"heads": write_heads_first, "packed": write_packed, "shuffled": write_shuffled, "tokens": write_tokens_first}


def make_cache(name: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
    """Blocks of a layer full of old bits, apart from each other, as one layer's view of a shared memory."""
    elements = 2 * HEADS * BLOCK_SIZE * HEAD_SIZE
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    memory = torch.randint(-(2**15), 2**15, (BLOCKS, 2, elements), dtype=bits).to(device).view(dtype)
    blocks = memory[:, 1]
    if name == "tokens":
        return blocks.view(BLOCKS, BLOCK_SIZE, HEADS, 2 * HEAD_SIZE).transpose(1, 2)
    return blocks.view(BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)


def random_rows(count: int, dtype: torch.dtype) -> list[Any]:
    """Any bits: NaNs with payloads, infinities, negative zeros."""
    generator = np.random.default_rng(5)
    kind = BITS[dtype]
    return [generator.integers(0, np.iinfo(kind).max, (count, HEADS * HEAD_SIZE), kind, endpoint=True) for _ in "kv"]


def as_heads(plane: Any, dtype: torch.dtype) -> Tensor:
    signed = torch.from_numpy(plane.view(f"i{plane.itemsize}"))
    return signed.view(dtype).view(-1, HEADS, HEAD_SIZE)


def some_slots(kind: str) -> Tensor:
    if kind == "whole blocks":
        return torch.cat([torch.arange(BLOCK_SIZE) + block * BLOCK_SIZE for block in (4, 1)])
    return torch.tensor([9, 30, 3, 47, 8, 17, 16])


def bits_of(cache: Tensor) -> Tensor:
    return cache.contiguous().view(torch.int16 if cache.dtype.itemsize == 2 else torch.int32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots_kind", ["whole blocks", "single rows"])
@pytest.mark.parametrize("dtype", list(BITS))
@pytest.mark.parametrize("name", list(WRITERS))
def test_what_the_engine_writes_is_read_and_what_is_written_is_the_engines(
    name: str, dtype: torch.dtype, slots_kind: str, device: str
) -> None:
    engine, cache, slots = FakeAttention(WRITERS[name]), make_cache(name, dtype, device), some_slots(slots_kind)
    before = bits_of(cache).clone()
    layout = learn_layout(engine, cache)
    assert torch.equal(bits_of(cache), before), "learning must not write to the cache"
    rows = random_rows(len(slots), dtype)
    theirs, ours = cache.clone(memory_format=torch.preserve_format), make_cache(name, dtype, device)
    ours.copy_(cache)
    key, value = (as_heads(plane, dtype).to(device) for plane in rows)
    engine.write(key, value, theirs, slots.to(device))
    found = [np.zeros_like(plane) for plane in rows]
    layout.gather(theirs, slots, found)
    for plane, wanted in zip(found, rows, strict=True):
        np.testing.assert_array_equal(plane, wanted)
    layout.scatter(ours, slots, rows)
    assert torch.equal(bits_of(ours), bits_of(theirs))


def test_rows_may_be_tensors_or_read_only_arrays() -> None:
    cache, slots = make_cache("heads"), some_slots("single rows")
    layout = learn_layout(FakeAttention(write_heads_first), cache)
    rows = random_rows(len(slots), torch.bfloat16)
    for plane in rows:
        plane.flags.writeable = False
    layout.scatter(cache, slots, rows)
    found = [torch.empty(plane.shape, dtype=torch.bfloat16) for plane in rows]
    layout.gather(cache, slots.numpy(), found)
    for plane, wanted in zip(found, rows, strict=True):
        np.testing.assert_array_equal(plane.view(torch.int16).numpy().view(np.uint16), wanted)


def test_no_slots_move_nothing() -> None:
    cache = make_cache("packed")
    before = bits_of(cache).clone()
    layout = learn_layout(FakeAttention(write_packed), cache)
    empty = random_rows(0, torch.bfloat16)
    layout.gather(cache, torch.empty(0, dtype=torch.int64), empty)
    layout.scatter(cache, torch.empty(0, dtype=torch.int64), empty)
    assert torch.equal(bits_of(cache), before)


def write_scaled(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    write_heads_first(key / 3, value, cache, slots)


def write_nothing(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    pass


def write_same_place(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    write_heads_first(key, value, cache, slots)
    cache.view(cache.shape[0], -1)[:, 0] = cache.view(cache.shape[0], -1)[:, 1]


def write_by_block_number(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    write_heads_first(key, value, cache, slots)
    odd = cache[1::2]
    odd.copy_(odd.flip(1))


def write_and_fail(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    raise RuntimeError("no kernel for this head size")


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (write_scaled, "changes values"),
        (write_nothing, "one to one"),
        (write_same_place, "one to one"),
        (write_by_block_number, "depends on more than the place"),
        (write_and_fail, "no kernel for this head size"),
    ],
)
def test_what_is_no_permutation_of_a_block_is_refused(write: Write, says: str) -> None:
    with pytest.raises(UnknownLayoutError, match=says) as raised:
        learn_layout(FakeAttention(write), make_cache("heads"))
    assert "model.layers.0.self_attn.attn" in str(raised.value)
    assert "nothing is reused" in str(raised.value)


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        (torch.zeros(2, 3, 4, 9, dtype=torch.bfloat16), "not whole tokens"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "scales outside"),
        (torch.zeros(2, 3, 8, 16, dtype=torch.bfloat16)[..., :8], "not densely packed"),
        ([torch.zeros(1)], "is a list"),
    ],
)
def test_caches_of_another_kind_are_refused(cache: Any, says: str) -> None:
    with pytest.raises(UnknownLayoutError, match=says):
        learn_layout(FakeAttention(write_heads_first), cache)


def test_a_backend_without_a_write_operation_is_refused() -> None:
    module = SimpleNamespace(impl=None, num_kv_heads=HEADS, head_size=HEAD_SIZE)
    with pytest.raises(UnknownLayoutError, match="do_kv_cache_update"):
        learn_layout(module, make_cache("heads"))


def learnt() -> tuple[BlockLayout, Tensor]:
    cache = make_cache("heads")
    return learn_layout(FakeAttention(write_heads_first), cache), cache


@pytest.mark.parametrize("slots", [[-1], [BLOCKS * BLOCK_SIZE]])
def test_slots_out_of_range_are_refused(slots: list[int]) -> None:
    layout, cache = learnt()
    before = bits_of(cache).clone()
    with pytest.raises(SlotError):
        layout.scatter(cache, torch.tensor(slots), random_rows(1, torch.bfloat16))
    assert torch.equal(bits_of(cache), before)


def test_rows_of_another_shape_or_type_are_refused() -> None:
    layout, cache = learnt()
    right = random_rows(2, torch.bfloat16)
    wrong: list[list[Any]] = [right[:1], random_rows(3, torch.bfloat16), [plane[:, ::2] for plane in right]]
    wrong.append(random_rows(2, torch.float32))
    wrong.append(random_rows(2, torch.bfloat16))
    wrong[-1][1].flags.writeable = False
    for rows in wrong:
        with pytest.raises(GeometryMismatchError):
            layout.gather(cache, torch.tensor([0, 1]), rows)


def test_another_cache_than_the_learnt_one_is_refused() -> None:
    layout, _ = learnt()
    with pytest.raises(GeometryMismatchError):
        layout.gather(torch.zeros(2, 3, 8, 16, dtype=torch.bfloat16), torch.tensor([0]), random_rows(1, torch.bfloat16))


def test_equal_layers_are_probed_once() -> None:
    module = FakeAttention(write_packed)
    caches = {f"layer.{index}": make_cache("packed") for index in range(5)}
    layouts = learn_layouts(dict.fromkeys(caches, module), caches)
    assert len(set(map(id, layouts.values()))) == 1
    probes = module.calls
    learn_layout(module, make_cache("packed"))
    assert module.calls == 2 * probes


def test_a_cache_without_its_module_is_refused() -> None:
    with pytest.raises(UnknownLayoutError, match=r"layer\.0"):
        learn_layouts({}, {"layer.0": make_cache("heads")})
