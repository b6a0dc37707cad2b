"""Finding vLLM's runner and its layers, without vLLM: who is found, who is refused and with which words."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvservice.client.connectors.vllm import plugin
from kvservice.client.connectors.vllm.engine_layers import EngineLayers
from kvservice.client.connectors.vllm.layout import BlockLayout
from kvservice.client.connectors.vllm.paged import EnginePaged
from kvservice.client.connectors.vllm.plugin import NoEngineModelError, find_runner, watch
from kvservice.client.connectors.vllm.round_engine import NoRefreshError, VllmEngine, _block_tables, _run_starts
from kvservice.client.reuse.engine import Rows
from kvservice.model.errors import SlotError
from kvservice.model.geometry import attention_geometry

LAYERS, BLOCKS, UNIT, ROW = 2, 3, 4, 8


class Worker:
    """As vLLM's: the runner comes some time after the worker was built."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.model_runner: Any = None

    def register(self, kv_caches: dict[str, torch.Tensor] | None) -> Any:
        return find_runner(kv_caches)


class SpecialWorker(Worker):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)


def runner_of(*caches: torch.Tensor) -> Any:
    modules = {str(number): SimpleNamespace(kv_cache=cache) for number, cache in enumerate(caches)}
    return SimpleNamespace(
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=modules))
    )


@pytest.fixture(autouse=True)
def _nobody_seen() -> Iterator[None]:
    before = plugin._workers[:]
    plugin._workers.clear()
    yield
    plugin._workers[:] = before


def watched() -> type[Worker]:
    """A class of its own, watched twice as vLLM calls a plugin more than once."""

    class Watched(SpecialWorker):
        def __init__(self, rank: int = 0) -> None:
            super().__init__(rank)

    for _ in range(2):
        watch(Watched)
    return Watched


def test_the_plugins_worker_is_found_once_it_has_a_runner() -> None:
    worker = watched()(7)
    assert (worker.rank, len(plugin._workers)) == (7, 1)
    with pytest.raises(NoEngineModelError):
        find_runner()
    worker.model_runner = runner_of()
    assert find_runner() is worker.model_runner


def test_a_subclass_of_the_watched_class_is_seen() -> None:
    base = watched()
    worker = type("Below", (base,), {})(1)
    worker.model_runner = runner_of()
    assert find_runner() is worker.model_runner


def test_the_plugin_keeps_no_worker_alive() -> None:
    worker = watched()()
    worker.model_runner = runner_of()
    del worker
    gc.collect()
    with pytest.raises(NoEngineModelError, match="of 1 workers seen"):
        find_runner()
    watched()()
    assert len(plugin._workers) == 1, "the dead one is forgotten"


def test_of_two_runners_the_one_that_owns_the_caches_is_found() -> None:
    kind, caches = watched(), [torch.zeros(1), torch.zeros(1)]
    workers = [kind(), kind()]
    for worker, cache in zip(workers, caches, strict=True):
        worker.model_runner = runner_of(cache)
    for worker, cache in zip(workers, caches, strict=True):
        assert find_runner({"0": cache}) is worker.model_runner
    with pytest.raises(NoEngineModelError, match="none has these KV caches"):
        find_runner({"0": torch.zeros(1)})
    with pytest.raises(NoEngineModelError):
        find_runner({"other name": caches[0]})


def test_without_the_plugin_a_callers_runner_is_found() -> None:
    worker, cache = Worker(), torch.zeros(1)
    with pytest.raises(NoEngineModelError):
        worker.register(None)
    worker.model_runner = runner_of(cache)
    assert worker.register(None) is worker.model_runner
    assert worker.register({"0": cache}) is worker.model_runner
    with pytest.raises(NoEngineModelError):
        worker.register({"0": torch.zeros(1)})


