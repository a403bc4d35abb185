"""Imports into a store: what is kept between two runs, and when it counts."""

import json
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from store.database import write_session
from store.repositories.events import list_events
from store.repositories.trajectories import iterate_ids, list_trajectories
from tests.unit.ingest.importers.import_files import EXPORTS, LABELS
from traced.config.settings import Settings, load_settings
from traced.ingest.file_import import BATCH, ImportRequest, ImportResult, import_file
from traced.ingest.import_ledger import LAYOUT, Ledger
from traced.ingest.importers.errors import AlreadyRunning, BadRecord, ImportFailed
from traced.scoring.evidence import effective_outcome
from traced.scoring.rescoring import apply_rules
from traced.scoring.rule_file import read_rules

HELLO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Stop(Exception):
    """The process is gone."""


@pytest.fixture
def run(settings: Settings, store: Engine) -> Callable[..., ImportResult]:
    def imported(path: Path, *, stop: bool = False, **options: Any) -> ImportResult:
        def after_a_batch(_: object) -> None:
            if stop:
                raise Stop

        return import_file(store, settings, ImportRequest(path, **options), at=NOW, on_batch=after_a_batch)

    return imported


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    """Two batches and a half, a bad line in each."""
    path = tmp_path / "large_file.jsonl"
    lines = [json.dumps({"id": str(number), "messages": HELLO}) for number in range(BATCH * 5 // 2)]
    for at in (10, BATCH + 10, BATCH * 2 + 10):
        lines.insert(at, "{oops")
    path.write_text("\n".join(lines))
    return path


def test_a_stopped_import_is_resumed(run: Any, large_file: Path) -> None:
    with pytest.raises(Stop):
        run(large_file, stop=True)
    result = run(large_file)
    assert result.resumed
    assert (result.added, result.known, result.bad) == (BATCH * 5 // 2, 0, 3)
    assert result.bad_file.read_text().count("\n") == 3
    assert not run(large_file).resumed


def test_an_import_with_new_trajectories_saves_an_event(run: Any, large_file: Path, store: Engine) -> None:
    first, _ = run(large_file), run(large_file)
    with write_session(store) as session:
        [event] = list_events(session)
    assert (event.kind, event.subject, event.cycle_id) == ("import", "openai", first.cycle)
    assert event.detail == {"trajectories": BATCH * 5 // 2, "judged anew": 0, "left out": 3}


@pytest.mark.parametrize("change", ["from_start", "agent", "content", "store", "policy", "layout"])
def test_an_import_starts_over_if_its_progress_is_void(
    run: Any, large_file: Path, store: Engine, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = large_file.with_name("policy.md")
    policy.write_text("Be kind.")
    with pytest.raises(Stop):
        run(large_file, stop=True)
    if change == "content":
        large_file.write_text(large_file.read_text().replace("hello", "howdy"))
    if change == "layout":  # another version of traced began it
        monkeypatch.setattr("traced.ingest.import_ledger.LAYOUT", LAYOUT + 1)
    if change == "store":
        with write_session(store) as session:
            session.connection().exec_driver_sql("DELETE FROM trajectories")
    options: dict[str, dict[str, Any]] = {
        "from_start": {"from_start": True},
        "agent": {"agent": "other"},
        "policy": {"policy": policy},
    }
    result = run(large_file, **options.get(change, {}))
    assert not result.resumed
    assert result.added == (BATCH * 3 // 2 if change in ("from_start", "policy", "layout") else BATCH * 5 // 2)
    assert result.completed == (BATCH if change == "policy" else 0)
    assert result.bad_file.read_text().count("\n") == 3


def test_bad_records_after_the_last_commit_are_written_once(tmp_path: Path, large_file: Path) -> None:
    def bad(number: int) -> BadRecord:
        return BadRecord(large_file, number, number, 1, "oops")

    with Ledger(tmp_path, large_file, {}) as ledger:
        ledger.leave_out(bad(1))
        ledger.commit({"file": {}})
        ledger.leave_out(bad(2))
    with Ledger(tmp_path, large_file, {}) as ledger:
        assert (ledger.resume_point, ledger.counts.bad) == ({"file": {}}, 1)
        ledger.leave_out(bad(2))
        ledger.finish()
    assert [json.loads(line)["record"] for line in ledger.bad_file.read_text().splitlines()] == [1, 2]


def test_a_file_cannot_be_imported_twice_at_the_same_time(tmp_path: Path, large_file: Path) -> None:
    with Ledger(tmp_path, large_file, {}), pytest.raises(AlreadyRunning), Ledger(tmp_path, large_file, {}):
        pass


def test_a_corrupt_progress_file_is_ignored(run: Any, large_file: Path, settings: Settings) -> None:
    with pytest.raises(Stop):
        run(large_file, stop=True)
    [state] = (settings.data_dir / "imports").glob("*.json")
    state.write_text(state.read_text()[:40])
    assert run(large_file).known == BATCH


def test_a_strict_import_stores_nothing_of_a_file_with_a_bad_line(run: Any, large_file: Path, store: Engine) -> None:
    with pytest.raises(BadRecord, match="record 11, line 11"):
        run(large_file, strict=True)
    with write_session(store) as session:
        assert list(iterate_ids(session)) == []


@pytest.mark.parametrize("name", ["langsmith-openai.jsonl", "langfuse-openai.jsonl"])
def test_a_strict_import_stores_nothing_of_a_bad_export(run: Any, tmp_path: Path, store: Engine, name: str) -> None:
    path = tmp_path / name
    path.write_text((EXPORTS / name).read_text() + "{oops\n")
    with pytest.raises(BadRecord):
        run(path, strict=True)
    with write_session(store) as session:
        assert list(iterate_ids(session)) == []
    assert run(path).added == 3


def test_feedback_in_a_later_export_changes_outcomes(run: Any, tmp_path: Path, store: Engine) -> None:
    path = tmp_path / "export.jsonl"
    path.write_text((EXPORTS / "langsmith-openai.jsonl").read_text().replace('"feedback_stats"', '"none"'))
    assert run(path).outcomes == {"unknown": 2, "infrastructure": 1}
    result = run(EXPORTS / "langsmith-openai.jsonl")
    assert (result.added, result.replaced, result.known) == (0, 2, 1)
    with write_session(store) as session:
        assert sorted(str(trajectory.outcome) for trajectory in list_trajectories(session)) == [
            "failure",
            "infrastructure",
            "success",
        ]


def test_outcomes_that_cannot_be_read_are_counted(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    values = ["resolved", "resolved", "good", *(f"state {number}" for number in range(9))]
    path.write_text("\n".join(json.dumps({"id": str(n), "messages": HELLO, "label": v}) for n, v in enumerate(values)))
    result = run(path)
    assert (result.outcomes, result.unread, result.has_outcomes) == ({"unknown": 11, "success": 1}, 11, True)
    assert list(result.unread_values.items())[:2] == [('label "resolved"', 2), ('label "state 0"', 1)]
    assert len(result.unread_values) == 5


@pytest.mark.parametrize(
    ("scores", "text"),
    [
        ('{"correctness":{"n":1,"avg":7.0}}', "correctness 7.0"),
        ('{"a":{"n":1,"avg":0.0},"b":{"n":1,"avg":1.0}}', "scores that disagree: a, b (--score NAME picks one)"),
    ],
)
def test_scores_of_an_export_that_give_no_outcome_are_reported(
    run: Any, tmp_path: Path, scores: str, text: str
) -> None:
    path = tmp_path / "export.jsonl"
    stats = '{"correctness":{"n":1,"avg":0.0,"values":{}}}'
    export = (EXPORTS / "langsmith-openai.jsonl").read_text()
    path.write_text(export.replace(stats, scores))
    assert path.read_text() != export
    result = run(path)
    assert (result.outcomes["unknown"], result.unread, result.unread_values) == (1, 1, {text: 1})


@pytest.mark.parametrize("reward", [0, 1])
def test_a_later_outcome_of_the_source_overrides_the_rules(
    tmp_path: Path, settings: Settings, store: Engine, reward: int
) -> None:
    rules, path = tmp_path / "rules.toml", tmp_path / "one.jsonl"
    rules.write_text('[[rule]]\nname = "any"\noutcome = "success"\nwhen = {turns = {ge = 0}}\n')
    settings.data_dir.mkdir(exist_ok=True)
    (settings.data_dir / "traced.toml").write_text(f'[outcomes]\nrules = "{rules}"\n')
    settings_with_rules = load_settings(settings.data_dir)

    def outcome(**extra: Any) -> tuple[ImportResult, str]:
        path.write_text(json.dumps({"messages": HELLO, **extra}))
        result = import_file(store, settings_with_rules, ImportRequest(path), at=NOW)
        apply_rules(store, read_rules(rules), "openai", LABELS, include_judged=True, limit=None, at=NOW)
        with write_session(store) as session:
            [trajectory] = list_trajectories(session)
            source = effective_outcome(session, trajectory, LABELS).source
        return result, f"{trajectory.outcome} by {source}"

    first, first_source = outcome()
    assert (first.added, first.judged, first_source) == (1, 1, "success by rules")
    later, first_source = outcome(reward=reward)
    assert (later.added, later.replaced, later.known) == ((0, 1, 0) if reward == 0 else (0, 0, 1))
    assert first_source == ("failure by source" if reward == 0 else "success by source")
    second, second_source = outcome(reward=reward)
    assert (second.replaced, second.known, second_source) == (0, 1, first_source)
    assert outcome()[1] == first_source  # a file that says nothing takes nothing back


def test_errors_of_the_scratch_database_are_reported(
    run: Any, large_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("traced.ingest.importers.traces.ScratchDatabase.add", full)
    with pytest.raises(ImportFailed, match="disk is full"):
        run(EXPORTS / "langsmith-openai.jsonl")


def test_the_cycle_id_covers_all_imports_in_listing_order(run: Any, large_file: Path, store: Engine) -> None:
    run(large_file)
    with write_session(store) as session:
        ids = [trajectory.id for trajectory in list_trajectories(session)]
        assert list(iterate_ids(session)) == ids
