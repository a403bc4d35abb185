"""Check how an environment runs: that it plays at all, its determinism, latency and side effects.

Determinism compares every byte of the same episodes in other circumstances: played again, in another process with
another hash seed and order, among other episodes, on a used instance, with the score requested after every message, and
in a process that has played many episodes. Not covered: a change that first appears after ``wear_episodes`` episodes.
"""

import json
import math
import random
from collections.abc import Awaitable, Callable
from typing import Any

from sandbox.admission.context import CheckContext, Replay, Verdict, example, gather_all, play, replay, with_seed_note
from sandbox.admission.fingerprint import as_data, canonical
from sandbox.admission.policies import (
    SUCCESS_WORDS,
    Policy,
    arguments_of,
    call,
    calls,
    empty,
    guess,
    random_calls,
    say,
    script_of,
    tool_name,
    visible_values,
)
from sandbox.client import SandboxSource
from sandbox.contract import Message, Task
from sandbox.errors import EnvironmentFault
from sandbox.wire import OraclePlay

CARELESS_MESSAGES = 6
# Episodes that ``_wear`` plays concurrently.
WEAR_BATCH = 50

# A seed and the assistant messages to send.
SeededScript = tuple[int, list[Message]]
# Slow episodes are played once more and the faster time of each call counts, because the machine may have been busy.
LATENCY_ROUNDS = 2


async def runs(context: CheckContext) -> Verdict:
    """Check that reset, step, score and oracle work in both processes, on two seeds one after the other."""
    seeds = context.panel(2)
    for source in (context.source, context.replica):
        for seed in seeds:
            await with_seed_note(seed, play(source, seed, empty, 2))
            await with_seed_note(seed, source.oracle(seed))
    return True, {"seeds": seeds}


async def determinism(context: CheckContext) -> Verdict:
    """Check that the same seed and messages give the same bytes, whatever else the process has done."""
    seeds = context.panel(context.thresholds.replica_seeds)
    plays = await context.oracle_plays(len(seeds))
    for circumstance, source in (("again", context.source), ("in another process", context.replica)):
        repeats = await gather_all(with_seed_note(seed, source.oracle(seed)) for seed in reversed(seeds))
        for seed, oracle_play, repeat in zip(seeds, plays, reversed(repeats), strict=True):
            if difference := first_difference(canonical(as_data(oracle_play)), canonical(as_data(repeat))):
                return False, _difference_evidence(seed, f"the oracle's play {circumstance}", difference, oracle_play)
    return await _compare_replays(context, seeds, plays)


async def _compare_replays(context: CheckContext, seeds: list[int], plays: list[OraclePlay]) -> Verdict:
    """Replay the scripts one after another, and compare every byte with replays in every other circumstance."""
    scripts = [(seed, script_of(oracle_play)) for seed, oracle_play in zip(seeds, plays, strict=True)]
    # Besides the oracle's messages, those of two careless agents are compared, because an environment may become
    # lenient. One agent guesses from what it sees; the other uses the oracle's values, and so passes argument checks.
    agents = (random_calls, _oracle_like_policy(plays))
    careless = await gather_all(
        with_seed_note(seed, _careless_script(context.source, seed, agent)) for agent in agents for seed in seeds
    )
    pairs = [*scripts, *(pair for pair in careless if pair is not None)]
    originals = [await with_seed_note(seed, replay(context.source, seed, script)) for seed, script in pairs]
    worn_episodes = 0

    async def after_many(pairs: list[SeededScript]) -> list[Replay]:
        nonlocal worn_episodes
        worn_episodes = await _wear(context)
        return await _replay_all(context.source, pairs)

    circumstances = {**_circumstances(context), "after many other episodes": after_many}
    for circumstance, replays in circumstances.items():
        for index, repeat in enumerate(await replays(pairs)):
            if difference := first_difference(canonical(originals[index].data), canonical(repeat.data)):
                sender = "the oracle's messages" if index < len(scripts) else "a careless agent's messages"
                return False, _difference_evidence(
                    pairs[index][0], f"{sender} {circumstance}", difference, plays[index % len(plays)]
                )
    return True, {
        "seeds": len(seeds),
        "processes": 2,
        "interleaved": True,
        "scripts": len(pairs),
        "worn_by": worn_episodes,
    }


def _circumstances(context: CheckContext) -> dict[str, Callable[[list[SeededScript]], Awaitable[list[Replay]]]]:
    async def in_reverse(pairs: list[SeededScript]) -> list[Replay]:
        return (await _replay_all(context.replica, pairs[::-1]))[::-1]

    return {
        "interleaved with other episodes": in_reverse,
        "on an instance that has played before": lambda pairs: _replay_all(
            context.replica, pairs, on_used_instance=True
        ),
        "with its score asked for after every message": lambda pairs: _replay_all(context.replica, pairs, scored=True),
    }


async def _replay_all(source: SandboxSource, pairs: list[SeededScript], **options: bool) -> list[Replay]:
    return await gather_all(with_seed_note(seed, replay(source, seed, script, **options)) for seed, script in pairs)


