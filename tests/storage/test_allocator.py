"""The allocator against a model that looks at every granule."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvservice.model.cache import Extent
from kvservice.model.errors import InvalidInputError
from kvservice.storage.arena import ExtentAllocator

GRANULE, GRANULES = 16, 24
CAPACITY = GRANULE * GRANULES + 5  # what is no whole granule is not used


class NaiveAllocator:
    """A list of granules; best fit by trying every free stretch."""

    def __init__(self) -> None:
        self.taken = [False] * GRANULES

    def stretches(self) -> list[tuple[int, int]]:
        """(granules, first granule) of every free stretch."""
        found, start = [], None
        for index, is_taken in enumerate([*self.taken, True]):
            if not is_taken and start is None:
                start = index
            elif is_taken and start is not None:
                found.append((index - start, start))
                start = None
        return found

    def allocate(self, length: int) -> Extent | None:
        granules = -(-length // GRANULE)
        fitting = [stretch for stretch in self.stretches() if stretch[0] >= granules]
        if not fitting:
            return None
        first = min(fitting)[1]
        self.mark(Extent(first * GRANULE, length), is_taken=True)
        return Extent(first * GRANULE, length)

    def is_free(self, extent: Extent) -> bool:
        first, end = extent.offset // GRANULE, -(-extent.end // GRANULE)
        return first >= 0 and end <= GRANULES and not any(self.taken[first:end])

    def mark(self, extent: Extent, *, is_taken: bool) -> None:
        for index in range(extent.offset // GRANULE, -(-extent.end // GRANULE)):
            assert self.taken[index] is not is_taken
            self.taken[index] = is_taken


class AllocatorMachine(RuleBasedStateMachine):
    extents: Bundle[Extent] = Bundle("extents")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(CAPACITY, GRANULE)
        self.naive = NaiveAllocator()

    @rule(target=extents, length=st.integers(1, 8 * GRANULE))
    def allocate(self, length: int) -> Extent | MultipleResults[Extent]:
        extent = self.allocator.allocate(length)
        assert extent == self.naive.allocate(length)
        return multiple() if extent is None else extent

    @rule(target=extents, first=st.integers(-1, GRANULES), off=st.sampled_from([0, 0, 0, 1]), length=st.integers(1, 64))
    def allocate_at(self, first: int, off: int, length: int) -> Extent | MultipleResults[Extent]:
        extent = Extent(first * GRANULE + off, length)
        if off or not self.naive.is_free(extent):
            with pytest.raises(InvalidInputError):
                self.allocator.allocate_at(extent.offset, length)
            return multiple()
        assert self.allocator.allocate_at(extent.offset, length) == extent
        self.naive.mark(extent, is_taken=True)
        return extent

    @rule(extent=consumes(extents))
    def free(self, extent: Extent) -> None:
        self.allocator.free(extent)
        self.naive.mark(extent, is_taken=False)
        with pytest.raises(InvalidInputError, match="not allocated"):
            self.allocator.free(extent)

    @invariant()
    def agrees(self) -> None:
        self.allocator.check()
        assert self.allocator.used_bytes == sum(self.naive.taken) * GRANULE
        assert self.allocator.free_bytes + self.allocator.used_bytes == GRANULES * GRANULE
        stretches = [(first * GRANULE, granules * GRANULE) for granules, first in self.naive.stretches()]
        assert list(self.allocator.free_stretches()) == stretches
        largest = max((granules for granules, _ in self.naive.stretches()), default=0)
        assert self.allocator.largest_free_bytes == largest * GRANULE


AllocatorMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_allocator_agrees_with_the_naive_one = AllocatorMachine.TestCase


def full_allocator(pieces: int) -> tuple[ExtentAllocator, list[Extent]]:
    allocator = ExtentAllocator(pieces * GRANULE, GRANULE)
    extents = [allocator.allocate(GRANULE) for _ in range(pieces)]
    return allocator, [extent for extent in extents if extent is not None]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 0, 2), (1, 2, 0), (2, 0, 1)])
def test_freed_neighbours_are_joined_at_once(order: tuple[int, ...]) -> None:
    allocator, extents = full_allocator(3)
    for index in order:
        allocator.free(extents[index])
        allocator.check()
    assert allocator.largest_free_bytes == 3 * GRANULE
    assert allocator.allocate(3 * GRANULE) == Extent(0, 3 * GRANULE)


def test_the_tightest_hole_is_taken_then_the_lowest() -> None:
    allocator, extents = full_allocator(12)
    for index in (0, 1, 2, 5, 8, 9):  # holes of 3, 1 and 2 granules
        allocator.free(extents[index])
    assert allocator.allocate(GRANULE) == Extent(5 * GRANULE, GRANULE)
    assert allocator.allocate(2 * GRANULE) == Extent(8 * GRANULE, 2 * GRANULE)
    allocator.free(extents[10])
    allocator.free(Extent(8 * GRANULE, 2 * GRANULE))
    assert allocator.allocate(3 * GRANULE) == Extent(0, 3 * GRANULE)


def test_lengths_are_kept_and_rounding_is_counted() -> None:
    allocator = ExtentAllocator(1 << 20)
    extent = allocator.allocate(4097)
    assert extent == Extent(0, 4097)
    assert allocator.used_bytes == 8192
    assert allocator.allocate(1) == Extent(8192, 1)


def test_holes_apart_do_not_hold_a_long_record_until_what_lies_between_goes() -> None:
    allocator, extents = full_allocator(9)
    for extent in extents[::2]:
        allocator.free(extent)
    assert allocator.free_bytes == 5 * GRANULE
    assert allocator.allocate(2 * GRANULE) is None
    allocator.free(extents[1])
    assert allocator.allocate(3 * GRANULE) == Extent(0, 3 * GRANULE)


@pytest.mark.parametrize("stranger", [Extent(0, 5), Extent(GRANULE, GRANULE), Extent(-1, 1), Extent(1 << 40, 1)])
def test_extents_it_did_not_give_are_refused_and_change_nothing(stranger: Extent) -> None:
    allocator = ExtentAllocator(CAPACITY, GRANULE)
    extent = allocator.allocate(GRANULE)
    with pytest.raises(InvalidInputError, match="not allocated"):
        allocator.free(stranger)
    allocator.check()
    assert extent is not None
    assert allocator.holds(extent)
    assert not allocator.holds(stranger)


def test_an_exact_place_leaves_what_is_before_and_behind_it_free() -> None:
    allocator = ExtentAllocator(10 * GRANULE, GRANULE)
    assert allocator.allocate_at(3 * GRANULE, GRANULE + 1) == Extent(3 * GRANULE, GRANULE + 1)
    assert list(allocator.free_stretches()) == [(0, 3 * GRANULE), (5 * GRANULE, 5 * GRANULE)]
    assert allocator.allocate_at(0, 3 * GRANULE) == Extent(0, 3 * GRANULE)
    assert allocator.allocate_at(5 * GRANULE, 5 * GRANULE) == Extent(5 * GRANULE, 5 * GRANULE)
    assert list(allocator.free_stretches()) == []
    assert allocator.free_bytes == 0
    allocator.check()


@pytest.mark.parametrize("place", [(0, 1), (0, 32), (16, 1), (16, 64), (32, 17), (48, 16), (80, 1), (64, 17), (-16, 1)])
def test_a_place_that_is_not_all_free_is_refused_and_nothing_changes(place: tuple[int, int]) -> None:
    allocator = ExtentAllocator(5 * GRANULE, GRANULE)
    allocator.allocate_at(0, GRANULE)
    allocator.allocate_at(GRANULE, 1)
    allocator.allocate_at(3 * GRANULE, GRANULE)
    with pytest.raises(InvalidInputError, match=r"is taken|no extent"):
        allocator.allocate_at(*place)
    assert allocator.used_bytes == 3 * GRANULE
    assert list(allocator.free_stretches()) == [(2 * GRANULE, GRANULE), (4 * GRANULE, GRANULE)]
    allocator.check()


def test_senseless_sizes_are_refused() -> None:
    allocator = ExtentAllocator(CAPACITY, GRANULE)
    for place in ((0, 0), (0, -1), (1, 1), (0, CAPACITY)):
        with pytest.raises(InvalidInputError, match="no extent"):
            allocator.allocate_at(*place)
    for length in (0, -1):
        with pytest.raises(InvalidInputError, match="1 byte or more"):
            allocator.allocate(length)
    assert allocator.allocate(CAPACITY) is None
    with pytest.raises(InvalidInputError, match="no granule"):
        ExtentAllocator(GRANULE - 1, GRANULE)


@given(st.data())
def test_many_places_at_once_are_what_they_are_one_by_one(data: st.DataObject) -> None:
    one, all_ = ExtentAllocator(CAPACITY, GRANULE), ExtentAllocator(CAPACITY, GRANULE)
    places = data.draw(st.lists(st.tuples(st.integers(-1, GRANULES), st.integers(0, 3 * GRANULE)), max_size=6))
    extents = [Extent(place * GRANULE + data.draw(st.sampled_from([0, 0, 0, 1])), length) for place, length in places]
    for allocator in (one, all_):
        allocator.allocate_at(5 * GRANULE, 2 * GRANULE)
    before = list(all_.free_stretches())
    try:
        for extent in extents:
            one.allocate_at(extent.offset, extent.length)
    except InvalidInputError:
        with pytest.raises(InvalidInputError):
            all_.allocate_all(extents)
        assert list(all_.free_stretches()) == before
    else:
        all_.allocate_all(extents)
        assert list(all_.free_stretches()) == list(one.free_stretches())
        assert all_.used_bytes == one.used_bytes
        assert all(all_.holds(extent) for extent in extents)
    all_.check()
