"""The gate: it combines paired comparisons of two systems into one answer.

    environment  the capability's own environment: the low bound must exceed ``environment_margin``
    target       the target's gate split: the low bound must exceed ``target_margin`` (0: an improvement)
    regression   target tasks that do not need the capability (``TaskNeeds``): no loss beyond a margin
    replay       instead of the last two where no task can be played: held-out conversations, no loss beyond a margin
    live         of the environments of live adapters the worst one, if there are any: no loss beyond
                 ``regression_margin``

A comparison passes (low bound above the requirement), fails (high bound below it) or is inconclusive. The gate passes
if all comparisons pass and fails if one fails. An inconclusive gate gets further rounds of episodes for its open
comparisons, up to ``max_rounds``. After the last round it stays inconclusive, which is never a pass.

What a comparison can show depends on its tasks and trials, and is computed before the gate starts. The margin of
regression tasks is the smallest loss that they can rule out (``detectable``), between ``regression_margin`` and
``largest_regression_margin``. A comparison that can show too little is untested after the last round, unless it has
passed or failed: regression tasks that cannot rule out the largest margin, and a target whose list of tasks cannot
show a gain of ``target_detectable``. The gate does not require it; environment, canary and replay show the rest.
A target of recorded conversations cannot be played: its gate has the environment, and the replay of its held-out
conversations if there are any.

Error control: alpha = 1 - ``level`` is the chance that a comparison passes at its margin, one-sided and over all looks;
it is spent by ``traced.evaluation.spending``. Requiring all comparisons needs no further correction (intersection-union
test, Berger 1982, Technometrics 24:295-300). A final comparison keeps its answer in later rounds. A round that a person
requests judges all comparisons again, and its answer replaces the earlier one, even a pass.

Not covered: correction over several adapters of one cycle; each adapter is decided separately and approved by a person.
"""

import itertools
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal

from store.types import GateAnswer, GateResult, Label, Outcome, PairedDifference, Trajectory, Verdict
from traced.core.errors import GateError
from traced.evaluation.intervals import Pair, PairCounts, compare_counts, count_pairs, few_tasks_value
from traced.evaluation.spending import equal_looks

ComparisonName = Literal["environment", "target", "regression", "replay", "live"]
POWER = 0.8  # with which a difference counts as detectable
# A gate asks for several comparisons at once; a harmless adapter should pass that of the regression tasks.
REGRESSION_POWER = 0.95
# A loss that sits in few tasks, in all of their trials, is easily missed, and with it the spread between tasks: at a
# correlation of 0.9 and 8 trials 66 regression tasks passed at their margin in 7 % of 4,000 simulations, now in 4 %.
CHANGED_TASKS = 0.25
NAMES: tuple[ComparisonName, ...] = ("environment", "target", "regression", "replay", "live")


