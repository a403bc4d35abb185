"""Which is enough: all answers of the gates, and the gates' own arithmetic on a scripted policy whose success depends
on the patch (no model that is small enough for a test can follow one)."""

import itertools
from collections.abc import Callable, Mapping, Sequence

import pytest

from store.types import GateAnswer, GateResult
from traced.evaluation.gate import ComparisonName, GatePolicy, run_gate
from traced.evaluation.intervals import Pair
from traced.prompt_optimization.patches import Gates, Remedy, no_worse, remedy_of

PASS, FAIL, OPEN = GateAnswer.PASS, GateAnswer.FAIL, GateAnswer.INCONCLUSIVE
POLICY = GatePolicy()

Player = Callable[[int], bool]  # whether it succeeds on a seed


@pytest.mark.parametrize(
    ("prompt", "adapter", "comparison", "expected"),
    [
        (PASS, None, None, Remedy.PROMPT),
        (PASS, FAIL, OPEN, Remedy.PROMPT),
        (PASS, OPEN, OPEN, Remedy.PROMPT),
        (PASS, PASS, PASS, Remedy.PROMPT),
        (PASS, PASS, FAIL, Remedy.ADAPTER),
        (PASS, PASS, OPEN, Remedy.INCONCLUSIVE),
        (PASS, PASS, None, Remedy.INCONCLUSIVE),
        (FAIL, PASS, OPEN, Remedy.ADAPTER),
        (OPEN, PASS, FAIL, Remedy.ADAPTER),
        (OPEN, PASS, OPEN, Remedy.INCONCLUSIVE),
        (OPEN, PASS, PASS, Remedy.INCONCLUSIVE),
        (FAIL, None, None, Remedy.NO_REMEDY),
        (FAIL, FAIL, PASS, Remedy.NO_REMEDY),
        (FAIL, OPEN, OPEN, Remedy.INCONCLUSIVE),
        (OPEN, None, None, Remedy.INCONCLUSIVE),
        (OPEN, FAIL, PASS, Remedy.INCONCLUSIVE),
    ],
)
def test_three_answers_together(
    prompt: GateAnswer, adapter: GateAnswer | None, comparison: GateAnswer | None, expected: Remedy
) -> None:
    assert remedy_of(prompt, adapter, comparison) is expected


def test_no_prompt_that_has_not_passed_is_enough_and_no_adapter_that_has_not_is_needed() -> None:
    for prompt, adapter, comparison in itertools.product([*GateAnswer], [*GateAnswer, None], [*GateAnswer, None]):
        remedy = remedy_of(prompt, adapter, comparison)
        assert remedy is not Remedy.PROMPT or prompt is PASS
        assert remedy is not Remedy.ADAPTER or adapter is PASS
        assert remedy is not Remedy.NO_REMEDY or PASS not in (prompt, adapter)


async def gate(baseline: Player, candidate: Player, policy: GatePolicy, seeds: int) -> GateResult:
    """The gate as ``traced.pipeline.gate`` runs it, which adds seeds in each round."""

    async def gather(number: int, names: Sequence[str]) -> Mapping[ComparisonName, Sequence[Pair]]:
        pairs = [Pair(str(seed), 0, baseline(seed), candidate(seed)) for seed in range(seeds, (number + 1) * seeds)]
        regression = [pair for pair in pairs if int(pair.task_id) % 2]
        return {"environment": pairs, "target": pairs, "regression": regression}

    return await run_gate("it", gather, policy)


def prompted(patch: str) -> Player:
    """Of the tasks that need nothing (the odd ones) and 30 in 100 of the others it does all; a patch does the rest."""
    share = 100 if "all requests" in patch else 70 if "requests" in patch else 30
    return lambda seed: bool(seed % 2) or seed * 7919 % 100 < share


async def gates(prompt: Player, adapter: Player, seeds: int = 200) -> Gates:
    base = prompted("")
    return Gates(
        await gate(base, prompt, POLICY, seeds),
        await gate(base, adapter, POLICY, seeds),
        await gate(adapter, prompt, no_worse(POLICY), seeds),
    )


async def test_a_prompt_as_good_as_the_adapter_is_enough() -> None:
    good = prompted("Do all requests.")
    assert (await gates(good, good)).remedy is Remedy.PROMPT


async def test_a_prompt_that_does_half_leaves_the_adapter_needed() -> None:
    assert (await gates(prompted("Do the requests."), prompted("Do all requests."))).remedy is Remedy.ADAPTER


async def test_a_prompt_that_nobody_follows_is_not_enough() -> None:
    assert (await gates(prompted("Be good."), prompted("Do all requests."))).remedy is Remedy.ADAPTER
    assert (await gates(prompted("Be good."), prompted(""))).remedy is Remedy.NO_REMEDY


async def test_no_remedy_if_both_do_harm() -> None:
    worse: Player = lambda seed: False  # noqa: E731
    assert (await gates(worse, worse)).remedy is Remedy.NO_REMEDY


async def test_few_episodes_buy_no_answer() -> None:
    good = prompted("Do all requests.")
    assert (await gates(good, good, seeds=5)).remedy is Remedy.INCONCLUSIVE
    assert (await gates(prompted("Do the requests."), good, seeds=5)).remedy is Remedy.INCONCLUSIVE


def test_no_worse_holds_every_comparison_to_the_margin_of_regression_tasks() -> None:
    policy = no_worse(GatePolicy(regression_margin=0.07))
    assert {policy.required(name) for name in ("environment", "target", "regression")} == {-0.07}
    assert (policy.level, policy.max_rounds) == (POLICY.level, POLICY.max_rounds)
