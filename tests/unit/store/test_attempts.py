"""Attempts and quarantined inputs."""

from dataclasses import replace

import pytest
from sqlalchemy import Engine
from sqlmodel import Session

from store.database import write_session
from store.errors import BrokenReference, NotFound, StoreConflict
from store.repositories.attempts import (
    AttemptState,
    InputKey,
    QuarantinedInput,
    begin_attempt,
    end_attempt,
    find_quarantined,
    list_attempts,
    list_quarantined,
    quarantine,
    record_heartbeat,
    release_quarantined,
    release_succeeded,
    running_attempts,
)
from store.repositories.cycles import save_cycle
from tests.unit.store.chain import CYCLE, T0, later

KEY = InputKey("train", "dates", "ab")


@pytest.fixture
def db(db: Session) -> Session:
    save_cycle(db, CYCLE)
    return db


def test_the_life_of_an_attempt(db: Session) -> None:
    attempt = begin_attempt(db, "c1", KEY, holder="h", at=T0)
    assert (attempt.number, attempt.state, attempt.ended_at) == (1, AttemptState.RUNNING, None)
    record_heartbeat(db, attempt.seq, at=later(1), pid=42, progress={"phase": "x", "done": 3})
    record_heartbeat(db, attempt.seq, at=later(2))
    [running] = running_attempts(db)
    assert (running.pid, running.heartbeat_at, running.evidence) == (
        42,
        later(2),
        {"progress": {"phase": "x", "done": 3}},
    )
    end_attempt(db, attempt.seq, AttemptState.FAILED, at=later(3), evidence={"detail": "\0 hung"})
    [ended_attempt] = list_attempts(db, KEY)
    assert (ended_attempt.state, ended_attempt.ended_at) == (AttemptState.FAILED, later(3))
    assert ended_attempt.evidence == {"progress": {"phase": "x", "done": 3}, "detail": "\0 hung"}
    assert running_attempts(db) == []
    with pytest.raises(StoreConflict, match="has already ended as 'failed'"):
        end_attempt(db, attempt.seq, AttemptState.FINISHED, at=later(4), evidence={})


def test_an_attempt_belongs_to_its_input_and_counts_within_its_cycle(db: Session) -> None:
    for key in (
        KEY,
        KEY,
        InputKey("train", "", "ab"),
        InputKey("gate", "dates", "ab"),
        InputKey("train", "dates", "c"),
    ):
        begin_attempt(db, "c1", key, holder="h", at=T0)
    assert [attempt.number for attempt in list_attempts(db, KEY)] == [1, 2]
    with pytest.raises(NotFound, match="attempt"):
        record_heartbeat(db, 99, at=T0)


def test_an_input_is_quarantined_until_it_is_released(db: Session) -> None:
    item = QuarantinedInput("p1", "c1", KEY, "three \0 failures", {"until_seq": 3}, T0)
    quarantine(db, item)
    entry = find_quarantined(db, KEY)
    assert entry is not None
    assert (entry.id, entry.evidence, entry.released_at) == ("p1", {"until_seq": 3}, None)
    assert find_quarantined(db, InputKey("train", "other", "ab")) is None
    with pytest.raises(StoreConflict, match="quarantined already, as 'p1'"):
        quarantine(db, QuarantinedInput("p2", "c1", KEY, "again", {}, T0))
    assert release_quarantined(db, "p1", actor="Ada", at=later(5)).released_by == "Ada"
    assert release_quarantined(db, "p1", actor="Eve", at=later(6)).released_by == "Ada"
    assert find_quarantined(db, KEY) is None
    assert list_quarantined(db) == []
    assert [p.id for p in list_quarantined(db, key=KEY, released=True)] == ["p1"]
    with pytest.raises(NotFound, match="'p9'"):
        release_quarantined(db, "p9", actor="Ada", at=T0)
    quarantine(db, QuarantinedInput("p2", "c1", KEY, "again", {}, T0))
    assert [p.id for p in list_quarantined(db, released=True)] == ["p2", "p1"]


def test_a_later_success_of_a_stage_releases_its_inputs_in_cycles_of_the_same_settings(db: Session) -> None:
    """Commands make a new cycle after a failed one, which repeats its stages."""
    save_cycle(db, replace(CYCLE, id="same"))
    save_cycle(db, replace(CYCLE, id="other", config={"changed": True}))
    for name, cycle_id, stage, capability in (
        ("p1", "c1", "collect", ""),
        ("p2", "other", "collect", ""),
        ("p3", "c1", "train", "dates"),
    ):
        quarantine(db, QuarantinedInput(name, cycle_id, InputKey(stage, capability, name), "failed", {}, T0))
    release_succeeded(db, "same", "collect", "", at=later(1))
    assert [entry.id for entry in list_quarantined(db)] == ["p3", "p2"]
    release_succeeded(db, "same", "train", "sums", at=later(1))
    assert [entry.id for entry in list_quarantined(db)] == ["p3", "p2"]
    release_succeeded(db, "c1", "train", "dates", at=later(1))
    assert [entry.id for entry in list_quarantined(db)] == ["p2"]
    assert list_quarantined(db, released=True)[-1].released_by == "the success of the stage"


def test_an_attempt_of_no_cycle_is_refused(engine: Engine) -> None:
    with pytest.raises(BrokenReference), write_session(engine) as session:
        begin_attempt(session, "nowhere", KEY, holder="h", at=T0)
