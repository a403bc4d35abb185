"""Real children that succeed, fail, hang, stall, eat, fork, ignore, print and kill themselves."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from traced.processes.executor import LocalExecutor
from traced.processes.job import Job, JobOutcome, Limits, Report, ReportKind, Result
from traced.processes.process_tree import marked_processes

ROOT = Path(__file__).parents[3]
MIB = 2**20
PATIENT = Limits(heartbeat_s=60, grace_s=20)


def job(action: str, limits: Limits = PATIENT, **arguments: Any) -> Job:
    return Job("tests.integration.processes.stage", {"do": action, **arguments}, "c1", "train", "dates", "ab", limits)


def executor(folder: Path) -> LocalExecutor:
    return LocalExecutor(folder, log_bytes=2 * MIB, check_s=0.05)


async def run(folder: Path, selected_job: Job, on_report: Callable[[Report], None] = lambda report: None) -> Result:
    return await executor(folder).run(selected_job, on_report)


def has_exited(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_a_child_gets_its_arguments_and_gives_its_result(tmp_path: Path) -> None:
    reports: list[Report] = []
    selected_job = Job(**{**vars(job("succeed", echo=["ü", 1.5, None])), "variables": {"STAGE_VARIABLE": "set"}})
    result = await run(tmp_path, selected_job, reports.append)
    assert result.outcome is JobOutcome.FINISHED
    assert result.value == {"pid": reports[0].data["pid"], "echo": ["ü", 1.5, None], "variable": "set"}
    assert reports[0].kind is ReportKind.STARTED
    assert [r.data for r in reports if r.kind is ReportKind.PROGRESS] == [
        {"phase": "steps", "done": done, "note": "ü"} for done in (0, 1)
    ]
    assert any(r.kind is ReportKind.HEARTBEAT for r in reports)
    evidence = result.evidence
    assert (evidence.exit_code, evidence.signal, evidence.progress["done"]) == (0, None, 1)
    assert evidence.peak_rss_bytes > 5 * MIB
    assert 0 < evidence.seconds < 60


@pytest.mark.parametrize("action", ["fail", "fail_in_a_task"])
async def test_an_error_raised_on_purpose_arrives_with_its_classes(tmp_path: Path, action: str) -> None:
    result = await run(tmp_path, job(action, error="docker"))
    assert (result.outcome, result.evidence.exit_code) == (JobOutcome.FAILED, 1)
    assert result.failure is not None
    assert result.failure.types == ["EngineDown", "SandboxError", "Exception"]
    assert "no Docker engine answers (refused)" in result.failure.message


async def test_a_defect_arrives_too_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    result = await run(tmp_path, job("fail", error="a defect"))
    assert (result.outcome, result.evidence.exit_code) == (JobOutcome.FAILED, 70)
    assert result.failure is not None
    assert result.failure.type == "KeyError"
    assert "KeyError: 'a defect'" in result.evidence.last_lines[-1]


async def test_a_hung_child_is_ended_and_shows_where_it_hung(tmp_path: Path) -> None:
    result = await run(tmp_path, job("hang", Limits(heartbeat_s=5, grace_s=0.2)))
    assert result.outcome is JobOutcome.HUNG
    assert "no heartbeat" in result.evidence.detail
    assert result.evidence.signal in ("SIGKILL", "SIGALRM")  # on a busy machine its own alarm may come first
    assert "in hang" in (tmp_path / "c1" / "train-dates.log").read_text()


async def test_a_child_that_its_own_alarm_ended_was_hung(tmp_path: Path) -> None:
    result = await run(tmp_path, job("kill_itself", signal="SIGALRM"))
    assert (result.outcome, result.evidence.signal) == (JobOutcome.HUNG, "SIGALRM")


async def test_a_stalled_child_is_ended_in_order(tmp_path: Path) -> None:
    result = await run(tmp_path, job("stall", Limits(heartbeat_s=60, progress_s=4, grace_s=20)))
    assert result.outcome is JobOutcome.STALLED
    assert "no progress for" in result.evidence.detail
    assert "'stuck' 7" in result.evidence.detail
    assert result.evidence.exit_code == 143


async def test_memory_is_that_of_the_whole_tree(tmp_path: Path) -> None:
    result = await run(tmp_path, job("eat_memory", Limits(heartbeat_s=60, memory_bytes=200 * MIB, grace_s=20)))
    assert result.outcome is JobOutcome.OUT_OF_MEMORY
    assert "above the limit of 200 MiB" in result.evidence.detail
    assert result.evidence.peak_rss_bytes > 200 * MIB
    assert result.evidence.signal == "SIGKILL"


async def test_memory_that_is_shared_is_counted_once(tmp_path: Path) -> None:
    result = await run(tmp_path, job("share_memory", Limits(heartbeat_s=60, memory_bytes=200 * MIB), steps=10))
    assert result.outcome is JobOutcome.FINISHED
    assert result.evidence.peak_rss_bytes > 200 * MIB


async def test_nothing_that_a_child_left_behind_survives_it(tmp_path: Path) -> None:
    result = await run(tmp_path, job("fork_and_leave"))
    assert result.value is not None
    assert [has_exited(pid) for pid in result.value["pids"]] == [True, True]


@pytest.mark.parametrize("action", ["wait", "wait_in_a_loop"])
async def test_cancelling_lets_the_child_write_its_checkpoint(tmp_path: Path, action: str) -> None:
    checkpoint = tmp_path / "checkpoint"
    pid = await cancelled_when_it_progresses(tmp_path, job(action, checkpoint=str(checkpoint)))
    assert checkpoint.read_text() == "whole"
    assert has_exited(pid)


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    assert has_exited(await cancelled_when_it_progresses(tmp_path, job("ignore_sigterm", Limits(60, grace_s=0.3))))


async def test_a_second_cancellation_stops_at_once(tmp_path: Path) -> None:
    selected_job = job("ignore_sigterm", Limits(heartbeat_s=60, grace_s=250))  # the test's own time limit is shorter
    assert has_exited(await cancelled_when_it_progresses(tmp_path, selected_job, times=2))


async def cancelled_when_it_progresses(folder: Path, selected_job: Job, times: int = 1) -> int:
    """Run and cancel; the child's process id."""
    started = asyncio.Event()
    pids: list[Any] = []  # the first report has it

    def hear(report: Report) -> None:
        pids.append(report.data.get("pid"))
        if report.kind is ReportKind.PROGRESS:
            started.set()

    task = asyncio.create_task(executor(folder).run(selected_job, hear))
    await started.wait()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    return pids[0]


