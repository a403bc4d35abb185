"""Leases: who has which device to itself, and who wants it back.

Invariants: a device has at most one lease. Every function reads the row under a lock (SQLite: ``BEGIN IMMEDIATE`` of
the writing session; PostgreSQL: ``SELECT ... FOR UPDATE``) and writes it in the same transaction, so that of two who
race exactly one wins. A holder names one use of one device: the same holder who asks again (its answer was lost on the
way) gets its lease renewed, so two uses must not share a name.

What the clock may do. A lease is live until ``expires_at``; heartbeat and expiry are always written together, so their
difference is the time to live, whatever the clock does. A clock stepped back would leave a dead holder's lease live for
as long as the step was. So ``acquire``, where it finds a heartbeat in its future, counts the time to live anew from its
own time: a live holder loses nothing, its next heartbeat moves the lease on; a dead one's lapses one time to live after
the first who asks for it once the clock has stopped stepping. A clock stepped forward by more than the time to live
lapses every lease at once, live ones too; the store cannot tell, so whoever waits for a device also watches the
heartbeat on a monotonic clock (``traced.jobs.leases``).

Fails: ``LeaseLost``; ``BrokenReference`` for a cycle that is not stored. All take a writing session, except those that
only list. Not covered: telling the former holder that it lost (its next heartbeat does), queues (who asks first after a
release wins).
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlmodel import Session, col, select

from store.content import insert_new
from store.errors import LeaseLost
from store.service_tables import LeaseRow

Alive = Callable[[str], bool | None]


@dataclass(frozen=True)
class Lease:
    """Exclusive use of one device; ``wanted_by`` is "" while nobody asks for it back."""

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
        """How long the lease lives without a heartbeat."""
        return self.expires_at - self.heartbeat_at

    def live(self, at: datetime) -> bool:
        """Whether it still holds by a clock that shows ``at``."""
        return at < self.expires_at


def acquire(
    session: Session, device: str, holder: str, purpose: str, cycle_id: str | None, *, at: datetime, ttl: timedelta
) -> Lease | None:
    """The device's lease for ``holder``, or None while another's is live; a lapsed one is taken over.

    None may also mean that the device was released in this very moment: ask again. Raises ``ValueError`` for an empty
    name or a time to live that is none.
    """
    if not device or not holder or ttl <= timedelta(0):
        raise ValueError(f"no lease without a device, a holder and a time to live: {device!r}, {holder!r}, {ttl}")
    wish = Lease(device, holder, purpose, cycle_id, at, at, at + ttl)
    insert_new(session, LeaseRow, [vars(wish)])
    row = _locked(session, device)
    if row is None:
        return None
    if row.holder == holder:
        _set(session, row, heartbeat_at=at, expires_at=at + ttl)
    elif _lease(row).live(at):
        _count_anew_after_a_step_back(session, row, at)
        return None
    else:
        _set(session, row, **vars(wish))
    return _lease(row)


def heartbeat(session: Session, device: str, holder: str, at: datetime) -> Lease:
    """Say that ``holder`` still uses the device; its lease then lives its time from ``at``.

    A lease that lapsed unnoticed is renewed; raises ``LeaseLost`` once another has taken it or it was removed.
    """
    row = _locked(session, device)
    if row is None or row.holder != holder:
        raise LeaseLost(device, holder, row.holder if row else None)
    _set(session, row, heartbeat_at=at, expires_at=at + _lease(row).ttl)
    return _lease(row)


def release(session: Session, device: str, holder: str) -> bool:
    """Give the device back; False where it was not ``holder``'s any more, which harms nobody."""
    row = _locked(session, device)
    if row is None or row.holder != holder:
        return False
    session.delete(row)
    session.flush()
    return True


def ask_back(session: Session, device: str, who: str, at: datetime) -> Lease | None:
    """Ask whoever holds the device to give it back; its lease as it stands, None when it is free.

    The first who asks is the one named. The holder hears of it with its next heartbeat; nothing is taken by force.
    """
    if not who:
        raise ValueError("whoever asks for a device back has to have a name")
    row = _locked(session, device)
    if row is None:
        return None
    if not row.wanted_by:
        _set(session, row, wanted_by=who, wanted_at=at)
    return _lease(row)


def get_lease(session: Session, device: str) -> Lease | None:
    """The device's lease, live or lapsed; None when it is free."""
    row = session.get(LeaseRow, device, populate_existing=True)
    return None if row is None else _lease(row)


def list_leases(session: Session) -> list[Lease]:
    """All leases, live and lapsed, in the order of the devices' names."""
    return [_lease(row) for row in session.exec(select(LeaseRow).order_by(col(LeaseRow.device)))]


def drop_dead(session: Session, alive: Alive, *, at: datetime) -> list[str]:
    """Delete the leases of dead holders; returns device and holder of each.

    ``alive`` says of a holder True, False, or None where it cannot be asked (another machine); the lease of such a
    one goes once it has expired.
    """
    found = []
    for row in session.exec(select(LeaseRow).order_by(col(LeaseRow.device))):
        standing = alive(row.holder)
        if standing is False or (standing is None and row.expires_at <= at):
            session.delete(row)
            found.append(f"{row.device} of {row.holder}")
    session.flush()
    return found


def _locked(session: Session, device: str) -> LeaseRow | None:
    return session.get(LeaseRow, device, populate_existing=True, with_for_update=True)


def _count_anew_after_a_step_back(session: Session, row: LeaseRow, at: datetime) -> None:
    if row.heartbeat_at > at:
        _set(session, row, heartbeat_at=at, expires_at=at + _lease(row).ttl)


def _set(session: Session, row: LeaseRow, **values: str | datetime | None) -> None:
    for name, value in values.items():
        setattr(row, name, value)
    session.add(row)
    session.flush()


def _lease(row: LeaseRow) -> Lease:
    return Lease(**row.model_dump())
