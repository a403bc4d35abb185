"""The log of the service has every entry of the audit log, whoever wrote it and whenever."""

from pathlib import Path

import pytest
from sqlalchemy import Engine, delete

from store.audit_chain import AuditHead
from store.database import read_session, write_session
from store.errors import StoreError
from store.records import AuditEntry
from store.repositories.events import audit_head, save_audit
from store.service_tables import AuditRow
from tests.unit.store.chain import T0
from traced.api.control import Control
from traced.daemon import audit_log
from traced.daemon.audit_log import FILE, log_audit


class EndOfTest(Exception):
    """Ends the endless loop of ``log_audit`` in a test."""


def add(control: Control, action: str, reason: str = "", **detail: str) -> AuditHead:
    with write_session(control.store) as session:
        save_audit(session, AuditEntry(T0, "root", "local", action, "x@v1", reason, dict(detail)))
        return audit_head(session)


async def lines_of_run(
    control: Control, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *during: str
) -> list[str]:
    """Return what one run of ``log_audit`` logs; ``during`` are the actions of entries written between its polls."""
    actions = iter(during)

    async def sleep(seconds: float) -> None:
        try:
            add(control, next(actions))
        except StopIteration:
            raise EndOfTest from None

    caplog.clear()
    monkeypatch.setattr("asyncio.sleep", sleep)
    with caplog.at_level("INFO"), pytest.raises(EndOfTest):
        await log_audit(control.store, place)
    return [record.getMessage() for record in caplog.records if record.name == audit_log.__name__]


async def test_each_entry_is_logged_once_also_those_of_a_time_without_service(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before_first_start = add(control, "approve")
    monkeypatch.setattr(audit_log, "BATCH", 1)
    first_run = await lines_of_run(control, tmp_path, monkeypatch, caplog, "add key", "rollback")
    assert first_run == [
        f"audit log: traced audit --check {before_first_start}",
        "audit: root (local) add key x@v1",
        "audit: root (local) rollback x@v1",
    ]
    assert await lines_of_run(control, tmp_path, monkeypatch, caplog) == [
        f"audit log: traced audit --check {audit_log._read(tmp_path / FILE)}"
    ]
    add(control, "add token", "new\ncolleague", on_behalf_of="ann")
    head = add(control, "reject")
    last_run = await lines_of_run(control, tmp_path, monkeypatch, caplog)
    assert last_run == [
        f"audit log: traced audit --check {head}",
        "audit: root, on behalf of ann (local) add token x@v1, because new⏎colleague",
        "audit: root (local) reject x@v1",
    ]
    heads = [record.audit_head for record in caplog.records if record.name == audit_log.__name__]  # type: ignore[attr-defined]
    assert heads[-1] == str(head)


async def test_a_log_that_was_replaced_is_a_warning_and_begins_anew(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add(control, "approve")
    await lines_of_run(control, tmp_path, monkeypatch, caplog, "rollback")
    with write_session(control.store) as session:  # as a restore of an older backup does
        session.execute(delete(AuditRow).where(AuditRow.action == "rollback"))  # type: ignore[arg-type]
    lines = await lines_of_run(control, tmp_path, monkeypatch, caplog, "reject")
    assert "which was logged before: it was replaced" in lines[1]
    assert lines[2:] == ["audit: root (local) reject x@v1"]
    with read_session(control.store) as session:
        assert (tmp_path / FILE).read_text().strip() == str(audit_head(session))


async def test_an_outage_of_the_store_is_one_warning(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = iter([StoreError("away"), StoreError("away"), None, StoreError("away again")])
    log_new_entries = audit_log.log_new_entries

    def answer(store: Engine, data_dir: Path, head: AuditHead) -> AuditHead:
        if (error := next(answers, None)) is not None:
            raise error
        return log_new_entries(store, data_dir, head)

    monkeypatch.setattr(audit_log, "log_new_entries", answer)
    lines = await lines_of_run(control, tmp_path, monkeypatch, caplog, "approve", "reject", "rollback", "add key")
    assert [line for line in lines if "not logged yet" in line] == [
        "new entries of the audit log are not logged yet: away",
        "new entries of the audit log are not logged yet: away again",
    ]
    assert [line.split()[2] for line in lines if line.startswith("audit: ")] == ["(local)"] * 4


async def test_a_file_that_cannot_be_read_or_written_stops_nothing(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_text("nonsense")
    lines = await lines_of_run(control, tmp_path, monkeypatch, caplog, "reject")
    assert "cannot be read, so entries since the last stop are not logged" in lines[0]
    assert lines[-1] == "audit: root (local) reject x@v1"
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    lines = await lines_of_run(control, tmp_path, monkeypatch, caplog, "rollback", "approve")
    assert sum("cannot be written" in line for line in lines) == 3
    assert [line for line in lines if line.startswith("audit: ")] == [
        "audit: root (local) rollback x@v1",
        "audit: root (local) approve x@v1",
    ]