def _difference_evidence(seed: int, circumstance: str, difference: str, play: OraclePlay) -> dict[str, Any]:
    description = f"differs when this seed is played: {circumstance}. The transcript is the oracle's first play."
    evidence = {"seed": seed, "where": circumstance, "difference": difference}
    return {**evidence, "examples": [example(seed, description, play.task, CheckContext.chat(play))]}


async def _careless_script(source: SandboxSource, seed: int, agent: Policy) -> SeededScript | None:
    def claiming(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
        return agent(task, messages, turn, rng) if turn < CARELESS_MESSAGES else say(SUCCESS_WORDS)

    try:
        episode = await play(source, seed, claiming, CARELESS_MESSAGES + 1)
    # The exploit check reports environments that fail here.
    except EnvironmentFault:
        return None
    return seed, [message for message in episode.messages if message["role"] == "assistant"]


def _oracle_like_policy(plays: list[OraclePlay]) -> Policy:
    """Return a policy that calls random tools with values that the oracle gives to arguments of the same name."""
    oracle_values: dict[str, list[Any]] = {}
    for oracle_play in plays:
        for tool_call in calls(script_of(oracle_play)).values():
            for name, value in arguments_of(tool_call).items():
                oracle_values.setdefault(name, []).append(value)

    def policy(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
        if not task.tools:
            return say("")
        tool = rng.choice(task.tools)
        guesses = json.loads(guess(tool, visible_values(task, messages), rng))
        arguments = {
            name: rng.choice(oracle_values[name]) if name in oracle_values else value for name, value in guesses.items()
        }
        return call(turn, (tool_name(tool), json.dumps(arguments)))

    return policy


async def _wear(context: CheckContext) -> int:
    """Play many short episodes in the source's process and return their number."""
    limits = context.thresholds
    seeds = (context.panel(limits.replica_seeds) * WEAR_BATCH)[:WEAR_BATCH]
    episodes, elapsed = 0, 0.0
    while episodes < limits.wear_episodes and elapsed < limits.wear_seconds:
        replays = await gather_all(
            with_seed_note(seed, replay(context.source, seed, [say(SUCCESS_WORDS)])) for seed in seeds
        )
        elapsed += sum(outcome.reset_seconds + sum(outcome.step_seconds) for outcome in replays)
        episodes += len(seeds)
    return episodes


def first_difference(left: str, right: str) -> str:
    """Quote both texts around the first character that differs; empty if they are equal."""
    if left == right:
        return ""
    index = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    start = max(0, index - 40)
    return f"{left[start : index + 40]!r} against {right[start : index + 40]!r}"


async def effects(context: CheckContext) -> Verdict:
    """Check that no episode so far has touched a file, socket, process or thread, or has printed anything."""
    records = [await source.effects() for source in (context.source, context.replica)]
    events = [str(event)[:200] for record in records for event in list(record.get("events") or [])[:20]]
    printed = sum(int(record.get("printed") or 0) for record in records)
    head = next((str(record["printed_head"])[:200] for record in records if record.get("printed_head")), "")
    evidence = {"events": events[:20], "printed_characters": printed, **({"printed": head} if head else {})}
    return not events and not printed, evidence


async def latency(context: CheckContext) -> Verdict:
    """Check that reset and step are fast, as measured by the worker on the oracle's messages, episode after episode."""
    limits = context.thresholds
    plays = await context.oracle_plays(limits.seeds)
    scripts = [[turn.message for turn in episode.turns] for episode in plays]
    resets, steps = [math.inf] * len(plays), [math.inf] * sum(map(len, scripts))
    for rounds in range(1, LATENCY_ROUNDS + 1):
        replays = [
            await with_seed_note(seed, replay(context.source, seed, script))
            for seed, script in zip(context.panel(len(plays)), scripts, strict=True)
        ]
        resets = quickest(resets, [episode.reset_seconds for episode in replays])
        steps = quickest(steps, [seconds for episode in replays for seconds in episode.step_seconds])
        evidence: dict[str, object] = {
            "reset_p95": p95(resets),
            "reset_allowed": limits.reset_seconds,
            "step_p95": p95(steps),
            "step_allowed": limits.step_seconds,
            "played": rounds,
        }
        passed = p95(resets) <= limits.reset_seconds and p95(steps) <= limits.step_seconds
        if passed:
            break
    return passed, evidence


def quickest(first: list[float], second: list[float]) -> list[float]:
    """Return the smaller time of each call; calls made in only one of the two rounds are left out."""
    return [min(pair) for pair in zip(first, second, strict=False)]


def p95(seconds: list[float]) -> float:
    """Return the 95th percentile, rounded to the microsecond; 0 without calls."""
    sorted_seconds = sorted(seconds) or [0.0]
    return round(sorted_seconds[min(len(sorted_seconds) - 1, int(0.95 * len(sorted_seconds)))], 6)
