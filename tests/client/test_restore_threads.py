"""Threads of restores: what was started is ended, what was queued is failed, nothing begins after the close."""

import subprocess
import sys
import threading

import pytest

from kvservice.client.restore_threads import RestoreThreads
from kvservice.model.errors import UnavailableError


def _running() -> int:
    return sum(thread.name.startswith("kvservice-restore") for thread in threading.enumerate())


class NotedJob:
    """Notes what is called, and on which thread; each part waits until it may end."""

    def __init__(self, *, may_start: bool = True, may_run: bool = True) -> None:
        self.done: list[tuple[str, bool]] = []
        self.parts = {name: threading.Event() for name in ("start", "run", "fail")}
        self.entered = {name: threading.Event() for name in ("start", "run", "fail")}
        self._caller = threading.current_thread()
        for name, may_end in (("start", may_start), ("run", may_run), ("fail", True)):
            if may_end:
                self.parts[name].set()

    def _part(self, name: str) -> None:
        self.entered[name].set()
        assert self.parts[name].wait(10)
        self.done.append((name, threading.current_thread() is self._caller))

    def start(self) -> None:
        self._part("start")

    def run(self) -> None:
        self._part("run")

    def fail(self) -> None:
        self._part("fail")


def test_a_job_starts_here_and_goes_on_elsewhere() -> None:
    threads, job = RestoreThreads(1), NotedJob()
    threads.begin(job)
    threads.close()
    assert job.done == [("start", True), ("run", False)]


def test_a_job_for_which_no_thread_is_free_is_not_started_here() -> None:
    threads, first, second = RestoreThreads(1), NotedJob(may_run=False), NotedJob()
    threads.begin(first)
    threads.begin(second)
    assert not second.entered["start"].is_set()
    first.parts["run"].set()
    assert second.entered["run"].wait(10)
    threads.close()
    assert second.done == [("run", False)], "all of it there"


def test_what_is_queued_fails_at_the_close_and_what_was_started_ends() -> None:
    threads, first, queued = RestoreThreads(1), NotedJob(may_run=False), NotedJob()
    threads.begin(first)
    threads.begin(queued)
    closing = threading.Thread(target=threads.close)
    closing.start()
    assert queued.entered["fail"].wait(10)
    assert closing.is_alive()
    first.parts["run"].set()
    closing.join(10)
    assert first.done == [("start", True), ("run", False)]
    assert queued.done == [("fail", False)]
    threads.close()
    with pytest.raises(UnavailableError, match="the client was closed"):
        threads.begin(NotedJob())


def test_a_job_that_is_just_starting_at_the_close_is_run() -> None:
    threads, job = RestoreThreads(2), NotedJob(may_start=False)
    beginning = threading.Thread(target=threads.begin, args=(job,))
    beginning.start()
    assert job.entered["start"].wait(10)
    closing = threading.Thread(target=threads.close)
    closing.start()
    job.parts["start"].set()
    closing.join(10)
    beginning.join(10)
    assert [name for name, _ in job.done] == ["start", "run"]


def test_a_start_that_is_interrupted_leaves_the_rest_to_the_thread() -> None:
    class Interrupted(NotedJob):
        def start(self) -> None:
            raise KeyboardInterrupt

    threads, job = RestoreThreads(1), Interrupted()
    with pytest.raises(KeyboardInterrupt):
        threads.begin(job)
    threads.close()
    assert job.done == [("run", False)]


def test_threads_are_made_when_they_are_needed_and_no_more_than_said() -> None:
    before = _running()
    threads = RestoreThreads(2)
    assert _running() == before
    jobs = [NotedJob(may_run=False) for _ in range(3)]
    for job in jobs:
        threads.begin(job)
    assert _running() == before + 2
    for job in jobs:
        job.parts["run"].set()
    assert jobs[2].entered["run"].wait(10)
    threads.close()
    assert _running() == before


def test_a_job_may_close_them() -> None:
    threads = RestoreThreads(1)

    class Closing(NotedJob):
        def run(self) -> None:
            threads.close()
            super().run()

    job = Closing()
    threads.begin(job)
    assert job.entered["run"].wait(10)
    threads.close()
    assert [name for name, _ in job.done] == ["start", "run"]


SCRIPT = """
import time
from kvservice.client.restore_threads import RestoreThreads
class Job:
    def start(self): pass
    def run(self):
        deadline_s = time.monotonic() + 0.3
        while time.monotonic() < deadline_s: pass
        print("done", flush=True)
    def fail(self): print("failed", flush=True)
threads = RestoreThreads(1)
threads.begin(Job())
"""


def test_a_program_that_ends_waits_for_what_writes_to_its_memory() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "done\n"


def test_a_thread_that_cannot_be_started_costs_its_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, job = RestoreThreads(1), NotedJob()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(UnavailableError, match="nothing was written"):
            threads.begin(NotedJob())
    threads.begin(job)
    threads.close()
    assert job.done == [("start", True), ("run", False)]
