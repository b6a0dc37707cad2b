"""Learns block layouts of real attention modules and checks them; run by test_layout.py, one process a leg.

    layout_leg.py '{"model": folder or null, "kinds": [[dtype, block size, heads, head size]], "without_amx": false}'

With a model: a whole engine, its own KV tensors and modules. Without: the backend's write operation by itself, once for
every kind. Prints one line of JSON behind a mark.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch

MARK = "LAYOUT-LEG-RESULT "


def main() -> None:
    leg = json.loads(sys.argv[1])
    if leg["without_amx"]:
        torch.cpu._is_amx_tile_supported = lambda: False
    found = _of_engine(leg["model"]) if leg["model"] else [_of_kind(*kind) for kind in leg["kinds"]]
    sys.stdout.write(f"{MARK}{json.dumps(found)}\n")


def _of_kind(dtype: str, block_size: int, heads: int, head_size: int) -> dict[str, Any]:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, _get_attn_isa

    impl = CPUAttentionBackendImpl.__new__(CPUAttentionBackendImpl)  # its constructor wants a whole engine
    impl.attn_type, impl.kv_cache_dtype = "decoder", "auto"
    kind = getattr(torch, dtype)
    isa = _get_attn_isa(kind, block_size, head_size, "auto")
    module = SimpleNamespace(
        impl=impl, isa=isa, num_kv_heads=heads, head_size=head_size, _k_scale_float=1.0, _v_scale_float=1.0
    )
    return {"isa": isa, **_check(module, torch.zeros(6, heads, block_size, 2 * head_size, dtype=kind))}


def _of_engine(model: str) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    from kvservice.client.connectors.vllm.engine_identity import engine_identities
    from kvservice.client.connectors.vllm.layout import learn_layouts
    from kvservice.client.connectors.vllm.options import ConnectorOptions

    llm = LLM(model=model, enforce_eager=True, dtype="bfloat16", block_size=32, max_model_len=512,
              kv_cache_memory_bytes=16 << 20, skip_tokenizer_init=True)  # fmt: skip
    prompt = {"prompt_token_ids": list(range(5, 105))}
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False))
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    config = runner.vllm_config
    options = ConnectorOptions.of({"address": "unix:/none"}, 32)
    engine = engine_identities(config, runner.kv_cache_config, options)
    assert not engine.refusal, engine.refusal
    modules = config.compilation_config.static_forward_context
    caches = {name: modules[name].kv_cache for name in engine.layer_names}
    layouts = learn_layouts(modules, caches)
    first = [int((layouts[name].perm_k != layouts[engine.layer_names[0]].perm_k).sum()) for name in caches]
    found = []
    for name, cache in caches.items():
        found.append({"isa": modules[name].isa, "name": name, **_check(modules[name], cache), "others": sum(first)})
    found[0] |= {"namespace": engine.identity.namespace().hex(), "weights": engine.identity.weights}
    return found


def _check(module: Any, cache: torch.Tensor) -> dict[str, Any]:
    """Rows of any bits, blocks out of order, first and last partial; then the same as whole blocks."""
    from kvservice.client.connectors.vllm.layout import learn_layout

    before = cache.clone()
    layout = learn_layout(module, cache)
    is_untouched = torch.equal(_bits(before), _bits(cache))
    size = layout.block_size
    several = torch.tensor([*range(3 * size + 5, 4 * size), *range(size, 2 * size), *range(5 * size, 5 * size + 7)])
    shuffled = several[torch.randperm(len(several))]
    whole = torch.cat([torch.arange(block * size, (block + 1) * size) for block in (4, 2)])
    passed = [_round_trip(layout, module, cache, slots) for slots in (several, shuffled, whole)]
    nests = [len(one.sizes) if one else 0 for one in layout._strides]
    return {"is_untouched": is_untouched, "passed": passed, "nests": nests}


def _round_trip(layout: Any, module: Any, cache: torch.Tensor, slots: torch.Tensor) -> bool:
    """By torch, and by the kernels' tables of places."""
    from kvservice.client.connectors.vllm.host_blocks import host_blocks

    bits = torch.int16 if cache.dtype.itemsize == 2 else torch.int32
    edge = 1 << (8 * cache.dtype.itemsize - 1)
    shape = (2, len(slots), module.num_kv_heads * module.head_size)
    rows = torch.randint(-edge, edge, shape, dtype=torch.int64).to(bits)
    heads = rows.view(cache.dtype).view(*shape[:2], module.num_kv_heads, module.head_size)
    theirs, ours = cache.clone(), cache.clone()
    module.impl.do_kv_cache_update(module, heads[0], heads[1], theirs, slots)
    read = [torch.empty_like(plane) for plane in rows]
    layout.gather(theirs, slots, read)
    layout.scatter(ours, slots, list(rows))
    is_right = all(map(torch.equal, read, rows)) and torch.equal(_bits(theirs), _bits(ours))
    again, values = cache.clone(), [plane.view(cache.dtype) for plane in rows]
    by_table = [torch.empty_like(plane) for plane in values]
    host_blocks([theirs], [layout])[0].gather(slots.numpy(), by_table)
    host_blocks([again], [layout])[0].scatter(slots.numpy(), values)
    is_same = all(torch.equal(_bits(one), plane) for one, plane in zip(by_table, rows, strict=True))
    return is_right and is_same and torch.equal(_bits(theirs), _bits(again))


def _bits(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.int16 if cache.dtype.itemsize == 2 else torch.int32)


if __name__ == "__main__":
    main()
