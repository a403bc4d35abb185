"""The contrast arithmetic: hand-computed tables, and properties that hold for every table."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.contrast import Contrast, Counts, agreement, contrast, retained
from agents.errors import LabelTableError
from store.types import Label, Outcome, Verdict

NA, PRESENT, LACKING = Verdict.NA, Verdict.PRESENT, Verdict.LACKING
Row = tuple[Outcome, Verdict]
rows = st.lists(st.tuples(st.sampled_from(list(Outcome)), st.sampled_from(list(Verdict))), min_size=1, max_size=60)


def table(cells: list[Row], run: int = 0, name: str = "c") -> tuple[list[Label], dict[str, Outcome]]:
    labels = [Label(f"t{place}", name, run, verdict) for place, (_, verdict) in enumerate(cells)]
    return labels, {f"t{place}": outcome for place, (outcome, _) in enumerate(cells)}


def of(cells: list[Row]) -> Contrast:
    return contrast(*table(cells))[0]


def test_rates_of_a_table_computed_by_hand() -> None:
    cells = [
        *[(Outcome.SUCCESS, PRESENT)] * 9,
        (Outcome.SUCCESS, LACKING),
        *[(Outcome.SUCCESS, NA)] * 5,
        *[(Outcome.FAILURE, LACKING)] * 4,
        *[(Outcome.FAILURE, PRESENT)] * 2,
        *[(Outcome.FAILURE, NA)] * 14,
    ]
    entry = of(cells)
    assert entry.success == Counts(total=15, needed=10, lacking=1)
    assert entry.delta == Fraction(2, 3) - Fraction(1, 10)
    assert entry.coverage == Fraction(4, 20)
    assert entry.passes()


@pytest.mark.parametrize("needy", [Outcome.SUCCESS, Outcome.FAILURE])
def test_an_empty_denominator_gives_none_and_passes_nothing(needy: Outcome) -> None:
    other = Outcome.FAILURE if needy is Outcome.SUCCESS else Outcome.SUCCESS
    entry = of([(needy, LACKING)] * 5 + [(other, NA)] * 5)
    assert entry.delta is None
    assert not entry.passes(delta=-1.0, rho=0.0)


def test_without_failures_coverage_is_none() -> None:
    assert of([(Outcome.SUCCESS, LACKING)]).coverage is None


def test_thresholds_are_met_exactly() -> None:
    cells = [*[(Outcome.SUCCESS, PRESENT)] * 10, *[(Outcome.FAILURE, LACKING)] * 2, *[(Outcome.FAILURE, PRESENT)] * 8]
    entry = of(cells)
    assert entry.delta == Fraction(1, 5)
    assert entry.passes(delta=0.20, rho=0.20)
    assert not entry.passes(delta=0.21, rho=0.10)
    assert not entry.passes(delta=0.20, rho=0.21)


def test_retained_needs_enough_runs() -> None:
    good = [(Outcome.SUCCESS, PRESENT)] * 5 + [(Outcome.FAILURE, LACKING)] * 5
    bad = [(Outcome.SUCCESS, PRESENT)] * 5 + [(Outcome.FAILURE, PRESENT)] * 5
    labels = [label for run in range(10) for label in table(good if run < 8 else bad, run)[0]]
    outcomes = table(good)[1]
    (results,) = retained(labels, outcomes)
    assert (results.passed, results.runs, results.delta) == (8, 10, Fraction(8, 10))
    assert retained(labels, outcomes, consistency=0.81) == []


def coin(turn: int) -> Verdict:
    return LACKING if turn % 2 else PRESENT


def test_a_capability_on_which_the_runs_do_not_agree_is_not_retained_whatever_its_gap() -> None:
    """Every run sees the same gap, each in other failures."""
    good = [(Outcome.SUCCESS, PRESENT)] * 10
    labels = [
        label
        for run in range(5)
        for label in table([*good, *[(Outcome.FAILURE, coin(place + run)) for place in range(10)]], run)[0]
    ]
    outcomes = table([*good, *[(Outcome.FAILURE, NA)] * 10])[1]
    alpha = agreement(labels)
    assert alpha is not None
    assert 0 < alpha < Fraction(2, 5)
    assert retained(labels, outcomes) == []
    (results,) = retained(labels, outcomes, min_agreement=0.0)
    assert (results.delta, results.agreement) == (Fraction(1, 2), alpha)
    assert [entry.capability for entry in retained(labels, outcomes, min_agreement=float(alpha) - 1e-9)] == ["c"]


def test_agreement_ignores_trajectories_that_are_not_mined() -> None:
    """Runs that agree on infrastructure's NA alone would pass the bound otherwise."""
    cells = [(Outcome.SUCCESS, PRESENT)] * 10 + [(Outcome.FAILURE, NA)] * 10
    labels = [
        Label(label.trajectory_id, "c", run, coin(place + run) if place >= 10 else label.verdict)
        for run in range(5)
        for place, label in enumerate(table(cells, run)[0])
    ]
    missing = [Label(f"lost{place}", "c", run, NA) for run in range(5) for place in range(200)]
    outcomes = table(cells)[1] | {label.trajectory_id: Outcome.INFRASTRUCTURE for label in missing}
    assert (agreement([*labels, *missing]) or 0) > Fraction(2, 5)
    assert retained([*labels, *missing], outcomes) == []


