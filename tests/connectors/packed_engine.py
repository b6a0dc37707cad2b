"""An engine whose caches are packed in one of the kernels' test packings, beside a plain one with the same rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvservice.client import Client, Plans, RoundPrompt
from kvservice.client.connectors.vllm.layout import BlockLayout
from kvservice.client.connectors.vllm.paged import EnginePaged
from kvservice.client.paged import PagedMemory
from kvservice.client.restore import Restore, plan_restore
from kvservice.kernels import reference
from kvservice.model.geometry import Geometry, attention_geometry
from kvservice.model.identity import Identity
from tests.client.builders import BITS_DTYPES, POLICY, TORCH_DTYPES, Engine, bits_of, make_prompt
from tests.kernels.builders import make_perms

GEOMETRIES = {
    "gqa-bf16": attention_geometry(layers=3, heads=2, head_size=16, dtype="bfloat16"),
    "mqa-fp16": attention_geometry(layers=2, heads=1, head_size=64, dtype="float16"),
    "gqa-fp32": attention_geometry(layers=2, heads=2, head_size=16, dtype="float32"),
    "partial-rotary": attention_geometry(layers=2, heads=3, head_size=80, dtype="bfloat16", rotary_size=6),
}
BLOCK_SIZE = 16


class PackedEngine:
    """Caches ``[blocks, heads, block_size, 2 * head_size]`` of all layers in one memory, filled with a plain engine's
    rows; ``scheduler_blocks``: how many of the layout's blocks are one of the scheduler's."""

    def __init__(self, plain: Engine, packing: str, *, device: str = "cpu", scheduler_blocks: int = 1) -> None:
        geometry = self.geometry = plain.geometry
        plane = geometry.planes[0]
        self.block_elements = 2 * BLOCK_SIZE * plane.row_elements
        blocks = plain.slot_count // BLOCK_SIZE
        dtype = TORCH_DTYPES[geometry.dtype]
        self.memory = torch.full((blocks, geometry.layers, self.block_elements), 7, dtype=dtype)
        self.perms = [torch.from_numpy(perm) for perm in make_perms(packing, BLOCK_SIZE, plane.heads, plane.head_size)]
        for layer, planes in enumerate(plain.rows(torch.arange(plain.slot_count))):
            for rows, perm in zip(planes, self.perms, strict=True):
                reference.scatter_by_table(self.bits(layer), torch.arange(plain.slot_count), perm, rows.flatten(1))
        self.memory = self.memory.to(device)
        shape = (blocks, plane.heads, BLOCK_SIZE, 2 * plane.head_size)
        caches = [self.memory[:, layer].view(shape) for layer in range(geometry.layers)]
        perm_k, perm_v = (perm.to(device) for perm in self.perms)
        layout = BlockLayout(perm_k, perm_v, self.block_elements)
        names = {f"layer.{layer}": layer for layer in range(geometry.layers)}
        size = BLOCK_SIZE * scheduler_blocks
        self.paged = EnginePaged(caches, [layout] * geometry.layers, names, size, geometry)

    def bits(self, layer: int) -> Tensor:
        """A layer as storage bits ``[blocks, block_elements]``, a view."""
        return self.memory.view(BITS_DTYPES[self.geometry.element_bytes])[:, layer]

    def rows(self, slots: Tensor) -> list[list[Tensor]]:
        """As ``Engine.rows``."""
        found = []
        for layer in range(self.geometry.layers):
            blocks, planes = self.bits(layer).cpu(), []
            for perm, plane in zip(self.perms, self.geometry.planes, strict=True):
                rows = blocks[(slots // BLOCK_SIZE)[:, None], perm[slots % BLOCK_SIZE]]
                planes.append(rows.view(len(slots), plane.heads, plane.head_size))
            found.append(planes)
        return found


def make_plain(geometry: Geometry, seed: int = 0) -> Engine:
    """A plain engine of 256 slots."""
    return Engine(geometry, blocks=64, seed=seed)


def all_rows(engine: Engine | PackedEngine) -> list[list[Tensor]]:
    return engine.rows(torch.arange(256))


def hostile_rows(plain: Engine, seed: int = 0) -> None:
    """Give the engine any bits at all: payloads of NaN, infinities, negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    for layer in plain.planes:
        for plane in layer:
            bits = bits_of(plane)
            edge = 1 << (8 * bits.element_size() - 1)
            bits.copy_(torch.randint(-edge, edge, bits.shape, generator=generator, dtype=torch.int64).to(bits.dtype))


def store_family(client: Client, identity: Identity) -> list[RoundPrompt]:
    """A master of two shared segments, and three prompts stored as its mirrors, at other positions."""
    engine = Engine(identity.geometry, blocks=96, seed=9)
    first = make_prompt(identity, private=8, shared=(21, 12), seed=1, policy=POLICY)
    client.store(first, engine.planes, engine.allocate(first.token_count))
    prompts = [first]
    for seed, private in ((2, 4), (3, 12), (4, 9)):
        prompt = make_prompt(identity, private=private, shared=(21, 12), seed=seed, policy=POLICY)
        slots = engine.allocate(prompt.token_count)
        with client.lookup([prompt]) as plans:
            client.restore(plans, engine.planes, [slots]).wait()
            changed = torch.randperm(33, generator=torch.Generator().manual_seed(seed))[:6]
            engine.change(slots[private:][changed])
            client.store(prompt, engine.planes, slots, base=plans[0], is_refreshed=True)
        prompts.append(prompt)
    return prompts


@contextmanager
def found(client: Client, prompts: Sequence[RoundPrompt]) -> Iterator[Plans]:
    with client.lookup(prompts) as plans:
        assert all(plan.hit_tokens for plan in plans)
        yield plans


def restore(client: Client, plans: Plans, memory: PagedMemory, slots: Sequence[Tensor]) -> None:
    """As ``Client.restore`` does, into any paged memory, on this thread."""
    work = plan_restore(client.session, plans, slots, memory)
    under_way = Restore(work, client.session.identity.geometry.layers)
    under_way.run(work, plans, verify=False, on_progress=None)
    under_way.wait()
