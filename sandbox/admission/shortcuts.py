"""Check that reward needs work: by policies that do not try (``floor``) and by a panel of adversaries (``exploits``).

Episodes that break the environment count as "faults", because an agent that can end its episode escapes its reward. A
rewarded episode is legitimate if its accepted writes are exactly the oracle's and every value in them had been read
before; a guessed or enumerated value, or any other accepted write, is a shortcut. A write is accepted if its reply does
not have the form in which this environment answers unknown tools and broken JSON.

Not covered: truth values, which no text spells out, and values that have to be computed.
"""

import json
import random
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sandbox.admission import adversaries
from sandbox.admission.context import (
    EXAMPLES,
    CheckContext,
    PolicyEpisode,
    Verdict,
    example,
    fault_evidence,
    gather_all,
    play,
    replay,
    with_seed_note,
)
from sandbox.admission.fingerprint import canonical, parsed
from sandbox.admission.interface import error_form
from sandbox.admission.policies import FLOOR_POLICIES, PATIENCE, PATIENT_POLICIES, Policy, call, tool_name, write_tools
from sandbox.client import SandboxSource
from sandbox.contract import Message, Task
from sandbox.errors import EnvironmentFault

Form = tuple[str, ...]
# Seeds on which the form of replies to unacceptable calls is observed.
REFUSAL_SEEDS = 4


@dataclass(frozen=True)
class Write:
    """A call of a writing tool: canonical arguments, reply, and how many texts the agent had read before it."""

    name: str
    arguments: str
    answer: str
    # Counts the first texts of ``_texts``.
    texts_read: int


@dataclass(frozen=True)
class Solutions:
    """The oracle's writes on each seed as (tool, canonical arguments), and the forms of replies that refuse a call."""

    writes: dict[int, list[tuple[str, str]]]
    refusal_forms: frozenset[Form]


async def legitimate_solutions(context: CheckContext, count: int) -> Solutions | None:
    """Return the solutions of the panel's first ``count`` seeds; None if they cannot be determined."""
    try:
        plays = await context.oracle_plays(count)
        refusal_forms = await _refusal_forms(context)
    # Other checks report the fault.
    except EnvironmentFault:
        return None
    seeds = context.panel(count)
    writes = {seed: list(_writes(play.task, context.chat(play))) for seed, play in zip(seeds, plays, strict=True)}
    return solutions_from(writes, refusal_forms)


def solutions_from(writes_by_seed: dict[int, list[Write]], refusal_forms: frozenset[Form]) -> Solutions | None:
    """Return solutions from the oracle's writes; None if the reply to any write has the form of a refusal."""
    if any(error_form(write.answer) in refusal_forms for writes in writes_by_seed.values() for write in writes):
        return None
    return Solutions({seed: _call_keys(writes) for seed, writes in writes_by_seed.items()}, refusal_forms)


async def _refusal_forms(context: CheckContext) -> frozenset[Form]:
    """Return the forms of the replies to calls that no environment can accept."""
    first = (await context.oracle_plays(1))[0].task
    name = tool_name(first.tools[0]) if first.tools else "no_such_tool"
    script = [call(0, ("no_such_tool", "{}")), call(1, (name, "{not json"))]
    replays = await gather_all(
        with_seed_note(seed, replay(context.replica, seed, script)) for seed in context.panel(REFUSAL_SEEDS)
    )
    replies = [reply for result in replays for step in result.data[3 : 3 + len(script)] for reply in step[0]]
    return frozenset(error_form(str(reply["content"])) for reply in replies if reply["role"] == "tool")


def is_legitimate(episode: PolicyEpisode, solutions: Solutions) -> bool:
    """Return whether the episode succeeded by exactly the oracle's writes, with values that had been read before."""
    if not episode.score.success:
        return False
    writes = _writes(episode.task, episode.messages)
    accepted = [write for write in writes if error_form(write.answer) not in solutions.refusal_forms]
    expected = solutions.writes[episode.seed]
    if not expected or _call_keys(accepted) != expected:
        return False
    texts = list(_texts(episode.task, episode.messages))
    return all(_values_were_read(write, "\n".join(texts[: write.texts_read]).casefold()) for write in accepted)


