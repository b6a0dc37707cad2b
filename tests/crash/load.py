"""Several writers at once, on threads of this process: the load of one cycle."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from types import TracebackType
from typing import Self

from kvservice.model.errors import KVServiceError
from tests.crash.oracle import Book, BrokenError
from tests.crash.reading import Seen
from tests.crash.writer import STEPS_MAX, LoadPlan, Writer

END_TIMEOUT_S = 60.0


class Load:
    """``with Load(...) as load``: runs until ``finish``, until the service dies, or ``steps_max`` steps a writer.

    Leaving it raises what a writer found to be broken.
    """

    def __init__(
        self, socket: str, books: Sequence[Book], plans: Sequence[LoadPlan], rng: Random, steps_max: int = STEPS_MAX
    ) -> None:
        self.seen = Seen()
        self._stop = threading.Event()
        self._steps_max = steps_max
        self._pool = ThreadPoolExecutor(len(books), thread_name_prefix="crash-writer")
        self._futures: list[Future[None]] = []
        self.writers = [
            Writer(socket, book, plan, Random(rng.getrandbits(64)), self.seen)
            for book, plan in zip(books, plans, strict=True)
        ]

    def __enter__(self) -> Self:
        self._futures = [self._pool.submit(writer.run, self._stop, self._steps_max) for writer in self.writers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._pool.shutdown(wait=kind is None)
        if kind is None:
            self.finish()

    def finish(self) -> None:
        """Wait until every writer is at its end; raise what one of them raised."""
        for future in self._futures:
            try:
                future.result(END_TIMEOUT_S)
            except TimeoutError:
                raise BrokenError(f"a client hangs: no answer within {END_TIMEOUT_S:g} s") from None

    @property
    def lost(self) -> KVServiceError | None:
        """Did a writer lose the service?"""
        return next((writer.lost for writer in self.writers if writer.lost is not None), None)

    @property
    def steps(self) -> int:
        return sum(writer.steps for writer in self.writers)
