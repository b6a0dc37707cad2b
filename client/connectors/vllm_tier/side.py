"""The tier without vLLM: questions, orders and what became of them. ``tier.py`` puts vLLM's words around it.

All methods are for one thread, the engine's. None blocks, but ``drain`` and ``close``.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvservice.client.connectors.breaker import Breaker
from kvservice.client.connectors.entrance import Entrance
from kvservice.client.connectors.vllm.link import Link
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm_tier.identity import after_reset
from kvservice.client.connectors.vllm_tier.lookups import Lookups, Verdict
from kvservice.client.connectors.vllm_tier.metrics import COUNTERS, GAUGES
from kvservice.client.connectors.vllm_tier.options import TierOptions
from kvservice.client.connectors.vllm_tier.rows import RowStore
from kvservice.client.connectors.vllm_tier.transfers import Job, Order, Transfers
from kvservice.client.session import Session
from kvservice.model.errors import InvalidInputError, UnavailableError
from kvservice.model.identity import Identity
from kvservice.storage.buffer import Bytes

HASH_BYTES_MIN = 32
"""A shared chunk's key is a digest that nobody can make two prompts for: SHA-256, not xxhash."""
GROUP_BYTES = 4
"""How vLLM's keys end: the number of the group of layers."""

log = logging.getLogger("vllm.kvservice")