def test_where_agreement_is_not_defined_nothing_is_asked_of_it() -> None:
    labels, outcomes = table([(Outcome.SUCCESS, PRESENT), (Outcome.FAILURE, LACKING)])
    (results,) = retained(labels, outcomes)
    assert results.agreement is None


def test_retained_puts_the_widest_gap_first() -> None:
    wide = [(Outcome.SUCCESS, PRESENT)] * 4 + [(Outcome.FAILURE, LACKING)] * 4
    narrow = [(Outcome.SUCCESS, PRESENT)] * 4 + [(Outcome.FAILURE, LACKING)] * 2 + [(Outcome.FAILURE, PRESENT)] * 2
    labels = table(narrow, name="a")[0] + table(wide, name="b")[0]
    assert [retained.capability for retained in retained(labels, table(wide)[1])] == ["b", "a"]


def test_a_doubled_a_missing_and_an_unknown_cell_are_refused() -> None:
    labels, outcomes = table([(Outcome.SUCCESS, PRESENT), (Outcome.FAILURE, LACKING)])
    with pytest.raises(LabelTableError, match="labelled twice"):
        contrast([*labels, labels[0]], outcomes)
    with pytest.raises(LabelTableError, match="no label of 'c' for 1"):
        contrast(labels[:1], outcomes)
    with pytest.raises(LabelTableError, match="no outcome"):
        contrast(labels, {"t0": Outcome.SUCCESS})
    with pytest.raises(LabelTableError, match="one run"):
        contrast([*labels, *table([(Outcome.SUCCESS, NA)], run=1)[0]], outcomes)


def test_alpha_of_krippendorffs_nominal_example() -> None:
    # Krippendorff (2011), "Computing Krippendorff's Alpha-Reliability", section B: two observers, nominal: 0.692
    first, second = "aabbdcccedda", "babbbccceddd"
    values = dict(zip("abcde", [NA, PRESENT, LACKING, "d", "e"], strict=True))
    labels = [
        Label(f"t{place}", "c", run, values[value])  # type: ignore[arg-type]
        for run, row in enumerate((first, second))
        for place, value in enumerate(row)
    ]
    alpha = agreement(labels)
    assert alpha is not None
    assert round(float(alpha), 3) == 0.692


def test_alpha_of_krippendorffs_example_with_missing_values() -> None:
    # the same, section C: four observers, twelve units of which one has a single value, nominal: 0.743
    rows = ("123321412...", "1233224125.3", ".3332342251.", "12332441251.")
    values = dict(zip("12345", [NA, PRESENT, LACKING, "d", "e"], strict=True))
    labels = [
        Label(f"t{place}", "c", run, values[value])  # type: ignore[arg-type]
        for run, row in enumerate(rows)
        for place, value in enumerate(row)
        if value != "."
    ]
    alpha = agreement(labels)
    assert alpha is not None
    assert round(float(alpha), 3) == 0.743


