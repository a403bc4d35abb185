"""Leases: exclusive use of a device by one holder, until it is released or expires.

Invariants: a device has at most one lease. Every update locks its row (SQLite: ``BEGIN IMMEDIATE`` of the writing
session; PostgreSQL: ``SELECT ... FOR UPDATE``), so exactly one of two concurrent requests gets the lease. A holder id
identifies one use of one device: a repeated ``acquire`` by the same holder renews its lease.

Clock steps: heartbeat and expiry are written together, so their difference is always the time to live. A forward step
of the clock by more than the time to live expires every lease, also those of live holders. The store cannot detect
this, so ``traced.jobs.leases`` also observes heartbeats on a monotonic clock. Not covered: queues; the first request
after a release gets the device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import text
from sqlmodel import Session, col, select

from store.content import insert_new
from store.errors import LeaseLost
from store.service_tables import LeaseRow

HolderCheck = Callable[[str], bool | None]


@dataclass(frozen=True)
class Lease:
    """Exclusive use of one device; ``wanted_by`` names who requested the return of the device, "" if nobody did."""

    device: str
    holder: str
    purpose: str
    cycle_id: str | None
    acquired_at: datetime
    heartbeat_at: datetime
    expires_at: datetime
    wanted_by: str = ""
    wanted_at: datetime | None = None

    @property
    def ttl(self) -> timedelta:
        """The time to live: how long after the last heartbeat the lease expires."""
        return self.expires_at - self.heartbeat_at

    def live(self, at: datetime) -> bool:
        """Return whether the lease has not expired at the time ``at``."""
        return at < self.expires_at


def lock_all(session: Session) -> None:
    """Let nobody else change a lease before the end of this transaction, which acquires several devices.

    Otherwise two requests that lock the same rows in different orders would end each other as a deadlock.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("LOCK TABLE leases IN EXCLUSIVE MODE"))


def acquire(
    session: Session, device: str, holder: str, purpose: str, cycle_id: str | None, *, at: datetime, ttl: timedelta
) -> Lease | None:
    """Lease a device to ``holder``, taking over an expired lease.

    Returns:
        The lease, or None while another holder's lease is live. None may also mean that the device was released during
        the call; a repeated call then gets it.

    Raises:
        ValueError: an empty device or holder, or a time to live that is not positive.
    """
    if not device or not holder or ttl <= timedelta(0):
        raise ValueError(f"a lease needs a device, a holder and a positive time to live: {device!r}, {holder!r}, {ttl}")
    request = Lease(device, holder, purpose, cycle_id, at, at, at + ttl)
    insert_new(session, LeaseRow, [vars(request)])
    row = _locked(session, device)
    if row is None:
        return None
    if row.holder == holder:
        _set(session, row, heartbeat_at=at, expires_at=at + ttl)
    elif _lease(row).live(at):
        _restart_ttl_after_clock_step(session, row, at)
        return None
    else:
        _set(session, row, **vars(request))
    return _lease(row)


def heartbeat(session: Session, device: str, holder: str, at: datetime) -> Lease:
    """Renew the lease of ``holder`` so that its time to live restarts at ``at``, even if the lease has expired.

    Raises:
        LeaseLost: another holder has taken the device, or the lease was deleted.
    """
    row = _locked(session, device)
    if row is None or row.holder != holder:
        raise LeaseLost(device, holder, row.holder if row else None)
    _set(session, row, heartbeat_at=at, expires_at=at + _lease(row).ttl)
    return _lease(row)


def release(session: Session, device: str, holder: str) -> bool:
    """Release the device; return False if ``holder`` no longer had it."""
    row = _locked(session, device)
    if row is None or row.holder != holder:
        return False
    session.delete(row)
    session.flush()
    return True


def request_return(session: Session, device: str, requester: str, at: datetime) -> Lease | None:
    """Request the return of a device and return its lease, None if it is free.

    The holder sees the request at its next heartbeat. The first requester is kept.

    Raises:
        ValueError: ``requester`` is empty.
    """
    if not requester:
        raise ValueError("the requester of a device needs a name")
    row = _locked(session, device)
    if row is None:
        return None
    if not row.wanted_by:
        _set(session, row, wanted_by=requester, wanted_at=at)
    return _lease(row)


def get_lease(session: Session, device: str) -> Lease | None:
    """Return the lease of a device, live or expired; None if it is free."""
    row = session.get(LeaseRow, device, populate_existing=True)
    return None if row is None else _lease(row)


def list_leases(session: Session) -> list[Lease]:
    """Return all leases, live and expired, ordered by device."""
    return [_lease(row) for row in session.exec(select(LeaseRow).order_by(col(LeaseRow.device)))]


def delete_dead_leases(session: Session, is_alive: HolderCheck, *, at: datetime) -> list[str]:
    """Delete the leases of dead holders, and return "DEVICE of HOLDER" for each.

    ``is_alive`` returns None for a holder on another machine; such a lease is deleted if it has expired at ``at``.
    """
    deleted = []
    for row in session.exec(select(LeaseRow).order_by(col(LeaseRow.device))):
        holder_alive = is_alive(row.holder)
        if holder_alive is False or (holder_alive is None and row.expires_at <= at):
            session.delete(row)
            deleted.append(f"{row.device} of {row.holder}")
    session.flush()
    return deleted


def _locked(session: Session, device: str) -> LeaseRow | None:
    return session.get(LeaseRow, device, populate_existing=True, with_for_update=True)


def _restart_ttl_after_clock_step(session: Session, row: LeaseRow, at: datetime) -> None:
    # A heartbeat in the future means that the clock was set back. If its time to live did not restart, the lease of a
    # dead holder would last as much longer as the clock was set back. A live holder's next heartbeat renews its lease.
    if row.heartbeat_at > at:
        _set(session, row, heartbeat_at=at, expires_at=at + _lease(row).ttl)


def _set(session: Session, row: LeaseRow, **values: str | datetime | None) -> None:
    for name, value in values.items():
        setattr(row, name, value)
    session.add(row)
    session.flush()


def _lease(row: LeaseRow) -> Lease:
    return Lease(**row.model_dump())
