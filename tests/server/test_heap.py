"""Freezing takes long-lived objects out of collections, and still lets them go."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from kvservice.heap import CACHES_BETWEEN_FREEZES, Heap


class Thing:
    """Anything the collector tracks."""


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_survivors_are_frozen_after_so_many_caches_and_still_go() -> None:
    heap, kept = Heap(), Thing()
    gone = weakref.ref(kept)
    assert [heap.note_growth() for _ in range(CACHES_BETWEEN_FREEZES)].count(True) == 1
    assert gc.get_freeze_count() > 0
    assert not any(one is kept for one in gc.get_objects())
    del kept
    assert gone() is None


def test_garbage_in_cycles_is_not_frozen() -> None:
    heap, cycle = Heap(), Thing()
    cycle.me = cycle  # type: ignore[attr-defined]
    gone = weakref.ref(cycle)
    del cycle
    for _ in range(CACHES_BETWEEN_FREEZES):
        heap.note_growth()
    assert gone() is None