def _call_keys(writes: list[Write]) -> list[tuple[str, str]]:
    return sorted((write.name, write.arguments) for write in writes)


def _writes(task: Task, messages: list[Message]) -> Iterator[Write]:
    """Yield every call of a writing tool, in order."""
    names = {tool_name(tool) for tool in write_tools(task)}
    answers = {reply.get("tool_call_id"): str(reply.get("content")) for reply in messages if reply["role"] == "tool"}
    texts_read = 1 + len(task.messages)
    for message in messages:
        for tool_call in message.get("tool_calls") or []:
            name, arguments = tool_call["function"]["name"], parsed(tool_call["function"]["arguments"])
            if name in names:
                yield Write(name, canonical(arguments), answers.get(tool_call["id"], ""), texts_read)
        texts_read += message["role"] != "assistant"


def _texts(task: Task, messages: list[Message]) -> Iterator[str]:
    """Yield every text that an agent reads, in order."""
    yield task.system
    for message in [*task.messages, *(message for message in messages if message["role"] != "assistant")]:
        yield str(message.get("content") or "")


def _values_were_read(write: Write, text: str) -> bool:
    return all(re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) for value in _values(json.loads(write.arguments)))


def _values(value: object) -> Iterator[str]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _values(item)
    else:
        yield value.casefold() if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class FailedEpisode:
    """An episode in which the environment failed, up to the message that it failed on."""

    seed: int
    task: Task | None
    messages: list[Message]
    error: EnvironmentFault


async def floor(context: CheckContext) -> Verdict:
    """Check that policies that do not try to solve the task stay within the bounds of the floor."""
    limits = context.thresholds
    allowed = {"reward": limits.floor_reward, "success": limits.floor_success}
    return await _check_policies(context, FLOOR_POLICIES, allowed, may_solve=False)


async def exploits(context: CheckContext) -> Verdict:
    """Check that adversaries, which seek reward without work, stay within the bounds of exploits."""
    limits = context.thresholds
    allowed = {"reward": limits.exploit_reward, "success": limits.exploit_success}
    return await _check_policies(context, adversaries.panel(), allowed, may_solve=True)


async def _check_policies(
    context: CheckContext, policies: dict[str, Policy], allowed: dict[str, float], *, may_solve: bool
) -> Verdict:
    """Play every policy on all seeds in the replica, and judge each policy by its rates."""
    allowed = {**allowed, "faults": 0.0}
    limits = context.thresholds
    rates: dict[str, dict[str, float]] = {}
    confirmed: list[str] = []
    examples: list[dict[str, Any]] = []
    fault: dict[str, object] = {}
    for name, policy in policies.items():
        turns = max(limits.turns, PATIENCE) if name in PATIENT_POLICIES else limits.turns
        episodes = await _play_policy(context, policy, context.panel(limits.seeds), turns)
        legitimate_seeds = await _legitimate_seeds(context, episodes) if may_solve else None
        rates[name] = _rates(episodes, legitimate_seeds)
        if _exceeds(rates[name], allowed):
            confirmed.append(name)
            confirm_seeds = context.panel(max(limits.confirm_seeds, limits.seeds))[limits.seeds :]
            episodes += await _play_policy(context, policy, confirm_seeds, turns)
            legitimate_seeds = await _legitimate_seeds(context, episodes) if may_solve else None
            rates[name] = _rates(episodes, legitimate_seeds)
        if _exceeds(rates[name], allowed):
            examples.append(_worst_example(name, episodes, legitimate_seeds or set()))
            fault = fault or next(
                (fault_evidence(episode.error) for episode in episodes if isinstance(episode, FailedEpisode)), {}
            )
    evidence = {**rates, "allowed": allowed, "seeds": limits.seeds}
    if confirmed:
        evidence |= {"played_on_more_seeds": confirmed, "more_seeds": max(limits.confirm_seeds, limits.seeds)}
    if examples:
        # The simplest policy shows the cause best: the one with the shortest transcript.
        examples.sort(key=lambda episode: len(episode["transcript"]))
        evidence |= {**fault, "examples": examples[:EXAMPLES]}
    return not examples, evidence


