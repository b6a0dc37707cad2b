"""Locks: each is given back once, a lease ends with its last lock or reader, and none is kept for ever."""

from typing import Any

import pytest

from kvservice.client.connectors.lmcache.holds import Holds
from kvservice.client.connectors.lmcache.vault import Place


class Lease:
    """A lease that notes how often it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def make_found() -> Any:
    return Lease()


def place(found: Any, index: int = 0) -> Place:
    return Place(found, index)


def test_a_lease_ends_with_its_last_lock() -> None:
    holds, found = Holds(), make_found()
    holds.add([("a", place(found)), ("b", place(found, 1))], 10)
    assert holds.drop(["a"]) == []
    assert holds.drop(["b"]) == [found]
    assert len(holds) == 0


def test_what_is_not_locked_is_no_error() -> None:
    holds = Holds()
    assert holds.drop(["a"]) == []
    with holds.reading("a") as nothing:
        assert nothing is None


def test_an_object_may_be_locked_twice() -> None:
    holds, first, second = Holds(), make_found(), make_found()
    holds.add([("a", place(first))], 10)
    holds.add([("a", place(second))], 10)
    assert holds.drop(["a"]) == [first]
    with holds.reading("a") as read:
        assert read is not None
        assert read.found is second
    assert holds.drop(["a", "a"]) == [second]


@pytest.mark.parametrize("is_reaped", [False, True])
def test_who_reads_keeps_the_lease(is_reaped: bool) -> None:
    holds, found = Holds(), make_found()
    holds.add([("a", place(found, 7))], 10)
    with holds.reading("a") as read:
        assert read is not None
        assert read.index == 7
        assert (holds.reap(11) if is_reaped else holds.drop(["a"])) == []
        assert found.closed == 0
    assert found.closed == (not is_reaped)
    assert holds.reap(11) == ([found] if is_reaped else [])


def test_locks_that_nobody_gives_back_are_given_up() -> None:
    holds, early, late = Holds(), make_found(), make_found()
    holds.add([("a", place(early)), ("b", place(early, 1))], 10)
    holds.add([("a", place(late))], 20)
    assert holds.reap(9) == []
    assert holds.reap(10) == [early]
    assert len(holds) == 1
    assert holds.drop(["a"]) == [late]
