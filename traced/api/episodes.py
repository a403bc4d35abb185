"""Episodes that people play by hand, each in its own hardened container.

Invariants: at most ``AT_ONCE`` episodes are open, each usable by its creator alone; messages of an episode are handled
one after the other; no container outlives its episode (ended, idle for ``idle_s``, environment failed, service stops).
How it fails, by fault: ``BadMessage`` (player), ``EnvironmentBroke`` (environment), ``SandboxOut`` (Docker or machine).
``Episodes`` belongs to one event loop. Not covered: authorization and audit (``traced.api.control``).
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from sandbox.client import SandboxEpisode, SandboxSource
from sandbox.contract import Message, Score
from sandbox.errors import EngineDown, EnvironmentFault, ImageMissing, SandboxError, WorkerDied
from sandbox.policy import SandboxLimits
from traced.api.errors import BadMessage, Busy, EnvironmentBroke, NoSuchThing, SandboxOut
from traced.client.environments import Answer, PlayedCall, PlayedEpisode, PlayedMessage, ScoreView

AT_ONCE = 4
IDLE_S = 600.0
AWAY_S = 60.0  # idle time after which an episode may be evicted by a new one of the same caller
CLOSING_S = 15.0  # time limit for removing containers at shutdown; the next start removes the rest
ENVELOPE = 256  # bytes that the protocol adds to a message to the container

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeRequest:
    """A request to play an environment."""

    actor: str
    at: datetime
    environment: str
    source_code: str
    seed: int


@dataclass
class _OpenEpisode:
    request: EpisodeRequest
    source: SandboxSource
    episode: SandboxEpisode
    last_message_at: float = 0.0  # seconds, by the clock of the event loop
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    calls: int = 0
    done: bool = False
    idle_timer: asyncio.TimerHandle | None = None


@dataclass
class Episodes:
    """The open episodes."""

    idle_s: float = IDLE_S
    away_s: float = AWAY_S
    _open: dict[str, _OpenEpisode] = field(default_factory=dict)
    _starting: int = 0
    _closed: bool = False
    _closing_tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._open) + self._starting

    async def begin(self, request: EpisodeRequest, limits: SandboxLimits, owner: str) -> PlayedEpisode:
        """Start a container and reset its environment; raises ``Busy``, ``EnvironmentBroke`` or ``SandboxOut``."""
        evicted = self._episode_to_evict(request.actor)
        self._starting += 1
        source = SandboxSource(request.source_code, limits=limits, owner=owner)
        try:
            if evicted:
                await self._close(evicted)
            with _attribute_faults():
                await source.__aenter__()
                episode = source.episode()
                task = await episode.reset(request.seed)
            if self._closed:
                raise Busy("the service is stopping")
        except BaseException:
            await _remove_container(source)
            raise
        finally:
            self._starting -= 1
        episode_id = secrets.token_hex(8)
        self._open[episode_id] = _OpenEpisode(request, source, episode)
        self._restart_idle_timer(episode_id)
        return PlayedEpisode(
            id=episode_id,
            environment=request.environment,
            seed=request.seed,
            system=task.system,
            messages=task.messages,
            tools=task.tools,
        )

    def _episode_to_evict(self, actor: str) -> str:
        """Return the id of the caller's episode to end first, "" if another may be opened; raises ``Busy``."""
        if self._closed:
            raise Busy("the service is stopping")
        if len(self) < AT_ONCE:
            return ""
        now = asyncio.get_running_loop().time()
        # Only the caller's own episodes: a closed terminal leaves an episode whose id nobody has. Several people may
        # share a token, so an episode that is being played (locked, or not idle for away_s) stays.
        candidates = {
            name: entry
            for name, entry in self._open.items()
            if entry.request.actor == actor and not entry.turn.locked()
        }
        idle = [name for name, entry in candidates.items() if entry.done or now - entry.last_message_at >= self.away_s]
        if idle:
            return min(idle, key=lambda name: (not candidates[name].done, candidates[name].last_message_at))
        players = ", ".join(
            f"{entry.request.actor} since {entry.request.at:%H:%M} UTC, "
            f"last message {now - entry.last_message_at:.0f} s ago"
            for entry in self._open.values()
        )
        raise Busy(
            f"the maximum of {AT_ONCE} played episodes is reached ({players})",
            hint=f"end one, or wait: without a message, your own episode is replaced after {self.away_s:g} s, "
            f"any other ends after {self.idle_s / 60:g} minutes",
        )

    async def say(self, actor: str, episode_id: str, move: PlayedMessage) -> Answer:
        """Send an assistant message; raises the errors of ``begin``, ``BadMessage`` or ``NoSuchThing``."""
        entry = self._get(actor, episode_id)
        async with entry.turn:
            # The episode may have been ended while this call waited for the lock.
            if self._open.get(episode_id) is not entry:
                raise _not_open(episode_id)
            if entry.done:
                raise Busy("the episode has ended", hint="start a new episode")
            message = _message(move, entry.calls)
            _check_size(message, entry.source.limits.message_kb * 1024)
            self._restart_idle_timer(episode_id)
            try:
                with _attribute_faults():
                    step = await entry.episode.step(message)
                    score = await entry.episode.score() if step.done else None
            except (EnvironmentBroke, SandboxOut):
                await self._close(episode_id)
                raise
            entry.calls += len(move.calls)
            entry.done = step.done
            self._restart_idle_timer(episode_id)
        return Answer(sent=message, messages=step.messages, done=step.done, score=_score_view(score) if score else None)

    async def end(self, actor: str, episode_id: str) -> ScoreView | None:
        """End an episode and return its score, None if the environment fails to score; raises ``NoSuchThing``."""
        entry = self._get(actor, episode_id)
        score = None
        with suppress(SandboxError):
            score = await entry.episode.score()
        await self._close(episode_id)
        return _score_view(score) if score else None

    async def close(self, within_s: float = CLOSING_S) -> None:
        """End all episodes within ``within_s`` and refuse new ones."""
        self._closed = True
        tasks = {asyncio.create_task(self._close(name, within_s)) for name in list(self._open)} | self._closing_tasks
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=within_s)
            if pending:
                log.warning(
                    "the Docker engine does not answer: %d containers of played episodes are removed at the next start",
                    len(pending),
                )

    def _get(self, actor: str, episode_id: str) -> _OpenEpisode:
        entry = self._open.get(episode_id)
        if entry is None or entry.request.actor != actor:
            raise _not_open(episode_id)
        return entry

    def _restart_idle_timer(self, episode_id: str) -> None:
        """Restart the idle timer; raises ``NoSuchThing`` if the episode was ended meanwhile."""
        entry = self._open.get(episode_id)
        if entry is None:  # the episode was ended during the step
            raise _not_open(episode_id)
        if entry.idle_timer is not None:
            entry.idle_timer.cancel()
        loop = asyncio.get_running_loop()
        entry.last_message_at, entry.idle_timer = loop.time(), loop.call_later(self.idle_s, self._end_idle, episode_id)

    def _end_idle(self, episode_id: str) -> None:
        task = asyncio.create_task(self._close(episode_id), name=f"end of episode {episode_id}")
        self._closing_tasks.add(task)
        task.add_done_callback(self._closing_tasks.discard)

    async def _close(self, episode_id: str, within_s: float | None = None) -> None:
        entry = self._open.pop(episode_id, None)
        if entry is None:
            return
        if entry.idle_timer is not None:
            entry.idle_timer.cancel()
        await _remove_container(entry.source, within_s)


