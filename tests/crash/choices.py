"""What is drawn anew for every cycle of a crash test: settings, the way the service dies, how its load looks."""

from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from random import Random

from kvservice.killpoints import KillPoint
from tests.crash.content import kinds_of
from tests.crash.service import Settings
from tests.crash.writer import WEIGHTS, LoadPlan

MIB = 1 << 20
KILL_AFTER_S = (0.05, 1.5)
START_KILL_AFTER_S = (0.2, 0.9)
"""Most of a start is imports; what it does in the folder takes some 50 ms near the end."""
SLAB_GROWTH_MAX = 2
"""Times the smallest first slab: a long run must not scan gigabytes at each of its starts."""
POINT_TIMEOUT_S = 6.0
"""A point that was not reached by then is given up, and the service is killed at that random moment."""
SSD_POINTS = (KillPoint.AFTER_DATA, KillPoint.AFTER_INDEX, KillPoint.AFTER_MASTER)
HEAVIER = {
    KillPoint.AFTER_FOLD: ("store_near",),
    KillPoint.AFTER_ELECTION_STEP: ("store_near", "elect"),
    KillPoint.AFTER_MASTER: ("store_mirrors", "store_near"),
    KillPoint.AFTER_ERASE: ("delete", "store_near"),
}
"""Steps that lead to a point."""


class Due(Enum):
    """What must be back after a kill, of all that was on SSD at a quiet point and was not deleted since."""

    ALL = auto()
    UNTOUCHED = auto()
    """Unless it may have been folded since: the arena is small, and an eviction takes the newest form, and with it
    the old one."""
    NOTHING = auto()
    """The slab is small and evicts."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Sizes in MiB. ``share``: of the kills. ``slabs``: at the start; every start may add up to ``growth``."""

    name: str
    share: float
    due: Due
    arenas: tuple[int, ...]
    slabs: tuple[int, ...]
    growth: tuple[int, ...]
    held: int
    record: float
    budgets: tuple[str, ...] = ("0",)

    @property
    def record_bytes_max(self) -> int:
        return int(self.record * MIB)


ROOMY = Profile("roomy", 0.5, Due.ALL, (48, 64, 96), (64, 80), (0, 0, 0, 4, 16), held=20, record=2)
TIGHT = Profile("tight-memory", 0.25, Due.UNTOUCHED, (6, 8, 12), (64, 80), (0, 0, 0, 4), held=16, record=1)
SMALL = Profile("small-slab", 0.25, Due.NOTHING, (4, 6, 12), (6, 8), (0, 0, 0, 1), 16, 0.6, budgets=("0", "0", "64MiB"))
PROFILES = (ROOMY, TIGHT, SMALL)


class Death(Enum):
    """How a cycle ends. All but STOP count as kills."""

    RANDOM = "random moment"
    POINT = "kill point"
    IN_START = "while starting"
    IN_STOP = "while stopping"
    STOP = "clean stop"


@dataclass(frozen=True, slots=True)
class Plan:
    """The end of one cycle. ``point``, ``passes``: where and the how manieth time. ``after_s``: of its load."""

    death: Death
    after_s: float = 0.0
    point: KillPoint | None = None
    passes: int = 1

    def __str__(self) -> str:
        at = f" {self.point.value}:{self.passes}" if self.point else f" after {self.after_s:.2f} s"
        return f"{self.death.value}{at}"

    @property
    def kill_point(self) -> str:
        return "" if self.point is None else f"{self.point.value}:{self.passes}"

    @property
    def is_before_health(self) -> bool:
        """Does it die before it is healthy?"""
        return self.death is Death.IN_START or self.point is KillPoint.IN_REBUILD


class Plans:
    """Deals plans so that every kind comes up: shuffled decks, one after the other."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._deck: list[Plan] = []

    def next(self) -> Plan:
        if not self._deck:
            self._deck = [self._at(point) for point in KillPoint]
            self._deck += [self._random() for _ in range(len(self._deck))]
            self._deck += [Plan(Death.IN_START, self._rng.uniform(*START_KILL_AFTER_S)) for _ in range(2)]
            self._deck += [Plan(Death.IN_STOP, self._rng.uniform(0, 0.2)), Plan(Death.STOP), Plan(Death.STOP)]
            self._rng.shuffle(self._deck)
        return self._deck.pop()

    def _at(self, point: KillPoint) -> Plan:
        often = point in (KillPoint.AFTER_DATA, KillPoint.AFTER_INDEX)
        passes = 1 if point is KillPoint.IN_REBUILD else self._rng.randrange(1, 40 if often else 5)
        return Plan(Death.POINT, point=point, passes=passes)

    def _random(self) -> Plan:
        return Plan(Death.RANDOM, self._rng.uniform(*KILL_AFTER_S))


def draw_settings(rng: Random, profile: Profile, folder: Path, socket: Path, slab_bytes: int) -> Settings:
    """Everything that may differ from start to start; ``slab_bytes``: of the last one, 0 at first."""
    grown = min(slab_bytes + rng.choice(profile.growth) * MIB, SLAB_GROWTH_MAX * profile.slabs[0] * MIB)
    slab = max(grown, slab_bytes) if slab_bytes else rng.choice(profile.slabs) * MIB
    host = rng.choice(profile.arenas) * MIB
    return {
        "socket": str(socket),
        "grpc_port": "-1",
        "http_port": "-1",
        "ssd_folder": str(folder),
        "ssd_bytes": str(slab),
        "host_bytes": str(host),
        "staging_bytes": str(rng.choice([0, 0, host // 4])),
        "ssd_write": rng.choice(["through", "through", "back"]),
        "is_ssd_durable": rng.choice(["false", "false", "true"]),
        "ssd_threads": str(rng.choice([1, 2, 4])),
        "worker_threads": str(rng.choice([1, 2, 4])),
        "eviction": rng.choice(["value", "lru"]),
        "ssd_write_budget_bytes": rng.choice(profile.budgets),
        "ssd_free_floor_bytes": "0",
        "scrub_bytes_per_s": rng.choice(["0", "16MiB", "256MiB"]),
        "is_prefaulted": rng.choice(["false", "true"]),
    }


def load_plan(profile: Profile, writer: int, plan: Plan) -> LoadPlan:
    """The load of one writer, with more of what leads to the plan's kill point."""
    heavier = HEAVIER.get(plan.point, ()) if plan.point else ()
    weights = {name: weight * (3 if name in heavier else 1) for name, weight in WEIGHTS.items()}
    kinds = kinds_of(writer, profile.record_bytes_max)
    return LoadPlan(kinds, profile.held * MIB // 2, profile.due is Due.UNTOUCHED, weights)
