"""Episodes that people play by hand, each in a hardened container of its own.

Invariants: environment code runs in containers alone; at most ``AT_ONCE`` episodes are open, and who began one is the
only one who goes on with it. No container is left behind by an episode that is ended, that nobody has spoken to for
``idle_s``, whose environment broke, or that is open when the service stops. Messages pass one after the other. What is
told is what an agent would see, and the environment's own score at the end.
Whose terminal was lost has no id to end an episode by, so where all places are taken one of the caller's own gives way
to the next: one that is done, or else the one that waits longest, for ``away_s`` at least. Nobody's gives way to
another caller, and none that is played now: several people may come with one token.
How it fails, by whose fault: ``BadMessage`` (who plays), ``EnvironmentBroke``, ``SandboxOut`` (Docker, or the machine).
Used in one event loop. Not covered: who may play, and the audit (``Control``).
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
from traced.client.environments import Answer, CallSaid, Played, Said, ScoreView

AT_ONCE = 4
IDLE_S = 600.0
AWAY_S = 60.0  # that who plays may think about a move while others of the same caller want a place
CLOSING_S = 15.0  # that the engine has for its answers when the service stops; what is left is the next start's
ENVELOPE = 256  # bytes around a message on its way into the container

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """Who wants to play what."""

    who: str
    at: datetime
    environment: str
    source_code: str
    seed: int


@dataclass
class _Open:
    asked: Asked
    source: SandboxSource
    episode: SandboxEpisode
    spoken_at: float = 0.0  # seconds of the event loop
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    calls: int = 0
    done: bool = False
    alarm: asyncio.TimerHandle | None = None


@dataclass
class Playing:
    """The open episodes by their ids."""

    idle_s: float = IDLE_S
    away_s: float = AWAY_S
    _open: dict[str, _Open] = field(default_factory=dict)
    _starting: int = 0
    _closed: bool = False
    _ending: set[asyncio.Task[None]] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._open) + self._starting

    async def begin(self, asked: Asked, limits: SandboxLimits, owner: str) -> Played:
        """Start a container and the task instance. Raises ``Busy``, ``EnvironmentBroke`` or ``SandboxOut``."""
        gives_way = self._room(asked.who)
        self._starting += 1
        source = SandboxSource(asked.source_code, limits=limits, owner=owner)
        try:
            if gives_way:
                await self._close(gives_way)
            with _blame():
                await source.__aenter__()
                episode = source.episode()
                task = await episode.reset(asked.seed)
            if self._closed:
                raise Busy("the service is stopping")
        except BaseException:
            await _let_go(source)
            raise
        finally:
            self._starting -= 1
        name = secrets.token_hex(8)
        self._open[name] = _Open(asked, source, episode)
        self._watch(name)
        return Played(
            id=name,
            environment=asked.environment,
            seed=asked.seed,
            system=task.system,
            messages=task.messages,
            tools=task.tools,
        )

    def _room(self, who: str) -> str:
        """The caller's own episode that gives way to another, "" where there is room. Raises ``Busy``."""
        if self._closed:
            raise Busy("the service is stopping")
        if len(self) < AT_ONCE:
            return ""
        now = asyncio.get_running_loop().time()
        own = {name: one for name, one in self._open.items() if one.asked.who == who and not one.turn.locked()}
        away = [name for name, one in own.items() if one.done or now - one.spoken_at >= self.away_s]
        if away:
            return min(away, key=lambda name: (not own[name].done, own[name].spoken_at))
        whose = ", ".join(
            f"{one.asked.who} since {one.asked.at:%H:%M} UTC, {now - one.spoken_at:.0f} s without a word"
            for one in self._open.values()
        )
        raise Busy(
            f"{AT_ONCE} episodes are played already ({whose})",
            hint=f"end one, or wait: one of yours gives its place to your next after {self.away_s:g} s without a word, "
            f"anybody's ends by itself after {self.idle_s / 60:g} minutes",
        )

    async def say(self, who: str, name: str, said: Said) -> Answer:
        """Pass an assistant message on. Raises as ``begin`` does, and ``BadMessage`` or ``NoSuchThing``."""
        one = self._of(who, name)
        async with one.turn:
            if self._open.get(name) is not one:
                raise _gone(name)
            if one.done:
                raise Busy("the episode has ended", hint="end it, and begin another")
            message = _message(said, one.calls)
            _make_sure_it_fits(message, one.source.limits.message_kb * 1024)
            self._watch(name)
            try:
                with _blame():
                    step = await one.episode.step(message)
                    score = await one.episode.score() if step.done else None
            except (EnvironmentBroke, SandboxOut):
                await self._close(name)
                raise
            one.calls += len(said.calls)
            one.done = step.done
            self._watch(name)
        return Answer(sent=message, messages=step.messages, done=step.done, score=_shown(score) if score else None)

    async def end(self, who: str, name: str) -> ScoreView | None:
        """End an episode; the score as it stood, None where the environment could not say. Raises ``NoSuchThing``."""
        one = self._of(who, name)
        score = None
        with suppress(SandboxError):
            score = await one.episode.score()
        await self._close(name)
        return _shown(score) if score else None

    async def close(self, within_s: float = CLOSING_S) -> None:
        """End all, and begin no more; where the engine has not answered by then, it is not waited for any longer."""
        self._closed = True
        ends = {asyncio.create_task(self._close(name, within_s)) for name in list(self._open)} | self._ending
        if ends:
            _, late = await asyncio.wait(ends, timeout=within_s)
            if late:
                log.warning("the engine is silent: %d containers of played episodes wait for the next start", len(late))

    def _of(self, who: str, name: str) -> _Open:
        one = self._open.get(name)
        if one is None or one.asked.who != who:
            raise _gone(name)
        return one

    def _watch(self, name: str) -> None:
        """Count the idle time from now."""
        one = self._open.get(name)
        if one is None:  # it was ended while it answered
            raise _gone(name)
        if one.alarm is not None:
            one.alarm.cancel()
        loop = asyncio.get_running_loop()
        one.spoken_at, one.alarm = loop.time(), loop.call_later(self.idle_s, self._end_idle, name)

    def _end_idle(self, name: str) -> None:
        ending = asyncio.create_task(self._close(name), name=f"end of episode {name}")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _close(self, name: str, within_s: float | None = None) -> None:
        one = self._open.pop(name, None)
        if one is None:
            return
        if one.alarm is not None:
            one.alarm.cancel()
        await _let_go(one.source, within_s)