def test_alpha_is_none_with_one_run_or_without_variation() -> None:
    assert agreement(table([(Outcome.SUCCESS, NA), (Outcome.FAILURE, LACKING)])[0]) is None
    shared = [(Outcome.SUCCESS, NA)] * 3
    assert agreement(table(shared)[0] + table(shared, run=1)[0]) is None


@given(rows)
def test_rates_stay_in_bounds(cells: list[Row]) -> None:
    entry = of(cells)
    assert entry.delta is None or -1 <= entry.delta <= 1
    assert entry.coverage is None or 0 <= entry.coverage <= 1


@given(rows, st.randoms(use_true_random=False))
def test_the_order_of_labels_does_not_matter(cells: list[Row], rng: object) -> None:
    labels, outcomes = table(cells)
    shuffled = list(labels)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert contrast(shuffled, outcomes) == contrast(labels, outcomes)


@given(rows, st.lists(st.sampled_from([Outcome.SUCCESS, Outcome.FAILURE]), max_size=20))
def test_na_rows_leave_the_rates_alone(cells: list[Row], extra: list[Outcome]) -> None:
    earlier, later = of(cells), of(cells + [(outcome, NA) for outcome in extra])
    assert (earlier.success.error_rate, earlier.failure.error_rate) == (
        later.success.error_rate,
        later.failure.error_rate,
    )
    assert earlier.delta == later.delta


@given(rows, st.lists(st.sampled_from(list(Verdict)), max_size=20))
def test_infrastructure_outcomes_change_nothing(cells: list[Row], extra: list[Verdict]) -> None:
    assert of(cells) == of(cells + [(Outcome.INFRASTRUCTURE, verdict) for verdict in extra])


@given(rows)
def test_one_more_failure_that_lacks_it_never_lowers_the_gap(cells: list[Row]) -> None:
    earlier, later = of(cells), of([*cells, (Outcome.FAILURE, LACKING)])
    assert earlier.delta is None or (later.delta is not None and later.delta >= earlier.delta)
    assert earlier.coverage is None or (later.coverage is not None and later.coverage >= earlier.coverage)


@given(st.lists(st.lists(st.sampled_from(list(Verdict)), min_size=2, max_size=4), min_size=1, max_size=20))
def test_alpha_is_at_most_one_and_one_only_without_disagreement(units: list[list[Verdict]]) -> None:
    labels = [Label(f"t{n}", "c", run, entry) for n, unit in enumerate(units) for run, entry in enumerate(unit)]
    alpha = agreement(labels)
    varied = len(Counter(entry for unit in units for entry in unit)) > 1
    assert (alpha is None) == (not varied)
    if alpha is not None:
        assert alpha <= 1
        assert (alpha == 1) == all(len(set(unit)) == 1 for unit in units)


S, F = Outcome.SUCCESS, Outcome.FAILURE
# Hard tasks need the capability and are failed; within a task failures and successes lack it alike.
HARD = [[(S, LACKING), (F, LACKING), (F, LACKING), (F, LACKING)]] * 6
EASY = [[(S, PRESENT), (S, PRESENT), (S, PRESENT), (F, PRESENT)]] * 6


def by_task(tasks: list[list[Row]], run: int = 0) -> tuple[list[Label], dict[str, Outcome], dict[str, str]]:
    cells = [(task, row) for task, rows_of_task in enumerate(tasks) for row in rows_of_task]
    labels, outcomes = table([row for _, row in cells], run)
    return labels, outcomes, {f"t{place}": f"task {task}" for place, (task, _) in enumerate(cells)}


