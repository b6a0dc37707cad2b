"""vLLM's tiering offload without a GPU: its own spec with a worker that copies by torch. For tests only.

    "spec_name": "CpuTieringSpec", "spec_module_path": "cpu_tiering"      with this folder, and no other, on PYTHONPATH

vLLM's own worker refuses to start on a CPU. All else is vLLM's: connector, tiering manager, shared region. One block a
chunk. ``zeroes_rows`` in the extra config: every row that our tier loads is zeroed, for a control.
"""

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Blocks of the engine's KV to rows of the region and back, at once, on the engine's thread."""

    def __init__(self, caches: Any, region: SharedOffloadRegion) -> None:
        self._region = region
        self._finished: list[TransferResult] = []
        self._blocks = [one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in caches.tensors]
        self._rows = [region.create_next_worker_view(one.page_size_bytes) for one in caches.tensors]

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._blocks, src_spec.block_ids, self._rows, _chunks(dst_spec))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._rows, _chunks(src_spec), self._blocks, dst_spec.block_ids)

    def _copy(self, job_id: int, sources: Any, source_ids: Any, targets: Any, target_ids: Any) -> bool:
        from_ids, to_ids = torch.as_tensor(source_ids).long(), torch.as_tensor(target_ids).long()
        for source, target in zip(sources, targets, strict=True):
            target[to_ids] = source[from_ids]
        copied = len(from_ids) * sum(int(one.shape[1]) for one in sources)
        self._finished.append(TransferResult(job_id, True, copied, 1e-6))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Copies end before ``submit_*`` returns."""

    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering spec with the worker above."""

    _copying: CopyingWorker | None = None

    def get_manager(self) -> Any:
        if self.extra_config.get("zeroes_rows"):
            _zero_what_is_read()
        return super().get_manager()

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._copying is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._copying = CopyingWorker(kv_caches, region)
        return self._copying


def _chunks(spec: Any) -> Any:
    return spec.chunk_ids if hasattr(spec, "chunk_ids") else spec.block_ids


def _zero_what_is_read() -> None:
    import numpy as np

    from kvservice.client.opaque import FoundRows

    read = FoundRows.read

    def zeroed(self: FoundRows, index: int, target: Any, **options: Any) -> None:
        read(self, index, target, **options)
        np.asarray(target)[:] = 0

    setattr(FoundRows, "read", zeroed)  # noqa: B010
