"""Synthetic environments, where they came from, and their admissions.

Invariants: an environment is its source, named by the SHA-256 of its bytes, which is checked on saving; the same source
may come out of several cycles and has one origin for each; admissions are only added, the newest one counts.
Fails: ``StoreConflict`` when hash and source disagree, ``NotFound``, ``BrokenReference`` for unknown capabilities.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

from sqlalchemy import func
from sqlmodel import Session, col, select

from store.content import digest, insert_new
from store.errors import NotFound, StoreConflict
from store.records import AdmissionRecord, EnvironmentRecord, EnvironmentStanding
from store.tables import AdapterRow, AdmissionRow, CheckRow, EnvironmentOriginRow, EnvironmentRow
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


def list_origins(session: Session, environment_hash: str) -> list[EnvironmentRecord]:
    """The environment once for each cycle and capability that made it, oldest first."""
    return _list(session, environment_hash=environment_hash)


def find_hashes(session: Session, beginning: str, *, limit: int) -> list[str]:
    """The hashes of stored environments that begin so, in order, at most ``limit``."""
    hashed = col(EnvironmentRow.hash)
    query = select(hashed).where(hashed.startswith(beginning, autoescape=True)).order_by(hashed).limit(limit)
    return list(session.exec(query))


def newest_environments(session: Session, *, limit: int, after: str | None = None) -> list[EnvironmentStanding]:
    """Environments of all cycles, newest first, those behind ``after`` (a hash); raises ``NotFound`` for it.

    Reads no source. An environment is as new as its newest origin.
    """
    hashed, at = col(EnvironmentOriginRow.environment_hash), func.max(EnvironmentOriginRow.at)
    newest = select(hashed, at).group_by(hashed).order_by(at.desc(), hashed.desc()).limit(limit)
    if after is not None:
        made = session.exec(select(at).where(hashed == after)).one()
        if made is None:
            raise NotFound("environment", after)
        newest = newest.having((at < made) | ((at == made) & (hashed < after)))
    return _standing(session, [name for name, _ in session.exec(newest)])


def list_trained_on(session: Session, hashes: Sequence[str]) -> dict[str, list[str]]:
    """The adapter versions that were trained on each of these, oldest first."""
    query = select(AdapterRow.environment_hash, AdapterRow.name).where(col(AdapterRow.environment_hash).in_(hashes))
    found: dict[str, list[str]] = {name: [] for name in hashes}
    for environment, adapter in session.exec(query.order_by(col(AdapterRow.created_at), col(AdapterRow.name))):
        found[environment].append(adapter)
    return found


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


def _standing(session: Session, hashes: list[str]) -> list[EnvironmentStanding]:
    """These, in this order."""
    origin, admission = EnvironmentOriginRow, AdmissionRow
    by_age = select(origin).where(col(origin.environment_hash).in_(hashes)).order_by(col(origin.at))
    made = {row.environment_hash: row for row in session.exec(by_age)}
    by_writing = select(admission).where(col(admission.environment_hash).in_(hashes)).order_by(col(admission.seq))
    judged = {row.environment_hash: row for row in session.exec(by_writing)}
    of = {row.id: row.environment_hash for row in judged.values()}
    check = CheckRow
    failing = select(check.admission_id, check.name).where(col(check.admission_id).in_(list(of)), ~col(check.passed))
    failed: dict[str, list[str]] = {name: [] for name in hashes}
    for admitted, name in session.exec(failing.order_by(col(check.position))):
        failed[of[admitted]].append(name)
    trained = list_trained_on(session, hashes)
    return [
        EnvironmentStanding(
            name,
            made[name].capability,
            made[name].cycle_id,
            made[name].synthesizer,
            made[name].at,
            judged[name].admitted if name in judged else None,
            failed[name],
            trained[name],
        )
        for name in hashes
    ]


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
