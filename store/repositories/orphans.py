"""Rows that speak of processes which are no more: running attempts and leases of dead holders.

Invariants: ``alive`` says of a holder True, False, or None for one that cannot be asked (another machine); a lease
whose holder cannot be asked goes once it has expired, an attempt of such a holder is left to its machine. An attempt
stays as evidence, in state "lost"; a lease is deleted. Doing it twice changes nothing.
Not covered: what a lost attempt means for its input (the executor's rule), and the processes themselves.
"""

from collections.abc import Callable
from datetime import datetime

from sqlmodel import Session, col, select

from store.service_tables import AttemptRow, LeaseRow

Alive = Callable[[str], bool | None]
RUNNING, LOST = "running", "lost"


def lose_attempts(session: Session, alive: Alive, *, at: datetime) -> list[str]:
    """Close the running attempts of dead holders as lost; returns what each was."""
    found = []
    for row in session.exec(select(AttemptRow).where(AttemptRow.state == RUNNING).order_by(col(AttemptRow.seq))):
        if alive(row.holder) is False:
            row.state, row.ended_at = LOST, at
            row.evidence = {**row.evidence, "lost": f"holder {row.holder} had ended"}
            session.add(row)
            found.append(f"{row.cycle_id} {row.stage} {row.capability} attempt {row.number}")
    session.flush()
    return found


def drop_leases(session: Session, alive: Alive, *, at: datetime) -> list[str]:
    """Delete the leases of dead holders; returns device and holder of each."""
    found = []
    for row in session.exec(select(LeaseRow).order_by(col(LeaseRow.device))):
        standing = alive(row.holder)
        if standing is False or (standing is None and row.expires_at <= at):
            session.delete(row)
            found.append(f"{row.device} of {row.holder}")
    session.flush()
    return found
