"""Where the checks' bounds lie, to the last seed: what keeps a bound passes, what misses it by one does not."""

import asyncio
import itertools
import json
from dataclasses import dataclass
from typing import Any

import pytest

from sandbox.admission import Thresholds
from sandbox.admission.checks import _is_stuck, _timed_check
from sandbox.admission.context import CheckContext, PolicyEpisode, Verdict, gather_all, with_seed_note
from sandbox.admission.diversity import diversity
from sandbox.admission.execution import effects, p95, quickest
from sandbox.admission.fingerprint import masked
from sandbox.admission.leak import leak, leaks
from sandbox.admission.policies import call, say
from sandbox.admission.shortcuts import FailedEpisode, _exceeds, _rates, _worst_example
from sandbox.admission.solvability import spread
from sandbox.client import SandboxSource
from sandbox.contract import Message, Score, Task
from sandbox.errors import Deadline, EngineDown, EnvironmentFault, EpisodeLost, ImageMissing, ProtocolFault, WorkerDied
from sandbox.wire import OraclePlay, OracleTurn

FULL_SCORE, ZERO_SCORE = Score(1.0, True), Score(0.0, False)
FAULT = EnvironmentFault("step", "KeyError: 'x'")


def check_context(plays: list[OraclePlay] | None = None, **thresholds: Any) -> CheckContext:
    """Create a context whose oracle episodes are given."""
    source = SandboxSource("never run")
    context = CheckContext(source, source, Thresholds(**thresholds), [], [])
    context.plays.update(zip(context.panel(len(plays or [])), plays or [], strict=True))
    return context


def play(user: str, *messages: Message) -> OraclePlay:
    task = Task("", [{"role": "user", "content": user}], [])
    return OraclePlay(task, [OracleTurn(message, []) for message in messages], True, FULL_SCORE)


async def calibrated(groups: list[list[float]], **thresholds: Any) -> Verdict:
    async def rewards(source: SandboxSource, seeds: list[int], k: int) -> list[list[float]]:
        return groups

    return await spread(check_context(spread_groups=4, **thresholds), rewards)


ALL_ZERO, ALL_ONE, MIXED_REWARDS = [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]


@pytest.mark.parametrize(
    ("groups", "low", "high", "passes"),
    [
        ([MIXED_REWARDS, MIXED_REWARDS, ALL_ZERO, ALL_ONE], 0.5, 0.5, True),
        ([MIXED_REWARDS, MIXED_REWARDS, ALL_ZERO, ALL_ZERO], 0.25, 0.95, True),
        ([MIXED_REWARDS, MIXED_REWARDS, ALL_ZERO, ALL_ZERO], 0.26, 0.95, False),
        ([MIXED_REWARDS, MIXED_REWARDS, ALL_ONE, ALL_ONE], 0.05, 0.75, True),
        ([MIXED_REWARDS, MIXED_REWARDS, ALL_ONE, ALL_ONE], 0.05, 0.74, False),
        ([MIXED_REWARDS, ALL_ZERO, ALL_ZERO, ALL_ONE], 0.05, 0.95, False),
        ([[0.4, 0.4], [0.6, 0.6], MIXED_REWARDS, [0.4, 0.5]], 0.05, 0.95, True),
    ],
)
async def test_calibration_passes_on_its_bounds(
    groups: list[list[float]], low: float, high: float, passes: bool
) -> None:
    assert (await calibrated(groups, spread_low=low, spread_high=high))[0] is passes


async def test_calibration_reports_the_seeds_that_teach_nothing() -> None:
    seeds = check_context().panel(4)
    _, evidence = await calibrated([MIXED_REWARDS, ALL_ZERO, ALL_ONE, [0.0, 0.5]])
    assert (evidence["seeds_all_zero"], evidence["seeds_all_success"]) == ([seeds[1]], [seeds[2]])
    assert (evidence["mixed"], evidence["all_zero"], evidence["all_success"]) == (0.5, 0.25, 0.25)
    assert not {"seeds_all_zero", "seeds_all_success"} & set((await calibrated([MIXED_REWARDS] * 4))[1])


@pytest.mark.parametrize("groups", [[MIXED_REWARDS] * 3, [MIXED_REWARDS, MIXED_REWARDS, MIXED_REWARDS, []]])
async def test_calibration_that_misses_a_group_is_an_error_and_no_verdict(groups: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="groups for 4 seeds, or an empty one"):
        await calibrated(groups)


WORDINGS = ["Return it.", "Send it back.", "I do not want it.", "Take it away.", "It can go."]
ANY_WAY = {"distinct_signatures": 1, "commonest_signature": 1.0}


@pytest.mark.parametrize(
    ("wordings", "distinct", "shapes", "commonest", "passes"),
    [
        ([0, 0, 1, 2], 1.0, 3, 0.5, True),
        ([0, 0, 1, 2], 1.0, 4, 0.5, False),
        ([0, 0, 1, 2], 1.0, 3, 0.49, False),
        ([0, 1, 2, 3], 1.0, 4, 0.25, True),
    ],
)
async def test_diversity_passes_on_its_bounds(
    wordings: list[int], distinct: float, shapes: int, commonest: float, passes: bool
) -> None:
    plays = [play(f"{WORDINGS[kind]} It is {number}.") for number, kind in enumerate(wordings)]
    limits = {"distinct": distinct, "distinct_shapes": shapes, "commonest_shape": commonest, **ANY_WAY}
    assert (await diversity(check_context(plays, diversity_seeds=4, **limits)))[0] is passes


