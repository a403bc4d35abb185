"""The gate: it combines three paired comparisons of two models into one answer.

    environment  the capability's own environment: the low bound must exceed ``environment_margin``
    target       the target's gate split: the low bound must exceed ``target_margin`` (0: an improvement)
    regression   target tasks in which neither model exercised the capability: no loss beyond ``regression_margin``

A comparison passes (low bound above the requirement), fails (high bound below it) or is inconclusive. The gate passes
if all comparisons pass and fails if one fails. An inconclusive gate gets further rounds of episodes for its open
comparisons, up to ``max_rounds``. After the last round it stays inconclusive, which is never a pass.

What a list of tasks is too short for is said and not asked for. If the target cannot show a difference of
``target_detectable``, it only guards against harm: its comparison passes unless there is evidence of a loss. The same
holds for regression tasks that are too few for their margin. As a requirement that is a margin: the loss that would be
noticed with a probability of 97.5 % (``guarded_loss``). The gain is then proved by environment, canary and replay.

Error control: alpha = 1 - ``level`` is the chance that a comparison passes at its margin, one-sided and over all looks;
it is spent by ``traced.evaluation.spending``. Requiring all comparisons needs no further correction (intersection-union
test, Berger 1982, Technometrics 24:295-300). A final comparison keeps its answer in later rounds. A round that a person
requests judges all comparisons again, and its answer replaces the earlier one, even a pass.

Not covered: correction over several adapters of one cycle; each adapter is decided separately and approved by a person.
"""

import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from store.types import GateAnswer, GateResult, Label, PairedDifference, Trajectory, Verdict
from traced.core.errors import GateError
from traced.evaluation.intervals import Pair, TaskCounts, compare_tasks, counts_by_task, few_tasks_value
from traced.evaluation.spending import equal_looks

ComparisonName = Literal["environment", "target", "regression"]
POWER = 0.8  # with which a difference counts as detectable
DETECTION = 0.975  # probability with which a guarded loss is noticed