@pytest.mark.slow
async def test_a_hundred_megabytes_of_output_leave_a_small_log_with_its_end(tmp_path: Path) -> None:
    result = await run(tmp_path, job("print_much", mib=100))
    assert result.outcome is JobOutcome.FINISHED
    assert result.evidence.last_lines[-1] == "the last line"
    files = [path for path in (tmp_path / "c1").iterdir() if ".log" in path.name]
    assert sum(path.stat().st_size for path in files) <= 2 * MIB
    assert (tmp_path / "c1" / "train-dates.log").read_text().endswith("the last line\n")


async def test_the_output_of_a_child_is_redacted(tmp_path: Path) -> None:
    result = await run(tmp_path, job("tell_secrets"))
    log_text = (tmp_path / "c1" / "train-dates.log").read_text() + "".join(result.evidence.last_lines)
    assert "hunter2" not in log_text
    assert result.evidence.last_lines == ["in pieces: password=[redacted]", "token: [redacted]"]


@pytest.mark.parametrize(
    ("action", "arguments", "code", "name", "line"),
    [
        ("kill_itself", {}, None, "SIGKILL", "last words"),
        ("crash", {}, None, "SIGSEGV", "Fatal Python error: Segmentation fault"),
        ("leave", {"code": 7}, 7, None, ""),
    ],
)
async def test_a_child_that_exits_without_a_report_crashed(
    tmp_path: Path, action: str, arguments: dict[str, Any], code: int | None, name: str | None, line: str
) -> None:
    result = await run(tmp_path, job(action, **arguments))
    assert (result.outcome, result.evidence.exit_code, result.evidence.signal) == (JobOutcome.CRASHED, code, name)
    assert result.evidence.detail.endswith("without a result")
    assert line in (tmp_path / "c1" / "train-dates.log").read_text()


