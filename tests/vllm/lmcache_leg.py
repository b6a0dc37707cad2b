"""An engine leg whose connector is one of LMCache's: run as engine_leg.py is, with the same JSON.

``"in_process": true`` lets LMCache's in-process connector run on a CPU (``CpuConnector``), which it cannot by itself;
``"zeros": true`` has it load zeros.
"""

import builtins
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    leg = json.loads(sys.argv[1])
    _let_numba_be_there_before_the_worker()
    if leg.get("in_process"):
        _let_it_copy_on_a_cpu(gives_zeros=leg.get("zeros", False))
    runpy.run_path(str(Path(__file__).with_name("engine_leg.py")), run_name="__main__")
    sys.stdout.flush()
    os._exit(0)  # threads of LMCache's in-process form never end


def _let_numba_be_there_before_the_worker() -> None:
    """LMCache imports numba early; vLLM's CPU worker then takes a wrapper of a library for one of its own modules."""
    import vllm.triton_utils.dispatcher as dispatcher

    def harmless_vars(one: object) -> dict[str, Any]:
        found = builtins.vars(one)
        return {} if type(found).__name__.startswith("_lib") else found

    setattr(dispatcher, "vars", harmless_vars)  # noqa: B010


def _let_it_copy_on_a_cpu(*, gives_zeros: bool) -> None:
    import lmcache.v1.gpu_connector as connectors

    original = connectors.CreateGPUConnector

    def create(config: Any, metadata: Any, engine: Any, layout_hints: Any = None) -> Any:
        if connectors.torch_device_type != "cpu":
            return original(config, metadata, engine, layout_hints)
        return _cpu_connector(metadata, gives_zeros=gives_zeros)

    setattr(connectors, "CreateGPUConnector", create)  # noqa: B010
    import lmcache.integration.vllm.vllm_service_factory as factory

    if hasattr(factory, "CreateGPUConnector"):
        setattr(factory, "CreateGPUConnector", create)  # noqa: B010


def _cpu_connector(metadata: Any, *, gives_zeros: bool) -> Any:
    import torch
    from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
    from lmcache.v1.memory_management import MemoryFormat

    layers, planes, _, heads, head_size = metadata.kv_shape

    class CpuConnector(GPUConnectorInterface):  # type: ignore[misc]
        """Whole blocks of vLLM's CPU cache, ``[blocks, heads, block_size, 2 * head_size]``, as opaque bytes of chunks.

        A chunk ``[2, layers, tokens, heads * head_size]`` has just as many elements as its blocks.
        """

        def _blocks(self, start: int, end: int, given: dict[str, Any]) -> tuple[list[Any], Any]:
            caches = given["kvcaches"]
            caches = list(caches.values()) if isinstance(caches, dict) else list(caches)
            size = caches[0].shape[2]
            slots = given["slot_mapping"][start:end].to(torch.long)
            assert (end - start) % size == 0, "LMCache's chunk must be whole blocks"
            return caches, slots[::size] // size

        def from_gpu(self, memory_obj: Any, start: int, end: int, **given: Any) -> None:
            caches, blocks = self._blocks(start, end, given)
            rows = torch.stack([cache[blocks] for cache in caches])
            memory_obj.tensor.view(-1).copy_(rows.reshape(-1))
            memory_obj.metadata.fmt = MemoryFormat.KV_2LTD

        def to_gpu(self, memory_obj: Any, start: int, end: int, **given: Any) -> None:
            caches, blocks = self._blocks(start, end, given)
            size = caches[0].shape[2]
            skip = max(0, given.get("vllm_cached_tokens", 0) - start) // size
            rows = memory_obj.tensor.view(layers, len(blocks), *caches[0].shape[1:])
            for cache, own in zip(caches, rows, strict=True):
                cache[blocks[skip:]] = torch.zeros_like(own[skip:]) if gives_zeros else own[skip:]

        def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **given: Any) -> None:
            for one, start, end in zip(memory_objs, starts, ends, strict=True):
                self.from_gpu(one, start, end, **given)

        def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **given: Any) -> None:
            for one, start, end in zip(memory_objs, starts, ends, strict=True):
                self.to_gpu(one, start, end, **given)

        def get_shape(self, num_tokens: int) -> Any:
            return torch.Size([planes, layers, num_tokens, heads * head_size])

    return CpuConnector()


if __name__ == "__main__":
    main()