@pytest.mark.parametrize(("allowed", "passes"), [(0.75, True), (0.76, False)])
async def test_episodes_that_are_the_same_to_the_letter_are_counted_apart(allowed: float, passes: bool) -> None:
    plays = [play(WORDINGS[kind]) for kind in (0, 0, 1, 2)]
    limits = {"distinct": allowed, "distinct_shapes": 3, "commonest_shape": 0.5, **ANY_WAY}
    verdict, evidence = await diversity(check_context(plays, diversity_seeds=4, **limits))
    assert (verdict, evidence["distinct"], evidence["shapes"]) == (passes, 0.75, 3)


@pytest.mark.parametrize(
    ("deeds", "ways", "usual", "passes"),
    [([0, 0, 1, 2], 3, 0.5, True), ([0, 0, 1, 2], 4, 0.5, False), ([0, 0, 1, 2], 3, 0.49, False)],
)
async def test_solution_signatures_pass_on_their_bounds(
    deeds: list[int], ways: int, usual: float, passes: bool
) -> None:
    tools = ["take_back", "take_away", "leave"]
    plays = [
        play(f"{WORDINGS[number]} It is {number}.", call(0, (tools[solution], "{}")))
        for number, solution in enumerate(deeds)
    ]
    limits = {"distinct_shapes": 1, "distinct_signatures": ways, "commonest_signature": usual}
    evidence: Any
    verdict, evidence = await diversity(check_context(plays, diversity_seeds=4, **limits))
    assert (verdict, evidence["ways"], evidence["usual_way"]) == (passes, 3, 0.5)
    if not passes:
        assert [examples["what"] for examples in evidence["examples"]] == [
            "one of the 2 of 4 seeds on which the same has to be done"
        ] * 2


async def test_diversity_is_measured_on_its_own_number_of_seeds() -> None:
    plays = [play(f"{WORDINGS[number % 5]} {number}") for number in range(10)]
    _, evidence = await diversity(check_context(plays, seeds=2, diversity_seeds=10))
    assert evidence["seeds"] == 10


@pytest.mark.parametrize(
    ("sentence", "other"),
    [
        ("I have three of them.", "I have 3 of them."),
        ("the order A7b is late.", "the order K-99 is late."),
        ("it is Ann's lamp.", "it is Bob's lamp."),
    ],
)
def test_a_number_in_words_a_code_and_an_owner_are_masked(sentence: str, other: str) -> None:
    assert masked(sentence, set()) == masked(other, set())


def test_parts_of_a_value_are_masked_with_it() -> None:
    assert masked("the lamp's price", {"lamp"}) == masked("the desk's price", {"desk"}) == ["the # price"]


LOOKUP, CLOSE = call(0, ("get_order", '{"order_id": "W1234"}')), call(1, ("close_order", '{"order_id": "W1234"}'))


@pytest.mark.parametrize(("leaking", "allowed", "passes"), [(1, 0.25, True), (2, 0.25, False), (0, 0.0, True)])
async def test_leaks_pass_on_their_bound(leaking: int, allowed: float, passes: bool) -> None:
    plays = [play('Send {"order_id": "W1234"} now.' if n < leaking else "It is W1234.", LOOKUP) for n in range(4)]
    verdict, evidence = await leak(check_context(plays, seeds=4, leak_share=allowed))
    assert (verdict, evidence["share"]) == (passes, leaking / 4)


@pytest.mark.parametrize(("strange", "allowed", "passes"), [(1, 0.25, True), (2, 0.25, False)])
async def test_unseen_codes_pass_on_their_bound(strange: int, allowed: float, passes: bool) -> None:
    plays = [play("Which one?" if n < strange else "It is W1234.", LOOKUP) for n in range(4)]
    verdict, evidence = await leak(check_context(plays, seeds=4, unseen_share=allowed))
    assert (verdict, evidence["unseen"]) == (passes, strange / 4)


def test_the_oracles_own_words_in_the_prompt_leak_unless_they_are_short() -> None:
    words = say("The lamp is refunded.")
    assert leaks(play("Tell me: The lamp is refunded.", words)) == ["The lamp is refunded."]
    assert leaks(play("Say ok.", say("ok"))) == []


def test_two_tools_in_a_row_leak_only_where_no_other_is_named() -> None:
    two, three = [LOOKUP, CLOSE], [LOOKUP, CLOSE, call(2, ("get_order", "{}"))]
    assert leaks(play("First get_order, then close_order.", *two))
    assert not leaks(play("You have find_user, get_order and close_order.", *two, call(3, ("find_user", "{}"))))
    assert leaks(play("Call get_order, close_order, get_order; find_user is for others.", *three, say("x")))


