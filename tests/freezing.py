"""Processes that are stopped and go on."""

import os
import signal
import threading
from pathlib import Path

STOPPED_S = 10.0
STEP_S = 0.001


def freeze(pid: int) -> None:
    """Stop a process, and return once all of its threads stand still: sending the signal says only that they will."""
    os.kill(pid, signal.SIGSTOP)
    for _ in range(round(STOPPED_S / STEP_S)):
        if all(_state(task) == "T" for task in Path(f"/proc/{pid}/task").iterdir()):
            return
        threading.Event().wait(STEP_S)
    raise AssertionError(f"process {pid} does not stand still")


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the thread ended
        return "T"
