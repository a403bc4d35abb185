"""Several processes on one port: each answers, they share conversations and quotas, and one of them may be killed."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from store.database import open_store, read_session, sqlite_url, write_session
from store.repositories.leases import acquire, list_leases
from tests.integration.gateway.upstream import Upstream, upstreams
from tests.unit.store.chain import T0
from tests.waiting import eventually, eventually_async
from traced.config.settings import load_settings
from traced.gateway import workers
from traced.gateway.access import create_key
from traced.gateway.app import running
from traced.gateway.workers import open_workers, reserved_port
from traced.inference.errors import ServingError
from traced.registry.decision_rules import Action

pytestmark = pytest.mark.slow
# Requests a minute; a worker takes a single token from the store at once.
QUOTA = 12
ADA = Action("Ada", "local", T0, "for the agent")


@asynccontextmanager
async def two_workers(folder: Path, serving: str = "") -> AsyncIterator[tuple[str, Upstream, list[str]]]:
    """Yield the URL, the engine, and an API key without and one with a quota."""
    (folder / "traced.toml").write_text(f'[serving]\nworkers = 2\nport = 0\n{serving}[routing]\nrouter = "labels"\n')
    store = open_store(sqlite_url(folder / "traced.db"))
    with write_session(store) as session:
        keys = [create_key(session, ADA, name, per_minute) for name, per_minute in (("agent", 0), ("few", QUOTA))]
    store.dispose()
    async with (
        upstreams(1) as engines,
        open_workers(load_settings(folder), [engines[0].url]) as (url, processes),
        running(*(process.supervise for process in processes)),
    ):
        yield url, engines[0], keys


async def ask(url: str, key: str, messages: list[Any]) -> httpx.Response:
    """Send a request over a connection of its own."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
        headers = {"Authorization": f"Bearer {key}"}
        return await http.post("/v1/chat/completions", json={"model": "auto", "messages": messages}, headers=headers)


async def requests_by_worker(url: str) -> dict[str, int]:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    samples = [line for line in lines if line.startswith("traced_router_requests_total") and 'model="base"' in line]
    return {line.split('worker="')[1][0]: int(float(line.split()[-1])) for line in samples}


def listener_pids(url: str) -> list[int]:
    """Return the ids of the processes that listen on the port."""
    port = int(url.rpartition(":")[2])
    connections = psutil.net_connections("tcp")
    return [
        connection.pid
        for connection in connections
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid
    ]


async def test_workers_share_the_port_the_conversations_and_the_quotas(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (url, _, (key, few_key)):
        first = [{"role": "user", "content": "Which day is it?"}]
        names = set()
        for number in range(12):
            request = [{"role": "system", "content": f"You are number {number}."}, *first]
            answer = await ask(url, key, request)
            name = answer.headers["X-Traced-Conversation"]
            names.add(name)
            message = answer.json()["choices"][0]["message"]
            follow_up = await ask(url, key, [*request, message, {"role": "user", "content": "And tomorrow?"}])
            assert follow_up.headers["X-Traced-Conversation"] == name
        assert len(names) == 12
        started = time.monotonic()
        statuses = [(await ask(url, few_key, first)).status_code for _ in range(3 * QUOTA)]
        refilled = int((time.monotonic() - started) * QUOTA / 60) + 1
        assert QUOTA <= statuses.count(200) <= QUOTA + refilled, statuses
        await eventually_async(lambda: _sums_to(url, 24 + statuses.count(200)))
        by_worker = await requests_by_worker(url)
        assert set(by_worker) == {"1", "2"}
        assert min(by_worker.values()) >= 1


async def _sums_to(url: str, count: int) -> bool:
    return sum((await requests_by_worker(url)).values()) == count


async def test_a_killed_worker_is_replaced_while_the_other_answers(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (url, _, (key, _)):
        first, second = listener_pids(url)
        os.kill(first, signal.SIGKILL)
        await eventually_async(lambda: listener_pids(url) == [second])
        answers = [await ask(url, key, [{"role": "user", "content": "Hi"}]) for _ in range(5)]
        assert {answer.status_code for answer in answers} == {200}
        await eventually_async(lambda: len(listener_pids(url)) == 2)


def test_a_port_that_is_in_use_is_refused() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServingError, match="another program listens"), reserved_port("127.0.0.1", port):
            pass
    with reserved_port("localhost", 0) as port:
        # Before the workers of the first gateway listen.
        with pytest.raises(ServingError, match="another program listens"), reserved_port("localhost", port):
            pass
        with socket.socket() as worker:
            worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            worker.bind(("127.0.0.1", port))
            worker.listen()


async def test_an_error_of_a_worker_is_that_of_the_router(tmp_path: Path) -> None:
    (tmp_path / "traced.toml").write_text('[serving]\nworkers = 2\nport = 0\nhost = "0.0.0.0"\n')
    open_store(sqlite_url(tmp_path / "traced.db")).dispose()
    with pytest.raises(ServingError, match="has no API key yet") as exc_info:
        async with open_workers(load_settings(tmp_path), ["http://127.0.0.1:9"]):
            await asyncio.sleep(0)
    assert exc_info.value.hint == "traced keys add NAME"


async def test_a_worker_that_does_not_listen_in_time_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "START_S", 0.2)  # it imports for longer than this
    (tmp_path / "traced.toml").write_text("[serving]\nworkers = 2\nport = 0\n")
    former_children = set(psutil.Process().children(recursive=True))
    with pytest.raises(ServingError, match="worker 1 of the router did not listen within 0 s") as refusal:
        async with open_workers(load_settings(tmp_path), ["http://127.0.0.1:9"]):
            pass
    assert "worker-1.log" in refusal.value.hint
    children = set(psutil.Process().children(recursive=True)) - former_children
    assert not [child for child in children if child.status() != psutil.STATUS_ZOMBIE]


async def test_each_worker_asks_for_a_device_at_its_share_of_the_load(tmp_path: Path) -> None:
    busy = "busy_requests = 3\nbusy_s = 0.3\n"
    async with two_workers(tmp_path, busy) as (url, engine, (key, _)):
        store = open_store(sqlite_url(tmp_path / "traced.db"))
        try:
            with write_session(store) as session:
                assert acquire(session, "cpu", "trainer", "train", None, at=T0, ttl=timedelta(hours=1))

            def is_requested() -> bool:
                with read_session(store) as session:
                    return bool(list_leases(session)[0].wanted_by)

            engine.delay_s = 3.0
            # One of the two workers gets at least two of them.
            requests = [asyncio.create_task(ask(url, key, [{"role": "user", "content": "?"}])) for _ in range(3)]
            await eventually_async(is_requested)
            await asyncio.gather(*requests)
        finally:
            store.dispose()


def test_workers_end_with_a_router_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "traced.toml").write_text('[serving]\nworkers = 2\nport = 0\n[engine]\nurls = ["http://127.0.0.1:9"]\n')
    command = [sys.executable, "-m", "traced", "serve", "--data-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as router:
        assert router.stdout is not None
        # It prints the URL once its workers listen.
        assert any("http://" in line for line in router.stdout)
        children = psutil.Process(router.pid).children(recursive=True)
        assert sum("traced.gateway.worker" in child.cmdline() for child in children) == 2
        router.kill()
    eventually(lambda: not any(child.is_running() for child in children))
