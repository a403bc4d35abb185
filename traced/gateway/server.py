"""The gateway's process (``traced serve``), with the engine and the recorder as supervised child processes.

After SIGTERM or SIGINT the requests in flight end; then the recorded exchanges are stored. A child that dies is
restarted; an engine gets the same URL and its adapters again. Several gateways may run on one store, without the
daemon. Errors before the gateway listens are raised by ``serve``; later failures are logged and retried.
"""

import asyncio
import gc
import math
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from sqlalchemy import Engine

from store.database import open_store
from traced.config.engine_section import STORE
from traced.config.settings import Settings
from traced.core.gpus import gpu_ids
from traced.core.reserve import create_reserve, reserve_folder
from traced.gateway.access import LOOPBACK, Access, ConcurrencyLimit, KeyConcurrency, KeyRing
from traced.gateway.adapter_cache import adapter_check, open_cache
from traced.gateway.adapter_files import AdapterFiles
from traced.gateway.app import BackgroundTask, Gateway, running, serve_application
from traced.gateway.bodies import MB
from traced.gateway.conversation_writer import ConversationWriter
from traced.gateway.conversations import Conversations
from traced.gateway.decisions import ConversationRouter
from traced.gateway.device_sharing import EngineWaker, Preemption
from traced.gateway.engine_client import GatewayEngineClient
from traced.gateway.engine_sources import EngineFollower
from traced.gateway.engines import Pool, Replica
from traced.gateway.feedback import FeedbackReceiver
from traced.gateway.forwarding import Forwarder, Shadows
from traced.gateway.live_versions import LiveVersions, PromotionFollower
from traced.gateway.metrics import Metrics, StateCollector
from traced.gateway.otlp_receiver import OtlpReceiver, RejectedSpans
from traced.gateway.peers import Peers
from traced.gateway.quotas import Quotas
from traced.gateway.recorder import GRACE_S
from traced.gateway.router_choice import EmbeddingsServer, RouterChoice
from traced.gateway.stored_responses import StoredResponses
from traced.gateway.upstream import Upstream
from traced.gateway.worker_metrics import WorkerMetrics
from traced.gateway.workers import open_workers
from traced.inference.adapter_base import base_check, weights_of
from traced.inference.client import EngineClient, server_key
from traced.inference.engine_process import EngineProcess, free_port
from traced.inference.engine_urls import server_root
from traced.inference.errors import ServingError
from traced.inference.model_files import base_model, base_name
from traced.inference.shared_engine import stop_recorded
from traced.inference.start import alternates_with_training, max_adapters, start_for_router
from traced.ingest.customers import customer_hash
from traced.ingest.otlp.wire import SpanJoiner
from traced.ingest.redaction import Redactor
from traced.ingest.spool import FILE_PATTERN, Spool
from traced.processes.child_process import RestartingProcess, RunningProcess, start
from traced.routing.routers import BY_LABELS
from traced.scoring.evidence import Labels
from traced.scoring.rule_file import read_rules
from traced.targets.conversation_target import conversation_targets

# With Python's default thresholds, a garbage collection every few hundred requests took a tenth of the request time.
GC_THRESHOLDS = (20_000, 50, 50)


def now() -> datetime:
    """Return the current time in UTC, as the store keeps it."""
    return datetime.now(UTC)


