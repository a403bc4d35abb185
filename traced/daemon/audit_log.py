"""Copy the audit log of the store into the log of the service, whoever wrote the entries.

Decisions through the API, by commands beside a service that hangs, and while no service runs all have an entry. Each
line has the number and hash of its entry, so a log that is shipped to another machine keeps heads for ``traced audit
--check`` where nobody here can change them.

Invariants: each entry is logged at least once: ``DIR/audit-logged`` has the newest one that was logged.
Entries from before the first start are not logged, nor is a log that was replaced since, as a restore does: that is a
warning, and the new head is the beginning. How it fails: errors of the store are logged, and the entries follow at the
next poll; if the file cannot be written, this is logged, and entries may be logged again after a restart.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Engine

from store.audit_chain import AuditHead, parse_head
from store.database import read_session
from store.errors import StoreError
from store.records import AuditEntry
from store.repositories.events import audit_after, audit_head, is_in_audit
from store.text import sanitize_line, signature
from traced.core.errors import DiskError
from traced.core.files import publish_file

FILE = "audit-logged"
POLL_S = 2.0
BATCH = 1000

log = logging.getLogger(__name__)


async def log_audit(store: Engine, data_dir: Path) -> None:
    """Log the head at the start and then every new entry of the audit log, until cancelled."""
    head: AuditHead | None = None
    outage = ""
    while True:
        try:
            if head is None:
                head = await asyncio.to_thread(_start, store, data_dir)
            head = await asyncio.to_thread(log_new_entries, store, data_dir, head)
            outage = ""
        except StoreError as error:
            # Once, however long the store is away.
            if not outage:
                log.warning("new entries of the audit log are not logged yet: %s", error)
            outage = str(error)
        await asyncio.sleep(POLL_S)


def log_new_entries(store: Engine, data_dir: Path, head: AuditHead) -> AuditHead:
    """Log the entries after ``head`` and return the head; raises ``StoreError``."""
    while entries := _entries_after(store, head):
        for entry in entries:
            head = AuditHead(entry.seq or 0, entry.hash)
            reason = f", because {sanitize_line(entry.reason)}" if entry.reason else ""
            actor = sanitize_line(signature(entry.who, str(entry.detail.get("on_behalf_of", ""))))
            words = f"{sanitize_line(entry.action)} {sanitize_line(entry.subject)}"
            log.info("audit: %s (%s) %s%s", actor, entry.role, words, reason, extra={"audit_head": str(head)})
        _write(data_dir / FILE, head)
    return head


def _entries_after(store: Engine, head: AuditHead) -> Sequence[AuditEntry]:
    with read_session(store) as session:
        return audit_after(session, head.seq, limit=BATCH)


def _start(store: Engine, data_dir: Path) -> AuditHead:
    """Return the newest entry that was logged before, or the current head."""
    logged = _read(data_dir / FILE)
    with read_session(store) as session:
        head = audit_head(session)
        is_continued = logged is not None and is_in_audit(session, logged)
    log.info("audit log: traced audit --check %s", head, extra={"audit_head": str(head)})
    if logged is not None and is_continued:
        return logged
    if logged is not None:
        log.warning("the audit log does not hold the entry %s, which was logged before: it was replaced", logged)
    _write(data_dir / FILE, head)
    return head


def _read(file: Path) -> AuditHead | None:
    try:
        return parse_head(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read, so entries since the last stop are not logged: %s", file, error)
        return None


def _write(file: Path, head: AuditHead) -> None:
    try:
        publish_file(file, f"{head}\n")
    except (DiskError, OSError) as error:
        log.warning("%s cannot be written, so entries may be logged again after a restart: %s", file, error)
