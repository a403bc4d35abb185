"""Findings of an analysis: what strictness asks for, and runs that only repeat themselves."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from agents.analyst.llm.analysis import Analysis
from store.database import open_store, sqlite_url, write_session
from store.records import WITHIN_TASKS
from store.repositories.capabilities import list_findings
from store.repositories.cycles import save_cycle
from store.repositories.trajectories import save_trajectories
from store.types import Label, Outcome, Verdict
from tests.unit.store.chain import CAPABILITY, CYCLE, trajectory
from traced.config.cycle_sections import AnalysisSection
from traced.config.settings import load_settings
from traced.pipeline.findings import (
    EXPLAINED,
    MIXED_FAILURES,
    MIXED_TASKS,
    UNEXPLAINED,
    _equal_in_all_runs,
    contrast_findings,
    explanation_text,
    save_analysis,
)

RUNS = 5


def labels_of(failures: int, *, lacking_count: int, noise: float = 0.0) -> tuple[list[Label], Mapping[str, Outcome]]:
    """Labels of as many failures, of which some lack the capability, as of successes, which all have it."""
    rng = random.Random(0)
    outcomes = {f"f{n:03}": Outcome.FAILURE for n in range(failures)}
    outcomes |= {f"s{n:03}": Outcome.SUCCESS for n in range(failures)}
    table = {key: key[0] == "f" and int(key[1:]) < lacking_count for key in outcomes}
    return [
        Label(key, "c", run, Verdict.LACKING if is_lacking and rng.random() >= noise else Verdict.PRESENT)
        for run in range(RUNS)
        for key, is_lacking in table.items()
    ], outcomes


@pytest.mark.parametrize(("failures", "retained"), [(12, False), (400, True)])
def test_strictness_asks_for_the_low_end_of_the_gap(failures: int, retained: bool) -> None:
    labels, outcomes = labels_of(failures, lacking_count=failures // 3)
    for is_strict in (False, True):
        (finding,) = contrast_findings("c1", labels, outcomes, AnalysisSection(strict=is_strict), 0, tasks={})
        assert finding.delta == pytest.approx(1 / 3, abs=0.01)
        assert finding.delta_low is not None
        assert finding.retained is (retained if is_strict else True)
        assert (finding.delta_low >= 0.2) is retained


@pytest.mark.parametrize(("pairs", "retained"), [(1, False), (4, False), (5, True)])
def test_strictness_asks_for_a_gap_from_several_tasks(pairs: int, retained: bool) -> None:
    """The bootstrap interval of a gap that comes from one task has no width."""
    tasks = {f"{side}{task}": str(task) for task in range(6) for side in "sf"}
    outcomes = {key: Outcome.FAILURE if key[0] == "f" else Outcome.SUCCESS for key in tasks}
    verdicts = {"f": Verdict.LACKING, "s": Verdict.PRESENT}
    labels = [
        Label(key, "c", run, verdicts[key[0]] if int(task) < pairs else Verdict.NA)
        for run in range(RUNS)
        for key, task in tasks.items()
    ]
    for is_strict in (False, True):
        (finding,) = contrast_findings("c1", labels, outcomes, AnalysisSection(strict=is_strict), 0, tasks=tasks)
        assert (finding.delta, finding.delta_low) == (1, 1)
        assert finding.retained is (retained if is_strict else True)
    remark = ", which are few" if pairs < 5 else ""
    assert finding.basis == f"within {pairs} task{'s' * (pairs > 1)}{remark}"


def test_a_finding_says_that_it_compares_different_tasks() -> None:
    labels, outcomes = labels_of(12, lacking_count=4)
    (finding,) = contrast_findings("c1", labels, outcomes, AnalysisSection(), 0, tasks={})
    assert finding.basis == "across tasks, which is weaker evidence"
    assert replace(finding, counts={}).basis == ""  # of an earlier version


def test_the_event_counts_failures_that_lack_nothing(tmp_path: Path) -> None:
    labels, outcomes = labels_of(12, lacking_count=4)
    tasks = {key: key[1:] for key in outcomes}  # each task was failed once and solved once
    settings = load_settings(tmp_path)
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(store) as session:
        save_cycle(session, CYCLE)
        save_trajectories(session, [trajectory(key, outcome) for key, outcome in outcomes.items()])
        analysis = Analysis([replace(CAPABILITY, name="c")], labels)
        detail = save_analysis(session, settings, CYCLE.id, analysis, outcomes, tasks=tasks)
    store.dispose()
    assert detail == {MIXED_TASKS: 12, MIXED_FAILURES: 12, WITHIN_TASKS: True, UNEXPLAINED: 8, EXPLAINED: {}}


def test_a_change_that_another_capability_explains_is_not_retained_and_the_event_says_by_which(tmp_path: Path) -> None:
    names = ("change-restraint", "precondition-verification")
    labels, outcomes = labels_of(12, lacking_count=8)
    labels = [replace(label, capability=name) for name in names for label in labels]
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(store) as session:
        save_cycle(session, CYCLE)
        save_trajectories(session, [trajectory(key, outcome) for key, outcome in outcomes.items()])
        analysis = Analysis([replace(CAPABILITY, name=name) for name in names], labels)
        tasks = {key: key for key in outcomes}
        detail = save_analysis(session, load_settings(tmp_path), CYCLE.id, analysis, outcomes, tasks=tasks)
        findings = {finding.capability: finding for finding in list_findings(session, CYCLE.id)}
    store.dispose()
    assert detail[EXPLAINED] == {"change-restraint": ["precondition-verification"]}
    assert {name: finding.retained for name, finding in findings.items()} == {names[0]: False, names[1]: True}
    assert findings[names[0]].delta == findings[names[1]].delta
    assert explanation_text(detail[EXPLAINED]) == (
        "explained, and not retained: change-restraint by precondition-verification"
    )
    assert explanation_text({}) == ""


def test_runs_that_repeat_themselves_count_once_and_agree_with_nothing() -> None:
    labels, outcomes = labels_of(30, lacking_count=20)
    assert _equal_in_all_runs(labels) == {"c"}
    (finding,) = contrast_findings("c1", labels, outcomes, AnalysisSection(), 0, tasks={}, repeated={"c"})
    assert (finding.runs, finding.runs_agreeing, finding.agreement, finding.retained) == (1, 1, None, True)
    varying, _ = labels_of(30, lacking_count=20, noise=0.1)
    assert _equal_in_all_runs(varying) == frozenset()
    (finding,) = contrast_findings("c1", varying, outcomes, AnalysisSection(), 0, tasks={})
    assert (finding.runs, finding.runs_agreeing) == (RUNS, RUNS)
    assert finding.agreement is not None
    assert 0 < finding.agreement < 1
