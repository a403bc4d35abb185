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
def there(image: Image) -> Iterator[Hostile]:
    with hostile("resources") as started:
        yield started


@pytest.fixture(scope="module")
def impatient(image: Image) -> Iterator[Hostile]:
    """For what ends at its deadline alone."""
    with hostile("resources", replace(LIMITS, call_seconds=1.0)) as started:
        yield started


def test_a_fork_bomb(there: Hostile) -> None:
    count, error = there.meet("fork_bomb", fresh=True).told
    assert 0 < count < LIMITS.pids
    assert error == "BlockingIOError"


def test_a_thread_bomb(there: Hostile) -> None:
    count, error = there.meet("thread_bomb", fresh=True).told
    assert 0 < count < LIMITS.pids
    assert error == "RuntimeError"


def test_a_memory_bomb(there: Hostile) -> None:
    error = there.meet("memory_bomb").error
    assert isinstance(error, WorkerDied)
    assert error.oom


def test_a_memory_bomb_in_a_child_of_a_healthy_worker(there: Hostile) -> None:
    assert there.run(there.source.effects())["events"][:1] != [OUT_OF_MEMORY]
    assert there.meet("memory_bomb_in_a_child").told == -signal.SIGKILL

    async def until_told() -> dict[str, Any]:
        while (told := await there.source.effects())["events"][:1] != [OUT_OF_MEMORY]:
            pass  # the kernel has told the engine; the engine's journal is a moment behind
        return told

    assert there.run(asyncio.wait_for(until_told(), 60))["count"] > 0
    there.meet("nothing", fresh=True)
    assert there.run(there.source.effects())["events"] == []


def test_sparse_shared_memory(there: Hostile) -> None:
    assert there.meet("shared_memory_segment").told in {"FileNotFoundError", "OSError", "PermissionError"}
    error = there.meet("sparse_memory").error
    assert isinstance(error, WorkerDied)
    assert error.oom


def test_an_infinite_loop(impatient: Hostile) -> None:
    error = impatient.meet("endless_loop").error
    assert isinstance(error, Deadline)
    assert error.stopped_by == "worker"


def test_an_ignored_sigterm(impatient: Hostile, engine: Any) -> None:
    """No signal that can be ignored is relied on: the host ends the container, in C or not."""
    before = impatient.run(impatient.source.sandbox()).container_id
    error = impatient.meet("deaf").error
    assert isinstance(error, Deadline)
    assert error.stopped_by == "host"
    with pytest.raises(NotFound):
        engine.containers.get(before)


def test_a_double_forked_survivor(there: Hostile, engine: Any) -> None:
    container = engine.containers.get(there.run(there.source.sandbox()).container_id)
    assert there.meet("survivor").told == "left"
    init = psutil.Process(container.attrs["State"]["Pid"])
    inside = [init, *init.children(recursive=True)]
    assert len(inside) >= 3  # init, worker, survivor
    error = there.meet("leave").error
    assert isinstance(error, WorkerDied)
    assert (error.exit_code, error.oom) == (0, False)
    assert psutil.wait_procs(inside, timeout=60)[1] == []
    with pytest.raises(NotFound):
        engine.containers.get(container.id)


def test_an_alarm_that_mimics_a_time_out(there: Hostile) -> None:
    error = there.meet("ring_the_alarm").error
    assert isinstance(error, EnvironmentFault)
    assert "rang the worker's own alarm" in error.error


def test_a_self_kill_that_mimics_a_time_out(there: Hostile) -> None:
    error = there.meet("kill_myself").error
    assert isinstance(error, WorkerDied)
    assert (error.exit_code, error.oom) == (128 + signal.SIGKILL, False)


@pytest.mark.parametrize("flood", ["flood_of_lines", "flood_without_an_end_of_line"])
def test_a_flood_of_stdout(there: Hostile, flood: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert isinstance(there.meet(flood).error, ProtocolFault)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 128 * 1024  # KiB


@pytest.mark.parametrize("end_of_line", ["\n", ""], ids=["with lines", "without an end of line"])
def test_a_flood_of_stderr(there: Hostile, end_of_line: str) -> None:
    """The worker's own stderr is nowhere; the init's can be opened, and is bounded on the host."""
    error = there.meet("flood_of_the_inits_stderr", end_of_line).error
    assert isinstance(error, ProtocolFault | EnvironmentFault)
    assert isinstance(error, EnvironmentFault) or "to its stderr" in str(error)
    assert "\x1b" not in str(error)


def test_a_flood_of_prints(there: Hostile) -> None:
    assert there.meet("printed_flood").told == "printed"
    told = there.run(there.source.effects())
    assert told["printed"] == 20_000 * 1001
    assert len(told["printed_head"]) == 200


def test_a_fill_of_the_disk(there: Hostile) -> None:
    written, error = there.meet("fill_of_the_disk", fresh=True).told
    assert written <= LIMITS.tmp_mb * MIB
    assert error == errno.ENOSPC


def test_a_fill_of_the_inodes(there: Hostile) -> None:
    count, error = there.meet("fill_of_the_inodes", fresh=True).told
    assert count < INODES
    assert error == errno.ENOSPC


def test_a_fill_of_directory_depth(there: Hostile) -> None:
    count, error = there.meet("fill_of_depth", fresh=True).told
    assert count < INODES
    assert error == errno.ENOSPC


def test_links_pipes_devices_and_parents_wait_for_nobody(there: Hostile, engine: Any) -> None:
    """The host reads no file of a container back, and what is left there goes with it."""
    container = engine.containers.get(there.run(there.source.sandbox()).container_id)
    assert there.meet("litter").told == "PermissionError"
    assert {change["Path"] for change in container.diff()} <= {"/sbin", "/sbin/docker-init"}  # the engine's own init
    assert container.attrs["Mounts"] == []
    there.meet("nothing", fresh=True)
    with pytest.raises(NotFound):
        container.reload()


def test_a_pipe_in_the_place_of_a_source_file_cannot_hold_a_traceback(impatient: Hostile) -> None:
    error = impatient.meet("traceback_through_a_fifo", fresh=True).error
    assert isinstance(error, Deadline)
    assert error.stopped_by == "worker"
