"""Both orders against a sorted list, and what the order by value promises for chains, sizes, scans and groups."""

import random
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.storage.eviction import (
    DISCARDS_MAX,
    PRECISION_BITS,
    SECONDS_SAVED_MAX,
    STALE_MIN,
    USES_COUNTED_MAX,
    AgeOrder,
    EvictionOrder,
    LruOrder,
    Priority,
    ValueOrder,
    Worth,
)

MIB = 1 << 20
MakeOrder = Callable[[], EvictionOrder[str]]


def make_worth(seconds: float = 1.0, size: int = 4 * MIB, uses: float = 1, position: int = 0) -> Worth:
    return Worth(seconds, size, uses, position)


def drain(order: EvictionOrder[str]) -> list[str]:
    gone = []
    while (key := order.pop()) is not None:
        gone.append(key)
    return gone


# The model: a dict that is sorted whenever somebody asks


class SortedModel:
    """(priority, -position, age) of every key, in plain numbers."""

    def __init__(self, *, is_lru: bool) -> None:
        self.is_lru = is_lru
        self.places: dict[str, tuple[int, int, int]] = {}
        self.clock = 0
        self.age = 0

    def place(self, worth: Worth, age: int) -> tuple[int, int, int]:
        if self.is_lru:
            return (0, 0, age)
        counted = min(worth.uses, USES_COUNTED_MAX)
        value = max(1, int(counted * worth.seconds_saved / worth.bytes * 2.0**64))
        step = 1
        while value >= step << PRECISION_BITS:
            step *= 2
        return (value // step * step + self.clock // step * step, -worth.position, age)

    def add(self, key: str, worth: Worth) -> None:
        self.age += 1
        self.places[key] = self.place(worth, self.age)

    def in_order(self) -> list[str]:
        return sorted(self.places, key=self.places.__getitem__)

    def pop(self) -> str | None:
        if not self.places:
            return None
        first = self.in_order()[0]
        self.clock = max(self.clock, self.places.pop(first)[0])
        return first

    def yields_to(self, worth: Worth) -> bool:
        return bool(self.places) and min(self.places.values()) < self.place(worth, self.age + 1)


any_worths = st.builds(
    Worth,
    seconds_saved=st.sampled_from([0.0, 1e-9, 0.25, 1.0, 1.1, 30.0, SECONDS_SAVED_MAX]),
    bytes=st.sampled_from([1, 4096, 4 * MIB, 5 * MIB, 64 * MIB, 1 << 40]),
    uses=st.sampled_from([1, 1.5, 2, 3, USES_COUNTED_MAX, USES_COUNTED_MAX + 1, 10**9]),
    position=st.sampled_from([0, 1, 256, 512, (1 << 32) - 1]),
)
worths = st.one_of(st.just(make_worth()), any_worths)  # many of one worth, so that ages decide
steps = st.tuples(
    st.sampled_from(["toggle", "toggle", "toggle", "pop", "restore"]), st.sampled_from("abcdefgh"), worths
)


@pytest.mark.parametrize("make", [LruOrder, ValueOrder])
@given(script=st.lists(steps, max_size=100))
@settings(max_examples=500, deadline=None)
def test_every_answer_is_that_of_a_sorted_list(make: MakeOrder, script: list[tuple[str, str, Worth]]) -> None:
    order, model = make(), SortedModel(is_lru=make is LruOrder)
    taken: dict[str, tuple[Priority, tuple[int, int, int]]] = {}
    for step, key, worth in script:
        assert order.yields_to(worth) == model.yields_to(worth)
        if step == "pop":
            assert order.pop() == model.pop()
        elif step == "restore" and key in taken and key not in model.places:
            priority, model.places[key] = taken.pop(key)
            order.restore(key, priority)
        elif key in model.places:
            taken[key] = (order.remove(key), model.places.pop(key))
        else:
            taken.pop(key, None)
            order.add(key, worth)
            model.add(key, worth)
        expected = model.in_order()
        assert list(order) == expected
        assert order.first(3) == expected[:3]
        assert order.peek() == next(iter(expected), None)
        assert (len(order), key in order) == (len(expected), key in expected)
    assert drain(order) == model.in_order()


def test_a_key_that_is_added_twice_is_a_bug() -> None:
    for order in (LruOrder[str](), ValueOrder[str]()):
        order.add("a", make_worth())
        with pytest.raises(AssertionError):
            order.add("a", make_worth())


@pytest.mark.parametrize(
    "worth",
    [
        make_worth(seconds=-1.0),
        make_worth(seconds=float("nan")),
        make_worth(seconds=float("inf")),
        make_worth(size=0),
        make_worth(uses=0),
        make_worth(position=-1),
        make_worth(position=1 << 32),
    ],
)
def test_a_worth_out_of_bounds_is_a_bug(worth: Worth) -> None:
    order = ValueOrder[str]()
    with pytest.raises(AssertionError):
        order.add("a", worth)
    assert (order.peek(), len(order)) == (None, 0)


# What stays


class SmallCache:
    """So many bytes; evicts by the order it was given."""

    def __init__(self, capacity: int, order: EvictionOrder[str]) -> None:
        self.capacity = capacity
        self.order = order
        self.worths: dict[str, Worth] = {}
        self.used = 0

    def use(self, chain: list[tuple[str, Worth]]) -> None:
        """As a node does: what is there is held until what is not has been stored."""
        found = [key for key, _ in chain if key in self.worths]
        for key in found:
            self.order.remove(key)
            self.worths[key] = self.worths[key]._replace(uses=self.worths[key].uses + 1)
        for key, worth in chain:
            if key not in self.worths:
                self.make_room(worth.bytes)
                self.worths[key] = worth
        for key, _ in chain:
            self.order.add(key, self.worths[key])

    def make_room(self, size: int) -> None:
        while self.used + size > self.capacity:
            gone = self.order.pop()
            assert gone is not None
            self.used -= self.worths.pop(gone).bytes
        self.used += size


def make_chain(name: str, length: int) -> list[tuple[str, Worth]]:
    return [(f"{name}/{at}", make_worth(position=at * 256)) for at in range(length)]


def orphans(cache: SmallCache) -> set[str]:
    """Segments that are there without the one before them."""

    def before(key: str) -> str:
        name, _, at = key.partition("/")
        return f"{name}/{int(at) - 1}"

    return {key for key in cache.worths if not key.endswith("/0") and before(key) not in cache.worths}


@pytest.mark.parametrize("seed", range(5))
def test_what_stays_of_chains_are_whole_prefixes(seed: int) -> None:
    rng = random.Random(seed)
    chains = [make_chain(f"c{number}", rng.randint(6, 20)) for number in range(40)]
    half = sum(worth.bytes for chain in chains for _, worth in chain) // 2
    by_value, by_age = SmallCache(half, ValueOrder()), SmallCache(half, LruOrder())
    for cache in (by_value, by_age):
        rng = random.Random(seed)
        for chain in chains:
            cache.use(chain)
        for _ in range(60):
            cache.use(rng.choice(chains))
        cache.use(make_chain("last", 3))
    assert by_value.used > half * 0.95
    assert not orphans(by_value)
    assert orphans(by_age), "plain LRU in store order drops prefixes first"


def test_a_chain_that_grows_by_turns_never_loses_its_start_first() -> None:
    cache = SmallCache(40 * 4 * MIB, ValueOrder())
    for turn in range(1, 15):
        for name in "abcdefgh":
            cache.use(make_chain(name, turn))
    assert not orphans(cache)


def test_segments_of_a_chain_tie_although_others_went_while_it_was_stored() -> None:
    order = ValueOrder[str]()
    for number in range(8):  # of little worth: every one that goes moves the clock a little
        order.add(f"small {number}", make_worth(seconds=0.01 * (number + 1)))
    for at in range(8):
        order.pop()
        order.add(f"{at}", make_worth(position=at))
    assert drain(order) == ["7", "6", "5", "4", "3", "2", "1", "0"]


def test_a_large_cache_used_once_goes_before_small_ones_used_often() -> None:
    order = ValueOrder[str]()
    small = [f"small {number}" for number in range(16)]
    for key in small:
        order.add(key, make_worth(size=4 * MIB, uses=5))
    order.add("large", make_worth(size=64 * MIB, uses=1))
    assert order.pop() == "large"
    assert sorted(drain(order)) == sorted(small)


def test_of_equal_use_the_one_that_saves_less_per_byte_goes_first() -> None:
    order = ValueOrder[str]()
    order.add("dear", make_worth(seconds=2.0))
    order.add("cheap", make_worth(seconds=0.5))
    order.add("small", make_worth(seconds=0.5, size=MIB // 4))
    assert drain(order) == ["cheap", "dear", "small"]


def test_scans_do_not_push_out_what_is_used() -> None:
    hot = [(f"hot{number}/0", make_worth()) for number in range(20)]
    left = {}
    for name, order in (("value", ValueOrder[str]()), ("lru", LruOrder[str]())):
        cache = SmallCache(30 * 4 * MIB, order)
        for one in hot * 3:
            cache.use([one])
        for scan in range(5):
            for number in range(30):
                cache.use([(f"scan{scan}.{number}/0", make_worth())])
            left[name, scan] = sum(key in cache.worths for key, _ in hot)
            for one in hot:
                cache.use([one])
    assert left == {("value", scan): 20 for scan in range(5)} | {("lru", scan): 0 for scan in range(5)}


def test_a_group_with_many_mirrors_outlives_a_lone_cache_of_its_age() -> None:
    order = ValueOrder[str]()
    order.add("group", make_worth(seconds=8.0, size=int(32 * MIB * 1.56)))
    order.add("alone", make_worth(seconds=1.0, size=32 * MIB))
    assert drain(order) == ["alone", "group"]


def turnovers_until_gone(order: ValueOrder[str], key: str, worth: Worth) -> int:
    """Each turnover everything but ``key`` is new once."""
    for number in range(10):
        order.add(f"0/{number}", worth)
    for turnover in range(1, 1000):
        for number in range(10):
            if order.pop() == key:
                return turnover
            order.add(f"{turnover}/{number}", worth)
    raise AssertionError("it stays for ever")


@pytest.mark.parametrize("seconds", [1.0, 0.0])
def test_what_is_not_used_any_more_goes_however_often_it_was_used(seconds: float) -> None:
    order = ValueOrder[str]()
    order.add("once hot", make_worth(seconds=seconds, uses=10**6))
    lasted = turnovers_until_gone(order, "once hot", make_worth(seconds=seconds, position=256))
    assert lasted <= USES_COUNTED_MAX + 1


# Taking out and putting back


@pytest.mark.parametrize("make", [LruOrder, ValueOrder])
def test_a_worker_that_walks_everything_changes_nothing(make: MakeOrder) -> None:
    order, rng = make(), random.Random(3)
    for number in range(200):
        order.add(f"{number}", make_worth(seconds=rng.choice([0.5, 1, 3]), position=rng.randrange(5)))
    before = list(order)
    for key in rng.sample(before, len(before)):
        order.restore(key, order.remove(key))
    assert list(order) == before
    assert drain(order) == before


@pytest.mark.parametrize("make", [LruOrder, ValueOrder])
def test_a_restored_key_is_as_old_as_it_was(make: MakeOrder) -> None:
    order = make()
    for key in ("gone", "a"):
        order.add(key, make_worth())
    order.remove("gone")
    order.add("b", make_worth())
    place = order.remove("a")
    order.add("c", make_worth())
    order.restore("a", place)
    assert drain(order) == ["a", "b", "c"]


def test_what_was_out_for_long_goes_where_it_would_have_and_the_clock_does_not_go_back() -> None:
    order = ValueOrder[str]()
    for number, key in enumerate("abcdef"):
        order.add(key, make_worth(seconds=2.0**number))
    place = order.remove("b")
    assert [order.pop() for _ in range(3)] == ["a", "c", "d"]
    order.restore("b", place)
    assert order.pop() == "b"
    order.add("new", make_worth(seconds=10.0))  # the clock says 8 s, as before b went with 2 s, and e goes at 16 s
    assert drain(order) == ["e", "new", "f"]


# Bounds


def test_stale_numbers_are_bounded_by_the_keys_that_are_there() -> None:
    order, rng = ValueOrder[str](), random.Random(5)
    keys = [f"{number}" for number in range(500)]
    for key in keys:
        order.add(key, make_worth())
    for step in range(20_000):
        key = rng.choice(keys)
        place = order.remove(key)
        if step % 3:
            order.add(key, make_worth(uses=1 + step % 7))
        else:
            order.restore(key, place)
        assert len(order._heap) <= 1.5 * len(order) + STALE_MIN + 1
    assert len(order._keys) == len(keys), "places are used again"
    for key in keys:
        order.remove(key)
    assert len(order._heap) <= STALE_MIN


def test_one_pop_past_many_stale_numbers_compacts_instead_of_taking_them_one_by_one() -> None:
    order = ValueOrder[int]()
    for number in range(4 * DISCARDS_MAX):
        order.add(number, make_worth())
    for number in range(DISCARDS_MAX + 10):  # fewer than half of the keys: no compaction yet
        order.remove(number)
    order.remove(4 * DISCARDS_MAX - 1)
    assert len(order._heap) == 4 * DISCARDS_MAX
    assert order.pop() == DISCARDS_MAX + 10
    assert len(order._heap) == len(order), "the last one's went too"


def test_the_clock_neither_overflows_nor_loses_precision() -> None:
    worth = make_worth(seconds=100.0, size=1)  # more a byte than any cache saves
    order = ValueOrder[str]()
    order.add("first", worth)
    order.pop()
    step = order._clock
    for turnovers in (10_000_000, 10**18):
        order._clock = step * turnovers
        for at in range(8):
            order.add(f"{at}", make_worth(seconds=1e-6 * (1 + at % 4), size=1 << 40, position=at))
        assert drain(order) == ["4", "0", "5", "1", "6", "2", "7", "3"]
        assert step * turnovers < order._clock < step * turnovers + step, "a trillionth of the step still counts"


def test_numbers_stay_small_over_ten_million_turnovers() -> None:
    order = ValueOrder[str]()
    order._clock = 10_000_000 * int(2.0**64 / MIB)  # a second a megabyte, each time
    order.add("a", make_worth(seconds=1.0, size=MIB))
    assert sys.getsizeof(order._heap[0]) <= 48


@given(st.lists(st.integers(0, 5), max_size=40))
def test_age_order_is_lru_order_whatever_the_worth(steps: list[int]) -> None:
    """0, 1: add one; 2: take out and put back; 3: use; 4: pop; 5: remove the newest."""
    naive, order = LruOrder[int](), AgeOrder[int]()
    keys: list[int] = []
    for count, step in enumerate(steps):
        worth = Worth(float(count % 3), 1 + count % 5, 1, count % 7)
        if step <= 1:
            keys.append(count)
            for one in (naive, order):
                one.add(count, worth)
        elif keys and step == 2:
            for one in (naive, order):
                one.restore(keys[0], one.remove(keys[0]))
        elif keys and step == 3:
            for one in (naive, order):
                one.remove(keys[-1])
                one.add(keys[-1], worth)
        elif keys and step == 4:
            assert naive.yields_to(worth)
            assert order.yields_to(worth)
            popped = naive.pop()
            assert order.pop() == popped
            keys.remove(popped)  # type: ignore[arg-type]
        elif keys:
            for one in (naive, order):
                one.remove(keys[-1])
            keys.pop()
        assert list(naive) == list(order)
