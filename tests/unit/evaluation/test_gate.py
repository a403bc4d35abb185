import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from store.types import EndCause, GateAnswer, Label, Outcome, Trajectory, Verdict
from traced.core.errors import GateError
from traced.evaluation.gate import ComparisonName, GatePolicy, judge, open_comparisons, run_gate, untouched_tasks
from traced.evaluation.intervals import Pair

POLICY = GatePolicy(max_rounds=3)


def pairs(gains: int, losses: int, ties: int, start: int = 0) -> list[Pair]:
    outcomes = [(False, True)] * gains + [(True, False)] * losses + [(True, True)] * ties
    return [Pair(str(start + i), 0, base, adapter) for i, (base, adapter) in enumerate(outcomes)]


GOOD = pairs(60, 5, 100)
EVEN = pairs(6, 6, 30)
WORSE = pairs(5, 60, 100)
UNCHANGED = pairs(3, 3, 394)


def test_pass_needs_every_comparison() -> None:
    result = judge("c@v1", {"environment": GOOD, "target": GOOD, "untouched": UNCHANGED}, POLICY, round_number=1)
    assert result.answer is GateAnswer.PASS
    assert [c.required for c in result.comparisons] == [0.02, 0.0, -0.05]
    for name in ("environment", "target", "untouched"):
        evidence: dict[ComparisonName, Sequence[Pair]] = {"environment": GOOD, "target": GOOD, "untouched": UNCHANGED}
        evidence[name] = EVEN
        assert judge("c@v1", evidence, POLICY, round_number=1).answer is GateAnswer.INCONCLUSIVE
        evidence[name] = WORSE
        assert judge("c@v1", evidence, POLICY, round_number=1).answer is GateAnswer.FAIL


def test_nothing_observed_is_never_a_pass() -> None:
    result = judge("c@v1", {"environment": [], "target": [], "untouched": []}, POLICY, round_number=3)
    assert result.answer is GateAnswer.INCONCLUSIVE
    assert open_comparisons(result, POLICY) == []


def test_environment_must_clear_its_margin_not_only_zero() -> None:
    small_gain = pairs(300, 150, 5550)
    answers = {
        margin: judge(
            "c@v1", {"environment": small_gain, "target": GOOD}, GatePolicy(environment_margin=margin), round_number=1
        ).comparisons[0]
        for margin in (0.0, 0.02)
    }
    assert answers[0.0].answer is GateAnswer.PASS
    assert answers[0.02].answer is GateAnswer.INCONCLUSIVE
    assert answers[0.0].low == answers[0.02].low


def test_more_rounds_make_each_round_stricter() -> None:
    assert GatePolicy(max_rounds=1).level_per_round == pytest.approx(0.95)
    assert GatePolicy(max_rounds=5).level_per_round == pytest.approx(0.99)


async def test_rounds_gather_open_comparisons_only_and_stop_when_final() -> None:
    requested_names: list[list[str]] = []

    async def gather(number: int, names: Sequence[str]) -> Mapping[ComparisonName, Sequence[Pair]]:
        requested_names.append(list(names))
        new: dict[ComparisonName, Sequence[Pair]] = {"environment": GOOD, "untouched": UNCHANGED}
        new["target"] = EVEN if number == 1 else pairs(60, 5, 100, start=1000)
        return {name: value for name, value in new.items() if name in names}

    result = await run_gate("c@v1", gather, POLICY)
    assert requested_names == [["environment", "target", "untouched"], ["target"]]
    assert (result.answer, result.rounds) == (GateAnswer.PASS, 2)
    assert {c.name: c.seeds for c in result.comparisons} == {"environment": 165, "target": 207, "untouched": 400}


async def test_a_capability_that_every_task_needs_has_no_untouched_comparison() -> None:
    async def gather(number: int, names: Sequence[str]) -> Mapping[ComparisonName, Sequence[Pair]]:
        return {"environment": GOOD, "target": GOOD, "untouched": []}

    result = await run_gate("c@v1", gather, POLICY)
    assert result.answer is GateAnswer.PASS
    assert [c.name for c in result.comparisons] == ["environment", "target"]


async def test_still_inconclusive_after_the_last_round_is_final() -> None:
    async def gather(number: int, names: Sequence[str]) -> Mapping[ComparisonName, Sequence[Pair]]:
        return {"environment": pairs(2, 2, 30, number * 100), "target": pairs(2, 2, 30, number * 100)}

    result = await run_gate("c@v1", gather, POLICY)
    assert (result.answer, result.rounds) == (GateAnswer.INCONCLUSIVE, 3)
    assert open_comparisons(result, POLICY) == []


