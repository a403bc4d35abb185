"""The quick look says what the repositories say, whatever was decided."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlmodel import Session

from store.database import open_store, read_session, sqlite_url, write_session
from store.errors import StoreUnavailable, StoreVersionError
from store.records import AuditEntry, Decision, RoutingChoice, StageEvent, StageState
from store.repositories import adapters, attempts, cycles, llm_replies, promotions, serving
from store.repositories import promotions as gates
from store.repositories.adapters import save_training_run
from store.repositories.attempts import AttemptState, InputKey
from store.repositories.cycles import (
    pause_target,
    record_cycle_request,
    record_start,
    record_start_blocker,
    resume_target,
)
from store.repositories.events import save_audit
from store.repositories.llm_replies import save_patch
from store.repositories.trajectories import save_trajectories
from store.status import MAX_CYCLES, BlockedStage, QuarantineStatus, StageCostStatus, StoreStatus, store_status
from store.types import GateAnswer
from tests.unit.store.chain import (
    CYCLE,
    GATE,
    PATCH,
    REPLY,
    T0,
    adapter,
    approval,
    later,
    save_chain,
    save_origin,
    training_run,
    trajectory,
)

VERSIONS = range(1, 4)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "traced.db"


def told_by_repositories(db: Session) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]], list[str]]:
    live = [promotion.adapter for promotion in promotions.live_adapters(db)]
    shown = []
    for cycle in cycles.list_cycles(db, limit=MAX_CYCLES):
        events = cycles.list_stage_events(db, cycle.id)
        last = f"{events[-1].stage} {events[-1].state}" if events else ""
        shown.append((cycle.id, cycle.target, cycle.model, str(cycle.state), last))
    versions, traffic = [], serving.count_routed(db)
    for version in adapters.list_adapters(db):
        gate, decided = gates.latest_gate(db, version.name), promotions.latest_approval(db, version.name)
        answer, decision = gate.result.answer.value if gate else "none", decided.decision.value if decided else "none"
        versions.append((version.name, answer, decision, version.name in live, traffic.get(version.name, 0)))
    return shown, versions, live


def told(found: StoreStatus) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]], list[str]]:
    shown = [(one.id, one.target, one.model, one.state, one.last_stage) for one in found.cycles]
    versions = [(one.name, one.gate, one.decision, one.live, one.conversations) for one in found.adapters]
    return shown, versions, found.live


def test_the_whole_chain(file: Path) -> None:
    store = open_store(sqlite_url(file))
    with write_session(store) as db:
        save_chain(db)
        for number in range(12):
            cycles.save_cycle(db, replace(CYCLE, id=f"d{number}", created_at=later(number // 2)))
        cycles.save_stage_event(db, StageEvent("d11", "train", StageState.FAILED, T0))
        cycles.save_stage_event(db, StageEvent("d11", "train", StageState.STARTED, later(-5)))
        save_trajectories(db, [trajectory("t9")])
        serving.save_routing(db, [RoutingChoice("t9", "base", {}, 0.0)])
    with read_session(store) as db:
        expected = told_by_repositories(db)
    store.dispose()
    assert told(store_status(sqlite_url(file))) == expected
    assert expected[2] == ["date-reasoning@v1"]
    assert expected[0][0][-1] == "train started"


Act = Callable[[Session, str, int], object]
ACTS: list[Act] = [
    lambda db, name, at: gates.save_gate(
        db, replace(GATE, adapter=name, answer=GateAnswer.PASS), cycle_id="c1", at=later(at)
    ),
    lambda db, name, at: gates.save_gate(
        db, replace(GATE, adapter=name, answer=GateAnswer.FAIL), cycle_id="c1", at=later(at)
    ),
    lambda db, name, at: promotions.save_approval(db, approval(name, seconds=at)),
    lambda db, name, at: promotions.save_approval(db, approval(name, Decision.REJECTED, at)),
    lambda db, name, at: promotions.promote(db, name, actor="Ada", at=later(at)),
    lambda db, name, at: promotions.roll_back(db, name, actor="Ada", at=later(at)),
]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=st.lists(st.tuples(st.integers(0, len(ACTS) - 1), st.sampled_from(VERSIONS)), max_size=14))
def test_after_any_decisions(file: Path, acts: list[tuple[int, int]]) -> None:
    file.unlink(missing_ok=True)
    store = open_store(sqlite_url(file))
    with write_session(store) as db:
        save_origin(db)
        save_training_run(db, training_run())
        for version in VERSIONS:
            adapters.save_adapter(db, adapter(version))
    for at, (act, version) in enumerate(acts, start=10):
        name = f"date-reasoning@v{version}"
        try:
            with write_session(store) as db:
                ACTS[act](db, name, at)
        except (promotions.NotApproved, promotions.NotLive):
            continue
    with read_session(store) as db:
        expected = told_by_repositories(db)
    store.dispose()
    found = store_status(sqlite_url(file))
    assert told(found) == expected
    assert found.waiting == [
        name for name, answer, decision, *_ in expected[1] if (answer, decision) == ("pass", "none")
    ]


def test_what_is_held_up_paused_or_asked_for_is_shown_while_it_is(file: Path) -> None:
    store, key = open_store(sqlite_url(file)), InputKey("collect", "", "ab")
    with write_session(store) as db:
        cycles.save_cycle(db, CYCLE)
        pause_target(db, "desk", actor="ann", at=T0)
        record_cycle_request(db, "desk", "asked for by bob")
        record_start_blocker(db, "desk", "no model")
        for detail in ("no Docker engine answers", "no space left"):
            begun = attempts.begin_attempt(db, "c1", key, holder="h", at=T0)
            attempts.end_attempt(db, begun.seq, AttemptState.BLOCKED, at=T0, evidence={"detail": detail})
    found = store_status(sqlite_url(file))
    assert found.held_up == [BlockedStage("c1", "collect", "", "no space left")]
    assert found.paused == {"desk": "ann"}
    assert found.asked_for == {"desk": "asked for by bob"}
    assert found.cannot_begin == {"desk": "no model"}
    with write_session(store) as db:
        assert [one.evidence["detail"] for one in attempts.blocked_attempts(db)] == ["no space left"]
        resume_target(db, "desk")
        record_start(db, "desk", cause="asked for by bob", at=T0)
        attempts.begin_attempt(db, "c1", key, holder="h", at=T0)
        assert attempts.blocked_attempts(db) == []
    store.dispose()
    found = store_status(sqlite_url(file))
    assert (found.held_up, found.paused, found.asked_for, found.cannot_begin) == ([], {}, {}, {})


def test_what_is_parked_is_shown_until_it_is_released(file: Path) -> None:
    store, key = open_store(sqlite_url(file)), InputKey("train", "dates", "ab")
    with write_session(store) as db:
        cycles.save_cycle(db, CYCLE)
        for _ in range(3):
            attempts.begin_attempt(db, "c1", key, holder="h", at=T0)
        attempts.begin_attempt(db, "c1", InputKey("train", "dates", "other"), holder="h", at=T0)
        attempts.quarantine(db, attempts.QuarantinedInput("p3", "c1", key, "3 attempts failed", {}, T0))
    assert store_status(sqlite_url(file)).quarantined == [
        QuarantineStatus("p3", "c1", "train", "dates", "3 attempts failed", 3)
    ]
    with write_session(store) as db:
        attempts.release_quarantined(db, "p3", actor="ann", at=T0)
    store.dispose()
    assert store_status(sqlite_url(file)).quarantined == []


def test_another_schema_and_what_is_no_store_are_told(file: Path) -> None:
    store = open_store(sqlite_url(file))
    for version, said in (("0001", "traced db upgrade"), ("9999", "upgrade traced")):
        with write_session(store) as db:
            db.execute(text(f"UPDATE alembic_version SET version_num = '{version}'"))
        with pytest.raises(StoreVersionError, match=said):
            store_status(sqlite_url(file))
    store.dispose()
    file.write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreUnavailable, match=r"traced\.db failed: file is not a database"):
        store_status(sqlite_url(file))
    with closing(sqlite3.connect(file.with_name("empty.db"))) as empty:
        empty.execute("CREATE TABLE other (n INTEGER)")
    with pytest.raises(StoreUnavailable, match="no such table"):
        store_status(sqlite_url(file.with_name("empty.db")))
    with pytest.raises(StoreUnavailable, match="unable to open"):
        store_status(sqlite_url(file.with_name("none.db")))
    assert not file.with_name("none.db").exists()
    with pytest.raises(StoreUnavailable) as refused:
        store_status("postgresql+psycopg://ada:secret@127.0.0.1:9/traced?connect_timeout=2")
    assert "ada:***@127.0.0.1:9/traced" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_what_language_models_took_is_added_up_by_stage_in_the_cycles_that_are_shown(file: Path) -> None:
    store = open_store(sqlite_url(file))
    with write_session(store) as db:
        for number in range(MAX_CYCLES + 1):
            cycles.save_cycle(db, replace(CYCLE, id=f"d{number}", created_at=later(number)))
        made = replace(REPLY, prompt_tokens=900, completion_tokens=12, cost=0.5, seconds=1.5)
        told = [
            ("d0", "analyze", ""),
            ("d1", "synthesize", "dates"),
            ("d1", "synthesize", "names"),
            ("d2", "analyze", ""),
        ]
        for number, (cycle, stage, capability) in enumerate(told):
            key, about = f"{number:064}", number == 2
            one = replace(made, key=key, cycle_id=cycle, stage=stage, capability=capability, estimated=about)
            llm_replies.save_reply(db, one)
    store.dispose()
    assert store_status(sqlite_url(file)).costs == [
        StageCostStatus("d2", "analyze", 1, 900, 12, 0.5, 1.5, 0),
        StageCostStatus("d1", "synthesize", 2, 1800, 24, 1.0, 3.0, 1),
    ]


def test_the_newest_patch_of_a_cycles_capability_is_told(file: Path) -> None:
    store = open_store(sqlite_url(file))
    with write_session(store) as db:
        save_chain(db)
    assert [(one.id, one.enough) for one in store_status(sqlite_url(file)).patches] == [(PATCH.id, "")]
    with write_session(store) as db:
        older = replace(PATCH, text="older", figures={"enough": "neither"}, at=later(13))
        newer = replace(PATCH, text="newer", figures={"enough": "a prompt is enough"}, at=later(14))
        save_patch(db, newer)
        save_patch(db, older)
    [told] = store_status(sqlite_url(file)).patches
    assert (told.decision, told.who) == ("none", "")
    with write_session(store) as db:
        for number, (who, action) in enumerate([("ann", "approve-prompt"), ("bob", "reject-prompt")]):
            save_audit(db, AuditEntry(later(15 + number), who, "local", action, newer.id))
        save_audit(db, AuditEntry(later(17), "eve", "local", "release", newer.id))
    [decided] = store_status(sqlite_url(file)).patches
    assert (decided.decision, decided.who) == ("rejected", "bob")
    store.dispose()
    assert (told.id, told.cycle, told.capability) == (newer.id, "c1", "date-reasoning")
    assert told.enough == "a prompt is enough"
