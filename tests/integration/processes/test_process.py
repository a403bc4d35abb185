"""Starting and ending children, without the report pipe."""

import os
import threading
from pathlib import Path

import pytest

from traced.processes.child_process import Child, start

FOLLOWER = "import os, sys, signal; from traced.processes.parent import follow_parent; follow_parent(0); "
FOLLOWER += "os.write(int(sys.argv[1]), b'.'); signal.pause()"


def test_a_child_outlives_the_thread_that_asked_for_it(tmp_path: Path) -> None:
    """The kernel's parent-death signal is tied to the thread that forked."""
    read_end, writing = os.pipe()
    started: list[Child] = []

    def ask() -> None:
        started.append(start(["-c", FOLLOWER, str(writing)], log=tmp_path / "x.log", pass_fds=[writing]))
        assert os.read(read_end, 1) == b"."  # it has asked for the signal

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    [child] = started
    try:
        assert not child.wait(0.3)
    finally:
        child.kill()
        os.close(read_end)
        os.close(writing)
    assert child.returncode == -9


def test_ending_twice_is_harmless(tmp_path: Path) -> None:
    child = start(["-c", "print('bye')"], log=tmp_path / "x.log")
    assert child.wait(60)
    child.stop(1)
    child.kill()
    child.kill_group()
    assert (child.returncode, child.log.last_lines(3)) == (0, ["bye"])


def test_ending_a_running_child_keeps_its_exit_code(tmp_path: Path) -> None:
    """Looking for marked processes waits for them too, and must not take the child's exit code away."""
    child = start(["-c", "import signal; signal.pause()"], log=tmp_path / "x.log")
    child.kill()
    assert child.returncode == -9


def test_threads_of_a_child_spin_only_briefly_unless_the_user_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spin_count() -> str:
        child = start(["-c", "import os; print(os.environ.get('GOMP_SPINCOUNT'))"], log=tmp_path / "x.log")
        assert child.wait(60)
        child.stop(0)
        return (tmp_path / "x.log").read_text().splitlines()[-1]

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT")
    assert spin_count() == "1000"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert spin_count() == "None"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert spin_count() == "7"
