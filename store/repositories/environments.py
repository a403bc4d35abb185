"""Synthetic environments, their origins and their admissions.

Invariants: an environment is identified by the SHA-256 of its source. Several cycles and capabilities may produce the
same source; the environment has one origin for each. Admissions are only added, and the newest one counts.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime

from sqlalchemy import func
from sqlmodel import Session, col, select

from store.content import digest, insert_new
from store.errors import NotFound, StoreConflict
from store.records import AdmissionRecord, EnvironmentRecord, EnvironmentSummary
from store.tables import AdapterRow, AdmissionRow, CheckRow, EnvironmentOriginRow, EnvironmentRow
from store.types import AdmissionReport, Check

SOURCES_BATCH = 100


def save_environment(session: Session, environment: EnvironmentRecord) -> None:
    """Store an environment and its origin; the first origin within a cycle and capability is kept.

    Raises:
        StoreConflict: ``environment.hash`` is not the SHA-256 of the source.
    """
    expected = hashlib.sha256(environment.source_code.encode()).hexdigest()
    if environment.hash != expected:
        raise StoreConflict(f"environment {environment.hash!r} has a source of hash {expected!r}; hash it again")
    origin = asdict(environment)
    environment_hash, source_code = origin.pop("hash"), origin.pop("source_code")
    insert_new(session, EnvironmentRow, [{"hash": environment_hash, "source_code": source_code}])
    insert_new(session, EnvironmentOriginRow, [{"environment_hash": environment_hash, **origin}])


def save_source(session: Session, source_code: str) -> str:
    """Store the source of a world, which no capability produced, and return its SHA-256."""
    source_hash = hashlib.sha256(source_code.encode()).hexdigest()
    insert_new(session, EnvironmentRow, [{"hash": source_hash, "source_code": source_code}])
    return source_hash


def get_source(session: Session, source_hash: str) -> str:
    """Return the source of an environment or a world by hash; raises ``NotFound``."""
    row = session.get(EnvironmentRow, source_hash)
    if row is None:
        raise NotFound("environment", source_hash)
    return row.source_code


def get_environment(session: Session, environment_hash: str, *, cycle_id: str | None = None) -> EnvironmentRecord:
    """Return an environment by hash, with its first origin (in ``cycle_id``, if given); raises ``NotFound``."""
    records = _environments(session, environment_hash=environment_hash, cycle_id=cycle_id)
    if not records:
        raise NotFound("environment", environment_hash)
    return records[0]


def list_environments(session: Session, cycle_id: str) -> list[EnvironmentRecord]:
    """Return the environments of a cycle, once for each capability that produced them, oldest first."""
    return _environments(session, cycle_id=cycle_id)


def environment_sources(session: Session) -> Iterator[tuple[str, str]]:
    """Yield the hash and the source of every environment, by hash."""
    query = select(EnvironmentRow.hash, EnvironmentRow.source_code).order_by(col(EnvironmentRow.hash))
    yield from session.exec(query.execution_options(yield_per=SOURCES_BATCH))


def list_origins(session: Session, environment_hash: str) -> list[EnvironmentRecord]:
    """Return the environment once for each cycle and capability that produced it, oldest first."""
    return _environments(session, environment_hash=environment_hash)


def find_hashes(session: Session, beginning: str, *, limit: int) -> list[str]:
    """Return at most ``limit`` hashes of environments that start with ``beginning``, in ascending order."""
    hashed = col(EnvironmentRow.hash)
    query = select(hashed).where(hashed.startswith(beginning, autoescape=True)).order_by(hashed).limit(limit)
    return list(session.exec(query))


def newest_environments(session: Session, *, limit: int, after_hash: str | None = None) -> list[EnvironmentSummary]:
    """Return a page of environments without their sources, newest origin first.

    Args:
        limit: maximum number of environments.
        after_hash: the last hash of the previous page; raises ``NotFound`` if it is unknown.
    """
    hashed, at = col(EnvironmentOriginRow.environment_hash), func.max(EnvironmentOriginRow.at)
    query = select(hashed, at).group_by(hashed).order_by(at.desc(), hashed.desc()).limit(limit)
    if after_hash is not None:
        position = session.exec(select(at).where(hashed == after_hash)).one()
        if position is None:
            raise NotFound("environment", after_hash)
        query = query.having((at < position) | ((at == position) & (hashed < after_hash)))
    return _summaries(session, [name for name, _ in session.exec(query)])


def list_adapters_trained_on(session: Session, hashes: Sequence[str]) -> dict[str, list[str]]:
    """Return the adapter versions trained on each environment, oldest first."""
    query = select(AdapterRow.environment_hash, AdapterRow.name).where(col(AdapterRow.environment_hash).in_(hashes))
    adapters: dict[str, list[str]] = {name: [] for name in hashes}
    for environment, adapter in session.exec(query.order_by(col(AdapterRow.created_at), col(AdapterRow.name))):
        adapters[environment].append(adapter)
    return adapters


def save_admission(session: Session, report: AdmissionReport, *, cycle_id: str, at: datetime) -> str:
    """Store an admission and its checks, and return its id."""
    key = digest([asdict(report), cycle_id, at])
    row = {"environment_hash": report.environment_hash, "cycle_id": cycle_id, "admitted": report.admitted, "at": at}
    insert_new(session, AdmissionRow, [{"id": key, **row}])
    checks = [{"admission_id": key, "position": n, **asdict(check)} for n, check in enumerate(report.checks)]
    insert_new(session, CheckRow, checks)
    return key


def list_admissions(session: Session, environment_hash: str, *, cycle_id: str | None = None) -> list[AdmissionRecord]:
    """Return the admissions of an environment (in ``cycle_id``, if given), oldest first."""
    query = select(AdmissionRow).where(AdmissionRow.environment_hash == environment_hash)
    if cycle_id is not None:
        query = query.where(AdmissionRow.cycle_id == cycle_id)
    return [_admission(session, row) for row in session.exec(query.order_by(col(AdmissionRow.seq)))]


def _summaries(session: Session, hashes: list[str]) -> list[EnvironmentSummary]:
    """Return the summaries of environments in the order of ``hashes``."""
    # The rows are ordered by age, oldest first, so each dict keeps the newest row of its key.
    origin, admission = EnvironmentOriginRow, AdmissionRow
    by_age = select(origin).where(col(origin.environment_hash).in_(hashes)).order_by(col(origin.at))
    newest_origins = {row.environment_hash: row for row in session.exec(by_age)}
    by_writing = select(admission).where(col(admission.environment_hash).in_(hashes)).order_by(col(admission.seq))
    newest_admissions = {row.environment_hash: row for row in session.exec(by_writing)}
    environment_of = {row.id: row.environment_hash for row in newest_admissions.values()}
    check = CheckRow
    failing = select(check.admission_id, check.name).where(
        col(check.admission_id).in_(list(environment_of)), ~col(check.passed)
    )
    failed: dict[str, list[str]] = {name: [] for name in hashes}
    for admission_id, name in session.exec(failing.order_by(col(check.position))):
        failed[environment_of[admission_id]].append(name)
    adapters = list_adapters_trained_on(session, hashes)
    return [
        EnvironmentSummary(
            name,
            newest_origins[name].capability,
            newest_origins[name].cycle_id,
            newest_origins[name].synthesizer,
            newest_origins[name].at,
            newest_admissions[name].admitted if name in newest_admissions else None,
            failed[name],
            adapters[name],
        )
        for name in hashes
    ]


def _environments(
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
        EnvironmentRecord(
            environment_row.hash, environment_row.source_code, **origin_row.model_dump(exclude={"environment_hash"})
        )
        for origin_row, environment_row in session.exec(query)
    ]


def _admission(session: Session, row: AdmissionRow) -> AdmissionRecord:
    query = select(CheckRow).where(CheckRow.admission_id == row.id).order_by(col(CheckRow.position))
    checks = [Check(check.name, check.passed, check.evidence, check.seconds) for check in session.exec(query)]
    report = AdmissionReport(row.environment_hash, row.admitted, checks)
    return AdmissionRecord(row.id, row.cycle_id, row.at, report)
