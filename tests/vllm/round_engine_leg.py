"""Refreshes on a live engine's own layers; run by test_round_engine.py, one process a leg.

    round_engine_leg.py '{"model": folder, "folder": for the report, "is_tried": true, "engine": {...}}'

Prints one line of JSON behind a mark: what held and what did not, by name. All work happens inside the connector's
``start_load_kv``, on the engine's thread and within its forward context, as it will in earnest.
"""

import importlib
import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

MARK = "ROUND-ENGINE-LEG-RESULT "
SPANS = ((40, 110), (30, 70))
"""Start and length of the candidates, in each of the two prompts."""


def main() -> None:
    leg = json.loads(sys.argv[1])
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if leg.get("without_amx"):
        torch.cpu._is_amx_tile_supported = lambda: False
    transfer = KVTransferConfig(
        kv_connector="SpyConnector",
        kv_connector_module_path="engine_spy",
        kv_role="kv_both",
        kv_connector_extra_config={"folder": leg["folder"]},
    )
    options = {
        "enforce_eager": True,
        "dtype": "bfloat16",
        "block_size": 32,
        "max_model_len": 512,
        "kv_cache_memory_bytes": 16 << 20,
        "skip_tokenizer_init": True,
        "kv_transfer_config": transfer,
    }
    llm = LLM(model=leg["model"], **{**options, **leg.get("engine", {})})
    found = {"pid": os.getpid(), **(World(llm).try_all() if leg["is_tried"] else {})}
    llm.llm_engine.engine_core.shutdown()
    sys.stdout.write(f"{MARK}{json.dumps(found)}\n")


