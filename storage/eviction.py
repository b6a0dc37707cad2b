"""Which key goes first when room is needed. State only: it holds keys and numbers, frees nothing, reads no clock.

``ValueOrder`` is Greedy-Dual-Size-Frequency (Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-
Frequency Caching Policy", HP Labs 1998) over the clock of Cao and Irani ("Cost-Aware WWW Proxy Caching Algorithms",
USITS 1997), with ratios rounded as in CAMP (Ghandeharizadeh et al., Middleware 2014). ``LruOrder`` is the naive one.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Generic, NamedTuple, NewType, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)

Priority = NewType("Priority", int)
"""The place a key had in one order: what ``remove`` gives and ``restore`` takes. Means nothing in another order."""

SECONDS_SAVED_MAX = 1e6
"""Eleven days of prefill. Who takes seconds from a client bounds them: one absurd claim would stay for ever."""

USES_COUNTED_MAX = 64
"""More uses than this count as this many: what was hot once leaves after so many turnovers of the cache, not never."""

PRECISION_BITS = 3
"""Significant bits of a value: two that differ by less than a quarter may tie, and ties go leaf first."""

POSITION_BITS = 32
AGE_BITS = 48  # 89 years of 100,000 adds a second
SLOT_BITS = 28
STALE_MIN = 64
"""Below this many stale entries no compaction pays."""

DISCARDS_MAX = 4096
"""Stale entries that one ``pop`` takes off the top (2 to 5 us each) before it compacts instead."""

_POSITION_MAX = (1 << POSITION_BITS) - 1
_SLOT_MASK = (1 << SLOT_BITS) - 1
_PRIORITY_SHIFT = POSITION_BITS + AGE_BITS + SLOT_BITS
_UNITS = float(1 << 64)  # in one second a byte


class Worth(NamedTuple):
    """What keeping a key is good for, at the moment it becomes evictable.

    ``seconds_saved``: prefill seconds less loading seconds, summed over the caches of a group; 0 to SECONDS_SAVED_MAX,
    0 where loading takes longer. Leave out what grows with position: a token's attention over all tokens before it.
    That part would make a suffix worth more per byte than its own prefix, which it is of no use without; a full cache
    of suffixes saves nothing. Without it equal segments tie, and ties go leaf first. So take seconds that a model's
    tokens take on average rather than each cache's own: 10 % of noise costs up to 1 % of all seconds saved.
    ``bytes``: what leaving frees, at least 1.
    ``uses``: how often it was stored or used, at least 1; may be a fraction. Of a group the uses of all its caches, or
    their mean: all count a mirror twice, in seconds and in uses, but in a replay saved 0.2 to 2 % more seconds.
    ``position``: of its first token; the deeper of two that tie goes first.
    """

    seconds_saved: float
    bytes: int
    uses: float
    position: int


class EvictionOrder(Protocol[K]):
    """Evictable keys, the one that goes next first. Keys are hashable and never None; one thread owns an order.

    A key is taken out while something needs its bytes. After a *use* it comes back by ``add``, with its new worth and
    age. Work that is no use (a fold, a copy to SSD) brings it back by ``restore``, to the very place it had: a
    background worker that walks the whole cache would otherwise make everything look used.
    """

    def add(self, key: K, worth: Worth) -> None:
        """``key`` may go from now on, by this worth. It must not be in the order."""

    def remove(self, key: K) -> Priority:
        """``key`` may no longer go: it is held, or gone. It must be in the order. The result is for ``restore``."""

    def restore(self, key: K, priority: Priority) -> None:
        """Undo a ``remove``, however long ago: among those still here ``key`` goes when it would have gone."""

    def pop(self) -> K | None:
        """Take out the key that goes first; None if no key may go."""

    def peek(self) -> K | None:
        """The key that ``pop`` would take."""

    def yields_to(self, worth: Worth) -> bool:
        """Would the key that goes first go before one that came now with this worth? False if no key may go."""

    def first(self, count: int) -> list[K]:
        """The next ``count`` keys to go, or all if they are fewer. Cheap for few: see the order."""

    def __iter__(self) -> Iterator[K]:
        """All keys as they would go, lazily: ending early costs no more than ``first``. Change nothing meanwhile."""

    def __contains__(self, key: object) -> bool: ...

    def __len__(self) -> int: ...


class LruOrder(Generic[K]):
    """The oldest goes first, whatever it is worth. All calls O(1), but ``restore``: O(younger keys)."""

    __slots__ = ("_age", "_ages")

    def __init__(self) -> None:
        self._ages: OrderedDict[K, Priority] = OrderedDict()
        self._age = 0

    def add(self, key: K, worth: Worth) -> None:
        """See EvictionOrder."""
        assert key not in self._ages, "a key is added once"
        self._age += 1
        self._ages[key] = Priority(self._age)

    def remove(self, key: K) -> Priority:
        """See EvictionOrder."""
        return self._ages.pop(key)

    def restore(self, key: K, priority: Priority) -> None:
        """See EvictionOrder."""
        assert key not in self._ages, "a key is restored once"
        younger = []
        for other in reversed(self._ages):
            if self._ages[other] < priority:
                break
            younger.append(other)
        self._ages[key] = priority
        for other in reversed(younger):
            self._ages.move_to_end(other)

    def pop(self) -> K | None:
        """See EvictionOrder."""
        return self._ages.popitem(last=False)[0] if self._ages else None

    def peek(self) -> K | None:
        """See EvictionOrder."""
        return next(iter(self._ages), None)

    def yields_to(self, worth: Worth) -> bool:
        """See EvictionOrder. What comes now is the youngest."""
        return bool(self._ages)

    def first(self, count: int) -> list[K]:
        """See EvictionOrder."""
        return list(islice(self._ages, count))

    def __iter__(self) -> Iterator[K]:
        return iter(self._ages)

    def __contains__(self, key: object) -> bool:
        return key in self._ages

    def __len__(self) -> int:
        return len(self._ages)


class ValueOrder(Generic[K]):
    """The key that saves least per byte and use goes first; what is not used again ages and goes as well.

        value    = uses * seconds_saved / bytes         rounded down to PRECISION_BITS significant bits
        priority = clock + value                        the clock is read at the value's own precision
        clock    = the highest priority that ever went

    So the clock rises by one value per turnover of the cache, and a key lasts as many turnovers as its value is times
    the others'. Reading the clock coarsely makes the segments of one chain tie although other keys went while the
    chain was stored; ties go leaf first (the larger position), then the older. Every value is at least one unit, so
    that keys of no worth age too.

    Integers, not floats: a unit is 2**-64 seconds a byte, the clock neither overflows nor loses precision, and needs
    no rebasing. It takes 2**72 units (a second a megabyte for 2**28 turnovers) before numbers take 16 bytes more.

    ``add`` O(log n), ``remove`` O(1) and ``pop`` O(log n) amortised; ``first(k)`` O((k + stale ones met) log k).
    Removed keys leave a stale number in the heap; when these are half as many as the keys the heap is made anew: a
    pause of 0.05 to 0.1 us a key. With 1,000,000 keys (bench/eviction.py): add 1.1 us, remove and add 1.4 us in turn
    and 2.9 at random (LruOrder 0.4 and 1.7), 121 bytes a key and 188 with stale ones, pauses of 0.1 s at most.
    """

    # number := clock + value | POSITION_MAX - position | age | slot    one int a key: half of what a tuple takes, no
    # work for the garbage collector, and heapq compares it in C. slot: the key's place in ``_keys``, used again.
    __slots__ = ("_age", "_clock", "_free_slots", "_heap", "_keys", "_numbers")

    def __init__(self) -> None:
        self._heap: list[Priority] = []
        self._numbers: dict[K, Priority] = {}
        self._keys: list[K | None] = []
        self._free_slots: list[int] = []
        self._clock = 0
        self._age = 0

    def add(self, key: K, worth: Worth) -> None:
        """See EvictionOrder."""
        self._age += 1
        self._put(key, self._place(worth))

    def _place(self, worth: Worth) -> int:
        seconds_saved, size, uses, position = worth
        assert 0 <= seconds_saved <= SECONDS_SAVED_MAX, "bounded where it came in, and never NaN"
        assert 0 <= position <= _POSITION_MAX, "a position is bounded where it came in"
        assert size > 0 < uses, "a key has bytes and was stored"
        value = int((uses if uses < USES_COUNTED_MAX else USES_COUNTED_MAX) * seconds_saved / size * _UNITS) or 1
        cut = value.bit_length() - PRECISION_BITS
        priority = (value >> cut) + (self._clock >> cut) << cut if cut > 0 else value + self._clock
        return (priority << POSITION_BITS | _POSITION_MAX - position) << AGE_BITS | self._age

    def restore(self, key: K, priority: Priority) -> None:
        """See EvictionOrder."""
        self._put(key, priority >> SLOT_BITS)

    def _put(self, key: K, place: int) -> None:
        assert key not in self._numbers, "a key is added once"
        if self._free_slots:
            slot = self._free_slots.pop()
            self._keys[slot] = key
        else:
            slot = len(self._keys)
            assert slot <= _SLOT_MASK, "fewer keys than slots"
            self._keys.append(key)
        number = Priority(place << SLOT_BITS | slot)
        self._numbers[key] = number
        heappush(self._heap, number)

    def remove(self, key: K) -> Priority:
        """See EvictionOrder."""
        number = self._numbers.pop(key)
        slot = number & _SLOT_MASK
        self._keys[slot] = None
        self._free_slots.append(slot)
        live = len(self._numbers)
        if len(self._heap) - live > STALE_MIN + live // 2:
            self._compact()
        return number

    def pop(self) -> K | None:
        """See EvictionOrder."""
        key = self.peek()
        if key is not None:
            self._clock = max(self._clock, self._heap[0] >> _PRIORITY_SHIFT)
            heappop(self._heap)
            self.remove(key)
        return key

    def peek(self) -> K | None:
        """See EvictionOrder. Drops stale numbers on its way."""
        for _ in range(DISCARDS_MAX):
            if not self._heap:
                return None
            key = self._live(self._heap[0])
            if key is not None:
                return key
            heappop(self._heap)
        self._compact()
        return self._live(self._heap[0]) if self._heap else None

    def yields_to(self, worth: Worth) -> bool:
        """See EvictionOrder."""
        return self.peek() is not None and self._heap[0] >> SLOT_BITS <= self._place(worth)

    def first(self, count: int) -> list[K]:
        """See EvictionOrder."""
        return list(islice(self, count))

    def __iter__(self) -> Iterator[K]:
        heap, last = self._heap, -1
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            number, place = heappop(frontier)
            key = self._live(number)
            if key is not None and number != last:  # restored into its old slot, a key may be there twice
                yield key
            last = number
            for child in range(2 * place + 1, min(2 * place + 3, len(heap))):
                heappush(frontier, (heap[child], child))

    def __contains__(self, key: object) -> bool:
        return key in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def _live(self, number: Priority) -> K | None:
        key = self._keys[number & _SLOT_MASK]
        return key if key is not None and self._numbers[key] == number else None

    def _compact(self) -> None:
        self._heap = list(self._numbers.values())
        heapify(self._heap)


class AgeOrder(ValueOrder[K]):
    """The oldest goes first, as in LruOrder, at ValueOrder's cost: LruOrder's ``restore`` takes 111 ms at 1,000,000."""

    __slots__ = ()

    def _place(self, worth: Worth) -> int:
        return self._age

    def yields_to(self, worth: Worth) -> bool:
        """See EvictionOrder."""
        return bool(len(self))
