"""Bombs, floods, fills and code that will not end: each stops within its limit, and the host says what it was."""

import asyncio
import errno
import resource
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
from docker.errors import NotFound

from sandbox.client import OUT_OF_MEMORY
from sandbox.errors import Deadline, EnvironmentFault, ProtocolFault, WorkerDied
from sandbox.image import Image
from sandbox.policy import INODES, MIB
from tests.integration.sandbox.hostile import LIMITS, Hostile, hostile

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def attacker(image: Image) -> Iterator[Hostile]:
    with hostile("resources") as started:
        yield started


@pytest.fixture(scope="module")
def impatient(image: Image) -> Iterator[Hostile]:
    """For what ends at its deadline alone."""
    with hostile("resources", replace(LIMITS, call_seconds=1.0)) as started:
        yield started


def test_a_fork_bomb(attacker: Hostile) -> None:
    count, error = attacker.attack("fork_bomb", fresh=True).reply
    assert 0 < count < LIMITS.pids
    assert error == "BlockingIOError"


def test_a_thread_bomb(attacker: Hostile) -> None:
    count, error = attacker.attack("thread_bomb", fresh=True).reply
    assert 0 < count < LIMITS.pids
    assert error == "RuntimeError"


def test_a_memory_bomb(attacker: Hostile) -> None:
    error = attacker.attack("memory_bomb").error
    assert isinstance(error, WorkerDied)
    assert error.oom


def test_a_memory_bomb_in_a_child_of_a_healthy_worker(attacker: Hostile) -> None:
    assert attacker.run(attacker.source.effects())["events"][:1] != [OUT_OF_MEMORY]
    assert attacker.attack("memory_bomb_in_a_child").reply == -signal.SIGKILL

    async def wait_for_record() -> dict[str, Any]:
        while (record := await attacker.source.effects())["events"][:1] != [OUT_OF_MEMORY]:
            pass  # the kernel has told the engine; the engine's journal is a moment behind
        return record

    assert attacker.run(asyncio.wait_for(wait_for_record(), 60))["count"] > 0
    attacker.attack("nothing", fresh=True)
    assert attacker.run(attacker.source.effects())["events"] == []


def test_sparse_shared_memory(attacker: Hostile) -> None:
    assert attacker.attack("shared_memory_segment").reply in {"FileNotFoundError", "OSError", "PermissionError"}
    error = attacker.attack("sparse_memory").error
    assert isinstance(error, WorkerDied)
    assert error.oom


def test_an_infinite_loop(impatient: Hostile) -> None:
    error = impatient.attack("endless_loop").error
    assert isinstance(error, Deadline)
    assert error.stopped_by == "worker"


def test_an_ignored_sigterm(impatient: Hostile, engine: Any) -> None:
    """No signal that can be ignored is relied on: the host ends the container, in C or not."""
    start = impatient.run(impatient.source.sandbox()).container_id
    error = impatient.attack("deaf").error
    assert isinstance(error, Deadline)
    assert error.stopped_by == "host"
    with pytest.raises(NotFound):
        engine.containers.get(start)


def test_a_double_forked_survivor(attacker: Hostile, engine: Any) -> None:
    container = engine.containers.get(attacker.run(attacker.source.sandbox()).container_id)
    assert attacker.attack("survivor").reply == "left"
    init = psutil.Process(container.attrs["State"]["Pid"])
    inside = [init, *init.children(recursive=True)]
    assert len(inside) >= 3  # init, worker, survivor
    error = attacker.attack("leave").error
    assert isinstance(error, WorkerDied)
    assert (error.exit_code, error.oom) == (0, False)
    assert psutil.wait_procs(inside, timeout=60)[1] == []
    with pytest.raises(NotFound):
        engine.containers.get(container.id)


def test_an_alarm_that_mimics_a_time_out(attacker: Hostile) -> None:
    error = attacker.attack("ring_the_alarm").error
    assert isinstance(error, EnvironmentFault)
    assert "rang the worker's own alarm" in error.error


def test_a_self_kill_that_mimics_a_time_out(attacker: Hostile) -> None:
    error = attacker.attack("kill_myself").error
    assert isinstance(error, WorkerDied)
    assert (error.exit_code, error.oom) == (128 + signal.SIGKILL, False)


@pytest.mark.parametrize("flood", ["flood_of_lines", "flood_without_an_end_of_line"])
def test_a_flood_of_stdout(attacker: Hostile, flood: str) -> None:
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert isinstance(attacker.attack(flood).error, ProtocolFault)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start < 128 * 1024  # KiB


@pytest.mark.parametrize("end_of_line", ["\n", ""], ids=["with lines", "without an end of line"])
def test_a_flood_of_stderr(attacker: Hostile, end_of_line: str) -> None:
    """The worker's own stderr is nowhere; the init's can be opened, and is bounded on the host."""
    error = attacker.attack("flood_of_the_inits_stderr", end_of_line).error
    assert isinstance(error, ProtocolFault | EnvironmentFault)
    assert isinstance(error, EnvironmentFault) or "to its stderr" in str(error)
    assert "\x1b" not in str(error)


def test_a_flood_of_prints(attacker: Hostile) -> None:
    assert attacker.attack("printed_flood").reply == "printed"
    record = attacker.run(attacker.source.effects())
    assert record["printed"] == 20_000 * 1001
    assert len(record["printed_head"]) == 200


def test_a_fill_of_the_disk(attacker: Hostile) -> None:
    size, error = attacker.attack("fill_of_the_disk", fresh=True).reply
    assert size <= LIMITS.tmp_mb * MIB
    assert error == errno.ENOSPC


def test_a_fill_of_the_inodes(attacker: Hostile) -> None:
    count, error = attacker.attack("fill_of_the_inodes", fresh=True).reply
    assert count < INODES
    assert error == errno.ENOSPC


def test_a_fill_of_directory_depth(attacker: Hostile) -> None:
    count, error = attacker.attack("fill_of_depth", fresh=True).reply
    assert count < INODES
    assert error == errno.ENOSPC


def test_links_pipes_devices_and_parents_wait_for_nobody(attacker: Hostile, engine: Any) -> None:
    """The host reads no file of a container back, and what is left there goes with it."""
    container = engine.containers.get(attacker.run(attacker.source.sandbox()).container_id)
    assert attacker.attack("litter").reply == "PermissionError"
    assert {change["Path"] for change in container.diff()} <= {"/sbin", "/sbin/docker-init"}  # the engine's own init
    assert container.attrs["Mounts"] == []
    attacker.attack("nothing", fresh=True)
    with pytest.raises(NotFound):
        container.reload()


def test_a_pipe_in_the_place_of_a_source_file_cannot_hold_a_traceback(impatient: Hostile) -> None:
    error = impatient.attack("traceback_through_a_fifo", fresh=True).error
    assert isinstance(error, Deadline)
    assert error.stopped_by == "worker"
