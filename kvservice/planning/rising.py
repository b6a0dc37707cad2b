"""A ratio by size that never falls: more memory never finds less, whatever noise there is in two estimates. Pure."""

import math
from bisect import bisect_right
from collections.abc import Sequence


def rising(values: Sequence[float]) -> list[float]:
    """The nearest values that never fall, by least squares: pool adjacent violators."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        count = 1
        while blocks and blocks[-1][0] > value:
            mean, before = blocks.pop()
            value = (mean * before + value * count) / (before + count)
            count += before
        blocks.append((value, count))
    return [value for value, count in blocks for _ in range(count)]


class RisingRatio:
    """Of ``values`` at rising ``sizes``: linear in the size's logarithm between two, in the size below the first."""

    def __init__(self, sizes: Sequence[float], values: Sequence[float]) -> None:
        self._sizes, self._values = sizes, rising(values)

    def at(self, size: float) -> float:
        """The ratio at a size; 0 at none."""
        sizes, values = self._sizes, self._values
        index = bisect_right(sizes, size)
        if index == 0:
            return values[0] * max(size, 0.0) / sizes[0]
        if index == len(sizes):
            return values[-1]
        part = math.log(size / sizes[index - 1]) / math.log(sizes[index] / sizes[index - 1])
        return values[index - 1] + part * (values[index] - values[index - 1])
