import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from store.types import EndCause, GateAnswer, Label, Outcome, Trajectory, Verdict
from traced.core.errors import GateError
from traced.evaluation.gate import (
    ComparisonName,
    GatePolicy,
    changes_regression_tasks,
    compare_pairs,
    judge,
    open_comparisons,
    regression_tasks,
    run_gate,
)
from traced.evaluation.intervals import Pair

POLICY = GatePolicy(max_rounds=3)


def pairs(gains: int, losses: int, ties: int, start: int = 0) -> list[Pair]:
    outcomes = [(False, True)] * gains + [(True, False)] * losses + [(True, True)] * ties
    return [Pair(str(start + i), 0, base, adapter) for i, (base, adapter) in enumerate(outcomes)]


GOOD = pairs(60, 5, 100)
EVEN = pairs(6, 6, 30)
WORSE = pairs(5, 60, 100)
UNCHANGED = pairs(2, 2, 496)


def test_pass_needs_every_comparison() -> None:
    result = judge("c@v1", {"environment": GOOD, "target": GOOD, "regression": UNCHANGED}, POLICY, round_number=1)
    assert result.answer is GateAnswer.PASS
    assert [c.required for c in result.comparisons] == [0.02, 0.0, -0.05]
    for name in ("environment", "target", "regression"):
        evidence: dict[ComparisonName, Sequence[Pair]] = {"environment": GOOD, "target": GOOD, "regression": UNCHANGED}
        evidence[name] = EVEN
        assert judge("c@v1", evidence, POLICY, round_number=1).answer is GateAnswer.INCONCLUSIVE
        evidence[name] = WORSE
        assert judge("c@v1", evidence, POLICY, round_number=1).answer is GateAnswer.FAIL


def test_nothing_observed_is_never_a_pass() -> None:
    result = judge("c@v1", {"environment": [], "target": [], "regression": []}, POLICY, round_number=3)
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


def test_alpha_is_spent_over_the_rounds() -> None:
    assert GatePolicy(max_rounds=1).interval_level(1) == pytest.approx(0.90)  # one-sided 95 %
    levels = [GatePolicy(max_rounds=3).interval_level(number) for number in (1, 2, 3)]
    assert levels == sorted(levels, reverse=True)
    assert levels[0] > 0.99
    assert levels[2] == pytest.approx(0.91, abs=0.005)


SMALL = GatePolicy(max_rounds=1, target_tasks=17, base_success=0.5)


def test_a_target_that_is_too_small_only_guards_against_a_loss() -> None:
    assert SMALL.is_target_too_small
    assert SMALL.detectable(17) > SMALL.target_detectable
    result = judge("c@v1", {"environment": GOOD, "target": pairs(2, 2, 13)}, SMALL, round_number=1)
    target = result.comparisons[1]
    assert (target.required, target.answer) == (-SMALL.guarded_loss(17), GateAnswer.PASS)
    assert judge("c@v1", {"environment": GOOD, "target": pairs(0, 12, 5)}, SMALL, round_number=1).answer is not (
        GateAnswer.PASS
    )


def test_a_target_that_is_large_enough_must_gain() -> None:
    policy = GatePolicy(max_rounds=4, target_tasks=50, target_trials=4, base_success=0.33)
    assert not policy.is_target_too_small
    assert policy.required("target") == policy.target_margin
    assert policy.detectable(50) == pytest.approx(0.12, abs=0.005)
    assert policy.detectable(1) == 1.0  # one task shows nothing


def test_few_regression_tasks_get_the_margin_that_they_can_carry() -> None:
    policy = GatePolicy(max_rounds=1, target_tasks=300, base_success=0.5)
    assert policy.required("regression", 0.5) == -policy.guarded_loss(150)
    assert GatePolicy(target_tasks=10**6).required("regression", 0.5) == -0.05
    assert GatePolicy().required("regression") == -0.05  # a target with as many seeds as are wanted


@pytest.mark.parametrize(
    ("changes", "expected"), [((2, 2, 300), False), ((60, 2, 300), True), ((2, 60, 300), True), ((9, 2, 50), False)]
)
def test_tasks_that_change_are_no_regression_tasks(changes: tuple[int, int, int], expected: bool) -> None:
    comparison = compare_pairs("regression", pairs(*changes), POLICY, 3)
    assert changes_regression_tasks(comparison) is expected


