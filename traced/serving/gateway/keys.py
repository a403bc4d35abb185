"""The keys of those who may ask the router: shown once, kept as hashes.

Invariants: a key is 256 random bits, so its SHA-256 tells nobody what it is; keys are compared by that hash; while no
key was ever made everybody on this machine may ask, and only they (``needed``). Fails: ``Refusal`` 401.
"""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlmodel import Session

from store.repositories.audit import save_audit
from store.repositories.serving import revoke_key, save_key
from store.service_records import AuditEntry
from store.serving_records import RouterKey
from traced.acts import Act
from traced.serving.gateway.problems import Refusal

PREFIX = "traced-"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def new_key() -> tuple[str, str]:
    """A key to hand out, and the hash of it to keep."""
    key = PREFIX + secrets.token_urlsafe(32)
    return key, hashed(key)


def make_key(session: Session, act: Act, name: str, per_minute: int) -> str:
    """Make a key for ``name`` and return it; raises ``StoreConflict`` where there is or was one of that name."""
    key, kept = new_key()
    save_key(session, RouterKey(name, kept, per_minute, act.at))
    save_audit(session, AuditEntry(act.at, act.who, act.role, "add key", name, act.reason, {"per_minute": per_minute}))
    return key


def take_back(session: Session, act: Act, name: str) -> None:
    """Refuse a key from now on; raises ``NotFound``."""
    revoke_key(session, name, at=act.at)
    save_audit(session, AuditEntry(act.at, act.who, act.role, "revoke key", name, act.reason, {}))


def hashed(key: str) -> str:
    """SHA-256 (hex)."""
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass
class Keys:
    """The keys that are good, by their hashes; None while none was ever made."""

    known: Mapping[str, RouterKey] | None = field(default=None)

    def who(self, authorization: str | None) -> RouterKey | None:
        """Whose request it is; None where no key is needed."""
        if self.known is None:
            return None
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Refusal(401, "an API key is needed (traced keys add NAME)", code="missing_api_key")
        found = self.known.get(hashed(key.strip()))
        if found is None:
            raise Refusal(401, "this API key is not known, or was taken back", code="invalid_api_key")
        return found
