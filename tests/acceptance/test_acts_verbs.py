"""Decisions of the command line, beside a real daemon and without one: the same answer, the same audit."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from store.database import open_store, read_session, sqlite_url, write_session
from store.records import CycleState
from store.repositories.attempts import InputKey, QuarantinedInput, begin_attempt, quarantine
from store.repositories.cycles import set_cycle_state
from store.repositories.events import list_audit, list_events
from tests.acceptance.conftest import Traced
from tests.unit.registry.chain import seed_adapter, seed_cycle
from traced.app.service import now
from traced.core.ownership import CYCLE_LOCK, hold_directory, this_user

ADAPTER = "error-recovery@v1"
DAEMON = "daemon"
NOBODY = "nobody"
KEY = InputKey("train", "error-recovery", "ab")


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Two adapter versions whose gates passed, and a training that is quarantined; nothing is due."""
    directory = tmp_path / "traced-data"
    engine = open_store(sqlite_url(directory / "traced.db"))
    with write_session(engine) as session:
        seed_cycle(session)
        seed_adapter(session, directory, 1)
        seed_adapter(session, directory, 2)
        set_cycle_state(session, "c1", CycleState.FINISHED, at=now())
        for _ in range(3):
            begin_attempt(session, "c1", KEY, holder="h", at=now())
        quarantine(session, QuarantinedInput("p3", "c1", KEY, "3 attempts failed, the last one: [hung]", {}, now()))
    engine.dispose()
    return directory


class Daemon(subprocess.Popen[str]):
    """``traced up`` as a process; ``lines`` is its log, ``ends_with`` the expected exit code."""

    lines: list[str]
    ends_with = 0


@contextmanager
def daemon(data_dir: Path, **variables: str) -> Iterator[Daemon]:
    """Run ``traced up`` on the directory: wait until it is ready, and stop it at the end."""
    command = [sys.executable, "-m", "traced", "up", "--data-dir", str(data_dir), "--set", "log.format=json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    with Daemon(command, cwd=data_dir.parent, env=environment, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        running.lines = []
        try:
            for line in running.stderr:
                running.lines.append(line)
                if '"event": "ready"' in line:
                    break
            assert running.poll() is None, "".join(running.lines)
            yield running
        finally:
            running.send_signal(signal.SIGTERM)
            running.lines += running.communicate(timeout=240)[1].splitlines()
    assert running.returncode == running.ends_with, "".join(running.lines)


@pytest.fixture(params=[DAEMON, NOBODY])
def at_home(request: pytest.FixtureRequest, data_dir: Path) -> Iterator[str]:
    if request.param == NOBODY:
        yield NOBODY
    else:
        with daemon(data_dir):
            yield DAEMON


def audit(data_dir: Path) -> list[tuple[str, str, str, str]]:
    """The audit entries, oldest first; checks that the events contain the last one."""
    engine = open_store(sqlite_url(data_dir / "traced.db"))
    with read_session(engine) as session:
        entries = list_audit(session)[::-1]
        events = [event.subject for event in list_events(session) if event.kind == entries[-1].action]
    engine.dispose()
    assert entries[-1].subject in events
    return [(entry.action, entry.subject, entry.who, entry.reason) for entry in entries]


def test_decisions_are_the_same_with_a_daemon_and_without(traced: Traced, data_dir: Path, at_home: str) -> None:
    alive = traced("status", "--alive")
    assert (alive.code, "no service responds at" in alive.err) == ((0, False) if at_home == DAEMON else (1, True))
    approved = traced("approve", ADAPTER, "--yes", "--who", "ann", "--reason", "good", "--json")
    assert approved.code == 0, approved.err
    assert approved.json["decision"]["who"] == approved.json["promotion"]["who"] == f"{this_user()}, on behalf of ann"
    assert (approved.json["subject"], approved.json["live"]) == (ADAPTER, [ADAPTER])
    repeated = traced("approve", ADAPTER, "--yes", "--json")
    assert repeated.json == approved.json
    assert "error-recovery@v2 is rejected. Live: error-recovery@v1" in traced("reject", "error-recovery@v2").out
    refusal = traced("reject", ADAPTER, "--json")
    assert (refusal.code, refusal.json["error"]["hint"]) == (1, f"traced rollback {ADAPTER}")
    undone = traced("rollback", "--yes", "--reason", "complaints", "--json")
    assert (undone.json["rolled_back"], undone.json["restored"], undone.json["live"]) == (ADAPTER, None, [])
    assert (
        "Quarantined: train of error-recovery, tried 3 times (3 attempts failed, the last one: [hung]). "
        "To retry: traced release p3" in traced("status").out
    )
    released = traced("release", "p3", "--reason", "more memory", "--json")
    assert (released.code, released.json["subject"], released.json["carries_on"]) == (0, "p3", None)
    status = traced("status", "--json").json
    assert (status["quarantined"], status["blocked"], status["requested"]) == ([], [], {})
    person = this_user()
    assert audit(data_dir) == [
        ("approve", ADAPTER, person, "good"),
        ("reject", "error-recovery@v2", person, ""),
        ("rollback", ADAPTER, person, "complaints"),
        ("release", "p3", person, "more memory"),
    ]


def test_sighup_reads_the_settings_again(traced: Traced, data_dir: Path) -> None:
    file, notify_socket = data_dir / "traced.toml", data_dir.parent / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(notify_socket))
        manager.settimeout(120)
        with daemon(data_dir, NOTIFY_SOCKET=str(notify_socket)) as running:
            states = [manager.recv(4096).decode()]
            for text in ("log = 3", "[log]\nlevel = 'debug'\n[executor]\nfailures = 9\n"):
                file.write_text(text)
                running.send_signal(signal.SIGHUP)
                states += [manager.recv(4096).decode(), manager.recv(4096).decode()]
        log = running.lines
    assert [state.partition("\n")[0] for state in states] == ["READY=1", *["RELOADING=1", "READY=1"] * 2]
    assert "MONOTONIC_USEC=" in states[1]
    assert any("the previous settings remain in force" in line and '"error"' in line for line in log)
    assert any("executor.failures was changed and needs a restart" in line for line in log)
    assert audit(data_dir) == [("reload", "settings", "SIGHUP", "")]


def test_a_directory_that_is_held_by_one_who_does_not_answer_is_left_alone(traced: Traced, data_dir: Path) -> None:
    with hold_directory(data_dir, now=now, version="test"):
        result = traced("approve", ADAPTER, "--yes")
    assert result.code == 1
    assert f"(process {os.getpid()}" in " ".join(result.err.split())
    assert "does not answer; no decision was stored" in " ".join(result.err.split())
    assert traced("status", "--json").json["waiting"] == [ADAPTER, "error-recovery@v2"]


def test_two_do_not_work_on_cycles_at_once_and_decisions_do_not_wait_for_them(traced: Traced, data_dir: Path) -> None:
    with hold_directory(data_dir, now=now, version="test", file_name=CYCLE_LOCK):
        for verb in ("collect", "demo"):
            result = traced(verb)
            assert result.code == 1
            assert f"is in use by process {os.getpid()}" in " ".join(result.err.split())
        approved = traced("approve", ADAPTER, "--yes", "--json")
    assert approved.json["live"] == [ADAPTER]
