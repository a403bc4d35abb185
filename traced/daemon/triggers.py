"""What begins a cycle without a person: a clock (cron, interval), or what the target has reported.

Invariants: a trigger only asks for a cycle and says why; the loop begins it, one at a time. Everything counts from the
beginning of the last cycle, whoever began it (``store.repositories.cycles``). A clock that was due while the service
was down is due once, however often it was missed; one that is due during a cycle, a restart or while the store is gone
waits, and any cycle that begins meanwhile serves it. A paused target forgets its clocks' causes and keeps its counts.

What is kept lies in ``triggers.db`` of the data directory and not in the store: the schedule then needs no database
that can be gone, its pickled jobs never travel in a backup, and the file can be made anew from the settings, which is
what happens when it is damaged (a trigger may then come later, never twice). The job of a clock is named by its
expression: a changed one replaces it, one that is off is removed.

The clock on the wall: jobs are looked at every ``look_s`` of monotonic time, so that a step forward delays nothing for
longer; after a step back of more than ``STEP_S`` they are planned anew from the new time.
Settings that are read again (``take``) are followed from the next look on.
How it fails: a store or a file that fails is asked again at the next look, and that is logged once.

What a target has reported since its last cycle began, and whether that is enough to begin the next.

Invariants: pure functions over frozen values. Trajectories carry no time, so "the newest" are told from totals: the
newest look that lies at least a window back is kept, and the failures since then are divided by the trajectories since
then. A window is therefore never smaller than asked for, and larger by what arrived between two looks. Totals that
shrink (something was deleted) and a cycle that began count anew. Infrastructure failures are in neither total.
Not covered: what a cycle itself records, which must not begin the next one (the totals leave it out).
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.interval import IntervalTrigger
from sqlalchemy import text
from sqlalchemy.exc import DatabaseError, DBAPIError, OperationalError

from store.database import connect, reading, sqlite_url
from store.errors import StoreError
from store.records import TargetStanding
from store.repositories.cycles import target_standing
from store.repositories.trajectories import count_reported
from store.types import Outcome
from traced.config.service_sections import TriggersSection
from traced.config.settings import Settings
from traced.core.schedule import cron_trigger
from traced.core.time_windows import parse_zone


@dataclass(frozen=True)
class Totals:
    """Trajectories that a target has reported, and the failures among them."""

    trajectories: int = 0
    failures: int = 0


@dataclass(frozen=True)
class Counters:
    """Since the last cycle began at ``started`` (ISO, "" for never): what was seen, and a clock's cause that waits.

    ``looks`` are oldest first; the first is from the beginning of that cycle.
    """

    started: str
    looks: tuple[Totals, ...]
    due: str = ""


def counted(before: Counters | None, started: str, now: Totals, window: int) -> Counters:
    """The counters after one more look; without any ``before``, only a target that never began has all as new."""
    if before is None:
        before = Counters(started, (now if started else Totals(),))
    if before.started != started:
        return Counters(started, (now,))
    if now.trajectories < before.looks[-1].trajectories:
        return replace(before, looks=(now,))
    if now == before.looks[-1]:
        return before
    old = [look for look in before.looks if look.trajectories <= now.trajectories - window]
    recent = [look for look in before.looks if look.trajectories > now.trajectories - window]
    kept = dict.fromkeys([before.looks[0], *old[-1:], *recent, now])
    return replace(before, looks=tuple(kept))


def enough(counters: Counters, trajectories: int, failure_rate: float, window: int) -> str:
    """Why a cycle is due by what was counted, in words, or ""; 0 turns a limit off."""
    now = counters.looks[-1]
    new = now.trajectories - counters.looks[0].trajectories
    if trajectories and new >= trajectories:
        return f"{new} new trajectories"
    old = [look for look in counters.looks if look.trajectories <= now.trajectories - window]
    if not failure_rate or not old:
        return ""
    over = now.trajectories - old[-1].trajectories
    rate = (now.failures - old[-1].failures) / over
    return f"failure rate {100 * rate:.0f} % over the last {over}" if rate >= failure_rate else ""


FILE = "triggers.db"
LOOK_S = 30.0
STEP_S = 60.0  # a clock that is corrected by less fires no job twice

log = logging.getLogger(__name__)


def cause(said: str) -> str:
    """The work of a clock's job: its cause, which the scheduler's listener hears (a stored job can hold no loop)."""
    return said


@dataclass(frozen=True)
class Clock:
    """A trigger by the clock; ``key`` changes with everything that decides when it is due."""

    cause: str
    key: str
    trigger: Callable[[], Any]


@dataclass
class Triggers:
    """The triggers of the settings' target; ``request`` asks for a cycle (``CycleLoop.request_cycle``)."""

    settings: Settings
    store: sqlalchemy.Engine
    request: Callable[[str], None]
    now: Callable[[], datetime]
    look_s: float = LOOK_S
    _next: datetime | None = None
    _heard: list[str] = field(default_factory=list)
    _awake: asyncio.Event = field(default_factory=asyncio.Event)
    _home: asyncio.AbstractEventLoop | None = None
    _asked_since: str | None = None
    _complained: bool = False

    def next_at(self) -> datetime | None:
        """When a clock is due next, as of the last look; None where no clock is set."""
        return self._next

    def take(self, settings: Settings) -> None:
        """Follow other settings from now on; may be called on any thread."""
        self.settings = settings
        if self._home is not None:
            self._home.call_soon_threadsafe(self._awake.set)

    async def run(self) -> None:
        """Watch until cancelled; where everything is off and nothing is left to remove, wait for other settings."""
        self._home, file = asyncio.get_running_loop(), self.settings.data_dir / FILE
        while True:
            if self._is_off() and not file.exists():
                await self._awake.wait()
                self._awake.clear()
                continue
            try:
                await self._watch(file)
            except DBAPIError as error:
                log.warning("%s fails, triggers begin again: %s", file, error.orig)
                await asyncio.sleep(self.look_s)

    def _is_off(self) -> bool:
        section = self.settings.triggers
        return not (clocks(section) or section.trajectories or section.failure_rate)

    async def _watch(self, file: Path) -> None:
        section = self.settings.triggers
        with _opened(file) as kept, self._scheduled(kept, clocks(section)) as scheduler:
            ahead = self._ahead()
            while True:
                stepped_back = ahead - self._ahead() > STEP_S
                if stepped_back or section != self.settings.triggers:
                    section = self.settings.triggers
                    _plan(scheduler, clocks(section), anew=stepped_back)
                ahead = self._ahead()
                scheduler.wakeup()
                await asyncio.sleep(0)  # what wakeup has put on the loop
                await self._look(kept)
                self._next = _earliest(scheduler)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._awake.wait(), self.look_s)
                self._awake.clear()

    @contextmanager
    def _scheduled(self, kept: sqlalchemy.Engine, wanted: dict[str, Clock]) -> Iterator[Any]:
        scheduler = AsyncIOScheduler(
            event_loop=asyncio.get_running_loop(),
            jobstores={"default": SQLAlchemyJobStore(engine=kept)},
            job_defaults={"coalesce": True, "misfire_grace_time": None, "max_instances": 1},
        )
        heard: dict[str, datetime] = {}

        def hear(event: Any) -> None:
            if heard.get(event.job_id) != event.scheduled_run_time:  # again: its row could not be written
                heard[event.job_id] = event.scheduled_run_time
                self._heard.append(event.retval)
                self._awake.set()

        scheduler.add_listener(hear, EVENT_JOB_EXECUTED)
        scheduler.start(paused=True)
        try:
            _plan(scheduler, wanted)
            scheduler.resume()
            yield scheduler
        finally:
            scheduler.shutdown(wait=False)

    async def _look(self, kept: sqlalchemy.Engine) -> None:
        """Count, and ask for a cycle where one is due; a look that fails changes nothing."""
        heard = list(self._heard)
        try:
            standing, counters = await asyncio.to_thread(self._count, kept, heard)
        except (StoreError, DBAPIError) as error:
            if not self._complained:
                log.warning("triggers wait: %s", error)
            self._complained = True
            return
        self._complained = False
        del self._heard[: len(heard)]
        section = self.settings.triggers
        why = counters.due or enough(counters, section.trajectories, section.failure_rate, section.window)
        if standing.paused_at is None and why and self._asked_since != counters.started:
            self._asked_since = counters.started  # the loop keeps what it was asked until a cycle begins
            log.info("a cycle of %s is due: %s", standing.name, why)
            self.request(why)

    def _count(self, kept: sqlalchemy.Engine, heard: list[str]) -> tuple[TargetStanding, Counters]:
        """Where the target stands, and the counters after this look, which are kept."""
        name = self.settings.target.name
        with reading(self.store) as opened:
            standing = target_standing(opened, name)
            outcomes = count_reported(opened, name)
        totals = Totals(outcomes[Outcome.SUCCESS] + outcomes[Outcome.FAILURE], outcomes[Outcome.FAILURE])
        started = standing.last_started_at.isoformat() if standing.last_started_at else ""
        before = _load(kept)
        counters = counted(before, started, totals, self.settings.triggers.window)
        due = "" if standing.paused_at is not None else (counters.due or "".join(heard[:1]))
        counters = replace(counters, due=due)
        if counters != before:
            _save(kept, counters)
        return standing, counters

    def _ahead(self) -> float:
        """Seconds by which the clock on the wall is ahead of the monotonic one."""
        return self.now().timestamp() - time.monotonic()


