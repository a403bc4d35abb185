"""``traced up``: the service on one data directory, from start-up to an orderly end.

    lock -> store -> what a crash left behind -> doors -> loop ... SIGTERM -> drain -> end

Invariants: one instance per directory; READY is told once the doors are open; pings to the service manager come from
the loop that does the work; a stop is orderly until its deadline, and whatever is cut short is carried on at the next
start. How it fails: AlreadyRunning, DoorError, the store's errors at start-up; later failures are the loop's.
Not covered: the router.

Upkeep inside the service: once a day, at ``retention.prune_at``, what ``traced prune`` would delete is deleted.

Invariants: the store's events say when it was done last, so that a restart neither repeats nor forgets a day; a day on
which the service did not run is made up for when it starts; whatever goes wrong is logged and told as an event, and the
next day tries again. Stopped containers of ours go with it (``traced.maintenance.prune``).
How it fails: never. Not covered: deciding when cycles begin.

The router beside the service, where ``serving.with_service`` asks for it: a child that is started again.

Invariants: the service goes on without it, whatever becomes of it; it ends with the service, after what is in flight.
How it fails: what keeps it from serving (a port that is taken, an engine that does not start) is in its log,
``DIR/logs/router.log``, and it is tried again. Not covered: agents that may not miss it while the service is started
anew: give them ``traced serve`` as a service of its own.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta, tzinfo
from functools import partial
from pathlib import Path

import sqlalchemy

from store.database import make_beforehand, open_store, reading, session
from store.errors import StoreError
from store.records import Event
from store.repositories.events import last_event, save_event
from traced.api.application import control_api
from traced.api.auth import Caller, by_token, checked_tokens, listening, local, tcp_socket, unix_socket
from traced.api.control import Control
from traced.api.errors import DoorError
from traced.api.monitoring import parts_of, prometheus
from traced.client import default_socket
from traced.client.models import Reason, Role
from traced.config import logs
from traced.config.service_sections import ApiSection
from traced.config.settings import Settings
from traced.core import telemetry
from traced.core.errors import TracedError
from traced.core.ownership import alone, is_alive, sandbox_owner, this_holder
from traced.core.signals import Lifecycle, beside, signals, until_forced
from traced.core.time_windows import parse_zone
from traced.daemon.loop import CycleLoop
from traced.daemon.notify import ServiceManager, service_manager
from traced.daemon.settings_changes import keep, note_restart
from traced.daemon.triggers import Triggers
from traced.jobs.attempts import backoff, executor, recover
from traced.jobs.retry import Ledger
from traced.llm.connection import LlmError, check_model
from traced.maintenance.orphans import sweep
from traced.maintenance.prune import prune
from traced.notifications.delivery import deliver_due
from traced.processes.child_process import Child, Kept, start

LOOK_S = 60.0
DONE = "upkeep"  # the kind of its events

log = logging.getLogger(__name__)


def is_due(at: str, last: datetime, now: datetime, zone: tzinfo | None = None) -> bool:
    """Whether a clock of ``zone`` has shown ``at`` ("03:30"; "" is never) since ``last``."""
    if not at:
        return False
    local = now.astimezone(zone)
    moment = datetime.combine(local.date(), time.fromisoformat(at), local.tzinfo)
    if moment.astimezone(UTC) > now:  # compared in UTC: clocks are changed at night
        moment = datetime.combine(local.date() - timedelta(days=1), moment.time(), local.tzinfo)
    return last < moment.astimezone(UTC)


async def keep_up(control: Control) -> None:
    """Look every minute, for ever."""
    last: datetime | None = None
    while True:
        try:
            if last is None:
                last = await asyncio.to_thread(_last, control)
            last = await asyncio.to_thread(upkeep_if_due, control, last)
        except StoreError as error:
            log.warning("upkeep waits: %s", error)
        await asyncio.sleep(LOOK_S)


def upkeep_if_due(control: Control, last: datetime) -> datetime:
    """Prune when it is time; returns when it was done last. Raises the store's errors when it cannot be noted."""
    now, kept = control.now(), control.settings
    last = min(last, now)
    if not is_due(kept.retention.prune_at, last, now, parse_zone(kept.devices.time_zone)):
        return last
    detail = _pruned(control, now)
    with session(control.store) as opened:
        save_event(opened, Event(control.now(), DONE, "prune", detail=detail))
    return now


