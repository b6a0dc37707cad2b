"""What code under test left open."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def opened() -> set[str]:
    """Every descriptor of this process with what it stands for; one may go while it is looked at."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(f"{entry.name} {entry.readlink()} {entry.stat().st_ino}")
    return found


def opened_for_good() -> set[str]:
    """Without those of objects that stand in cycles and wait for the collector, as nodes of earlier tests do."""
    gc.collect()
    return opened()


@contextmanager
def nothing_left_open() -> Iterator[None]:
    """Whatever else is closed meanwhile: what earlier tests left may go at any time."""
    before = opened()
    yield
    if opened() - before:  # a collection takes half a second among all tests
        left = opened_for_good() - before
        assert not left, f"left open: {sorted(left)}"
