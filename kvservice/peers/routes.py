"""Which medium moves bytes from a peer: the one with the lowest predicted time, changed for good reason. State only.

The medium in use for a peer and a class of sizes is left when another was predicted to be ``better_share`` better for
``better_for_s`` without a break, or when it fails or is gone. So one slow transfer changes nothing, and a link that
degrades is left within seconds. What is not in use is not measured either: it is tried again, as long as what trials
cost is a small share of all transfers.

INT8_STREAM is the stream with half the bytes on the wire, for some work at both ends. Before anything came that way it
is taken for what the stream is known to be: so a slow link has it at once, and a fast one tries it rarely. Bytes are
always those of the record, whatever goes on the wire.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from kvservice.model.errors import UnavailableError
from kvservice.peers.routes_estimate import Estimate, Speed
from kvservice.peers.routes_log import Choice, Medium, RouteLog, Why

GUESSES: Mapping[Medium, Speed] = {
    Medium.IN_PROCESS: Speed(1e-6, 6e9),
    Medium.SHARED_MEMORY: Speed(1e-5, 5e9),
    Medium.STREAM: Speed(2e-4, 1e9),
    Medium.FLIGHT: Speed(1e-3, 5e8),
    Medium.COLD: Speed(3e-2, 5e7),
}
"""Before anything was measured. Cold: one connection to an object store; trials of large records cost most there."""
INT8_SHARE = 0.51
"""Of a record's bytes, what goes on the wire as 8 bits a value, with scales."""
INT8_BYTES_PER_S = 1e9
"""About what one core packs, of a record's bytes."""
INT8_PRICE = 1.25
"""A second of it counts for so many: it takes CPU of both ends that the plain stream leaves to others."""
SIZE_CLASSES = 5
"""Up to 16 KiB, 256 KiB, 4 MiB, 64 MiB, more: latency decides the first, bandwidth the last."""
PEERS_MAX = 1024
TRIALS_BEFORE_SWITCH = 10
LARGE_EXTRA_SHARE = 0.1
BUDGET_HALF_S = 600.0
"""Of what trials may cost: an idle day earns no right to a row of slow transfers."""


@dataclass(frozen=True, slots=True)
class RouteLimits:
    """``trial_share``: of a peer's seconds, what trials may cost, shared out evenly to the media. ``trial_after_s``: a
    route without a transfer for so long is tried again; ``hopeless_after_s``: one that never was as good as what is in
    use. ``failed_s``: how long a route is left alone that failed, if there is another.
    """

    better_share: float = 0.2
    better_for_s: float = 5.0
    trial_share: float = 0.02
    trial_after_s: float = 5.0
    hopeless_after_s: float = 60.0
    failed_s: float = 5.0


class RouteDocument(TypedDict):
    """One route, in /stats. ``transfers``: how many the numbers stand on; 0: they are guesses."""

    peer: str
    medium: str
    latency_s: float
    bytes_per_s: float
    transfers: int


_Kind = tuple[int, bool]


@dataclass(slots=True)
class _InUse:
    """The medium for one peer and kind of transfers. ``beaten_since_s``: since when another is clearly better;
    ``gone_since_s``: since when it is not offered."""

    medium: Medium
    bytes: int
    media: Sequence[Medium]
    beaten_since_s: float | None = None
    gone_since_s: float | None = None


@dataclass(slots=True)
class _Peer:
    """``in_use``: by class of sizes, and whether it may be packed. ``tried_s``: when each medium was last tried.

    ``seconds``, ``bytes``, ``transfers``: of all that was chosen, and ``trial_s``: what trials of each medium cost more
    than the best would have; all fade with ``BUDGET_HALF_S``.
    """

    estimates: dict[Medium, Estimate] = field(default_factory=dict)
    in_use: dict[_Kind, _InUse] = field(default_factory=dict)
    failed_until_s: dict[Medium, float] = field(default_factory=dict)
    tried_s: dict[Medium, float] = field(default_factory=dict)
    seconds: float = 0.0
    bytes: float = 0.0
    transfers: float = 0.0
    trial_s: dict[Medium, float] = field(default_factory=dict)
    noted_s: float = 0.0

    def note(self, count: int, seconds: float, now_s: float) -> None:
        """A transfer that was chosen is done."""
        kept = 0.5 ** ((now_s - self.noted_s) / BUDGET_HALF_S) if self.noted_s else 1.0
        self.seconds = self.seconds * kept + seconds
        self.bytes = self.bytes * kept + count
        self.transfers = self.transfers * kept + 1
        self.trial_s = {medium: spent_s * kept for medium, spent_s in self.trial_s.items()}
        self.noted_s = now_s


