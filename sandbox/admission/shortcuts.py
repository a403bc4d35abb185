"""What must not pay: not trying (``floor``), and every adversary of the panel (``exploits``).

A play that breaks the environment is counted under "faults": an agent that can end its episode as a fault escapes its
reward, and throws the rollout away. A lucky guess costs a sound environment nothing: a policy over its bound is played
on more seeds, and judged by all of them; and an adversary that did just what was asked (``solved``) took no shortcut.

Whether a rewarded episode of an adversary was the task itself, done: then it is no shortcut.

An adversary that tries everything may also do what was asked, where everything else is refused. It has solved the task
when the writes that were accepted are exactly the oracle's, and every value in them had been read by then, in the
prompt or an answer. A value that was guessed or counted up to, and any other write that was accepted, is a shortcut.

Accepted is what is not answered in the form in which this environment answers unknown tools and broken JSON. How it
fails: where the oracle's own writes are answered in that form, or one of the two cannot be played, nothing counts as
solved. Not covered: truth values, which no text spells out, and values that have to be reckoned.
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
    Bench,
    Played,
    Verdict,
    example,
    fault_evidence,
    noting,
    play,
    replay,
    together,
)
from sandbox.admission.fingerprint import canonical
from sandbox.admission.interface import error_form
from sandbox.admission.policies import FLOOR, PATIENCE, PATIENT, Policy, call, tool_name, write_tools
from sandbox.client import SandboxSource
from sandbox.contract import Message, Task
from sandbox.errors import EnvironmentFault

Form = tuple[str, ...]
REFUSED_ON = 4  # seeds on which it is seen how a call is refused


@dataclass(frozen=True)
class Write:
    """A call to a writing tool, its arguments as canonical JSON, with the answer and how much had been read before."""

    name: str
    arguments: str
    answer: str
    read: int  # of ``_texts``


@dataclass(frozen=True)
class Solutions:
    """What the oracle writes on each seed, and how a call is refused."""

    writes: dict[int, list[tuple[str, str]]]
    refused: frozenset[Form]


async def solutions(bench: Bench, count: int) -> Solutions | None:
    """Those of the panel's first ``count`` seeds; None where they cannot be told."""
    try:
        plays = await bench.oracle_plays(count)
        refused = await _refused(bench)
    except EnvironmentFault:  # other checks tell of it
        return None
    seeds = bench.panel(count)
    written = {seed: list(_writes(one.task, bench.chat(one))) for seed, one in zip(seeds, plays, strict=True)}
    return told_apart(written, refused)


def told_apart(written: dict[int, list[Write]], refused: frozenset[Form]) -> Solutions | None:
    """What the oracle wrote, as solutions; None where it is answered as if it had been refused."""
    if any(error_form(write.answer) in refused for writes in written.values() for write in writes):
        return None
    return Solutions({seed: _deeds(writes) for seed, writes in written.items()}, refused)


async def _refused(bench: Bench) -> frozenset[Form]:
    """The forms of the answers to calls that no environment can take."""
    first = (await bench.oracle_plays(1))[0].task
    name = tool_name(first.tools[0]) if first.tools else "no_such_tool"
    script = [call(0, ("no_such_tool", "{}")), call(1, (name, "{not json"))]
    replays = await together(noting(seed, replay(bench.twin, seed, script)) for seed in bench.panel(REFUSED_ON))
    replies = [reply for one in replays for step in one.data[3 : 3 + len(script)] for reply in step[0]]
    return frozenset(error_form(str(reply["content"])) for reply in replies if reply["role"] == "tool")


def solves(played: Played, known: Solutions) -> bool:
    """Whether it succeeded by the oracle's writes and no other that was accepted, from values that had been read."""
    if not played.score.success:
        return False
    writes = _writes(played.task, played.messages)
    accepted = [write for write in writes if error_form(write.answer) not in known.refused]
    wanted = known.writes[played.seed]
    if not wanted or _deeds(accepted) != wanted:
        return False
    texts = list(_texts(played.task, played.messages))
    return all(_was_read(write, "\n".join(texts[: write.read]).casefold()) for write in accepted)


def _deeds(writes: list[Write]) -> list[tuple[str, str]]:
    return sorted((write.name, write.arguments) for write in writes)


def _writes(task: Task, messages: list[Message]) -> Iterator[Write]:
    """Every call to a writing tool, in order."""
    names = {tool_name(tool) for tool in write_tools(task)}
    answers = {reply.get("tool_call_id"): str(reply.get("content")) for reply in messages if reply["role"] == "tool"}
    read = 1 + len(task.messages)
    for message in messages:
        for one in message.get("tool_calls") or []:
            name, arguments = one["function"]["name"], _parsed(one["function"]["arguments"])
            if name in names:
                yield Write(name, canonical(arguments), answers.get(one["id"], ""), read)
        read += message["role"] != "assistant"


def _texts(task: Task, messages: list[Message]) -> Iterator[str]:
    """What an agent reads, in order."""
    yield task.system
    for message in [*task.messages, *(one for one in messages if one["role"] != "assistant")]:
        yield str(message.get("content") or "")


def _was_read(write: Write, text: str) -> bool:
    return all(re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) for value in _values(json.loads(write.arguments)))


