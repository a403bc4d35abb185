"""An episode depends on its seed and the messages sent, and on nothing else.

``runs`` is the first sign of life. ``determinism`` plays the same episodes again in other circumstances and compares
every byte: again, in another process under another hash seed and in another order, among other episodes, on an
instance that has played before, with the score asked for after every message, and in a process worn by many episodes.
Three scripts are played for each seed, the oracle's and those of two careless agents, so that an environment which
grows lenient is seen as well: one of them guesses from what it sees, the other from what the oracle gives to arguments
of the same name, so that it gets through where only words do. Not covered: a change that comes later than
``wear_episodes``.

What an episode costs in time (``latency``), and what the environment did besides computing (``effects``).
"""

import json
import math
import random
from collections.abc import Awaitable, Callable
from typing import Any

from sandbox.admission.context import Bench, Replay, Verdict, example, noting, play, replay, together
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

CARELESS_TURNS = 6
TOGETHER = 50  # episodes that wear the process at once

Pair = tuple[int, list[Message]]  # a seed and the assistant messages to send


async def runs(bench: Bench) -> Verdict:
    """Two seeds, one after the other, come through reset, step, score and oracle in both processes."""
    seeds = bench.panel(2)
    for source in (bench.source, bench.twin):
        for seed in seeds:
            await noting(seed, play(source, seed, empty, 2))
            await noting(seed, source.oracle(seed))
    return True, {"seeds": seeds}


async def determinism(bench: Bench) -> Verdict:
    """The same seed and messages give the same bytes, whatever else the process has done."""
    seeds = bench.panel(bench.thresholds.twin_seeds)
    plays = await bench.oracle_plays(len(seeds))
    for way, source in (("again", bench.source), ("in another process", bench.twin)):
        others = await together(noting(seed, source.oracle(seed)) for seed in reversed(seeds))
        for seed, one, other in zip(seeds, plays, reversed(others), strict=True):
            if difference := first_difference(canonical(as_data(one)), canonical(as_data(other))):
                return False, _differs(seed, f"the oracle's play {way}", difference, one)
    return await _replayed(bench, seeds, plays)


async def _replayed(bench: Bench, seeds: list[int], plays: list[OraclePlay]) -> Verdict:
    """The scripts one after another in a fresh process, against the same in every other circumstance."""
    scripts = [(seed, script_of(one)) for seed, one in zip(seeds, plays, strict=True)]
    agents = (random_calls, _calls_like(plays))
    careless = await together(noting(seed, _careless(bench.source, seed, agent)) for agent in agents for seed in seeds)
    pairs = [*scripts, *(pair for pair in careless if pair is not None)]
    first = [await noting(seed, replay(bench.source, seed, script)) for seed, script in pairs]
    worn = 0

    async def after_many(pairs: list[Pair]) -> list[Replay]:
        nonlocal worn
        worn = await _wear(bench)
        return await _each(bench.source, pairs)

    ways = {**_ways(bench), "after many other episodes": after_many}
    for way, replays in ways.items():
        for at, other in enumerate(await replays(pairs)):
            if difference := first_difference(canonical(first[at].data), canonical(other.data)):
                whose = "the oracle's messages" if at < len(scripts) else "a careless agent's messages"
                return False, _differs(pairs[at][0], f"{whose} {way}", difference, plays[at % len(plays)])
    return True, {"seeds": len(seeds), "processes": 2, "interleaved": True, "scripts": len(pairs), "worn_by": worn}


def _ways(bench: Bench) -> dict[str, Callable[[list[Pair]], Awaitable[list[Replay]]]]:
    async def backwards(pairs: list[Pair]) -> list[Replay]:
        return (await _each(bench.twin, pairs[::-1]))[::-1]

    return {
        "interleaved with other episodes": backwards,
        "on an instance that has played before": lambda pairs: _each(bench.twin, pairs, again=True),
        "with its score asked for after every message": lambda pairs: _each(bench.twin, pairs, scored=True),
    }


async def _each(source: SandboxSource, pairs: list[Pair], **how: bool) -> list[Replay]:
    return await together(noting(seed, replay(source, seed, script, **how)) for seed, script in pairs)


def _differs(seed: int, where: str, difference: str, play: OraclePlay) -> dict[str, Any]:
    what = f"differs when this seed is played: {where}. The transcript is the oracle's first play."
    evidence = {"seed": seed, "where": where, "difference": difference}
    return {**evidence, "examples": [example(seed, what, play.task, Bench.chat(play))]}