class Router:
    """Chooses, and learns from what became of it. ``clock``: monotonic seconds. One thread owns it.

    ``direction``: whether bytes come "from" peers or go "to" them; each has speeds of its own, and so a router.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        limits: RouteLimits | None = None,
        guesses: Mapping[Medium, Speed] = GUESSES,
        direction: str = "from",
    ) -> None:
        self.limits = limits or RouteLimits()
        self.log = RouteLog()
        self._clock = clock
        self._guesses = guesses
        self._direction = direction
        self._peers: dict[str, _Peer] = {}

    def choose(self, peer: str, count: int, media: Sequence[Medium], *, may_pack: bool = False) -> Choice:
        """How to move ``count`` bytes; ``media``: those that can, now. Tell ``done`` or ``failed`` of it.

        ``may_pack``: may they go as 8 bits, also when INT8_STREAM is not among the media of this try? Such transfers
        have a medium in use of their own. Raises UnavailableError if there are no media.
        """
        if not media:
            raise UnavailableError(f"nothing leads to {peer} now; what it has is a miss")
        now_s, known = self._clock(), self._known(peer)
        predicted = {medium: self._estimate(known, medium).seconds(count) for medium in media}
        usable = [one for one in media if known.failed_until_s.get(one, now_s) <= now_s] or list(media)
        medium, why = self._pick(known, (size_class(count), may_pack), count, usable, predicted, now_s)
        choice = Choice(now_s, peer, medium, count, predicted, why, direction=self._direction)
        self.log.begin(choice)
        return choice

    def done(self, choice: Choice, seconds: float) -> None:
        """The bytes of a choice are here, after ``seconds``."""
        choice.actual_s = seconds
        known, medium = self._known(choice.peer), choice.medium
        known.note(choice.bytes, seconds, self._clock())
        self.measured(choice.peer, medium, choice.bytes, seconds)
        if choice.why is Why.TRIAL:  # as was thought: a hiccup is not its fault, and what is slow is known now
            prices = _prices(choice.predicted)
            extra_s = prices[medium] - min(prices.values())
            known.trial_s[medium] = known.trial_s.get(medium, 0.0) + extra_s
        self.log.end(choice)

    def failed(self, choice: Choice) -> None:
        """The bytes of a choice will not come that way; of bytes that were not asked for any more say nothing."""
        choice.has_failed = True
        now_s = self._clock()
        known = self._known(choice.peer)
        known.failed_until_s[choice.medium] = now_s + self.limits.failed_s
        self.log.end(choice)

    def measured(self, peer: str, medium: Medium, count: int, seconds: float) -> None:
        """A transfer that nothing was chosen for: a ping of no bytes, what a peer pushed here."""
        now_s, known = self._clock(), self._known(peer)
        estimate = self._estimate(known, medium)
        estimate.note(count, seconds, now_s)
        if medium is Medium.INT8_STREAM:  # what is packed goes over the same link
            self._estimate(known, Medium.STREAM).raise_to(INT8_SHARE * estimate.bytes_per_s)
        known.failed_until_s.pop(medium, None)
        for in_use in known.in_use.values():
            self._watch(known, in_use, now_s)

    def speed(self, peer: str, medium: Medium) -> Speed:
        """What a route is taken for now."""
        estimate = self._estimate(self._known(peer), medium)
        return Speed(estimate.latency_s, estimate.bytes_per_s)

    def forget(self, peer: str) -> None:
        """The peer left."""
        self._peers.pop(peer, None)

    def document(self) -> list[RouteDocument]:
        """All routes, for /stats."""
        return [self._document(peer, medium) for peer, known in self._peers.items() for medium in list(known.estimates)]

    def _document(self, peer: str, medium: Medium) -> RouteDocument:
        one = self._estimate(self._known(peer), medium)
        return {
            "peer": peer,
            "medium": medium,
            "latency_s": one.latency_s,
            "bytes_per_s": one.bytes_per_s,
            "transfers": one.transfers,
        }

    # State steps

    def _pick(
        self,
        known: _Peer,
        kind: _Kind,
        count: int,
        media: Sequence[Medium],
        predicted: Mapping[Medium, float],
        now_s: float,
    ) -> tuple[Medium, Why]:
        prices = _prices(predicted)
        best = min(media, key=lambda one: prices[one])
        in_use = known.in_use.get(kind)
        if in_use is None or in_use.medium not in media:
            if in_use is None or self._is_gone(in_use, predicted, now_s):
                known.in_use[kind] = _InUse(best, count, media)
            return best, Why.FALLBACK if in_use is not None else Why.ONLY if len(media) == 1 else Why.FIRST
        in_use.bytes, in_use.media, in_use.gone_since_s = count, media, None
        if len(media) == 1:
            in_use.beaten_since_s = None
            return in_use.medium, Why.ONLY
        self._watch(known, in_use, now_s)
        since_s = in_use.beaten_since_s
        if since_s is not None and now_s - since_s >= self.limits.better_for_s:
            known.in_use[kind] = _InUse(best, count, media)
            return best, Why.SWITCHED
        trial = self._trial(known, in_use, prices, now_s)
        if trial is not None:
            known.tried_s[trial] = now_s
            return trial, Why.TRIAL
        return in_use.medium, Why.KEPT if since_s is None else Why.HELD

    def _is_gone(self, in_use: _InUse, predicted: Mapping[Medium, float], now_s: float) -> bool:
        """It failed, or was not offered for a while: not just now, as to another try of the transfer that failed."""
        if in_use.medium in predicted:
            return True
        if in_use.gone_since_s is None:
            in_use.gone_since_s = now_s
        return now_s - in_use.gone_since_s >= self.limits.better_for_s

    def _watch(self, known: _Peer, in_use: _InUse, now_s: float) -> None:
        """Is what is in use clearly beaten, and since when?"""
        prices = _prices({one: self._estimate(known, one).seconds(in_use.bytes) for one in in_use.media})
        best_s, used_s = min(prices.values()), prices[in_use.medium]
        if best_s > (1 - self.limits.better_share) * used_s:
            in_use.beaten_since_s = None
        elif in_use.beaten_since_s is None:
            in_use.beaten_since_s = now_s

    def _trial(self, known: _Peer, in_use: _InUse, prices: Mapping[Medium, float], now_s: float) -> Medium | None:
        """The medium that was not used for the longest time, of those that are due for a trial; None if none is."""
        due = [
            one for one in in_use.media if one is not in_use.medium and self._is_due(known, one, in_use, prices, now_s)
        ]
        return min(due, key=lambda one: self._last_s(known, one), default=None)

    def _is_due(
        self, known: _Peer, medium: Medium, in_use: _InUse, prices: Mapping[Medium, float], now_s: float
    ) -> bool:
        """What seems better is tried often, so that a switch does not stand on one lucky transfer; all else if a share
        of the time allows it."""
        limits, used_s, estimate = self.limits, prices[in_use.medium], self._estimate(known, medium)
        idle_s, extra_s = now_s - self._last_s(known, medium), prices[medium] - used_s
        if extra_s < 0:
            return idle_s >= limits.better_for_s / TRIALS_BEFORE_SWITCH
        if in_use.bytes * known.transfers > 1.01 * known.bytes and extra_s > LARGE_EXTRA_SHARE * used_s:
            return False  # transfers above the mean cost most, and smaller ones tell as much
        is_hopeless = estimate.is_hopeless(in_use.bytes, used_s)
        if estimate.is_mending and not is_hopeless:
            return idle_s >= limits.better_for_s / TRIALS_BEFORE_SWITCH
        after_s = limits.hopeless_after_s if is_hopeless else limits.trial_after_s
        share_s = limits.trial_share * known.seconds / (len(in_use.media) - 1)
        return idle_s >= after_s and known.trial_s.get(medium, 0.0) + extra_s <= share_s

    def _last_s(self, known: _Peer, medium: Medium) -> float:
        return max(self._estimate(known, medium).last_s, known.tried_s.get(medium, 0.0))

    def _known(self, peer: str) -> _Peer:
        found = self._peers.get(peer)
        if found is None:
            found = self._peers[peer] = _Peer()
            if len(self._peers) > PEERS_MAX:
                del self._peers[next(iter(self._peers))]
        return found

    def _estimate(self, known: _Peer, medium: Medium) -> Estimate:
        found = known.estimates.get(medium)
        if found is None or (medium is Medium.INT8_STREAM and not found.transfers):
            found = known.estimates[medium] = Estimate(self._guess(known, medium))
        return found

    def _guess(self, known: _Peer, medium: Medium) -> Speed:
        if medium is not Medium.INT8_STREAM:
            return self._guesses[medium]
        stream = self._estimate(known, Medium.STREAM)
        return Speed(stream.latency_s, min(stream.bytes_per_s / INT8_SHARE, INT8_BYTES_PER_S))


def _prices(seconds: Mapping[Medium, float]) -> dict[Medium, float]:
    """What transfers of so many seconds count when media are compared."""
    return {one: found * INT8_PRICE if one is Medium.INT8_STREAM else found for one, found in seconds.items()}


def size_class(count: int) -> int:
    """0 to SIZE_CLASSES - 1."""
    return min(max(0, (max(0, count - 1).bit_length() - 11) // 4), SIZE_CLASSES - 1)
