"""The arithmetic of the test split."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.types import EndCause, Outcome, Trajectory
from traced.evaluation.intervals import by_capability, episode_key, rate, routing_quality

S, F, X = Outcome.SUCCESS, Outcome.FAILURE, Outcome.INFRASTRUCTURE


def episode(task: int, outcome: Outcome) -> Trajectory:
    return Trajectory(
        id=str(task),
        source="desk",
        split="test",
        task_id=str(task),
        trial=0,
        model="base",
        temperature=0.0,
        messages=[],
        tools=[],
        turns=[],
        reward=float(outcome is S),
        outcome=outcome,
        end_cause=EndCause.DONE,
    )


def episodes(*outcomes: Outcome) -> list[Trajectory]:
    return [episode(task, outcome) for task, outcome in enumerate(outcomes)]


def test_wilson_interval_of_a_published_example() -> None:
    # Newcombe (1998, Statistics in Medicine 17:857-872), table I: 81 of 263, Wilson without correction.
    result = rate("base", episodes(*[S] * 81, *[F] * 182))
    assert (round(result.low, 4), round(result.high, 4)) == (0.2553, 0.3662)


def test_infrastructure_is_counted_apart() -> None:
    result = rate("base", episodes(S, F, X, X))
    assert (result.rate, result.episodes, result.infrastructure) == (0.5, 2, 2)


def test_without_sound_episodes_the_interval_is_zero_to_one() -> None:
    result = rate("base", episodes(X))
    assert (result.episodes, result.low, result.high) == (0, 0.0, 1.0)


def trials(*outcomes_of_tasks: tuple[Outcome, ...]) -> list[Trajectory]:
    """Several trials of each task."""
    return [
        replace(episode(task, outcome), trial=trial)
        for task, outcomes in enumerate(outcomes_of_tasks)
        for trial, outcome in enumerate(outcomes)
    ]


def test_equal_trials_of_a_task_say_no_more_than_one() -> None:
    single = rate("base", episodes(*[S] * 10, *[F] * 10))
    repeated = rate("base", trials(*[(S,) * 5] * 10, *[(F,) * 5] * 10))
    assert (repeated.episodes, repeated.rate) == (100, single.rate)
    assert [repeated.low, repeated.high] == pytest.approx([single.low, single.high])
    # Trials that differ within their tasks are independent.
    varying = rate("base", trials(*[(S, F)] * 50))
    independent = rate("base", episodes(*[S] * 50, *[F] * 50))
    assert [varying.low, varying.high] == pytest.approx([independent.low, independent.high])


def test_each_trial_of_a_task_has_its_own_pick() -> None:
    options = {"base": trials((S, F)), "a@v1": trials((F, S))}
    keys = [episode_key(trajectory) for trajectory in options["base"]]
    assert keys == ["0", "0 (trial 1)"]
    result = routing_quality(dict(zip(keys, ["base", "a@v1"], strict=True)), options)
    assert (result.tasks, result.best, result.decisive, result.right) == (2, 2, 2, 2)
    base = [replace(trajectory, parts={"needs dates": 1.0}) for trajectory in trials((F, F))]
    changes = by_capability(base, trials((S, F)))
    assert (changes["dates"].tasks, changes["dates"].routed) == (2, 0.5)


@given(st.lists(st.sampled_from([S, F, X])))
def test_the_interval_holds_the_rate(outcomes: list[Outcome]) -> None:
    result = rate("base", episodes(*outcomes))
    assert 0 <= result.low <= result.rate + 1e-12
    assert result.rate - 1e-12 <= result.high <= 1


def test_success_by_capability_compares_the_same_tasks() -> None:
    needs = [["dates"], ["dates", "errors"], ["errors"], []]
    base = [
        replace(trajectory, parts={"database": 0.0, **{f"needs {name}": 1.0 for name in names}})
        for trajectory, names in zip(episodes(F, F, S, S), needs, strict=True)
    ]
    changes = by_capability(base, episodes(S, F, X, S))
    assert {name: (c.tasks, c.base, c.routed) for name, c in changes.items()} == {
        "dates": (2, 0.0, 0.5),
        "errors": (1, 0.0, 0.0),
    }


def test_routing_is_measured_against_the_best_option_of_each_task() -> None:
    options = {"base": episodes(S, F, F, S), "a@v1": episodes(S, S, F, F)}
    picks = {"0": "base", "1": "a@v1", "2": "base", "3": "a@v1"}
    result = routing_quality(picks, options)
    assert (result.tasks, result.best, result.decisive, result.right) == (4, 3, 2, 1)
    assert (result.oracle, result.accuracy) == (0.75, 0.75)
    assert result.picks == {"a@v1": 2, "base": 2}


def test_tasks_that_an_option_lost_to_infrastructure_are_left_out() -> None:
    result = routing_quality({"0": "base", "1": "base"}, {"base": episodes(S, F), "a@v1": episodes(X, S)})
    assert (result.tasks, result.best) == (1, 0)


def test_a_pick_that_is_no_option_is_a_defect() -> None:
    with pytest.raises(KeyError):
        routing_quality({"0": "gone@v1"}, {"base": episodes(S)})
