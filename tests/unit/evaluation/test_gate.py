import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from store.types import EndCause, GateAnswer, Label, Outcome, Trajectory, Verdict
from traced.core.errors import GateError
from traced.evaluation.figures import gate_remark
from traced.evaluation.gate import (
    REGRESSION_POWER,
    ComparisonName,
    GatePolicy,
    TaskNeeds,
    judge,
    open_comparisons,
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


def test_a_target_that_cannot_be_played_leaves_the_environment_alone() -> None:
    policy = replace(POLICY, plays_target=False)
    with pytest.raises(GateError, match="'target'"):
        judge("c@v1", {"environment": GOOD}, POLICY, round_number=1)
    result = judge("c@v1", {"environment": GOOD}, policy, round_number=1)
    assert (result.answer, result.has_target) == (GateAnswer.PASS, False)
    assert judge("c@v1", {"environment": WORSE}, policy, round_number=1).answer is GateAnswer.FAIL
    names_by_round: list[Sequence[str]] = []

    async def gather(round_number: int, names: Sequence[str]) -> Mapping[ComparisonName, Sequence[Pair]]:
        names_by_round.append(names)
        return {"environment": EVEN * round_number}

    asyncio.run(run_gate("c@v1", gather, policy))
    assert {*map(tuple, names_by_round)} == {("environment",)}
    with pytest.raises(GateError, match="'environment'"):
        judge("c@v1", {}, policy, round_number=1)


def test_the_replay_of_held_out_conversations_may_show_no_loss() -> None:
    policy = replace(POLICY, plays_target=False, replay_tasks=400)
    assert policy.names == ("environment", "replay")
    with pytest.raises(GateError, match="'replay'"):
        judge("c@v1", {"environment": GOOD}, policy, round_number=1)
    answers = {
        name: judge("c@v1", {"environment": GOOD, "replay": evidence}, policy, round_number=3).answer
        for name, evidence in (("unchanged", UNCHANGED), ("even", EVEN), ("worse", WORSE))
    }
    assert answers == {
        "unchanged": GateAnswer.PASS,
        "even": GateAnswer.INCONCLUSIVE,
        "worse": GateAnswer.FAIL,
    }
    # Too few tasks to rule the largest loss out: the comparison is not required, and still refuses a clear loss.
    small = replace(policy, replay_tasks=10)
    assert policy.is_testable("replay")
    assert not small.is_testable("replay")
    assert (small.required("replay"), replace(policy, replay_tasks=0).required("replay")) == (-0.15, -0.05)
    assert judge("c@v1", {"environment": GOOD, "replay": EVEN}, small, round_number=3).answer is GateAnswer.PASS
    assert judge("c@v1", {"environment": GOOD, "replay": WORSE}, small, round_number=3).answer is GateAnswer.FAIL


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


SMALL = GatePolicy(max_rounds=2, target_tasks=17, is_list=True)


def test_a_list_that_is_too_small_is_untested_after_the_last_round() -> None:
    assert not SMALL.is_testable("target")
    assert SMALL.detectable(17) > SMALL.target_detectable
    assert replace(SMALL, is_list=False).is_testable("target")  # more seeds would do
    unclear: dict[ComparisonName, Sequence[Pair]] = {"environment": GOOD, "target": pairs(2, 2, 13)}
    first = judge("c@v1", unclear, SMALL, round_number=1)
    assert open_comparisons(first, SMALL) == ["target"]  # harm may still show
    last = judge("c@v1", unclear, SMALL, round_number=2, earlier=first)
    assert (last.answer, last.comparisons[1].answer) == (GateAnswer.PASS, GateAnswer.UNTESTED)


@pytest.mark.parametrize(
    ("changes", "answer"), [((0, 12, 5), GateAnswer.FAIL), ((12, 0, 5), GateAnswer.PASS), ((2, 2, 13), "untested")]
)
def test_a_small_list_still_shows_harm_and_a_large_gain(changes: tuple[int, int, int], answer: GateAnswer) -> None:
    result = judge("c@v1", {"environment": GOOD, "target": pairs(*changes)}, SMALL, round_number=2)
    assert result.comparisons[1].answer == answer
    assert (result.answer is GateAnswer.FAIL) is (answer is GateAnswer.FAIL)


def test_nothing_but_untested_comparisons_is_no_pass() -> None:
    evidence: dict[ComparisonName, Sequence[Pair]] = {"environment": pairs(2, 2, 10), "target": pairs(2, 2, 13)}
    assert judge("c@v1", evidence, SMALL, round_number=2).answer is GateAnswer.INCONCLUSIVE


def test_what_tasks_and_trials_show() -> None:
    policy = GatePolicy(max_rounds=4, target_tasks=50, target_trials=4, is_list=True, base_success=0.33)
    assert policy.is_testable("target")
    assert policy.detectable(50) == pytest.approx(0.12, abs=0.005)
    assert policy.detectable(1) == 1.0  # one task shows nothing
    count = policy.tasks_needed(0.12)
    assert policy.detectable(count) <= 0.12 < policy.detectable(count - 1)


def test_few_regression_tasks_have_the_margin_that_they_can_carry() -> None:
    policy = GatePolicy(max_rounds=1, target_tasks=300)
    assert policy.required("regression", 250) == -policy.detectable(250, REGRESSION_POWER)
    assert policy.required("regression", 10**6) == policy.required("regression") == -0.05
    assert policy.required("regression", 20) == -0.15
    assert [policy.is_testable("regression", tasks) for tasks in (20, 250, 10**6, 0)] == [False, True, True, True]
    small: dict[ComparisonName, Sequence[Pair]] = {
        "environment": GOOD,
        "target": pairs(60, 2, 238),
        "regression": pairs(2, 2, 16),
    }
    result = judge("c@v1", small, policy, round_number=1)
    assert (result.answer, result.comparisons[2].answer) == (GateAnswer.PASS, GateAnswer.UNTESTED)


@pytest.mark.parametrize(
    ("changes", "expected"), [((2, 2, 300), False), ((60, 2, 300), True), ((2, 60, 300), True), ((9, 2, 50), False)]
)
def test_the_remark_says_when_regression_tasks_change(changes: tuple[int, int, int], expected: bool) -> None:
    evidence: dict[ComparisonName, Sequence[Pair]] = {
        "environment": GOOD,
        "target": GOOD,
        "regression": pairs(*changes),
    }
    comparison = judge("c@v1", evidence, POLICY, round_number=3).comparisons[2]
    assert ("the adapter changes these tasks" in gate_remark(comparison)) is expected


def test_the_remark_says_what_is_required_instead_of_a_gain() -> None:
    evidence: dict[ComparisonName, Sequence[Pair]] = {"environment": GOOD, "target": pairs(2, 2, 13)}
    untested = judge("c@v1", evidence, SMALL, round_number=2).comparisons[1]
    assert gate_remark(untested) == "too few tasks, not required; a canary protects"
    assert gate_remark(replace(untested, answer=GateAnswer.PASS, required=-0.1)) == "required: no loss of 10.0 points"
    assert gate_remark(replace(untested, answer=GateAnswer.PASS)) == ""


async def test_rounds_gather_open_comparisons_only_and_stop_when_final() -> None:
    requested_names: list[list[str]] = []

    async def gather(number: int, names: Sequence[str]) -> Mapping[ComparisonName, Sequence[Pair]]:
        requested_names.append(list(names))
        new: dict[ComparisonName, Sequence[Pair]] = {"environment": GOOD, "regression": UNCHANGED}
        new["target"] = EVEN if number == 1 else [*EVEN, *pairs(60, 5, 100, start=1000)]
        return {name: value for name, value in new.items() if name in names}

    result = await run_gate("c@v1", gather, POLICY)
    assert requested_names == [["environment", "target", "regression"], ["target"]]
    assert (result.answer, result.rounds) == (GateAnswer.PASS, 2)
    assert {c.name: c.seeds for c in result.comparisons} == {"environment": 165, "target": 207, "regression": 500}


async def test_a_capability_that_every_task_needs_has_no_regression_comparison() -> None:
    async def gather(number: int, names: Sequence[str]) -> Mapping[ComparisonName, Sequence[Pair]]:
        return {"environment": GOOD, "target": GOOD, "regression": []}

    result = await run_gate("c@v1", gather, POLICY)
    assert result.answer is GateAnswer.PASS
    assert [c.name for c in result.comparisons] == ["environment", "target"]


async def test_still_inconclusive_after_the_last_round_is_final() -> None:
    async def gather(number: int, names: Sequence[str]) -> Mapping[ComparisonName, Sequence[Pair]]:
        return {"environment": pairs(2, 2, 34 * number - 4), "target": pairs(2, 2, 34 * number - 4)}

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
        worse = [*GOOD, *pairs(4, 4, 34, 1000)] if number == 2 else GOOD  # what the first round had shown was luck
        return {"environment": worse, "target": GOOD, "regression": UNCHANGED}

    first = await run_gate("c@v1", gather, POLICY)
    requested_names.clear()
    repeated = await run_gate("c@v1", gather, POLICY, 2)
    assert requested_names == [["environment", "target", "regression"]] * 2
    assert (first.rounds, repeated.rounds) == (1, 2)
    assert {c.name: c.seeds for c in first.comparisons} == {"environment": 165, "target": 165, "regression": 500}
    assert repeated.comparisons[0].difference == pytest.approx(55 / (165 + 42))
    assert {c.level for c in repeated.comparisons} == {POLICY.interval_level(2)}
    with pytest.raises(GateError, match=r"round 4 is outside 1\.\.3"):
        await run_gate("c@v1", gather, POLICY, 4)


async def test_requesting_every_round_keeps_the_error_rate() -> None:
    """Somebody asks whenever it has passed: no more of them pass in the end, and few intervals lie too high."""
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
            return {name: [p for n in range(number) for p in rounds[n + 1]] for name in names}  # type: ignore[misc]

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


def run(task: str, trial: int, model: str, outcome: Outcome = Outcome.FAILURE) -> Trajectory:
    key = f"{task}.{trial}.{model}"
    return Trajectory(key, "desk", "gate", task, trial, model, 0.0, [], [], [], 0.0, outcome, EndCause.DONE)


def test_a_task_in_which_a_run_of_either_model_exercised_the_capability_needs_it() -> None:
    def tasks_with_need(labels: list[Label], capabilities: list[str]) -> set[str]:
        needs = TaskNeeds()
        needs.add(trajectories, labels, capabilities)
        return {t.task_id for t in trajectories if not needs.is_regression_task(t.task_id)}

    tasks = [("a", 0), ("a", 1), ("b", 0), ("c", 0), ("d", 0)]
    trajectories = [run(*task, model) for task in tasks for model in ("base", "c@v1")]
    na = [Label(t.id, name, 0, Verdict.NA) for t in trajectories for name in ("x", "y")]
    changed = {
        ("a.1.base", "x"): Verdict.LACKING,
        ("b.0.c@v1", "x"): Verdict.PRESENT,  # the base failed before it could show the need
        ("c.0.base", "y"): Verdict.PRESENT,
    }
    labels = [replace(row, verdict=changed.get((row.trajectory_id, row.capability), row.verdict)) for row in na]
    labels.append(Label("elsewhere", "x", 0, Verdict.NA))
    assert tasks_with_need(labels, ["x"]) == {"a", "b"}
    assert tasks_with_need(labels, ["x", "y"]) == {"a", "b", "c"}
    only_x = [row for row in labels if row.capability == "x"]
    assert tasks_with_need(only_x, ["x", "y"]) == {"a", "b", "c", "d"}


@pytest.mark.parametrize("solver", ["base", "c@v1"])
def test_a_task_that_a_run_of_either_model_solved_without_the_capability_does_not_need_it(solver: str) -> None:
    """So an adapter that exercises it in vain, and fails by that, does so in a regression task."""
    needs = TaskNeeds()
    success, failure = run("a", 0, solver, Outcome.SUCCESS), run("a", 1, "c@v1")
    labels = [Label(success.id, "x", 0, Verdict.NA), Label(failure.id, "x", 0, Verdict.PRESENT)]
    needs.add([failure], labels, ["x"])
    assert not needs.is_regression_task("a")
    needs.add([success], labels, ["x"])
    assert needs.is_regression_task("a")
    lucky = [replace(row, verdict=Verdict.LACKING) for row in labels]
    needs = TaskNeeds()
    needs.add([success, failure], lucky, ["x"])
    assert not needs.is_regression_task("a")


async def test_the_margin_of_regression_tasks_stays_once_the_target_has_its_answer() -> None:
    """The target passes at once, and the regression tasks, a third of all, need every round."""
    requested_names: list[list[str]] = []

    async def gather(number: int, names: Sequence[str]) -> Mapping[ComparisonName, Sequence[Pair]]:
        requested_names.append(list(names))
        rounds: dict[ComparisonName, Sequence[Pair]] = {
            "environment": GOOD,
            "target": pairs(60 * number, 5 * number, 135 * number),
            "regression": pairs(8 * number, 14 * number, 45 * number),
        }
        return {name: value for name, value in rounds.items() if name in names}

    policy = replace(POLICY, target_tasks=600)
    result = await run_gate("c@v1", gather, policy)
    assert requested_names == [["environment", "target", "regression"], *[["target", "regression"]] * 2]
    by_name = {comparison.name: comparison for comparison in result.comparisons}
    assert (by_name["target"].seeds, by_name["target"].answer) == (200, GateAnswer.PASS)
    assert by_name["regression"].required == policy.required("regression", 201)


def test_a_loss_in_the_environments_of_live_adapters_is_refused() -> None:
    policy = replace(POLICY, live_environments=2)
    evidence: dict[ComparisonName, Sequence[Pair]] = {"environment": GOOD, "target": GOOD, "regression": UNCHANGED}
    with pytest.raises(GateError, match="'live'"):
        judge("c@v1", evidence, policy, round_number=1)
    for live, answer in ((UNCHANGED, GateAnswer.PASS), (EVEN, GateAnswer.INCONCLUSIVE), (WORSE, GateAnswer.FAIL)):
        result = judge("c@v1", {**evidence, "live": live}, policy, round_number=3)
        assert (result.answer, result.comparisons[-1].name, result.comparisons[-1].required) == (answer, "live", -0.05)
