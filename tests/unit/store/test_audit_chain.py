"""The hash chain of the audit log: what changes the log afterwards is noticed."""

from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlmodel import Session

from store.audit_chain import AuditHead, entry_hash, parse_head
from store.database import migrate, open_store, read_session, sqlite_url, write_session
from store.records import AuditEntry
from store.repositories.events import audit_head, check_audit, is_in_audit, list_audit, save_audit
from tests.unit.store.chain import T0

# Values that a database stores in another form than they were given in.
ODD = {"nan": float("nan"), "lone": "\ud800", "order": {"b": 1, "a": [1.0, None]}, "text": "ä\u0000"}


def save_entries(session: Session, count: int = 3) -> None:
    for number in range(count):
        at = T0 + timedelta(microseconds=number)
        save_audit(session, AuditEntry(at, "Ada\0", "operator", "approve", f"x@v{number}", "\ud800 why", dict(ODD)))


def test_entries_form_a_chain(db: Session) -> None:
    assert (audit_head(db), check_audit(db)) == (AuditHead(), None)
    save_entries(db)
    db.expire_all()
    assert check_audit(db) is None
    hashes = [entry.hash for entry in list_audit(db)]
    assert len(set(hashes)) == 3
    assert audit_head(db) == AuditHead(3, hashes[0])


@pytest.mark.parametrize(
    ("change", "first_wrong"),
    [
        ("UPDATE audit SET who = 'Eve' WHERE seq = 2", 2),
        ("UPDATE audit SET detail = '{}' WHERE seq = 1", 1),
        ("DELETE FROM audit WHERE seq = 2", 3),
        ("UPDATE audit SET at = datetime(at, '+1 second') WHERE seq = 3", 3),
        ("UPDATE audit SET seq = 9 WHERE seq = 1", 2),
        ("UPDATE audit SET hash = upper(hash) WHERE seq = 2", 2),
        ("UPDATE audit SET detail = 'no JSON' WHERE seq = 2", 2),
        ("UPDATE audit SET at = 'no time' WHERE seq = 2", 2),
        ("UPDATE audit SET who = x'00ff' WHERE seq = 2", 2),
        (
            "INSERT INTO audit (at, who, role, action, subject, reason, detail, hash)"
            " SELECT at, who, role, action, subject, reason, detail, hash FROM audit WHERE seq = 3",
            4,
        ),
    ],
)
def test_a_changed_log_is_noticed(db: Session, change: str, first_wrong: int) -> None:
    save_entries(db)
    db.execute(text(change))
    db.expire_all()
    assert check_audit(db) == first_wrong


@pytest.mark.parametrize(
    "change",
    ["DELETE FROM audit WHERE seq >= 2", "DELETE FROM audit", "UPDATE audit SET reason = 'other' WHERE seq = 1"],
)
def test_a_log_that_was_cut_or_rewritten_does_not_contain_a_head_of_before(db: Session, change: str) -> None:
    save_entries(db, 1)
    first = audit_head(db)
    save_entries(db, 2)
    last = audit_head(db)
    assert is_in_audit(db, first)
    assert is_in_audit(db, last)
    db.execute(text(change))
    db.expire_all()
    previous = ""
    for entry in list_audit(db)[::-1]:  # whoever can write the store can also compute the hashes again
        previous = entry_hash(previous, entry)
        db.execute(text(f"UPDATE audit SET hash = '{previous}' WHERE seq = {entry.seq}"))
    db.expire_all()
    assert check_audit(db) is None
    assert not is_in_audit(db, last)
    assert is_in_audit(db, AuditHead())


def test_a_head_is_read_as_it_was_written() -> None:
    for head in (AuditHead(), AuditHead(17, "0af" + 61 * "9")):
        assert parse_head(f"{head}\n") == head
    for wrong in ("", "17", "17:", "17:xyz", "0:" + 64 * "a", f"-1:{64 * 'a'}"):
        with pytest.raises(ValueError, match="is not a head of an audit log"):
            parse_head(wrong)


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