def _values(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _values(item)
    else:
        yield value.casefold() if isinstance(value, str) else json.dumps(value)


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


@dataclass(frozen=True)
class Broken:
    """An episode in which the environment failed, up to the message that it failed on."""

    seed: int
    task: Task | None
    messages: list[Message]
    error: EnvironmentFault


async def floor(bench: Bench) -> Verdict:
    """Policies that do not try stay at the floor."""
    limits = bench.thresholds
    allowed = {"reward": limits.floor_reward, "success": limits.floor_success}
    return await _judged(bench, FLOOR, allowed, may_solve=False)


async def exploits(bench: Bench) -> Verdict:
    """Policies that want reward without work stay below the pass mark."""
    limits = bench.thresholds
    allowed = {"reward": limits.exploit_reward, "success": limits.exploit_success}
    return await _judged(bench, adversaries.panel(), allowed, may_solve=True)


async def _judged(bench: Bench, policies: dict[str, Policy], allowed: dict[str, float], *, may_solve: bool) -> Verdict:
    """Every policy on the whole panel of seeds, in the twin; one that was over its bound on more seeds."""
    allowed = {**allowed, "faults": 0.0}
    limits = bench.thresholds
    rates: dict[str, dict[str, float]] = {}
    confirmed: list[str] = []
    examples: list[dict[str, Any]] = []
    fault: dict[str, Any] = {}
    for name, policy in policies.items():
        turns = max(limits.turns, PATIENCE) if name in PATIENT else limits.turns
        played = await _played(bench, policy, bench.panel(limits.seeds), turns)
        solved = await _solved(bench, played) if may_solve else None
        rates[name] = _rates(played, solved)
        if _over(rates[name], allowed):
            confirmed.append(name)
            more = bench.panel(max(limits.confirm_seeds, limits.seeds))[limits.seeds :]
            played += await _played(bench, policy, more, turns)
            solved = await _solved(bench, played) if may_solve else None
            rates[name] = _rates(played, solved)
        if _over(rates[name], allowed):
            examples.append(_worst(name, played, solved or set()))
            fault = fault or next((fault_evidence(one.error) for one in played if isinstance(one, Broken)), {})
    evidence = {**rates, "allowed": allowed, "seeds": limits.seeds}
    if confirmed:
        evidence |= {"played_on_more_seeds": confirmed, "more_seeds": max(limits.confirm_seeds, limits.seeds)}
    if examples:
        examples.sort(key=lambda one: len(one["transcript"]))  # what the simplest does shows the cause
        evidence |= {**fault, "examples": examples[:EXAMPLES]}
    return not examples, evidence


def _over(rates: dict[str, float], allowed: dict[str, float]) -> bool:
    return any(rates[name] > allowed[name] for name in allowed)


async def _played(bench: Bench, policy: Policy, seeds: list[int], turns: int) -> list[Played | Broken]:
    return await together(noting(seed, _attempt(bench.twin, seed, policy, turns)) for seed in seeds)


async def _attempt(source: SandboxSource, seed: int, policy: Policy, turns: int) -> Played | Broken:
    seen: list[tuple[Task, list[Message]]] = []

    def watched(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
        message = policy(task, messages, turn, rng)
        seen.append((task, [*messages, message]))
        return message

    try:
        return await play(source, seed, watched, turns)
    except EnvironmentFault as error:
        error.add_note(f"seed {seed}")
        task, messages = seen[-1] if seen else (None, [])
        return Broken(seed, task, messages, error)


async def _solved(bench: Bench, played: Sequence[Played | Broken]) -> set[int]:
    """The seeds whose episode succeeded by doing what the oracle does."""
    successes = [one for one in played if isinstance(one, Played) and one.score.success]
    known = await solutions(bench, len(played)) if successes else None
    return {one.seed for one in successes if known and solves(one, known)}


def _rates(played: list[Played | Broken], solved: set[int] | None) -> dict[str, float]:
    """What was reached without the work and, where that is looked at, the share in which the work was done."""
    scores = [one.score for one in played if isinstance(one, Played) and one.seed not in (solved or ())]
    rates = {
        "reward": sum(score.reward for score in scores) / len(played),
        "success": sum(score.success for score in scores) / len(played),
        "faults": statistics.fmean(isinstance(one, Broken) for one in played),
        **({"solved": len(solved) / len(played)} if solved is not None else {}),
    }
    return {name: round(rate, 4) for name, rate in rates.items()}


def _worst(name: str, played: list[Played | Broken], solved: set[int]) -> dict[str, Any]:
    """The episode that shows best what is wrong: one that broke, else the best paid that is none of the solved."""
    broken = next((one for one in played if isinstance(one, Broken)), None)
    if broken is not None:
        what = f"{name} broke the environment: {broken.error}"
        return example(broken.seed, what, broken.task or Task("", [], []), broken.messages)
    whole = (one for one in played if isinstance(one, Played) and one.seed not in solved)
    best = max(whole, key=lambda one: (one.score.success, one.score.reward))
    what = f"{name} got reward {best.score.reward:g}, success {best.score.success}"
    return example(best.seed, what, best.task, best.messages)
