"""Triggers that request a cycle: by the clock (cron, interval), or by reported trajectories and their failure rate.

Invariants: a trigger only requests a cycle; counting starts at the beginning of the last cycle, for a recorded target
also at the last promotion, because its next cycle uses what came since. Runs missed while the service was down are
caught up once; a trigger that fires during a cycle is queued. A paused target drops its queued clock triggers and keeps
its counts. Failure rates cover at least the configured window; infrastructure failures do not count. The state is kept
in ``triggers.db`` of the data directory, which is recreated if it is damaged.
How it fails: errors of the store or the file are logged once and retried at the next check.
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

from store.database import connect, read_session, sqlite_url
from store.errors import StoreError
from store.records import TargetState
from store.repositories.cycles import get_target_state
from store.repositories.promotions import promoted_at
from store.repositories.trajectories import count_reported
from store.types import Outcome
from traced.config.service_sections import TriggersSection
from traced.config.settings import Settings
from traced.core.schedule import cron_trigger
from traced.core.time_windows import parse_zone
from traced.daemon.trigger_progress import FILE
from traced.targets.conversation_target import conversation_target


@dataclass(frozen=True)
class Totals:
    """Counts of a target's reported trajectories and of the failures among them."""

    trajectories: int = 0
    failures: int = 0


@dataclass(frozen=True)
class Counters:
    """Samples of the totals since the last cycle began, and the cause of a queued clock trigger (``due``).

    ``started`` is the start of that cycle in ISO format, "" without one, and ``promotion`` the promotion since which a
    recorded target is counted. The samples in ``looks`` are oldest first; the first is from the later of both.
    """

    started: str
    looks: tuple[Totals, ...]
    due: str = ""
    promotion: str = ""


def add_sample(
    previous: Counters | None, started: str, totals: Totals, window: int, *, promotion: str = ""
) -> Counters:
    """Add a sample; drop the earlier samples if a cycle has begun or the totals fell (deleted trajectories).

    A promotion after that drops them, too. A queued clock trigger stays then.
    """
    if previous is None:
        previous = Counters(started, (totals if started else Totals(),), promotion=promotion)
    if previous.started != started:
        return Counters(started, (totals,), promotion=promotion)
    if promotion > max(previous.promotion, started):
        return replace(previous, looks=(totals,), promotion=promotion)
    if totals.trajectories < previous.looks[-1].trajectories:
        return replace(previous, looks=(totals,))
    if totals == previous.looks[-1]:
        return previous
    # Trajectories carry no time, so their age is measured in trajectories: the newest sample that is at least a whole
    # window old stays as the reference, older ones are dropped.
    older = [sample for sample in previous.looks if sample.trajectories <= totals.trajectories - window]
    recent = [sample for sample in previous.looks if sample.trajectories > totals.trajectories - window]
    samples = dict.fromkeys([previous.looks[0], *older[-1:], *recent, totals])
    return replace(previous, looks=tuple(samples))


def due_reason(counters: Counters, trajectories: int, failure_rate: float, window: int) -> str:
    """Return the reason why the counts make a cycle due, or ""; a limit of 0 is off."""
    now = counters.looks[-1]
    new = now.trajectories - counters.looks[0].trajectories
    if trajectories and new >= trajectories:
        return f"{new} new trajectories"
    older = [sample for sample in counters.looks if sample.trajectories <= now.trajectories - window]
    if not failure_rate or not older:
        return ""
    span = now.trajectories - older[-1].trajectories
    rate = (now.failures - older[-1].failures) / span
    return f"failure rate {100 * rate:.0f} % over the last {span}" if rate >= failure_rate else ""


POLL_S = 30.0
STEP_S = 60.0  # clock corrections below this are ignored, so that no job fires twice

log = logging.getLogger(__name__)


def cause(reason: str) -> str:
    """Return the reason to the scheduler's listener; this is the scheduled job."""
    # The path of this function is pickled into stored jobs, and a stored job cannot hold the loop.
    return reason


@dataclass(frozen=True)
class Clock:
    """A trigger by the clock; ``key`` identifies its schedule, so that a changed schedule is planned again."""

    cause: str
    key: str
    trigger: Callable[[], Any]


