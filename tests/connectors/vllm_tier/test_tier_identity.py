"""Whose rows are whose: all that decides a row's bytes is in its identity, or the rows are not shared."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvservice.client.connectors.vllm_tier.__main__ import identity_options
from kvservice.client.connectors.vllm_tier.identity import EngineFormat, after_reset, row_identity
from kvservice.client.connectors.vllm_tier.options import TierOptions
from kvservice.model.errors import ConfigError
from kvservice.model.identity import Identity, identity_from_json
from tests.connectors.test_engine_identity import make_engine, make_text_config
from tests.connectors.vllm_tier.tier_world import FORM, ROW_BYTES, SHARED, make_config

CANONICAL = EngineFormat("0.32", "cuda", "v1-hnd")


def identity(
    engine: Any = None, options: Mapping[str, object] | None = None, *, form: EngineFormat = FORM, size: int = ROW_BYTES
) -> Identity:
    made = TierOptions.of({"address": "unix:/s", **SHARED, **(options or {})})
    return row_identity(engine or make_config(), size, made, form)


def group(**changes: Any) -> Any:
    values = {"tokens_per_block": 16, "layer_names": ("model.layers.0", "model.layers.1"), "group_id": 0}
    return SimpleNamespace(**{**values, **changes})


def test_equal_engines_have_equal_identities_whatever_they_are_called() -> None:
    one, other = make_config(), make_config(engine_id="e2", data_parallel_index=1)
    assert identity(one).namespace() == identity(other).namespace()
    assert identity(one).geometry.token_bytes == ROW_BYTES
    assert identity_from_json(identity(one).canonical_json()) == identity(one)


@pytest.mark.parametrize(
    "changed",
    [
        make_config(name="org/other"),
        make_config(dtype="float16"),
        make_config(tokens_per_hash=8),
        make_config(blocks_per_chunk=4),
        make_config(worker_kv_bytes_per_block=6144),
        make_config(tp_size=4, world_size=4),
        make_config(pp_size=2),
        make_config(dcp_size=2),
        make_config(pcp_size=2),
        make_config(kv_cache_layout="BLHNC"),
        make_config(replicated_layout=True),
        make_config(groups=(group(tokens_per_block=32),)),
        make_config(groups=(group(layer_names=("model.layers.0", "model.layers.2")),)),
        make_config(groups=(group(group_id=1),)),
        make_config(groups=(group(sliding_window_size_in_chunks=4),)),
        make_config(groups=(group(), group(group_id=1))),
    ],
    ids=lambda config: "",
)
def test_what_vllm_says_is_in_the_identity(changed: Any) -> None:
    assert identity(changed).namespace() != identity().namespace()


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "r2"},
        {"config": "c2"},
        {"quantization": "awq"},
        {"tenant": "other"},
        {"model": "other"},
        {"layout": "flashinfer"},
        {"kv_scales": "checkpoint"},
        {"is_shared": False},
    ],
    ids=str,
)
def test_what_the_user_says_is_in_the_identity(options: dict[str, Any]) -> None:
    assert identity(options=options).namespace() != identity().namespace()


@pytest.mark.parametrize("form", [EngineFormat("0.33", "cuda"), EngineFormat("0.32", "cpu"), CANONICAL], ids=str)
def test_the_order_of_the_bytes_is_in_the_identity(form: EngineFormat) -> None:
    assert identity(form=form).namespace() != identity().namespace()
    assert identity(size=ROW_BYTES + 4096).namespace() != identity().namespace()


def test_canonical_rows_do_not_depend_on_ranks_where_vllm_says_so() -> None:
    def namespace(tp_size: int, *, is_portable: bool, form: EngineFormat = CANONICAL) -> bytes:
        block = 6144 // tp_size
        engine = make_config(
            tp_size=tp_size,
            world_size=tp_size,
            worker_kv_bytes_per_block=block,
            is_parallelism_agnostic=is_portable,
            canonical_layout=True,
        )
        return identity(engine, form=form).namespace()

    assert namespace(1, is_portable=True) == namespace(2, is_portable=True)
    assert namespace(1, is_portable=False) != namespace(2, is_portable=False)
    assert namespace(1, is_portable=True, form=FORM) != namespace(2, is_portable=True, form=FORM), "not in this layout"
    later = EngineFormat("0.33", "cuda", "v1-hnd")
    assert namespace(1, is_portable=True) == namespace(1, is_portable=True, form=later), "vLLM versions it"


@pytest.mark.parametrize("missing", list(SHARED))
def test_what_vllm_does_not_tell_must_be_given_to_share(missing: str) -> None:
    with pytest.raises(ConfigError) as raised:
        identity(options={missing: ""})
    text = str(raised.value)
    assert f"does not tell a tier its {missing};" in text
    assert "python -m kvservice.client.connectors.vllm_tier --model" in text
    assert '"is_shared": false' in text


def test_a_private_tier_needs_nothing_and_shares_with_nobody() -> None:
    bare: dict[str, object] = {"weights": "", "config": "", "quantization": "", "is_shared": False}
    one, other = identity(options=bare), identity(make_config(engine_id="e2"), bare)
    assert one.namespace() != other.namespace()
    assert identity(make_config(dtype="fp8"), bare).kv_scales == "none"


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "int8", "nvfp4"])
def test_small_types_need_to_say_where_their_scales_are(dtype: str) -> None:
    engine = make_config(dtype=dtype)
    with pytest.raises(ConfigError, match="means nothing without its scales"):
        identity(engine)
    assert identity(engine, {"kv_scales": "checkpoint"}).kv_scales == "checkpoint"


def test_a_local_folder_counts_by_its_last_name(tmp_path: Path) -> None:
    for machine in ("one", "two"):
        (tmp_path / machine / "llama").mkdir(parents=True)
    one, two = (make_config(name=str(tmp_path / machine / "llama")) for machine in ("one", "two"))
    assert identity(one).model == "llama"
    assert identity(one).namespace() == identity(two).namespace()


def test_every_reset_makes_a_namespace_of_its_own() -> None:
    first = after_reset(identity())
    second = after_reset(first)
    assert len({one.namespace() for one in (identity(), first, second)}) == 3
    assert len(second.salt) == len(first.salt), "it does not grow"


def test_the_helper_says_what_the_connector_would() -> None:
    engine = make_engine()
    options = identity_options(engine.model_config, engine.load_config)
    assert options["weights"] == "c0ffee"
    assert options["quantization"] == "none"
    text = make_text_config(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    changed = make_engine(text)
    assert identity_options(changed.model_config, changed.load_config)["config"] != options["config"]
    quantized = make_engine(quantization="awq")
    assert identity_options(quantized.model_config, quantized.load_config)["quantization"] == "awq"