class World:
    """An engine that has computed two prompts, and these prompts' rows, laid out of order into blocks it does not use.

    Its own blocks it gives away again: the second prompt ends in the last block of the first.
    """

    def __init__(self, llm: Any) -> None:
        self.llm, self.spy = llm, importlib.import_module("engine_spy")
        self.engine, self.paged = self.spy.FOUND["engine"], self.spy.FOUND["paged"]
        words = random.Random(5)
        self.prompts = [[words.randrange(3, 1024) for _ in range(count)] for count in (200, 170)]
        self.said, self.true = [], []
        for prompt in self.prompts:
            self.said.append(self.say(prompt))
            self.true.append(self.rows(self.slots_of(prompt)))
        last, size = len(self.paged.caches[0]), self.paged.block_size
        free = torch.randperm(20, generator=torch.Generator().manual_seed(1)) + last * self.unit // size - 20
        self.slots = [
            self.slots_in(blocks)[: len(one)] for blocks, one in zip((free[:10], free[10:]), self.prompts, strict=True)
        ]
        self.put_back()

    def say(self, prompt: list[int], tokens: int = 1) -> list[int]:
        """Have the engine compute a prompt, in a step of its own."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        output = self.llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
        return list(output.outputs[0].token_ids)

    @property
    def unit(self) -> int:
        """Tokens of a block of the cache."""
        return int(self.paged.layouts[0].block_size)

    def slots_in(self, blocks: Tensor) -> Tensor:
        size = int(self.paged.block_size)
        return (blocks[:, None] * size + torch.arange(size)).flatten()

    def slots_of(self, prompt: list[int]) -> Tensor:
        """Where the engine has put a prompt."""
        return self.slots_in(torch.tensor(self.spy.BLOCKS[tuple(prompt)]))[: len(prompt)]

    def within(self, work: Callable[[], None]) -> None:
        """Do it in ``start_load_kv`` of some other request's step."""
        raised: list[BaseException] = []

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  the engine would hang on it
                raised.append(error)

        self.spy.WORK.append(guarded)
        self.say([3] * 5)
        if raised:
            raise raised[0]

    def rows(self, slots: Tensor) -> list[Tensor]:
        """K and V at the slots, every layer: [2, rows, heads, head size]."""
        return [torch.stack(self.engine.read_rows(layer, slots)) for layer in range(self.engine.layers)]

    def put(self, slots: Tensor, rows: list[Tensor]) -> None:
        for layer, planes in enumerate(rows):
            self.engine.write_rows(layer, slots, tuple(planes))

    def wipe(self, slots: Tensor) -> None:
        self.put(slots, [torch.zeros_like(planes[:, : len(slots)]) for planes in self.true[0]])

    def member(self, number: int, selector: Any) -> Any:
        from kvservice.client.reuse.collective import Member
        from kvservice.client.reuse.refresh import Prompt
        from kvservice.client.reuse.rows import RowClass, Span, classify

        tokens = torch.tensor(self.prompts[number])
        span = Span(*SPANS[number], RowClass.CANDIDATE)
        return Member(Prompt(tokens, self.slots[number], classify(len(tokens), [span])), selector)

    def stale(self) -> None:
        """Both prompts hold rows of the other where their candidates are, and nothing where they must be computed."""
        for number, (start, count) in enumerate(SPANS):
            self.wipe(self.slots[number])
            foreign = [planes[:, 10 : 10 + count] for planes in self.true[1 - number]]
            self.put(self.slots[number][start : start + count], foreign)

    def caches(self) -> list[Tensor]:
        return [cache.clone() for cache in self.paged.caches]

    def try_all(self) -> dict[str, Any]:
        from vllm.forward_context import get_forward_context

        found: dict[str, Any] = {"isa": self.engine._model.attentions[0].isa}
        for name, trial in TRIALS.items():

            def work(name: str = name, trial: Callable[[World], Any] = trial) -> None:
                outer = get_forward_context()
                found[name] = trial(self)
                found[f"{name}: context"] = get_forward_context() is outer and not self.engine.is_running
                self.put_back()

            self.within(work)
        found["local rows"] = self.try_local()
        self.llm.reset_prefix_cache()
        found["said after"] = [self.say(prompt) for prompt in self.prompts] == self.said
        return found

    def put_back(self) -> None:
        for slots, rows in zip(self.slots, self.true, strict=True):
            self.put(slots, rows)

    def try_local(self) -> bool:
        """A prompt that begins like the first: what the engine has already is read, and stays."""
        from kvservice.client.reuse.refresh import Prompt, refresh
        from kvservice.client.reuse.rows import classify
        from kvservice.client.reuse.selectors import exact

        prompt = self.prompts[0][:128] + self.prompts[1][:100]
        self.say(prompt)
        slots = self.slots_of(prompt)
        true, before = self.rows(slots), self.caches()
        is_shared = torch.equal(slots[:128], self.slots_of(self.prompts[0])[:128])
        self.wipe(slots[128:])
        member = Prompt(torch.tensor(prompt), slots, classify(len(prompt), [], local=128))
        self.within(lambda: assert_none(refresh(self.engine, member, exact()).picked))
        is_equal = all(map(torch.equal, self.rows(slots), true))
        return is_shared and is_equal and same_but(before, self.caches(), self.slots_of([3] * 5), self.paged)


def assert_none(picked: Tensor) -> None:
    assert not len(picked)


def same_but(before: list[Tensor], after: list[Tensor], slots: Tensor, paged: Any) -> bool:
    """Every byte of the caches is as it was, but at these slots."""
    for layer, (one, other) in enumerate(zip(before, after, strict=True)):
        zeros = torch.zeros((len(slots), paged.layouts[layer].row_elements), dtype=one.dtype)
        for cache in (one, other):
            paged.layouts[layer].scatter(cache, slots, (zeros, zeros))
        if not torch.equal(one, other):
            return False
    return True


def all_must(world: World) -> list[bool]:
    """Every row computed, one prompt after the other as the engine had them: the engine's own bits.

    What vLLM tells the connector meanwhile is known to be about our rows.
    """
    from kvservice.client.reuse.refresh import refresh
    from kvservice.client.reuse.selectors import exact

    found = []
    world.spy.HOOKS.clear()
    for number in (0, 1):
        world.wipe(world.slots[number])
        is_gone = not any(bool(planes.any()) for planes in world.rows(world.slots[number]))
        refresh(world.engine, world.member(number, exact()).prompt, exact())
        is_equal = all(map(torch.equal, world.rows(world.slots[number]), world.true[number]))
        found.append(is_gone and is_equal)
    told = 2 * (world.engine.layers - 1)  # in the last layer, which only stores, nothing attends
    return [*found, len(world.spy.HOOKS) == told and all(world.spy.HOOKS)]