@dataclass
class Triggers:
    """The triggers of the target; ``request`` requests a cycle (``traced.daemon.loop.CycleLoop.request_cycle``).

    A request is withdrawn (``request("")``) if a promotion has made useless what it counted.
    """

    settings: Settings
    store: sqlalchemy.Engine
    request: Callable[[str], None]
    now: Callable[[], datetime]
    poll_s: float = POLL_S
    _next_run: datetime | None = None
    _fired_causes: list[str] = field(default_factory=list)
    _awake: asyncio.Event = field(default_factory=asyncio.Event)
    _event_loop: asyncio.AbstractEventLoop | None = None
    _request_key: tuple[str, str] | None = None
    _outage_logged: bool = False

    def next_at(self) -> datetime | None:
        """Return the time of the next clock trigger as of the last check; None if none is set."""
        return self._next_run

    def take(self, settings: Settings) -> None:
        """Apply reloaded settings; may be called on any thread."""
        self.settings = settings
        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(self._awake.set)

    async def run(self) -> None:
        """Run until cancelled; while every trigger is off, sleep until a reload."""
        self._event_loop, file = asyncio.get_running_loop(), self.settings.data_dir / FILE
        while True:
            if self._is_off() and not file.exists():
                await self._awake.wait()
                self._awake.clear()
                continue
            try:
                await self._supervise(file)
            except DBAPIError as error:
                log.warning("the trigger database %s failed and is opened again: %s", file, error.orig)
                await asyncio.sleep(self.poll_s)

    def _is_off(self) -> bool:
        section = self.settings.triggers
        return not (clocks(section) or section.trajectories or section.failure_rate)

    async def _supervise(self, file: Path) -> None:
        section = self.settings.triggers
        with _open_file(file) as engine, self._scheduled(engine, clocks(section)) as scheduler:
            offset = self._clock_offset()
            while True:
                # If the clock was set back, the stored times lie too far ahead. If it was set forward, nothing needs to
                # be done: jobs are checked every ``poll_s`` of monotonic time.
                stepped_back = offset - self._clock_offset() > STEP_S
                if stepped_back or section != self.settings.triggers:
                    section = self.settings.triggers
                    _plan(scheduler, clocks(section), stepped_back=stepped_back)
                offset = self._clock_offset()
                scheduler.wakeup()
                # Let the callbacks run that ``wakeup`` has scheduled.
                await asyncio.sleep(0)
                await self._check(engine)
                self._next_run = _earliest_run(scheduler)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.poll_s):
                        await self._awake.wait()
                self._awake.clear()

    @contextmanager
    def _scheduled(self, engine: sqlalchemy.Engine, configured: dict[str, Clock]) -> Iterator[Any]:
        scheduler = AsyncIOScheduler(
            event_loop=asyncio.get_running_loop(),
            jobstores={"default": SQLAlchemyJobStore(engine=engine)},
            job_defaults={"coalesce": True, "misfire_grace_time": None, "max_instances": 1},
        )
        fired_at: dict[str, datetime] = {}

        def on_executed(event: Any) -> None:
            if fired_at.get(event.job_id) != event.scheduled_run_time:  # fires again if its row could not be written
                fired_at[event.job_id] = event.scheduled_run_time
                self._fired_causes.append(event.retval)
                self._awake.set()

        scheduler.add_listener(on_executed, EVENT_JOB_EXECUTED)
        scheduler.start(paused=True)
        try:
            _plan(scheduler, configured)
            scheduler.resume()
            yield scheduler
        finally:
            scheduler.shutdown(wait=False)

    async def _check(self, engine: sqlalchemy.Engine) -> None:
        """Update the counters and request a cycle if one is due; errors change nothing."""
        causes = list(self._fired_causes)
        try:
            target_state, counters = await asyncio.to_thread(self._update_counters, engine, causes)
        except (StoreError, DBAPIError) as error:
            if not self._outage_logged:
                log.warning("triggers cannot be evaluated now, next attempt follows: %s", error)
            self._outage_logged = True
            return
        self._outage_logged = False
        del self._fired_causes[: len(causes)]
        section = self.settings.triggers
        reason = counters.due or due_reason(counters, section.trajectories, section.failure_rate, section.window)
        key, request_key = (counters.started, counters.promotion), self._request_key
        if target_state.paused_at is None and reason and request_key != key:
            self._request_key = key  # the loop keeps a request until a cycle begins
            log.info("a cycle of %s is due: %s", target_state.name, reason)
            self.request(reason)
        elif not reason and request_key is not None and request_key != key:
            self._request_key = None
            if request_key[0] == counters.started:
                self.request("")

    def _update_counters(self, engine: sqlalchemy.Engine, causes: list[str]) -> tuple[TargetState, Counters]:
        """Update and save the counters; return the target's state and the counters."""
        name = self.settings.target.name
        is_recorded = conversation_target(self.settings).is_recorded
        with read_session(self.store) as session:
            target_state = get_target_state(session, name)
            outcomes = count_reported(session, name)
            promotion_at = promoted_at(session, name) if is_recorded else None
        totals = Totals(outcomes[Outcome.SUCCESS] + outcomes[Outcome.FAILURE], outcomes[Outcome.FAILURE])
        started, promotion = _time_text(target_state.last_started_at), _time_text(promotion_at)
        previous = _load(engine)
        counters = add_sample(previous, started, totals, self.settings.triggers.window, promotion=promotion)
        due = "" if target_state.paused_at is not None else (counters.due or "".join(causes[:1]))
        counters = replace(counters, due=due)
        if counters != previous:
            _save(engine, counters)
        return target_state, counters

    def _clock_offset(self) -> float:
        """Return the seconds by which the wall clock is ahead of the monotonic clock."""
        return self.now().timestamp() - time.monotonic()


