"""Intervals of the contrast: against a slow reference, and properties that hold for every table."""

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.contrast import contrast, intervals
from store.types import Label, Outcome, Verdict

NA, PRESENT, LACKING = Verdict.NA, Verdict.PRESENT, Verdict.LACKING
verdicts = st.lists(st.sampled_from(list(Verdict)), min_size=2, max_size=2)
rows = st.lists(st.tuples(st.sampled_from(list(Outcome)), verdicts), min_size=1, max_size=30)
Cells = list[tuple[Outcome, list[Verdict]]]


def table(cells: Cells, name: str = "c") -> tuple[list[Label], dict[str, Outcome]]:
    labels = [
        Label(f"t{place:02}", name, run, verdict)
        for place, (_, row) in enumerate(cells)
        for run, verdict in enumerate(row)
    ]
    return labels, {f"t{place:02}": outcome for place, (outcome, _) in enumerate(cells)}


def means(labels: list[Label], outcomes: dict[str, Outcome]) -> tuple[Fraction | None, Fraction | None]:
    """Return the exact figures of the contrast."""
    runs = sorted({label.run for label in labels})
    output = [contrast([label for label in labels if label.run == run], outcomes)[0] for run in runs]
    result = []
    for values in ([label.delta for label in output], [label.coverage for label in output]):
        defined = [value for value in values if value is not None]
        result.append(sum(defined, Fraction(0)) / len(defined) if defined else None)
    return result[0], result[1]


def resample(cells: Cells, rng: random.Random) -> Cells:
    return [
        label
        for side in (Outcome.SUCCESS, Outcome.FAILURE)
        for source in ([cell for cell in cells if cell[0] is side],)
        for label in rng.choices(source, k=len(source))
    ]


def test_they_are_those_of_a_slow_bootstrap_in_fractions() -> None:
    rng = random.Random(1)
    rates = {Outcome.SUCCESS: 0.15, Outcome.FAILURE: 0.6}
    cells: Cells = [
        (outcome, [NA if rng.random() < 0.2 else LACKING if rng.random() < rate else PRESENT for _ in range(3)])
        for outcome, rate in rates.items()
        for _ in range(40)
    ]
    actual = intervals(*table(cells), seed=0)["c"]
    slow = [means(*table(resample(cells, rng))) for _ in range(600)]
    for fast, source in ((actual.delta, 0), (actual.coverage, 1)):
        assert fast is not None
        values = sorted(float(value) for label in slow if (value := label[source]) is not None)
        assert fast[0] == pytest.approx(values[15], abs=0.03)
        assert fast[1] == pytest.approx(values[-16], abs=0.03)


@given(rows)
@settings(max_examples=40)
def test_they_are_defined_where_the_contrast_is_and_stay_in_bounds(cells: Cells) -> None:
    labels, outcomes = table(cells)
    output, (gap, coverage) = intervals(labels, outcomes, seed=3)["c"], means(labels, outcomes)
    assert (output.delta is None) == (gap is None)
    assert (output.coverage is None) == (coverage is None)
    assert output.delta is None or -1 <= output.delta[0] <= output.delta[1] <= 1
    assert output.coverage is None or 0 <= output.coverage[0] <= output.coverage[1] <= 1


@given(rows, st.randoms(use_true_random=False), st.lists(verdicts, max_size=5))
@settings(max_examples=25)
def test_neither_order_nor_other_capabilities_nor_infrastructure_move_them(
    cells: Cells, rng: random.Random, excluded_ids: list[list[Verdict]]
) -> None:
    labels, outcomes = table(cells)
    shuffled = [*labels, *table(cells, "other")[0]]
    rng.shuffle(shuffled)
    extra, output = table([*cells, *((Outcome.INFRASTRUCTURE, row) for row in excluded_ids)])
    assert intervals(shuffled, outcomes, seed=1)["c"] == intervals(labels, outcomes, seed=1)["c"]
    assert intervals(extra, output, seed=1)["c"] == intervals(labels, outcomes, seed=1)["c"]


@given(st.integers(1, 20), st.integers(1, 20))
@settings(max_examples=10)
def test_without_variation_there_is_no_width(successes: int, failures: int) -> None:
    cells: Cells = [(Outcome.SUCCESS, [PRESENT] * 2)] * successes + [(Outcome.FAILURE, [LACKING] * 2)] * failures
    output = intervals(*table(cells), seed=0)["c"]
    assert (output.delta, output.coverage) == ((1.0, 1.0), (1.0, 1.0))


def test_the_seed_decides_and_nothing_is_nothing() -> None:
    cells: Cells = [(Outcome.SUCCESS, [PRESENT, LACKING])] * 9 + [(Outcome.FAILURE, [LACKING, NA])] * 7
    cells += [(Outcome.FAILURE, [PRESENT, PRESENT])] * 7
    labels, outcomes = table(cells)
    assert intervals(labels, outcomes, seed=5) == intervals(labels, outcomes, seed=5)
    assert intervals(labels, outcomes, seed=5) != intervals(labels, outcomes, seed=6)
    assert intervals([], {}, seed=0) == {}


def test_within_tasks_they_are_those_of_a_slow_bootstrap_of_whole_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    # A resample may have fewer failures in tasks with both outcomes, and is within tasks all the same.
    monkeypatch.setattr("agents.contrast.MIN_SHARE", 0)
    rng = random.Random(2)
    tasks: list[Cells] = []
    for _ in range(30):
        hardness = rng.random()
        rates = {Outcome.SUCCESS: 0.1 + 0.3 * hardness, Outcome.FAILURE: 0.5 + 0.3 * hardness}
        sides = [Outcome.FAILURE if rng.random() < hardness else Outcome.SUCCESS for _ in range(4)]
        tasks.append(
            [
                (side, [NA if rng.random() < 0.2 else LACKING if rng.random() < rates[side] else PRESENT] * 2)
                for side in sides
            ]
        )

    def figures(resampled_tasks: list[Cells]) -> tuple[Fraction | None, Fraction | None]:
        labels, outcomes = table([cell for cells in resampled_tasks for cell in cells])
        task_of = [str(place) for place, cells in enumerate(resampled_tasks) for _ in cells]
        tasks_by_id = {f"t{place:02}": task for place, task in enumerate(task_of)}
        run = [label for label in labels if label.run == 0]
        (entry,) = contrast(run, outcomes, tasks=tasks_by_id)
        assert entry.is_within_tasks
        return entry.delta, entry.coverage

    labels, outcomes = table([cell for cells in tasks for cell in cells])
    task_of = {
        f"t{place:02}": str(task) for place, task in enumerate(t for t, cells in enumerate(tasks) for _ in cells)
    }
    actual = intervals(labels, outcomes, seed=0, tasks=task_of)["c"]
    assert actual == intervals(labels, outcomes, seed=0, tasks=task_of)["c"]
    estimate = figures(tasks)
    slow = [figures(rng.choices(tasks, k=len(tasks))) for _ in range(600)]
    for fast, source in ((actual.delta, 0), (actual.coverage, 1)):
        assert fast is not None
        values = sorted(float(value) for row in slow if (value := row[source]) is not None)
        assert fast[0] == pytest.approx(values[15], abs=0.05)
        assert fast[1] == pytest.approx(values[-16], abs=0.05)
        point = estimate[source]
        assert point is not None
        assert fast[0] <= float(point) <= fast[1]
