"""A daemon at whose containers somebody plays: none is left when it stops, nor once it has come back from a kill."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sandbox.docker_engine import connect, labels
from sandbox.hashing import environment_hash
from sandbox.image import ensure_image
from sandbox.policy import LABEL_ENVIRONMENT, LABEL_PROCESS
from store.database import open_store, sqlite_url, write_session
from store.records import CycleState, EnvironmentRecord
from store.repositories.cycles import set_cycle_state
from store.repositories.environments import save_environment
from tests.acceptance.test_acts_verbs import daemon
from tests.unit.registry.chain import seed_cycle
from traced.app.service import now
from traced.client import Client, ClientError, default_socket

pytestmark = pytest.mark.docker
LAMP_SHOP = (Path(__file__).parents[1] / "data/environments/lamp_shop.py").read_text("utf-8")
BUSY = """
class Environment:
    def reset(self, seed):
        while True:
            pass
"""
AT_WORK_S = 1.0  # of processor time: far more than it takes to load
ENDED_PROCESS = "1@1.00"  # no process is that one


@pytest.fixture
def engine() -> Iterator[Any]:
    client = connect()
    yield client
    client.close()


def store_environment(directory: Path, source: str) -> str:
    """Save an environment in a new data directory; returns its hash."""
    ensure_image(build_missing=True)
    name, store = environment_hash(source), open_store(sqlite_url(directory / "traced.db"))
    with write_session(store) as session:
        seed_cycle(session)
        set_cycle_state(session, "c1", CycleState.FINISHED, at=now())
        save_environment(session, EnvironmentRecord(name, source, "c1", "error-recovery", 7, "builtin", now()))
    store.dispose()
    return name


def containers(engine: Any, name: str) -> list[Any]:
    marks = {"label": f"{LABEL_ENVIRONMENT}={name}"}
    matches: list[Any] = engine.containers.list(all=True, filters=marks, ignore_removed=True)
    return matches


async def play(directory: Path, name: str) -> None:
    async with Client(default_socket(directory)) as client:
        await client.environments.play(name, 7)


async def test_the_container_goes_with_the_daemon(tmp_path: Path, engine: Any) -> None:
    directory = tmp_path / "traced-data"
    name = store_environment(directory, f"{LAMP_SHOP}\nNUMBER = {id(tmp_path)}\n")
    with daemon(directory):
        await play(directory, name)
        assert len(containers(engine, name)) == 1
    assert containers(engine, name) == []


def test_a_daemon_that_was_killed_while_a_container_worked_has_none_left_after_its_restart(
    tmp_path: Path, engine: Any
) -> None:
    """The container computes on, and hears of nobody's end; another owner's, which nobody watches either, is spared."""
    directory = tmp_path / "traced-data"
    name = store_environment(directory, f"{BUSY}\nNUMBER = {id(tmp_path)}\n")
    other_container = engine.containers.create(
        ensure_image().tag,
        labels=labels(f"other-{name[:12]}", "none") | {LABEL_PROCESS: ENDED_PROCESS},
        network_mode="none",
    )

    async def at_work() -> psutil.Process:
        task = asyncio.create_task(play(directory, name))
        while (worker := await asyncio.to_thread(_worker, engine, name)) is None:
            assert not task.done(), task.result()
        running.kill()
        with pytest.raises(ClientError):
            await task
        return worker

    try:
        with daemon(directory, TRACED_SANDBOX__CALL_SECONDS="600") as running:
            running.ends_with = -signal.SIGKILL
            worker = asyncio.run(at_work())
        assert worker.is_running()
        assert [container.status for container in containers(engine, name)] == ["running"]
        with daemon(directory) as restarted:
            assert containers(engine, name) == []
            assert psutil.wait_procs([worker], timeout=60)[1] == []
        assert sum("leftover of an ended process: container" in line for line in restarted.lines) == 1
        other_container.reload()
        assert other_container.status == "created"
    finally:
        for container in (other_container, *containers(engine, name)):
            container.remove(force=True)


def _worker(engine: Any, name: str) -> psutil.Process | None:
    """The process in the container that computes, None before it does."""
    running_containers = [container for container in containers(engine, name) if container.status == "running"]
    for container in running_containers:
        for process in psutil.Process(container.attrs["State"]["Pid"]).children():
            if process.cpu_times().user > AT_WORK_S:
                return process
    return None