async def _careless(source: SandboxSource, seed: int, agent: Policy) -> Pair | None:
    """The messages of an agent that calls by chance and claims success; None where that breaks the environment."""

    def claiming(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
        return agent(task, messages, turn, rng) if turn < CARELESS_TURNS else say(SUCCESS_WORDS)

    try:
        played = await play(source, seed, claiming, CARELESS_TURNS + 1)
    except EnvironmentFault:  # the exploit checks tell of it
        return None
    return seed, [message for message in played.messages if message["role"] == "assistant"]


def _calls_like(plays: list[OraclePlay]) -> Policy:
    """Any tool, each argument what the oracle gives somewhere to one of that name."""
    given: dict[str, list[Any]] = {}
    for one in plays:
        for made in calls(script_of(one)).values():
            for name, value in arguments_of(made).items():
                given.setdefault(name, []).append(value)

    def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
        if not task.tools:
            return say("")
        tool = rng.choice(task.tools)
        guessed = json.loads(guess(tool, visible_values(task, messages), rng))
        known = {name: rng.choice(given[name]) if name in given else value for name, value in guessed.items()}
        return call(turn, (tool_name(tool), json.dumps(known)))

    return act


async def _wear(bench: Bench) -> int:
    """Play many short episodes in the source's process; answers how many. Slow environments get fewer."""
    limits = bench.thresholds
    seeds = (bench.panel(limits.twin_seeds) * TOGETHER)[:TOGETHER]
    worn, spent = 0, 0.0
    while worn < limits.wear_episodes and spent < limits.wear_seconds:
        replays = await together(noting(seed, replay(bench.source, seed, [say(SUCCESS_WORDS)])) for seed in seeds)
        spent += sum(one.reset_seconds + sum(one.step_seconds) for one in replays)
        worn += len(seeds)
    return worn


def first_difference(one: str, other: str) -> str:
    """Empty when equal, else both texts around the first character that differs."""
    if one == other:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = max(0, at - 40)
    return f"{one[begin : at + 40]!r} against {other[begin : at + 40]!r}"


PLAYED = 2  # times, at most


async def effects(bench: Bench) -> Verdict:
    """No file, socket, process or thread was touched, and nothing printed, in all that was played so far."""
    records = [await source.effects() for source in (bench.source, bench.twin)]
    events = [str(event)[:200] for record in records for event in list(record.get("events") or [])[:20]]
    printed = sum(int(record.get("printed") or 0) for record in records)
    head = next((str(record["printed_head"])[:200] for record in records if record.get("printed_head")), "")
    evidence = {"events": events[:20], "printed_characters": printed, **({"printed": head} if head else {})}
    return not events and not printed, evidence


async def latency(bench: Bench) -> Verdict:
    """Reset and step are quick, as the worker measures them, one episode after the other along the oracle's way.

    Where they are not, the same is played again and of each call the quickest counts: a busy machine is no flaw.
    """
    limits = bench.thresholds
    plays = await bench.oracle_plays(limits.seeds)
    scripts = [[turn.message for turn in one.turns] for one in plays]
    resets, steps = [math.inf] * len(plays), [math.inf] * sum(map(len, scripts))
    for played in range(1, PLAYED + 1):
        replays = [
            await noting(seed, replay(bench.source, seed, script))
            for seed, script in zip(bench.panel(len(plays)), scripts, strict=True)
        ]
        resets = quickest(resets, [one.reset_seconds for one in replays])
        steps = quickest(steps, [seconds for one in replays for seconds in one.step_seconds])
        evidence = {
            "reset_p95": p95(resets),
            "reset_allowed": limits.reset_seconds,
            "step_p95": p95(steps),
            "step_allowed": limits.step_seconds,
            "played": played,
        }
        passed = p95(resets) <= limits.reset_seconds and p95(steps) <= limits.step_seconds
        if passed:
            break
    return passed, evidence


def quickest(one: list[float], other: list[float]) -> list[float]:
    """Call by call; calls that only one of them has made are left out."""
    return [min(pair) for pair in zip(one, other, strict=False)]


def p95(seconds: list[float]) -> float:
    """The 95th percentile, to the microsecond; 0 for no calls."""
    ordered = sorted(seconds) or [0.0]
    return round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 6)