def test_the_plugin_is_light_and_does_no_harm_without_vllm() -> None:
    script = (
        "import sys; from kvservice.client.connectors.vllm import plugin; plugin.register();"
        "print(*[name for name in ('numba', 'torch', 'kvservice.kernels') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# ---------------------------------------------------------------------- layers


class Layer:
    """Called like all standard ones."""

    def __init__(self, attention: Any) -> None:
        self.self_attn = SimpleNamespace(attn=attention)

    def forward(self, positions: Any, hidden_states: Any, residual: Any, **words: Any) -> Any:
        raise NotImplementedError


class OtherLayer(Layer):
    def forward(self, hidden_states: Any, positions: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


class ScaledLayer(Layer):
    def forward(self, positions: Any, hidden_states: Any, residual: Any, scale: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


@dataclass
class Builder:
    """Of attention metadata."""

    kv_cache_spec: Any
    layer_names: Any
    vllm_config: Any
    device: Any


@dataclass
class Parts:
    """An engine as far as it is looked at before anything is called."""

    runner: Any
    config: Any
    paged: EnginePaged

    def layers(self) -> EngineLayers:
        return EngineLayers.of(self.runner, self.config, self.paged)


def parts() -> Parts:
    caches = [torch.zeros(BLOCKS, UNIT, 2 * ROW, dtype=torch.bfloat16) for _ in range(LAYERS)]
    perm = torch.arange(UNIT)[:, None] * 2 * ROW + torch.arange(ROW)
    layout = BlockLayout(perm, perm + ROW, UNIT * 2 * ROW)
    geometry = attention_geometry(layers=LAYERS, heads=2, head_size=ROW // 2, dtype="bfloat16", rotary_size=0)
    paged = EnginePaged(caches, [layout] * LAYERS, {"0": 0, "1": 1}, UNIT, geometry)
    attentions = [SimpleNamespace(layer_name=str(number), kv_cache=cache) for number, cache in enumerate(caches)]
    inner = SimpleNamespace(layers=[Layer(one) for one in attentions], embed_input_ids=len)
    builder = Builder("spec", ["0", "1"], "config", "cpu")
    group = SimpleNamespace(kernel_block_size=None, get_metadata_builder=lambda: builder)
    runner = SimpleNamespace(model=SimpleNamespace(model=inner), attn_groups=[[group]])
    sizes = ("tensor", "pipeline", "data", "decode_context", "prefill_context")
    parallel = SimpleNamespace(**{f"{name}_parallel_size": 1 for name in sizes})
    parallel.data_parallel_size, parallel.is_moe_model = 1, None
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_multimodal_model=False),
        parallel_config=parallel,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4),
        speculative_config=None,
        lora_config=None,
    )
    return Parts(runner, config, paged)


def test_a_standard_engine_is_taken_as_it_is() -> None:
    engine = parts()
    found = engine.layers()
    assert found.inner is engine.runner.model.model
    assert [attention.layer_name for attention in found.attentions] == ["0", "1"]
    shared = engine.runner.attn_groups[0][0].get_metadata_builder()
    assert found.builder == shared
    assert found.builder is not shared, "what the step under way has built in it would be lost"
    assert (found.rows_max, found.runs_max) == (0, 0), "no limits on a CPU"


@pytest.mark.parametrize(
    ("where", "name", "value", "words"),
    [
        ("parallel_config", "tensor_parallel_size", 2, "tensor parallelism"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline parallelism"),
        ("parallel_config", "decode_context_parallel_size", 2, "decode context"),
        ("parallel_config", "data_parallel_size", 2, "data parallelism"),
        ("parallel_config", "enable_eplb", True, "load balancing"),
        ("model_config", "is_multimodal_model", True, "multimodal"),
        ("model_config", "uses_mrope", True, "M-RoPE"),
        ("", "speculative_config", object(), "drafter"),
        ("", "lora_config", object(), "LoRA"),
    ],
)
def test_engines_that_do_more_are_refused_by_name(where: str, name: str, value: Any, words: str) -> None:
    engine = parts()
    setattr(getattr(engine.config, where) if where else engine.config, name, value)
    with pytest.raises(NoRefreshError, match=words):
        engine.layers()


def test_dense_models_may_run_side_by_side() -> None:
    engine = parts()
    engine.config.parallel_config.data_parallel_size = 2
    engine.config.parallel_config.is_moe_model = False
    assert engine.layers().layers


def _no_layers(engine: Parts) -> None:
    engine.runner.model = SimpleNamespace(model=SimpleNamespace())


def _no_embedding(engine: Parts) -> None:
    del engine.runner.model.model.embed_input_ids


def _no_attention(engine: Parts) -> None:
    engine.runner.model.model.layers[1].self_attn = SimpleNamespace(mla_attn=object())


def _other_call(engine: Parts) -> None:
    engine.runner.model.model.layers[1] = OtherLayer(None)


def _more_needed(engine: Parts) -> None:
    engine.runner.model.model.layers[0] = ScaledLayer(None)


def _two_groups(engine: Parts) -> None:
    engine.runner.attn_groups = [engine.runner.attn_groups[0], engine.runner.attn_groups[0]]


def _two_kinds(engine: Parts) -> None:
    engine.runner.attn_groups = [engine.runner.attn_groups[0] * 2]


def _other_runner(engine: Parts) -> None:
    del engine.runner.attn_groups


def _packed(engine: Parts) -> None:
    engine.runner.attn_groups[0][0].kernel_block_size = 2


def _shared(engine: Parts) -> None:
    engine.runner.model.model.layers[1].self_attn.attn.kv_sharing_target_layer_name = "0"


def _encoder(engine: Parts) -> None:
    engine.runner.model.model.layers[1].self_attn.attn.attn_type = "encoder_only"


def _swapped(engine: Parts) -> None:
    engine.runner.model.model.layers.reverse()


def _other_cache(engine: Parts) -> None:
    attention = engine.runner.model.model.layers[1].self_attn.attn
    attention.kv_cache = attention.kv_cache.clone()


def _fewer(engine: Parts) -> None:
    del engine.runner.model.model.layers[1]


def _unknown(engine: Parts) -> None:
    del engine.config.scheduler_config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_no_layers, r"has no \.model\.layers"),
        (_no_embedding, r"has no \.model\.embed_input_ids"),
        (_no_attention, r"layer 1 \(Layer\) has no \.self_attn\.attn"),
        (_other_call, r"layer 1 \(OtherLayer\) is called with \(hidden_states, positions\)"),
        (_more_needed, r"layer 0 \(ScaledLayer\) is called with .*scale"),
        (_two_groups, "2 groups of KV layers"),
        (_two_kinds, "1 groups of KV layers with 2 kinds of attention"),
        (_other_runner, "attn_groups"),
        (_packed, "smaller"),
        (_shared, "layer 1 .* reads the KV of 0"),
        (_encoder, "attention of type encoder_only"),
        (_swapped, "layer 0 attends to other KV"),
        (_other_cache, "layer 1 attends to other KV"),
        (_fewer, "2 layers hold KV, 1 are called"),
        (_unknown, "not understood"),
    ],
)
def test_models_that_are_built_otherwise_are_refused_by_name(change: Any, words: str) -> None:
    engine = parts()
    change(engine)
    with pytest.raises(NoRefreshError, match=words):
        engine.layers()


