"""One vLLM per data directory: who starts it, who uses it, and what happens when its owner ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.waiting import eventually_async
from traced.core.files import publish_file
from traced.core.ownership import own_identity
from traced.inference import shared_engine
from traced.inference.errors import EngineStartError
from traced.inference.shared_engine import (
    EngineNeeds,
    EngineRecord,
    SharedEngine,
    engine_owners,
    read_record,
    record_file,
)

OTHER_PROCESS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from traced.inference.shared_engine import EngineNeeds, start_lock, start_recorded
folder = Path(sys.argv[1])
with start_lock(folder):
    engine = SimpleNamespace(url="http://127.0.0.1:9", pid=1)
    start_recorded(folder, EngineNeeds(folder, 10, 16), lambda: engine)
    print("recorded", flush=True)
    sys.stdin.read()
"""


class Health(BaseHTTPRequestHandler):
    """Answers every request with status 200."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Write nothing."""


class FakeEngine:
    """An engine that answers ``/health``."""

    pid = 7

    def __init__(self, port: int) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", port), Health)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.alive = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        if self.alive:
            self.server.shutdown()
            self.server.server_close()
        self.alive = False


@dataclass
class Directory:
    """A data directory, and the engines that were started for it."""

    path: Path
    engines: list[FakeEngine] = field(default_factory=list)

    def start(self, port: int) -> FakeEngine:
        self.engines.append(FakeEngine(port))
        return self.engines[-1]

    def user(self, *, adapters: int = 10, rank: int = 16) -> SharedEngine:
        """Return the engine from the view of one more process."""
        return SharedEngine(self.path, EngineNeeds(self.path, adapters, rank), self.start, timeout_s=1)

    @property
    def record(self) -> EngineRecord | None:
        return read_record(record_file(self.path, self.path))


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Directory]:
    monkeypatch.setattr(shared_engine, "POLL_S", 0.01)
    directory = Directory(tmp_path)
    yield directory
    for engine in directory.engines:
        engine.stop()


def test_the_second_user_uses_the_engine_of_the_first(directory: Directory) -> None:
    first, second = directory.user(), directory.user()
    assert first.connect() == second.connect() == directory.engines[0].url
    assert (len(directory.engines), second.process) == (1, None)
    assert engine_owners(directory.path) == [os.getpid()]
    second.close()
    assert directory.engines[0].alive
    first.close()
    assert not directory.engines[0].alive
    assert directory.record is None


def test_users_that_start_at_the_same_time_start_one_engine(directory: Directory) -> None:
    users = [directory.user() for _ in range(4)]
    threads = [threading.Thread(target=user.connect) for user in users]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(directory.engines) == 1
    assert {user.url for user in users} == {directory.engines[0].url}


async def test_a_user_starts_an_engine_at_the_same_address_when_the_owner_has_stopped_it(directory: Directory) -> None:
    owner, user = directory.user(), directory.user()
    url = await asyncio.to_thread(owner.connect)
    await asyncio.to_thread(user.connect)
    changes: list[str] = []
    task = asyncio.create_task(user.follow(changes.append))
    await asyncio.to_thread(owner.close)
    await eventually_async(lambda: user.process)
    task.cancel()
    assert ([engine.url for engine in directory.engines], changes) == ([url, url], [])
    await asyncio.to_thread(user.close)


async def test_a_crashed_engine_is_restarted_by_its_owner_alone(directory: Directory) -> None:
    owner, user = directory.user(), directory.user()
    await asyncio.to_thread(owner.connect)
    await asyncio.to_thread(user.connect)
    directory.engines[0].stop()
    tasks = [asyncio.create_task(shared.follow(lambda url: None)) for shared in (user, owner)]
    await eventually_async(lambda: owner.process is not None and owner.process.alive)
    for task in tasks:
        task.cancel()
    assert len(directory.engines) == 2
    assert (owner.process, user.process) == (directory.engines[1], None)


async def test_a_user_changes_to_the_routers_engine(directory: Directory) -> None:
    owner, user = directory.user(), directory.user()
    await asyncio.to_thread(owner.connect)
    await asyncio.to_thread(user.connect)
    assert directory.record is not None
    router = directory.start(0)
    publish_file(
        record_file(directory.path, directory.path), json.dumps(asdict(replace(directory.record, url=router.url)))
    )
    changes: list[str] = []
    task = asyncio.create_task(user.follow(changes.append))
    await eventually_async(lambda: changes)
    task.cancel()
    assert (changes, user.process) == ([router.url], None)


def test_nothing_of_a_killed_owner_blocks_the_next_start(directory: Directory) -> None:
    command = [sys.executable, "-c", OTHER_PROCESS, str(directory.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "recorded\n"
        assert engine_owners(directory.path) == [process.pid]
        process.send_signal(signal.SIGKILL)  # while it holds the lock
        process.wait()
        shared = directory.user()
        shared.connect()
    assert shared.process is directory.engines[0]
    assert engine_owners(directory.path) == [os.getpid()]


@pytest.mark.parametrize(("adapters", "rank"), [(11, 16), (10, 32)])
def test_an_engine_with_too_few_slots_or_too_low_a_rank_is_refused(
    directory: Directory, adapters: int, rank: int
) -> None:
    directory.user().connect()
    with pytest.raises(EngineStartError, match=f"{adapters} up to rank {rank} are needed"):
        directory.user(adapters=adapters, rank=rank).connect()
    directory.user(adapters=9, rank=8).connect()


def test_an_engine_that_does_not_answer_is_reported_with_its_owner(directory: Directory) -> None:
    record = EngineRecord("http://127.0.0.1:9", 7, own_identity(), str(directory.path), 10, 16)
    publish_file(record_file(directory.path, directory.path), json.dumps(asdict(record)))
    with pytest.raises(EngineStartError, match=f"of process {os.getpid()} does not answer"):
        replace(directory.user(), timeout_s=0.05).connect()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"url": "http://127.0.0.1:9"}'])
def test_a_broken_record_counts_as_none(directory: Directory, text: str) -> None:
    publish_file(record_file(directory.path, directory.path), text)
    assert directory.record is None
    assert directory.user().connect() == directory.engines[0].url
