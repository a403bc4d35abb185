"""The bench that checks work at: two containers of the candidate, a panel of seeds, and ways to play an episode.

The panel is drawn from the environment's hash, so that no source can know the seeds it is probed with: every other seed
over 31 bits, the rest from the low numbers that training and gates use.
A play that fails raises the SandboxError with its seed noted; siblings started with it are cancelled. All plays of the
oracle are kept, and together at most ``KEPT_BYTES``: EnvironmentFault beyond.

The numbers that decide an admission, in one place; each check's evidence repeats the ones it used.

What a check answers: whether it passed, and the figures, faults and episodes that say why.

Invariants: evidence is plain JSON and small. "examples" holds at most ``EXAMPLES`` episodes an author needs to see,
each {"seed", "what", "transcript"}; a transcript is the chat as the agent saw it, its long texts and its middle cut.
"""

import asyncio
import json
import random
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sandbox.admission.policies import Policy
from sandbox.client import SandboxEpisode, SandboxSource
from sandbox.contract import Message, Score, Task, Tool
from sandbox.errors import EnvironmentFault, SandboxError, clipped
from sandbox.hashing import environment_hash
from sandbox.wire import OraclePlay


@dataclass(frozen=True)
class Thresholds:
    """Rates and rewards in 0-1, times in seconds."""

    seeds: int = 32  # probed by oracle, floor, exploit and latency checks
    replica_seeds: int = 12  # compared between processes
    diversity_seeds: int = 200
    confirm_seeds: int = 128  # probed with a policy that was over its bound on the first ones
    wear_episodes: int = 1000  # played before a process counts as worn,
    wear_seconds: float = 10.0  # or as many as fit into these
    turns: int = 12  # assistant messages per probing policy, but for those that wait for the end
    distinct: float = 0.9  # share of distinct episodes
    distinct_shapes: int = 6  # distinct episodes once names, ids and numbers are masked
    commonest_shape: float = 0.5  # no shape may hold more of the episodes
    distinct_signatures: int = 3  # what has to be done, wording apart
    commonest_signature: float = 0.8  # no way may hold more of the episodes
    floor_reward: float = 0.2  # mean reward of a policy that does not try
    floor_success: float = 0.05
    exploit_reward: float = 0.5
    exploit_success: float = 0.1  # a lucky guess may pass now and then
    mutation_seeds: int = 12  # whose oracle's play is sent again with a slip in it,
    confirm_mutation_seeds: int = 64  # and with the kinds that look loose
    mutation_min_seeds: int = 8  # seeds that a kind of slip needs
    mutation_paid: float = 0.9  # share of them on which one kind may be paid in full
    leak_share: float = 0.05  # share of seeds whose prompt or answers hold the oracle's own words too early
    unseen_share: float = 0.2  # share of seeds whose oracle uses what it cannot know
    step_seconds: float = 0.25  # 95th percentile
    reset_seconds: float = 0.5
    spread_groups: int = 16
    spread_rollouts: int = 16
    spread_low: float = 0.05  # mean reward of the base model, from TRACE's calibration
    spread_high: float = 0.95
    spread_mixed: float = 0.5  # share of groups whose rewards are not all equal


Verdict = tuple[bool, dict[str, Any]]

EXAMPLES = 3
EXAMPLE_MESSAGES = 24
EXAMPLE_CHARACTERS = 600  # of one text


def example(seed: int, description: str, task: Task, messages: list[Message]) -> dict[str, Any]:
    """One episode as evidence; ``what`` is a sentence."""
    chat = [{"role": "system", "content": task.system}, *task.messages, *messages]
    if len(chat) > EXAMPLE_MESSAGES:
        half = EXAMPLE_MESSAGES // 2
        omission = {"role": "system", "content": f"... {len(chat) - 2 * half} messages cut ..."}
        chat = [*chat[:half], omission, *chat[-half:]]
    return {
        "seed": seed,
        "what": clipped(description, EXAMPLE_CHARACTERS),
        "transcript": [_clipped_message(message) for message in chat],
    }