@dataclass(frozen=True)
class GatePolicy:
    """The gate's settings: margins as differences of success rates in 0-1, and the confidence over all rounds.

    Attributes:
        target_tasks: The tasks of the target that are played in all rounds together; 0: unknown, all is testable.
        target_trials: The trials of each of them over all rounds that are not repetitions of one another.
        is_list: Whether the target cannot have more tasks.
        base_success: The success rate that is expected of the base, in 0-1.
        plays_target: Whether episodes of the target can be played.
        replay_tasks: The tasks of held-out conversations that are replayed in every round, if it cannot.
        live_environments: The environments of live adapters.
    """

    level: float = 0.95
    max_rounds: int = 3
    environment_margin: float = 0.02
    target_margin: float = 0.0
    target_detectable: float = 0.25
    regression_margin: float = 0.05
    largest_regression_margin: float = 0.15
    target_tasks: int = 0
    target_trials: int = 1
    is_list: bool = False
    base_success: float = 0.5
    plays_target: bool = True
    replay_tasks: int = 0
    live_environments: int = 0

    @property
    def names(self) -> tuple[ComparisonName, ...]:
        """Return the comparisons that the gate makes."""
        names: list[ComparisonName] = ["environment"]
        if self.plays_target:
            names += ["target", "regression"]
        elif self.replay_tasks:
            names.append("replay")
        return (*names, "live") if self.live_environments else tuple(names)

    def interval_level(self, round_number: int) -> float:
        """Return the two-sided confidence level of a round's intervals; each of their ends is a one-sided test."""
        return 2 * NormalDist().cdf(equal_looks(self.max_rounds, 1 - self.level)[round_number - 1]) - 1

    def detectable(self, tasks: int, power: float = POWER) -> float:
        """Return the difference that so many tasks show with this probability, 1 at most.

        The two runs of a pair count as independent; those that agree more often can show smaller differences.
        """
        if tasks < 2:
            return 1.0
        last = few_tasks_value(equal_looks(self.max_rounds, 1 - self.level)[-1], tasks)
        return min(1.0, (last + NormalDist().inv_cdf(power)) * math.sqrt(self._variance / tasks))

    def tasks_needed(self, difference: float, power: float = POWER) -> int:
        """Return the number of tasks of ``target_trials`` trials that show a difference in 0-1 exclusive."""
        # With many tasks Student's t is normal: from there a few steps remain.
        start = math.floor((self._normal_sum(power) / difference) ** 2 * self._variance)
        return next(n for n in itertools.count(max(2, start)) if self.detectable(n, power) <= difference)

    def _normal_sum(self, power: float) -> float:
        return equal_looks(self.max_rounds, 1 - self.level)[-1] + NormalDist().inv_cdf(power)

    @property
    def _variance(self) -> float:
        """Return the variance of a task's difference of mean success."""
        rate = min(max(self.base_success, 0.1), 0.9)
        return 2 * rate * (1 - rate) / self.target_trials

    def required(self, name: ComparisonName, tasks: int = 0) -> float:
        """Return the bound that the low end of comparison ``name`` must exceed.

        Args:
            tasks: The expected number of regression tasks over all rounds; 0: unknown.
        """
        if name == "environment":
            return self.environment_margin
        if name == "target":
            return self.target_margin
        if name == "live":
            return -self.regression_margin  # there is no end of seeds
        tasks = self.replay_tasks if name == "replay" else tasks
        smallest = self.detectable(tasks, REGRESSION_POWER) if tasks else 0.0
        return -max(self.regression_margin, min(smallest, self.largest_regression_margin))

    def _rules_out_margin(self, tasks: int) -> bool:
        return self.detectable(tasks, REGRESSION_POWER) <= -self.required("regression", tasks)

    def is_testable(self, name: ComparisonName, tasks: int = 0) -> bool:
        """Return whether a comparison can be expected to have an answer; ``tasks`` as in ``required``."""
        if name == "target":
            return not self.is_list or self.detectable(self.target_tasks) <= self.target_detectable
        if name == "replay":
            return self._rules_out_margin(self.replay_tasks)
        return name in ("environment", "live") or not tasks or self._rules_out_margin(tasks)


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
        evidence: The pairs of all rounds by comparison; "regression" is absent only if every task needs the
            capability.
        earlier: The previous round's result; its passed and failed comparisons keep their figures.

    Raises:
        GateError: "environment" or the target that can be played is missing, or the round is outside
            1..``max_rounds``.
    """
    counts = {name: count_pairs(pairs) for name, pairs in evidence.items()}
    return judge_counts(adapter, counts, policy, round_number=round_number, earlier=earlier)


def judge_counts(
    adapter: str,
    counts: Mapping[ComparisonName, PairCounts],
    policy: GatePolicy,
    *,
    round_number: int,
    earlier: GateResult | None = None,
) -> GateResult:
    """Return the gate's answer as ``judge`` does, from the counts of the pairs."""
    _check(counts, policy, round_number)
    final_comparisons = (
        {c.name: c for c in earlier.comparisons if c.answer is not GateAnswer.INCONCLUSIVE} if earlier else {}
    )
    tasks = expected_regression_tasks(counts, policy)
    comparisons = [
        final_comparisons.get(name) or judge_comparison(name, counts[name], policy, round_number, tasks)
        for name in NAMES
        if name in counts
    ]
    return GateResult(adapter, _combine(comparisons), comparisons, round_number)


