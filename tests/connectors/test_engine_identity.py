"""Identities from an engine's configuration: what is in them, and what is refused with which words."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvservice.client.connectors.vllm.engine_identity import EngineModel, engine_identities
from kvservice.client.connectors.vllm.options import ConnectorOptions
from kvservice.model.identity import Shard

CONFIG = {
    "num_hidden_layers": 12,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


class FullAttentionSpec(SimpleNamespace):
    """Stands for vLLM's class of this name, by which it is known."""


class SlidingWindowSpec(SimpleNamespace):
    """Stands for vLLM's class of this name."""


def make_text_config(**changes: object) -> Any:
    values = {**CONFIG, **changes}
    return SimpleNamespace(**values, to_dict=lambda: values)


def make_spec(**changes: Any) -> Any:
    values = {"num_kv_heads": 2, "head_size": 16, "head_size_v": 16, "dtype": torch.bfloat16, "non_causal": False}
    return FullAttentionSpec(**{**values, "tokens_per_state": 1, **changes})


def make_engine(text: Any = None, **changes: object) -> Any:
    model: dict[str, object] = {
        "model": "org/name",
        "revision": None,
        "hf_config_path": None,
        "hf_config": SimpleNamespace(architectures=["LlamaForCausalLM"], model_type="llama", _commit_hash="c0ffee"),
        "hf_text_config": text or make_text_config(),
        "hf_overrides": {},
        "quantization": None,
        "dtype": torch.bfloat16,
        "use_mla": False,
        "is_hybrid": False,
        "is_encoder_decoder": False,
        "runner_type": "generate",
        "get_total_num_hidden_layers": lambda: 12,
    }
    parallel: dict[str, object] = {
        "rank": 0,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    rest: dict[str, object] = {"cache_dtype": "auto", "load_format": "auto", "speculative_config": None}
    for values in (model, parallel, rest):
        values.update({name: value for name, value in changes.items() if name in values})
    assert changes.keys() <= {*model, *parallel, *rest}, "a misspelt change tests nothing"
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(cache_dtype=rest["cache_dtype"], kv_cache_dtype_skip_layers=[]),
        load_config=SimpleNamespace(load_format=rest["load_format"]),
        kv_transfer_config=SimpleNamespace(engine_id="e1"),
        speculative_config=rest["speculative_config"],
    )


def make_groups(spec: Any = None, *, count: int = 1, layers: int = 12) -> Any:
    names = [f"model.layers.{layer}.self_attn.attn" for layer in sorted(range(layers), key=str)]
    group = SimpleNamespace(kv_cache_spec=spec or make_spec(), layer_names=names)
    return SimpleNamespace(kv_cache_groups=[group] * count)


def identities(engine: Any = None, groups: Any = None, **options: object) -> EngineModel:
    made = ConnectorOptions.of({"address": "unix:/s", **options}, 16)
    return engine_identities(engine or make_engine(), groups or make_groups(), made)


def namespace(engine: Any = None, groups: Any = None, **options: object) -> bytes:
    found = identities(engine, groups, **options)
    assert not found.refusal
    return found.identity.namespace()


def test_a_plain_engine_has_one_identity() -> None:
    found = identities()
    assert found.refusal == ""
    identity = found.identity
    assert (identity.tenant, identity.model, identity.weights) == ("default", "org/name", "c0ffee")
    assert identity.geometry.layers == len(identity.rope) == 12
    assert [(plane.heads, plane.head_size, plane.rotary_size) for plane in identity.geometry.planes] == [
        (2, 16, 16),
        (2, 16, 0),
    ]
    assert identity.pinned_reason == ""


def test_layers_are_in_order_of_their_numbers() -> None:
    names = identities().layer_names
    assert names == tuple(f"model.layers.{layer}.self_attn.attn" for layer in range(12))


def test_tensor_ranks_have_identities_of_their_own() -> None:
    found = identities(make_engine(tensor_parallel_size=2, rank=1))
    assert [one.shard for one in found.identities] == [Shard(0, 2), Shard(1, 2)]
    assert found.identity is found.identities[1]
    assert len({one.namespace() for one in found.identities}) == 2