def clocks(section: TriggersSection) -> dict[str, Clock]:
    """The clocks that are on, by their jobs' names."""
    found = {}
    zone = parse_zone(section.time_zone)
    if section.cron:
        key = f"{section.cron} {section.time_zone}"
        found["cron"] = Clock(f"cron {section.cron}", key, lambda: cron_trigger(section.cron, zone))
    if section.interval_h:
        hours = section.interval_h
        found["interval"] = Clock(f"every {hours:g} h", str(hours), lambda: IntervalTrigger(seconds=hours * 3600))
    return found


def _plan(scheduler: Any, wanted: dict[str, Clock], *, anew: bool = False) -> None:
    """Make the stored jobs those that are wanted; one that is as it was keeps its time, unless ``anew``."""
    stored = {job.id: job for job in scheduler.get_jobs()}
    for name in stored.keys() - wanted.keys():
        scheduler.remove_job(name)
    for name, clock in wanted.items():
        if anew or name not in stored or stored[name].name != clock.key:
            trigger = clock.trigger()
            scheduler.add_job(cause, trigger, [clock.cause], id=name, name=clock.key, replace_existing=True)


def _earliest(scheduler: Any) -> datetime | None:
    try:
        times = [job.next_run_time for job in scheduler.get_jobs() if job.next_run_time is not None]
    except DBAPIError:
        return None
    return min(times, default=None)


