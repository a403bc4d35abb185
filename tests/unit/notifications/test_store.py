"""What hooks are to be told, in the store."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlmodel import Session

from store.database import open_store, write_session
from store.errors import NotFound
from store.repositories.events import (
    add_notice,
    begin_delivery,
    due_notices,
    end_delivery,
    next_delivery_at,
    undelivered_notices,
)
from traced.notifications.messages import announce, approval_needed, daemon_blocked, input_quarantined

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
HOOKS = ["ops", "mail"]


@pytest.fixture
def db() -> Iterator[Session]:
    engine = open_store("sqlite://")
    with write_session(engine) as session:
        yield session
    engine.dispose()


def due_keys(db: Session, at: datetime = NOON, hooks: list[str] = HOOKS) -> list[tuple[str, str]]:
    return [(notice.key, notice.hook) for notice in due_notices(db, hooks, at=at, longest_wait=HOUR)]


def test_each_hook_gets_a_key_once_and_new_hooks_only_later_notices(db: Session) -> None:
    add_notice(db, "k1", ["ops"], {"n": 1}, at=NOON)
    add_notice(db, "k1", HOOKS, {"n": 2}, at=NOON + HOUR)
    add_notice(db, "k2", [], {}, at=NOON)
    assert due_keys(db, NOON + HOUR) == [("k1", "ops"), ("k1", "mail")]
    assert [notice.body for notice in due_notices(db, HOOKS, at=NOON + HOUR, longest_wait=HOUR)] == [{"n": 1}, {"n": 2}]
    assert due_keys(db, NOON + HOUR, ["mail"]) == [("k1", "mail")]
    assert due_keys(db, NOON - timedelta(seconds=1), ["ops"]) == []


def test_tries_are_counted_before_delivery_and_the_result_is_stored(db: Session) -> None:
    add_notice(db, "k1", HOOKS, {}, at=NOON)
    first, second = due_notices(db, HOOKS, at=NOON, longest_wait=HOUR)
    begin_delivery(db, first.seq, next_at=NOON + HOUR / 2)
    assert due_keys(db) == [("k1", "mail")]
    assert next_delivery_at(db, HOOKS) == NOON
    end_delivery(db, first.seq, delivered_at=None, error="refused")
    begin_delivery(db, second.seq, next_at=NOON + HOUR)
    end_delivery(db, second.seq, delivered_at=NOON)
    (left,) = undelivered_notices(db)
    assert (left.hook, left.tries, left.last_error, left.next_at) == ("ops", 1, "refused", NOON + HOUR / 2)
    assert due_keys(db, NOON + HOUR) == [("k1", "ops")]
    begin_delivery(db, first.seq, next_at=None)
    end_delivery(db, first.seq, delivered_at=None, error="refused again")
    assert due_keys(db, NOON + 100 * HOUR) == []
    assert next_delivery_at(db, HOOKS) is None
    assert [(notice.tries, notice.last_error) for notice in undelivered_notices(db)] == [(2, "refused again")]
    with pytest.raises(NotFound):
        begin_delivery(db, 99, next_at=None)


def test_a_clock_that_was_set_back_does_not_keep_a_notice_waiting(db: Session) -> None:
    add_notice(db, "k1", ["ops"], {}, at=NOON)
    begin_delivery(db, 1, next_at=NOON + HOUR)
    assert due_keys(db, NOON) == []
    assert due_keys(db, NOON - timedelta(days=30)) == [("k1", "ops")]


def test_messages_name_the_subject_and_the_next_command(db: Session) -> None:
    message = approval_needed("precision@v2", "gate-1")
    announce(db, message, HOOKS, at=NOON)
    announce(db, message, HOOKS, at=NOON + HOUR)
    announce(db, input_quarantined("p1", "train", "", "killed"), HOOKS, at=NOON)
    first, _, third, _ = due_notices(db, HOOKS, at=NOON + HOUR, longest_wait=HOUR)
    assert first.body["command"] == "traced explain precision@v2"
    assert (first.body["at"], first.body["key"]) == ("2026-01-02T12:00:00+00:00", message.key)
    assert "train of the cycle" in third.body["text"]
    assert approval_needed("precision@v2", "gate-2").key != message.key
    assert daemon_blocked("Docker", "down", "x", NOON).key != daemon_blocked("Docker", "down", "x", NOON + HOUR).key
