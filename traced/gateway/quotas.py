"""Limit the requests per minute of each API key, over all routers that use the same store.

Each key has a token bucket: a token per request, refilled at the key's rate, never more than a minute's requests. A
router without peers keeps the buckets in memory. From its first peer on, it takes tokens from the key's bucket in the
store, some at a time, and spends them in memory.

Invariant: routers with one store and clocks alike admit together what one of them would admit; tokens that a router has
taken and not spent are missing to the others. While the store does not answer, each router counts for itself.
"""

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

from sqlalchemy import Engine

from store.database import write_session
from store.errors import StoreError, StoreUnavailable
from store.repositories.quotas import take_tokens
from traced.gateway.errors import Refusal
from traced.gateway.store_calls import call_store

# Keys whose quota is tracked. Beyond this number, the least recently used key loses its count.
MAX_BUCKETS = 10_000
# The part of a minute's tokens that a router takes from the store at once.
TAKEN_SHARE = 1 / 20
# A request waits no longer for the store.
LIMIT_S = 1.0
RETRY_S = 5.0
log = logging.getLogger(__name__)


@dataclass
class _Bucket:
    """The tokens that this router has, refilled here unless they are from the store.

    Args:
        empty_until: Monotonic second before which the bucket in the store has no token.
    """

    tokens: float
    updated_at: float
    is_taken: bool = False
    empty_until: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class Quotas:
    """The token buckets of one router; ``has_peers`` says whether other routers use the store."""

    store: Engine
    now: Callable[[], datetime]
    has_peers: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    _is_shared: bool = False
    _retry_at: float = 0.0
    _problem: str = ""
    _buckets: "OrderedDict[str, _Bucket]" = field(default_factory=OrderedDict)

    async def consume(self, key_id: str, per_minute: int) -> None:
        """Count a request of a key against its quota ``per_minute`` (0: no limit).

        Raises:
            Refusal: 429 if the quota is used up, with the seconds until the next request is allowed.
        """
        if not per_minute:
            return
        bucket = self._bucket(key_id, per_minute)
        # A router that was alone goes on with the shared buckets when its peers have ended: its own would be full.
        self._is_shared = self._is_shared or self.has_peers()
        if self._is_shared and (bucket.tokens < 1 or not bucket.is_taken):
            async with bucket.lock:
                # Another request may have taken tokens meanwhile.
                if bucket.tokens < 1 or not bucket.is_taken:
                    await self._take(bucket, key_id, per_minute)
        if not bucket.is_taken:
            self._refill(bucket, per_minute)
        if bucket.tokens < 1:
            wait_s = (1 - bucket.tokens) * 60 / per_minute
            if bucket.is_taken:
                wait_s = bucket.empty_until - self.clock()
            message = f"this key is limited to {per_minute} requests a minute"
            raise Refusal(429, message, code="quota_exceeded", retry_after=max(1, math.ceil(wait_s)))
        bucket.tokens -= 1

    def _bucket(self, key_id: str, per_minute: int) -> _Bucket:
        bucket = self._buckets.get(key_id)
        if bucket is None:
            bucket = self._buckets[key_id] = _Bucket(float(per_minute), self.clock())
            if len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key_id)
        return bucket

    def _refill(self, bucket: _Bucket, per_minute: int) -> None:
        now = self.clock()
        bucket.tokens = min(float(per_minute), bucket.tokens + (now - bucket.updated_at) * per_minute / 60)
        bucket.updated_at = now

    async def _take(self, bucket: _Bucket, key_id: str, per_minute: int) -> None:
        """Take tokens from the store; while it does not answer, the bucket is refilled here."""
        if bucket.is_taken and self.clock() < bucket.empty_until:
            return
        if not bucket.is_taken:
            self._refill(bucket, per_minute)
        try:
            if self.clock() < self._retry_at:
                raise StoreUnavailable(self._problem)
            count = max(1, round(per_minute * TAKEN_SHARE))
            call = partial(self._take_from_store, key_id, per_minute, count, bucket.tokens)
            tokens, wait_s = await call_store(call, limit_s=LIMIT_S)
        except StoreError as error:
            if self._problem != str(error):
                self._problem = str(error)
                log.warning("this router counts requests alone, because the store does not answer: %s", error)
            if self.clock() >= self._retry_at:
                self._retry_at = self.clock() + RETRY_S
            # Refilled since the last tokens were taken.
            bucket.is_taken = False
            return
        self._problem = ""
        bucket.tokens, bucket.is_taken = (bucket.tokens if bucket.is_taken else 0.0) + tokens, True
        bucket.updated_at = self.clock()
        bucket.empty_until = bucket.updated_at + wait_s

    def _take_from_store(self, key_id: str, per_minute: int, count: int, first_tokens: float) -> tuple[int, float]:
        with write_session(self.store) as session:
            return take_tokens(session, key_id, per_minute, count, first_tokens=first_tokens, now=self.now)
