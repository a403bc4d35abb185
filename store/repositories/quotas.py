"""Token buckets of the router's API keys, which several routers share."""

from collections.abc import Callable
from datetime import datetime

from sqlmodel import Session, col, select

from store.content import database_time, insert_new
from store.service_tables import QuotaRow


def take_tokens(
    session: Session, key_id: str, per_minute: int, count: int, *, first_tokens: float, now: Callable[[], datetime]
) -> tuple[int, float]:
    """Take up to ``count`` tokens from a key's bucket, which is refilled with ``per_minute`` tokens a minute.

    Args:
        first_tokens: What a new bucket holds.
        now: Returns the time, for a database that has no clock of its own.

    Returns:
        The number of tokens taken, and the seconds until there is a token if that is 0.
    """
    insert_new(session, QuotaRow, [{"key_id": key_id, "tokens": first_tokens, "at": database_time(session, now())}])
    row = session.exec(select(QuotaRow).where(col(QuotaRow.key_id) == key_id).with_for_update()).one()
    # The time at which the row is locked: of two that waited for it, the second is later.
    at = database_time(session, now())
    # Of a clock that was set back, nothing is owed.
    elapsed_s = max(0.0, (at - row.at).total_seconds())
    tokens = min(float(per_minute), row.tokens + elapsed_s * per_minute / 60)
    count = min(count, int(tokens))
    row.tokens, row.at = tokens - count, at
    session.add(row)
    session.flush()
    return count, 0.0 if count else (1 - tokens) * 60 / per_minute