def all_picked(world: World) -> bool:
    """Candidates that are right already, all computed again: first attended to, then written, always the same bits."""
    from kvservice.client.reuse.refresh import refresh
    from kvservice.client.reuse.selectors import hkvd

    one = world.member(0, hkvd(1))
    start, count = SPANS[0]
    world.wipe(torch.cat((world.slots[0][:start], world.slots[0][start + count :])))
    refresh(world.engine, one.prompt, one.selector)
    return all(map(torch.equal, world.rows(world.slots[0]), world.true[0]))


def beside_true_rows(world: World) -> float:
    """Nothing picked: rows before and behind right candidates come out right, but for rounding. Largest difference."""
    from kvservice.client.reuse.collective import refresh_round
    from kvservice.client.reuse.selectors import none

    members = [world.member(number, none()) for number in (0, 1)]
    for number, (start, count) in enumerate(SPANS):
        world.wipe(torch.cat((world.slots[number][:start], world.slots[number][start + count :])))
    refresh_round(world.engine, members)
    return max(distance(world.rows(slots), true) for slots, true in zip(world.slots, world.true, strict=True))


def distance(rows: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest relative difference of any layer's K or V."""
    pairs = [(one.float(), other.float()) for one, other in zip(rows, wanted, strict=True)]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def written_rows(world: World) -> dict[str, bool]:
    """What a refresh writes: from the check layer on the picked rows and those that must be, before it these alone."""
    from kvservice.client.reuse.refresh import refresh
    from kvservice.client.reuse.selectors import hkvd

    world.stale()
    one, before = world.member(0, hkvd(0.1)), world.caches()
    done = refresh(world.engine, one.prompt, one.selector)
    after, slots = world.caches(), world.slots[0]
    start, count = SPANS[0]
    must = torch.cat((slots[:start], slots[start + count :]))
    later = torch.cat((must, slots[done.picked]))
    rows, layers = world.rows(must), slice(1, None)
    foreign = [planes[:, done.picked - start + 10] for planes in world.true[1]]
    now = world.rows(slots[done.picked])
    return {
        "count": len(done.picked) == 11 and done.computed == len(later),
        "others before the check": same_but(before[:1], after[:1], must, world.paged),
        "others behind it": same_but(before[layers], after[layers], later, Part(world.paged, 1)),
        "must rows": all(bool(planes.flatten(2).any(2).all()) for planes in rows),
        "picked rows": all(bool((a != b).flatten(2).any(2).all()) for a, b in zip(now[1:], foreign[1:], strict=True)),
    }


class Part:
    """Layers of a paged memory from one on."""

    def __init__(self, paged: Any, first: int) -> None:
        self.layouts = paged.layouts[first:]


def round_is_one_by_one(world: World) -> dict[str, Any]:
    """Two prompts in one pass: bit for bit what each is by itself, and in joined calls the same but for rounding."""
    from kvservice.client.reuse.collective import refresh_round
    from kvservice.client.reuse.refresh import refresh
    from kvservice.client.reuse.selectors import head, hkvd

    found: dict[str, Any] = {}
    for name, selectors in (("hkvd", (hkvd(0.1), hkvd(0.2))), ("mixed", (hkvd(0.1), head(16)))):
        members = [world.member(number, selector) for number, selector in enumerate(selectors)]
        world.stale()
        alone = [refresh(world.engine, one.prompt, one.selector) for one in members]
        wanted, rows = world.caches(), [world.rows(slots) for slots in world.slots]
        world.stale()
        together = refresh_round(world.engine, members, is_deterministic=True)
        found[name] = all(map(torch.equal, world.caches(), wanted)) and all(
            torch.equal(one.picked, other.picked) for one, other in zip(alone, together, strict=True)
        )
        world.stale()
        refresh_round(world.engine, members)
        near = [distance(world.rows(slots), one) for slots, one in zip(world.slots, rows, strict=True)]
        found[f"{name}, joined"] = max(near)
    return found


def small_pieces(world: World) -> float:
    """As on a device whose buffers are small: the same, but for rounding. Largest difference."""
    from kvservice.client.connectors.vllm.round_engine import VllmEngine
    from kvservice.client.reuse.collective import refresh_round
    from kvservice.client.reuse.selectors import head

    members = [world.member(number, head(16)) for number in (0, 1)]
    world.stale()
    refresh_round(world.engine, members)
    rows = [world.rows(slots) for slots in world.slots]
    model = replace(world.engine._model, rows_max=37, runs_max=2)
    world.stale()
    refresh_round(VllmEngine(model, world.paged), members)
    return max(distance(world.rows(slots), one) for slots, one in zip(world.slots, rows, strict=True))


def failures(world: World) -> dict[str, bool]:
    """A layer that raises, slots that are no blocks: both are told, and leave nothing behind."""
    from kvservice.client.reuse.engine import Rows
    from kvservice.model.errors import SlotError

    engine, model, before = world.engine, world.engine._model, world.caches()
    rows, is_written = Rows.at(torch.arange(200), world.slots[0]), torch.ones(200, dtype=torch.bool)
    hidden = engine.embed(torch.tensor(world.prompts[0]))
    model.layers[0].self_attn.forward = planted
    raised = [
        is_raised(RuntimeError, call, 0, hidden, rows)
        for call in (engine.probe, lambda *a: engine.run_layer(*a, is_written))
    ]
    del model.layers[0].self_attn.forward
    wrong = Rows.at(torch.arange(200), world.slots[0].flip(0))
    return {
        "raised": all(raised) and not engine.is_running and not model.attentions[0]._forward_pre_hooks,
        "slots": is_raised(SlotError, engine.run_layer, 0, hidden, wrong, is_written),
        "untouched": all(map(torch.equal, before, world.caches())),
    }


def planted(*arguments: Any, **words: Any) -> Any:
    raise RuntimeError("planted by the test")


def is_raised(kind: type[Exception], call: Callable[..., Any], *arguments: Any) -> bool:
    try:
        call(*arguments)
    except kind:
        return True
    return False


def refused(world: World) -> dict[str, Any]:
    """Models whose own forward pass is more than their layers: why each is refused, and that nothing was changed."""
    from kvservice.client.connectors.vllm.round_engine import NoRefreshError, VllmEngine

    spy, before = world.spy.FOUND, world.caches()
    model = world.engine._model
    pointers = [attention.kv_cache.data_ptr() for attention in model.attentions]

    def why() -> str:
        try:
            VllmEngine.of(spy["runner"], spy["config"], world.paged)
        except NoRefreshError as error:
            return str(error)
        return ""

    reasons = {"as it is": why()}
    for name, change in CHANGES.items():
        undo = change(model)
        reasons[name] = why()
        undo()
    is_same = [attention.kv_cache.data_ptr() for attention in model.attentions] == pointers
    is_untouched = is_same and all(map(torch.equal, before, world.caches()))
    return {**reasons, "again": why(), "untouched": is_untouched}


def _scaled_between(model: Any) -> Callable[[], None]:
    """The model doubles states between its layers, as some do with the embedding."""
    inner, original = model.inner, type(model.inner).forward

    def forward(ids: Tensor, positions: Tensor, between: Any = None, inputs_embeds: Any = None) -> Any:
        return original(inner, ids, positions, between, inputs_embeds=2 * inner.embed_input_ids(ids))

    inner.forward = forward
    return lambda: delattr(inner, "forward")


def _stores_all(model: Any) -> Callable[[], None]:
    """The write operation does not know of rows without a slot."""
    impl = model.attentions[0].impl
    original = impl.do_kv_cache_update
    impl.do_kv_cache_update = lambda module, k, v, cache, slots: original(module, k, v, cache, slots.clamp(min=0))
    return lambda: delattr(impl, "do_kv_cache_update")


def _raises(model: Any) -> Callable[[], None]:
    model.layers[1].mlp.forward = planted
    return lambda: delattr(model.layers[1].mlp, "forward")


CHANGES: Mapping[str, Callable[[Any], Callable[[], None]]] = {
    "scaled": _scaled_between,
    "stores all": _stores_all,
    "raises": _raises,
}

TRIALS: Mapping[str, Callable[[World], Any]] = {
    "all must": all_must,
    "all picked": all_picked,
    "beside true rows": beside_true_rows,
    "written rows": written_rows,
    "round": round_is_one_by_one,
    "pieces": small_pieces,
    "failures": failures,
    "refused": refused,
}

if __name__ == "__main__":
    main()