def policy_episode(seed: int, score: Score) -> PolicyEpisode:
    return PolicyEpisode(seed, Task("", [], []), [say(str(seed))], score)


def test_rates_are_shares_of_all_episodes_without_those_that_were_solved() -> None:
    episodes: list[PolicyEpisode | FailedEpisode] = [
        policy_episode(1, FULL_SCORE),
        policy_episode(2, FULL_SCORE),
        policy_episode(3, Score(0.5, False)),
    ]
    episodes.append(FailedEpisode(4, None, [], FAULT))
    assert _rates(episodes, None) == {"reward": 0.625, "success": 0.5, "faults": 0.25}
    assert _rates(episodes, {2}) == {"reward": 0.375, "success": 0.25, "faults": 0.25, "solved": 0.25}


def test_a_rate_on_its_bound_is_not_over_it() -> None:
    allowed = {"reward": 0.5, "success": 0.1, "faults": 0.0}
    assert not _exceeds(dict(allowed), allowed)
    for name in allowed:
        assert _exceeds({**allowed, name: allowed[name] + 0.001}, allowed)


def test_the_worst_episode_is_broken_or_the_best_paid_illegitimate_one() -> None:
    episodes: list[PolicyEpisode | FailedEpisode] = [
        policy_episode(1, FULL_SCORE),
        policy_episode(2, Score(0.9, False)),
        policy_episode(3, ZERO_SCORE),
    ]
    assert _worst_example("x", episodes, set())["seed"] == 1
    assert _worst_example("x", episodes, {1})["seed"] == 2
    assert "broke the environment" in _worst_example("x", [*episodes, FailedEpisode(4, None, [], FAULT)], set())["what"]


def test_the_quickest_of_each_call_counts_and_one_slow_call_in_twenty_does_not() -> None:
    assert quickest([0.5, 0.1, 0.3], [0.2, 0.4]) == [0.2, 0.1]
    assert p95([]) == 0.0
    assert (p95([0.1] * 95 + [0.9] * 5), p95([0.1] * 94 + [0.9] * 6)) == (0.9, 0.9)
    assert p95([0.1] * 96 + [0.9] * 4) == 0.1


@dataclass
class RecordedSource:
    """A sandbox that only reports a recorded set of side effects."""

    record: dict[str, Any]

    async def effects(self) -> dict[str, Any]:
        return self.record


@pytest.mark.parametrize(
    ("source_effects", "passes"),
    [({}, True), ({"events": ["open('x')"]}, False), ({"printed": 3, "printed_head": "abc"}, False)],
)
@pytest.mark.parametrize("reverse", [False, True])
async def test_an_effect_in_either_process_refuses(source_effects: dict[str, Any], passes: bool, reverse: bool) -> None:
    context = check_context()
    sources: Any = [RecordedSource({}), RecordedSource(source_effects)]
    context.source, context.replica = sources[::-1] if reverse else sources
    assert (await effects(context))[0] is passes


async def failure_evidence(error: Exception) -> dict[str, Any]:
    async def fails() -> Verdict:
        raise error

    ticks = itertools.count()
    check = await _timed_check("floor", fails(), lambda: float(next(ticks)))
    assert (check.name, check.passed, check.seconds) == ("floor", False, 1.0)
    return {**check.evidence, "stuck": _is_stuck(check)}


@pytest.mark.parametrize(
    ("error", "stuck", "is_retried"),
    [
        (FAULT, False, False),
        (Deadline("step", 2.0, "inside"), True, False),
        (ProtocolFault("x"), True, False),
        (WorkerDied(1, oom=False), True, False),
        (WorkerDied(137, oom=False), True, True),
        (WorkerDied(137, oom=True), True, False),
        (EpisodeLost("x"), False, True),
    ],
)
async def test_a_fault_decides_whether_checks_go_on_and_are_retried(
    error: Exception, stuck: bool, is_retried: bool
) -> None:
    evidence = await failure_evidence(error)
    assert evidence["fault"] == type(error).__name__
    assert (evidence["stuck"], bool(evidence.get("killed"))) == (stuck, is_retried)


@pytest.mark.parametrize("error", [EngineDown("gone"), ImageMissing("x"), KeyError("a defect of ours")])
async def test_engine_failures_are_raised_and_no_verdict(error: Exception) -> None:
    with pytest.raises(type(error)):
        await failure_evidence(error)


async def test_the_first_failure_of_many_ends_the_others_and_names_its_seed() -> None:
    finished: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            finished.append("waits")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise EnvironmentFault("step", "x")

    with pytest.raises(EnvironmentFault) as raised:
        await gather_all([with_seed_note(7, waits()), with_seed_note(8, fails())])
    assert (finished, raised.value.__notes__) == (["waits"], ["seed 8"])


def test_another_source_is_probed_with_other_seeds() -> None:
    other = SandboxSource("another source")
    assert check_context().panel(20) != CheckContext(other, other, Thresholds(), [], []).panel(20)
    assert json.dumps(check_context().panel(20)) == json.dumps(check_context().panel(20))
