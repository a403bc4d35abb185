"""Tokens of the control API, each named after the person who holds it.

Invariants: only the hash of a token is stored; a name has at most one token, and its revoked token can be replaced.
Not covered: creating tokens and hashing them (``traced.api.tokens``).
"""

from dataclasses import asdict
from datetime import datetime

from sqlmodel import Session, col, select

from store.errors import NotFound, StoreConflict
from store.records import ApiToken
from store.service_tables import ApiTokenRow


def save_token(session: Session, token: ApiToken) -> None:
    """Add a token, in place of a revoked one of the same name; raises ``StoreConflict`` if the name has a valid one."""
    existing = session.get(ApiTokenRow, token.name)
    if existing is not None and existing.revoked_at is None:
        raise StoreConflict(f"{token.name} has a token already; revoke it first: traced tokens revoke {token.name}")
    session.merge(ApiTokenRow(**asdict(token)))
    session.flush()


def revoke_token(session: Session, name: str, *, at: datetime) -> None:
    """Revoke a token; revoking it again changes nothing. Raises ``NotFound``."""
    row = session.get(ApiTokenRow, name)
    if row is None:
        raise NotFound("token", name, "traced tokens list")
    row.revoked_at = row.revoked_at or at
    session.add(row)


def find_token(session: Session, token_hash: str) -> ApiToken | None:
    """Return the valid token with this hash, None if there is none or it was revoked."""
    query = select(ApiTokenRow).where(ApiTokenRow.hash == token_hash, col(ApiTokenRow.revoked_at).is_(None))
    row = session.exec(query).first()
    return None if row is None else ApiToken(**row.model_dump())


def list_tokens(session: Session) -> list[ApiToken]:
    """Return all tokens, revoked ones included, oldest first."""
    query = select(ApiTokenRow).order_by(col(ApiTokenRow.created_at), col(ApiTokenRow.name))
    return [ApiToken(**row.model_dump()) for row in session.exec(query)]