async def _remove_container(source: SandboxSource, within_s: float | None = None) -> None:
    """Remove the container; if Docker does not answer, the service's next sweep removes it."""
    # Shielded: a cancelled request must not leave a container behind.
    try:
        await asyncio.shield(source.close(within_s))
    except SandboxError as error:
        log.warning("the container of a played episode may not have been removed: %s", error)


@contextmanager
def _attribute_faults() -> Iterator[None]:
    """Attribute a sandbox failure to the environment or to the sandbox."""
    try:
        yield
    except (EngineDown, ImageMissing) as error:
        raise SandboxOut(f"the sandbox cannot be used: {error}", hint="traced doctor") from error
    except WorkerDied as error:
        # Out of memory is the environment's fault, any other death of the worker is not.
        if error.oom:
            raise EnvironmentBroke(f"the environment failed and the episode ended: {error}") from error
        raise SandboxOut(f"the container stopped and the episode ended: {error}", hint="start a new episode") from error
    except SandboxError as error:
        trace = f"\n{error.traceback}" if isinstance(error, EnvironmentFault) and error.traceback else ""
        raise EnvironmentBroke(f"the environment failed and the episode ended: {error}{trace}") from error


def _message(move: PlayedMessage, calls: int) -> Message:
    """Convert to an assistant message in OpenAI's format; raises ``BadMessage``."""
    if not move.calls:
        if not move.content:
            raise BadMessage("the message is empty; send a text or a tool call")
        return {"role": "assistant", "content": move.content}
    tool_calls = [_tool_call(call, f"call_{number}") for number, call in enumerate(move.calls, calls)]
    return {"role": "assistant", "content": move.content or None, "tool_calls": tool_calls}


def _check_size(message: Message, limit: int) -> None:
    size = len(json.dumps(message)) + ENVELOPE
    if size > limit:
        raise BadMessage(f"the message has {size:,} bytes, more than the limit", hint="raise sandbox.message_kb")


def _tool_call(call: PlayedCall, call_id: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"the arguments of {call.name} are not valid JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise BadMessage(f"the arguments of {call.name} are a JSON {type(arguments).__name__}, not an object")
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _score_view(score: Score) -> ScoreView:
    return ScoreView(**asdict(score))


def _not_open(name: str) -> NoSuchThing:
    return NoSuchThing(
        f"you have no open episode {name!r}",
        hint="it has ended, was idle too long or was replaced by your next one; start a new episode",
    )
