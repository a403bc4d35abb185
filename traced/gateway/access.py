"""How much the router takes on at once, and how much of it each key may ask for.

Invariants: at most ``concurrency`` requests are at the engines; at most ``queue`` wait, first come first served, each
at most ``queue_s``; whatever is beyond that gets 429 and when to ask again. A key's requests per minute are a token
bucket: a minute's worth may come at once. Counted by each router for itself.

The keys of those who may ask the router: shown once, kept as hashes.

Invariants: a key is 256 random bits, so its SHA-256 tells nobody what it is; keys are compared by that hash; while no
key was ever made everybody on this machine may ask, and only they (``needed``). Fails: ``Refusal`` 401.
"""

import asyncio
import hashlib
import math
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from sqlmodel import Session

from store.records import AuditEntry, RouterKey
from store.repositories.events import save_audit
from store.repositories.serving import revoke_key, save_key
from traced.gateway.errors import Refusal
from traced.registry.decisions import Act

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


REMEMBERED = 10_000  # keys


@dataclass
class Gate:
    """Lets requests to the engines: ``async with gate`` is a place there."""

    concurrency: int
    queue: int
    queue_s: float
    running: int = 0
    _waiting: "deque[asyncio.Future[None]]" = field(default_factory=deque)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    async def __aenter__(self) -> None:
        """A place at the engines for as long as the body runs. Raises ``Refusal``."""
        if self.running < self.concurrency and not self._waiting:
            self.running += 1
            return
        if len(self._waiting) >= self.queue:
            raise Refusal(429, f"{self.running} requests run and {self.waiting} wait", code="queue_full", retry_after=1)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self.queue_s):
                await turn  # who leaves hands its place over
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._leave()  # the place came too late
            elif turn in self._waiting:
                self._waiting.remove(turn)
            if isinstance(error, TimeoutError):
                raise Refusal(
                    429, f"no place came free within {self.queue_s:g} s", code="queue_full", retry_after=1
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
class Quotas:
    """Requests per minute of each key."""

    clock: Callable[[], float] = time.monotonic
    _buckets: "OrderedDict[str, tuple[float, float]]" = field(default_factory=OrderedDict)

    def take(self, key_id: str, per_minute: int) -> None:
        """Count a request of a key; 0 is no limit. Raises ``Refusal`` with the seconds until the next one may come."""
        if not per_minute:
            return
        now = self.clock()
        left, at = self._buckets.pop(key_id, (float(per_minute), now))
        left = min(float(per_minute), left + (now - at) * per_minute / 60)
        self._buckets[key_id] = (left - 1 if left >= 1 else left, now)
        if len(self._buckets) > REMEMBERED:
            self._buckets.popitem(last=False)
        if left < 1:
            wait = math.ceil((1 - left) * 60 / per_minute)
            told = f"this key may ask {per_minute} times a minute"
            raise Refusal(429, told, code="quota_exceeded", retry_after=wait)