def _pruned(control: Control, now: datetime) -> dict[str, object]:
    try:
        gone = prune(control.settings, control.store, now=now, owner=sandbox_owner(control.settings.data_dir))
    except Exception as error:  # a failure of upkeep is no reason to stop the service
        log.exception("upkeep failed; it is tried again tomorrow, or by hand: traced prune")
        return {"failed": f"{type(error).__name__}: {error}"}
    pruned = {one.kind: one.count for one in gone if one.count}
    size, notes = sum(one.size for one in gone), [one.note for one in gone if one.note]
    log.info("upkeep: %s", pruned or "nothing to delete", extra={"bytes": size, "notes": notes})
    return {"pruned": pruned, "bytes": size, "notes": notes}


def _last(control: Control) -> datetime:
    with reading(control.store) as opened:
        done = last_event(opened, DONE)
    return control.since if done is None else min(done.at, control.now())  # a clock that was ahead holds up nothing


GRACE_S = 90.0  # requests in flight, then the spool; systemd's own default


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
    """Keep a router as long as the body runs, if the settings ask for one."""
    if not settings.serving.with_service:
        yield
        return
    command = ["-m", "traced.gateway", "--data-dir", str(settings.data_dir)]
    log: Path = settings.data_dir / "logs" / "router.log"
    kept = Kept("the router", lambda: _Router(start(command, log=log)))
    await kept.start()
    keeping = asyncio.create_task(kept.keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await asyncio.to_thread(kept.stop)


SILENT_S = 600.0  # without a heartbeat, after which an attempt on another host counts as lost
LAST_S = 15.0  # for calls that are under way when the service has to end and its children have ended
NOTICES_S = 5.0  # between two looks for notices that are due


def now() -> datetime:
    """The time, in UTC."""
    return datetime.now(UTC)


@dataclass
class Tokens:
    """The tokens that open the TCP door now."""

    known: dict[str, Role]


def up(read: Callable[[], Settings]) -> None:
    """Run the service until it is told to stop; ``read`` gives the settings as they are written at the time."""
    settings = read()
    tokens = Tokens(tokens_of(settings.api))
    logs.configure(settings.log, settings.data_dir, now=now)
    telemetry.begin(settings.telemetry.endpoint)
    with alone(settings.data_dir, now()):
        make_beforehand(settings.store_url)
        store = open_store(settings.store_url)
        try:
            asyncio.run(_serve(settings, store, tokens, read))
        finally:
            store.dispose()
            telemetry.end()


async def _serve(settings: Settings, store: sqlalchemy.Engine, tokens: Tokens, read: Callable[[], Settings]) -> None:
    manager = service_manager()
    lifecycle = Lifecycle(settings.service.drain_s, settings.executor.grace_s + LAST_S)
    _clear_away(settings, store)
    ledger = Ledger(store, this_holder(), backoff(settings), settings.executor.failures, settings.seed, now)
    loop = CycleLoop(settings, store, executor(settings), ledger, now, manager.beat, partial(_sweep, settings, store))
    triggers = Triggers(settings, store, loop.request_cycle, now)
    control = Control(
        settings,
        store,
        loop,
        now,
        now(),
        next_at=triggers.next_at,
        reread=read,
        apply=partial(_apply, tokens),
        tell=partial(_tell, triggers),
        present=loop.present,
    )
    ready = parts_of(control)
    figures = partial(prometheus, control)
    async with AsyncExitStack() as doors:
        here = control_api(control, local, ready, figures)
        await doors.enter_async_context(listening(here, unix_socket(default_socket(settings.data_dir))))
        if settings.api.port:
            there = control_api(control, by_token(lambda: tokens.known), ready, figures)
            await doors.enter_async_context(listening(there, tcp_socket(settings.api.host, settings.api.port)))
        with signals(lifecycle):
            side_tasks = beside(
                lifecycle,
                notices=_deliver(control),
                upkeep=keep_up(control),
                triggers=triggers.run(),
                reload=_reload(control, lifecycle, manager),
            )
            await doors.enter_async_context(side_tasks)
            await doors.enter_async_context(beside_router(settings))
            note_restart(settings, store, at=now())
            control.state = "ready"
            manager.ready(_at_work(control))
            log.info("ready", extra={"data_dir": str(settings.data_dir)})
            _warn_of_what_keeps_cycles_from_beginning(settings)
            work = asyncio.ensure_future(until_forced(loop.run(lifecycle.draining), lifecycle))
            work.add_done_callback(partial(_ended, lifecycle))
            await lifecycle.draining.wait()
            control.state = "draining"
            manager.stopping(lifecycle.cause)
            log.info("stopping", extra={"cause": lifecycle.cause})
            played = asyncio.create_task(control.playing.close(), name="end of the played episodes")
            try:
                await work
            finally:
                await played


def _ended(lifecycle: Lifecycle, work: "asyncio.Future[bool]") -> None:
    """The loop has ended: by a defect, unless it was asked to; who restarts services is to know."""
    if not work.cancelled() and (error := work.exception()) is not None:
        log.critical("the loop failed", exc_info=error)
    if not lifecycle.draining.is_set():
        lifecycle.stop("the loop failed")


def _warn_of_what_keeps_cycles_from_beginning(settings: Settings) -> None:
    """The service is of use without a cycle, so it starts; whoever started it hears now what he will need."""
    try:
        check_model(settings)
    except LlmError as error:
        log.warning("no cycle of %s can begin: %s", settings.target.name, error)


def _at_work(control: Control) -> str:
    return f"works on {control.target}"


def _tell(triggers: Triggers, settings: Settings) -> None:
    triggers.take(settings)
    keep(settings)


def _apply(tokens: Tokens, settings: Settings) -> list[str]:
    """Put the settings of log and doors in force, or raise and change neither; says whose tokens changed."""
    before, found = tokens.known, tokens_of(settings.api)
    logs.configure(settings.log, settings.data_dir, now=now)
    tokens.known = found
    return [f"{role} token" for role in sorted({role for _, role in before.items() ^ found.items()})]


async def _reload(control: Control, lifecycle: Lifecycle, manager: ServiceManager) -> None:
    """Read the settings again at every SIGHUP; what cannot be used leaves everything as it was."""
    while True:
        await lifecycle.reload.wait()
        lifecycle.reload.clear()
        manager.reloading("reads its settings again")
        try:
            await asyncio.to_thread(control.reload, Caller("SIGHUP", "local"), Reason())
        except Exception as error:  # whatever is wrong with the new settings, the service goes on with the old ones
            expected = isinstance(error, (TracedError, StoreError))
            log.error("the settings were not read again, the old ones stay in force: %s", error, exc_info=not expected)
        manager.ready(_at_work(control))


def _clear_away(settings: Settings, store: sqlalchemy.Engine) -> None:
    """What a killed service left behind: children, attempts, containers, staging, leases."""
    for attempt in recover(store, now=now, silent_s=SILENT_S):
        log.warning("an attempt at %s was lost with its process", attempt.key.stage)
    _sweep(settings, store)


def _sweep(settings: Settings, store: sqlalchemy.Engine) -> None:
    """Containers, staging and leases of processes that have ended; no stage runs now."""
    for orphan in sweep(settings.data_dir, store, is_alive, now=now(), owner=sandbox_owner(settings.data_dir)):
        log.warning("left behind: %s %s", orphan.kind, orphan.name)


async def _deliver(control: Control) -> None:
    while True:
        try:
            await deliver_due(control.store, control.settings.notify, now=now)
        except StoreError as error:
            log.warning("notices wait: %s", error)
        await asyncio.sleep(NOTICES_S)


def tokens_of(section: ApiSection) -> dict[str, Role]:
    """The tokens in their files. Raises ``DoorError``: an unreadable file, a short token, a port without any."""
    files: dict[Role, str] = {"operator": section.operator_token_file, "read-only": section.read_token_file}
    found: dict[str, Role] = {}
    for role, file in files.items():
        if file:
            try:
                found[Path(file).read_text(encoding="utf-8").strip()] = role
            except (OSError, UnicodeDecodeError) as error:
                raise DoorError(f"the {role} token in {file} cannot be read: {error}", hint=f"ls -l {file}") from error
    if section.port and not found:
        raise DoorError(f"api.port is {section.port} and there is no token", hint="set api.operator_token_file")
    return checked_tokens(found)
