"""Triggers on a real store and a real scheduler; requested cycles are only recorded."""

import asyncio
import pickle
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from store.database import open_store, sqlite_url, write_session
from store.repositories.cycles import pause_target, record_start, resume_target
from store.repositories.promotions import promote, roll_back
from store.repositories.trajectories import save_trajectories
from store.types import Outcome
from tests.unit.store.chain import CYCLE, save_chain, trajectory
from tests.waiting import eventually_async
from traced.config.settings import Settings, load_settings
from traced.daemon.trigger_progress import FILE, new_trajectories
from traced.daemon.triggers import Triggers

NIGHTLY: dict[str, object] = {"triggers.cron": "0 3 * * *", "triggers.time_zone": "UTC"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    engine = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(engine) as session:
        save_chain(session)
    yield engine
    engine.dispose()


@dataclass
class Place:
    """A data directory whose triggers the tests run."""

    folder: Path
    store: Engine
    causes: list[str] = field(default_factory=list)
    ahead: timedelta = timedelta(0)
    triggers: Triggers | None = None

    def live(
        self, settings: Mapping[str, object], condition: Callable[[], bool] = lambda: True, min_checks: int = 3
    ) -> None:
        """Run the triggers as one process, for at least ``min_checks`` checks and until the condition holds."""
        finished_checks = []
        self.triggers = Triggers(
            load_settings(self.folder, settings), self.store, self.causes.append, self.now, poll_s=0.01
        )
        check = self.triggers._check

        async def counting_check(engine: Engine) -> None:
            await check(engine)
            finished_checks.append(1)

        self.triggers._check = counting_check  # type: ignore[method-assign]

        async def run() -> None:
            assert self.triggers is not None
            task = asyncio.create_task(self.triggers.run())
            while not task.done() and (len(finished_checks) < min_checks or not condition()):
                await asyncio.wait({task}, timeout=0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(asyncio.wait_for(run(), 60))

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead

    def report(self, count: int, failed: bool = False, cycle: str | None = None) -> None:
        outcome = Outcome.FAILURE if failed else Outcome.SUCCESS
        with write_session(self.store) as session:
            offset = session.execute(text("SELECT count(*) FROM trajectories")).scalar_one()
            like = replace(trajectory("x"), source="desk", outcome=outcome, cycle_id=cycle)
            trajectories = [replace(like, id=f"n{offset + n}", task_id=f"n{offset + n}") for n in range(count)]
            save_trajectories(session, trajectories)

    def begin(self) -> None:
        with write_session(self.store) as session:
            record_start(session, "desk", cause="a test", at=self.now())

    def jobs(self) -> dict[str, datetime]:
        with closing(sqlite3.connect(self.folder / FILE)) as raw:
            rows = raw.execute("SELECT id, next_run_time FROM apscheduler_jobs").fetchall()
        return {name: datetime.fromtimestamp(at, UTC) for name, at in rows}

    def set_due(self, name: str, at: datetime) -> None:
        """Reschedule a stored job to ``at``."""
        with closing(sqlite3.connect(self.folder / FILE)) as raw:
            [(state,)] = raw.execute("SELECT job_state FROM apscheduler_jobs WHERE id = ?", [name]).fetchall()
            job_state = pickle.loads(state) | {"next_run_time": at}
            raw.execute(
                "UPDATE apscheduler_jobs SET next_run_time = ?, job_state = ?",
                [at.timestamp(), pickle.dumps(job_state)],
            )
            raw.commit()


@pytest.fixture
def place(tmp_path: Path, store: Engine) -> Place:
    return Place(tmp_path, store)


def test_all_are_off_by_default(place: Place) -> None:
    place.live({}, min_checks=0)
    assert not (place.folder / FILE).exists()
    assert place.causes == []


def test_the_progress_of_a_count_is_that_of_the_triggers(place: Place) -> None:
    def progress(total: int, *, has_started: bool) -> int:
        return new_trajectories(place.folder, total, has_started=has_started)

    # The service has never counted: it would count all, or only what comes after the cycle that it has begun.
    assert (progress(12, has_started=False), progress(12, has_started=True)) == (12, 0)
    place.report(12)
    settings = {"triggers.trajectories": 20}
    place.live(settings)
    assert progress(12, has_started=False) == 12
    place.begin()
    place.live(settings)
    place.report(3)
    assert progress(15, has_started=True) == 3
    place.live(settings)
    assert progress(15, has_started=True) == 3
    assert progress(1, has_started=True) == 0  # some were deleted
    (place.folder / FILE).write_bytes(b"damaged")
    assert progress(15, has_started=False) == 15


def test_missed_nights_are_made_up_for_once(place: Place) -> None:
    place.live(NIGHTLY)
    assert place.causes == []
    place.set_due("cron", datetime.now(UTC) - timedelta(days=5))
    turns = []

    def start_cycle_once() -> bool:
        turns.append(bool(place.causes))
        if turns.count(True) == 1:
            place.begin()
        return turns.count(True) > 20

    place.live(NIGHTLY, start_cycle_once)
    place.live(NIGHTLY, min_checks=10)
    assert place.causes == ["cron 0 3 * * *"]
    next_run = place.jobs()["cron"]
    assert (next_run.hour, next_run.minute) == (3, 0)
    assert timedelta(0) < next_run - datetime.now(UTC) <= timedelta(days=1)


def test_a_cause_outlives_the_process_until_a_cycle_begins(place: Place) -> None:
    place.live(NIGHTLY)
    place.set_due("cron", datetime.now(UTC) - timedelta(minutes=1))
    place.live(NIGHTLY, lambda: bool(place.causes))
    place.live(NIGHTLY, lambda: len(place.causes) == 2)
    place.begin()
    place.live(NIGHTLY)
    assert place.causes == ["cron 0 3 * * *"] * 2


def test_a_job_keeps_its_time_and_a_changed_expression_replaces_it(place: Place) -> None:
    place.live({"triggers.interval_h": 6.0})
    first = place.jobs()
    place.live({"triggers.interval_h": 6.0})
    assert place.jobs() == first
    assert place.triggers is not None
    assert place.triggers.next_at() == first["interval"]
    place.live({"triggers.interval_h": 1.0} | NIGHTLY)
    changed = place.jobs()
    assert changed.keys() == {"interval", "cron"}
    assert changed["interval"] < first["interval"]
    place.live({"triggers.cron": "0 3 * * 0"})
    assert place.jobs().keys() == {"cron"}
    assert place.jobs()["cron"].astimezone().weekday() == 6
    place.live({})
    assert place.jobs() == {}


def test_a_clock_set_back_plans_anew(place: Place) -> None:
    settings = {"triggers.interval_h": 1.0}
    place.live(settings)
    place.set_due("interval", datetime.now(UTC) + timedelta(days=400))

    def near() -> bool:
        assert place.triggers is not None
        if place.triggers.next_at() is not None:
            place.ahead = -timedelta(days=400)
        return place.jobs()["interval"] < datetime.now(UTC) + timedelta(hours=2)

    place.live(settings, near)
    place.ahead = timedelta(0)


def test_enough_new_trajectories_ask_once_and_count_anew(place: Place) -> None:
    settings = {"triggers.trajectories": 5}
    place.report(4)
    place.report(50, cycle=CYCLE.id)
    place.live(settings)
    assert place.causes == []
    place.report(3)
    place.live(settings, min_checks=10)
    assert place.causes == ["7 new trajectories"]
    place.begin()
    place.report(4)
    place.live(settings)
    assert place.causes == ["7 new trajectories"]


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_promotion_makes_a_recorded_target_count_anew(place: Place, is_recorded: bool) -> None:
    """Its next cycle uses only what came since; one that was requested before would begin with eight of them."""
    settings: dict[str, object] = {"triggers.trajectories": 5}
    settings |= {"target.kind": "recorded"} if is_recorded else {}
    place.begin()
    place.live(settings)
    place.report(6)

    def promote_once() -> bool:
        if not place.causes:
            return False
        if place.causes == ["6 new trajectories"]:
            with write_session(place.store) as session:
                roll_back(session, "date-reasoning@v1", actor="Ada", at=place.now())
                promote(session, "date-reasoning@v1", actor="Ada", at=place.now())
            place.causes.append("promotion")
        return not is_recorded or place.causes[-1] == ""

    place.live(settings, promote_once)
    assert place.causes == ["6 new trajectories", "promotion", *([""] if is_recorded else [])]
    place.causes.clear()
    place.report(4)
    place.live(settings, min_checks=10)
    assert place.causes == ([] if is_recorded else ["10 new trajectories"])
    place.report(1)
    place.live(settings, lambda: bool(place.causes))
    assert place.causes[-1] == f"{5 if is_recorded else 11} new trajectories"


def test_a_failure_rate_over_the_newest(place: Place) -> None:
    settings = {"triggers.failure_rate": 0.4, "triggers.window": 10}
    place.report(90)
    place.live(settings)
    place.report(6)
    place.live(settings)
    place.report(4, failed=True)
    place.live(settings, lambda: bool(place.causes))
    assert place.causes == ["failure rate 40 % over the last 10"]


def test_a_paused_target_forgets_clocks_and_keeps_counts(place: Place) -> None:
    settings = NIGHTLY | {"triggers.trajectories": 5}
    place.live(settings)
    with write_session(place.store) as session:
        pause_target(session, "desk", actor="me", at=place.now())
    place.set_due("cron", datetime.now(UTC) - timedelta(minutes=1))
    place.live(settings, lambda: place.jobs()["cron"] > datetime.now(UTC), min_checks=10)
    place.report(5)
    place.live(settings)
    assert place.causes == []
    with write_session(place.store) as session:
        resume_target(session, "desk")
    place.live(settings, lambda: bool(place.causes))
    assert place.causes == ["5 new trajectories"]


def test_a_store_that_is_gone_for_a_while_delays_and_loses_nothing(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.live(NIGHTLY)
    place.set_due("cron", datetime.now(UTC) - timedelta(minutes=1))
    turns = []

    def rename_table(name: str, other: str) -> None:
        with write_session(place.store) as session:
            session.execute(text(f"ALTER TABLE {name} RENAME TO {other}"))

    def condition() -> bool:
        turns.append(place.jobs()["cron"] > datetime.now(UTC))
        if turns.count(True) == 20:
            assert place.causes == []
            rename_table("elsewhere", "targets")
        return bool(place.causes)

    rename_table("targets", "elsewhere")
    place.live(NIGHTLY, condition)
    assert place.causes == ["cron 0 3 * * *"]
    assert sum("triggers cannot be evaluated now" in line for line in caplog.messages) == 1


def test_a_damaged_file_is_made_anew(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    (place.folder / FILE).write_bytes(b"no database at all, but long enough to be read as one" * 50)
    place.live(NIGHTLY)
    assert place.jobs().keys() == {"cron"}
    assert "is damaged; it is created again" in caplog.text


async def test_other_settings_are_followed_without_a_restart(place: Place) -> None:
    def nightly(cron: str) -> Settings:
        return load_settings(place.folder, NIGHTLY | {"triggers.cron": cron})

    async def scene() -> None:
        triggers = Triggers(load_settings(place.folder, {}), place.store, place.causes.append, place.now, poll_s=1000)
        task = asyncio.create_task(triggers.run())
        await asyncio.sleep(0)
        for settings, hour in ((nightly("0 3 * * *"), 3), (nightly("0 4 * * *"), 4)):
            await asyncio.to_thread(triggers.take, settings)
            await eventually_async(lambda hour=hour: (at := triggers.next_at()) is not None and at.hour == hour)
        triggers.take(load_settings(place.folder, {"triggers.trajectories": 2}))
        await eventually_async(lambda: triggers.next_at() is None)
        place.report(2)
        triggers.take(load_settings(place.folder, {"triggers.trajectories": 1}))
        await eventually_async(lambda: bool(place.causes))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.wait_for(scene(), 60)
    assert place.jobs() == {}
    assert place.causes == ["2 new trajectories"]
