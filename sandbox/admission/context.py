"""Define what the admission checks share: thresholds, two sandboxes, a panel of seeds, ways to play, and evidence.

The panel of seeds is drawn from the hash of the environment's source, so that no source can contain the seeds that
probe it. If an episode fails, its SandboxError gets the seed as a note, and episodes that were started together with it
are cancelled. Evidence is plain JSON and small: "examples" holds at most ``EXAMPLES`` episodes, each {"seed", "what",
"transcript"}.
"""

import asyncio
import json
import random
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sandbox.admission.policies import Policy
from sandbox.admission.target_texts import TargetTexts
from sandbox.client import SandboxEpisode, SandboxSource
from sandbox.contract import Message, Score, Task, Tool
from sandbox.errors import EnvironmentFault, SandboxError, clipped
from sandbox.hashing import environment_hash
from sandbox.wire import OraclePlay

Verdict = tuple[bool, dict[str, object]]
EXAMPLES = 3
EXAMPLE_MESSAGES = 24
# Length of one text in an example.
EXAMPLE_CHARACTERS = 600
T = TypeVar("T")
LOW_SEED_LIMIT = 200_000
# Limit of all oracle episodes together; of 200 episodes, each may have 80,000 tokens.
ORACLE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Thresholds:
    """The bounds and sample sizes of the checks: rates and rewards in [0, 1], times in seconds.

    The evidence of each check repeats the bounds that it used.
    """

    # Seeds that the checks of oracle, interface, leak, floor, exploits and latency probe.
    seeds: int = 32
    # Seeds on which the check of determinism compares processes.
    replica_seeds: int = 12
    diversity_seeds: int = 200
    # Seeds in total for a policy that exceeded its bound on the first ``seeds``.
    confirm_seeds: int = 128
    # Episodes that one process plays before the last comparison of determinism.
    wear_episodes: int = 1000
    # Time limit of these episodes: slow environments play fewer.
    wear_seconds: float = 10.0
    # Maximum of assistant messages per episode of a policy; ``policies.PATIENT_POLICIES`` send more.
    turns: int = 12
    # Minimum share of distinct episodes.
    distinct: float = 0.9
    # Minimum number of distinct shapes: episodes with names, ids and numbers masked.
    distinct_shapes: int = 6
    # Maximum share of the episodes that have the same shape.
    commonest_shape: float = 0.5
    # Minimum number of distinct solution signatures, which ignore the wording.
    distinct_signatures: int = 3
    # Maximum share of the episodes that have the same solution signature.
    commonest_signature: float = 0.8
    # Maximum mean reward and success rate of a policy that does not try to solve the task.
    floor_reward: float = 0.2
    floor_success: float = 0.05
    # Maximum mean reward of an adversary.
    exploit_reward: float = 0.5
    # Not 0, because a guess may be right by chance.
    exploit_success: float = 0.1
    # Seeds on which the oracle's messages are sent again with a mutation.
    mutation_seeds: int = 12
    # Seeds in total for kinds of mutation that exceed their bound on the first ``mutation_seeds``.
    confirm_mutation_seeds: int = 64
    # Minimum number of seeds with a kind of mutation before that kind can refuse an environment.
    mutation_min_seeds: int = 8
    # Maximum share of these seeds on which one kind may earn the full reward.
    mutation_paid: float = 0.9
    # Minimum mean share of the target's system prompt that the environment's has.
    policy_share: float = 0.8
    # Maximum share of seeds whose prompt or replies contain calls of the oracle before it makes them.
    leak_share: float = 0.05
    # Maximum share of seeds on which the oracle uses a code that no message has revealed.
    unseen_share: float = 0.2
    # Maximum 95th percentile of the durations of step and reset.
    step_seconds: float = 0.25
    reset_seconds: float = 0.5
    # A tool whose replayed answers agree less often than this, with the whole interval, refuses what answers by them.
    world_exact: float = 0.9
    world_error_class: float = 0.8
    world_states: float = 0.9
    # Answered calls of a tool without which its agreement is not judged.
    world_calls: int = 5
    spread_groups: int = 16
    spread_rollouts: int = 16
    # Bounds of the base model's mean reward, from TRACE's calibration.
    spread_low: float = 0.05
    spread_high: float = 0.95
    # Minimum share of groups whose rewards are not all equal.
    spread_mixed: float = 0.5


@dataclass(frozen=True)
class PlayTokens:
    """Tokens of an episode by the model's template: of the whole chat, tools included, and of the largest answer."""

    chat: int
    message: int


@dataclass(frozen=True)
class EpisodeBudget:
    """What an episode of the training has at most: assistant messages, tokens in all, tokens of one message.

    ``count`` returns the tokens of an episode, None if the model's template cannot render it.
    """

    turns: int
    tokens: int
    message_tokens: int
    count: Callable[[Task, list[Message]], PlayTokens | None]