@dataclass(frozen=True)
class GatePolicy:
    """The gate's settings: margins as differences of success rates in 0-1, and the confidence over all rounds.

    Attributes:
        target_tasks: The tasks of the target's gate split, if they are a list that is played again; 0: new seeds.
        target_trials: The trials of each of them over all rounds.
        base_success: The success rate that is expected of the base, in 0-1; it sets what few pairs can show.
    """

    level: float = 0.95
    max_rounds: int = 3
    environment_margin: float = 0.02
    target_margin: float = 0.0
    target_detectable: float = 0.25
    regression_margin: float = 0.05
    target_tasks: int = 0
    target_trials: int = 1
    base_success: float = 0.5

    def interval_level(self, round_number: int) -> float:
        """Return the two-sided confidence level of a round's intervals; each of their ends is a one-sided test."""
        return 2 * NormalDist().cdf(equal_looks(self.max_rounds, 1 - self.level)[round_number - 1]) - 1

    def detectable(self, tasks: int) -> float:
        """Return the difference that so many tasks show with a probability of 80 %."""
        return self._difference(POWER, tasks)

    def guarded_loss(self, tasks: int) -> float:
        """Return the loss that so many tasks show with a probability of 97.5 %."""
        return self._difference(DETECTION, tasks)

    @property
    def is_target_too_small(self) -> bool:
        """Return whether the target cannot show a gain of ``target_detectable``."""
        return self.target_tasks > 0 and self.detectable(self.target_tasks) > self.target_detectable

    def required(self, name: ComparisonName, share: float = 1.0) -> float:
        """Return the bound that the low end of comparison ``name`` must exceed.

        Args:
            share: For regression tasks, their share of the target's tasks.
        """
        if name == "environment":
            return self.environment_margin
        if name == "target":
            return -self.guarded_loss(self.target_tasks) if self.is_target_too_small else self.target_margin
        tasks = round(share * self.target_tasks)
        return -max(self.regression_margin, self.guarded_loss(tasks)) if tasks else -self.regression_margin

    def _difference(self, power: float, tasks: int) -> float:
        """Return the difference that is shown with this probability, at most 1; runs that agree show smaller ones."""
        if tasks < 2:
            return 1.0
        last = few_tasks_value(equal_looks(self.max_rounds, 1 - self.level)[-1], tasks)
        rate = min(max(self.base_success, 0.1), 0.9)
        error = math.sqrt(2 * rate * (1 - rate) / (tasks * self.target_trials))
        return min(1.0, (last + NormalDist().inv_cdf(power)) * error)


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
        evidence: The pairs of all rounds by comparison; "regression" is absent only if every task exercises the
            capability.
        earlier: The previous round's result; its passed and failed comparisons keep their figures.

    Raises:
        GateError: "environment" or "target" is missing, or the round is outside 1..``max_rounds``.
    """
    _check(evidence, policy, round_number)
    final_comparisons = (
        {c.name: c for c in earlier.comparisons if c.answer is not GateAnswer.INCONCLUSIVE} if earlier else {}
    )
    share = len(_tasks(evidence.get("regression", ()))) / max(1, len(_tasks(evidence["target"])))
    comparisons = [
        final_comparisons.get(name) or compare_pairs(name, pairs, policy, round_number, share)
        for name, pairs in evidence.items()
    ]
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
    names: Sequence[str] = ["environment", "target", "regression"]
    for round_number in range(1, policy.max_rounds + 1):
        for name, pairs in (await gather(round_number, names)).items():
            # Without regression tasks every task exercises the capability; an empty comparison could never pass.
            if pairs or name != "regression":
                evidence.setdefault(name, []).extend(pairs)
        if round_number < first_round:
            continue
        result = judge(adapter, evidence, policy, round_number=round_number, earlier=result)
        names = open_comparisons(result, policy)
        if not names:
            break
    assert result is not None
    return result


def regression_tasks(
    trajectories: Iterable[Trajectory], labels: Iterable[Label], capabilities: Collection[str]
) -> set[str]:
    """Return the tasks in which no run exercised any of the capabilities: all labels of their trajectories are NA.

    The trajectories are those of both models: a run that failed early shows no need, and would make a task look as if
    it had none. A task without labels for each capability is left out.
    """
    task_of = {t.id: t.task_id for t in trajectories}
    verdicts: dict[str, dict[str, set[Verdict]]] = {}
    for label in labels:
        if label.capability in capabilities and label.trajectory_id in task_of:
            of_task = verdicts.setdefault(task_of[label.trajectory_id], {})
            of_task.setdefault(label.capability, set()).add(label.verdict)
    return {
        task
        for task, of_task in verdicts.items()
        if of_task.keys() == set(capabilities) and all(values == {Verdict.NA} for values in of_task.values())
    }


def changes_regression_tasks(comparison: PairedDifference) -> bool:
    """Return whether regression tasks change by more than their margin, so that they are none."""
    margin = -comparison.required
    return comparison.name == "regression" and (comparison.low > margin or comparison.high < -margin)


def _check(evidence: Mapping[ComparisonName, Sequence[Pair]], policy: GatePolicy, round_number: int) -> None:
    missing = {"environment", "target"} - set(evidence)
    if missing:
        raise GateError(f"no episodes for the comparison {sorted(missing)[0]!r}", hint="traced evaluate")
    if not 1 <= round_number <= policy.max_rounds:
        raise GateError(f"round {round_number} is outside 1..{policy.max_rounds}", hint="raise gate.max_rounds")


def compare_pairs(
    name: ComparisonName, pairs: Iterable[Pair], policy: GatePolicy, round_number: int = 1, share: float = 1.0
) -> PairedDifference:
    """Return a comparison on the pairs of ``round_number`` rounds; ``share`` as in ``GatePolicy.required``."""
    return compare_counts(name, counts_by_task(pairs), policy, round_number, share)


def compare_counts(
    name: ComparisonName, tasks: Sequence[TaskCounts], policy: GatePolicy, round_number: int = 1, share: float = 1.0
) -> PairedDifference:
    """Return a comparison as ``compare_pairs`` does, from the counts of each task."""
    interval = compare_tasks(tasks, policy.interval_level(round_number))
    required = policy.required(name, share)
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


def _tasks(pairs: Iterable[Pair]) -> set[str]:
    return {p.task_id for p in pairs}


def _answer(low: float, high: float, required: float) -> GateAnswer:
    if low > required:
        return GateAnswer.PASS
    return GateAnswer.FAIL if high < required else GateAnswer.INCONCLUSIVE


def _combine(comparisons: Sequence[PairedDifference]) -> GateAnswer:
    answers = {c.answer for c in comparisons}
    if GateAnswer.FAIL in answers:
        return GateAnswer.FAIL
    return GateAnswer.PASS if answers == {GateAnswer.PASS} else GateAnswer.INCONCLUSIVE
