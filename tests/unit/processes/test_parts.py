"""The bounded log, holders, job files and the settings' rules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traced.config.settings import load_settings
from traced.core.ownership import is_alive, own_identity, process_of
from traced.core.resources import memory_bytes
from traced.jobs import attempts
from traced.jobs.retry import Backoff
from traced.processes.child_process import TAIL_BYTES, BoundedLog
from traced.processes.job import Job, JobFileError, Limits, read_job


@given(st.lists(st.binary(max_size=300), max_size=30), st.integers(2, 200))
def test_a_log_keeps_the_newest_text_within_its_limit(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], limit: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "x.log"
    log = BoundedLog(path, limit)
    for part in parts:
        log.write(part)
        files = [file.read_bytes() for file in (path.with_name("x.log.1"), path) if file.exists()]
        assert sum(map(len, files)) <= limit
    log.close()
    text = b"".join(parts)
    log_text = b"".join(files) if parts else b""
    assert text.endswith(log_text)
    assert len(log_text) >= min(len(text), limit // 2)


def test_an_existing_log_is_continued(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text("first\n")
    log = BoundedLog(tmp_path / "x.log", 1000)
    assert log.last_lines(5) == ["first"]
    log.write(b"second\n")
    log.close()
    assert log.last_lines(5) == ["first", "second"]
    assert (tmp_path / "x.log").read_text() == "first\nsecond\n"


def test_disk_errors_never_block_the_writer() -> None:
    """/dev/full answers ENOSPC to every write, as a full disk does."""
    for path in (Path("/dev/full"), Path("/dev/null/nowhere/x.log")):
        log = BoundedLog(path, 1000)
        log.write(b"lost on the disk\n" * 10_000)
        assert log.last_lines(1) == ["lost on the disk"]
        assert len("\n".join(log.last_lines(10**6))) <= TAIL_BYTES
        log.close()


def test_a_holder_lives_as_long_as_its_process() -> None:
    code = "from traced.core.ownership import own_identity; print(own_identity()); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        holder = process.stdout.readline().strip()
        assert is_alive(holder) is True
        assert process_of(f"{holder}/gpu") == process.pid
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_alive(holder) is False  # a zombie
    assert is_alive(holder) is False
    assert process_of(holder) is None


def test_another_process_of_the_same_number_is_not_the_holder() -> None:
    host, boot, pid, ticks = own_identity().split("/")
    assert is_alive(own_identity()) is True
    assert is_alive(f"{host}/{boot}/{pid}/{int(ticks) + 1}") is False
    assert is_alive(f"{host}/another-boot/{pid}/{ticks}") is False
    assert is_alive(f"another-host/{boot}/{pid}/{ticks}") is None
    assert is_alive("somebody") is None
    assert process_of("somebody") is None
    mine = own_identity("cpu")
    assert (is_alive(mine), process_of(mine)) == (True, os.getpid())
    assert mine != own_identity("gpu")


def test_a_job_file_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    job = Job("m", {"a": [1, None, "ü"]}, "c1", "gate", "dates", "ab", Limits(1, 2, 3, 4), {"X": "y"})
    path.write_text(job.to_json())
    assert read_job(path) == job


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"module": 1, "limits": 3}', "\udc80"])
def test_a_file_that_holds_no_job_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(JobFileError, match=r"job\.json is not a job file"):
        read_job(path)
    with pytest.raises(JobFileError, match="nowhere"):
        read_job(tmp_path / "nowhere")


def test_the_settings_make_the_rules(tmp_path: Path) -> None:
    overrides = {"executor.memory_mb": 512, "executor.progress_s": 0, "executor.log_mb": 3}
    settings = load_settings(tmp_path, overrides)
    assert attempts.limits(settings) == Limits(120, None, 512 * 2**20, 15)
    assert attempts.limits(load_settings(tmp_path)) == Limits(120, 3600, int(0.9 * memory_bytes()), 15)
    assert attempts.backoff(settings) == Backoff(5, 2, 900)
    assert attempts.executor(settings).log_bytes == 3 * 2**20
    assert attempts.executor(settings).folder == tmp_path / "logs"
