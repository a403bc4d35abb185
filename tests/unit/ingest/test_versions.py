"""A conversation that is imported more than once: which of its versions count."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from store.database import read_session, write_session
from store.records import Cycle, CycleState, Feedback
from store.repositories.capabilities import save_capabilities, save_labels
from store.repositories.cycles import save_cycle
from store.repositories.trajectories import list_trajectories
from store.types import Capability, Label, Outcome, Trajectory, Verdict
from tests.unit.ingest.importers.import_files import EXPORTS, LABELS
from traced.config.settings import Settings, load_settings
from traced.ingest.file_import import BATCH, ImportRequest, ImportResult, import_file
from traced.scoring.evidence import label_trajectory
from traced.targets.conversation_target import HELD_OUT, SUPERSEDED, TRAIN

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ACME = {"target.name": "acme", "target.kind": "recorded"}
HELLO = [{"role": "user", "content": "hi, I am Ann"}, {"role": "assistant", "content": "hello"}]
LONGER = [*HELLO, {"role": "user", "content": "thanks"}, {"role": "assistant", "content": "bye"}]

Run = Callable[..., ImportResult]


@pytest.fixture
def run(store: Engine, settings: Settings, tmp_path: Path) -> Run:
    def imported(*records: dict[str, Any], path: Path | None = None, **overrides: Any) -> ImportResult:
        if path is None:
            path = tmp_path / "conversations.jsonl"
            path.write_text("\n".join(json.dumps({"messages": HELLO, **record}) for record in records))
        return import_file(store, load_settings(settings.data_dir, ACME | overrides), ImportRequest(path), at=NOW)

    return imported


def list_rows(store: Engine) -> list[Trajectory]:
    with read_session(store) as session:
        return list_trajectories(session)


def cite(store: Engine, key: str) -> None:
    with write_session(store) as session:
        save_cycle(session, Cycle("c1", "acme", "recorded", 0, {}, CycleState.RUNNING, NOW))
        save_capabilities(session, "c1", [Capability("c", *["text"] * 5)])
        save_labels(session, "c1", [Label(key, "c", 0, Verdict.NA)])


@pytest.mark.parametrize("names", [{"id": "a"}, {"id": "a", "task_id": "t"}, {"metadata": {"session_id": "a"}}])
def test_a_conversation_that_went_on_takes_the_place_of_its_beginning(run: Run, store: Engine, names: Any) -> None:
    other = {"id": "b", "task_id": "t", "reward": 1}
    assert run({**names, "reward": 0}, other).added == 2
    result = run({**names, "messages": LONGER, "reward": 1}, other)
    assert (result.added, result.known, result.superseded, result.superseded_in_use) == (1, 1, 1, 0)
    rows = list_rows(store)
    assert sorted((len(row.messages), row.outcome) for row in rows) == [(2, Outcome.SUCCESS), (4, Outcome.SUCCESS)]
    repeated = run({**names, "messages": LONGER, "reward": 1}, other)
    assert (repeated.added, repeated.known, repeated.superseded) == (0, 2, 0)
    earlier = run({**names, "reward": 0})
    assert (earlier.added, earlier.shorter, earlier.superseded) == (0, 1, 0)
    assert list_rows(store) == rows


def test_a_version_that_is_evidence_stays_out_of_later_analyses(run: Run, store: Engine) -> None:
    run({"id": "a", "reward": 0})
    [first] = list_rows(store)
    cite(store, first.id)
    result = run({"id": "a", "messages": LONGER, "reward": 1})
    assert (result.added, result.superseded, result.superseded_in_use) == (1, 0, 1)
    by_length = {len(row.messages): row for row in list_rows(store)}
    assert by_length[2] == replace(first, split=SUPERSEDED)
    assert by_length[4].split == first.split
    assert run({"id": "a", "messages": LONGER, "reward": 1}).superseded_in_use == 0
    assert run({"id": "a", "reward": 0}).known == 1
    assert {len(row.messages): row for row in list_rows(store)} == by_length
    # A correction to the version that was superseded brings it back.
    assert run({"id": "a", "messages": [HELLO[0], {"role": "assistant", "content": "?"}]}).superseded == 1
    assert run({"id": "a", "reward": 0}).superseded == 1
    assert list_rows(store) == [first]


def test_a_redacted_version_takes_the_place_of_one_that_was_not(run: Run, store: Engine) -> None:
    run({"id": "a", "reward": 0}, {"id": "b", "reward": 1, "messages": LONGER})
    redact = {"serving.redact": ["Ann"]}
    result = run({"id": "a", "reward": 0}, {"id": "b", "reward": 1, "messages": LONGER}, **redact)
    assert (result.added, result.superseded) == (2, 2)
    assert "Ann" not in json.dumps([row.messages for row in list_rows(store)])


def test_what_was_imported_before_redaction_is_counted(run: Run, store: Engine) -> None:
    assert run({"id": "a", "reward": 0}, {"reward": 1}).unredacted == 0
    redact = {"serving.redact": ["Ann"], "serving.redact_fields": ["email"]}
    # The record without an id is stored once more, redacted, beside the earlier one.
    result = run({"id": "a", "reward": 0}, {"reward": 1}, **redact)
    assert (result.added, result.superseded, result.unredacted) == (2, 1, 1)
    assert run({"id": "b", "reward": 0}, **redact).unredacted == 1
    with write_session(store) as session:
        session.connection().exec_driver_sql("DELETE FROM trajectories WHERE messages LIKE '%Ann%'")
    assert run({"id": "b", "reward": 0}, **redact).unredacted == 0
    run({"id": "c"})
    assert run({"id": "b", "reward": 0}, **redact).unredacted == 1


def test_the_split_and_the_label_of_a_person_stay_with_the_conversation(run: Run, store: Engine) -> None:
    # Everything is held out at first, next to nothing later.
    run({"id": "a"}, **{"target.held_out": 0.99})
    [first] = list_rows(store)
    assert first.split == HELD_OUT
    with write_session(store) as session:
        label_trajectory(session, Feedback(first.id, NOW, label="good", who="ann"), LABELS)
    run({"id": "a", "messages": LONGER}, {"id": "b"}, **{"target.held_out": 0.01})
    rows = {row.task_id: row for row in list_rows(store)}
    assert (rows["a"].split, rows["a"].outcome, len(rows["a"].messages)) == (HELD_OUT, Outcome.SUCCESS, 4)
    assert (rows["b"].split, rows["b"].outcome) == (TRAIN, Outcome.UNKNOWN)


def test_several_versions_in_one_file(run: Run, store: Engine) -> None:
    """Snapshots of one conversation are one; branches of it, and trials that no id names, all stay."""
    branch = [HELLO[0], {"role": "assistant", "content": "good day"}]
    filler = [{"id": str(number), "messages": branch} for number in range(BATCH)]
    records = [
        {"id": "snapshots"},
        {"id": "snapshots", "messages": LONGER},
        {"id": "branches"},
        {"task_id": "trials"},
        {"task_id": "trials", "messages": branch},
        {},
        {"messages": LONGER},
        {"id": "far apart"},
        *filler,
        {"id": "far apart", "messages": LONGER},
        {"id": "branches", "messages": branch},
    ]
    first = run(*records)
    rows = [row for row in list_rows(store) if not row.task_id.isdigit()]
    lengths = sorted((row.task_id.partition("-")[0], len(row.messages)) for row in rows)
    assert lengths == [
        ("branches", 2), ("branches", 2), ("far apart", 4), ("opening", 2), ("opening", 4),
        ("snapshots", 4), ("trials", 2), ("trials", 2),
    ]  # fmt: skip
    assert (first.shorter, first.superseded) == (1, 1)
    second = run(*records)
    assert (second.added, second.superseded, second.shorter) == (0, 0, 2)
    assert [row for row in list_rows(store) if not row.task_id.isdigit()] == rows


def test_a_later_export_of_traces_takes_the_place_of_an_earlier_one(run: Run, store: Engine, tmp_path: Path) -> None:
    path = tmp_path / "export.jsonl"
    path.write_text((EXPORTS / "langsmith-openai.jsonl").read_text())
    count = run(path=path).added
    path.write_text(path.read_text().replace("Where is order", "Where is parcel"))
    result = run(path=path)
    assert 0 < result.added == result.superseded
    assert len(list_rows(store)) == count


@pytest.mark.parametrize("is_cited", [False, True])
def test_a_later_import_adds_the_start_that_an_earlier_one_lacked(run: Run, store: Engine, is_cited: bool) -> None:
    """Without a start time no cycle after a promotion uses a conversation, and it says to import them with one."""
    run({"id": "a", "reward": 0}, {"reward": 1})
    rows = {row.task_id: row for row in list_rows(store)}
    if is_cited:
        cite(store, rows["a"].id)
    start = "2026-01-02T03:04:05Z"
    result = run({"id": "a", "reward": 0, "started_at": start}, {"reward": 1, "started_at": start})
    assert (result.added, result.known, result.superseded) == (0, 2, 0)
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    with_start = {row.task_id: row for row in list_rows(store)}
    assert with_start == {key: replace(row, started_at=at) for key, row in rows.items()}
    # The first one is kept.
    run({"id": "a", "reward": 0, "started_at": "2027-01-02T03:04:05Z"}, {"reward": 1})
    assert {row.task_id: row for row in list_rows(store)} == with_start
