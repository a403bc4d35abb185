"""The loop that does the work: which cycle is due, and one cycle at a time carried on to its next stop.

Invariants: the store says what is due, so a restart goes on where the last process stopped; a cycle that waits for a
person is carried on once nobody has to be waited for any more, or somebody asks for more episodes; a paused target
begins and carries on nothing; the settings of a cycle are those it began with, whatever was changed since.
How it fails: a cycle whose common stage is parked is failed with the reason and told; a defect fails the cycle, not the
service. A store or disk that fails is waited for: what could not be done is done at the next look. Cancelling ends the
running stage at its next safe point and leaves the cycle interrupted; what a killed stage left behind is cleared away.
Not covered: when a new cycle begins (``traced.daemon.triggers``), and who asks (``traced.api.control``).
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

from store.database import reading, session
from store.errors import StoreError
from store.records import Cycle, CycleState, Event
from store.repositories.adapters import list_adapters
from store.repositories.attempts import AttemptState, ParkedInput
from store.repositories.cycles import (
    ENDED,
    UNFINISHED,
    count_cycles,
    get_cycle,
    list_cycles,
    note_cannot_begin,
    note_start,
    save_cycle,
    set_cycle_state,
    target_standing,
)
from store.repositories.events import save_event
from store.repositories.promotions import latest_gate
from traced.client.models import DOING, PROGRESS, WAITS
from traced.config.logs import working_on
from traced.config.settings import APART, Settings, configuration, filled, load_settings
from traced.core.errors import ConfigError, CycleChanged, TracedError
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.core.signals import cancel_once
from traced.core.telemetry import span
from traced.daemon.live_state import Beginnings, Present
from traced.inference.model_files import resolve_model
from traced.jobs.retry import Ledger
from traced.llm.connection import check_model
from traced.notifications.messages import Troubles, announce, approval_needed, cycle_failed, parked, trouble
from traced.pipeline.context import Context
from traced.processes.job import Blame, Ended, Executor, Report, ReportKind, blame, describe
from traced.registry.promotion import outstanding, undecided
from traced.targets.registry import check_seeds, target

if TYPE_CHECKING:  # its imports are large, and wait for the first cycle
    from traced.pipeline.child_runner import Stations

T = TypeVar("T")
BEGINNING = "the beginning of a cycle"
LOOK_S = 5.0  # between two looks at the store when nobody wakes the loop

log = logging.getLogger(__name__)


@dataclass
class CycleLoop:
    """Works through cycles; people's acts reach into it through ``traced.api.control``."""

    settings: Settings
    store: sqlalchemy.Engine
    executor: Executor
    ledger: Ledger
    now: Callable[[], datetime]
    beat: Callable[[], object] = lambda: None  # called once per turn
    tidy: Callable[[], object] = lambda: None  # called when a cycle's stages have ended, however they did
    running: str | None = None
    doing: list[str] = field(default_factory=list)
    present: Present = field(default_factory=Present)  # how far the stages at work are
    _beginnings: Beginnings = field(default_factory=Beginnings)
    _asked: str = ""
    _awake: asyncio.Event = field(default_factory=asyncio.Event)
    _home: asyncio.AbstractEventLoop | None = None
    _work: "asyncio.Task[None] | None" = None
    _stations: "Stations | None" = None
    _troubles: Troubles = field(default_factory=Troubles)
    _telling: set["asyncio.Future[None]"] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ledger = replace(self.ledger, on_parked=self._tell_parked)

    def request_cycle(self, cause: str) -> None:
        """Begin a cycle as soon as nothing stands in the way; who asks has to ask again after a restart."""
        self._asked = cause
        self.wake()

    def wake(self) -> None:
        """Look again at what there is to do; may be called on any thread."""
        if self._home is None:
            self._awake.set()
        else:
            self._home.call_soon_threadsafe(self._awake.set)

    async def stop_cycle(self, cycle_id: str) -> None:
        """Bring the cycle's stages to an end at their next safe point; returns when they have ended."""
        if self.running == cycle_id and self._work is not None:
            cancel_once(self._work)
            await asyncio.wait({self._work})

    async def stop_training(self, cycle_id: str, capability: str, decide: Callable[[], T]) -> T:
        """What ``decide`` answers; a training at work has ended then, at its next safe point."""
        if self.running != cycle_id or self._stations is None:
            return await asyncio.to_thread(decide)
        return await self._stations.stop_training(capability, decide)

    async def run(self, draining: asyncio.Event) -> None:
        """Work until ``draining`` is set; the cycle at work is then left interrupted at its next safe point."""
        self._home = asyncio.get_running_loop()
        over = asyncio.ensure_future(draining.wait())
        try:
            while not draining.is_set():
                self.beat()
                if not await self._turn(over):
                    await self._rest(over)
        finally:
            self._home = None
            over.cancel()
            while self._telling:
                await asyncio.wait(self._telling)

    async def _turn(self, over: "asyncio.Future[Any]") -> bool:
        """Carry the cycle on that is due; False when there was nothing to do, or what surrounds the loop is broken."""
        try:
            cycle = await asyncio.to_thread(self._due)
            return cycle is not None and await self._carry_on(cycle, over)
        except Exception as error:
            if not _is_outside(error):
                raise
            log.warning("waits %.0f s for: %s", LOOK_S, error)
            return False

    async def _rest(self, over: "asyncio.Future[Any]") -> None:
        woken = asyncio.ensure_future(self._awake.wait())
        await asyncio.wait({woken, over}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        woken.cancel()
        self._awake.clear()

    async def _carry_on(self, cycle: Cycle, over: "asyncio.Future[Any]") -> bool:
        self.running = cycle.id
        self._work = asyncio.ensure_future(self._cycle(cycle))
        try:
            while not self._work.done() and not over.done():
                await asyncio.wait({self._work, over}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                self.beat()
            cancel_once(self._work)
            await asyncio.wait({self._work})
            await self._tidied()
            if not self._work.cancelled():
                self._work.result()  # the store failed: what it could not note is noted at the next turn
            return True
        finally:
            self.running, self._work, self._stations, self.doing = None, None, None, []
            self.present.clear(PROGRESS)
            self.present.clear(WAITS)
            self._tell_doing()
            self._beginnings.forget()

    async def _tidied(self) -> None:
        """``tidy``, with the loop alive meanwhile: a Docker engine that hangs makes it wait."""
        tidying = asyncio.ensure_future(asyncio.to_thread(self.tidy))
        while not tidying.done():
            await asyncio.wait({tidying}, timeout=LOOK_S)
            self.beat()
        if (error := tidying.exception()) is not None:
            log.warning("what the cycle left behind is cleared away at the next start: %s", error)

    def _due(self) -> Cycle | None:
        """The cycle to work on now; a new one is stored when one was asked for."""
        name = self.settings.target.name
        with reading(self.store) as opened:
            standing = target_standing(opened, name)
            if standing.paused_at is not None:
                return None
            unfinished = list_cycles(opened, target=name, states=UNFINISHED)
            for cycle in unfinished:
                if cycle.state is not CycleState.WAITING or not _rests(opened, cycle):
                    return cycle
        cause = standing.asked_for or self._asked
        if not cause or unfinished:
            return None
        try:
            with session(self.store) as opened:
                begun = self._begun(opened, count_cycles(opened, target=name), cause)
        except TracedError as error:
            self._cannot_begin(error, standing.cannot_begin)
            return None
        self._asked = ""  # not before it is in the store
        return begun

    def _cannot_begin(self, error: TracedError, known: str) -> None:
        """A cycle is due and something that a person can mend keeps it from beginning: shown, told after a while."""
        name, at, reason = self.settings.target.name, self.now(), str(error)
        since = self._troubles.held_up(BEGINNING, at)
        if reason != known:
            log.warning("a cycle of %s cannot begin: %s", name, reason)
        if reason != known or since is not None:
            with session(self.store) as opened:
                note_cannot_begin(opened, name, reason)
                if since is not None:
                    message = trouble(BEGINNING, reason, error.hint or "traced doctor", since)
                    announce(opened, message, self.settings.notify.names, at=at)

    def _begun(self, opened: Session, before: int, cause: str) -> Cycle:
        """A new cycle: each has a seed of its own, so that it meets tasks which the one before has not."""
        check_seeds(target(self.settings.target.name), self.settings)
        check_model(self.settings)
        name, seed, at = self.settings.target.name, self.settings.seed + before, self.now()
        model = resolve_model(self.settings.model.spec, self.settings.data_dir).name
        cycle_id = f"{name}-{at:%Y%m%dT%H%M%S}-{before + 1}"
        cycle = Cycle(cycle_id, name, model, seed, configuration(self.settings), CycleState.RUNNING, at)
        save_cycle(opened, cycle)
        note_start(opened, name, cause=cause, at=at)
        save_event(opened, Event(at, "cycle begun", cycle_id, cycle_id, {"cause": cause}))
        return cycle

    async def _cycle(self, cycle: Cycle) -> None:
        """Carry one cycle on until it ends, waits for a person, or is stopped."""
        with working_on(cycle.id):
            try:
                if not await self.ledger.once(partial(self._take_up, cycle)):
                    return
                ids = {"traced.cycle.id": cycle.id, "traced.target": cycle.target, "gen_ai.request.model": cycle.model}
                with span("traced.cycle", {**ids, "traced.cycle.seed": cycle.seed}):
                    await self._graph(cycle)
            except asyncio.CancelledError:
                await self._mark(cycle, CycleState.INTERRUPTED)
                raise
            except TracedError as error:
                if _is_outside(error):
                    raise
                await self._fail(cycle, str(error))
            except Exception as error:  # a defect ends this cycle and not the service; the log has its traceback
                if _is_outside(error):
                    raise
                log.exception("cycle %s failed", cycle.id)
                await self._fail(cycle, f"a defect of traced: {type(error).__name__}")

    async def _graph(self, cycle: Cycle) -> None:
        from traced.pipeline.child_runner import Stations
        from traced.pipeline.graph import advance, build_graph, checkpoints

        settings = as_begun(self.settings, cycle)
        model = resolve_model(settings.model.spec, settings.data_dir)
        progress = Progress(Console(quiet=True))
        context = Context(settings, self.store, target(cycle.target), model, cycle.id, progress, Meter(), now=self.now)
        self._stations = stations = Stations(
            context,
            cycle,
            overrides_of(cycle),
            self.executor,
            self.ledger,
            self._hear,
            lambda: self.settings.devices,
            self.doing,
            on_change=self._tell_doing,
        )
        async with checkpoints(settings.data_dir, settings.store_url) as saver:
            attempts = settings.synthesis.most
            graph = build_graph(
                stations.stages(),
                saver,
                attempts=attempts,
                trainings=0,  # each leases its device
                prompt_first=settings.training.prompt_first,
            )
            standing = await advance(graph, cycle.id)
        if standing.finished:
            await self._mark(cycle, CycleState.FINISHED)
        else:
            await self.ledger.once(partial(self._wait_for_people, cycle, standing.waiting))

    def _hear(self, stage: str, told: Report) -> None:
        if told.kind is ReportKind.WAITING:
            log.warning("%s waits %.0f s for: %s", stage, told.data["seconds"], told.data["for"])
            self.present.tell(WAITS, stage, self.now(), {"for": str(told.data["for"])}, self.running)
            since = self._troubles.held_up(stage, self.now()) if told.data["after"] == AttemptState.BLOCKED else None
            if since is not None:
                telling = asyncio.ensure_future(self._tell_trouble(stage, str(told.data["for"]), since))
                self._telling.add(telling)
                telling.add_done_callback(self._telling.discard)
        elif told.kind is ReportKind.STARTED:
            log.info("%s begins", stage, extra={"pid": told.data.get("pid")})
            self._beginnings.forget(stage)
            self.present.clear(WAITS, stage)
        elif told.kind is ReportKind.PROGRESS:
            at = self.now()
            self.present.tell(PROGRESS, stage, at, self._beginnings.told(stage, at, told.data), self.running)

    def _tell_doing(self) -> None:
        self.present.tell(DOING, DOING, self.now(), {"stages": list(self.doing)}, self.running)

    async def _tell_trouble(self, stage: str, reason: str, since: datetime) -> None:
        message = trouble(stage, reason, "traced doctor", since)
        try:
            await self.ledger.once(lambda opened: announce(opened, message, self.settings.notify.names, at=self.now()))
        except StoreError as error:
            log.warning("nobody can be told of it: %s", error)

    def _wait_for_people(self, cycle: Cycle, adapters: list[str], opened: Session) -> None:
        self._set(opened, cycle, CycleState.WAITING, {"adapters": adapters})
        for name in adapters:
            gate = latest_gate(opened, name)  # one that looked again is told again
            message = approval_needed(name, gate.id if gate else cycle.id)
            announce(opened, message, self.settings.notify.names, at=self.now())

    def _tell_parked(self, opened: Session, left: ParkedInput) -> None:
        message = parked(left.id, left.key.stage, left.key.capability, left.reason)
        announce(opened, message, self.settings.notify.names, at=self.now())

    async def _fail(self, cycle: Cycle, reason: str) -> None:
        def failed(opened: Session) -> None:
            at = self.now()
            self._set(opened, cycle, CycleState.FAILED, {"reason": reason})
            announce(opened, cycle_failed(cycle.id, reason, at), self.settings.notify.names, at=at)

        await self.ledger.once(failed)

    async def _mark(self, cycle: Cycle, state: CycleState) -> None:
        await self.ledger.once(lambda opened: self._set(opened, cycle, state, {}))

    def _take_up(self, cycle: Cycle, opened: Session) -> bool:
        """Whether it is still to be worked on: a person may have ended it, or paused its target, a moment ago."""
        paused = target_standing(opened, cycle.target).paused_at is not None
        if paused or get_cycle(opened, cycle.id).state in ENDED:
            return False
        self._set(opened, cycle, CycleState.RUNNING, {})
        return True

    def _set(self, opened: Session, cycle: Cycle, state: CycleState, detail: dict[str, Any]) -> None:
        """Note the state, unless a person has ended the cycle meanwhile."""
        if get_cycle(opened, cycle.id).state in ENDED:
            return
        set_cycle_state(opened, cycle.id, state, at=self.now())
        save_event(opened, Event(self.now(), f"cycle {state.value}", cycle.id, cycle.id, detail))


def overrides_of(cycle: Cycle) -> dict[str, Any]:
    """The settings that the cycle began with, dotted, and its seed."""
    flat: dict[str, Any] = {"seed": cycle.seed}
    for section, values in filled(cycle.config).items():
        if isinstance(values, dict):
            flat |= {f"{section}.{key}": value for key, value in values.items()}
        else:
            flat[section] = values
    return flat | {"training.at_once": 1}  # each training has the device that it leases to itself


def as_begun(running: Settings, cycle: Cycle) -> Settings:
    """The settings that the cycle began with, and what is no cycle's own as it is now. Raises ``CycleChanged``."""
    try:
        found = load_settings(running.data_dir, overrides_of(cycle))
    except ConfigError as error:
        raise CycleChanged(
            f"{cycle.id} began with settings that this version does not take ({error}), so it ends here",
            hint="traced cycle start; what it has recorded stays",
        ) from error
    own = {name: getattr(found, name) for name in Settings.model_fields if name not in APART or name == "seed"}
    return running.model_copy(update=own)


def _is_outside(error: Exception) -> bool:
    """Whether what surrounds the service is broken (database gone, disk full), which a person mends."""
    return blame(Ended.FAILED, describe(error), None) is Blame.SURROUNDINGS


def _rests(opened: Session, cycle: Cycle) -> bool:
    """Whether it waits for people and for nothing else: nobody has asked for more episodes."""
    names = [version.name for version in list_adapters(opened, cycle_id=cycle.id)]
    return bool(undecided(opened, names)) and not outstanding(opened, cycle.id)