def test_an_adapter_without_effect_rarely_passes_over_all_rounds() -> None:
    rng = np.random.default_rng(3)

    async def gather(number: int, names: Sequence[str]) -> Mapping[ComparisonName, Sequence[Pair]]:
        draws = rng.random((40, 2)) < 0.4
        new = [Pair(str(number * 1000 + i), 0, bool(b), bool(a)) for i, (b, a) in enumerate(draws)]
        # The same coin for all comparisons: the worst case, where a fluke on one is a fluke on all.
        return {name: new for name in names}  # type: ignore[misc]

    policy = GatePolicy(max_rounds=3, environment_margin=0.0, untouched_margin=0.0)
    passes = sum(asyncio.run(run_gate("c@v1", gather, policy)).answer is GateAnswer.PASS for _ in range(600))
    assert passes / 600 < 0.025 + 0.013  # one-sided 2.5 % and two standard errors of 600 runs


async def test_a_requested_round_judges_all_comparisons_on_all_pairs() -> None:
    requested_names: list[list[str]] = []

    async def gather(number: int, names: Sequence[str]) -> Mapping[ComparisonName, Sequence[Pair]]:
        requested_names.append(list(names))
        worse = EVEN if number == 2 else GOOD  # what the first round had shown was luck
        return {"environment": worse, "target": GOOD, "untouched": UNCHANGED}

    first = await run_gate("c@v1", gather, POLICY)
    requested_names.clear()
    repeated = await run_gate("c@v1", gather, POLICY, 2)
    assert requested_names == [["environment", "target", "untouched"]] * 2
    assert (first.rounds, repeated.rounds) == (1, 2)
    assert {c.name: c.seeds for c in first.comparisons} == {"environment": 165, "target": 165, "untouched": 400}
    # the fixtures repeat their task names, so that seeds stay; the rates show that both rounds count
    assert repeated.comparisons[0].difference == pytest.approx(55 / (165 + 42))
    assert {c.level for c in repeated.comparisons} == {POLICY.level_per_round}
    with pytest.raises(GateError, match=r"round 4 is outside 1\.\.3"):
        await run_gate("c@v1", gather, POLICY, 4)


async def test_requesting_every_round_keeps_the_error_rate() -> None:
    """Somebody asks whenever it has passed: no more of them pass in the end, and few of all intervals miss."""
    rng = np.random.default_rng(11)
    policy = GatePolicy(max_rounds=3, environment_margin=0.0, untouched_margin=0.0)
    passed, in_the_end, misses, runs = 0, 0, 0, 600
    for _ in range(runs):
        rounds: dict[int, list[Pair]] = {}
        for number in range(1, policy.max_rounds + 1):
            draws = rng.random((40, 2)) < 0.4
            rounds[number] = [Pair(str(number * 1000 + i), 0, bool(b), bool(a)) for i, (b, a) in enumerate(draws)]

        async def gather(
            number: int, names: Sequence[str], rounds: dict[int, list[Pair]] = rounds
        ) -> Mapping[ComparisonName, Sequence[Pair]]:
            return {name: rounds[number] for name in names}  # type: ignore[misc]

        result = await run_gate("c@v1", gather, policy)
        passed += result.answer is GateAnswer.PASS
        results = [result]
        while result.answer is GateAnswer.PASS and result.rounds < policy.max_rounds:
            result = await run_gate("c@v1", gather, policy, result.rounds + 1)
            results.append(result)
        in_the_end += result.answer is GateAnswer.PASS
        misses += any(not c.low <= 0 <= c.high for result in results for c in result.comparisons)
    assert in_the_end <= passed
    assert misses / runs < 0.05 + 0.018  # 5 % and two standard errors of 600 runs


def test_missing_evidence_and_rounds_out_of_range_are_refused() -> None:
    with pytest.raises(GateError, match="'target'"):
        judge("c@v1", {"environment": GOOD}, POLICY, round_number=1)
    with pytest.raises(GateError, match=r"round 4 is outside 1\.\.3"):
        judge("c@v1", {"environment": GOOD, "target": GOOD}, POLICY, round_number=4)


def test_untouched_tasks_have_na_in_every_trial() -> None:
    def base(task: str, trial: int) -> Trajectory:
        return Trajectory(
            f"{task}.{trial}", "desk", "gate", task, trial, "base", 0.0, [], [], [], 0.0, Outcome.FAILURE, EndCause.DONE
        )

    trajectories = [base("a", 0), base("a", 1), base("b", 0), base("c", 0)]
    labels = [
        Label("a.0", "x", 0, Verdict.NA),
        Label("a.1", "x", 0, Verdict.LACKING, 2),
        Label("b.0", "x", 0, Verdict.NA),
        Label("b.0", "y", 0, Verdict.PRESENT, 2),
        Label("c.0", "y", 0, Verdict.NA),
        Label("elsewhere", "x", 0, Verdict.NA),
    ]
    assert untouched_tasks(trajectories, labels, "x") == {"b"}