# ---------------------------------------------------------------------- rows as sequences


def slots_in(*blocks: int) -> torch.Tensor:
    return (torch.tensor(blocks)[:, None] * UNIT + torch.arange(UNIT)).flatten()


def two_prompts() -> Rows:
    """The second one's rows begin at the position behind the first one's last: neighbours they are not."""
    one = Rows.at(torch.tensor([0, 1, 5, 6, 9]), slots_in(7, 2, 5, 9)[:14])
    empty = Rows.at(torch.tensor([], dtype=torch.int64), slots_in(4))
    behind = Rows.at(torch.tensor([10, 11]), torch.cat((slots_in(1, 3, 8), torch.full((3,), -1))))
    return Rows.join([one, empty, behind])


def test_runs_of_neighbours_are_sequences_over_their_prompts_blocks() -> None:
    assert _run_starts(two_prompts()).tolist() == [0, 2, 4, 5]
    assert _block_tables(two_prompts(), UNIT).tolist() == [[7, 2, 5], [0, 0, 0], [1, 3, 8]], (
        "no block behind a prompt's last row"
    )


def test_slots_that_are_no_whole_blocks_are_refused() -> None:
    slots = slots_in(7, 2)
    for wrong in (slots + 1, slots.flip(0), torch.cat((slots[:UNIT], torch.full((UNIT,), -1)))):
        with pytest.raises(SlotError, match="whole blocks of 4"):
            _block_tables(Rows.at(torch.arange(6), wrong), UNIT)


def test_block_tables_are_made_once_for_rows_and_forgotten_with_them() -> None:
    engine = parts()
    ours, rows = VllmEngine(engine.layers(), engine.paged), two_prompts()
    made = ours._block_tables(rows)
    assert ours._block_tables(rows) is made
    assert ours._block_tables(rows.take(torch.arange(3))) is not made, "other rows have other last ones"
    del rows
    gc.collect()
    assert not ours._tables


@pytest.mark.parametrize(
    ("rows_max", "runs_max", "ends"),
    [(0, 0, [7]), (100, 100, [7]), (3, 0, [3, 6, 7]), (0, 1, [2, 4, 5, 7]), (0, 3, [5, 7]), (4, 2, [4, 7])],
)
def test_calls_are_cut_as_a_device_needs_it(rows_max: int, runs_max: int, ends: list[int]) -> None:
    engine = parts()
    model = replace(engine.layers(), rows_max=rows_max, runs_max=runs_max)
    cuts = VllmEngine(model, engine.paged)._cuts(two_prompts())
    assert [cut.stop for cut in cuts] == ends
    assert [cut.start for cut in cuts] == [0, *ends[:-1]]


def test_rows_are_read_and_written_in_the_engines_blocks() -> None:
    engine = parts()
    attentions = [
        SimpleNamespace(**vars(one), num_kv_heads=2, head_size=ROW // 2) for one in engine.layers().attentions
    ]
    ours = VllmEngine(replace(engine.layers(), attentions=tuple(attentions)), engine.paged)
    slots = torch.tensor([9, 2, 5])
    planes = tuple(torch.randn(2, 3, 2, ROW // 2).to(torch.bfloat16))
    ours.write_rows(1, slots, planes)
    assert all(map(torch.equal, ours.read_rows(1, slots), planes))
    assert not engine.paged.caches[0].any()
    assert int((engine.paged.caches[1] != 0).any(2).sum()) == 3
    assert torch.equal(engine.paged.caches[1][2, 1, :ROW], planes[0][0].flatten())
