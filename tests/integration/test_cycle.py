"""A cycle across real processes: killed with SIGKILL, carried on by the same command, paused at approval."""

import collections
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from store.database import open_store, read_session
from store.records import CycleState, StageEvent, StageState
from store.repositories.cycles import get_cycle, list_stage_events
from tests.scripted_model import scripted_server
from traced.pipeline.graph import CHECKPOINTS
from traced.pipeline.report import SESSION

ROOT = Path(__file__).parents[2]
CYCLE = "desk-scripted-0-1"


def work(directory: Path, cut_at: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.integration.scripted_cycle", str(directory), cut_at]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240)


def run_output(directory: Path) -> tuple[CycleState, list[StageEvent]]:
    store = open_store(f"sqlite:///{directory / 'traced.db'}")
    try:
        with read_session(store) as session:
            return get_cycle(session, CYCLE).state, list_stage_events(session, CYCLE)
    finally:
        store.dispose()


@pytest.mark.parametrize("cut_at", ["analyze", "synthesize beta", "train alpha", "gate beta", "evaluate"])
def test_a_killed_cycle_is_carried_on_by_the_same_command(tmp_path: Path, cut_at: str) -> None:
    (tmp_path / "decisions").touch()
    assert work(tmp_path, cut_at).returncode == -signal.SIGKILL
    second = work(tmp_path)
    assert second.stdout.split() == [CYCLE, "finished", "alpha@v1", "beta@v1"], second.stderr
    state, events = run_output(tmp_path)
    assert state is CycleState.FINISHED
    finished = collections.Counter(
        f"{event.stage} {event.capability or ''}".strip()
        for event in events
        if event.state is StageState.FINISHED and event.stage != SESSION
    )
    per_capability = [
        f"{stage} {name}" for stage in ("synthesize", "admit", "train", "gate") for name in ("alpha", "beta")
    ]
    assert set(finished) == {
        "incumbent",
        "collect",
        "analyze",
        *per_capability,
        "compose",
        "promote",
        "evaluate",
        "report",
    }
    repeated = {stage for stage, count in finished.items() if count > 1}
    file_beside = (
        "alpha" if cut_at.endswith("beta") else "beta"
    )  # its station may have ended, its checkpoint not been written
    assert len(repeated) <= 1, repeated
    assert all(stage.endswith(file_beside) for stage in repeated), repeated


def test_a_cycle_waits_for_approval_across_processes(tmp_path: Path) -> None:
    first = work(tmp_path)
    assert first.stdout.split() == [CYCLE, "waiting"], first.stderr
    assert run_output(tmp_path)[0] is CycleState.WAITING
    (tmp_path / "decisions").touch()
    assert work(tmp_path).stdout.split() == [CYCLE, "finished", "alpha@v1", "beta@v1"]
    state, events = run_output(tmp_path)
    assert state is CycleState.FINISHED
    assert sum(event.stage == SESSION for event in events) == 2
    assert (tmp_path / CHECKPOINTS).stat().st_size > 0


def test_a_finished_cycle_is_followed_by_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "decisions").touch()
    assert work(tmp_path).stdout.split()[0] == CYCLE
    assert work(tmp_path).stdout.split()[0] == "desk-scripted-0-2"


def test_a_cycle_reports_to_no_tracing_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_server("{}") as elsewhere:
        for name in ("LANGSMITH", "LANGCHAIN"):
            monkeypatch.setenv(f"{name}_ENDPOINT", elsewhere.url)
            monkeypatch.setenv(f"{name}_API_KEY", "ls-1")
            monkeypatch.setenv(f"{name}_TRACING_V2", "true")
        monkeypatch.setenv("LANGSMITH_TRACING", "true")
        first = work(tmp_path)
        assert first.stdout.split() == [CYCLE, "waiting"], first.stderr
        assert elsewhere.connections == 0
