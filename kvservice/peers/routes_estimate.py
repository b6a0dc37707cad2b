"""How fast one route is: latency and bandwidth, as running means over completed transfers. State only.

    predicted seconds = latency_s + bytes / bytes_per_s

Each transfer gives one ratio, actual to predicted. The part of the prediction that was latency moves the latency, the
rest the bandwidth: so small transfers teach the one and large ones the other, and both stay above zero. The means are
of logarithms: half of what is expected is as likely as twice of it. A transfer counts for more if the last one was long
ago, since what was known is old.
"""

from dataclasses import dataclass

SHARE = 0.1
"""Of a transfer right after another, in the running mean."""
AGE_S = 1.0
"""After so long a transfer counts like two."""
RATIO_MAX = 8.0
"""One transfer that took longer than that is a hiccup, several are the truth."""
FIRST_TRANSFERS = 3
"""So many are taken as they are: the guess before them may be far off."""
SURPRISE, SURPRISES_MIN, SHARE_MAX = 2.0, 3, 0.5
"""Three transfers in a row that took twice, or half, as long are no chance: what is known is wrong, the next ones count
for more."""
SECONDS_MIN = 1e-9
LATENCY_S_RANGE = (1e-7, 600.0)
BYTES_PER_S_RANGE = (1e3, 1e13)


@dataclass(frozen=True, slots=True)
class Speed:
    """What a route is taken for before anything was measured."""

    latency_s: float
    bytes_per_s: float


class _Pace:
    """When transfers of one kind came, and how many in a row were surprises; below 0: of faster ones."""

    __slots__ = ("last_s", "surprises")

    def __init__(self) -> None:
        self.last_s = 0.0
        self.surprises = 0

    def share(self, ratio: float, now_s: float) -> float:
        """What a transfer counts in the running mean."""
        way = (ratio > SURPRISE) - (ratio < 1 / SURPRISE)
        self.surprises = self.surprises + way if way * self.surprises > 0 else way
        share: float = 1.0 - (1.0 - SHARE) ** (1.0 + max(0.0, now_s - self.last_s) / AGE_S)
        self.last_s = now_s
        in_a_row = abs(self.surprises)
        return share if in_a_row < SURPRISES_MIN else max(share, min(SHARE_MAX, share * in_a_row))


class Estimate:
    """The speed of one route. ``transfers``: how many it stands on; ``last_s``: when the last one with bytes ended.

    ``best``: the lowest latency and the highest bandwidth that it was ever taken for, once measured.
    """

    __slots__ = ("_large", "_small", "best", "bytes_per_s", "last_s", "latency_s", "transfers")

    def __init__(self, guess: Speed) -> None:
        self.latency_s, self.bytes_per_s = guess.latency_s, guess.bytes_per_s
        self.transfers = 0
        self.last_s = 0.0
        self.best: Speed | None = None
        self._small, self._large = _Pace(), _Pace()

    def seconds(self, count: int) -> float:
        """Predicted seconds for ``count`` bytes."""
        return self.latency_s + count / self.bytes_per_s

    def raise_to(self, bytes_per_s: float) -> None:
        """Something else shows that the route carries so much, at least."""
        self.bytes_per_s = max(self.bytes_per_s, bytes_per_s)
        if self.best is not None:
            self.best = Speed(self.best.latency_s, max(self.best.bytes_per_s, bytes_per_s))

    def is_hopeless(self, count: int, seconds: float) -> bool:
        """Is there no hope for less than ``seconds``, as it never was that good?"""
        return self.best is not None and self.best.latency_s + count / self.best.bytes_per_s > seconds

    @property
    def is_mending(self) -> bool:
        """Was the last large transfer, or were the last small ones, much faster than predicted?"""
        return self._large.surprises < 0 or self._small.surprises <= -SURPRISES_MIN

    def note(self, count: int, seconds: float, now_s: float) -> None:
        """A transfer of ``count`` bytes took ``seconds``; 0 bytes: a ping."""
        predicted_s = self.seconds(count)
        ratio, of_latency = max(seconds, SECONDS_MIN) / predicted_s, self.latency_s / predicted_s
        share = (self._small if of_latency > 0.5 else self._large).share(ratio, now_s)
        if self.transfers < FIRST_TRANSFERS:
            share = 1.0
        else:
            ratio = _within(ratio, (1 / RATIO_MAX, RATIO_MAX))
        self.latency_s = _within(self.latency_s * ratio ** (share * of_latency), LATENCY_S_RANGE)
        self.bytes_per_s = _within(self.bytes_per_s / ratio ** (share * (1.0 - of_latency)), BYTES_PER_S_RANGE)
        self.transfers += 1
        if count:
            self.last_s = now_s
        if self.transfers >= FIRST_TRANSFERS:
            best = self.best or Speed(self.latency_s, self.bytes_per_s)
            self.best = Speed(min(best.latency_s, self.latency_s), max(best.bytes_per_s, self.bytes_per_s))


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])
