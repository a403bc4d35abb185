"""A sandbox that is given up at any moment of its start and its end: its container is removed all the same.

The engine and the worker are scripted: what is asked is which container outlives its asker, at moments that no real
engine can be made to meet.
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from sandbox import container as container_module
from sandbox.container import Sandbox
from sandbox.errors import EnvironmentFault
from sandbox.policy import SandboxLimits
from tests.unit.sandbox.test_channel import frame

TURNS = 24  # of the loop: more than a start that is refused takes
REFUSAL = {"kind": "raised", "error": "SyntaxError: '(' was never closed", "traceback": ""}


class Engine:
    """An engine whose workers refuse every source; ``left`` are the containers started and not removed."""

    def __init__(self) -> None:
        self.started = self.left = 0
        self.ready = threading.Event()
        self.worker: socket.socket

    def start(self, *arguments: Any) -> "Engine.Container":
        """Replacement of ``container._start`` that returns at once."""
        host_socket, self.worker = socket.socketpair()
        self.worker.setblocking(False)
        self.started, self.left = self.started + 1, self.left + 1
        self.ready.set()
        return Engine.Container(self, host_socket)

    def work(self) -> None:
        """Answer the pending requests."""
        with suppress(OSError):  # nothing was, or nobody listens any more
            for line in self.worker.recv(1 << 16).splitlines():
                request = json.loads(line)
                body = {"ok": {"events": [], "count": 0}} if request["op"] == "effects" else {"fault": REFUSAL}
                self.worker.send(frame(json.dumps({"id": request["id"], "seconds": 0.0, **body}).encode() + b"\n"))

    class Container:
        """Replacement of ``container._AttachedContainer``."""

        def __init__(self, engine: "Engine", raw: socket.socket) -> None:
            self.engine, self.raw = engine, raw
            self.discarded = False

        def discard(self) -> None:
            """Discard the container, slower than any turn of the event loop."""
            assert not self.discarded, "removed twice"
            self.discarded = True
            time.sleep(0.05)
            self.raw.close()
            self.engine.left -= 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    fake_engine = Engine()
    monkeypatch.setattr(container_module, "_start", fake_engine.start)
    yield fake_engine
    fake_engine.worker.close()


async def start_refused() -> None:
    with pytest.raises(EnvironmentFault):
        await Sandbox.start("class Environment(:", limits=SandboxLimits(), owner="test")


async def cancel_start(engine: Engine, turns: int, cancels: int) -> None:
    """Stop the event loop a number of turns after the start of the container, which cancels all running tasks."""
    task = asyncio.ensure_future(start_refused())
    await asyncio.sleep(0)
    engine.ready.wait()  # the loop stands still
    for _ in range(turns):
        engine.work()
        await asyncio.sleep(0)
    for _ in range(cancels):
        task.cancel()
        await asyncio.sleep(0)


def join_threads() -> None:
    """Wait for every executor thread, as the interpreter does at its end."""
    for thread in threading.enumerate():
        if thread.name.startswith("sandbox "):
            thread.join()


@pytest.mark.parametrize("cancels", [0, 1, 2])
@pytest.mark.parametrize("turns", range(TURNS))
def test_a_cancelled_start_leaves_no_container(engine: Engine, turns: int, cancels: int) -> None:
    asyncio.run(cancel_start(engine, turns, cancels))
    join_threads()
    assert (engine.started, engine.left) == (1, 0)


async def test_the_refusal_is_raised_after_the_container_is_removed(engine: Engine) -> None:
    task = asyncio.ensure_future(start_refused())
    while not task.done():
        await asyncio.sleep(0.001)
        if engine.started:
            engine.work()
    await task
    assert engine.left == 0