def test_a_capability_that_hard_tasks_need_has_no_gap_within_them() -> None:
    labels, outcomes, tasks = by_task(HARD + EASY)
    (across,), (paired,) = contrast(labels, outcomes), contrast(labels, outcomes, tasks=tasks)
    assert across.passes()
    assert across.delta == Fraction(18, 24) - Fraction(6, 24)
    assert paired.is_within_tasks
    assert paired.delta == 0
    assert not paired.passes()
    # Coverage is that of all failures, and so are the counts.
    assert paired.coverage == across.coverage == Fraction(18, 24)
    assert (paired.success, paired.failure) == (across.success, across.failure)
    assert retained(labels, outcomes)
    assert retained(labels, outcomes, tasks=tasks) == []


def test_the_gap_within_tasks_computed_by_hand() -> None:
    """Weights 1/2, 2/3 and 0: a task whose successes did not need the capability says nothing."""
    tasks = [
        [(S, PRESENT), (F, LACKING)],
        [(S, PRESENT), (F, LACKING), (F, PRESENT)],
        [(S, NA), (F, LACKING)],
        [(S, NA), (F, NA)],
        [(S, PRESENT), (F, NA)],
        [(F, LACKING)] * 3,
    ]
    (entry,) = contrast(*by_task(tasks)[:2], tasks=by_task(tasks)[2])
    assert entry.delta == (Fraction(1, 2) * 1 + Fraction(2, 3) * Fraction(1, 2)) / (Fraction(1, 2) + Fraction(2, 3))
    (undefined,) = contrast(*by_task([tasks[3]] * 6)[:2], tasks=by_task([tasks[3]] * 6)[2])
    assert (undefined.is_within_tasks, undefined.delta) == (True, None)
    assert not undefined.passes(delta=-1.0, rho=0.0)


def test_too_few_tasks_with_both_outcomes_are_compared_with_all_others() -> None:
    labels, outcomes, tasks = by_task(HARD[:4] + [[(S, PRESENT)]] * 9)
    assert contrast(labels, outcomes, tasks=tasks) == contrast(labels, outcomes)
    labels, outcomes, tasks = by_task(HARD[:5])
    assert contrast(labels, outcomes, tasks=tasks)[0].is_within_tasks


def test_a_few_repeated_tasks_do_not_silence_the_other_conversations() -> None:
    """Five tasks with both outcomes have fewer than a quarter of the failures, so the contrast is across tasks."""
    repeated = [[(S, NA), (F, NA)]] * 5
    single = [[(F, LACKING)]] * 16 + [[(S, PRESENT)]] * 20
    labels, outcomes, tasks = by_task(repeated + single)
    (entry,) = contrast(labels, outcomes, tasks=tasks)
    assert not entry.is_within_tasks
    assert entry.delta == 1
    labels, outcomes, tasks = by_task(repeated + single[1:])
    assert contrast(labels, outcomes, tasks=tasks)[0].is_within_tasks


def test_the_tasks_that_a_gap_comes_from_are_counted() -> None:
    tasks = [[(S, PRESENT), (F, LACKING)]] * 2 + [[(S, NA), (F, LACKING)], [(S, PRESENT), (F, NA)], [(S, NA), (F, NA)]]
    labels, outcomes, task_of = by_task(tasks)
    assert contrast(labels, outcomes, tasks=task_of)[0].informative_tasks == 2
    assert contrast(labels, outcomes)[0].informative_tasks == 0


@given(st.lists(st.lists(st.tuples(st.sampled_from([S, F]), st.sampled_from(list(Verdict))), max_size=6), max_size=12))
def test_the_gap_within_tasks_is_a_mean_of_the_gaps_of_tasks(tasks: list[list[Row]]) -> None:
    labels, outcomes, task_of = by_task(tasks)
    for entry in contrast(labels, outcomes, tasks=task_of):
        if entry.is_within_tasks and entry.delta is not None:
            gaps = [of(rows_of_task).delta for rows_of_task in tasks if rows_of_task]
            defined = [gap for gap in gaps if gap is not None]
            assert min(defined) <= entry.delta <= max(defined)
