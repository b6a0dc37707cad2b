"""The last segments that lookups asked for and how each was answered, for work elsewhere: a ring of fixed size.

Off unless a setting turns it on. Digests only: no token ids, no texts. State only, owned by the node's thread;
``snapshot`` gives other work its turn.
"""

import asyncio
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvservice.accounting import NAME_CHARS_MAX
from kvservice.caches import Space
from kvservice.lookup import Asked, Finding

# row  := head place:u8 affinity:u8 segment:16s context:16s position:u32 tokens:u32 record_bytes:u64
# head := time_us:u64 call:u64 prompt:u32 namespace:u16                          the same for all segments of a prompt
HEAD = struct.Struct("<QQIH")
ROW = struct.Struct(f"<{HEAD.size}sBB16s16sIIQ")
FIELDS = (
    ("time_us", "<u8"), ("call", "<u8"), ("prompt", "<u4"), ("namespace", "<u2"), ("place", "u1"), ("affinity", "u1"),
    ("segment", "V16"), ("context", "V16"), ("position", "<u4"), ("tokens", "<u4"), ("record_bytes", "<u8"),
)  # fmt: skip
"""The same as numpy reads it."""
ROWS_MAX = 1 << 22
NAMESPACES_MAX = 4096
"""Namespaces that are named at a time; others are, as those that are not known, number 0."""
PROMPT_SEGMENTS_MAX = 8192
"""So many rows a namespace gets at most before the next prompt begins, or one goes on."""
SLICE_ROWS = 16384
"""Copied in one go: about a MiB, 0.2 ms."""
PROMPT_MASK, AFFINITY_MAX = (1 << 32) - 1, (1 << 8) - 1


class Begun(NamedTuple):
    """When the first segment of a prompt was answered, and the prompt's number."""

    time_us: int
    prompt: int


@dataclass(frozen=True, slots=True)
class Named:
    """A namespace of the log. ``token_s``: seconds of prefill a token, as known when it was named."""

    digest: str = ""
    tenant: str = ""
    model: str = ""
    token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Rows in the order in which they were noted, the oldest first; ``lost``: those before them that are gone."""

    rows: memoryview
    namespaces: tuple[Named, ...]
    lost: int


class RequestLog:
    """``rows_max`` segments at ROW.size bytes each, taken at once. ``clock_ns``: the time of day, for display only.

    A namespace's number is another's once none of the rows is of it any more.
    """

    def __init__(self, rows_max: int, clock_ns: Callable[[], int] = time.time_ns) -> None:
        assert 0 < rows_max <= ROWS_MAX, rows_max
        self.rows_max = rows_max
        self.count = 0
        self._rows = bytearray(rows_max * ROW.size)
        self._clock_ns = clock_ns
        self._numbers: OrderedDict[bytes, int] = OrderedDict()  # the one asked for longest ago first
        self._ends: list[int] = [0]  # by number: rows up to here may be of it
        self._namespaces = [Named()]
        self._prompts = 0
        self._head = b""

    def begin(self, space: Space | None, call: int, begun: Begun | None = None) -> Begun:
        """The next prompt is answered, of the lookup with this number; or one goes on that has ``begun``: lookups take
        turns. No more than PROMPT_SEGMENTS_MAX rows are noted before somebody begins again."""
        if begun is None:
            begun = Begun(self._clock_ns() // 1000, self._prompts & PROMPT_MASK)
            self._prompts += 1
        number = 0 if space is None else self._number(space)
        self._head = HEAD.pack(begun.time_us, call, begun.prompt, number)
        return begun

    def note(self, asked: Asked, segment: bytes, finding: Finding, place: int) -> None:
        """One segment of it was answered; ``place``: of the answer."""
        contexts, cache, affinity = asked.accepted_contexts, finding[0], finding[3]
        ROW.pack_into(
            self._rows,
            self.count % self.rows_max * ROW.size,
            self._head,
            place,
            affinity if affinity < AFFINITY_MAX else AFFINITY_MAX,
            segment,
            contexts[0] if contexts else b"",
            asked.position,
            asked.tokens,
            0 if cache is None else cache.record_bytes,
        )
        self.count += 1

    def _number(self, space: Space) -> int:
        number = self._numbers.get(space.namespace)
        if number is None:
            number = self._free_number()
            if not number:
                return 0
            identity = space.identity
            tenant, model = identity.tenant[:NAME_CHARS_MAX], identity.model[:NAME_CHARS_MAX]
            self._namespaces[number] = Named(space.namespace.hex(), tenant, model, space.token_s)
            self._numbers[space.namespace] = number
        else:
            self._numbers.move_to_end(space.namespace)
        self._ends[number] = self.count + PROMPT_SEGMENTS_MAX
        return number

    def _free_number(self) -> int:
        """A new number, or that of the namespace asked for longest ago if no row is of it; else 0."""
        if len(self._namespaces) <= NAMESPACES_MAX:
            self._namespaces.append(Named())
            self._ends.append(0)
            return len(self._namespaces) - 1
        oldest, number = next(iter(self._numbers.items()))
        if self._ends[number] > self.count - self.rows_max:
            return 0
        del self._numbers[oldest]
        return number

    async def snapshot(self) -> Snapshot:
        """All that is held now. What is overwritten while it is copied counts as lost."""
        end, size, copied, namespaces = self.count, ROW.size, 0, tuple(self._namespaces)
        at = max(0, end - self.rows_max)
        source, rows = memoryview(self._rows), np.empty((end - at) * size, np.uint8).data  # not zeroed: 60 ms
        while at < end:
            slot = at % self.rows_max
            count = min(SLICE_ROWS, end - at, self.rows_max - slot)
            rows[copied * size : (copied + count) * size] = source[slot * size : (slot + count) * size]
            at, copied = at + count, copied + count
            await asyncio.sleep(0)
            at = max(at, self.count - self.rows_max)
        return Snapshot(rows[: copied * size], namespaces, end - copied)