@contextmanager
def _opened(file: Path) -> Iterator[sqlalchemy.Engine]:
    """The file of the triggers; a damaged one is replaced."""
    kept = connect(sqlite_url(file))
    try:
        if not _made(kept):
            log.warning("%s is damaged and made anew", file)
            kept.dispose()
            for end in ("", "-wal", "-shm"):
                file.with_name(file.name + end).unlink(missing_ok=True)
            _made(kept)
        yield kept
    finally:
        kept.dispose()


def _made(kept: sqlalchemy.Engine) -> bool:
    """Make the table that is missing; False where the file is damaged."""
    try:
        with kept.begin() as connection:
            sound = connection.execute(text("PRAGMA quick_check(1)")).scalar() == "ok"
            connection.execute(text("CREATE TABLE IF NOT EXISTS counters (id INTEGER PRIMARY KEY, value TEXT)"))
            return sound
    except OperationalError:
        raise  # no space, no rights: nothing that making it anew would mend
    except DatabaseError:
        return False


def _load(kept: sqlalchemy.Engine) -> Counters | None:
    with kept.begin() as connection:
        value = connection.execute(text("SELECT value FROM counters")).scalar()
    if value is None:
        return None
    held = json.loads(value)
    return Counters(held["started"], tuple(Totals(**look) for look in held["looks"]), held["due"])


def _save(kept: sqlalchemy.Engine, counters: Counters) -> None:
    with kept.begin() as connection:
        row = {"value": json.dumps(asdict(counters))}
        connection.execute(text("INSERT OR REPLACE INTO counters (id, value) VALUES (1, :value)"), row)