async def test_a_child_stopped_from_outside_is_reported_as_stopped(tmp_path: Path) -> None:
    def stop(report: Report) -> None:
        if report.kind is ReportKind.PROGRESS:
            os.kill(pids[0], signal.SIGTERM)
        pids.append(report.data.get("pid"))

    pids: list[Any] = []
    result = await run(tmp_path, job("wait", checkpoint=str(tmp_path / "checkpoint")), stop)
    assert (result.outcome, result.evidence.exit_code) == (JobOutcome.STOPPED, 143)


async def test_a_result_counts_even_when_the_interpreter_does_not_end(tmp_path: Path) -> None:
    result = await run(tmp_path, job("not_go", Limits(heartbeat_s=60, grace_s=0.3)))
    assert (result.outcome, result.value) == (JobOutcome.FINISHED, {"done": True})


async def test_a_child_that_sends_invalid_reports_is_stopped(tmp_path: Path) -> None:
    result = await run(tmp_path, job("babble", Limits(heartbeat_s=60, grace_s=0.5), checkpoint=str(tmp_path / "c")))
    assert result.outcome is JobOutcome.FAILED
    assert result.failure is not None
    assert result.failure.type == "ReportFault"
    assert "no JSON" in result.failure.message


async def test_an_error_of_on_report_stops_the_child_and_is_raised(tmp_path: Path) -> None:
    def refuse(report: Report) -> None:
        pids.append(report.data.get("pid"))
        if report.kind is ReportKind.PROGRESS:
            raise LookupError("no place for it")

    pids: list[Any] = []
    with pytest.raises(LookupError):
        await run(tmp_path, job("wait", checkpoint=str(tmp_path / "c")), refuse)
    assert has_exited(pids[0])


async def test_a_missing_module_is_a_crash_with_its_message(tmp_path: Path) -> None:
    result = await run(tmp_path, Job("tests.no_such_module", {}, "c1", "gate"))
    assert (result.outcome, result.evidence.exit_code) == (JobOutcome.CRASHED, 1)
    assert "No module named tests.no_such_module" in result.evidence.last_lines[-1]


def test_by_hand_the_lines_go_to_standard_output(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(job("succeed").to_json())
    command = [sys.executable, "-m", "tests.integration.processes.stage", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert '"kind": "result"' in done.stdout.splitlines()[-1]


PARENT = """
import asyncio, sys
from pathlib import Path
from traced.processes.job import read_job
from traced.processes.executor import LocalExecutor
asyncio.run(LocalExecutor(Path(sys.argv[2])).run(read_job(Path(sys.argv[1])), lambda r: print(r.data, flush=True)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "limits", "checkpoint"),
    [
        ("wait", PATIENT, True),
        ("fork_and_leave", PATIENT, True),
        ("ignore_sigterm", Limits(heartbeat_s=60, grace_s=0.5), False),
        ("hang", Limits(heartbeat_s=3, grace_s=0.5), False),
    ],
)
def test_a_killed_parent_leaves_no_process(tmp_path: Path, action: str, limits: Limits, checkpoint: bool) -> None:
    """kill -9 of the parent: the child stops in order where it can, and is gone in any case, with all it started."""
    path = tmp_path / "job.json"
    path.write_text(job(action, limits, checkpoint=str(tmp_path / "checkpoint"), end=False).to_json())
    command = [sys.executable, "-c", textwrap.dedent(PARENT), str(path), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        while "phase" not in parent.stdout.readline():
            continue
        started = psutil.Process(parent.pid).children(recursive=True)
        assert len(started) == (3 if action == "fork_and_leave" else 1)
        marks = started[0].environ()["_TRACED_CHILD"]
        os.kill(parent.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(started, timeout=30)
    assert [process for process in alive if not has_exited(process.pid)] == []  # who reaps orphans may be slow
    assert list(marked_processes(marks)) == []
    assert (tmp_path / "checkpoint").exists() is checkpoint
