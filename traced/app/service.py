"""``traced up``: start-up of the service, its background tasks (upkeep, gateway, notices, reload), and shutdown.

    lock -> store -> recovery -> API -> loop ... SIGTERM -> drain -> end

Invariants: one instance per data directory; READY is sent once the API listens; watchdog pings come from the cycle
loop, and before its start from the wait for the router's engine; interrupted work continues at the next start;
background failures are logged and never end the service.
How it fails: ``AlreadyRunning``, ``DoorError`` and the store's errors at start-up.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta, tzinfo
from functools import partial
from pathlib import Path
from time import monotonic, sleep

import sqlalchemy

from store.database import create_in_subprocess, open_store, read_session, write_session
from store.errors import StoreError
from store.records import Event
from store.repositories.events import last_event, save_event
from store.repositories.tokens import list_tokens
from traced.api.application import control_api
from traced.api.auth import Caller, by_token, listening, listening_at, local, tcp_socket
from traced.api.control import Control
from traced.api.monitoring import parts_of, prometheus
from traced.client import default_socket
from traced.client.models import Reason
from traced.config import logs
from traced.config.settings import Settings
from traced.core import telemetry
from traced.core.errors import PromotionError, TracedError
from traced.core.ownership import SERVICE, exclusive_access, is_alive, own_identity, sandbox_owner
from traced.core.permissions import tighten
from traced.core.reserve import create_reserve, reserve_folder
from traced.core.signals import Lifecycle, background_tasks, run_until_forced, signals
from traced.core.time_windows import parse_zone
from traced.daemon.audit_log import log_audit
from traced.daemon.loop import CycleLoop
from traced.daemon.notify import ServiceManager, service_manager
from traced.daemon.scrub import scrub_daily
from traced.daemon.settings_changes import keep, note_restart
from traced.daemon.triggers import Triggers
from traced.inference.errors import ModelError
from traced.inference.model_files import base_model
from traced.inference.shared_engine import is_starting, read_record, record_file
from traced.jobs.attempts import backoff, executor, recover_lost_attempts
from traced.jobs.retry import AttemptLedger
from traced.llm.connection import LlmError, check_model
from traced.maintenance.orphans import sweep
from traced.maintenance.prune import prune
from traced.notifications.delivery import deliver_due
from traced.processes.child_process import Child, RestartingProcess, start
from traced.registry.adapter_store import upload_in_service
from traced.registry.integrity import quarantining

POLL_S = 60.0
DONE = "upkeep"  # event kind

log = logging.getLogger(__name__)


def is_due(at: str, last: datetime, now: datetime, zone: tzinfo | None = None) -> bool:
    """Whether the time of day ``at`` ("03:30"; "" is never) has passed in ``zone`` since ``last``."""
    if not at:
        return False
    local = now.astimezone(zone)
    moment = datetime.combine(local.date(), time.fromisoformat(at), local.tzinfo)
    # Compared in UTC: at a change of daylight saving local times repeat or are skipped.
    if moment.astimezone(UTC) > now:
        moment = datetime.combine(local.date() - timedelta(days=1), moment.time(), local.tzinfo)
    return last < moment.astimezone(UTC)


async def keep_up(control: Control) -> None:
    """Run the daily upkeep whenever it is due, until cancelled."""
    last: datetime | None = None
    while True:
        try:
            if last is None:
                last = await asyncio.to_thread(_last_upkeep, control)
            last = await asyncio.to_thread(upkeep_if_due, control, last)
        except StoreError as error:
            log.warning("upkeep is postponed, the store does not answer: %s", error)
        await asyncio.sleep(POLL_S)


def upkeep_if_due(control: Control, last: datetime) -> datetime:
    """Prune if it is due, and return the time of the last upkeep; raises the store's errors."""
    now, settings = control.now(), control.settings
    last = min(last, now)
    if not is_due(settings.retention.prune_at, last, now, parse_zone(settings.devices.time_zone)):
        return last
    detail = _prune(control, now)
    with write_session(control.store) as session:
        save_event(session, Event(control.now(), DONE, "prune", detail=detail))
    return now


