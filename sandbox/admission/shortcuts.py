"""What must not pay: not trying (``floor``), and every adversary of the panel (``exploits``).

A play that breaks the environment is counted under "faults": an agent that can end its episode as a fault escapes its
reward, and throws the rollout away. A lucky guess costs a sound environment nothing: a policy over its bound is played
on more seeds, and judged by all of them; and an adversary that did just what was asked (``solved``) took no shortcut.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sandbox.admission import adversaries
from sandbox.admission.bench import Bench, Played, noting, play, together
from sandbox.admission.evidence import EXAMPLES, Verdict, example, fault_evidence
from sandbox.admission.policies import FLOOR, PATIENCE, PATIENT, Policy
from sandbox.admission.solved import solutions, solves
from sandbox.client import SandboxSource
from sandbox.contract import Message, Task
from sandbox.errors import EnvironmentFault


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