async def _let_go(source: SandboxSource, within_s: float | None = None) -> None:
    """Remove its container; where the engine is gone, the service's next sweep removes it."""
    try:
        await asyncio.shield(source.close(within_s))
    except SandboxError as error:
        log.warning("the container of a played episode may be left: %s", error)


@contextmanager
def _blame() -> Iterator[None]:
    """Whose failure a failure of the sandbox is: told once, here."""
    try:
        yield
    except (EngineDown, ImageMissing) as error:
        raise SandboxOut(f"the sandbox cannot be used: {error}", hint="traced doctor") from error
    except WorkerDied as error:
        if error.oom:
            raise EnvironmentBroke(f"the environment failed, the episode is over: {error}") from error
        raise SandboxOut(f"the container ended, the episode is over: {error}", hint="play again") from error
    except SandboxError as error:
        trace = f"\n{error.traceback}" if isinstance(error, EnvironmentFault) and error.traceback else ""
        raise EnvironmentBroke(f"the environment failed, the episode is over: {error}{trace}") from error


def _message(said: Said, calls: int) -> Message:
    """As OpenAI's form has it; raises ``BadMessage``."""
    if not said.calls:
        if not said.content:
            raise BadMessage("the message is empty: it needs a text or a tool call")
        return {"role": "assistant", "content": said.content}
    made = [_call(call, f"call_{number}") for number, call in enumerate(said.calls, calls)]
    return {"role": "assistant", "content": said.content or None, "tool_calls": made}


def _make_sure_it_fits(message: Message, most: int) -> None:
    size = len(json.dumps(message)) + ENVELOPE
    if size > most:
        raise BadMessage(f"the message has {size:,} bytes, more than the sandbox takes", hint="sandbox.message_kb")


def _call(call: CallSaid, key: str) -> dict[str, Any]:
    try:
        given = json.loads(call.arguments)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"the arguments of {call.name} are no JSON: {error}") from error
    if not isinstance(given, dict):
        raise BadMessage(f"the arguments of {call.name} are a JSON {type(given).__name__}, not an object")
    return {"id": key, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _shown(score: Score) -> ScoreView:
    return ScoreView(**asdict(score))


def _gone(name: str) -> NoSuchThing:
    return NoSuchThing(
        f"no episode {name!r} of yours is open",
        hint="it was ended, was idle for too long, or gave its place to another of yours: play again",
    )
