"""The eviction order against a list that is obviously right."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvservice.storage.eviction import EvictionOrder, LruOrder

KEYS = st.integers(0, 5)


class LruMachine(RuleBasedStateMachine):
    """Against a list, least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.order: LruOrder[int] = LruOrder()
        self.naive: list[int] = []
        self.bytes: dict[int, int] = {}

    @rule(key=KEYS, length=st.integers(0, 9))
    def add(self, key: int, length: int) -> None:
        if key not in self.naive:
            self.order.add(key, length)
            self.naive.append(key)
            self.bytes[key] = length

    @precondition(lambda self: self.naive)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.naive))
        self.order.touch(key)
        self.naive.append(self.naive.pop(self.naive.index(key)))

    @precondition(lambda self: self.naive)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.naive))
        self.order.remove(key)
        self.naive.remove(key)

    @invariant()
    def agrees(self) -> None:
        assert list(self.order.candidates()) == self.naive
        assert len(self.order) == len(self.naive)
        assert self.order.used_bytes == sum(self.bytes[key] for key in self.naive)
        assert [self.order.bytes_of(key) for key in self.naive] == [self.bytes[key] for key in self.naive]


LruMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
test_lru_agrees_with_a_list = LruMachine.TestCase


def filled(keys: str) -> LruOrder[str]:
    order: LruOrder[str] = LruOrder()
    for key in keys:
        order.add(key, 1)
    return order


def test_candidates_may_be_removed_while_they_are_listed() -> None:
    order: EvictionOrder[str] = filled("abcd")
    freed = []
    for key in order.candidates():
        order.remove(key)
        freed.append(key)
    assert freed == list("abcd")
    assert order.used_bytes == 0


def test_what_is_touched_removed_or_added_while_listing_does_not_come() -> None:
    order = filled("abcd")
    candidates = order.candidates()
    assert next(candidates) == "a"
    order.touch("a")
    order.touch("b")
    order.remove("c")
    order.add("e", 1)
    assert list(candidates) == ["d"]


def test_a_key_is_added_once_and_known_until_removed() -> None:
    order = filled("a")
    with pytest.raises(AssertionError):
        order.add("a", 1)
    assert "a" in order
    order.remove("a")
    assert "a" not in order
    for use in (order.touch, order.remove, order.bytes_of):
        with pytest.raises(KeyError):
            use("a")
