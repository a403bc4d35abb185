"""The cycle loop: picks the cycle that is due and runs one at a time until it ends, waits for people, or is stopped.

Invariants: the store determines which cycle is due, so a restarted service continues it; a cycle begins only if all
checks of its settings pass, and keeps these settings; a cycle of a recorded target collects only once there are enough
judged conversations; a waiting cycle continues once no decision is pending or more episodes were requested; no cycle of
a paused target runs.
How it fails: a defect, or a quarantined input of a stage that all capabilities share, fails the cycle and not the
service. Store and disk errors are retried after ``POLL_S``. Cancellation stops the stage at its next safe point and
marks the cycle interrupted.
Not covered: triggers of new cycles (``traced.daemon.triggers``), requests of people (``traced.api.control``).
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy
from rich.console import Console
from sqlmodel import Session

from store.database import read_session, write_session
from store.errors import StoreError
from store.records import Cycle, CycleState, Event
from store.repositories.adapters import list_adapters
from store.repositories.attempts import AttemptState, QuarantinedInput
from store.repositories.cycles import (
    ENDED_STATES,
    UNFINISHED_STATES,
    count_cycles,
    get_cycle,
    get_target_state,
    list_cycles,
    lock_cycle,
    record_start,
    record_start_blocker,
    save_cycle,
    set_cycle_state,
)
from store.repositories.events import save_event
from store.repositories.gates import awaiting_decision, latest_gate
from traced.client.models import ACTIVITY, PROGRESS, WAITS
from traced.config.logs import bind_ids
from traced.config.settings import (
    EXCLUDED_SECTIONS,
    START_KEYS,
    TARGET_START,
    Settings,
    configuration,
    load_settings,
    start_overrides,
    with_defaults,
)
from traced.core.checks import raise_first
from traced.core.errors import ConfigError, CycleChanged, StageError, TracedError
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.core.signals import cancel_once
from traced.core.telemetry import span
from traced.daemon.live_state import Beginnings, LiveState
from traced.daemon.model_check import ModelCheck
from traced.inference.model_files import base_model
from traced.jobs.retry import AttemptLedger
from traced.llm.connection import check_model
from traced.notifications.messages import (
    OutageTracker,
    announce,
    approval_needed,
    cycle_failed,
    daemon_blocked,
    input_quarantined,
)
from traced.pipeline.context import Context
from traced.processes.job import Executor, FaultAttribution, JobOutcome, Report, ReportKind, attribute_fault, describe
from traced.registry.decisions import pending_requests
from traced.targets.conversation_target import conversation_target
from traced.targets.registry import check_seeds, target

if TYPE_CHECKING:  # imported at run time with the first cycle, because its imports are large
    from traced.pipeline.child_runner import ChildStageRunner

T = TypeVar("T")
BEGINNING = "the beginning of a cycle"
POLL_S = 5.0  # polling interval of the store if ``wake`` is not called

log = logging.getLogger(__name__)


@dataclass
class CycleLoop:
    """Runs the cycles of a target; ``traced.api.control`` calls it for people's actions."""

    settings: Settings
    store: sqlalchemy.Engine
    executor: Executor
    ledger: AttemptLedger
    now: Callable[[], datetime]
    beat: Callable[[], object] = lambda: None  # watchdog ping, called once per iteration
    tidy: Callable[[], object] = lambda: None  # removes what the cycle's stages left behind
    running: str | None = None
    running_stages: list[str] = field(default_factory=list)
    live_state: LiveState = field(default_factory=LiveState)  # progress of the running stages
    _beginnings: Beginnings = field(default_factory=Beginnings)
    _requested_cause: str = ""
    _awake: asyncio.Event = field(default_factory=asyncio.Event)
    _event_loop: asyncio.AbstractEventLoop | None = None
    _cycle_task: "asyncio.Task[None] | None" = None
    _stage_runner: "ChildStageRunner | None" = None
    _outages: OutageTracker = field(default_factory=OutageTracker)
    _pending_notices: set["asyncio.Future[None]"] = field(default_factory=set)
    _model_check: ModelCheck = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = replace(self.ledger, on_quarantined=self._announce_quarantined)
        self._model_check = ModelCheck(self.executor, self.now)

    def request_cycle(self, cause: str) -> None:
        """Begin a cycle as soon as possible; the request is not stored and is lost by a restart. "" withdraws it."""
        self._requested_cause = cause
        self.wake()

    def wake(self) -> None:
        """Make the loop check the store now; may be called on any thread."""
        if self._event_loop is None:
            self._awake.set()
        else:
            self._event_loop.call_soon_threadsafe(self._awake.set)

    async def stop_cycle(self, cycle_id: str) -> None:
        """Stop the cycle's stages at their next safe point; returns when they have ended."""
        if self.running == cycle_id and self._cycle_task is not None:
            cancel_once(self._cycle_task)
            await asyncio.wait({self._cycle_task})

    async def stop_training(self, cycle_id: str, capability: str, decide: Callable[[], T]) -> T:
        """Call ``decide``, wait until a running training has ended at its next safe point, and return the decision."""
        if self.running != cycle_id or self._stage_runner is None:
            return await asyncio.to_thread(decide)
        return await self._stage_runner.stop_training(capability, decide)

    async def run(self, draining: asyncio.Event) -> None:
        """Run until ``draining`` is set; a running cycle is then interrupted at its next safe point."""
        self._event_loop = asyncio.get_running_loop()
        drained = asyncio.ensure_future(draining.wait())
        try:
            while not draining.is_set():
                self.beat()
                if not await self._run_due_cycle(drained):
                    await self._wait_for_work(drained)
        finally:
            self._event_loop = None
            drained.cancel()
            while self._pending_notices:
                await asyncio.wait(self._pending_notices)

    async def _run_due_cycle(self, drained: "asyncio.Future[Any]") -> bool:
        """Run the cycle that is due; return False if there is none or if the infrastructure failed."""
        try:
            cycle = await self._next_cycle(drained)
            return cycle is not None and await self._run_cycle(cycle, drained)
        except Exception as error:
            if not _is_infrastructure_error(error):
                raise
            log.warning("no cycle can run, next attempt in %.0f s: %s", POLL_S, error)
            return False

    async def _wait_for_work(self, drained: "asyncio.Future[Any]") -> None:
        woken = asyncio.ensure_future(self._awake.wait())
        await asyncio.wait({woken, drained}, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        woken.cancel()
        self._awake.clear()

    async def _run_cycle(self, cycle: Cycle, drained: "asyncio.Future[Any]") -> bool:
        self.running = cycle.id
        self._cycle_task = asyncio.ensure_future(self._execute(cycle))
        try:
            await self._run_until_drained(self._cycle_task, drained)
            await self._tidy_up()
            if not self._cycle_task.cancelled():
                # Raises if the store failed; the next iteration repeats the failed write.
                self._cycle_task.result()
            return True
        finally:
            self.running, self._cycle_task, self._stage_runner, self.running_stages = None, None, None, []
            self.live_state.clear(PROGRESS)
            self.live_state.clear(WAITS)
            self._publish_doing()
            self._beginnings.forget()

    async def _run_until_drained(self, work: "asyncio.Task[None]", drained: "asyncio.Future[Any]") -> None:
        """Wait for the end of ``work`` and keep the watchdog alive; cancel the work once when the service drains."""
        while not work.done() and not drained.done():
            await asyncio.wait({work, drained}, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            self.beat()
        cancel_once(work)
        await asyncio.wait({work})

    async def _tidy_up(self) -> None:
        """Call ``tidy`` on a thread and keep the watchdog alive."""
        # A Docker engine that hangs would otherwise get the service restarted.
        tidying = asyncio.ensure_future(asyncio.to_thread(self.tidy))
        while not tidying.done():
            await asyncio.wait({tidying}, timeout=POLL_S)
            self.beat()
        if (error := tidying.exception()) is not None:
            log.warning("clean-up after the cycle failed, it is repeated at the next start of the service: %s", error)

    async def _next_cycle(self, drained: "asyncio.Future[Any]") -> Cycle | None:
        """Return the cycle to run now, or None; create one if it was requested and its settings pass all checks."""
        cycle, cause = await asyncio.to_thread(self._next_work)
        if cycle is not None and not await asyncio.to_thread(self._can_collect, cycle):
            return None
        if not cause:
            if cycle is None:
                await asyncio.to_thread(self._clear_start_blocker)
            return cycle
        # The settings may be reloaded during the checks; the cycle gets those that were checked.
        settings = self.settings
        try:
            await asyncio.to_thread(_quick_checks, settings)
            await asyncio.to_thread(self._check_conversations, settings)
            if not await self._check_model(settings, drained):
                return None
            cycle = await asyncio.to_thread(self._create_cycle, settings, cause)
        except TracedError as error:
            await asyncio.to_thread(self._record_start_blocker, error)
            return None
        if cycle is not None:
            # Cleared only now: a failed transaction must not lose the request.
            self._requested_cause = ""
        return cycle

    def _next_work(self) -> tuple[Cycle | None, str]:
        """Return the unfinished cycle to run now, or the cause of a new one; (None, "") if there is nothing to run."""
        name = self.settings.target.name
        with read_session(self.store) as session:
            target_state = get_target_state(session, name)
            if target_state.paused_at is not None:
                return None, ""
            unfinished = list_cycles(session, target=name, states=UNFINISHED_STATES)
            for cycle in unfinished:
                if cycle.state is not CycleState.WAITING or not _awaits_people(session, cycle):
                    return cycle, ""
        return None, ("" if unfinished else target_state.requested or self._requested_cause)

    def _can_collect(self, cycle: Cycle) -> bool:
        """Whether an unfinished cycle can go on; store the reason if its collection waits for conversations."""
        try:
            self._check_conversations(self.settings, cycle)
        except StageError as error:
            self._record_start_blocker(error)
            return False
        return True

    def _check_conversations(self, settings: Settings, cycle: Cycle | None = None) -> None:
        """Raise ``StageError`` if a new or unfinished cycle of a recorded target has to wait for more conversations."""
        target = conversation_target(settings)
        if not target.is_recorded:
            return
        from traced.pipeline.collect import check_conversations, has_collected  # as ``_quick_checks``
        from traced.pipeline.constant_customer import split_without_constant_customer
        from traced.pipeline.predecessor import current_live_system, find_live_system

        if cycle is not None:
            with read_session(self.store) as session:
                if has_collected(session, cycle.id):
                    return
            predecessor = with_defaults(cycle.config)["model"]["predecessor"]
            model_section = settings.model.model_copy(update={"predecessor": predecessor})
            settings = settings.model_copy(update={"model": model_section})
        split_without_constant_customer(self.store, target)
        with read_session(self.store) as session:
            live_system = find_live_system(session, cycle.id) if cycle is not None else None
            model = cycle.model if cycle is not None else base_model(settings).name
            check_conversations(session, target.name, live_system or current_live_system(session, model, settings))

    async def _check_model(self, settings: Settings, drained: "asyncio.Future[Any]") -> bool:
        """Make the checks that load the model, if they are needed; return False if the service drains meanwhile.

        Raises:
            ConfigError: A check failed.
        """
        from traced.pipeline.preflight import needs_model_checks  # imported already, by ``_quick_checks``

        if not needs_model_checks(settings):
            return True
        overrides = _dotted(configuration(settings), settings.seed) | start_overrides(settings)
        checking = asyncio.ensure_future(self._model_check.run(settings, overrides))
        await self._run_until_drained(checking, drained)
        if checking.cancelled():
            return False
        checking.result()
        return True

    def _record_start_blocker(self, error: TracedError) -> None:
        """Store why a due cycle cannot begin, and announce it if that lasts."""
        name, at, reason = self.settings.target.name, self.now(), str(error)
        with read_session(self.store) as session:
            stored_reason = get_target_state(session, name).cannot_begin
        started_at = self._outages.outage_to_report(BEGINNING, at)
        if reason != stored_reason:
            log.warning("a due cycle of %s cannot start: %s", name, reason)
        if reason != stored_reason or started_at is not None:
            with write_session(self.store) as session:
                record_start_blocker(session, name, reason)
                if started_at is not None:
                    message = daemon_blocked(BEGINNING, reason, error.hint or "traced doctor", started_at)
                    announce(session, message, self.settings.notify.names, at=at)

    def _clear_start_blocker(self) -> None:
        """Forget why a cycle could not begin that is due no more."""
        name = self.settings.target.name
        with read_session(self.store) as session:
            is_blocked = bool(get_target_state(session, name).cannot_begin)
        if is_blocked:
            with write_session(self.store) as session:
                record_start_blocker(session, name, "")

    def _create_cycle(self, settings: Settings, cause: str) -> Cycle | None:
        """Store a new cycle of these settings; None if a person has paused the target meanwhile."""
        name, at = settings.target.name, self.now()
        with write_session(self.store) as session:
            if get_target_state(session, name).paused_at is not None:
                return None
            # Each cycle has another seed, so that it draws other tasks than the cycles before.
            previous_cycles = count_cycles(session, target=name)
            seed, model = settings.seed + previous_cycles, base_model(settings).name
            cycle_id = f"{name}-{at:%Y%m%dT%H%M%S}-{previous_cycles + 1}"
            cycle = Cycle(cycle_id, name, model, seed, configuration(settings), CycleState.RUNNING, at)
            save_cycle(session, cycle)
            record_start(session, name, cause=cause, at=at)
            save_event(session, Event(at, "cycle begun", cycle_id, cycle_id, {"cause": cause}))
        return cycle

    async def _execute(self, cycle: Cycle) -> None:
        """Run one cycle until it ends, waits for people, or is stopped."""
        with bind_ids(cycle.id):
            try:
                if not await self.ledger.transaction(partial(self._mark_running, cycle)):
                    return
                ids = {"traced.cycle.id": cycle.id, "traced.target": cycle.target, "gen_ai.request.model": cycle.model}
                with span("traced.cycle", {**ids, "traced.cycle.seed": cycle.seed}):
                    await self._run_graph(cycle)
            except asyncio.CancelledError:
                await self._mark(cycle, CycleState.INTERRUPTED)
                raise
            except TracedError as error:
                if _is_infrastructure_error(error):
                    raise
                await self._fail(cycle, str(error))
            # A defect fails this cycle and not the service.
            except Exception as error:
                if _is_infrastructure_error(error):
                    raise
                log.exception("cycle %s failed", cycle.id)
                await self._fail(cycle, f"internal error, a defect of traced: {type(error).__name__}")

    async def _run_graph(self, cycle: Cycle) -> None:
        # langgraph is heavy: the service starts without it.
        from traced.pipeline.child_runner import ChildStageRunner
        from traced.pipeline.graph import advance, build_graph, checkpoints
        from traced.pipeline.inheritance import attempts_of
        from traced.pipeline.reconciliation import reconcile
        from traced.pipeline.stages import cycle_stages

        settings = as_begun(self.settings, cycle)
        model = base_model(settings)
        progress = Progress(Console(quiet=True))
        context = Context(
            settings,
            self.store,
            await asyncio.to_thread(target, settings),
            model,
            cycle.id,
            progress,
            Meter(),
            now=self.now,
        )
        self._stage_runner = runner = ChildStageRunner(
            context,
            cycle,
            overrides_of(cycle) | start_overrides(settings),
            self.executor,
            self.ledger,
            self._on_report,
            lambda: self.settings.devices,
            self.running_stages,
            on_change=self._publish_doing,
        )
        async with checkpoints(settings.data_dir, settings.store_url) as saver:
            attempts = attempts_of(settings)
            graph = build_graph(
                cycle_stages(runner),
                saver,
                attempts=attempts,
                trainings=0,  # no limit: each training leases its device
                prompt_first=settings.training.prompt_first,
            )
            await reconcile(graph, context)
            progress_state = await advance(graph, cycle.id)
        if progress_state.finished:
            await self._mark(cycle, CycleState.FINISHED)
            log.info("cycle %s is finished. %s", cycle.id, await self.ledger.transaction(partial(_verdict, cycle)))
        else:
            await self.ledger.transaction(partial(self._await_decisions, cycle, progress_state.waiting))

    def _on_report(self, stage: str, report: Report) -> None:
        if report.kind is ReportKind.WAITING:
            log.warning("stage %s is retried in %.0f s: %s", stage, report.data["seconds"], report.data["for"])
            self.live_state.tell(WAITS, stage, self.now(), {"for": str(report.data["for"])}, self.running)
            started_at = (
                self._outages.outage_to_report(stage, self.now())
                if report.data["after"] == AttemptState.BLOCKED
                else None
            )
            if started_at is not None:
                notice = asyncio.ensure_future(self._announce_outage(stage, str(report.data["for"]), started_at))
                self._pending_notices.add(notice)
                notice.add_done_callback(self._pending_notices.discard)
        elif report.kind is ReportKind.STARTED:
            log.info("stage %s starts", stage, extra={"pid": report.data.get("pid")})
            self._beginnings.forget(stage)
            self.live_state.clear(WAITS, stage)
        elif report.kind is ReportKind.PROGRESS:
            at = self.now()
            self.live_state.tell(PROGRESS, stage, at, self._beginnings.with_start(stage, at, report.data), self.running)

    def _publish_doing(self) -> None:
        self.live_state.tell(ACTIVITY, ACTIVITY, self.now(), {"stages": list(self.running_stages)}, self.running)

    async def _announce_outage(self, stage: str, reason: str, started_at: datetime) -> None:
        message = daemon_blocked(stage, reason, "traced doctor", started_at)
        try:
            await self.ledger.transaction(
                lambda session: announce(session, message, self.settings.notify.names, at=self.now())
            )
        except StoreError as error:
            log.warning("the notice of a blocked stage cannot be stored: %s", error)

    def _await_decisions(self, cycle: Cycle, adapters: list[str], session: Session) -> None:
        self._set_state(session, cycle, CycleState.WAITING, {"adapters": adapters})
        for name in adapters:
            gate = latest_gate(session, name)  # a new gate result is announced again
            message = approval_needed(name, gate.id if gate else cycle.id)
            announce(session, message, self.settings.notify.names, at=self.now())

    def _announce_quarantined(self, session: Session, quarantined: QuarantinedInput) -> None:
        message = input_quarantined(
            quarantined.id, quarantined.key.stage, quarantined.key.capability, quarantined.reason
        )
        announce(session, message, self.settings.notify.names, at=self.now())

    async def _fail(self, cycle: Cycle, reason: str) -> None:
        def write_failure(session: Session) -> None:
            at = self.now()
            self._set_state(session, cycle, CycleState.FAILED, {"reason": reason}, {"verdict": reason})
            announce(session, cycle_failed(cycle.id, reason, at), self.settings.notify.names, at=at)

        await self.ledger.transaction(write_failure)

    async def _mark(self, cycle: Cycle, state: CycleState) -> None:
        await self.ledger.transaction(lambda session: self._set_state(session, cycle, state, {}))

    def _mark_running(self, cycle: Cycle, session: Session) -> bool:
        """Mark the cycle as running; return False if it may no longer run."""
        # A person may have ended it, or paused the target, since it was picked.
        target_state = get_target_state(session, cycle.target)
        if target_state.paused_at is not None or get_cycle(session, cycle.id).state in ENDED_STATES:
            return False
        if target_state.cannot_begin:
            record_start_blocker(session, cycle.target, "")
        self._set_state(session, cycle, CycleState.RUNNING, {})
        return True

    def _set_state(
        self,
        session: Session,
        cycle: Cycle,
        state: CycleState,
        detail: dict[str, Any],
        summary: dict[str, Any] | None = None,
    ) -> None:
        """Store the state, unless a person has ended the cycle meanwhile."""
        if lock_cycle(session, cycle.id).state in ENDED_STATES:
            return
        set_cycle_state(session, cycle.id, state, at=self.now(), summary=summary)
        save_event(session, Event(self.now(), f"cycle {state.value}", cycle.id, cycle.id, detail))


def _quick_checks(settings: Settings) -> None:
    """Raise ``TracedError`` if the settings do not permit a cycle; the model is not loaded."""
    # Imported here because it imports the engine's client, which the service needs only now.
    from traced.pipeline.preflight import quick_checks

    raise_first(quick_checks(settings))
    check_seeds(target(settings), settings)
    check_model(settings)
    base_model(settings)


def overrides_of(cycle: Cycle) -> dict[str, Any]:
    """Return the settings that the cycle began with, as dotted keys, and its seed."""
    return _dotted(cycle.config, cycle.seed)


def _dotted(config: dict[str, Any], seed: int) -> dict[str, Any]:
    flat: dict[str, Any] = {"seed": seed}
    for section, values in with_defaults(config).items():
        if isinstance(values, dict):
            for key, value in values.items():
                if isinstance(value, dict):
                    flat |= {f"{section}.{key}.{inner}": inner_value for inner, inner_value in value.items()}
                elif (section, key) != ("target", TARGET_START):
                    flat[f"{section}.{key}"] = value
        else:
            flat[section] = values
    # Each training leases its own device.
    return flat | {"training.at_once": 1}


def as_begun(running: Settings, cycle: Cycle) -> Settings:
    """Combine the settings that the cycle began with and the current service settings; raises ``CycleChanged``."""
    try:
        settings = load_settings(running.data_dir, overrides_of(cycle))
    except ConfigError as error:
        raise CycleChanged(
            f"{cycle.id} was started with settings that this version rejects ({error}), so it cannot continue",
            hint="traced cycle start begins a new cycle; recorded results are kept",
        ) from error
    overrides = {
        name: getattr(settings, name)
        for name in Settings.model_fields
        if name not in EXCLUDED_SECTIONS or name == "seed"
    }
    # The file may have another target by now; the service has the one of its start.
    starts = {key: getattr(running.target, key) for key in START_KEYS}
    combined = running.model_copy(update={**overrides, "target": settings.target.model_copy(update=starts)})
    if configuration(combined)["target"] != with_defaults(cycle.config)["target"]:
        raise CycleChanged(
            f"{cycle.id} was started on the target {cycle.target} before its settings (target.kind, factory, python,"
            " options, trusted) or its file changed: its episodes would be those of two worlds",
            hint="traced cycle start begins a new cycle; recorded results are kept",
        )
    return combined


def _is_infrastructure_error(error: Exception) -> bool:
    """Whether the infrastructure (database unreachable, disk full) caused the error, and not the cycle."""
    return attribute_fault(JobOutcome.FAILED, describe(error), None) is FaultAttribution.INFRASTRUCTURE


def _verdict(cycle: Cycle, session: Session) -> str:
    return str(get_cycle(session, cycle.id).summary.get("verdict", ""))


def _awaits_people(session: Session, cycle: Cycle) -> bool:
    """Whether the cycle waits for decisions only: no more episodes were requested."""
    names = [version.name for version in list_adapters(session, cycle_id=cycle.id)]
    return bool(awaiting_decision(session, names)) and not pending_requests(session, cycle.id)