async def test_rounds_gather_open_comparisons_only_and_stop_when_final() -> None:
    requested_names: list[list[str]] = []

    async def gather(number: int, names: Sequence[str]) -> Mapping[ComparisonName, Sequence[Pair]]:
        requested_names.append(list(names))
        new: dict[ComparisonName, Sequence[Pair]] = {"environment": GOOD, "regression": UNCHANGED}
        new["target"] = EVEN if number == 1 else pairs(60, 5, 100, start=1000)
        return {name: value for name, value in new.items() if name in names}

    result = await run_gate("c@v1", gather, POLICY)
    assert requested_names == [["environment", "target", "regression"], ["target"]]
    assert (result.answer, result.rounds) == (GateAnswer.PASS, 2)
    assert {c.name: c.seeds for c in result.comparisons} == {"environment": 165, "target": 207, "regression": 500}


async def test_a_capability_that_every_task_needs_has_no_untouched_comparison() -> None:
    async def gather(number: int, names: Sequence[str]) -> Mapping[ComparisonName, Sequence[Pair]]:
        return {"environment": GOOD, "target": GOOD, "regression": []}

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

    policy = GatePolicy(max_rounds=3, environment_margin=0.0, regression_margin=0.0)
    passes = sum(asyncio.run(run_gate("c@v1", gather, policy)).answer is GateAnswer.PASS for _ in range(600))
    assert passes / 600 < 0.05 + 0.018  # one-sided 5 % and two standard errors of 600 runs


async def test_a_requested_round_judges_all_comparisons_on_all_pairs() -> None:
    requested_names: list[list[str]] = []

    async def gather(number: int, names: Sequence[str]) -> Mapping[ComparisonName, Sequence[Pair]]:
        requested_names.append(list(names))
        worse = EVEN if number == 2 else GOOD  # what the first round had shown was luck
        return {"environment": worse, "target": GOOD, "regression": UNCHANGED}

    first = await run_gate("c@v1", gather, POLICY)
    requested_names.clear()
    repeated = await run_gate("c@v1", gather, POLICY, 2)
    assert requested_names == [["environment", "target", "regression"]] * 2
    assert (first.rounds, repeated.rounds) == (1, 2)
    assert {c.name: c.seeds for c in first.comparisons} == {"environment": 165, "target": 165, "regression": 500}
    # the fixtures repeat their task names, so that seeds stay; the rates show that both rounds count
    assert repeated.comparisons[0].difference == pytest.approx(55 / (165 + 42))
    assert {c.level for c in repeated.comparisons} == {POLICY.interval_level(2)}
    with pytest.raises(GateError, match=r"round 4 is outside 1\.\.3"):
        await run_gate("c@v1", gather, POLICY, 4)


async def test_requesting_every_round_keeps_the_error_rate() -> None:
    """Somebody asks whenever it has passed: no more of them pass in the end, and few intervals lie above the truth."""
    rng = np.random.default_rng(11)
    policy = GatePolicy(max_rounds=3, environment_margin=0.0, regression_margin=0.0)
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
        misses += any(c.low > 0 for result in results for c in result.comparisons)
    assert in_the_end <= passed
    assert misses / runs < 0.05 + 0.018  # 5 % and two standard errors of 600 runs


def test_missing_evidence_and_rounds_out_of_range_are_refused() -> None:
    with pytest.raises(GateError, match="'target'"):
        judge("c@v1", {"environment": GOOD}, POLICY, round_number=1)
    with pytest.raises(GateError, match=r"round 4 is outside 1\.\.3"):
        judge("c@v1", {"environment": GOOD, "target": GOOD}, POLICY, round_number=4)


def test_regression_tasks_have_na_in_the_runs_of_both_models() -> None:
    def trajectory(task: str, trial: int, model: str) -> Trajectory:
        key = f"{task}.{trial}.{model}"
        return Trajectory(key, "desk", "gate", task, trial, model, 0.0, [], [], [], 0.0, Outcome.FAILURE, EndCause.DONE)

    tasks = [("a", 0), ("a", 1), ("b", 0), ("c", 0), ("d", 0)]
    trajectories = [trajectory(*task, model) for task in tasks for model in ("base", "c@v1")]
    na = [Label(t.id, name, 0, Verdict.NA) for t in trajectories for name in ("x", "y")]
    changed = {
        ("a.1.base", "x"): Verdict.LACKING,
        ("b.0.c@v1", "x"): Verdict.PRESENT,  # the base failed before it could show the need
        ("c.0.base", "y"): Verdict.PRESENT,
    }
    labels = [replace(row, verdict=changed.get((row.trajectory_id, row.capability), row.verdict)) for row in na]
    labels.append(Label("elsewhere", "x", 0, Verdict.NA))
    assert regression_tasks(trajectories, labels, ["x"]) == {"c", "d"}
    assert regression_tasks(trajectories, labels, ["x", "y"]) == {"d"}
    assert regression_tasks(trajectories, [row for row in labels if row.capability == "x"], ["x", "y"]) == set()
