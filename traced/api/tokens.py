"""Creating and revoking the tokens of the control API.

A token is 256 random bits, shown once and stored as its SHA-256. It is named after the person who holds it, and that
name is ``who`` in the audit log. Tokens are managed on the service's machine, in its store; both changes take effect at
once, in a running service too.

    viewer    reads
    operator  also decides: approve, reject, rollback, start, pause ...
    admin     also reloads the settings
"""

import hashlib
import re
import secrets
from typing import Literal, get_args

from sqlmodel import Session

from store.records import ApiToken, AuditEntry
from store.repositories.events import save_audit
from store.repositories.tokens import revoke_token, save_token
from traced.api.errors import BadRequest
from traced.registry.decision_rules import Action

TokenRole = Literal["viewer", "operator", "admin"]
TOKEN_ROLES: tuple[TokenRole, ...] = get_args(TokenRole)
PREFIX = "traced-api-"
# No spaces, commas and look-alike letters: a name must not read as another one in the audit log.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}")


def create_token(session: Session, action: Action, name: str, role: TokenRole) -> str:
    """Create and return a token for the person ``name``.

    Raises:
        BadRequest: The name has other characters than letters, digits and ``. _ @ + -``.
        StoreConflict: The person has a valid token.
    """
    if not NAME.fullmatch(name):
        raise BadRequest(
            f"{name!r} cannot be the name of a token", hint="use at most 100 letters, digits and . _ @ + -, as in ann"
        )
    token = PREFIX + secrets.token_urlsafe(32)
    save_token(session, ApiToken(name, role, hash_token(token), action.at, action.actor))
    _save_audit(session, action, "add token", name, {"role": role})
    return token


def withdraw_token(session: Session, action: Action, name: str) -> None:
    """Revoke the token of ``name``; raises ``NotFound`` if there is none."""
    revoke_token(session, name, at=action.at)
    _save_audit(session, action, "revoke token", name, {})


def hash_token(token: str) -> str:
    """Return the SHA-256 (hex) of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def _save_audit(session: Session, action: Action, kind: str, name: str, detail: dict[str, str]) -> None:
    save_audit(session, AuditEntry(action.at, action.actor, action.role, kind, name, action.reason, dict(detail)))
