"""Synthetic environments, where they came from, and their admissions.

Invariants: an environment is its source, named by the SHA-256 of its bytes, which is checked on saving; the same source
may come out of several cycles and has one origin for each; admissions are only added, the newest one counts.
Fails: ``StoreConflict`` when hash and source disagree, ``NotFound``, ``BrokenReference`` for unknown capabilities.
"""

import hashlib
from dataclasses import asdict
from datetime import datetime

from sqlmodel import Session, col, select

from store.content import digest, insert_new
from store.errors import NotFound, StoreConflict
from store.records import AdmissionRecord, EnvironmentRecord
from store.tables import AdmissionRow, CheckRow, EnvironmentOriginRow, EnvironmentRow
from store.types import AdmissionReport, Check


def save_environment(session: Session, environment: EnvironmentRecord) -> None:
    """Store an environment and its origin; the first origin within a cycle and capability stays."""
    expected = hashlib.sha256(environment.source_code.encode()).hexdigest()
    if environment.hash != expected:
        raise StoreConflict(f"environment {environment.hash!r} has a source of hash {expected!r}; hash it again")
    origin = asdict(environment)
    hashed, source_code = origin.pop("hash"), origin.pop("source_code")
    insert_new(session, EnvironmentRow, [{"hash": hashed, "source_code": source_code}])
    insert_new(session, EnvironmentOriginRow, [{"environment_hash": hashed, **origin}])


def get_environment(session: Session, environment_hash: str, *, cycle_id: str | None = None) -> EnvironmentRecord:
    """The environment of this hash, with its first origin (in ``cycle_id`` where given); raises ``NotFound``."""
    found = _list(session, environment_hash=environment_hash, cycle_id=cycle_id)
    if not found:
        raise NotFound("environment", environment_hash)
    return found[0]


def list_environments(session: Session, cycle_id: str) -> list[EnvironmentRecord]:
    """The environments that a cycle made, oldest first."""
    return _list(session, cycle_id=cycle_id)


def save_admission(session: Session, report: AdmissionReport, *, cycle_id: str, at: datetime) -> str:
    """Store an admission and its checks; returns its id."""
    key = digest([asdict(report), cycle_id, at])
    row = {"environment_hash": report.environment_hash, "cycle_id": cycle_id, "admitted": report.admitted, "at": at}
    insert_new(session, AdmissionRow, [{"id": key, **row}])
    checks = [{"admission_id": key, "position": n, **asdict(check)} for n, check in enumerate(report.checks)]
    insert_new(session, CheckRow, checks)
    return key


def list_admissions(session: Session, environment_hash: str, *, cycle_id: str | None = None) -> list[AdmissionRecord]:
    """The admissions of one environment (within ``cycle_id`` where given), oldest first."""
    query = select(AdmissionRow).where(AdmissionRow.environment_hash == environment_hash)
    if cycle_id is not None:
        query = query.where(AdmissionRow.cycle_id == cycle_id)
    return [_admission(session, row) for row in session.exec(query.order_by(col(AdmissionRow.seq)))]


def _list(
    session: Session, *, environment_hash: str | None = None, cycle_id: str | None = None
) -> list[EnvironmentRecord]:
    origin = EnvironmentOriginRow
    query = select(origin, EnvironmentRow).join(EnvironmentRow)
    query = query.order_by(col(origin.at), col(origin.cycle_id), col(origin.capability), col(origin.environment_hash))
    if environment_hash is not None:
        query = query.where(origin.environment_hash == environment_hash)
    if cycle_id is not None:
        query = query.where(origin.cycle_id == cycle_id)
    return [
        EnvironmentRecord(row.hash, row.source_code, **made.model_dump(exclude={"environment_hash"}))
        for made, row in session.exec(query)
    ]


def _admission(session: Session, row: AdmissionRow) -> AdmissionRecord:
    query = select(CheckRow).where(CheckRow.admission_id == row.id).order_by(col(CheckRow.position))
    checks = [Check(check.name, check.passed, check.evidence, check.seconds) for check in session.exec(query)]
    report = AdmissionReport(row.environment_hash, row.admitted, checks)
    return AdmissionRecord(row.id, row.cycle_id, row.at, report)
