"""Attempts in a real store, made by real children: retried, awaited, quarantined, released, found after a kill -9."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import Engine

from store.database import open_store, read_session, sqlite_url, write_session
from store.errors import StoreUnavailable
from store.repositories import attempts as rows
from store.repositories.attempts import Attempt, AttemptState, InputKey
from store.repositories.cycles import save_cycle
from tests.unit.store.chain import CYCLE
from traced.core.errors import CapabilityError
from traced.core.ownership import own_identity
from traced.jobs import attempts as attempts_module
from traced.jobs.attempts import recover_lost_attempts, run_until_settled
from traced.jobs.retry import AttemptLedger, Backoff
from traced.processes.executor import LocalExecutor
from traced.processes.job import Job, Limits, Preempted, Quarantined, Report, ReportKind

ROOT = Path(__file__).parents[3]
KEY = InputKey("train", "dates", "ab")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    engine = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(engine) as session:
        save_cycle(session, CYCLE)
    yield engine
    engine.dispose()


class Clock:
    """Time passes by sleeping alone."""

    def __init__(self) -> None:
        self.at = datetime(2026, 3, 14, tzinfo=UTC)
        self.slept: list[float] = []

    def now(self) -> datetime:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += timedelta(seconds=seconds)
        await asyncio.sleep(0)


def ledger(store: Engine, clock: Clock) -> AttemptLedger:
    return AttemptLedger(store, own_identity(), Backoff(5, 2, 900), 3, seed=1, now=clock.now, sleep=clock.sleep)


def job(action: str, **arguments: Any) -> Job:
    limits = Limits(heartbeat_s=60, grace_s=20)
    return Job("tests.integration.processes.stage", {"do": action, **arguments}, "c1", "train", "dates", "ab", limits)


async def run_settled(
    store: Engine, folder: Path, the_job: Job, clock: Clock | None = None, reports: list[Report] | None = None
) -> dict[str, Any]:
    executor = LocalExecutor(folder, check_s=0.05)
    listener = (reports if reports is not None else []).append
    return await run_until_settled(executor, the_job, ledger(store, clock or Clock()), listener)


def history(store: Engine, key: InputKey = KEY) -> list[Attempt]:
    with read_session(store) as session:
        return rows.list_attempts(session, key)


async def test_a_preempted_job_is_not_counted_and_not_retried(store: Engine, tmp_path: Path) -> None:
    for _ in range(4):
        with pytest.raises(Preempted, match="iteration 2 of 4"):
            await run_settled(store, tmp_path, job("fail", error="paused"))
    assert [attempt.state for attempt in history(store)] == [AttemptState.STOPPED] * 4
    assert (await run_settled(store, tmp_path, job("succeed")))["echo"] is None


def states(store: Engine) -> list[str]:
    return [attempt.state.value for attempt in history(store)]


async def test_an_attempt_is_a_row_with_its_end_and_evidence(store: Engine, tmp_path: Path) -> None:
    assert (await run_settled(store, tmp_path, job("succeed", steps=4)))["echo"] is None
    [attempt] = history(store)
    assert (attempt.state, attempt.number, attempt.holder) == (AttemptState.FINISHED, 1, own_identity())
    assert attempt.evidence["exit_code"] == 0
    assert attempt.evidence["progress"]["done"] == 3
    assert attempt.evidence["peak_rss_bytes"] > 0
    assert attempt.pid is not None


async def test_a_failing_stage_is_tried_again_with_growing_waits(store: Engine, tmp_path: Path) -> None:
    clock = Clock()
    reports: list[Report] = []
    failing_job = job("fail_times", counter=str(tmp_path / "n"), times=2, how="crash")
    assert await run_settled(store, tmp_path, failing_job, clock, reports) == {"tried": 3}
    assert states(store) == ["failed", "failed", "finished"]
    waits = [report.data for report in reports if report.kind is ReportKind.WAITING]
    assert [wait["after"] for wait in waits] == ["failed", "failed"]
    assert "SIGSEGV" in waits[0]["for"]
    assert 2.5 <= waits[0]["seconds"] <= 5 <= waits[1]["seconds"] <= 10
    assert all(wait["seconds"] in clock.slept for wait in waits)


async def test_three_failures_quarantine_the_input_until_a_person_releases_it(store: Engine, tmp_path: Path) -> None:
    failing_job = job("fail_times", counter=str(tmp_path / "n"), times=4, how="crash")
    with pytest.raises(
        Quarantined, match=r"train of dates is quarantined as p3: 3 attempts failed.*SIGSEGV"
    ) as exc_info:
        await run_settled(store, tmp_path, failing_job)
    assert "traced release p3" in exc_info.value.hint
    assert states(store) == ["failed"] * 3
    with read_session(store) as session:
        [entry] = rows.list_quarantined(session)
    assert [attempt["signal"] for attempt in entry.evidence["attempts"]] == ["SIGSEGV"] * 3
    assert all(attempt["last_lines"] for attempt in entry.evidence["attempts"])
    with pytest.raises(Quarantined):  # a restart of the service: nothing but the store remembers
        await run_settled(store, tmp_path, failing_job)
    assert len(states(store)) == 3
    with write_session(store) as session:
        rows.release_quarantined(session, entry.id, actor="Ada", at=Clock().now())
    assert await run_settled(store, tmp_path, failing_job) == {"tried": 5}
    assert states(store)[3:] == ["failed", "finished"]


async def test_infrastructure_failures_are_waited_for_and_never_quarantined(store: Engine, tmp_path: Path) -> None:
    reports: list[Report] = []
    failing_job = job("fail_times", counter=str(tmp_path / "n"), times=5, how="docker")
    assert await run_settled(store, tmp_path, failing_job, reports=reports) == {"tried": 6}
    assert states(store) == ["blocked"] * 5 + ["finished"]
    waits = [report.data for report in reports if report.kind is ReportKind.WAITING]
    assert all("no Docker engine answers" in wait["for"] and wait["after"] == "blocked" for wait in waits)


async def test_a_stages_own_answer_is_raised_and_not_tried_again(store: Engine, tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="the gate said no") as exc_info:
        await run_settled(store, tmp_path, job("fail", error="answer"))
    assert exc_info.value.hint == "look"
    assert states(store) == ["finished"]


async def test_a_stored_answer_is_reused_in_its_cycle_only(store: Engine, tmp_path: Path) -> None:
    working_job = job("fail_times", counter=str(tmp_path / "n"), times=0, how="crash")
    assert [await run_settled(store, tmp_path, working_job) for _ in range(2)] == [{"tried": 1}] * 2
    assert states(store) == ["finished"]
    with write_session(store) as session:
        save_cycle(session, replace(CYCLE, id="c2"))
    assert await run_settled(store, tmp_path, replace(working_job, cycle_id="c2")) == {"tried": 2}
    assert await run_settled(store, tmp_path, replace(working_job, input_hash="cd")) == {"tried": 3}


async def test_a_stored_refusal_is_raised_again(store: Engine, tmp_path: Path) -> None:
    values = []
    for _ in range(2):
        with pytest.raises(CapabilityError) as exc_info:
            await run_settled(store, tmp_path, job("fail", error="answer"))
        values.append((exc_info.value.message, exc_info.value.hint))
    assert values[0] == values[1]
    assert states(store) == ["finished"]


@pytest.mark.parametrize(("done", "times"), [(0, 3), (7, 4)])
async def test_kills_without_progress_lead_to_quarantine(store: Engine, tmp_path: Path, done: int, times: int) -> None:
    with pytest.raises(Quarantined, match="3 attempts failed"):
        await run_settled(store, tmp_path, job("kill_itself", done=done))
    assert states(store) == ["killed"] * times


async def test_a_child_that_cannot_be_started_is_retried(store: Engine, tmp_path: Path) -> None:
    """The folder of the logs is a file until somebody looks after it."""
    blocker = tmp_path / "logs"
    blocker.write_text("")
    clock = Clock()

    class Mending(Clock):
        async def sleep(self, seconds: float) -> None:
            if len(history(store)) == 2:
                blocker.unlink(missing_ok=True)
            await clock.sleep(seconds)
            self.at = clock.at

    await run_settled(store, blocker, job("succeed"), Mending())
    assert states(store) == ["blocked", "blocked", "finished"]
    assert "cannot write the job file" in history(store)[0].evidence["detail"]


async def test_a_cancelled_attempt_is_not_a_failure(store: Engine, tmp_path: Path) -> None:
    async def main() -> None:
        started = asyncio.Event()

        def hear(report: Report) -> None:
            if report.kind is ReportKind.PROGRESS:
                started.set()

        waiting_job = job("wait", checkpoint=str(tmp_path / "checkpoint"))
        executor = LocalExecutor(tmp_path, check_s=0.05)
        task = asyncio.create_task(run_until_settled(executor, waiting_job, ledger(store, Clock()), hear))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for _ in range(4):
        await main()
    assert states(store) == ["stopped"] * 4


async def test_an_unavailable_database_is_waited_for(
    store: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is gone whenever an attempt should end; the result is not lost."""
    refusals = iter([True, True, False])

    def end(*arguments: Any, **values: Any) -> None:
        if next(refusals):
            raise StoreUnavailable("the database is locked")
        rows.end_attempt(*arguments, **values)

    monkeypatch.setattr(attempts_module, "end_attempt", end)
    reports: list[Report] = []
    assert (await run_settled(store, tmp_path, job("succeed"), reports=reports))["variable"] is None
    assert states(store) == ["finished"]
    assert [r.data["for"] for r in reports if r.kind is ReportKind.WAITING] == ["the database is locked"] * 2


