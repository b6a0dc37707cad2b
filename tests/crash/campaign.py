"""Cycles of start, check, load and death on one folder, all drawn from one seed."""

import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any, Self

from kvservice.killpoints import KillPoint
from kvservice.model.errors import UnavailableError
from tests.crash.checking import check_folder, check_lock, check_slab, check_started, held_by, read_all
from tests.crash.choices import (
    POINT_TIMEOUT_S,
    SSD_POINTS,
    Death,
    Due,
    Plan,
    Plans,
    Profile,
    draw_settings,
    load_plan,
)
from tests.crash.content import kinds_of
from tests.crash.damage import damage_index, flip_records
from tests.crash.load import Load
from tests.crash.oracle import Book, BrokenError
from tests.crash.report import Report
from tests.crash.service import ServiceProcess, Settings, pause
from tests.crash.writer import STEPS_MAX

WRITERS = 2
WARM_STEPS = (5, 40)
QUIET_LOOK_S = 0.03
QUIET_LOOKS_MAX = 1000
QUIET_LOOKS_BACK_MAX = 5
"""While writing back, all of it is on SSD by chance only."""
KILLED = -9
POINT_GONE_S = 5.0
"""From a lost session to the end of the process."""
LOST_TEXT = "caches in memory that are not on SSD"


