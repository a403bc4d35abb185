"""The router's process: ``traced serve``.

Invariants: SIGTERM and SIGINT let the requests in flight end, then what was recorded is brought into the store. An
embedded engine is started for it, and again, with its adapters, whenever it dies. Several routers may run on one store;
none needs the daemon. How it fails: ``EngineStartError`` and ``StoreError`` before it listens; what fails later is
logged and tried again.
"""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from store.database import open_store
from traced.config import Settings
from traced.executor.process import Child, start
from traced.models import resolve_model
from traced.serving.client import EngineClient
from traced.serving.errors import EngineStartError, ServingError
from traced.serving.gateway.app import Gateway, serving
from traced.serving.gateway.deciding import Decisions
from traced.serving.gateway.engines import Pool, Replica
from traced.serving.gateway.feedback import Judges
from traced.serving.gateway.keys import LOOPBACK
from traced.serving.gateway.limits import Gate
from traced.serving.gateway.live import Follower, Live
from traced.serving.gateway.redaction import Redactor
from traced.serving.gateway.settling import Labels
from traced.serving.gateway.spool import Spool
from traced.serving.gateway.storing import GRACE_S
from traced.serving.process import EngineProcess, start_embedded

log = logging.getLogger(__name__)
LOOK_S = 0.2
AGAIN_S = (1.0, 2.0, 5.0, 15.0, 60.0)  # between two starts of a child that dies


def now() -> datetime:
    """The time as the store keeps it."""
    return datetime.now(UTC)


async def serve(settings: Settings, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; ``ready`` is told the URL. Raises ``EngineStartError``, ``StoreError``."""
    over = asyncio.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(one, over.set)
    async with AsyncExitStack() as stack:
        store = open_store(settings.store_url)
        stack.callback(store.dispose)
        storing = Storing(settings)
        stack.callback(storing.stop)
        urls, keepers = settings.serving.engines, [storing.keep]
        if settings.serving.engine == "embedded":
            embedded = Embedded(settings)
            stack.callback(embedded.stop)
            urls = [await asyncio.to_thread(embedded.start)]
            keepers.append(embedded.keep)
        ready(await stack.enter_async_context(routing(settings, store, urls, *keepers)))
        await over.wait()


@asynccontextmanager
async def routing(
    settings: Settings, store: Engine, engines: Sequence[str], *keepers: Callable[[], Coroutine[Any, Any, None]]
) -> AsyncIterator[str]:
    """Serve over the engines at these URLs as long as the body runs, with the ``keepers`` beside it; gives the URL."""
    chosen = settings.serving
    key = Path(chosen.engine_key_file).read_text().strip() if chosen.engine_key_file else ""
    labels = Labels(chosen.success_labels, chosen.failure_labels)
    pool = Pool([Replica(EngineClient(url, key=key)) for url in engines], chosen.max_adapters)
    follower = Follower(store, pool, settings.data_dir)

    def live() -> Live:
        return follower.live

    by_labels = settings.routing.router == "labels"
    decisions = Decisions(store, pool, live, now, chosen.routing_timeout_s, by_labels)
    spool = Spool(settings.data_dir / "spool")
    gate = Gate(chosen.concurrency, chosen.queue, chosen.queue_s)
    redactor = Redactor(chosen.redact, chosen.redact_fields)
    judges = Judges(store, labels, redactor)
    gateway = Gateway(pool, live, decisions, spool, judges, chosen, follower.keys, gate, redactor, key)
    try:
        await follower.look()
        if follower.keys.known is None and chosen.host not in LOOPBACK:
            raise ServingError(
                f"whoever reaches {chosen.host} could use the router: no key was made yet", hint="traced keys add NAME"
            )
        await pool.look()
        async with serving(gateway, pool.keep, follower.keep, *keepers) as url:
            yield url
    finally:
        await pool.close()


class Storing:
    """The process that brings the spool into the store: started, and started again whenever it dies."""

    def __init__(self, settings: Settings) -> None:
        self._command = ["-m", "traced.serving.gateway.storing", "--data-dir", str(settings.data_dir)]
        self._log = settings.data_dir / "logs" / "storing.log"
        self._child: Child | None = None

    async def keep(self) -> None:
        """Keep it running until cancelled."""
        failures = 0
        while True:
            if self._child is None or self._child.wait(0):
                await asyncio.sleep(AGAIN_S[min(failures, len(AGAIN_S) - 1)] if self._child else 0)
                failures += self._child is not None
                self.stop()
                self._child = await asyncio.to_thread(start, self._command, log=self._log)
            await asyncio.sleep(LOOK_S)

    def stop(self) -> None:
        """End it, after it has stored what there is."""
        if self._child is not None:
            self._child.stop(GRACE_S)


class Embedded:
    """The embedded engine of a router: started, and started again on the same port whenever it dies."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: EngineProcess | None = None
        self._port = 0

    def start(self) -> str:
        """Start it; returns its URL."""
        engine = self._settings.engine
        self._process = start_embedded(
            resolve_model(self._settings.model.spec, self._settings.data_dir).path,
            data_dir=self._settings.data_dir,
            port=self._port,
            threads=self._settings.threads,
            max_batch=engine.max_batch,
            max_length=engine.max_length,
            timeout_s=engine.start_timeout_s,
        )
        self._port = int(self._process.url.rpartition(":")[2])
        return self._process.url

    async def keep(self) -> None:
        """Start it again whenever it dies, later each time."""
        failures = 0
        while True:
            await asyncio.sleep(LOOK_S)
            if self._process is not None and self._process.alive:
                continue
            delay = AGAIN_S[min(failures, len(AGAIN_S) - 1)]
            log.warning("the engine died; started again in %.0f s", delay)
            await asyncio.sleep(delay)
            failures += 1
            with suppress(EngineStartError):
                await asyncio.to_thread(self.start)

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.stop()