SERVICE = """
import asyncio, sys
from datetime import UTC, datetime
from pathlib import Path
from store.database import open_store
from traced.jobs.attempts import run_until_settled
from traced.core.ownership import own_identity
from traced.processes.job import read_job
from traced.jobs.retry import AttemptLedger
from traced.processes.executor import LocalExecutor
from traced.jobs.retry import Backoff
store = open_store(sys.argv[2])
ledger = AttemptLedger(store, own_identity(), Backoff(0.01, 1, 0.01), 3, seed=1, now=lambda: datetime.now(UTC))
tell = lambda report: print(report.kind, report.data, flush=True)
asyncio.run(run_until_settled(LocalExecutor(Path(sys.argv[3])), read_job(Path(sys.argv[1])), ledger, tell))
"""


async def test_three_attempts_lost_to_a_killed_service_quarantine_the_input(store: Engine, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(job("wait", checkpoint=str(tmp_path / "checkpoint")).to_json())
    command = [sys.executable, "-c", textwrap.dedent(SERVICE), str(path), sqlite_url(tmp_path / "traced.db")]
    for number in range(1, 4):
        children = killed_while_waiting([*command, str(tmp_path)])
        assert [attempt.number for attempt in running(store)] == [number]
        [attempt] = recover_lost_attempts(store, now=lambda: datetime.now(UTC), silent_s=900)
        assert [child for child in children if runs(child)] == []  # not even one that is still stopping
        assert attempt.number == number
        assert recover_lost_attempts(store, now=lambda: datetime.now(UTC), silent_s=900) == []
    assert states(store) == ["lost"] * 3
    with pytest.raises(Quarantined, match="the process that ran it died"):
        await run_settled(store, tmp_path, job("succeed"))


def killed_while_waiting(command: list[str]) -> list[psutil.Process]:
    """kill -9 the service when its child works and its row says so; what it had started."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as service:
        assert service.stdout is not None
        while "progress" not in service.stdout.readline():
            continue
        children = psutil.Process(service.pid).children(recursive=True)
        os.kill(service.pid, signal.SIGKILL)
    return children


def runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def running(store: Engine) -> list[Attempt]:
    with read_session(store) as session:
        return rows.running_attempts(session)


@pytest.mark.parametrize(("silence_s", "is_lost"), [(100, 0), (1000, 1), (-100, 0), (-1000, 1)])
def test_a_holder_on_another_machine_is_judged_by_its_heartbeat(store: Engine, silence_s: int, is_lost: int) -> None:
    """Clocks that were set in between, in either direction, neither kill a live one nor keep a dead one for ever."""
    at = Clock().now()
    with write_session(store) as session:
        rows.begin_attempt(session, "c1", KEY, holder="elsewhere/boot/1/2", at=at)
    assert len(recover_lost_attempts(store, now=lambda: at + timedelta(seconds=silence_s), silent_s=900)) == is_lost


def test_a_holder_that_lives_is_left_alone(store: Engine) -> None:
    at = Clock().now()
    with write_session(store) as session:
        rows.begin_attempt(session, "c1", KEY, holder=own_identity(), at=at)
    assert recover_lost_attempts(store, now=lambda: at + timedelta(days=9), silent_s=900) == []