async def serve(settings: Settings, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; ``ready`` is called with the URL once the gateway listens.

    Raises:
        EngineStartError: The engine did not start.
        AdapterStoreError: The library for the URL of ``serving.adapters_root`` is missing.
        ConfigError: ``engine.key_file`` cannot be read, or is empty; ``serving.targets`` names one with episodes.
        ServingError: No engine is configured, or the gateway would listen beyond the loopback without an API key.
        StoreError: The store does not answer.
        RuleFileError: The rules for outcomes are invalid.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # Invalid settings and an invalid rule file are reported before any process starts.
    conversation_targets(settings)
    if settings.outcomes.rules:
        read_rules(Path(settings.outcomes.rules))
    async with AsyncExitStack() as stack:
        store = open_store(settings.store_url)
        stack.callback(store.dispose)
        if (folder := reserve_folder(settings.store_url)) is not None:
            create_reserve(folder)
        recorder = supervised_recorder(settings)
        # Callbacks run in reverse order: requests end first, then the recorder stops, then the rest of the spool is
        # stored.
        stack.callback(drain_spool, settings)
        stack.callback(recorder.stop)
        await recorder.start()
        # A router that starts an engine of its own does not use the list in the store.
        engines, background = [*settings.engine.urls, STORE], [recorder.supervise]
        if not settings.engine.urls:
            engine, url = supervised_engine(settings)
            stack.callback(stop_recorded, settings.data_dir, base_model(settings).path, engine.stop)
            await engine.start()
            engines = [url]
            background.append(engine.supervise)
        if settings.serving.workers > 1:
            url, workers = await stack.enter_async_context(open_workers(settings, engines))
            await stack.enter_async_context(running(*background, *(worker.supervise for worker in workers)))
        else:
            url = await stack.enter_async_context(open_gateway(settings, store, engines, *background))
            _freeze_garbage_collector()
        ready(url)
        await stop.wait()


async def serve_worker(settings: Settings, engines: Sequence[str], worker: int, ready: Callable[[], None]) -> None:
    """Serve as one of ``serving.workers`` processes until SIGTERM; ``ready`` is called once the worker listens.

    Raises:
        ConfigError: ``engine.key_file`` cannot be read, or is empty.
        ServingError: The gateway would listen beyond the loopback without an API key.
        StoreError: The store does not answer.
    """
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with AsyncExitStack() as stack:
        store = open_store(settings.store_url)
        stack.callback(store.dispose)
        await stack.enter_async_context(open_gateway(settings, store, engines, worker=worker))
        _freeze_garbage_collector()
        ready()
        await stop.wait()


@asynccontextmanager
async def open_gateway(
    settings: Settings, store: Engine, engines: Sequence[str], *background: BackgroundTask, worker: int = 0
) -> AsyncIterator[str]:
    """Serve with these engines, and run the ``background`` tasks, while the context is active.

    Args:
        engines: Entries in the form of ``engine.urls``.
        worker: The number of this process if several share the port, from 1; 0: it is alone.

    Yields:
        The gateway's URL.

    Raises:
        ServingError: The gateway would listen beyond the loopback without an API key.
        AdapterStoreError: The library for the URL of ``serving.adapters_root`` is missing.
        ConfigError: ``engine.key_file`` cannot be read, or is empty.
        StoreError: The store does not answer.
    """
    section = settings.serving
    key = server_key(settings.engine.key_file)
    upstream = Upstream(key, silence_s=section.timeout_s)

    def connect(url: str) -> Replica:
        return Replica(GatewayEngineClient(url, upstream, silence_s=settings.engine.silence_s, key=key))

    files = AdapterFiles(store, settings.notify.names, now)
    cache = files.cache = open_cache(settings, lambda: pool.replicas, files.report_stored_copy)
    peers = Peers(store, now, siblings=section.workers - 1 if worker else 0)
    pool = Pool(
        [],
        section.max_adapters,
        check_adapter=adapter_check(cache, base_check(settings)),
        verify_adapter=files.verify,
        slots=max_adapters(settings),
        wake_after_s=section.busy_s,
        wakes_under_lease=not alternates_with_training(settings, gpu_ids()),
        base=settings.engine.model,
        has_peers=peers.exist,
    )
    engine_follower = EngineFollower(store, pool, list(dict.fromkeys(engines)), connect)
    follower = PromotionFollower(
        store,
        pool,
        settings.data_dir,
        now,
        section.expiry_s,
        base_name(settings),
        settings.routing.router,
        base_check(settings),
        partial(weights_of, settings),
        Path(section.adapters_root) if section.adapters_root and cache is None else None,
        cache,
        files,
    )

    def live() -> LiveVersions:
        return follower.live

    writer = ConversationWriter(store, now, section.expiry_s)
    conversations = Conversations(store, writer, now, section.expiry_s, peers.exist)
    choice = router_choice(settings, pool, live)
    metrics = Metrics()
    router = ConversationRouter(
        conversations,
        writer,
        pool,
        live,
        now,
        choice,
        metrics,
        by_turn=settings.routing.when == "turn",
        margin=settings.routing.margin,
    )
    spool = Spool(settings.data_dir / "spool")
    spool.losses.prepare()
    limit = ConcurrencyLimit(section.concurrency, section.queue, section.queue_s)
    customers = customer_hash(store)
    redactor = Redactor(section.redact, section.redact_fields, customers.redaction_key())
    feedback_receiver = FeedbackReceiver(
        store, Labels(section.success_labels, section.failure_labels), redactor, spool.folder
    )
    shadows = Shadows(pool, upstream, limit, settings.promotion.shadow_requests)
    access = _access(settings, follower.keys, Quotas(store, now, peers.exist))
    receiver = OtlpReceiver(
        spool,
        feedback_receiver,
        access,
        redactor,
        RejectedSpans(spool.folder, redactor, spool.losses, customers),
        SpanJoiner(section.span_wait_s, time.monotonic),
        section.record,
        customers,
    )
    metrics.registry.register(StateCollector(pool, limit, spool, receiver))
    worker_metrics = WorkerMetrics(settings.data_dir / "workers", worker, metrics.registry) if worker else None
    gateway = Gateway(
        pool,
        live,
        conversations,
        writer,
        router,
        spool,
        feedback_receiver,
        section,
        access,
        limit,
        redactor,
        Forwarder(pool, upstream),
        shadows,
        receiver,
        metrics,
        StoredResponses(store, now),
        engine_follower,
        worker_metrics.exposition if worker_metrics else metrics.exposition,
        customers,
    )
    try:
        # The gateway does not start without the store, because the API keys are stored there.
        await follower.refresh()
        await peers.refresh()
        if follower.keys.by_hash is None and section.host not in LOOPBACK:
            raise ServingError(
                f"the router has no API key yet, so everybody who can reach {section.host} could use it",
                hint="traced keys add NAME",
            )
        await engine_follower.refresh()
        await pool.check_all()
        if choice.server is not None:
            await choice.server.check()
        preemption = Preemption(
            store,
            lambda: limit.running + limit.waiting,
            now,
            # Each worker sees its part of the load.
            math.ceil(section.busy_requests / (section.workers if worker else 1)),
            section.busy_s,
            section.devices,
        )
        if section.sleep_for_training:
            waker = EngineWaker(store, pool, now, preemption.request_devices, section.devices)
            background = (*background, waker.run)
        background = (peers.run, choice.run, preemption.run, engine_follower.run, *background)
        background = (*background, worker_metrics.run) if worker_metrics else background
        async with serve_application(gateway, pool.run, follower.run, *background, shares_port=worker > 0) as url:
            yield url
    finally:
        await choice.close()
        await pool.close()


def _access(settings: Settings, keys: KeyRing, quotas: Quotas) -> Access:
    section = settings.serving
    key_concurrency = KeyConcurrency(section.requests_per_key)
    return Access(keys, quotas, key_concurrency, section.body_mb * MB, conversation_targets(settings).names)


def router_choice(settings: Settings, pool: Pool, live: Callable[[], LiveVersions]) -> RouterChoice:
    """Return the choice of the router by the settings."""
    routing, server = settings.routing, None
    if routing.embeddings_url:
        client = EngineClient(server_root(routing.embeddings_url))
        server = EmbeddingsServer(client, routing.embeddings_model)
    return RouterChoice(pool, live, settings.serving.routing_timeout_s, routing.router == BY_LABELS, server)


def supervised_engine(settings: Settings) -> tuple[RestartingProcess, str]:
    """Return the process of the engine that the settings name, not started yet, and its URL."""
    # The port is fixed, so that a restarted engine keeps its URL.
    port = free_port()
    engine = RestartingProcess("the engine", lambda: start_for_router(settings, port))
    return engine, f"http://127.0.0.1:{port}"


def supervised_recorder(settings: Settings) -> RestartingProcess:
    """Return the process of the recorder, not started yet, which moves the spool into the store."""

    def start_recorder() -> RunningProcess:
        command = ["-m", "traced.gateway.recorder", "--data-dir", str(settings.data_dir)]
        log_file = settings.data_dir / "logs" / "storing.log"
        return EngineProcess("", log_file, start(command, log=log_file), GRACE_S)

    return RestartingProcess("the recorder", start_recorder)


def drain_spool(settings: Settings) -> None:
    """Store the files that a recorder left in the spool, for example because it died."""
    if any((settings.data_dir / "spool").glob(FILE_PATTERN)):
        command = ["-m", "traced.gateway.recorder", "--once", "--data-dir", str(settings.data_dir)]
        child = start(command, log=settings.data_dir / "logs" / "storing.log")
        child.wait(GRACE_S)
        child.stop(0)


def _freeze_garbage_collector() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
