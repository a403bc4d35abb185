"""The status equals what the repositories return after any decisions."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlmodel import Session

from store.database import open_store, read_session, sqlite_url, write_session
from store.errors import NotApproved, NotLive, StoreUnavailable, StoreVersionError
from store.records import AuditEntry, CycleState, Decision, RoutingChoice, StageEvent, StageState
from store.repositories import adapters, attempts, cycles, gates, llm_replies, promotions, serving
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
from store.status import (
    MAX_CYCLES,
    BlockedStage,
    QuarantineStatus,
    RunningStage,
    StageCostStatus,
    StoreStatus,
    store_status,
)
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


def repository_view(db: Session) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]], list[str]]:
    live = [promotion.adapter for promotion in promotions.live_adapters(db)]
    rows: list[tuple[object, ...]] = []
    for cycle in cycles.list_cycles(db, limit=MAX_CYCLES):
        events = [event for event in cycles.list_stage_events(db, cycle.id) if event.stage != "session"]
        last = f"{events[-1].stage} {events[-1].state}" if events else ""
        rows.append((cycle.id, cycle.target, cycle.model, str(cycle.state), last, cycle.summary.get("verdict", "")))
    versions: list[tuple[object, ...]] = []
    traffic = serving.count_routed(db)
    for version in adapters.list_adapters(db):
        gate, approval = gates.latest_gate(db, version.name), gates.latest_approval(db, version.name)
        answer, decision = gate.result.answer.value if gate else "none", approval.decision.value if approval else "none"
        versions.append((version.name, answer, decision, version.name in live, traffic.get(version.name, 0)))
    return rows, versions, live


def status_view(status: StoreStatus) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]], list[str]]:
    rows: list[tuple[object, ...]] = [
        (item.id, item.target, item.model, item.state, item.last_stage, item.verdict) for item in status.cycles
    ]
    versions: list[tuple[object, ...]] = [
        (item.name, item.gate, item.decision, item.live, item.conversations) for item in status.adapters
    ]
    return rows, versions, status.live


def test_the_whole_chain(file: Path) -> None:
    store = open_store(sqlite_url(file))
    with write_session(store) as db:
        save_chain(db)
        for number in range(12):
            cycles.save_cycle(db, replace(CYCLE, id=f"d{number}", created_at=later(number // 2)))
        cycles.save_stage_event(db, StageEvent("d11", "train", StageState.FAILED, T0))
        cycles.save_stage_event(db, StageEvent("d11", "train", StageState.STARTED, later(-5)))
        cycles.save_stage_event(db, StageEvent("d11", "session", StageState.FINISHED, later(9)))
        cycles.set_cycle_state(db, "d11", CycleState.FINISHED, at=later(9), summary={"verdict": "It won nothing."})
        save_trajectories(db, [trajectory("t9")])
        serving.save_routing(db, [RoutingChoice("t9", "base", {}, 0.0)])
    with read_session(store) as db:
        expected = repository_view(db)
    store.dispose()
    assert status_view(store_status(sqlite_url(file))) == expected
    assert expected[2] == ["date-reasoning@v1"]
    assert expected[0][0][-2:] == ("train started", "It won nothing.")


Action = Callable[[Session, str, int], object]
ACTIONS: list[Action] = [
    lambda db, name, at: gates.save_gate(
        db, replace(GATE, adapter=name, answer=GateAnswer.PASS), cycle_id="c1", at=later(at)
    ),
    lambda db, name, at: gates.save_gate(
        db, replace(GATE, adapter=name, answer=GateAnswer.FAIL), cycle_id="c1", at=later(at)
    ),
    lambda db, name, at: gates.save_approval(db, approval(name, seconds=at)),
    lambda db, name, at: gates.save_approval(db, approval(name, Decision.REJECTED, at)),
    lambda db, name, at: promotions.promote(db, name, actor="Ada", at=later(at)),
    lambda db, name, at: promotions.roll_back(db, name, actor="Ada", at=later(at)),
]


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(st.tuples(st.integers(0, len(ACTIONS) - 1), st.sampled_from(VERSIONS)), max_size=14))
def test_status_equals_the_repositories_after_any_decisions(file: Path, actions: list[tuple[int, int]]) -> None:
    file.unlink(missing_ok=True)
    store = open_store(sqlite_url(file))
    with write_session(store) as db:
        save_origin(db)
        save_training_run(db, training_run())
        for version in VERSIONS:
            adapters.save_adapter(db, adapter(version))
    for at, (action, version) in enumerate(actions, start=10):
        name = f"date-reasoning@v{version}"
        try:
            with write_session(store) as db:
                ACTIONS[action](db, name, at)
        except (NotApproved, NotLive):
            continue
    with read_session(store) as db:
        expected = repository_view(db)
    store.dispose()
    status = store_status(sqlite_url(file))
    assert status_view(status) == expected
    assert status.waiting == [
        name for name, answer, decision, *_ in expected[1] if (answer, decision) == ("pass", "none")
    ]


def test_blocked_paused_and_requested_are_shown(file: Path) -> None:
    store, key = open_store(sqlite_url(file)), InputKey("collect", "", "ab")
    with write_session(store) as db:
        cycles.save_cycle(db, CYCLE)
        pause_target(db, "desk", actor="ann", at=T0)
        record_cycle_request(db, "desk", "requested by bob")
        record_start_blocker(db, "desk", "no model")
        for detail in ("no Docker engine answers", "no space left"):
            attempt = attempts.begin_attempt(db, "c1", key, holder="h", at=T0)
            attempts.end_attempt(db, attempt.seq, AttemptState.BLOCKED, at=T0, evidence={"detail": detail})
    status = store_status(sqlite_url(file))
    assert status.blocked == [BlockedStage("c1", "collect", "", "no space left")]
    assert status.paused == {"desk": "ann"}
    assert status.requested == {"desk": "requested by bob"}
    assert status.cannot_begin == {"desk": "no model"}
    with write_session(store) as db:
        assert [item.evidence["detail"] for item in attempts.blocked_attempts(db)] == ["no space left"]
        resume_target(db, "desk")
        record_start(db, "desk", cause="requested by bob", at=T0)
        attempts.begin_attempt(db, "c1", key, holder="h", at=T0)
        assert attempts.blocked_attempts(db) == []
    store.dispose()
    status = store_status(sqlite_url(file))
    assert (status.blocked, status.paused, status.requested, status.cannot_begin) == ([], {}, {}, {})


def test_stages_at_work_are_shown_with_their_progress(file: Path) -> None:
    store = open_store(sqlite_url(file))
    with write_session(store) as db:
        cycles.save_cycle(db, CYCLE)
        cycles.save_cycle(db, replace(CYCLE, id="c2", state=CycleState.CANCELLED))
        attempts.begin_attempt(db, "c2", InputKey("collect", "", "ab"), holder="h", at=T0)
        attempts.begin_attempt(db, "c1", InputKey("train", "dates", "ab"), holder="h", at=T0)
        collect = attempts.begin_attempt(db, "c1", InputKey("collect", "", "ab"), holder="h", at=T0)
        progress = {"phase": "collect", "done": 40, "total": 100}
        attempts.record_heartbeat(db, collect.seq, at=later(1), pid=1, progress=progress)
    store.dispose()
    now = later(1) + timedelta(seconds=4)
    day = (later(1) - T0).total_seconds()
    assert store_status(sqlite_url(file), now).running == [
        RunningStage("c1", "train", "dates", "", 0, 0, day + 4, day + 4),
        RunningStage("c1", "collect", "", "collect", 40, 100, day + 4, 4),
    ]


def test_quarantined_inputs_are_shown_until_released(file: Path) -> None:
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


@pytest.mark.slow
def test_other_schemas_and_invalid_stores_are_reported(file: Path) -> None:
    store = open_store(sqlite_url(file))
    for version, hint in (("0001", "traced db upgrade"), ("9999", "upgrade traced")):
        with write_session(store) as db:
            db.execute(text(f"UPDATE alembic_version SET version_num = '{version}'"))
        with pytest.raises(StoreVersionError, match=hint):
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
    with pytest.raises(StoreUnavailable) as refusal:
        store_status("postgresql+psycopg://ada:secret@127.0.0.1:9/traced?connect_timeout=2")
    assert "ada:***@127.0.0.1:9/traced" in str(refusal.value)
    assert "secret" not in str(refusal.value)


def test_costs_are_summed_by_stage_of_the_shown_cycles(file: Path) -> None:
    store = open_store(sqlite_url(file))
    with write_session(store) as db:
        for number in range(MAX_CYCLES + 1):
            cycles.save_cycle(db, replace(CYCLE, id=f"d{number}", created_at=later(number)))
        reply = replace(REPLY, prompt_tokens=900, completion_tokens=12, cost=0.5, seconds=1.5)
        expected = [
            ("d0", "analyze", ""),
            ("d1", "synthesize", "dates"),
            ("d1", "synthesize", "names"),
            ("d2", "analyze", ""),
        ]
        for number, (cycle, stage, capability) in enumerate(expected):
            key, estimated = f"{number:064}", number == 2
            reply_variant = replace(
                reply, key=key, cycle_id=cycle, stage=stage, capability=capability, estimated=estimated
            )
            llm_replies.save_reply(db, reply_variant)
    store.dispose()
    assert store_status(sqlite_url(file)).costs == [
        StageCostStatus("d2", "analyze", 1, 900, 12, 0.5, 1.5, 0),
        StageCostStatus("d1", "synthesize", 2, 1800, 24, 1.0, 3.0, 1),
    ]


def test_the_newest_patch_of_a_capability_is_shown(file: Path) -> None:
    store = open_store(sqlite_url(file))
    with write_session(store) as db:
        save_chain(db)
    assert [(item.id, item.enough) for item in store_status(sqlite_url(file)).patches] == [(PATCH.id, "")]
    with write_session(store) as db:
        older = replace(PATCH, text="older", figures={"enough": "neither"}, at=later(13))
        newer = replace(PATCH, text="newer", figures={"enough": "a prompt is enough"}, at=later(14))
        save_patch(db, newer)
        save_patch(db, older)
    [patch] = store_status(sqlite_url(file)).patches
    assert (patch.decision, patch.who) == ("none", "")
    with write_session(store) as db:
        for number, (actor, action) in enumerate([("ann", "approve-prompt"), ("bob", "reject-prompt")]):
            save_audit(db, AuditEntry(later(15 + number), actor, "local", action, newer.id))
        save_audit(db, AuditEntry(later(17), "eve", "local", "release", newer.id))
    [decided_patch] = store_status(sqlite_url(file)).patches
    assert (decided_patch.decision, decided_patch.who) == ("rejected", "bob")
    store.dispose()
    assert (patch.id, patch.cycle, patch.capability) == (newer.id, "c1", "date-reasoning")
    assert patch.enough == "a prompt is enough"
