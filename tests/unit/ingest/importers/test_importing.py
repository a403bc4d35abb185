"""Imports into a store: what is kept between two runs, and when it counts."""

import json
import sqlite3
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from store.database import open_store, write_session
from store.repositories.events import list_events
from store.repositories.trajectories import iterate_ids, list_trajectories
from tests.unit.ingest.importers.import_files import EXPORTS, LABELS
from traced.config.settings import Settings, load_settings
from traced.ingest.file_import import BATCH, ImportRequest, ImportResult, import_file
from traced.ingest.import_ledger import Ledger
from traced.ingest.importers.errors import AlreadyRunning, BadRecord, ImportFailed
from traced.scoring.evidence import effective_outcome
from traced.scoring.rescoring import apply_rules
from traced.scoring.rule_file import read_rules

HELLO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
AT = datetime(2026, 1, 1, tzinfo=UTC)


class Stop(Exception):
    """The process is gone."""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(tmp_path / "data")


@pytest.fixture
def store(settings: Settings) -> Iterator[Engine]:
    engine = open_store(settings.store_url)
    yield engine
    engine.dispose()


@pytest.fixture
def run(settings: Settings, store: Engine) -> Callable[..., ImportResult]:
    def imported(path: Path, *, stop: bool = False, **wanted: Any) -> ImportResult:
        def after_a_batch(_: object) -> None:
            if stop:
                raise Stop

        return import_file(store, settings, ImportRequest(path, **wanted), at=AT, on_batch=after_a_batch)

    return imported


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Two batches and a half, a bad line in each."""
    path = tmp_path / "many.jsonl"
    lines = [json.dumps({"id": str(number), "messages": HELLO}) for number in range(BATCH * 5 // 2)]
    for at in (10, BATCH + 10, BATCH * 2 + 10):
        lines.insert(at, "{oops")
    path.write_text("\n".join(lines))
    return path


def test_an_import_that_was_stopped_goes_on(run: Any, many: Path) -> None:
    with pytest.raises(Stop):
        run(many, stop=True)
    found = run(many)
    assert found.resumed
    assert (found.added, found.known, found.bad) == (BATCH * 5 // 2, 0, 3)
    assert found.bad_file.read_text().count("\n") == 3
    assert not run(many).resumed


def test_who_listens_hears_of_what_is_new(run: Any, many: Path, store: Engine) -> None:
    first, _ = run(many), run(many)
    with write_session(store) as opened:
        [told] = list_events(opened)
    assert (told.kind, told.subject, told.cycle_id) == ("import", "openai", first.cycle)
    assert told.detail == {"trajectories": BATCH * 5 // 2, "judged anew": 0, "left out": 3}


@pytest.mark.parametrize("change", ["from_start", "agent", "content", "store"])
def test_it_begins_anew_where_what_was_done_does_not_count(run: Any, many: Path, store: Engine, change: str) -> None:
    with pytest.raises(Stop):
        run(many, stop=True)
    if change == "content":
        many.write_text(many.read_text().replace("hello", "howdy"))
    if change == "store":
        with write_session(store) as opened:
            opened.connection().exec_driver_sql("DELETE FROM trajectories")
    found = run(many, from_start=change == "from_start", agent="other" if change == "agent" else "recorded")
    assert not found.resumed
    assert found.added == (BATCH * 3 // 2 if change == "from_start" else BATCH * 5 // 2)
    assert found.bad_file.read_text().count("\n") == 3


def test_bad_records_behind_the_last_state_are_not_kept_twice(tmp_path: Path, many: Path) -> None:
    def bad(number: int) -> BadRecord:
        return BadRecord(many, number, number, 1, "oops")

    with Ledger(tmp_path, many, {}) as ledger:
        ledger.leave_out(bad(1))
        ledger.commit({"file": {}})
        ledger.leave_out(bad(2))
    with Ledger(tmp_path, many, {}) as ledger:
        assert (ledger.resume_point, ledger.counts.bad) == ({"file": {}}, 1)
        ledger.leave_out(bad(2))
        ledger.finish()
    assert [json.loads(line)["record"] for line in ledger.bad_file.read_text().splitlines()] == [1, 2]


def test_a_file_is_imported_once_at_a_time(tmp_path: Path, many: Path) -> None:
    with Ledger(tmp_path, many, {}), pytest.raises(AlreadyRunning), Ledger(tmp_path, many, {}):
        pass


def test_a_damaged_state_counts_for_nothing(run: Any, many: Path, settings: Settings) -> None:
    with pytest.raises(Stop):
        run(many, stop=True)
    [state] = (settings.data_dir / "imports").glob("*.json")
    state.write_text(state.read_text()[:40])
    assert run(many).known == BATCH


def test_strictly_nothing_is_stored_of_a_file_with_a_bad_line(run: Any, many: Path, store: Engine) -> None:
    with pytest.raises(BadRecord, match="record 11, line 11"):
        run(many, strict=True)
    with write_session(store) as opened:
        assert list(iterate_ids(opened)) == []


@pytest.mark.parametrize("name", ["langsmith-openai.jsonl", "langfuse-openai.jsonl"])
def test_strictly_nothing_of_an_export_either(run: Any, tmp_path: Path, store: Engine, name: str) -> None:
    path = tmp_path / name
    path.write_text((EXPORTS / name).read_text() + "{oops\n")
    with pytest.raises(BadRecord):
        run(path, strict=True)
    with write_session(store) as opened:
        assert list(iterate_ids(opened)) == []
    assert run(path).added == 3


def test_feedback_that_comes_with_a_later_export_judges(run: Any, tmp_path: Path, store: Engine) -> None:
    path = tmp_path / "export.jsonl"
    path.write_text((EXPORTS / "langsmith-openai.jsonl").read_text().replace('"feedback_stats"', '"none"'))
    assert run(path).outcomes == {"unknown": 2, "infrastructure": 1}
    found = run(EXPORTS / "langsmith-openai.jsonl")
    assert (found.added, found.replaced, found.known) == (0, 2, 1)
    with write_session(store) as opened:
        assert sorted(str(one.outcome) for one in list_trajectories(opened)) == ["failure", "infrastructure", "success"]


@pytest.mark.parametrize("reward", [0, 1])
def test_an_outcome_that_comes_later_counts_before_the_rules(
    tmp_path: Path, settings: Settings, store: Engine, reward: int
) -> None:
    rules, path = tmp_path / "rules.toml", tmp_path / "one.jsonl"
    rules.write_text('[[rule]]\nname = "any"\noutcome = "success"\nwhen = {turns = {ge = 0}}\n')
    settings.data_dir.mkdir(exist_ok=True)
    (settings.data_dir / "traced.toml").write_text(f'[outcomes]\nrules = "{rules}"\n')
    judging = load_settings(settings.data_dir)

    def outcome(**told: Any) -> tuple[ImportResult, str]:
        path.write_text(json.dumps({"messages": HELLO, **told}))
        found = import_file(store, judging, ImportRequest(path), at=AT)
        apply_rules(store, read_rules(rules), "openai", LABELS, include_judged=True, limit=None, at=AT)
        with write_session(store) as opened:
            [stored] = list_trajectories(opened)
            by = effective_outcome(opened, stored, LABELS).source
        return found, f"{stored.outcome} by {by}"

    first, said = outcome()
    assert (first.added, first.judged, said) == (1, 1, "success by rules")
    later, said = outcome(reward=reward)
    assert (later.added, later.replaced, later.known) == ((0, 1, 0) if reward == 0 else (0, 0, 1))
    assert said == ("failure by source" if reward == 0 else "success by source")
    again, same = outcome(reward=reward)
    assert (again.replaced, again.known, same) == (0, 1, said)
    assert outcome()[1] == said  # a file that says nothing takes nothing back


def test_what_the_scratch_database_cannot_do_is_told(run: Any, many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("traced.ingest.importers.traces.ScratchDatabase.add", full)
    with pytest.raises(ImportFailed, match="disk is full"):
        run(EXPORTS / "langsmith-openai.jsonl")


def test_the_cycle_is_that_of_all_that_was_imported_in_the_listings_order(run: Any, many: Path, store: Engine) -> None:
    run(many)
    with write_session(store) as opened:
        listed = [one.id for one in list_trajectories(opened)]
        assert list(iterate_ids(opened)) == listed
