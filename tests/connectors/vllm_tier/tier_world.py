"""What the tier's tests share: vLLM's words as small fakes, its memory, and a tier of an engine with a service."""

import mmap
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvservice.client.connectors.vllm_tier.identity import EngineFormat, row_identity
from kvservice.client.connectors.vllm_tier.lookups import Verdict
from kvservice.client.connectors.vllm_tier.options import TierOptions
from kvservice.client.connectors.vllm_tier.side import TierSide
from kvservice.client.connectors.vllm_tier.transfers import Job, Order

ROW_BYTES = 12_288
TOKENS = 32
FORM = EngineFormat("0.32", "cuda")
SHARED = {"weights": "r1", "config": "c1", "quantization": "none"}
WAIT_S = 20.0
PATIENT = {"lookup_deadline_s": 2 * WAIT_S, "load_deadline_s": 2 * WAIT_S, "breaker_slow_s": 2 * WAIT_S}
"""So that a busy machine is not taken for a service in trouble."""


def make_config(**changes: Any) -> Any:
    """vLLM's OffloadingConfig. Changes go to whichever part has the name."""
    group = SimpleNamespace(tokens_per_block=16, layer_names=("model.layers.0", "model.layers.1"), group_id=0)
    parallel = {"rank": 0, "world_size": 2, "tp_size": 2, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    parts: dict[str, dict[str, Any]] = {
        "model": {"name": "org/name", "dtype": "bfloat16"},
        "cache": {"tokens_per_hash": 16, "blocks_per_chunk": 2},
        "parallel": {**parallel, "data_parallel_index": 0, "is_parallelism_agnostic": False},
        "": {
            "groups": (group,),
            "worker_kv_bytes_per_block": 3072,
            "engine_id": "e1",
            "replicated_layout": False,
            "canonical_layout": False,
            "kv_cache_layout": "LBHNC",
        },
    }
    for values in parts.values():
        values.update({name: changes.pop(name) for name in list(changes) if name in values})
    assert not changes, "a misspelt change tests nothing"
    made = {name: SimpleNamespace(**values) for name, values in parts.items() if name}
    return SimpleNamespace(**parts[""], **made)


def make_key(number: int, group: int = 0, *, hash_bytes: int = 32) -> bytes:
    return number.to_bytes(hash_bytes, "little") + group.to_bytes(4, "big")


def content_of(key: bytes) -> Any:
    """The one right row of a key."""
    return np.random.default_rng(list(key)).integers(0, 256, ROW_BYTES, np.uint8)


class Memory:
    """vLLM's host memory, mapped: ``view`` is all that the tier gets."""

    def __init__(self, chunks: int = 32) -> None:
        self._mapped = mmap.mmap(-1, chunks * ROW_BYTES)
        self.rows: Any = np.frombuffer(self._mapped, np.uint8).reshape(chunks, ROW_BYTES)
        self.view: memoryview = self.rows.data

    def unmap(self) -> None:
        """As vLLM does at its end. BufferError if anything still looks at the memory."""
        self.view.release()
        self.rows = None
        self._mapped.close()

    def fill(self, keys: Sequence[bytes], start: int = 0) -> list[int]:
        """Write the keys' rows from chunk ``start`` on; returns the chunk ids."""
        for chunk, key in enumerate(keys, start):
            self.rows[chunk] = content_of(key)
        return list(range(start, start + len(keys)))

    def holds(self, key: bytes, chunk: int) -> bool:
        return bool((self.rows[chunk] == content_of(key)).all())


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class World:
    """A tier, and vLLM's manager as far as a test needs one."""

    def __init__(self, address: str, name: str, *, config: Any = None, parts: Any = None, **options: Any) -> None:
        self.memory = Memory()
        self.options = TierOptions.of({"address": address, **SHARED, **PATIENT, "tenant": name, **options})
        self.identity = row_identity(config or make_config(), ROW_BYTES, self.options, FORM)
        self.side = TierSide(self.memory.view, self.identity, self.options, {0: TOKENS}, **(parts or {}))
        self.counts = self.side.counts
        self._numbers = iter(range(1, 1 << 30))

    def store(self, keys: Sequence[bytes], *, request: str = "writer") -> Job:
        """Have rows stored; they use the last chunks of the memory."""
        chunks = self.memory.fill(keys, len(self.memory.rows) - len(keys))
        number = self.number()
        self.side.store(Order(number, request, list(keys), chunks))
        return self.finished(number)

    def answers(self, keys: Sequence[bytes], *, request: str = "reader") -> list[Verdict]:
        """What a request is told, once there is an answer."""
        found: list[Verdict] = []

        def is_answered() -> bool:
            found[:] = [self.side.ask(request, key) for key in keys]
            self.side.flush()
            return Verdict.LATER not in found

        until(is_answered)
        return found

    def load(self, keys: Sequence[bytes], *, request: str = "reader", start: int = 0) -> Job:
        """Have rows loaded to chunks from ``start`` on, over what was there."""
        chunks = range(start, start + len(keys))
        self.memory.rows[start : start + len(keys)] = 0
        number = self.number()
        self.side.load(Order(number, request, list(keys), list(chunks)))
        return self.finished(number)

    def finished(self, number: int) -> Job:
        """That job, once it has ended."""
        found: list[Job] = []

        def has_ended() -> bool:
            found.extend(self.side.take_finished())
            return bool(found)

        until(has_ended)
        assert [job.order.number for job in found] == [number]
        return found[0]

    def number(self) -> int:
        return next(self._numbers)

    @property
    def leases(self) -> int:
        """Leases that the tier holds at the service."""
        session = self.side._found._link._session
        return 0 if session is None else session.leases_held

    def total(self, name: str) -> float:
        return self.counts.total(name)


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that a thread does."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.002)):
        if condition():
            return
        pause.wait(0.002)
    raise AssertionError("it did not happen in time")
