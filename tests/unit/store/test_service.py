"""Events, audit and targets."""

from datetime import timedelta

from sqlalchemy import Engine, delete
from sqlmodel import Session

from store.database import write_session
from store.records import AuditEntry, Event, TargetState
from store.repositories.cycles import get_target_state, pause_target, record_cycle_request, record_start, resume_target
from store.repositories.events import event_range, list_audit, list_events, save_audit, save_event
from store.service_tables import EventRow
from tests.unit.store.chain import T0


def event(kind: str, **values: object) -> Event:
    return Event(T0, kind, "desk", **values)  # type: ignore[arg-type]


def test_listing_events_after_a_number(db: Session) -> None:
    numbers = [save_event(db, event(kind, cycle_id=cycle)) for kind, cycle in [("a", "c1"), ("b", "c2"), ("c", "c1")]]
    assert numbers == sorted(set(numbers))
    assert [item.kind for item in list_events(db, after_seq=numbers[0])] == ["b", "c"]
    assert [item.kind for item in list_events(db, cycle_id="c1")] == ["a", "c"]
    assert [item.seq for item in list_events(db, limit=2)] == numbers[:2]
    assert event_range(db) == (numbers[0], numbers[-1])


def test_event_numbers_are_never_reused(engine: Engine) -> None:
    with write_session(engine) as session:
        last = [save_event(session, event("a")) for _ in range(3)][-1]
    with write_session(engine) as session:
        session.execute(delete(EventRow))
    with write_session(engine) as session:
        assert event_range(session) == (0, 0)
        assert save_event(session, event("b")) == last + 1


def test_audit_entries_are_listed_newest_first(db: Session) -> None:
    for number, subject in enumerate(["x@v1", "y@v1", "x@v1"]):
        save_audit(db, AuditEntry(T0 + timedelta(hours=number), "Ada", "operator", "approve", subject, "why"))
    assert [item.at.hour - T0.hour for item in list_audit(db)] == [2, 1, 0]
    assert [item.at.hour - T0.hour for item in list_audit(db, subject="x@v1", limit=1)] == [2]


def test_a_pause_lasts_until_resumed(db: Session) -> None:
    assert get_target_state(db, "desk") == TargetState("desk")
    pause_target(db, "desk", actor="Ada", at=T0)
    repeated = pause_target(db, "desk", actor="Bob", at=T0 + timedelta(days=1))
    assert (repeated.paused_by, repeated.paused_at) == ("Ada", T0)
    assert get_target_state(db, "other").paused_at is None
    record_start(db, "desk", cause="interval", at=T0)
    assert resume_target(db, "desk") == TargetState("desk", None, "", T0, "interval")


def test_a_cycle_request_is_kept_until_a_cycle_starts(db: Session) -> None:
    record_cycle_request(db, "desk", "requested by Ada")
    record_cycle_request(db, "desk", "requested by Bob")
    pause_target(db, "desk", actor="Ada", at=T0)
    assert resume_target(db, "desk").requested == "requested by Ada"
    record_start(db, "desk", cause="requested by Ada", at=T0)
    assert get_target_state(db, "desk") == TargetState("desk", None, "", T0, "requested by Ada")