def _prune(control: Control, now: datetime) -> dict[str, object]:
    try:
        removed = prune(control.settings, control.store, now=now, owner=sandbox_owner(control.settings.data_dir))
    # No error of the upkeep may stop the service.
    except Exception as error:
        log.exception("upkeep failed; it is repeated tomorrow, or now with: traced prune")
        return {"failed": f"{type(error).__name__}: {error}"}
    pruned = {item.kind: item.count for item in removed if item.count}
    size, notes = sum(item.size for item in removed), [item.note for item in removed if item.note]
    log.info("upkeep: %s", pruned or "nothing to delete", extra={"bytes": size, "notes": notes})
    return {"pruned": pruned, "bytes": size, "notes": notes}


def _last_upkeep(control: Control) -> datetime:
    with read_session(control.store) as session:
        event = last_event(session, DONE)
    # min: an event written while the clock was ahead must not block upkeep until then.
    return control.since if event is None else min(event.at, control.now())


ENGINE_POLL_S = 1.0  # polling interval for the router's engine
ENGINE_STARTS = 2  # starts of the router's engine that may fail before cycles no longer wait for it
GRACE_S = 90.0  # time for requests in flight, then for the spool; equals systemd's default


@dataclass
class _Router:
    child: Child

    @property
    def alive(self) -> bool:
        return not self.child.wait(0)

    def stop(self) -> None:
        self.child.stop(GRACE_S)


@asynccontextmanager
async def beside_router(settings: Settings) -> AsyncIterator[None]:
    """Run the gateway as a child during the block if ``serving.with_service`` is set; restart it when it exits."""
    if not settings.serving.with_service:
        yield
        return
    command = ["-m", "traced.gateway", "--data-dir", str(settings.data_dir)]
    log_file: Path = settings.data_dir / "logs" / "router.log"
    router = RestartingProcess("the router", lambda: _Router(start(command, log=log_file)))
    await router.start()
    supervision = asyncio.create_task(router.supervise())
    try:
        yield
    finally:
        supervision.cancel()
        await asyncio.gather(supervision, return_exceptions=True)
        await asyncio.to_thread(router.stop)


async def router_engine(settings: Settings, draining: asyncio.Event, beat: Callable[[], object]) -> None:
    """Return when the router has started the vLLM that stages use as well, so that no stage starts a second one.

    Returns at once if the router starts no vLLM; when ``draining`` is set; and with a warning if its start has failed
    ``ENGINE_STARTS`` times, or if no engine has been starting for ``engine.start_timeout_s``. ``beat`` is called every
    ``ENGINE_POLL_S`` meanwhile.
    """
    engine = settings.engine
    if not settings.serving.with_service or engine.urls:
        return
    # Imported here because its imports are large, and nothing else in the service needs them.
    from traced.inference.start import backend

    if backend(settings) != "vllm":
        return
    try:
        file = record_file(settings.data_dir, base_model(settings).path)
    except ModelError:
        # The check before a cycle reports it.
        return
    log.info("cycles wait until the router's engine answers")
    was_starting, failures, give_up_at = False, 0, monotonic() + engine.start_timeout_s
    while not draining.is_set() and read_record(file) is None:
        starts = is_starting(settings.data_dir)
        failures += was_starting and not starts
        was_starting = starts
        if starts:
            give_up_at = monotonic() + engine.start_timeout_s
        if failures == ENGINE_STARTS or monotonic() > give_up_at:
            log.warning("the router has no engine (see logs/router.log); stages start their own")
            return
        beat()
        with suppress(TimeoutError):
            async with asyncio.timeout(ENGINE_POLL_S):
                await draining.wait()


