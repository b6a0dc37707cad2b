"""What happens a second, from two stats documents of a node. Pure.

Time is the node's uptime: a clock that jumps, or an answer that comes late, does not change a rate. After a restart of
the node there is none until the second document.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Document = Mapping[str, Any]
Read = Callable[[Document], float]


@dataclass(frozen=True, slots=True)
class Answers:
    """Where the segments that were asked for were found; ``moved``: in another context, in any tier."""

    host: int
    ssd: int
    remote: int
    moved: int
    miss: int
    error: int

    @property
    def found(self) -> int:
        """All that was found."""
        return self.host + self.ssd + self.remote + self.moved

    @property
    def asked(self) -> int:
        """All that was answered."""
        return self.found + self.miss + self.error


def answers_of(segments: Mapping[str, int]) -> Answers:
    """Of a node, or of one namespace, since the start."""
    return Answers(*(segments[name] for name in ("host", "ssd", "remote", "moved", "miss", "error")))


COUNTERS: Mapping[str, Read] = {
    "lookups": lambda one: one["lookups"]["calls"],
    "segments": lambda one: one["accounting"]["asked_segments"],
    "found": lambda one: answers_of(one["accounting"]["segments"]).found,
    "stored_bytes": lambda one: one["writes"]["published_bytes"],
    "loaded_bytes": lambda one: one["loads"]["record_bytes"],
    "brought_bytes": lambda one: one["remote"]["record_bytes"],
    "given_bytes": lambda one: one["pushes"]["record_bytes"],
    "demoted_bytes": lambda one: one["demotions"]["record_bytes"],
    "evicted_bytes": lambda one: one["evictions"]["host"]["record_bytes"],
    "folded": lambda one: one["folds"]["folded"],
}


def rates(before: Document | None, document: Document) -> dict[str, float | None]:
    """Each counter's change a second; None where that is not known."""
    if before is None or before["boot_epoch"] != document["boot_epoch"]:
        return dict.fromkeys(COUNTERS)
    seconds = document["uptime_s"] - before["uptime_s"]
    return {name: _rate(read(document) - read(before), seconds) for name, read in COUNTERS.items()}


def _rate(change: float, seconds: float) -> float | None:
    return change / seconds if seconds > 0 and change >= 0 else None