def clocks(section: TriggersSection) -> dict[str, Clock]:
    """Return the enabled clock triggers by job name."""
    enabled = {}
    zone = parse_zone(section.time_zone)
    if section.cron:
        key = f"{section.cron} {section.time_zone}"
        enabled["cron"] = Clock(f"cron {section.cron}", key, lambda: cron_trigger(section.cron, zone))
    if section.interval_h:
        hours = section.interval_h
        enabled["interval"] = Clock(f"every {hours:g} h", str(hours), lambda: IntervalTrigger(seconds=hours * 3600))
    return enabled


def _plan(scheduler: Any, configured: dict[str, Clock], *, stepped_back: bool = False) -> None:
    """Make the stored jobs match the configured ones; unchanged jobs keep their time unless ``stepped_back``."""
    jobs = {job.id: job for job in scheduler.get_jobs()}
    for name in jobs.keys() - configured.keys():
        scheduler.remove_job(name)
    for name, clock in configured.items():
        if stepped_back or name not in jobs or jobs[name].name != clock.key:
            trigger = clock.trigger()
            scheduler.add_job(cause, trigger, [clock.cause], id=name, name=clock.key, replace_existing=True)


def _earliest_run(scheduler: Any) -> datetime | None:
    try:
        times = [job.next_run_time for job in scheduler.get_jobs() if job.next_run_time is not None]
    except DBAPIError:
        return None
    return min(times, default=None)


@contextmanager
def _open_file(file: Path) -> Iterator[sqlalchemy.Engine]:
    """Open the database of the triggers; replace it if it is damaged."""
    # A separate file and not the store: the schedule works without the store's database, and backups contain no pickled
    # jobs.
    engine = connect(sqlite_url(file))
    try:
        if not _create_table(engine):
            log.warning("%s is damaged; it is created again", file)
            engine.dispose()
            for suffix in ("", "-wal", "-shm"):
                file.with_name(file.name + suffix).unlink(missing_ok=True)
            _create_table(engine)
        yield engine
    finally:
        engine.dispose()


def _create_table(engine: sqlalchemy.Engine) -> bool:
    """Create the table if it is missing; return False if the file is damaged."""
    try:
        with engine.begin() as connection:
            intact = connection.execute(text("PRAGMA quick_check(1)")).scalar() == "ok"
            connection.execute(text("CREATE TABLE IF NOT EXISTS counters (id INTEGER PRIMARY KEY, value TEXT)"))
            return intact
    except OperationalError:
        # No space or no permission: recreating the file would not help.
        raise
    except DatabaseError:
        return False


def _time_text(time: datetime | None) -> str:
    return "" if time is None else time.isoformat()


def _load(engine: sqlalchemy.Engine) -> Counters | None:
    with engine.begin() as connection:
        value = connection.execute(text("SELECT value FROM counters")).scalar()
    if value is None:
        return None
    record = json.loads(value)
    looks = tuple(Totals(**sample) for sample in record["looks"])
    # A file of an earlier release has no promotion.
    return Counters(record["started"], looks, record["due"], record.get("promotion", ""))


def _save(engine: sqlalchemy.Engine, counters: Counters) -> None:
    with engine.begin() as connection:
        row = {"value": json.dumps(asdict(counters))}
        connection.execute(text("INSERT OR REPLACE INTO counters (id, value) VALUES (1, :value)"), row)