def expected_regression_tasks(counts: Mapping[ComparisonName, PairCounts], policy: GatePolicy) -> int:
    """Return how many regression tasks all rounds will have, at their share of the target's tasks so far."""
    if "regression" not in counts or not counts["target"].tasks:
        return 0
    return round(policy.target_tasks * counts["regression"].tasks / counts["target"].tasks)


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
        gather: ``gather(round_number, names)`` returns the named comparisons' pairs of all rounds so far.
        first_round: The round after which the gate is first judged, on the pairs of all rounds so far. It is greater
            than 1 if a person requested a further round.

    Raises:
        GateError: ``first_round`` is outside 1..``max_rounds``, or a required comparison has no episodes.
    """
    if not 1 <= first_round <= policy.max_rounds:
        raise GateError(f"round {first_round} is outside 1..{policy.max_rounds}", hint="raise gate.max_rounds")
    evidence: dict[ComparisonName, Sequence[Pair]] = {}
    result: GateResult | None = None
    names: Sequence[str] = policy.names
    for round_number in range(1, policy.max_rounds + 1):
        for name, pairs in (await gather(round_number, names)).items():
            # Without regression tasks every task needs the capability; an empty comparison could never pass.
            if pairs or name != "regression":
                evidence[name] = pairs
        if round_number < first_round:
            continue
        result = judge(adapter, evidence, policy, round_number=round_number, earlier=result)
        names = open_comparisons(result, policy)
        if not names:
            break
        if "regression" in names and "target" not in names:
            # The share of regression tasks is that among the target's tasks of the same rounds.
            names = ["target", *names]
    assert result is not None
    return result


@dataclass
class TaskNeeds:
    """Which tasks need the capabilities of an adapter, as far as the runs of both models show.

    A task needs one if a run exercised it, unless another run solved the task without. So an adapter that exercises its
    capability where nothing asks for it, and fails by that, does so in a task that counts as a regression task. Runs of
    both models count alike: neither has an advantage from the choice of tasks by their outcomes. The base model's runs
    alone would not do: one that fails early shows no need.
    """

    exercising: set[str] = field(default_factory=set)
    solved_without: set[str] = field(default_factory=set)

    def add(self, trajectories: Iterable[Trajectory], labels: Iterable[Label], capabilities: Collection[str]) -> None:
        """Add runs; one that has no label for one of the capabilities counts as if it exercised it."""
        verdicts = {(row.trajectory_id, row.capability): row.verdict for row in labels}
        for t in trajectories:
            if any(verdicts.get((t.id, capability)) is not Verdict.NA for capability in capabilities):
                self.exercising.add(t.task_id)
            elif t.outcome is Outcome.SUCCESS:
                self.solved_without.add(t.task_id)

    def is_regression_task(self, task_id: str) -> bool:
        """Return whether no run shows that the task needs a capability."""
        return task_id not in self.exercising or task_id in self.solved_without


def _check(evidence: Collection[ComparisonName], policy: GatePolicy, round_number: int) -> None:
    missing = set(policy.names) - {"regression"} - set(evidence)
    if missing:
        raise GateError(f"no episodes for the comparison {sorted(missing)[0]!r}", hint="traced evaluate")
    if not 1 <= round_number <= policy.max_rounds:
        raise GateError(f"round {round_number} is outside 1..{policy.max_rounds}", hint="raise gate.max_rounds")


def judge_comparison(
    name: ComparisonName, counts: PairCounts, policy: GatePolicy, round_number: int, regression_tasks: int = 0
) -> PairedDifference:
    """Return a comparison after ``round_number`` rounds; ``regression_tasks`` as in ``GatePolicy.required``."""
    required = policy.required(name, regression_tasks)
    level, changed_tasks = policy.interval_level(round_number), CHANGED_TASKS if required < 0 else 0.0
    interval = compare_counts(counts, level, changed_tasks)
    answer = _answer(interval.low, interval.high, required)
    is_last = round_number == policy.max_rounds
    if answer is GateAnswer.INCONCLUSIVE and is_last and not policy.is_testable(name, regression_tasks):
        answer = GateAnswer.UNTESTED
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
        answer=answer,
    )


def worst_source(
    name: ComparisonName, pairs: Mapping[str, Sequence[Pair]], policy: GatePolicy, round_number: int
) -> str:
    """Return the source with the least low bound: if that one passes comparison ``name``, each of them does."""
    lows = {
        source: judge_comparison(name, count_pairs(rows), policy, round_number).low for source, rows in pairs.items()
    }
    return min(lows, key=lows.__getitem__)


def _answer(low: float, high: float, required: float) -> GateAnswer:
    if low > required:
        return GateAnswer.PASS
    return GateAnswer.FAIL if high < required else GateAnswer.INCONCLUSIVE


def _combine(comparisons: Sequence[PairedDifference]) -> GateAnswer:
    answers = {c.answer for c in comparisons} - {GateAnswer.UNTESTED}
    if GateAnswer.FAIL in answers:
        return GateAnswer.FAIL
    return GateAnswer.PASS if answers == {GateAnswer.PASS} else GateAnswer.INCONCLUSIVE
