"""The threads that restores run on: made when one is needed, ended with the client. What is queued at the end fails.

Not an executor: handing a restore to one costs 0.1 ms where its code is out of the caches, as much as writing a layer.
"""

import atexit
import queue
import threading
import weakref
from typing import Protocol

from kvservice.model.errors import UnavailableError


class Job(Protocol):
    """What a thread does. No method raises."""

    def start(self) -> None:
        """A short first part, on the caller's thread."""

    def run(self) -> None:
        """The rest, or all of it where ``start`` was not called."""

    def fail(self) -> None:
        """In place of both: it never begins."""


class RestoreThreads:
    """At most ``count`` threads. Safe from any thread."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._changed = threading.Condition()
        self._is_closed = False
        self._unfinished = self._starting = 0
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # those that were started
        self._queued: list[Job] = []
        self._threads: list[threading.Thread] = []

    def begin(self, job: Job) -> None:
        """Start the job here if a thread is free for the rest of it; else it is queued as a whole.

        Raises UnavailableError when this was closed.
        """
        if not self._admit(job):
            return
        try:
            job.start()
        finally:
            with self._changed:
                self._jobs.put(job)
                self._starting -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Let what was started end, fail what is queued. Safe to call twice."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._starting)
            queued, self._queued = self._queued, []
            for _ in self._threads:
                self._jobs.put(None)
        for job in queued:
            job.fail()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _admit(self, job: Job) -> bool:
        """True if a thread is free for the job; else it was queued."""
        with self._changed:
            if self._is_closed:
                raise UnavailableError("the client was closed: no restore begins any more; connect a new one")
            if self._unfinished < self.count and len(self._threads) <= self._unfinished:
                self._add_thread()
            self._unfinished += 1
            if self._unfinished > self.count:
                self._queued.append(job)
                return False
            self._starting += 1
            return True

    def _add_thread(self) -> None:
        name = f"kvservice-restore_{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the container's limit
            raise UnavailableError(f"no thread for a restore can be started: {error}; nothing was written") from error
        self._threads.append(thread)
        _RUNNING.add(self)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            while job is not None:
                job.run()
                job = self._next()

    def _next(self) -> Job | None:
        """A job is done; the next one that waits, if any."""
        with self._changed:
            self._unfinished -= 1
            return self._queued.pop(0) if self._queued else None


_RUNNING: "weakref.WeakSet[RestoreThreads]" = weakref.WeakSet()


@atexit.register
def _close_left() -> None:
    """At the end of the program no thread may write to memory that is being freed."""
    for one in list(_RUNNING):
        one.close()
