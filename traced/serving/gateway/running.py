"""The router's process: ``traced serve``.

Invariants: SIGTERM and SIGINT let the requests in flight end, then what was recorded is brought into the store. An
engine of its own is started for it, and again, with its adapters, whenever it dies. Several routers may run on one
store; none needs the daemon. How it fails: ``EngineStartError`` and ``StoreError`` before it listens; what fails later
is logged and tried again.
"""

import asyncio
import gc
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from store.database import open_store
from traced.config import Settings
from traced.outcomes.evidence import Labels
from traced.outcomes.rule_file import read_rules
from traced.serving.client import EngineClient
from traced.serving.errors import ServingError
from traced.serving.gateway.app import Gateway, serving
from traced.serving.gateway.children import engine, store_rest, storing
from traced.serving.gateway.deciding import Decisions
from traced.serving.gateway.engines import Pool, Replica
from traced.serving.gateway.feedback import Judges
from traced.serving.gateway.forwarding import Forwarder
from traced.serving.gateway.keys import LOOPBACK
from traced.serving.gateway.limits import Gate, Quotas
from traced.serving.gateway.live import Follower, Live
from traced.serving.gateway.redaction import Redactor
from traced.serving.gateway.shadows import Shadows
from traced.serving.gateway.sleeping import Sleeping
from traced.serving.gateway.spool import Spool
from traced.serving.gateway.upstream import Upstream
from traced.serving.gateway.yielding import Yielding
from traced.serving.otlp.aside import Aside
from traced.serving.otlp.joining import Joins
from traced.serving.otlp.receiver import Receiver


def now() -> datetime:
    """The time as the store keeps it."""
    return datetime.now(UTC)


async def serve(settings: Settings, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; ``ready`` is told the URL.

    Raises ``EngineStartError``, ``StoreError``, ``RuleFileError``.
    """
    over = asyncio.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(one, over.set)
    if settings.outcomes.rules:
        read_rules(Path(settings.outcomes.rules))  # what is wrong with it is told before anything starts
    async with AsyncExitStack() as stack:
        store = open_store(settings.store_url)
        stack.callback(store.dispose)
        beside = storing(settings)
        stack.callback(store_rest, settings)
        stack.callback(beside.stop)
        await beside.start()
        urls, keepers = settings.serving.engines, [beside.keep]
        if settings.serving.engine == "external" and not urls:
            raise ServingError("serving.engines names no engine", hint='serving.engines = ["http://127.0.0.1:8000"]')
        if settings.serving.engine != "external":
            own, url = engine(settings)
            stack.callback(own.stop)
            await own.start()
            urls = [url]
            keepers.append(own.keep)
        url = await stack.enter_async_context(routing(settings, store, urls, *keepers))
        _settle_memory()
        ready(url)
        await over.wait()


def _settle_memory() -> None:
    """Let the garbage collector pass over what is there for good; it took a tenth of every request."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)


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
    upstream = Upstream(key, silence_s=chosen.timeout_s)
    shadows = Shadows(pool, upstream, gate, settings.promotion.shadow_requests)
    quotas = Quotas()
    aside, joins = Aside(spool.folder, redactor), Joins(chosen.span_wait_s, time.monotonic)
    limits = (chosen.record, chosen.body_mb)
    receiver = Receiver(spool, judges, follower.keys, quotas, redactor, aside, joins, *limits)
    gateway = Gateway(
        pool,
        live,
        decisions,
        spool,
        judges,
        chosen,
        follower.keys,
        gate,
        quotas,
        redactor,
        Forwarder(pool, upstream),
        shadows,
        receiver,
    )
    try:
        await follower.look()
        if follower.keys.known is None and chosen.host not in LOOPBACK:
            raise ServingError(
                f"whoever reaches {chosen.host} could use the router: no key was made yet", hint="traced keys add NAME"
            )
        await pool.look()
        wanted = (chosen.busy_requests, chosen.busy_s, chosen.devices)
        yielding = Yielding(store, lambda: gate.running + gate.waiting, now, *wanted)
        if chosen.sleep_for_training:
            keepers = (*keepers, Sleeping(store, pool, now, chosen.devices).keep)
        async with serving(gateway, pool.keep, follower.keep, yielding.keep, *keepers) as url:
            yield url
    finally:
        await pool.close()
