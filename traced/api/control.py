"""What people ask of the service: look, start, pause, resume, cancel, and the decisions of
``traced.registry.decisions``.

Invariants: every act is one transaction with its audit entry and its event, and repeating it changes nothing; a
read-only caller looks and nothing more. An act that lets the cycle go on (a decision, a start, resume) wakes the loop;
the loop, and not the act, does the work. Any thread may call one, but for those that are awaited.
How it fails: ``ServiceError``, PromotionError and the store's errors, which the API turns into answers.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from importlib.metadata import version
from typing import Literal

import sqlalchemy
from sqlmodel import Session

from sandbox.policy import SandboxLimits
from store.database import reading, session
from store.errors import NotFound
from store.records import CycleState, RunState, TrainingRun
from store.repositories.adapters import get_training_run
from store.repositories.cycles import (
    ENDED,
    UNFINISHED,
    ask_for_cycle,
    get_cycle,
    list_cycles,
    pause_target,
    resume_target,
    set_cycle_state,
    target_standing,
)
from store.repositories.environments import get_environment
from store.repositories.events import list_audit, list_events, newest_events, span
from store.repositories.leases import Lease, list_leases
from traced.api import queries
from traced.api.auth import Caller
from traced.api.episodes import Asked, Playing
from traced.api.errors import Busy, CallerGone, NoSuchThing, NotAllowed
from traced.api.queries import READINGS, STREAMS, Turns, health
from traced.client.environments import Answer, Begin, Played, Said
from traced.client.models import (
    DEVICES,
    HEALTH,
    MISSED,
    AdapterView,
    AuditView,
    CycleView,
    Devices,
    Done,
    EventView,
    ParkedView,
    Reason,
    Role,
    Status,
    TargetView,
)
from traced.client.serving import Health
from traced.config.service_sections import DevicesSection
from traced.config.settings import Settings
from traced.core.ownership import sandbox_owner
from traced.daemon.live_state import Present, Sample, Watch
from traced.daemon.loop import CycleLoop
from traced.daemon.settings_changes import change
from traced.jobs.idleness import look
from traced.llm.connection import check_model
from traced.pipeline.train import Stopped, stop, stopped
from traced.registry import decisions
from traced.registry.decisions import Act

DEVICES_S, HEALTH_S = 2.0, 10.0  # between two looks, while somebody watches

log = logging.getLogger(__name__)


@dataclass
class Control:
    """The acts, on one store and one loop."""

    settings: Settings
    store: sqlalchemy.Engine
    loop: CycleLoop
    now: Callable[[], datetime]
    since: datetime
    state: Literal["starting", "ready", "draining"] = "starting"
    next_at: Callable[[], datetime | None] = field(default=lambda: None)
    reread: Callable[[], Settings] | None = None  # the settings as they are written now
    apply: Callable[[Settings], list[str]] = field(default=lambda settings: [])  # says what else it read again
    tell: Callable[[Settings], None] = field(default=lambda settings: None)  # who else follows the settings
    present: Present = field(default_factory=Present)
    playing: Playing = field(default_factory=Playing)
    readings: Turns = field(default_factory=partial(Turns, READINGS))
    streams: Turns = field(default_factory=partial(Turns, STREAMS))
    look: Callable[[Sequence[Lease], DevicesSection, datetime], Devices] = field(default=look)
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        samples = {DEVICES: Sample(self.devices, DEVICES_S), HEALTH: Sample(self.health, HEALTH_S)}
        self.watch = Watch(samples, self.present, self.now)

    @property
    def target(self) -> str:
        """The name of the target that this service works on."""
        return self.settings.target.name

    def status(self, role: Role = "local") -> Status:
        """The service at a glance, for somebody of this role."""
        with reading(self.store) as opened:
            shown = queries.adapters(opened)
            standing = target_standing(opened, self.target)
            return Status(
                version=version("traced"),
                pid=os.getpid(),
                since=self.since,
                data_dir=str(self.settings.data_dir),
                state=self.state,
                role=role,
                target=TargetView(**vars(standing), next_at=self.next_at()),
                running=self.loop.running,
                doing=self.loop.doing,
                cycles=queries.cycles(opened),
                adapters=shown,
                waiting=queries.waiting(shown),
                parked=queries.parked(opened),
                held_up=queries.held_up(opened),
            )

    def cycles(self, limit: int) -> list[CycleView]:
        """The newest cycles."""
        with reading(self.store) as opened:
            return queries.cycles(opened, limit=limit)

    def cycle(self, cycle_id: str) -> CycleView:
        """One cycle, however old. Raises NotFound."""
        with reading(self.store) as opened:
            return queries.cycle_view(opened, get_cycle(opened, cycle_id))

    def adapters(self) -> list[AdapterView]:
        """All adapter versions."""
        with reading(self.store) as opened:
            return queries.adapters(opened)

    def parked(self) -> list[ParkedView]:
        """Inputs that are left aside, with the attempts that led to it."""
        with reading(self.store) as opened:
            return queries.parked(opened, with_evidence=True)

    def devices(self) -> Devices:
        """The machine's devices; takes half a second."""
        with reading(self.store) as opened:
            leases = list_leases(opened)
        return self.look(leases, self.settings.devices, self.now())

    def health(self) -> Health:
        """The router and its traffic; waits for the router's own answer."""
        return health(self.settings.serving, self.store, self.now())

    def audit(self, limit: int) -> list[AuditView]:
        """What was decided, newest first."""
        with reading(self.store) as opened:
            return [AuditView(**vars(entry)) for entry in list_audit(opened, limit=limit)]

    def events(self, after: int, limit: int) -> list[EventView]:
        """Events with a number above ``after``."""
        with reading(self.store) as opened:
            return [EventView(**vars(event)) for event in list_events(opened, after=after, limit=limit)]

    def last_events(self, limit: int, before: int | None, kind: str, text: str) -> list[EventView]:
        """The newest events before a number whose kind begins so and that hold the text, newest first."""
        with reading(self.store) as opened:
            found = newest_events(opened, limit=limit, before=before, kind=kind, text=text)
            return [EventView(**vars(event)) for event in found]

    def missed(self, after: int) -> EventView | None:
        """What tells who resumes after ``after`` that some events behind it are kept no more; None when all are."""
        with reading(self.store) as opened:
            oldest, newest = span(opened)
        if after > newest:  # of a store that was restored since, or that keeps none: from 0 again
            seen, detail = 0, {"unknown": after}
        elif 0 < after < oldest - 1:
            seen, detail = oldest - 1, {"from": after + 1, "to": oldest - 1}
        else:
            return None
        return EventView(seq=seen, at=self.now(), kind=MISSED, subject=self.target, cycle_id=None, detail=detail)

    def start(self, caller: Caller, asked: Reason) -> Done:
        """Ask for a cycle; one that waits for people comes first. Raises ``Busy`` while one is at work, or paused,
        and ``LlmError`` where it would have no language model to ask."""
        act = self._act(caller, asked)
        check_model(self.settings)
        with session(self.store) as opened:
            if self.loop.running:
                raise Busy(f"cycle {self.loop.running} is at work", hint="traced status")
            if target_standing(opened, self.target).paused_at is not None:
                raise Busy(f"{self.target} is paused", hint="traced resume")
            ask_for_cycle(opened, self.target, f"asked for by {act.who}")
            decisions.note(opened, act, "start", self.target)
            before = list_cycles(opened, target=self.target, states=UNFINISHED, limit=1)
        self.loop.wake()
        when = "".join(f" once {cycle.id} has ended (now: {cycle.state.value})" for cycle in before)
        return Done(said=f"a cycle of {self.target} begins{when}", subject=self.target)

    async def pause(self, caller: Caller, asked: Reason) -> Done:
        """Stop the cycle at work at its next safe point, and begin none until ``resume``."""
        await asyncio.to_thread(self._pause, self._act(caller, asked))
        if self.loop.running:
            await self.loop.stop_cycle(self.loop.running)
        return Done(said=f"{self.target} is paused", subject=self.target)

    def _pause(self, act: Act) -> None:
        with session(self.store) as opened:
            if target_standing(opened, self.target).paused_at is None:
                pause_target(opened, self.target, who=act.who, at=act.at)
                decisions.note(opened, act, "pause", self.target)

    def resume(self, caller: Caller, asked: Reason) -> Done:
        """Go on after a pause; an unfinished cycle is carried on."""
        act = self._act(caller, asked)
        with session(self.store) as opened:
            if target_standing(opened, self.target).paused_at is not None:
                resume_target(opened, self.target)
                decisions.note(opened, act, "resume", self.target)
        self.loop.wake()
        return Done(said=f"{self.target} goes on", subject=self.target)

    async def cancel(self, caller: Caller, cycle_id: str, asked: Reason) -> Done:
        """End an unfinished cycle for good. Raises ``NoSuchThing``, or ``Busy`` when it has ended."""
        await asyncio.to_thread(self._cancel, self._act(caller, asked), cycle_id)
        await self.loop.stop_cycle(cycle_id)
        return Done(said=f"{cycle_id} is cancelled", subject=cycle_id)

    def _cancel(self, act: Act, cycle_id: str) -> None:
        with session(self.store) as opened:
            state = self._cycle_state(opened, cycle_id)
            if state in ENDED:
                raise Busy(f"cycle {cycle_id} is {state.value} already", hint="traced status")
            set_cycle_state(opened, cycle_id, CycleState.CANCELLED, at=act.at)
            decisions.note(opened, act, "cancel", cycle_id, cycle_id=cycle_id)

    def training_at_work(self, run: TrainingRun) -> bool:
        """Whether this service has the run's process at work."""
        here = self.loop.running == run.cycle_id and f"train {run.capability}" in self.loop.doing
        return here and run.state is RunState.RUNNING

    async def stop_training(self, caller: Caller, run_id: str, asked: Reason) -> Done:
        """End a training for good at its next safe point; its cycle goes on without its capability.

        Decided before it is done: whatever ends the cycle or the service meanwhile, the training is not taken up again.
        Raises NotFound, and ``Busy`` if it is not at work.
        """
        act = self._act(caller, asked)
        run = await asyncio.to_thread(self._training_run, run_id)
        decide = partial(self._stop_training, act, run_id)
        decided = await self.loop.stop_training(run.cycle_id, run.capability, decide)
        first = decided == Stopped(act.who, act.at, act.reason)
        stands = "is stopped" if first else f"was stopped before: {decided.why}"
        became = await asyncio.to_thread(self._became_of, run_id)
        return Done(said=f"the training of {run.capability} {stands}; {became}", subject=run_id)

    def _training_run(self, run_id: str) -> TrainingRun:
        with reading(self.store) as opened:
            return get_training_run(opened, run_id)

    def _stop_training(self, act: Act, run_id: str) -> Stopped:
        with session(self.store) as opened:
            run = get_training_run(opened, run_id)
            before = stopped(opened, run.cycle_id, run.capability)
            if before is not None:
                return before
            if not self.training_at_work(run):
                raise Busy(f"training {run_id} is not at work ({run.state.value})", hint="traced status")
            decisions.note(opened, act, "stop training", run_id, cycle_id=run.cycle_id, capability=run.capability)
            return stop(opened, run, **act.signed)

    def _became_of(self, run_id: str) -> str:
        """What a training that was stopped has come to, and its cycle."""
        with reading(self.store) as opened:
            run = get_training_run(opened, run_id)
            cycle = get_cycle(opened, run.cycle_id)
            held = self.state == "draining" or target_standing(opened, cycle.target).paused_at is not None
        unused = "it had come to its end by then, which nothing is made of; " if run.state is RunState.FINISHED else ""
        if cycle.state in ENDED:
            return f"{unused}{cycle.id} is {cycle.state.value}"
        return f"{unused}{cycle.id} goes on without it" + (" once it is carried on" if held else "")

    def decide(self, caller: Caller, asked: Reason, decision: Callable[[Session, Act], Done]) -> Done:
        """Make one of ``traced.registry.decisions``' decisions; the cycle that waited for it goes on."""
        act = self._act(caller, asked)
        with session(self.store) as opened:
            done = decision(opened, act)
        self.loop.wake()
        return done

    async def play(self, caller: Caller, environment: str, asked: Begin, gone: Callable[[], Awaitable[bool]]) -> Played:
        """Begin an episode by hand; one whose caller is ``gone`` by then ends, for nobody else has its id.

        Raises NotFound, ``CallerGone``, and as ``Playing.begin`` does.
        """
        act = self._act(caller, asked)
        source = await asyncio.to_thread(self._source, environment)
        limits = SandboxLimits(**self.settings.sandbox.model_dump())
        owner = sandbox_owner(self.settings.data_dir)
        played = await self.playing.begin(Asked(caller.who, act.at, environment, source, asked.seed), limits, owner)
        try:
            await asyncio.to_thread(self._note_play, act, played)
            if await gone():
                raise CallerGone(f"whoever began episode {played.id} has gone, so it is ended")
        except BaseException:
            await self.playing.end(caller.who, played.id)
            raise
        return played

    def _source(self, environment: str) -> str:
        with reading(self.store) as opened:
            return get_environment(opened, environment).source_code

    def _note_play(self, act: Act, played: Played) -> None:
        with session(self.store) as opened:
            decisions.note(opened, act, "play", played.environment, seed=played.seed, episode=played.id)

    async def say(self, caller: Caller, episode: str, said: Said) -> Answer:
        """Go on with an episode. Raises as ``Playing.say`` does."""
        self._act(caller, Reason())
        return await self.playing.say(caller.who, episode, said)

    async def end_play(self, caller: Caller, episode: str, asked: Reason) -> Done:
        """End an episode, with the score as it stood. Raises ``NoSuchThing``."""
        self._act(caller, asked)
        score = await self.playing.end(caller.who, episode)
        stood = f"; reward {score.reward:g}, {'success' if score.success else 'no success'}" if score else ""
        detail = {"score": score.model_dump()} if score else {}
        return Done(said=f"the episode is over{stood}", subject=episode, detail=detail)

    def reload(self, caller: Caller, asked: Reason) -> Done:
        """Read the settings again. Raises what reading them raises; the old ones stay in force then."""
        act = self._act(caller, asked)
        found = change(self.settings, self.reread() if self.reread else self.settings)
        with session(self.store) as opened:
            again = self.apply(found.settings)
            if found.changed or again:
                decisions.note(opened, act, "reload", "settings", changed=found.changed, read_again=again)
        self.settings = self.loop.settings = found.settings
        self.tell(found.settings)
        for key in found.refused:
            log.warning("%s was changed and needs a restart; the old value stays in force", key)
        log.info("settings read again", extra={"changed": found.changed, "read_again": again})
        self.loop.wake()
        changed = f"changed: {', '.join([*found.changed, *again]) or 'nothing'}"
        waiting = f"; after a restart: {', '.join(found.refused)}" if found.refused else ""
        return Done(
            said=f"the settings were read again; {changed}{waiting}",
            subject="settings",
            detail={"changed": found.changed, "read_again": again, "refused": found.refused},
        )

    def _act(self, caller: Caller, asked: Reason) -> Act:
        if caller.role == "read-only":
            raise NotAllowed("a read-only token looks and changes nothing", hint="use an operator token")
        who = asked.who or caller.who
        return Act(who, caller.role, self.now(), asked.reason, by="" if who == caller.who else caller.who)

    def _cycle_state(self, opened: Session, cycle_id: str) -> CycleState:
        try:
            return get_cycle(opened, cycle_id).state
        except NotFound as error:
            raise NoSuchThing(f"there is no cycle {cycle_id!r}", hint="traced status") from error