def example(seed: int, description: str, task: Task, messages: list[Message]) -> dict[str, Any]:
    """Return an episode as evidence; ``description`` is a sentence on what it shows."""
    chat = [{"role": "system", "content": task.system}, *task.messages, *messages]
    if len(chat) > EXAMPLE_MESSAGES:
        # Cut the middle of a long chat: its beginning shows the task, and its end the outcome.
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


def _clipped_call(call: Message) -> Message:
    function = call["function"]
    arguments = clipped(str(function["arguments"]), EXAMPLE_CHARACTERS)
    clipped_function = {"name": clipped(str(function["name"]), 80), "arguments": arguments}
    return {"id": clipped(str(call["id"]), 80), "type": "function", "function": clipped_function}


def short_json(value: object) -> str:
    """Return a value as short JSON that a sentence can quote."""
    return clipped(json.dumps(value, ensure_ascii=False), 120)


def fault_evidence(error: Exception) -> dict[str, object]:
    """Return evidence of the error that ended a check."""
    notes = "; ".join(getattr(error, "__notes__", []))
    evidence: dict[str, object] = {"fault": type(error).__name__, "text": clipped(str(error), 1000), "at": notes}
    if isinstance(error, EnvironmentFault) and error.traceback:
        evidence["traceback"] = error.traceback
    return evidence


@dataclass
class CheckContext:
    """The inputs and shared state of all checks of one environment.

    ``replica`` runs the same source as ``source`` in another process, under training's hash seed.
    """

    source: SandboxSource
    replica: SandboxSource
    thresholds: Thresholds
    # None if there is no target to compare with.
    target_tools: list[Tool] | None
    target_error_examples: list[str]
    target_texts: TargetTexts = field(default_factory=TargetTexts)
    # None if the training is unknown.
    budget: EpisodeBudget | None = None
    # The oracle's episodes by seed.
    plays: dict[int, OraclePlay] = field(default_factory=dict)
    # Total size of the responses that held these episodes.
    oracle_bytes: int = 0
    # Checks run concurrently; the lock prevents them from playing a seed twice.
    plays_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def panel(self, count: int) -> list[int]:
        """Return the first ``count`` seeds of the panel, always the same for one source."""
        rng = random.Random(environment_hash(self.source.source_code))
        seeds: dict[int, None] = {}
        while len(seeds) < count:
            # Every other seed is a low number, as in training and gates; the rest have up to 31 bits.
            seeds[rng.randrange(2**31 if len(seeds) % 2 else LOW_SEED_LIMIT)] = None
        return list(seeds)

    async def oracle_plays(self, count: int) -> list[OraclePlay]:
        """Return the oracle's episodes on the panel's first ``count`` seeds; each seed is played only once."""
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
        """Return the messages of an oracle's episode in order."""
        return [message for turn in play.turns for message in (turn.message, *turn.replies)]


@dataclass(frozen=True)
class PolicyEpisode:
    """An episode played by a probing policy."""

    seed: int
    task: Task
    # Assistant messages and the replies to them, in order.
    messages: list[Message]
    score: Score


@dataclass(frozen=True)
class Replay:
    """An episode with fixed assistant messages, with the seconds that the worker measured for reset and each step.

    ``data`` holds system prompt, messages and tools, then [replies, done] of each step, then the fields of the score.
    """

    data: list[Any]
    score: Score
    reset_seconds: float
    step_seconds: list[float]


async def gather_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order; on the first failure cancel the rest and raise it."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    # A bare ``gather`` would leave the other coroutines running in a container that is about to be closed.
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def with_seed_note(seed: int, coroutine: Coroutine[Any, Any, T]) -> T:
    """Await ``coroutine`` and add ``seed`` as a note to a SandboxError that it raises."""
    try:
        return await coroutine
    except SandboxError as error:
        error.add_note(f"seed {seed}")
        raise


async def play(source: SandboxSource, seed: int, policy: Policy, turns: int) -> PolicyEpisode:
    """Play one episode of ``seed`` under ``policy``, at most ``turns`` assistant messages."""
    episode = source.episode()
    # An environment draws from ``random.Random(seed)``. A policy that drew the same numbers would guess the
    # environment's values far more, or far less, often than by chance.
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
    source: SandboxSource, seed: int, messages: list[Message], *, on_used_instance: bool = False, scored: bool = False
) -> Replay:
    """Send fixed assistant messages, whatever the replies are, until the messages or the episode end.

    Args:
        on_used_instance: play the messages twice on one instance and return the second episode.
        scored: request the score after every message.
    """
    episode: SandboxEpisode = source.episode()
    try:
        if on_used_instance:
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