class TierSide:
    """What is asked, stored and loaded for one engine.

    ``view``: vLLM's host memory, ``[chunks, row_bytes]`` bytes, C order; every view of it is dropped by ``close``.
    ``group_tokens``: tokens of a chunk by group number, for the counts.
    """

    def __init__(
        self, view: memoryview, identity: Identity, options: TierOptions, group_tokens: dict[int, int], **parts: Any
    ) -> None:
        """``parts``: a ``clock``, or ``open_session``, for tests."""
        self.counts = Counts(COUNTERS, GAUGES)
        self._memory: Bytes | None = _rows_of(view)
        self._identity = identity
        self._options = options
        self._group_tokens = group_tokens
        self._clock: Callable[[], float] = parts.get("clock", time.monotonic)
        self._entrance = Entrance(options, log)
        self._open_session = parts.get("open_session", self._connect)
        row_bytes = self._memory.shape[1]
        self._found = RowStore(self._link("lookups", is_writer=False), identity, row_bytes)
        self._stored = RowStore(self._link("stores", is_writer=True), identity, row_bytes)
        self._lookups = Lookups(self._found, options.lookup_deadline_s, self.counts, self._tokens_of, self._clock)
        self._transfers = Transfers(
            self._row,
            self._found,
            self._stored,
            self.counts,
            load_deadline_s=options.load_deadline_s,
            load_threads=options.load_threads,
            store_threads=options.store_threads,
            stores_waiting_max=options.stores_waiting_max,
            clock=self._clock,
        )
        self._has_told_weak_keys = False

    @property
    def identity(self) -> Identity:
        """Whose rows these are; another one after a reset."""
        return self._identity

    def ask(self, request: str, key: bytes) -> Verdict:
        """Whether the service has a chunk; LATER: ask again in the next step."""
        if self._is_weak(key):
            return Verdict.MISS
        return self._lookups.ask(request, key)

    def flush(self, running: Sequence[str] = ()) -> None:
        """End a step: send its questions. ``running``: requests that were scheduled in it, and ask no more."""
        for request in running:
            self._lookups.forget(request)
        self._lookups.flush()

    def load(self, order: Order) -> None:
        """Begin to copy chunks into vLLM's memory."""
        self._transfers.load(order, self._lookups.take(order.request, order.keys))

    def store(self, order: Order) -> None:
        """Begin to copy chunks from vLLM's memory."""
        if sum(map(self._is_weak, order.keys)):
            self._transfers.refuse(order, is_load=False)
        else:
            self._transfers.store(order)

    def take_finished(self) -> list[Job]:
        """What ended since the last call. Chunks whose load failed are misses for their request from here on."""
        finished = self._transfers.take_finished()
        for job in finished:
            self._count(job)
            if job.is_load:
                self._lookups.let_go(job.promises)
                self._lookups.mark_missed(job.order.request, job.failed)
        return finished

    def ended(self, request: str) -> None:
        """A request ended: what was found for it is let go."""
        self._lookups.forget(request)

    @property
    def rows_waiting(self) -> int:
        """Rows of vLLM's memory that are still to be copied."""
        return self._transfers.rows_waiting

    def drain(self) -> None:
        """Block until vLLM's memory is touched no more; vLLM is about to forget all that is in it.

        It does so when weights may change, of which a tier is not told. So nothing of before is found afterwards, and
        nobody else finds what comes, unless the user says that it may.
        """
        self._transfers.drain()
        self._lookups.forget_all()
        if self._options.keeps_on_reset:
            return
        self._identity = after_reset(self._identity)
        self._found.exchange(self._identity)
        self._stored.exchange(self._identity)
        log.warning(
            "kvservice: vLLM reset its caches, as it does when weights change: chunks from before are not used any "
            'more, new ones are not shared. If weights do not change, set "keeps_on_reset": true'
        )

    def close(self) -> None:
        """Store what waits, within some seconds, end threads and sessions, and drop every view of vLLM's memory.

        Raises UnavailableError when a copy does not end: vLLM must not unmap its memory then.
        """
        is_idle = self._transfers.close()
        self._lookups.close()
        self._memory = None
        if not is_idle:
            raise UnavailableError("a copy from or to vLLM's memory did not end; the memory must stay mapped")

    def figures(self) -> dict[str, float] | None:
        """What changed since the last call; None if nothing did."""
        self.counts.set("breaker_lookups", self._found.breaker.state)
        self.counts.set("breaker_stores", self._stored.breaker.state)
        self.counts.set("rows_waiting", self._transfers.rows_waiting)
        return self.counts.take()

    def _count(self, job: Job) -> None:
        rows, row_bytes = len(job.done), self._identity.geometry.token_bytes
        if job.is_load:
            self.counts.add("rows_loaded", rows)
            self.counts.add("tokens_loaded", sum(map(self._tokens_of, job.done)))
            self.counts.add("bytes_loaded", rows * row_bytes)
            self.counts.add("rows_load_failed", len(job.failed))
            self.counts.add("load_seconds", job.seconds)
        else:
            self.counts.add("rows_stored", rows)
            self.counts.add("bytes_stored", rows * row_bytes)
            self.counts.add("store_seconds", job.seconds)

    def _tokens_of(self, key: bytes) -> int:
        return self._group_tokens.get(int.from_bytes(key[-GROUP_BYTES:], "big"), 0)

    def _is_weak(self, key: bytes) -> bool:
        if not self._options.is_shared or len(key) >= HASH_BYTES_MIN + GROUP_BYTES:
            return False
        self.counts.add("rows_refused")
        if not self._has_told_weak_keys:
            self._has_told_weak_keys = True
            log.error(
                "kvservice: chunks are neither stored nor found: vLLM hashes blocks by something weaker than SHA-256, "
                "and two prompts may share a key; start it with --prefix-caching-hash-algo sha256"
            )
        return True

    def _row(self, chunk: int) -> Bytes:
        memory = self._memory
        if memory is None or not 0 <= chunk < len(memory):
            raise InvalidInputError(f"there is no chunk {chunk} in vLLM's memory")
        row: Bytes = memory[chunk]
        return row

    def _link(self, name: str, *, is_writer: bool) -> Link:
        """A way to the service with a breaker of its own: slow stores must not keep loads away."""
        options = self._options
        breaker = Breaker(
            self._clock,
            failures_max=options.breaker_failures_max,
            slow_s=options.breaker_slow_s,
            pause_s=options.breaker_pause_s,
            pause_s_max=max(30.0, options.breaker_pause_s),
        )
        return Link(lambda: self._open_session(name, is_writer), breaker)

    def _connect(self, name: str, is_writer: bool) -> Session:
        client_name = f"vllm tier {os.getpid()} {name}"
        return self._entrance.open([self._identity], is_writer=is_writer, client_name=client_name)


def _rows_of(view: memoryview) -> Bytes:
    """``[chunks, row_bytes]`` over the same memory."""
    if view.ndim != 2 or not view.c_contiguous or view.readonly:
        raise InvalidInputError(
            f"vLLM's memory should be [chunks, bytes], contiguous and writable; it has {view.ndim} dimensions"
        )
    memory: Bytes = np.asarray(view).view(np.uint8)
    return memory
