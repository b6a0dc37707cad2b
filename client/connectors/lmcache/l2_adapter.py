"""The L2 adapter of ``lmcache server``: chunks that LMCache keeps in its own memory are kept by a service too.

Thin: LMCache's keys, buffers and bitmaps on one side, ``exchange.py`` on the other. Called by LMCache's threads, which
it never blocks; each of its three event descriptors says that a task of one kind was answered.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

from kvservice.client.connectors.lmcache.exchange import Exchange
from kvservice.client.connectors.lmcache.identity import ObjectKind, Owner, object_key
from kvservice.client.connectors.lmcache.options import LMCacheOptions
from kvservice.client.connectors.lmcache.vault import Named, Stored, Vault

WHERE = "adapter_params of KVServiceL2Adapter"
T = TypeVar("T")


class KVServiceL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc]
    """``adapter_params``, checked."""

    def __init__(self, options: LMCacheOptions) -> None:
        self.options = options

    @classmethod
    def from_dict(cls, d: dict[str, object]) -> "KVServiceL2AdapterConfig":
        """Raises ConfigError, a ValueError, for whatever is wrong or missing."""
        return cls(LMCacheOptions.of(d, WHERE))

    @classmethod
    def help(cls) -> str:
        """Every option, with its default and why one would change it."""
        fields = LMCacheOptions.__dataclass_fields__.values()
        return "\n".join([f"{WHERE}:", *(f"- {one.name}: {one.metadata['why']}" for one in fields)])


class _Board(Generic[T]):
    """Answers of one kind of task until they are fetched, and the descriptor that says there are some."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._answers: dict[int, T] = {}

    def put(self, task: int, answer: T) -> None:
        """Called once a task, from any thread."""
        with self._lock:
            self._answers[task] = answer
        os.eventfd_write(self.descriptor, 1)

    def take(self, task: int) -> T | None:
        """The task's answer, once."""
        with self._lock:
            return self._answers.pop(task, None)

    def take_all(self) -> dict[int, T]:
        """All answers, each once."""
        with self._lock:
            taken, self._answers = self._answers, {}
            return taken

    def close(self) -> None:
        """Close the descriptor; no task may be under way."""
        os.close(self.descriptor)