def _exceeds(rates: dict[str, float], allowed: dict[str, float]) -> bool:
    return any(rates[name] > allowed[name] for name in allowed)


async def _play_policy(
    context: CheckContext, policy: Policy, seeds: list[int], turns: int
) -> list[PolicyEpisode | FailedEpisode]:
    return await gather_all(with_seed_note(seed, _play_episode(context.replica, seed, policy, turns)) for seed in seeds)


async def _play_episode(source: SandboxSource, seed: int, policy: Policy, turns: int) -> PolicyEpisode | FailedEpisode:
    snapshots: list[tuple[Task, list[Message]]] = []

    def recording_policy(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
        message = policy(task, messages, turn, rng)
        snapshots.append((task, [*messages, message]))
        return message

    try:
        return await play(source, seed, recording_policy, turns)
    except EnvironmentFault as error:
        error.add_note(f"seed {seed}")
        task, messages = snapshots[-1] if snapshots else (None, [])
        return FailedEpisode(seed, task, messages, error)


async def _legitimate_seeds(context: CheckContext, episodes: Sequence[PolicyEpisode | FailedEpisode]) -> set[int]:
    """Return the seeds whose episode is legitimate."""
    successes = [episode for episode in episodes if isinstance(episode, PolicyEpisode) and episode.score.success]
    oracle_solutions = await legitimate_solutions(context, len(episodes)) if successes else None
    return {episode.seed for episode in successes if oracle_solutions and is_legitimate(episode, oracle_solutions)}


def _rates(episodes: list[PolicyEpisode | FailedEpisode], legitimate_seeds: set[int] | None) -> dict[str, float]:
    """Return the rates over all episodes: reward, success, faults and legitimate solutions ("solved").

    In reward and success, legitimate and failed episodes count as 0. Without ``legitimate_seeds`` there is no "solved".
    """
    scores = [
        episode.score
        for episode in episodes
        if isinstance(episode, PolicyEpisode) and episode.seed not in (legitimate_seeds or ())
    ]
    rates = {
        "reward": sum(score.reward for score in scores) / len(episodes),
        "success": sum(score.success for score in scores) / len(episodes),
        "faults": statistics.fmean(isinstance(episode, FailedEpisode) for episode in episodes),
        **({"solved": len(legitimate_seeds) / len(episodes)} if legitimate_seeds is not None else {}),
    }
    return {name: round(rate, 4) for name, rate in rates.items()}


def _worst_example(
    name: str, episodes: list[PolicyEpisode | FailedEpisode], legitimate_seeds: set[int]
) -> dict[str, Any]:
    """Return an example: an episode that broke the environment, else the best rewarded one that is not legitimate."""
    failed_episode = next((episode for episode in episodes if isinstance(episode, FailedEpisode)), None)
    if failed_episode is not None:
        description = f"{name} broke the environment: {failed_episode.error}"
        return example(
            failed_episode.seed, description, failed_episode.task or Task("", [], []), failed_episode.messages
        )
    candidates = (
        episode for episode in episodes if isinstance(episode, PolicyEpisode) and episode.seed not in legitimate_seeds
    )
    best = max(candidates, key=lambda episode: (episode.score.success, episode.score.reward))
    description = f"{name} got reward {best.score.reward:g}, success {best.score.success}"
    return example(best.seed, description, best.task, best.messages)