async def _run_cycles(settings: Settings, loop: CycleLoop, draining: asyncio.Event) -> None:
    await router_engine(settings, draining, loop.beat)
    await loop.run(draining)


SILENT_S = 600.0  # an attempt on another host counts as lost after this time without a heartbeat
LAST_S = 15.0  # time for open API calls after the children have ended
NOTICES_S = 5.0  # polling interval for due notices


def now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


def up(load: Callable[[], Settings]) -> None:
    """Run the service until it is stopped; ``load`` loads the current settings, at start and at every reload."""
    settings = load()
    logs.configure(settings.log, settings.data_dir, now=now)
    telemetry.begin(settings.telemetry.endpoint)
    with exclusive_access(settings.data_dir, now(), SERVICE):
        if tightened := tighten(settings.data_dir):
            log.warning("closed %s of %s to other users", tightened, settings.data_dir)
        create_in_subprocess(settings.store_url)
        store = open_store(settings.store_url)
        try:
            asyncio.run(_serve(settings, store, load))
        finally:
            store.dispose()
            telemetry.end()


async def _serve(settings: Settings, store: sqlalchemy.Engine, load: Callable[[], Settings]) -> None:
    manager = service_manager()
    lifecycle = Lifecycle(settings.service.drain_s, settings.executor.grace_s + LAST_S)
    _recover(settings, store)
    ledger = AttemptLedger(store, own_identity(), backoff(settings), settings.executor.failures, settings.seed, now)
    loop = CycleLoop(settings, store, executor(settings), ledger, now, manager.beat, partial(_sweep, settings, store))
    triggers = Triggers(settings, store, loop.request_cycle, now)
    control = Control(
        settings,
        store,
        loop,
        now,
        now(),
        next_at=triggers.next_at,
        reread=load,
        apply=_apply_settings,
        tell=partial(_propagate_settings, triggers),
        present=loop.live_state,
    )
    ready = parts_of(control)
    metrics = partial(prometheus, control)
    async with AsyncExitStack() as exit_stack:
        unix_api = control_api(control, local, ready, metrics)
        await exit_stack.enter_async_context(listening_at(unix_api, default_socket(settings.data_dir)))
        if settings.api.port:
            _warn_if_token_missing(store)
            tcp_api = control_api(control, by_token(store), ready, metrics)
            await exit_stack.enter_async_context(listening(tcp_api, tcp_socket(settings.api.host, settings.api.port)))
        with signals(lifecycle):
            side_tasks = background_tasks(
                lifecycle,
                notices=_deliver_notices(control),
                upkeep=keep_up(control),
                audit=log_audit(store, settings.data_dir),
                reserve=_keep_reserve(settings),
                triggers=triggers.run(),
                scrub=scrub_daily(store, lambda: control.settings.notify.names, now),
                reload=_reload(control, lifecycle, manager),
            )
            await exit_stack.enter_async_context(side_tasks)
            await exit_stack.enter_async_context(beside_router(settings))
            note_restart(settings, store, at=now())
            control.state = "ready"
            manager.ready(_status_line(control))
            log.info("ready", extra={"data_dir": str(settings.data_dir)})
            _warn_if_model_missing(settings)
            # A daemon thread, because an upload takes its time, and an object store that hangs must not delay the end.
            threading.Thread(target=_upload_adapters, args=(settings, store), daemon=True).start()
            work = asyncio.ensure_future(run_until_forced(_run_cycles(settings, loop, lifecycle.draining), lifecycle))
            work.add_done_callback(partial(_on_loop_end, lifecycle))
            await lifecycle.draining.wait()
            control.state = "draining"
            manager.stopping(lifecycle.cause)
            log.info("stopping", extra={"cause": lifecycle.cause})
            closing = asyncio.create_task(control.playing.close(), name="end of the played episodes")
            try:
                await work
            finally:
                await closing


