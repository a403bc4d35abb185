"""The gate's policy: three paired comparisons, one answer.

    environment  the capability's own environment: the low bound clears ``environment_margin``
    target       the target's gate split: the low bound clears ``target_margin`` (0: an improvement is shown)
    untouched    target tasks where the base's labels say the capability is not needed: no loss beyond
                 ``untouched_margin`` (non-inferiority: the low bound clears its negative)

Each answers pass (low bound above the requirement), fail (high bound below it) or inconclusive (the interval holds it).
The gate passes when all pass, fails when one fails, and is inconclusive otherwise. Inconclusive buys another round of
episodes for the comparisons that are still open, up to ``max_rounds``; after the last it stays inconclusive, which is
never a pass.

Error control. Looking up to R times at growing data would inflate the error, so each look's interval is computed at
1 - (1 - level) / R: Bonferroni over the looks, by which the chance that any look's interval misses is at most 1 - level
whatever the sample sizes (Pocock 1977 and O'Brien and Fleming 1979 are tighter but need equal looks). By the same
bound an answered comparison keeps its answer in later rounds. A look that was left over may be taken because a person
asks for it (``traced.registry.promotion``): it judges all comparisons anew on all pairs, and its answer replaces the
earlier one, a pass included. All three must pass, so requiring three needs no further
correction (intersection-union test, Berger 1982, Technometrics 24:295-300). Not covered: correction over several
adapters gated in one cycle; each is a decision of its own, and a person approves it.
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
    """Margins are success-rate differences in 0-1; ``level`` is the confidence over all rounds together."""

    level: float = 0.95
    max_rounds: int = 3
    environment_margin: float = 0.02
    target_margin: float = 0.0
    untouched_margin: float = 0.05

    @property
    def level_per_look(self) -> float:
        """Confidence level of one look's interval."""
        return 1 - (1 - self.level) / self.max_rounds

    def required(self, name: ComparisonName) -> float:
        """The bound that the low end of comparison ``name`` has to clear."""
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
    """The gate's answer after ``round_number`` (from 1) on all pairs gathered so far.

    ``evidence`` must hold "environment" and "target"; leave "untouched" out only when the capability is needed in every
    task. Comparisons that ``earlier`` already answered keep their figures. Raises GateError.
    """
    _check(evidence, policy, round_number)
    settled = {c.name: c for c in earlier.comparisons if c.answer is not GateAnswer.INCONCLUSIVE} if earlier else {}
    comparisons = [settled.get(name) or _compare(name, pairs, policy) for name, pairs in evidence.items()]
    return GateResult(adapter, _combine(comparisons), comparisons, round_number)


def open_comparisons(result: GateResult, policy: GatePolicy) -> list[str]:
    """The comparisons that another round of episodes may still settle; empty when the gate's answer is final."""
    if result.answer is not GateAnswer.INCONCLUSIVE or result.rounds >= policy.max_rounds:
        return []
    return [c.name for c in result.comparisons if c.answer is GateAnswer.INCONCLUSIVE]


async def run_gate(
    adapter: str,
    gather: Callable[[int, Sequence[str]], Awaitable[Mapping[ComparisonName, Sequence[Pair]]]],
    policy: GatePolicy,
    first_look: int = 1,
) -> GateResult:
    """Rounds until the answer is final; ``gather(round, names)`` returns the new pairs of the named comparisons.

    A first round without untouched tasks leaves that comparison out: every task needs the capability. The answer is
    first asked for after round ``first_look``, on the pairs of all rounds until then: somebody wants more episodes.
    """
    if not 1 <= first_look <= policy.max_rounds:
        raise GateError(f"look {first_look} is outside 1..{policy.max_rounds}", hint="raise gate.max_rounds")
    evidence: dict[ComparisonName, list[Pair]] = {}
    result: GateResult | None = None
    names: Sequence[str] = ["environment", "target", "untouched"]
    for round_number in range(1, policy.max_rounds + 1):
        for name, pairs in (await gather(round_number, names)).items():
            if pairs or name != "untouched":
                evidence.setdefault(name, []).extend(pairs)
        if round_number < first_look:
            continue
        result = judge(adapter, evidence, policy, round_number=round_number, earlier=result)
        names = open_comparisons(result, policy)
        if not names:
            break
    assert result is not None
    return result


def untouched_tasks(trajectories: Iterable[Trajectory], labels: Iterable[Label], capability: str) -> set[str]:
    """Task ids in which every labelled trajectory of the base says that ``capability`` is not needed (NA).

    A task with no label for the capability is not counted as untouched.
    """
    task_of = {t.id: t.task_id for t in trajectories}
    verdicts: dict[str, set[Verdict]] = {}
    for label in labels:
        if label.capability == capability and label.trajectory_id in task_of:
            verdicts.setdefault(task_of[label.trajectory_id], set()).add(label.verdict)
    return {task for task, seen in verdicts.items() if seen == {Verdict.NA}}


def _check(evidence: Mapping[ComparisonName, Sequence[Pair]], policy: GatePolicy, round_number: int) -> None:
    missing = {"environment", "target"} - set(evidence)
    if missing:
        raise GateError(f"no episodes for the comparison {sorted(missing)[0]!r}", hint="traced evaluate")
    if not 1 <= round_number <= policy.max_rounds:
        raise GateError(f"round {round_number} is outside 1..{policy.max_rounds}", hint="raise gate.max_rounds")


def _compare(name: ComparisonName, pairs: Sequence[Pair], policy: GatePolicy) -> PairedDifference:
    interval = compare(pairs, policy.level_per_look)
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