def split_layers(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> EngineModel:
    """An engine of pipeline ranks with so many layers, seen from the second."""
    ends = [sum(sizes[: rank + 1]) for rank in range(len(sizes))]
    module = SimpleNamespace(get_pp_indices=lambda total, rank, ranks: (ends[rank] - sizes[rank], ends[rank]))
    monkeypatch.setitem(sys.modules, "vllm.distributed.utils", module)
    groups = make_groups(layers=sizes[1])
    return identities(make_engine(pipeline_parallel_size=len(sizes), tensor_parallel_size=2, rank=2), groups)


def test_pipeline_ranks_hold_their_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = split_layers(monkeypatch, 5, 7)
    assert found.refusal == ""
    assert [one.shard for one in found.identities] == [Shard(t, 2, p, 2) for p in range(2) for t in range(2)]
    assert [one.geometry.layers for one in found.identities] == [5, 5, 7, 7]
    assert found.identity.shard == Shard(0, 2, 1, 2)


def test_ranks_with_as_many_but_other_layers_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = split_layers(monkeypatch, 2, 4, 6), split_layers(monkeypatch, 4, 4, 4)
    assert one.identity.geometry == other.identity.geometry
    assert one.identity.namespace() != other.identity.namespace()


def rope_of(**parameters: object) -> Any:
    return make_engine(make_text_config(rope_parameters={"rope_theta": 10000.0, **parameters}))


def test_what_decides_kv_decides_the_namespace() -> None:
    """Kinds that have no descriptor of their own are told apart too: the salt holds their parameters."""
    engines = [
        make_engine(),
        make_engine(dtype=torch.float16),
        make_engine(quantization="fp8"),
        make_engine(model="org/other"),
        make_engine(make_text_config(sliding_window=128)),
        make_engine(make_text_config(experts=4), hf_overrides={"experts": 4}),
        make_engine(make_text_config(experts=2), hf_overrides={"experts": 2}),
        rope_of(rope_type="default", rope_theta=5000.0),
        rope_of(rope_type="dynamic", factor=2.0),
        rope_of(rope_type="dynamic", factor=4.0),
        rope_of(rope_type="brand-new", wave=1.0),
        rope_of(rope_type="brand-new", wave=2.0),
    ]
    assert len({namespace(engine) for engine in engines}) == len(engines)


@pytest.mark.parametrize(
    "options", [{"tenant": "t"}, {"model": "m"}, {"weights": "w"}, {"is_shared": False}, {"lossy": "int8"}]
)
def test_options_that_separate(options: Mapping[str, object]) -> None:
    assert namespace(**options) != namespace()


def test_options_that_do_not_separate() -> None:
    assert namespace(chunk_tokens=32, is_async=False, load_deadline_s=1) == namespace()


def test_rope_kinds_that_cannot_move_are_pinned_and_used_exactly() -> None:
    found = identities(make_engine(make_text_config(rope_parameters={"rope_type": "brand-new", "rope_theta": 1e4})))
    assert found.refusal == ""
    assert "brand-new" in found.identity.pinned_reason


def test_a_revision_that_vllm_resolved_goes_before_the_configs() -> None:
    class Resolved(str):
        resolved = "beef"
        __slots__ = ()

    assert identities(make_engine(revision=Resolved("main"))).identity.weights == "beef"


def test_a_local_folder_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    for name, value in (("here", 1.0), ("there", 1.0), ("other", 2.0)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.full((64, 64), value)}, tmp_path / name / "model.safetensors")
    here, there, other = (namespace(make_engine(model=str(tmp_path / name))) for name in ("here", "there", "other"))
    assert here == there != other
    found = identities(make_engine(model=str(tmp_path / "here"))).identity
    assert found.model == "LlamaForCausalLM"
    assert found.weights.startswith("files:")


DRAFTER = SimpleNamespace(method="eagle")
UNKNOWN = SimpleNamespace(architectures=[], model_type="llama")


@pytest.mark.parametrize(
    ("engine", "groups", "says"),
    [
        (make_engine(use_mla=True), None, "MLA"),
        (make_engine(is_hybrid=True), None, "hybrid"),
        (make_engine(is_encoder_decoder=True), None, "encoder-decoder"),
        (make_engine(runner_type="pooling"), None, "pooling"),
        (make_engine(decode_context_parallel_size=2), None, "context parallelism"),
        (make_engine(cache_dtype="fp8_e5m2"), None, "--kv-cache-dtype auto"),
        (make_engine(speculative_config=DRAFTER), None, "eagle"),
        (make_engine(load_format="dummy"), None, '"weights"'),
        (make_engine(hf_config=UNKNOWN), None, '"weights"'),
        (make_engine(hf_config_path="org/elsewhere"), None, '"weights"'),
        (make_engine(make_text_config(num_kv_shared_layers=2)), None, "shares KV"),
        (None, make_groups(count=2), "hybrid"),
        (None, make_groups(layers=10), "10 attention layers hold KV, the model has 12"),
        (None, make_groups(SlidingWindowSpec(head_size=16)), "SlidingWindowSpec"),
        (None, make_groups(make_spec(non_causal=True)), "causal"),
        (None, make_groups(make_spec(head_size_v=8)), "differ in size"),
        (None, make_groups(make_spec(dtype=torch.uint8)), "uint8"),
        (None, SimpleNamespace(), "not understood"),
    ],
)
def test_what_cannot_be_reused_is_refused_in_one_line(engine: Any, groups: Any, says: str) -> None:
    found = identities(engine, groups)
    assert says in found.refusal
    assert "\n" not in found.refusal
    assert found.identities == ()


def test_weights_that_are_not_known_can_be_given_or_kept_private() -> None:
    engine = make_engine(load_format="dummy")
    assert identities(engine, weights="mine-1").identity.weights == "mine-1"
    assert identities(engine, is_shared=False).identity.weights == "private:e1"


def test_a_drafter_without_kv_is_no_hindrance() -> None:
    assert identities(make_engine(speculative_config=SimpleNamespace(method="ngram"))).refusal == ""
