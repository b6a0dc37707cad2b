"""What a node answers over HTTP, made once for all who ask at about the same time.

An answer rests for a few times as long as making it took: however many ask, a node's one thread has most of its time
for lookups.
"""

import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

REST = 9
"""Making one answer again and again takes a tenth of the loop's time at most: it rests so many times as long."""
REST_S_MAX = 0.25
KEPT_MAX = 16
"""Answers to different questions that rest."""
Clock = Callable[[], float]


class Resting:
    """One answer. As of now, or of as long ago as it rests."""

    def __init__(self, make: Callable[[], bytes], clock: Clock = time.perf_counter) -> None:
        self._make = make
        self._clock = clock
        self._content = b""
        self._rests_until_s = float("-inf")

    def get(self) -> bytes:
        """Raises what making it raises; that is not kept."""
        began_s = self._clock()
        if began_s >= self._rests_until_s:
            self._content = self._make()
            ended_s = self._clock()
            self._rests_until_s = ended_s + min(REST * (ended_s - began_s), REST_S_MAX)
        return self._content


class RestingAnswers:
    """Answers to a path's queries, each of which rests; the last KEPT_MAX are kept."""

    def __init__(self, answer: Callable[[Mapping[str, str]], object], clock: Clock = time.perf_counter) -> None:
        self._answer = answer
        self._clock = clock
        self._kept: OrderedDict[tuple[tuple[str, str], ...], Resting] = OrderedDict()

    def get(self, query: Mapping[str, str]) -> bytes:
        """The answer as JSON. Raises InvalidInputError."""
        key = tuple(sorted(query.items()))
        resting = self._kept.get(key) or Resting(lambda: encoded(self._answer(query)), self._clock)
        content = resting.get()
        self._kept[key] = resting
        self._kept.move_to_end(key)
        if len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)
        return content


def encoded(document: object) -> bytes:
    """As JSON, which has no word for what is not finite: that is null."""
    try:
        text = json.dumps(document, allow_nan=False)
    except ValueError:
        text = json.dumps(finite(document), allow_nan=False)
    return text.encode()


def finite(value: Any) -> Any:
    """The same, of lists, dicts and plain values, with None for numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
