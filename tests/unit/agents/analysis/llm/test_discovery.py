"""Which conversations are read for discovery, how they are packed, and which names are the same."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agents.analyst.builtin import CANDIDATES
from agents.analyst.llm.discovery import batches, same_task, sample_groups
from agents.analyst.llm.rendering import as_name, is_name, is_same_name, one_line
from store.types import Outcome, Trajectory
from tests.unit.agents.analysis.library import talk, user

SUCCESS, FAILURE = Outcome.SUCCESS, Outcome.FAILURE
Sides = list[tuple[Outcome, str]]
sides = st.lists(st.tuples(st.sampled_from([SUCCESS, FAILURE]), st.sampled_from(["", "1", "2", "3", "4"])), max_size=40)


def build(source: Sides) -> list[Trajectory]:
    return [
        replace(talk(user("Hi")), id=f"t{number}", outcome=outcome, task_id=task)
        for number, (outcome, task) in enumerate(source)
    ]


@given(sides, st.integers(0, 30), st.integers(0, 3))
def test_a_sample_is_of_the_size_without_repetition_and_the_seed_decides(
    population: Sides, size: int, seed: int
) -> None:
    trajectories = build(population)
    groups = sample_groups(trajectories, size, seed)
    ids = [trajectory.id for group in groups for trajectory in group]
    assert len(ids) == len(set(ids)) <= size
    assert groups == sample_groups(trajectories, size, seed)
    if size >= len(trajectories):
        assert set(ids) == {trajectory.id for trajectory in trajectories}


@example([(SUCCESS, ""), (SUCCESS, "1"), (SUCCESS, "2"), (FAILURE, "1"), (FAILURE, "2")], 3)
@given(sides, st.integers(2, 30))
def test_pairs_of_the_same_task_come_first_and_the_sides_are_equal_as_long_as_they_last(
    population: Sides, size: int
) -> None:
    trajectories = build(population)
    groups = sample_groups(trajectories, size, 0)
    pair = {task for outcome, task in population if outcome is SUCCESS and task} & {
        t for o, t in population if o is FAILURE and t
    }
    pairs = [same_task(group) for group in groups]
    assert pairs[: len(pair)] == [True] * min(len(pair), size // 2)
    for group in groups:
        assert len(group) == 1 or {trajectory.outcome for trajectory in group} == {SUCCESS, FAILURE}
    sides = [sum(trajectory.outcome is side for group in groups for trajectory in group) for side in (SUCCESS, FAILURE)]
    scarce = min(sum(outcome is side for outcome, _ in population) for side in (SUCCESS, FAILURE))
    assert min(sides) >= min(scarce, size // 2)


@given(st.lists(st.integers(1, 100), max_size=50), st.integers(100, 300))
def test_every_part_fits_and_nothing_is_lost(sizes: list[int], capacity: int) -> None:
    parts = batches(sizes, capacity)
    assert [place for part in parts for place in part] == list(range(len(sizes)))
    assert all(sum(sizes[place] for place in part) <= capacity for part in parts)
    assert all(parts)


@pytest.mark.parametrize(
    ("trajectory", "other", "shared"),
    [
        ("tool-calling-precision", "precise-tool-calls", True),
        ("look-before-change", "looking-before-changes", True),
        ("pre-condition-verification", "precondition-verification", True),
        ("verification-of-preconditions", "precondition-verification", True),
        ("date-reasoning", "data-reasoning", False),
        ("error-recovery", "error-prevention", False),
        ("moving-on", "moving-in", True),
    ],
)
def test_names_are_the_same_but_for_forms_and_order(trajectory: str, other: str, shared: bool) -> None:
    assert is_same_name(trajectory, other) is shared
    assert is_same_name(other, trajectory) is shared


def test_the_catalogues_names_are_names_and_none_is_near_another() -> None:
    names = [trajectory.name for trajectory in CANDIDATES]
    assert all(map(is_name, names))
    assert [(a, b) for a in names for b in names if a < b and is_same_name(a, b)] == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Look Before\nChange!", "look-before-change"),
        ("../../etc/passwd", "etc-passwd"),
        ("base", ""),
        ("grpo on target", ""),
        ("x@v1 y", "x-v1-y"),
        ("", ""),
        ("ein zwei drei vier fünf sechs", "ein-zwei-drei-vier-f"),
    ],
)
def test_an_invalid_name_is_converted_or_dropped(text: str, name: str) -> None:
    assert as_name(text) == name
    assert not is_name(text)


@given(st.text(), st.integers(5, 50))
def test_a_kept_text_is_one_printable_line(text: str, limit: int) -> None:
    line = one_line(text, limit)
    assert len(line) <= limit
    assert line.isprintable()
    line.encode()
