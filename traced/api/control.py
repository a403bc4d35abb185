"""The operations of the control API on the service: queries, start, pause, resume, cancel, decisions, played episodes.

Invariants: every action is one transaction with its audit entry and its event, and is idempotent; a request that is
repeated with its idempotency key changes nothing and gets the first response; viewers cannot act. Actions
only change the store and wake the loop, which does the work. Methods that are not coroutines may be called on any
thread. How it fails: ``ServiceError``, ``PromotionError`` and the store's errors, which the API maps to HTTP statuses.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from importlib.metadata import version
from typing import Literal

import sqlalchemy
from sqlmodel import Session

from sandbox.policy import SandboxLimits
from store.database import read_session, write_session
from store.errors import NotFound, StoreConflict, StoreError
from store.records import CycleState, RunState, TrainingRun
from store.repositories.adapters import get_training_run
from store.repositories.cycles import (
    ENDED_STATES,
    UNFINISHED_STATES,
    get_cycle,
    get_target_state,
    list_cycles,
    lock_cycle,
    pause_target,
    record_cycle_request,
    resume_target,
)
from store.repositories.environments import get_environment
from store.repositories.events import event_range, list_audit, list_events, newest_events
from store.repositories.leases import Lease, list_leases
from store.repositories.requests import begin_request, end_request, find_response
from store.text import sanitize_line
from store.types import JsonObject
from traced.api import queries
from traced.api.auth import Caller, RequestKey
from traced.api.episodes import EpisodeRequest, Episodes
from traced.api.errors import (
    BadRequest,
    Busy,
    CallerDisconnected,
    EarlierRefusal,
    NoSuchThing,
    NotAllowed,
    problem_of,
    status_of,
)
from traced.api.queries import DECISIONS, READINGS, ROLLBACKS, STREAMS, Turns, health
from traced.client.environments import Answer, EpisodeStart, PlayedEpisode, PlayedMessage
from traced.client.models import (
    DEVICES,
    EVENTS_MISSED,
    HEALTH,
    WAITS,
    AdapterView,
    AuditView,
    CycleView,
    Devices,
    Done,
    EventView,
    Problem,
    QuarantinedInputView,
    Reason,
    Role,
    Status,
    TargetView,
)
from traced.client.serving import Health
from traced.config.settings import Settings
from traced.core.errors import TracedError
from traced.core.ownership import sandbox_owner
from traced.core.reserve import with_reserve
from traced.daemon.live_state import LiveState, Sample, Watch
from traced.daemon.loop import CycleLoop
from traced.daemon.settings_changes import change
from traced.jobs.idleness import survey_devices
from traced.llm.connection import check_model
from traced.pipeline.train import TrainingStop, find_stop, stop
from traced.registry import decisions
from traced.registry.adapter_store import upload_before_traffic
from traced.registry.decision_rules import Action
from traced.registry.integrity import quarantining

REFUSALS = (404, 409)  # statuses of decisions that the state of the store does not permit
DEVICES_S, HEALTH_S = 2.0, 10.0  # sampling intervals while a listener is connected

# Roles that may act, the lowest first; "local" is the daemon's own user or root, on the Unix socket.
DECIDERS: tuple[Role, ...] = ("operator", "admin", "local")
ADMINISTRATORS: tuple[Role, ...] = ("admin", "local")

log = logging.getLogger(__name__)


@dataclass
class Control:
    """Queries and actions on one store and one cycle loop."""

    settings: Settings
    store: sqlalchemy.Engine
    loop: CycleLoop
    now: Callable[[], datetime]
    since: datetime
    state: Literal["starting", "ready", "draining"] = "starting"
    next_at: Callable[[], datetime | None] = field(default=lambda: None)
    reread: Callable[[], Settings] | None = None  # loads the current settings
    apply: Callable[[Settings], None] = field(default=lambda settings: None)  # may refuse the settings
    tell: Callable[[Settings], None] = field(default=lambda settings: None)  # informs other components
    present: LiveState = field(default_factory=LiveState)
    playing: Episodes = field(default_factory=Episodes)
    readings: Turns = field(default_factory=partial(Turns, READINGS))
    streams: Turns = field(default_factory=partial(Turns, STREAMS))
    deciding: Turns = field(default_factory=partial(Turns, DECISIONS))
    rolling_back: Turns = field(default_factory=partial(Turns, ROLLBACKS))
    survey_devices: Callable[[Sequence[Lease], Settings, datetime], Devices] = field(default=survey_devices)
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        samples = {DEVICES: Sample(self.devices, DEVICES_S), HEALTH: Sample(self.health, HEALTH_S)}
        self.watch = Watch(samples, self.present, self.now)

    @property
    def target(self) -> str:
        """The name of the target that this service works on."""
        return self.settings.target.name

    def status(self, role: Role = "local") -> Status:
        """Return the overview of the service; ``role`` is the caller's."""
        with read_session(self.store) as session:
            adapters = queries.adapters(session)
            target_state = get_target_state(session, self.target)
            return Status(
                version=version("traced"),
                pid=os.getpid(),
                since=self.since,
                data_dir=str(self.settings.data_dir),
                state=self.state,
                role=role,
                target=TargetView(**vars(target_state), next_at=self.next_at()),
                running=self.loop.running,
                doing=self.loop.running_stages,
                waits={event.subject: str(event.detail["for"]) for event in self.present.of(WAITS)},
                cycles=queries.cycles(session),
                adapters=adapters,
                waiting=queries.waiting(adapters),
                quarantined=queries.quarantined_inputs(session),
                blocked=queries.blocked_stages(session),
            )

    def cycles(self, limit: int) -> list[CycleView]:
        """Return the newest cycles."""
        with read_session(self.store) as session:
            return queries.cycles(session, limit=limit)

    def cycle(self, cycle_id: str) -> CycleView:
        """Return a cycle of any age; raises ``NotFound``."""
        with read_session(self.store) as session:
            return queries.cycle_view(session, get_cycle(session, cycle_id))

    def adapters(self) -> list[AdapterView]:
        """Return all adapter versions, oldest first."""
        with read_session(self.store) as session:
            return queries.adapters(session)

    def quarantined(self) -> list[QuarantinedInputView]:
        """Return the quarantined inputs, newest first, each with its failed attempts as evidence."""
        with read_session(self.store) as session:
            return queries.quarantined_inputs(session, with_evidence=True)

    def devices(self) -> Devices:
        """Survey the machine's devices; takes half a second."""
        with read_session(self.store) as session:
            leases = list_leases(session)
        return self.survey_devices(leases, self.settings, self.now())

    def health(self) -> Health:
        """Return the state and traffic of the router; waits for the router's response."""
        return health(self.settings.serving, self.store, self.now())

    def audit(self, limit: int) -> list[AuditView]:
        """Return the audit entries, newest first."""
        with read_session(self.store) as session:
            return [AuditView(**vars(entry)) for entry in list_audit(session, limit=limit)]

    def events(self, after: int, limit: int) -> list[EventView]:
        """Return the oldest ``limit`` events with a number above ``after``, oldest first."""
        with read_session(self.store) as session:
            return [EventView(**vars(event)) for event in list_events(session, after_seq=after, limit=limit)]

    def last_events(self, limit: int, before: int | None, kind: str, text: str) -> list[EventView]:
        """Return the newest events before a number, newest first, filtered by a prefix of the kind and by a text."""
        with read_session(self.store) as session:
            rows = newest_events(session, limit=limit, before_seq=before, kind=kind, text=text)
            return [EventView(**vars(event)) for event in rows]

    def missed(self, after: int) -> EventView | None:
        """Return the event that reports a gap to a listener that resumes after ``after``; None if there is no gap."""
        with read_session(self.store) as session:
            first, last = event_range(session)
        # ``after`` exceeds the last number if the store was restored since or is empty: start over at 0.
        if after > last:
            resume_seq, detail = 0, {"unknown": after}
        elif 0 < after < first - 1:
            resume_seq, detail = first - 1, {"from": after + 1, "to": first - 1}
        else:
            return None
        return EventView(
            seq=resume_seq, at=self.now(), kind=EVENTS_MISSED, subject=self.target, cycle_id=None, detail=detail
        )

    def start(self, caller: Caller, request: Reason) -> Done:
        """Request a cycle; an unfinished one is completed first.

        Raises ``Busy`` while a cycle runs or the target is paused, and ``LlmError`` if the settings need a language
        model that is not configured completely.
        """
        action = self._authorize(caller, request)
        check_model(self.settings)
        done = self._commit(caller, action, self._start)
        self.loop.wake()
        return done

    def _start(self, session: Session, action: Action) -> Done:
        if self.loop.running:
            raise Busy(f"cycle {self.loop.running} is running", hint="traced status")
        if get_target_state(session, self.target).paused_at is not None:
            raise Busy(f"{self.target} is paused", hint="traced resume")
        record_cycle_request(session, self.target, f"requested by {action.signature}")
        decisions.record(session, action, "start", self.target)
        unfinished = list_cycles(session, target=self.target, states=UNFINISHED_STATES, limit=1)
        condition = "".join(f" once {cycle.id} has ended (now: {cycle.state.value})" for cycle in unfinished)
        return Done(message=f"a cycle of {self.target} starts{condition}", subject=self.target)

    async def pause(self, caller: Caller, request: Reason) -> Done:
        """Pause the target and stop its running cycle at the next safe point; no cycle begins until ``resume``."""
        action = self._authorize(caller, request)
        done = await asyncio.to_thread(self._commit, caller, action, self._pause)
        # A repeated request must not stop the cycle if somebody has resumed it since.
        is_paused = await asyncio.to_thread(self._is_paused)
        if self.loop.running and is_paused:
            await self.loop.stop_cycle(self.loop.running)
        return done

    def _pause(self, session: Session, action: Action) -> Done:
        if get_target_state(session, self.target).paused_at is None:
            pause_target(session, self.target, actor=action.signature, at=action.at)
            decisions.record(session, action, "pause", self.target)
        return Done(message=f"{self.target} is paused", subject=self.target)

    def _is_paused(self) -> bool:
        with read_session(self.store) as session:
            return get_target_state(session, self.target).paused_at is not None

    def resume(self, caller: Caller, request: Reason) -> Done:
        """End a pause; an unfinished cycle continues."""
        done = self._commit(caller, self._authorize(caller, request), self._resume)
        self.loop.wake()
        return done

    def _resume(self, session: Session, action: Action) -> Done:
        if get_target_state(session, self.target).paused_at is not None:
            resume_target(session, self.target)
            decisions.record(session, action, "resume", self.target)
        return Done(message=f"{self.target} is resumed", subject=self.target)

    async def cancel(self, caller: Caller, cycle_id: str, request: Reason) -> Done:
        """Cancel an unfinished cycle, which cannot be resumed; raises ``NoSuchThing``, or ``Busy`` if it has ended."""
        action = self._authorize(caller, request)
        done = await asyncio.to_thread(self._commit, caller, action, partial(self._cancel, cycle_id=cycle_id))
        await self.loop.stop_cycle(cycle_id)
        return done

    def _cancel(self, session: Session, action: Action, cycle_id: str) -> Done:
        state = self._cycle_state(session, cycle_id)
        if state in ENDED_STATES:
            raise Busy(f"cycle {cycle_id} is already {state.value}", hint="traced status")
        return decisions.cancel(session, action, cycle_id)

    def training_at_work(self, run: TrainingRun) -> bool:
        """Whether this service runs the training now."""
        is_ours = self.loop.running == run.cycle_id and f"train {run.capability}" in self.loop.running_stages
        return is_ours and run.state is RunState.RUNNING

    async def stop_training(self, caller: Caller, run_id: str, request: Reason) -> Done:
        """Stop a training permanently at its next safe point; its cycle continues without the capability.

        Raises ``NotFound``, and ``Busy`` if the training is not running.
        """
        # The decision is stored before the process is stopped: if the service ends in between, it is not resumed.
        action = self._authorize(caller, request)
        run = await asyncio.to_thread(self._training_run, run_id)
        decide = partial(self._stop_training, action, run_id)
        decision = await self.loop.stop_training(run.cycle_id, run.capability, decide)
        is_first = decision == TrainingStop(action.signature, action.at, action.reason)
        status = "is stopped" if is_first else f"was stopped before: {decision.message}"
        outcome = await asyncio.to_thread(self._describe_outcome, run_id)
        return Done(message=f"the training of {run.capability} {status}; {outcome}", subject=run_id)

    def _training_run(self, run_id: str) -> TrainingRun:
        with read_session(self.store) as session:
            return get_training_run(session, run_id)

    def _stop_training(self, action: Action, run_id: str) -> TrainingStop:
        with write_session(self.store) as session:
            run = get_training_run(session, run_id)
            existing = find_stop(session, run.cycle_id, run.capability)
            if existing is not None:
                return existing
            if not self.training_at_work(run):
                raise Busy(f"training {run_id} is not running ({run.state.value})", hint="traced status")
            decisions.record(session, action, "stop training", run_id, cycle_id=run.cycle_id, capability=run.capability)
            return stop(session, run, actor=action.signature, at=action.at, reason=action.reason)

    def _describe_outcome(self, run_id: str) -> str:
        """Describe the state of a stopped training and of its cycle, for the response."""
        with read_session(self.store) as session:
            run = get_training_run(session, run_id)
            cycle = get_cycle(session, run.cycle_id)
            on_hold = self.state == "draining" or get_target_state(session, cycle.target).paused_at is not None
        unused = "it had already finished, but its result is not used; " if run.state is RunState.FINISHED else ""
        if cycle.state in ENDED_STATES:
            return f"{unused}{cycle.id} is {cycle.state.value}"
        return f"{unused}{cycle.id} continues without it" + (" once it is resumed" if on_hold else "")

    def decide(self, caller: Caller, request: Reason, decision: Callable[[Session, Action], Done]) -> Done:
        """Call ``decision`` of ``traced.registry.decisions``, and wake the loop, because a cycle may wait for it."""
        done = self._commit(caller, self._authorize(caller, request), decision)
        self.loop.wake()
        return done

    def roll_back(self, caller: Caller, request: Reason, decision: Callable[[Session, Action], Done]) -> Done:
        """Call ``decide``; on a full disk the space that is reserved for it is freed."""
        return with_reserve(self.settings.store_url, partial(self.decide, caller, request, decision))

    def _commit(self, caller: Caller, action: Action, change: Callable[[Session, Action], Done]) -> Done:
        """Call ``change`` in a transaction; a repetition of its request gets the first response or refusal instead.

        Raises ``BadRequest`` if the request's key belongs to another request.
        """
        key = caller.request
        if key is not None and (first := self._first_response(key, action)) is not None:
            return first
        try:
            with self._quarantining(), write_session(self.store) as session:
                if key is not None and (response := self._reserve(session, key, action)) is not None:
                    return _answer(response, action)
                done = change(session, action)
                if key is not None:
                    end_request(session, key.key, done.model_dump(mode="json"))
        except (TracedError, StoreError) as error:
            # A refusal is an answer too: a repetition that arrives late must not be carried out.
            if key is None or isinstance(error, EarlierRefusal) or status_of(error) not in REFUSALS:
                raise
            response = self._refuse(key, action, error)
            if response is None:
                raise
            return _answer(response, action)
        return done

    def _first_response(self, key: RequestKey, action: Action) -> Done | None:
        """Return the response of a request that was carried out before, or raise its refusal; waits for no writer."""
        with _one_request_per_key(), read_session(self.store) as session:
            response = find_response(session, key.key, key.digest)
        return None if response is None else _answer(response, action)

    def _reserve(self, session: Session, key: RequestKey, action: Action) -> JsonObject | None:
        with _one_request_per_key():
            return begin_request(session, key.key, key.digest, at=action.at)

    def _refuse(self, key: RequestKey, action: Action, error: Exception) -> JsonObject | None:
        """Store the refusal of a request; return the response if a repetition has been carried out in the meantime."""
        with write_session(self.store) as session:
            response = self._reserve(session, key, action)
            if response is None:
                refusal = problem_of(error).model_dump()
                end_request(session, key.key, {"refusal": refusal, "status": status_of(error)})
        return response

    def approve(
        self, caller: Caller, request: Reason, adapter: str, decision: Callable[[Session, Action], Done]
    ) -> Done:
        """Upload an adapter version if ``serving.adapters_root`` is a URL, then call ``decide``."""
        action = self._authorize(caller, request)
        # A repeated request gets its response also while the object store does not answer.
        if caller.request is not None and (first := self._first_response(caller.request, action)) is not None:
            return first
        with self._quarantining():
            upload_before_traffic(self.settings.serving.adapters_root, self.store, [adapter])
        return self.decide(caller, request, decision)

    async def play(
        self, caller: Caller, environment: str, request: EpisodeStart, disconnected: Callable[[], Awaitable[bool]]
    ) -> PlayedEpisode:
        """Begin an episode that a person plays.

        Raises ``NotFound``, ``CallerDisconnected``, and the errors of ``traced.api.episodes.Episodes.begin``.
        """
        action = self._authorize(caller, request)
        source = await asyncio.to_thread(self._source, environment)
        limits = SandboxLimits(**self.settings.sandbox.model_dump())
        owner = sandbox_owner(self.settings.data_dir)
        episode = await self.playing.begin(
            EpisodeRequest(caller.who, action.at, environment, source, request.seed), limits, owner
        )
        try:
            await asyncio.to_thread(self._audit_play, action, episode)
            # Only the disconnected caller has the id of the episode, so otherwise only the idle timer could end it.
            if await disconnected():
                raise CallerDisconnected(f"whoever began episode {episode.id} has gone, so it is ended")
        except BaseException:
            await self.playing.end(caller.who, episode.id)
            raise
        return episode

    def _source(self, environment: str) -> str:
        with read_session(self.store) as session:
            return get_environment(session, environment).source_code

    def _audit_play(self, action: Action, episode: PlayedEpisode) -> None:
        with write_session(self.store) as session:
            decisions.record(session, action, "play", episode.environment, seed=episode.seed, episode=episode.id)

    async def say(self, caller: Caller, episode: str, message: PlayedMessage) -> Answer:
        """Send a message of the player; raises the errors of ``traced.api.episodes.Episodes.say``."""
        self._authorize(caller, Reason())
        return await self.playing.say(caller.who, episode, message)

    async def end_play(self, caller: Caller, episode: str, request: Reason) -> Done:
        """End an episode and report its score; raises ``NoSuchThing``."""
        self._authorize(caller, request)
        score = await self.playing.end(caller.who, episode)
        score_text = f"; reward {score.reward:g}, {'success' if score.success else 'no success'}" if score else ""
        detail = {"score": score.model_dump()} if score else {}
        return Done(message=f"the episode has ended{score_text}", subject=episode, detail=detail)

    def reload(self, caller: Caller, request: Reason) -> Done:
        """Reload the settings; errors of reading them are raised, and then the previous settings stay in use."""
        action = self._authorize(caller, request, ADMINISTRATORS)
        changes = change(self.settings, self.reread() if self.reread else self.settings)
        with write_session(self.store) as session:
            self.apply(changes.settings)
            if changes.changed:
                decisions.record(session, action, "reload", "settings", changed=changes.changed)
        self.settings = self.loop.settings = changes.settings
        self.tell(changes.settings)
        for key in changes.needs_restart:
            log.warning("%s was changed and needs a restart; the previous value remains in force", key)
        log.info("settings reloaded", extra={"changed": changes.changed})
        self.loop.wake()
        changed = f"changed: {', '.join(changes.changed) or 'nothing'}"
        waiting = f"; after a restart: {', '.join(changes.needs_restart)}" if changes.needs_restart else ""
        return Done(
            message=f"the settings were reloaded; {changed}{waiting}",
            subject="settings",
            detail={"changed": changes.changed, "refused": changes.needs_restart},
        )

    def _quarantining(self) -> AbstractContextManager[None]:
        return quarantining(self.store, self.settings.notify.names, self.now)

    def _authorize(self, caller: Caller, request: Reason, roles: Sequence[Role] = DECIDERS) -> Action:
        if caller.role not in roles:
            raise NotAllowed(
                f"the role of {caller.who} is {caller.role}; this needs the role {roles[0]}",
                hint=f"traced tokens add NAME --role {roles[0]}",
            )
        on_behalf_of = "" if request.who == caller.who else request.who
        return Action(caller.who, caller.role, self.now(), request.reason, on_behalf_of)

    def _cycle_state(self, session: Session, cycle_id: str) -> CycleState:
        try:
            return lock_cycle(session, cycle_id).state
        except NotFound as error:
            raise NoSuchThing(f"there is no cycle {cycle_id!r}", hint="traced status") from error


def _answer(response: JsonObject, action: Action) -> Done:
    """Return the stored response of a repeated request, or raise its refusal."""
    log.info("repeated request of %s, nothing changes", sanitize_line(action.signature))
    if "refusal" in response:
        refusal = Problem.model_validate(response["refusal"])
        raise EarlierRefusal(refusal.message, hint=refusal.hint, kind=refusal.type, status=response["status"])
    return Done.model_validate(response)


@contextmanager
def _one_request_per_key() -> Iterator[None]:
    try:
        yield
    except StoreConflict as error:
        raise BadRequest(str(error), hint="Idempotency-Key") from error