def _upload_adapters(settings: Settings, store: sqlalchemy.Engine) -> None:
    """Upload the adapters that were approved before ``serving.adapters_root`` was a URL; repeated until it succeeds."""
    last_error = ""
    while True:
        try:
            with quarantining(store, settings.notify.names, now):
                return upload_in_service(settings.serving.adapters_root, store)
        except (PromotionError, StoreError) as error:
            if last_error != str(error):
                last_error = str(error)
                log.warning("adapters that take traffic are not uploaded, other routers cannot get them: %s", error)
        sleep(POLL_S)


def _on_loop_end(lifecycle: Lifecycle, work: "asyncio.Future[bool]") -> None:
    """Stop the service if the loop ended by a defect."""
    if not work.cancelled() and (error := work.exception()) is not None:
        log.critical("the cycle loop failed, the service stops", exc_info=error)
    if not lifecycle.draining.is_set():
        # A process without its loop would look healthy; ending it lets the service manager restart it.
        lifecycle.stop("the cycle loop failed")


def _warn_if_model_missing(settings: Settings) -> None:
    """Warn if the settings need a language model that is not configured completely."""
    # Only a warning: the API and the gateway work without one.
    try:
        check_model(settings)
    except LlmError as error:
        log.warning("cycles of %s cannot start: %s", settings.target.name, error)


def _warn_if_token_missing(store: sqlalchemy.Engine) -> None:
    """Warn if nobody can use the TCP port yet; a token that is added later is valid at once."""
    with read_session(store) as session:
        if all(token.revoked_at for token in list_tokens(session)):
            log.warning("api.port refuses everybody, because no token exists: traced tokens add NAME --role ROLE")


def _status_line(control: Control) -> str:
    return f"running, target {control.target}"


def _propagate_settings(triggers: Triggers, settings: Settings) -> None:
    triggers.take(settings)
    keep(settings)


def _apply_settings(settings: Settings) -> None:
    """Apply the log settings, or raise."""
    logs.configure(settings.log, settings.data_dir, now=now)


async def _reload(control: Control, lifecycle: Lifecycle, manager: ServiceManager) -> None:
    """Reload the settings at every SIGHUP; invalid settings change nothing."""
    while True:
        await lifecycle.reload.wait()
        lifecycle.reload.clear()
        manager.reloading("reloading the settings")
        try:
            await asyncio.to_thread(control.reload, Caller("SIGHUP", "local"), Reason())
        # After any error in the new settings the service continues with the previous ones.
        except Exception as error:
            expected = isinstance(error, (TracedError, StoreError))
            log.error("reload failed, the previous settings remain in force: %s", error, exc_info=not expected)
        manager.ready(_status_line(control))


def _recover(settings: Settings, store: sqlalchemy.Engine) -> None:
    """Clean up after a killed service: children, attempts, containers, staging, leases."""
    for attempt in recover_lost_attempts(store, now=now, silent_s=SILENT_S):
        log.warning("an attempt at %s ended with its process, which was killed", attempt.key.stage)
    _sweep(settings, store)


def _sweep(settings: Settings, store: sqlalchemy.Engine) -> None:
    """Remove containers, staging and leases of ended processes; call it only while no stage runs."""
    for orphan in sweep(settings.data_dir, store, is_alive, now=now(), owner=sandbox_owner(settings.data_dir)):
        log.warning("leftover of an ended process: %s %s", orphan.kind, orphan.name)


async def _keep_reserve(settings: Settings) -> None:
    """Keep space for a rollback on a full disk, until cancelled; there is none to keep for PostgreSQL."""
    while (folder := reserve_folder(settings.store_url)) is not None:
        await asyncio.to_thread(create_reserve, folder)
        await asyncio.sleep(POLL_S)


async def _deliver_notices(control: Control) -> None:
    while True:
        try:
            await deliver_due(control.store, control.settings.notify, now=now)
        except StoreError as error:
            log.warning("notices cannot be delivered now, next attempt follows: %s", error)
        await asyncio.sleep(NOTICES_S)
