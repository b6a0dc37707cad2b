"""An L2 adapter that gives zeros: tokens must come out different then, or equality proves nothing. For a test alone."""

from collections.abc import Sequence
from typing import Any

from kvservice.client.connectors.lmcache import KVServiceL2Adapter, KVServiceL2AdapterConfig


class ZerosL2AdapterConfig(KVServiceL2AdapterConfig):
    """Found by its name."""


class ZerosL2Adapter(KVServiceL2Adapter):
    """Ours, and whatever it loaded is overwritten before LMCache sees it."""

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """As ours."""
        task = super().submit_load_task(keys, objects)
        self._targets = {**getattr(self, "_targets", {}), task: list(objects)}
        return task

    def query_load_result(self, task_id: int) -> Any:
        """As ours."""
        answer = super().query_load_result(task_id)
        if answer is not None:
            for one in self._targets[task_id]:
                buffer = memoryview(one.byte_array).cast("B")
                buffer[:] = bytes(len(buffer))
        return answer
