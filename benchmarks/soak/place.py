"""Two scripted engines, and two routers on a data directory each with one PostgreSQL; all can be killed and restarted.

A ``Component`` has the times at which it was away, from before its SIGKILL until it answers again.
"""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil

from benchmarks.chaos.postgres import server
from benchmarks.engines.installation import ROOT, GatewayProcess, Installation, serving
from benchmarks.engines.signed_adapters import SignedAdapter
from benchmarks.engines.stored_versions import ACTOR, save_versions
from benchmarks.soak.engine import WEIGHTS
from store.database import open_store, write_session
from traced.gateway.access import create_key
from traced.inference.engine_process import free_port
from traced.registry.decision_rules import Action

KEYS = ("first", "second")
RECORDER = "traced.gateway.recorder"
SILENCE_S = 5.0
START_S = 60.0
# A router counts its peers every 2 s: before, it does not wait for what the other one has answered.
PEERS_S = 3.0


@dataclass
class Component:
    """A process of the installation: its name, its outages as pairs of ``time.monotonic``, and how it is run."""

    name: str
    outages: list[list[float]] = field(default_factory=list)

    def was_away(self, start: float, end: float, lag_s: float = 0.0) -> bool:
        """Return whether an outage, with ``lag_s`` seconds after it, overlaps the time from ``start`` to ``end``."""
        return any(first <= end and last + lag_s >= start for first, last in self.outages)


@dataclass
class EngineComponent(Component):
    """A scripted engine on a fixed port."""

    log_path: Path = Path()
    port: int = 0
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers; raises ``RuntimeError`` with its log."""
        command = [sys.executable, "-m", "benchmarks.soak.engine", str(self.port)]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT)
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"{self.name} did not start:\n{self.log_path.read_text()[-3000:]}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def kill(self) -> None:
        """Send SIGKILL, and wait for its end."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop it."""
        if self.process is not None:
            self.kill()


@dataclass
class RouterComponent(Component):
    """``traced serve`` on a fixed port."""

    data_dir: Path = Path()
    settings: tuple[str, ...] = ()
    running: GatewayProcess | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def url(self) -> str:
        """Its address."""
        assert self.running is not None
        return self.running.url

    def start(self) -> None:
        """Start it and wait until it listens."""
        self._stack = ExitStack()
        self.running = self._stack.enter_context(serving(self.data_dir, self.settings))

    def kill(self) -> None:
        """Send SIGKILL, and wait for its end."""
        assert self.running is not None
        self.running.process.kill()
        self._stack.close()

    def stop(self) -> None:
        """Stop it in order; it stores its records before."""
        self._stack.close()

    def recorder(self) -> psutil.Process | None:
        """Return its recorder's process, None between two of them."""
        assert self.running is not None
        children = psutil.Process(self.running.process.pid).children(recursive=True)
        return next((child for child in children if child.is_running() and RECORDER in child.cmdline()), None)


@dataclass(frozen=True)
class Place:
    """The running installation; ``keys`` are the secrets of two API keys by their names."""

    installation: Installation
    engines: list[EngineComponent]
    routers: list[RouterComponent]
    keys: dict[str, str]

    @property
    def spools(self) -> list[Path]:
        """The folders with records on their way to the store."""
        return [router.data_dir / "spool" for router in self.routers]


@contextmanager
def prepared(folder: Path, capabilities: int, versions: int) -> Iterator[Place]:
    """Provide the installation on a new PostgreSQL; neither engines nor routers run yet."""
    names = [(f"skill-{skill}", number) for number in range(1, versions + 1) for skill in range(capabilities)]
    adapters = {name: _adapter(folder / "adapters" / f"{index}", index) for index, name in enumerate(names)}
    with server("-c fsync=off") as database, ExitStack() as stack:
        url = database.url("postgres")
        store = open_store(url)
        stack.callback(store.dispose)
        save_versions(store, {name: adapter.path for name, adapter in adapters.items()})
        versions_by_name = {f"{skill}@v{number}": adapter for (skill, number), adapter in adapters.items()}
        with write_session(store) as session:
            action = Action(ACTOR, "local", datetime.now(UTC))
            keys = {name: create_key(session, action, name, 0) for name in KEYS}
        engines = [
            EngineComponent(f"engine {number}", log_path=folder / f"engine-{number}.log", port=free_port())
            for number in (1, 2)
        ]
        urls = ", ".join(f'"{engine.url}"' for engine in engines)
        routers: list[RouterComponent] = []
        for number in (1, 2):
            settings = (
                f"serving.port={free_port()}",
                f"store.url={url}",
                f"engine.urls=[{urls}]",
                # A place for each version: a superseded one keeps its conversations.
                f"serving.max_adapters={len(names)}",
                f"serving.silence_s={SILENCE_S}",
                # On a slow machine a decision must not fail.
                "serving.routing_timeout_s=30",
            )
            data_dir = folder / f"router-{number}"
            data_dir.mkdir()
            routers.append(RouterComponent(f"router {number}", data_dir=data_dir, settings=settings))
        yield Place(Installation(folder, store, versions_by_name), engines, routers, keys)


def _adapter(path: Path, index: int) -> SignedAdapter:
    """Write an adapter that the scripted engine can load."""
    word = f"<word-{index}>"
    path.mkdir(parents=True)
    (path / WEIGHTS).write_text(word)
    return SignedAdapter(path, word)


@asynccontextmanager
async def running(place: Place) -> AsyncIterator[None]:
    """Run engines and routers; at the end the routers store their records."""
    try:
        await asyncio.gather(*(asyncio.to_thread(engine.start) for engine in place.engines))
        await asyncio.gather(*(asyncio.to_thread(router.start) for router in place.routers))
        await asyncio.sleep(PEERS_S)
        yield
    finally:
        await asyncio.gather(*(asyncio.to_thread(router.stop) for router in place.routers))
        await asyncio.gather(*(asyncio.to_thread(engine.stop) for engine in place.engines))


async def killed(component: EngineComponent | RouterComponent, away_s: float) -> None:
    """Kill a component and start it again after ``away_s`` seconds."""
    outage = [time.monotonic(), float("inf")]
    component.outages.append(outage)
    await asyncio.to_thread(component.kill)
    await asyncio.sleep(away_s)
    await asyncio.to_thread(component.start)
    outage[1] = time.monotonic()


def kill_recorder(router: RouterComponent) -> bool:
    """Kill a router's recorder, which the router restarts; returns whether there was one."""
    process = router.recorder()
    if process is None:
        return False
    process.kill()
    return True
