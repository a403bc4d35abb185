"""The hash chain of the audit log: what changes the log afterwards is noticed."""

from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlmodel import Session

from store.database import migrate, open_store, read_session, sqlite_url, write_session
from store.records import AuditEntry
from store.repositories.events import audit_head, check_audit, list_audit, save_audit
from tests.unit.store.chain import T0

# Values that a database stores in another form than they were given in.
ODD = {"nan": float("nan"), "lone": "\ud800", "order": {"b": 1, "a": [1.0, None]}, "text": "ä\u0000"}


def save_entries(session: Session, count: int = 3) -> None:
    for number in range(count):
        at = T0 + timedelta(microseconds=number)
        save_audit(session, AuditEntry(at, "Ada\0", "operator", "approve", f"x@v{number}", "\ud800 why", dict(ODD)))


def test_entries_form_a_chain(db: Session) -> None:
    assert (audit_head(db), check_audit(db)) == ("", None)
    save_entries(db)
    db.expire_all()
    assert check_audit(db) is None
    hashes = [entry.hash for entry in list_audit(db)]
    assert len(set(hashes)) == 3
    assert audit_head(db) == hashes[0]


@pytest.mark.parametrize(
    ("change", "first_wrong"),
    [
        ("UPDATE audit SET who = 'Eve' WHERE seq = 2", 2),
        ("UPDATE audit SET detail = '{}' WHERE seq = 1", 1),
        ("DELETE FROM audit WHERE seq = 2", 3),
        ("UPDATE audit SET at = datetime(at, '+1 second') WHERE seq = 3", 3),
        ("UPDATE audit SET seq = 9 WHERE seq = 1", 2),
    ],
)
def test_a_changed_log_is_noticed(db: Session, change: str, first_wrong: int) -> None:
    save_entries(db)
    db.execute(text(change))
    db.expire_all()
    wrong = check_audit(db)
    assert wrong is not None
    assert wrong.seq == first_wrong


def test_the_upgrade_chains_the_entries_that_exist(tmp_path: Path) -> None:
    engine = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(engine) as session:
        save_entries(session)
        head = audit_head(session)
    migrate(engine, "0012")
    migrate(engine)
    with read_session(engine) as session:
        assert (check_audit(session), audit_head(session)) == (None, head)
    engine.dispose()