class Campaign:
    """One folder, from its first start to a clean end. It is kept if anything is raised."""

    def __init__(self, profile: Profile, seed: int, folder: Path) -> None:
        self.report = Report([f"{profile.name}: seed {seed}"])
        self._profile, self._seed = profile, seed
        self._rng = Random(f"{profile.name} {seed}")
        self._plans = Plans(self._rng)
        self._folder, self._ssd, self._log = folder, folder / "ssd", folder / "service.log"
        self._books = [Book() for _ in range(WRITERS)]
        self._kinds = [kinds_of(writer, profile.record_bytes_max) for writer in range(WRITERS)]
        self._cycle = self._epoch = 0
        self._settings: Settings = {}
        self._done: list[str] = []
        self._is_clean = False
        self._is_flipped = False
        self._services: list[ServiceProcess] = []

    def __enter__(self) -> Self:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._sockets = Path(tempfile.mkdtemp(prefix="kvcrash"))  # a socket's path has 107 bytes at most
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for service in self._services:
            service.kill()
        shutil.rmtree(self._sockets, ignore_errors=True)
        if kind is None:
            shutil.rmtree(self._folder)

    def run(self, kills: int) -> Report:
        """Die so often; then stop cleanly, twice: the second start believes what the first stop left."""
        try:
            while self.report.kills < kills:
                self._cycle_of(self._plans.next())
            for _ in range(2):
                self._cycle_of(Plan(Death.STOP, 0.2))
        except Exception as error:
            raise BrokenError(self._story(error)) from error
        return self.report

    def _story(self, error: Exception) -> str:
        settings = " ".join(f"{name}={value}" for name, value in self._settings.items())
        return (
            f"{type(error).__name__}: {error}\n  seed {self._seed}, profile {self._profile.name!r}, cycle {self._cycle}"
            f": {'; '.join(self._done)}\n  settings: {settings}\n  kept: {self._folder}"
        )

    def _cycle_of(self, plan: Plan) -> None:
        self._begin(plan)
        if plan.is_before_health:
            self._die_early(plan)
            plan = Plan(Death.RANDOM, self._rng.uniform(0.05, 1.0))
            self._settings = self._settings | {"kill_point": ""}
        service = self._start()
        if not service.is_healthy():
            raise BrokenError(f"the service did not start, it ended with {service.wait()}:\n{service.log_text()}")
        try:
            self._check(service)
            self._warm_up(service, plan)
            self._load(service, plan)
        except UnavailableError as error:
            if plan.death is not Death.POINT or not service.is_gone_within(POINT_GONE_S):
                raise BrokenError(f"the service does not answer: {error}\n{service.log_text()}") from error
        self._end(service, plan)
        self._tell()

    # Before the start

    def _begin(self, plan: Plan) -> None:
        self._cycle += 1
        self._done = [str(plan)]
        for book in self._books:
            book.cycle = self._cycle
            book.forget_oldest()
        self._is_flipped = False
        if self._cycle > 1:
            self._damage(plan)
        slab_bytes = int(self._settings.get("ssd_bytes", 0))
        drawn = draw_settings(self._rng, self._profile, self._ssd, self._sockets / "k.sock", slab_bytes)
        self._settings = drawn | {"kill_point": plan.kill_point}

    def _damage(self, plan: Plan) -> None:
        if plan.point is KillPoint.IN_REBUILD or self._rng.random() < 0.25:
            what, file = damage_index(self._rng, self._ssd)
            self.report.damages[what] += 1
            self._done.append(f"{what} {file}")
            self._is_clean = False
        if self._rng.random() < 0.15:
            self._is_flipped = True
            for key in flip_records(self._rng, self._ssd):
                self.report.damages["bit in a record"] += 1
                self._done.append(f"bit flipped in {key}")
                for book in self._books:
                    book.taint(key.segment)

    def _start(self) -> ServiceProcess:
        service = ServiceProcess(self._settings, self._log)
        self._services = [service]
        return service

    def _tell(self) -> None:
        """What became of a cycle, kept beside the service's log."""
        settings = " ".join(f"{name}={value}" for name, value in self._settings.items())
        with (self._folder / "cycles.log").open("a") as stream:
            stream.write(f"cycle {self._cycle}: {'; '.join(self._done)}\n    {settings}\n")

    def _die_early(self, plan: Plan) -> None:
        """Start, and die before anybody is served."""
        service = self._start()
        if plan.death is Death.IN_START:
            if not service.is_gone_within(plan.after_s):
                service.kill()
        elif service.is_healthy():
            raise BrokenError("every start passes the kill point in-rebuild, and this one did not die there")
        self._require_killed(service)
        self.report.deaths[plan.death] += 1
        self.report.note_point(plan, is_reached=True)
        self._is_clean = False

    # After the start

    def _check(self, service: ServiceProcess) -> None:
        stats = check_started(service, self._epoch)
        self._epoch, recovery = stats["boot_epoch"], stats["recovery"]
        self.report.note_recovery(recovery)
        self._done.append(f"{recovery['kind']}, {recovery['records']} records, dropped {recovery['dropped']}")
        if self._is_clean and recovery["kind"] != "clean":
            raise BrokenError("the last stop was clean, and the start did not believe it")
        check_folder(self._ssd)
        if not self._is_flipped:
            check_slab(service, self._ssd)
        if self._cycle % 16 == 2:
            check_lock(service, self._sockets / "other.sock")
        self.report.due += sum(len(book.due()) for book in self._books)
        seen, asked = read_all(service, self._books, self._kinds, is_final=True)
        self.report.note_reads(seen)
        self.report.asked += asked
        self._done.append(f"{asked} keys asked for, {seen.hits} hits")

    # Load

    def _new_load(self, plan: Plan, steps_max: int = STEPS_MAX) -> Load:
        plans = [load_plan(self._profile, writer, plan) for writer in range(WRITERS)]
        return Load(self._settings["socket"], self._books, plans, self._rng, steps_max)

    def _note_load(self, load: Load) -> None:
        self.report.note_reads(load.seen)
        self.report.steps += load.steps

    def _warm_up(self, service: ServiceProcess, plan: Plan) -> None:
        """Some load, then a quiet point: what is on SSD then must be back. UnavailableError if a kill point is met."""
        if plan.death is Death.RANDOM and self._rng.random() < 0.3:
            return
        with self._new_load(plan, self._rng.randrange(*WARM_STEPS)) as load:
            load.finish()
        self._note_load(load)
        if load.lost is not None:
            raise UnavailableError(f"a writer lost its session: {load.lost!r}") from load.lost
        if self._profile.due is not Due.NOTHING and self._is_quiet_soon(service):
            self.report.quiet_points += 1
            if not self._is_flipped:
                check_slab(service, self._ssd)
            for book in self._books:
                book.note_quiet("quiet")

    def _is_quiet_soon(self, service: ServiceProcess) -> bool:
        is_through = self._settings["ssd_write"] == "through"
        for _ in range(QUIET_LOOKS_MAX if is_through else QUIET_LOOKS_BACK_MAX):
            stats = service.stats()
            ssd = stats["ssd"]
            is_at_work = ssd["queued"] or ssd["superseded"] or stats["folds"]["queued"] or stats["host"]["held_bytes"]
            if not is_at_work and ssd["caches"] == held_by(stats) + stats["caches"]["hidden"]["count"]:
                self._find_lost(service, stats)
                return True
            pause(QUIET_LOOK_S)
        if is_through and self._settings["ssd_write_budget_bytes"] == "0":
            raise BrokenError(f"it does not come to rest with all of it on SSD: {stats}")
        return False

    def _find_lost(self, service: ServiceProcess, stats: dict[str, Any]) -> None:
        """Does the service hold all that it acknowledged? A small arena may have evicted what was on no slab yet."""
        there, acknowledged = held_by(stats), sum(len(book.held()) for book in self._books)
        self._done.append(f"quiet with {there} of {acknowledged}")
        if there == acknowledged:
            return
        if self._profile.due is Due.ALL and not any(book.is_tainted for book in self._books):
            raise BrokenError(f"it acknowledged {acknowledged} caches, there was room, and it holds {there}: {stats}")
        read_all(service, self._books, self._kinds, is_final=False)

    def _load(self, service: ServiceProcess, plan: Plan) -> None:
        with self._new_load(plan) as load:
            if plan.death is Death.POINT:
                service.is_gone_within(POINT_TIMEOUT_S)
            else:
                service.is_gone_within(plan.after_s)
            self._strike(service, plan)
        self._note_load(load)

    def _strike(self, service: ServiceProcess, plan: Plan) -> None:
        if plan.death in (Death.STOP, Death.IN_STOP) or plan.point in SSD_POINTS:
            service.terminate()  # the flush of a stop may reach the point
            service.is_gone_within(self._rng.uniform(0, 0.3) if plan.death is Death.IN_STOP else 60.0)
        if plan.death is not Death.STOP:
            service.kill()

    # The end

    def _end(self, service: ServiceProcess, plan: Plan) -> None:
        status = service.wait()
        is_reached = status == KILLED and not service.was_killed
        if is_reached and plan.point is None:
            raise BrokenError(f"it died by SIGKILL, and not by ours; is memory short?\n{service.log_text()}")
        self._is_clean = status == 0 and service.was_terminated
        if not self._is_clean:
            self._require_killed(service)
        elif self._profile.due is Due.ALL and LOST_TEXT not in service.log_text():
            for book in self._books:
                book.note_quiet("stopped")
        self.report.deaths[Death.STOP if self._is_clean else plan.death] += 1
        self.report.note_point(plan, is_reached=is_reached)
        service.require_quiet_log()

    def _require_killed(self, service: ServiceProcess) -> None:
        status = service.wait()
        if status != KILLED:
            raise BrokenError(f"the service ended with {status}, not by SIGKILL:\n{service.log_text()}")
        service.require_quiet_log()
