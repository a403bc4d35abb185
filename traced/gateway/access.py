"""API keys and the concurrency limits of the gateway.

A key is 256 random bits, shown once and stored as its SHA-256. Until the first key is created, requests need none, and
the gateway listens on the loopback only. A key may have a target, which its conversations belong to; else a request may
name the target in a header. Concurrency is counted per process. Invariant:
``Access.check`` comes before anything that reads, decompresses or parses a body. Errors: ``Refusal`` 400, 401, 413 and
429.
"""

import asyncio
import contextlib
import hashlib
import secrets
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from aiohttp import hdrs, web
from sqlmodel import Session

from store.errors import StoreConflict
from store.records import AuditEntry, RouterKey
from store.repositories.events import save_audit
from store.repositories.serving import revoke_key, save_key
from traced.gateway.bodies import check_declared_size
from traced.gateway.errors import Refusal
from traced.gateway.quotas import Quotas
from traced.registry.decision_rules import Action

PREFIX = "traced-"
API_KEY_HEADER = "x-api-key"
TARGET_HEADER = "X-Traced-Target"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def generate_key() -> tuple[str, str]:
    """Return a new key and the hash to store."""
    key = PREFIX + secrets.token_urlsafe(32)
    return key, hash_key(key)


def create_key(session: Session, action: Action, name: str, per_minute: int, target: str = "") -> str:
    """Create and return a key for ``name``, whose conversations belong to ``target`` ("": to that of the request).

    Raises:
        StoreConflict: The name is or was in use, or has a colon, which separates it from the names of conversations.
    """
    if ":" in name:
        raise StoreConflict(f"the name of a key must not have a colon: {name!r}")
    key, key_hash = generate_key()
    save_key(session, RouterKey(name, key_hash, per_minute, action.at, target=target))
    detail = {"per_minute": per_minute, **({"target": target} if target else {})}
    save_audit(session, AuditEntry(action.at, action.actor, action.role, "add key", name, action.reason, detail))
    return key


def withdraw_key(session: Session, action: Action, name: str) -> None:
    """Revoke the key called ``name``; raises ``NotFound`` if there is none."""
    revoke_key(session, name, at=action.at)
    save_audit(session, AuditEntry(action.at, action.actor, action.role, "revoke key", name, action.reason, {}))


def hash_key(key: str) -> str:
    """Return the SHA-256 (hex) of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass
class KeyRing:
    """Authenticates requests by the valid keys, held by hash; ``by_hash`` is None until the first key is created."""

    by_hash: Mapping[str, RouterKey] | None = field(default=None)

    def authenticate(self, headers: Mapping[str, str]) -> RouterKey | None:
        """Return the key of a request, or None if no key is needed.

        OpenAI's clients send ``Authorization: Bearer KEY``, Anthropic's ``x-api-key: KEY``. Of two keys one has to be
        valid: some clients send a placeholder in the other header.

        Raises:
            Refusal: 401 without a valid key.
        """
        if self.by_hash is None:
            return None
        scheme, _, bearer = headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        keys = [headers.get(API_KEY_HEADER, ""), bearer.strip() if scheme.lower() == "bearer" else ""]
        if not any(keys):
            raise Refusal(401, "an API key is needed (traced keys add NAME)", code="missing_api_key")
        valid_keys = [valid_key for key in keys if key and (valid_key := self.by_hash.get(hash_key(key)))]
        if not valid_keys:
            raise Refusal(401, "this API key is unknown or was revoked", code="invalid_api_key")
        return valid_keys[0]


@dataclass
class ConcurrencyLimit:
    """Limits the number of concurrent requests: ``async with limit`` holds one slot, first come, first served.

    Args:
        concurrency: Maximum number of requests that hold a slot.
        queue: Maximum number of requests that wait; further ones are refused with 429.
        queue_s: Seconds that a request may wait.
    """

    concurrency: int
    queue: int
    queue_s: float
    running: int = 0
    _waiting: "deque[asyncio.Future[None]]" = field(default_factory=deque)

    @property
    def waiting(self) -> int:
        """Return the number of requests in the queue."""
        return len(self._waiting)

    async def __aenter__(self) -> None:
        """Take a slot; raises ``Refusal`` 429."""
        if self.running < self.concurrency and not self._waiting:
            self.running += 1
            return
        if len(self._waiting) >= self.queue:
            raise Refusal(
                429,
                f"the router is full: {self.running} requests run, {self.waiting} wait; repeat the request later",
                code="queue_full",
                retry_after=1,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self.queue_s):
                # A request that ends passes its slot to the first in the queue, so ``running`` does not change.
                await turn
        except BaseException as error:
            # This request may have received a slot at the same moment; the slot must not be lost.
            if turn.done() and not turn.cancelled():
                self._leave()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            if isinstance(error, TimeoutError):
                raise Refusal(
                    429, f"no slot became free within {self.queue_s:g} s", code="queue_full", retry_after=1
                ) from None
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1


@dataclass
class KeyConcurrency:
    """Limits the requests of each key that run or wait, so that one key cannot take all slots.

    Requests without a key are not limited: then no key exists, and only this machine uses the gateway.
    """

    limit: int
    running: Counter[str] = field(default_factory=Counter)

    @contextlib.contextmanager
    def slot(self, key: RouterKey | None) -> Iterator[None]:
        """Count a request of a key while the context is active; raises ``Refusal`` 429 above the limit."""
        if key is None:
            yield
            return
        if self.running[key.id] >= self.limit:
            message = f"{self.limit} requests of this key are in progress; repeat the request when one has ended"
            raise Refusal(429, message, code="key_concurrency", retry_after=1)
        self.running[key.id] += 1
        try:
            yield
        finally:
            self.running[key.id] -= 1
            if not self.running[key.id]:
                del self.running[key.id]


@dataclass(frozen=True)
class Access:
    """Decides from the head of a request whether its body is read, and which target its conversation belongs to.

    ``body_bytes`` is the maximum size of a body; ``targets`` are the targets of the settings, the default one first.
    """

    keys: KeyRing
    quotas: Quotas
    concurrency: KeyConcurrency
    body_bytes: int
    targets: Sequence[str]

    async def check(self, request: web.Request) -> RouterKey | None:
        """Return the key of a request with a body, or None if no key is needed.

        Raises:
            Refusal: 401 without a valid key, 413 if the declared size is too large, 429 if the quota is used up.
        """
        key = self.keys.authenticate(request.headers)
        check_declared_size(request, self.body_bytes)
        if key is not None:
            await self.quotas.consume(key.id, key.per_minute)
        return key

    def target(self, name: str, key: RouterKey | None) -> str:
        """Return the target of a request that names the target ``name`` ("": none): its key's, else this one.

        Raises:
            Refusal: 400 if the key has another target, or the name is unknown.
        """
        if key is not None and key.target:
            if name in ("", key.target):
                return key.target
            message = f"the conversations of this API key belong to the target {key.target}, not to {name!r:.80}"
            raise Refusal(400, message, code="other_target", param=TARGET_HEADER)
        of_keys = {valid_key.target for valid_key in (self.keys.by_hash or {}).values() if valid_key.target}
        known_names = list(dict.fromkeys([*self.targets, *sorted(of_keys)]))
        if name and name not in known_names:
            message = f"the target {name!r:.80} is unknown; known: {', '.join(known_names)} (serving.targets)"
            raise Refusal(400, message, code="unknown_target", param=TARGET_HEADER)
        return name or known_names[0]
