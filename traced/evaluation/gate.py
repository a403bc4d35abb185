"""The gate: it combines three paired comparisons of base and adapter into one answer.

    environment  the capability's own environment: the low bound must exceed ``environment_margin``
    target       the target's gate split: the low bound must exceed ``target_margin`` (0: an improvement)
    untouched    target tasks that do not need the capability: no loss beyond ``untouched_margin`` (non-inferiority)

A comparison passes (low bound above the requirement), fails (high bound below it) or is inconclusive. The gate passes
if all comparisons pass and fails if one fails. An inconclusive gate gets further rounds of episodes for its open
comparisons, up to ``max_rounds``. After the last round it stays inconclusive, which is never a pass.

Error control: each round's interval is computed at 1 - (1 - level) / R (Bonferroni over R rounds), so the chance that
any round's interval misses the true difference is at most 1 - level. The bounds of Pocock (1977) and of O'Brien and
Fleming (1979) are tighter but need equal rounds. By the same bound a final comparison keeps its answer in later rounds.
A round that a person requests judges all comparisons again, and its answer replaces the earlier one, even a pass.
Requiring all three comparisons needs no further correction (intersection-union test, Berger 1982, Technometrics
24:295-300).

Not covered: correction over several adapters of one cycle; each adapter is decided separately and approved by a person.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from store.types import GateAnswer, GateResult, Label, PairedDifference, Trajectory, Verdict
from traced.core.errors import GateError
from traced.evaluation.intervals import Pair, compare

ComparisonName = Literal["environment", "target", "untouched"]


@dataclass(frozen=True)
class GatePolicy:
    """The gate's settings: margins as differences of success rates in 0-1, and the confidence over all rounds."""

    level: float = 0.95
    max_rounds: int = 3
    environment_margin: float = 0.02
    target_margin: float = 0.0
    untouched_margin: float = 0.05

    @property
    def level_per_round(self) -> float:
        """Return the confidence level of one round's interval."""
        return 1 - (1 - self.level) / self.max_rounds

    def required(self, name: ComparisonName) -> float:
        """Return the bound that the low end of comparison ``name`` must exceed."""
        return {
            "environment": self.environment_margin,
            "target": self.target_margin,
            "untouched": -self.untouched_margin,
        }[name]


def judge(
    adapter: str,
    evidence: Mapping[ComparisonName, Sequence[Pair]],
    policy: GatePolicy,
    *,
    round_number: int,
    earlier: GateResult | None = None,
) -> GateResult:
    """Return the gate's answer after ``round_number`` rounds (counted from 1).

    Args:
        evidence: The pairs of all rounds by comparison; "untouched" is absent only if every task needs the capability.
        earlier: The previous round's result; its passed and failed comparisons keep their figures.

    Raises:
        GateError: "environment" or "target" is missing, or the round is outside 1..``max_rounds``.
    """
    _check(evidence, policy, round_number)
    final_comparisons = (
        {c.name: c for c in earlier.comparisons if c.answer is not GateAnswer.INCONCLUSIVE} if earlier else {}
    )
    comparisons = [final_comparisons.get(name) or _compare(name, pairs, policy) for name, pairs in evidence.items()]
    return GateResult(adapter, _combine(comparisons), comparisons, round_number)


def open_comparisons(result: GateResult, policy: GatePolicy) -> list[str]:
    """Return the comparisons that another round may settle; empty if the gate's answer is final."""
    if result.answer is not GateAnswer.INCONCLUSIVE or result.rounds >= policy.max_rounds:
        return []
    return [c.name for c in result.comparisons if c.answer is GateAnswer.INCONCLUSIVE]


async def run_gate(
    adapter: str,
    gather: Callable[[int, Sequence[str]], Awaitable[Mapping[ComparisonName, Sequence[Pair]]]],
    policy: GatePolicy,
    first_round: int = 1,
) -> GateResult:
    """Run rounds of episodes until the gate's answer is final, and return the result.

    Args:
        gather: ``gather(round_number, names)`` returns new pairs of the named comparisons.
        first_round: The round after which the gate is first judged, on the pairs of all rounds so far. It is greater
            than 1 if a person requested a further round.

    Raises:
        GateError: ``first_round`` is outside 1..``max_rounds``, or a required comparison has no episodes.
    """
    if not 1 <= first_round <= policy.max_rounds:
        raise GateError(f"round {first_round} is outside 1..{policy.max_rounds}", hint="raise gate.max_rounds")
    evidence: dict[ComparisonName, list[Pair]] = {}
    result: GateResult | None = None
    names: Sequence[str] = ["environment", "target", "untouched"]
    for round_number in range(1, policy.max_rounds + 1):
        for name, pairs in (await gather(round_number, names)).items():
            # No untouched tasks means that every task needs the capability; an empty comparison could never pass.
            if pairs or name != "untouched":
                evidence.setdefault(name, []).extend(pairs)
        if round_number < first_round:
            continue
        result = judge(adapter, evidence, policy, round_number=round_number, earlier=result)
        names = open_comparisons(result, policy)
        if not names:
            break
    assert result is not None
    return result


def untouched_tasks(trajectories: Iterable[Trajectory], labels: Iterable[Label], capability: str) -> set[str]:
    """Return the tasks that do not need ``capability``: every label of the task's base trajectories is NA.

    A task without labels for the capability is not untouched.
    """
    task_of = {t.id: t.task_id for t in trajectories}
    verdicts: dict[str, set[Verdict]] = {}
    for label in labels:
        if label.capability == capability and label.trajectory_id in task_of:
            verdicts.setdefault(task_of[label.trajectory_id], set()).add(label.verdict)
    return {task for task, task_verdicts in verdicts.items() if task_verdicts == {Verdict.NA}}


def _check(evidence: Mapping[ComparisonName, Sequence[Pair]], policy: GatePolicy, round_number: int) -> None:
    missing = {"environment", "target"} - set(evidence)
    if missing:
        raise GateError(f"no episodes for the comparison {sorted(missing)[0]!r}", hint="traced evaluate")
    if not 1 <= round_number <= policy.max_rounds:
        raise GateError(f"round {round_number} is outside 1..{policy.max_rounds}", hint="raise gate.max_rounds")


def _compare(name: ComparisonName, pairs: Sequence[Pair], policy: GatePolicy) -> PairedDifference:
    interval = compare(pairs, policy.level_per_round)
    required = policy.required(name)
    return PairedDifference(
        name=name,
        seeds=interval.tasks,
        base=interval.base,
        adapter=interval.adapter,
        difference=interval.difference,
        low=interval.low,
        high=interval.high,
        level=interval.level,
        required=required,
        answer=_answer(interval.low, interval.high, required),
    )


def _answer(low: float, high: float, required: float) -> GateAnswer:
    if low > required:
        return GateAnswer.PASS
    return GateAnswer.FAIL if high < required else GateAnswer.INCONCLUSIVE


def _combine(comparisons: Sequence[PairedDifference]) -> GateAnswer:
    answers = {c.answer for c in comparisons}
    if GateAnswer.FAIL in answers:
        return GateAnswer.FAIL
    return GateAnswer.PASS if answers == {GateAnswer.PASS} else GateAnswer.INCONCLUSIVE
