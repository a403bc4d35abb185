"""The router's process: ``traced serve``.

Invariants: SIGTERM and SIGINT let the requests in flight end, then what was recorded is brought into the store. An
engine of its own is started for it, and again, with its adapters, whenever it dies. Several routers may run on one
store; none needs the daemon. How it fails: ``EngineStartError`` and ``StoreError`` before it listens; what fails later
is logged and tried again.

What runs beside a router and is started again whenever it dies: its engine, and the way into the store.

Invariant: an engine comes back at the same URL, so that the pool knows it. Not covered: what the pool does meanwhile.
"""

import asyncio
import gc
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from store.database import open_store
from traced.config.settings import Settings
from traced.gateway.access import LOOPBACK, Gate, Quotas
from traced.gateway.app import Gateway, serving
from traced.gateway.device_sharing import Sleeping, Yielding
from traced.gateway.engines import Pool, Replica
from traced.gateway.feedback import Judges
from traced.gateway.forwarding import Forwarder, Shadows
from traced.gateway.model_choice import Decisions, Follower, Live
from traced.gateway.otlp_receiver import Aside, Receiver
from traced.gateway.recorder import GRACE_S
from traced.gateway.upstream import Upstream
from traced.inference.client import EngineClient
from traced.inference.engine_process import EngineProcess, VllmOptions, start_embedded, start_vllm
from traced.inference.errors import ServingError
from traced.inference.model_files import resolve_model
from traced.ingest.otlp.wire import Joins
from traced.ingest.redaction import Redactor
from traced.ingest.spool import FILES, Spool
from traced.processes.child_process import Kept, Running, start
from traced.scoring.evidence import Labels
from traced.scoring.rule_file import read_rules


def engine(settings: Settings) -> tuple[Kept, str]:
    """The engine that ``serving.engine`` names, and its URL."""
    port = _free_port()
    begin = _vllm if settings.serving.engine == "vllm" else _embedded
    return Kept("the engine", lambda: begin(settings, port)), f"http://127.0.0.1:{port}"


def storing(settings: Settings) -> Kept:
    """The way from the spool into the store."""

    def begin() -> Running:
        command = ["-m", "traced.gateway.recorder", "--data-dir", str(settings.data_dir)]
        log_file = settings.data_dir / "logs" / "storing.log"
        return EngineProcess("", log_file, start(command, log=log_file), GRACE_S)

    return Kept("the way into the store", begin)


def store_rest(settings: Settings) -> None:
    """Bring what a storer that died has left into the store; what cannot be waits for the next one."""
    if any((settings.data_dir / "spool").glob(FILES)):
        command = ["-m", "traced.gateway.recorder", "--once", "--data-dir", str(settings.data_dir)]
        child = start(command, log=settings.data_dir / "logs" / "storing.log")
        child.wait(GRACE_S)
        child.stop(0)


def _embedded(settings: Settings, port: int) -> EngineProcess:
    chosen = settings.engine
    return start_embedded(
        resolve_model(settings.model.spec, settings.data_dir).path,
        data_dir=settings.data_dir,
        port=port,
        threads=settings.threads,
        max_batch=chosen.max_batch,
        max_length=chosen.max_length,
        timeout_s=chosen.start_timeout_s,
    )


def _vllm(settings: Settings, port: int) -> EngineProcess:
    chosen = settings.serving
    options = VllmOptions(
        resolve_model(settings.model.spec, settings.data_dir).path,
        chosen.max_adapters,
        settings.training.lora_r,
        settings.engine.max_length,
        chosen.tool_parser,
        chosen.vllm_args,
        chosen.sleep_for_training,
    )
    wait = settings.engine.start_timeout_s
    return start_vllm(options, data_dir=settings.data_dir, port=port, timeout_s=wait, python=chosen.vllm_python)


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


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