class KVServiceL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """See ``L2AdapterInterface`` of LMCache 0.5.6."""

    def __init__(self, config: KVServiceL2AdapterConfig, l1_memory_desc: object = None) -> None:
        super().__init__()
        options = config.options
        self._exchange = Exchange(
            Vault.connect(options, Owner.of(options, WHERE), f"lmcache server, pid {os.getpid()}"), options
        )
        self._stores: _Board[Any] = _Board()
        self._lookups: _Board[Any] = _Board()
        self._loads: _Board[Any] = _Board()
        self._lock = threading.Lock()
        self._task = 0
        self._kinds: dict[tuple[str, int, int], dict[ObjectKind, None]] = {}

    # ------------------------------------------------------------------ event descriptors

    def get_store_event_fd(self) -> int:
        """Signalled when a store was answered."""
        return self._stores.descriptor

    def get_lookup_and_lock_event_fd(self) -> int:
        """Signalled when a lookup was answered."""
        return self._lookups.descriptor

    def get_load_event_fd(self) -> int:
        """Signalled when a load was answered."""
        return self._loads.descriptor

    # ------------------------------------------------------------------ tasks

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Store objects; the answer is a success when the service holds all of them."""
        task, keys, buffers = self._next_task(), list(keys), [_buffer(one) for one in objects]
        sizes = [buffer.nbytes for buffer in buffers]

        def prepare() -> list[Named]:
            return [
                self._named(key, one.get_dtypes(), one.get_shapes()) for key, one in zip(keys, objects, strict=True)
            ]

        def done(stored: list[Stored]) -> None:
            is_whole = all(one.error is None for one in stored)
            self._stores.put(task, L2StoreResult(is_whole, sum(sizes) if is_whole else 0))
            new = [index for index, one in enumerate(stored) if one.error is None and not one.existed]
            if new:
                self._notify_keys_stored([keys[index] for index in new], [sizes[index] for index in new])

        self._exchange.store(prepare, buffers, done)
        return task

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Every answer to a store since the last call."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """Look objects up; what is there is leased until ``submit_unlock``."""
        task, keys = self._next_task(), list(keys)

        def prepare() -> list[Named]:
            layouts = {group: (desc.dtypes, desc.shapes) for group, desc in group_layout_descs.items()}
            return [self._named(key, *layouts[key.object_group_id]) for key in keys]

        def done(found: list[bool]) -> None:
            self._lookups.put(task, _bitmap(found))
            if any(found):
                self._notify_keys_accessed([key for key, is_there in zip(keys, found, strict=True) if is_there])

        self._exchange.lookup(keys, prepare, done)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """The answer to a lookup, once; None before."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """Give one lock of each key back. It cannot fail: a lease that the service is not told of runs out there."""
        self._exchange.unlock(keys)

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Copy locked objects to LMCache's memory."""
        task = self._next_task()
        items = [(key, _buffer(one)) for key, one in zip(keys, objects, strict=True)]
        self._exchange.load(items, lambda loaded: self._loads.put(task, _bitmap(loaded)))
        return task

    def query_load_result(self, task_id: int) -> Any:
        """The answer to a load, once; None before."""
        return self._loads.take(task_id)

    # ------------------------------------------------------------------ upkeep

    def delete(self, keys: Sequence[Any]) -> None:
        """Delete objects of every layout that was seen here under their model, rank and group; returns at once."""
        with self._lock:
            known = {key: list(self._kinds[_kind_of(key)]) for key in keys if _kind_of(key) in self._kinds}
            named = [Named(kind, _name(key)) for key, kinds in known.items() for kind in kinds]

        def done(is_done: bool) -> None:
            if is_done:
                sizes = [max(kind.row_bytes for kind in kinds) for kinds in known.values()]
                self._notify_keys_deleted(list(known), sizes)

        if named:
            self._exchange.delete(lambda: named, done)

    def get_usage(self) -> Any:
        """The service's own figures, all tiers, some seconds old; by cache salt what was stored through here."""
        room = self._exchange.room()
        salts = super().get_usage().bytes_by_cache_salt
        return AdapterUsage(room.used_bytes, room.capacity_bytes, salts)

    def report_status(self) -> dict[str, object]:
        """Counts, and whether the service answers."""
        status = self._exchange.status()
        return {"is_healthy": status["breaker"] == "closed", "type": type(self).__name__, **status}

    def close(self) -> None:
        """End the session; every lease goes with it."""
        self._exchange.close()
        for board in (self._stores, self._lookups, self._loads):
            board.close()

    def _next_task(self) -> int:
        with self._lock:
            self._task += 1
            return self._task

    def _named(self, key: Any, dtypes: Sequence[Any], shapes: Sequence[Any]) -> Named:
        layout = tuple(
            (str(dtype).removeprefix("torch."), tuple(map(int, shape)))
            for dtype, shape in zip(dtypes, shapes, strict=True)
        )
        size = sum(dtype.itemsize * shape.numel() for dtype, shape in zip(dtypes, shapes, strict=True))
        ranks = (key.kv_rank >> 24, key.kv_rank >> 16 & 0xFF)  # as ObjectKey.ComputeKVRank packs them
        form = f"multi-process, kv_rank {key.kv_rank:#x}, group {key.object_group_id}"
        kind = ObjectKind(key.model_name, *ranks, layout, size, form)
        with self._lock:
            self._kinds.setdefault(_kind_of(key), {}).setdefault(kind)
        return Named(kind, _name(key))


def _kind_of(key: Any) -> tuple[str, int, int]:
    return key.model_name, key.kv_rank, key.object_group_id


def _name(key: Any) -> bytes:
    return object_key(key.chunk_hash, key.cache_salt.encode())


def _buffer(obj: Any) -> memoryview:
    return memoryview(obj.byte_array).cast("B")


def _bitmap(bits: Sequence[bool]) -> Any:
    bitmap = Bitmap(len(bits))
    for index, is_set in enumerate(bits):
        if is_set:
            bitmap.set(index)
    return bitmap
