"""Places where a crash test ends this process, by name. Unless one is armed they do nothing and cost a comparison.

A process killed at a random moment dies nearly always while it waits; the narrow places between two steps of a write
are only met on purpose.
"""

import os
import signal
from enum import Enum
from typing import Never

from kvservice.model.errors import ConfigError


class KillPoint(Enum):
    """Between which steps."""

    AFTER_DATA = "after-data"
    """A record is on the slab, and its index entry is not written."""
    AFTER_INDEX = "after-index"
    """The index names it, and the catalog does not know."""
    AFTER_MASTER = "after-master"
    """In the middle of a demotion: a group's master is on the slab, its mirrors are not."""
    AFTER_FOLD = "after-fold"
    """A dense cache was folded; the slab has its dense form, memory the mirror."""
    AFTER_ELECTION_STEP = "after-election-step"
    """In the middle of an election: some caches stand on the new master, some on the old one."""
    AFTER_ERASE = "after-erase"
    """A record's place was erased, and the index still names it."""
    IN_REBUILD = "in-rebuild"
    """The slab was scanned, and the index is not written anew yet."""


class Killer:
    """Counts how often the armed point is passed, and ends the process at the given time."""

    def __init__(self, setting: str = "") -> None:
        """``setting``: ``name:count``, or empty. Raises ConfigError for an unknown name."""
        name, _, count = setting.partition(":")
        try:
            self._armed = KillPoint(name) if name else None
            self._left = int(count or 1)
        except ValueError as error:
            names = ", ".join(point.value for point in KillPoint)
            raise ConfigError(f"kill_point = {setting!r}: it must be name:count, names are {names}") from error

    def reach(self, point: KillPoint) -> None:
        """Die here, if it is time."""
        if point is self._armed:
            self._left -= 1
            if not self._left:
                _die()


def _die() -> Never:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL is not survived")