def _clipped_message(message: Message) -> Message:
    clipped_message: Message = {"role": str(message.get("role"))}
    content = message.get("content")
    clipped_message["content"] = None if content is None else clipped(str(content), EXAMPLE_CHARACTERS)
    if "tool_call_id" in message:
        clipped_message["tool_call_id"] = clipped(str(message["tool_call_id"]), 80)
    if message.get("tool_calls"):
        clipped_message["tool_calls"] = [_clipped_call(call) for call in message["tool_calls"][:8]]
    return clipped_message


def _clipped_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = clipped(str(function["arguments"]), EXAMPLE_CHARACTERS)
    clipped_function = {"name": clipped(str(function["name"]), 80), "arguments": arguments}
    return {"id": clipped(str(call["id"]), 80), "type": "function", "function": clipped_function}


def short_json(value: Any) -> str:
    """A value as JSON, for a sentence."""
    return clipped(json.dumps(value, ensure_ascii=False), 120)


def fault_evidence(error: Exception) -> dict[str, Any]:
    """What a failed check says of the error that ended it."""
    notes = "; ".join(getattr(error, "__notes__", []))
    evidence = {"fault": type(error).__name__, "text": clipped(str(error), 1000), "at": notes}
    if isinstance(error, EnvironmentFault) and error.traceback:
        evidence["traceback"] = error.traceback
    return evidence


T = TypeVar("T")

LOW_SEED_LIMIT = 200_000
ORACLE_BYTES = 64 * 1024 * 1024  # of 200 episodes: 80,000 tokens in each of them


@dataclass
class CheckContext:
    """What every check may use. ``twin`` runs the same source in another process, under training's hash seed."""

    source: SandboxSource
    replica: SandboxSource
    thresholds: Thresholds
    target_tools: list[Tool] | None  # None: there is no target to compare with
    target_error_examples: list[str]
    plays: dict[int, OraclePlay] = field(default_factory=dict)
    oracle_bytes: int = 0  # bytes of these
    plays_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # checks that run at once play no seed twice

    def panel(self, count: int) -> list[int]:
        """The first ``count`` probing seeds, the same every time for this source."""
        rng = random.Random(environment_hash(self.source.source_code))
        seeds: dict[int, None] = {}
        while len(seeds) < count:
            seeds[rng.randrange(2**31 if len(seeds) % 2 else LOW_SEED_LIMIT)] = None
        return list(seeds)

    async def oracle_plays(self, count: int) -> list[OraclePlay]:
        """The oracle's episodes on the panel's first ``count`` seeds, each played once and kept."""
        async with self.plays_lock:
            missing = [seed for seed in self.panel(count) if seed not in self.plays]
            plays = await gather_all(with_seed_note(seed, self._play_oracle(seed)) for seed in missing)
            self.plays.update(zip(missing, plays, strict=True))
        return [self.plays[seed] for seed in self.panel(count)]

    async def _play_oracle(self, seed: int) -> OraclePlay:
        play = await self.source.oracle(seed)
        self.oracle_bytes += play.bytes
        if self.oracle_bytes > ORACLE_BYTES:
            limit = f"more than {ORACLE_BYTES >> 20} MiB of text together"
            raise EnvironmentFault("oracle", f"its oracle's episodes hold {limit}; shorten prompts and answers")
        return play

    @staticmethod
    def chat(play: OraclePlay) -> list[Message]:
        """The messages of the oracle's episode, in order."""
        return [message for turn in play.turns for message in (turn.message, *turn.replies)]


@dataclass(frozen=True)
class PolicyEpisode:
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


async def gather_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; on the first failure the others are cancelled and that failure is raised bare."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def with_seed_note(seed: int, coroutine: Coroutine[Any, Any, T]) -> T:
    """Await; a SandboxError gets the seed as a note."""
    try:
        return await coroutine
    except SandboxError as error:
        error.add_note(f"seed {seed}")
        raise


async def play(source: SandboxSource, seed: int, policy: Policy, turns: int) -> PolicyEpisode:
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
        return PolicyEpisode(seed, task, messages, await episode.score())
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
            await _send_script(episode, seed, messages, scored)
        return await _send_script(episode, seed, messages, scored)
    finally:
        await episode.close()


async def _send_script(episode: SandboxEpisode, seed: int, messages: list[Message], scored: bool) -> Replay:
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
