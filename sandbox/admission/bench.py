"""The bench that checks work at: two containers of the candidate, a panel of seeds, and ways to play an episode.

The panel is drawn from the environment's hash, so that no source can know the seeds it is probed with: every other seed
over 31 bits, the rest from the low numbers that training and gates use.
A play that fails raises the SandboxError with its seed noted; siblings started with it are cancelled. All plays of the
oracle are kept, and together at most ``KEPT_BYTES``: EnvironmentFault beyond.
"""

import asyncio
import random
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sandbox.admission.policies import Policy
from sandbox.admission.thresholds import Thresholds
from sandbox.client import SandboxEpisode, SandboxSource
from sandbox.contract import Message, Score, Task, Tool
from sandbox.errors import EnvironmentFault, SandboxError
from sandbox.hashing import environment_hash
from sandbox.wire import OraclePlay

T = TypeVar("T")

LOW_SEEDS = 200_000
KEPT_BYTES = 64 * 1024 * 1024  # of 200 episodes: 80,000 tokens in each of them


@dataclass
class Bench:
    """What every check may use. ``twin`` runs the same source in another process, under training's hash seed."""

    source: SandboxSource
    twin: SandboxSource
    thresholds: Thresholds
    target_tools: list[Tool] | None  # None: there is no target to compare with
    target_error_examples: list[str]
    plays: dict[int, OraclePlay] = field(default_factory=dict)
    kept: int = 0  # bytes of these
    playing: asyncio.Lock = field(default_factory=asyncio.Lock)  # checks that run at once play no seed twice

    def panel(self, count: int) -> list[int]:
        """The first ``count`` probing seeds, the same every time for this source."""
        rng = random.Random(environment_hash(self.source.source_code))
        seeds: dict[int, None] = {}
        while len(seeds) < count:
            seeds[rng.randrange(2**31 if len(seeds) % 2 else LOW_SEEDS)] = None
        return list(seeds)

    async def oracle_plays(self, count: int) -> list[OraclePlay]:
        """The oracle's episodes on the panel's first ``count`` seeds, each played once and kept."""
        async with self.playing:
            missing = [seed for seed in self.panel(count) if seed not in self.plays]
            played = await together(noting(seed, self._kept(seed)) for seed in missing)
            self.plays.update(zip(missing, played, strict=True))
        return [self.plays[seed] for seed in self.panel(count)]

    async def _kept(self, seed: int) -> OraclePlay:
        play = await self.source.oracle(seed)
        self.kept += play.bytes
        if self.kept > KEPT_BYTES:
            most = f"more than {KEPT_BYTES >> 20} MiB of text together"
            raise EnvironmentFault("oracle", f"its oracle's episodes hold {most}; shorten prompts and answers")
        return play

    @staticmethod
    def chat(play: OraclePlay) -> list[Message]:
        """The messages of the oracle's episode, in order."""
        return [message for turn in play.turns for message in (turn.message, *turn.replies)]


@dataclass(frozen=True)
class Played:
    """An episode as a probing policy played it."""

    seed: int
    task: Task
    messages: list[Message]  # assistant messages and what followed, in order
    score: Score


@dataclass(frozen=True)
class Replay:
    """An episode with given assistant messages: what was seen, the worker's seconds for reset and each step."""

    data: list[Any]
    score: Score
    reset_seconds: float
    step_seconds: list[float]


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; on the first failure the others are cancelled and that failure is raised bare."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def noting(seed: int, coroutine: Coroutine[Any, Any, T]) -> T:
    """Await; a SandboxError gets the seed as a note."""
    try:
        return await coroutine
    except SandboxError as error:
        error.add_note(f"seed {seed}")
        raise


async def play(source: SandboxSource, seed: int, policy: Policy, turns: int) -> Played:
    """One episode of ``seed`` under ``policy``, at most ``turns`` assistant messages.

    The policy draws from a stream of its own: an environment draws from ``random.Random(seed)``, and a guess that drew
    the same numbers would hit far more, or far less, often than by chance.
    """
    episode = source.episode()
    rng = random.Random(f"policy {seed}")
    messages: list[Message] = []
    try:
        task = await episode.reset(seed)
        for turn in range(turns):
            message = policy(task, messages, turn, rng)
            step = await episode.step(message)
            messages += [message, *step.messages]
            if step.done:
                break
        return Played(seed, task, messages, await episode.score())
    finally:
        await episode.close()


async def replay(
    source: SandboxSource, seed: int, messages: list[Message], *, again: bool = False, scored: bool = False
) -> Replay:
    """Send the given assistant messages, whatever is answered, until they or the episode end.

    With ``again`` the same instance has played them before; with ``scored`` its score is asked for after every one.
    """
    episode: SandboxEpisode = source.episode()
    try:
        if again:
            await _sent(episode, seed, messages, scored)
        return await _sent(episode, seed, messages, scored)
    finally:
        await episode.close()


async def _sent(episode: SandboxEpisode, seed: int, messages: list[Message], scored: bool) -> Replay:
    task = await episode.reset(seed)
    reset_seconds = episode.seconds
    seconds: list[float] = []
    data: list[Any] = [task.system, task.messages, task.tools]
    for message in messages:
        step = await episode.step(message)
        seconds.append(episode.seconds)
        data.append([step.messages, step.done])
        if scored:
            await episode.score()
        if step.done:
            break
    score = await episode.score()
    return Replay([*data, [score.reward, score.success, score.parts]], score, reset_seconds, seconds)
