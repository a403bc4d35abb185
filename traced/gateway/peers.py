"""Know whether other routers use the same store.

A conversation may be answered by any of them, and what one has answered reaches the store a moment later. Only a router
with peers has to wait for that. A router that ends abnormally counts as a peer until ``ROUTER_LIFETIME`` has passed.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import Engine

from store.database import write_session
from store.errors import StoreError
from store.repositories.routers import delete_router, note_router
from traced.gateway.store_calls import call_store

POLL_S = 2.0
LEAVE_S = 2.0
log = logging.getLogger(__name__)


@dataclass
class Peers:
    """Gives signs of life of this router, and counts the others.

    Args:
        siblings: The number of other workers of the same gateway, which are peers from the start.
    """

    store: Engine
    now: Callable[[], datetime]
    siblings: int = 0
    count: int = 0
    _id: str = field(default_factory=lambda: secrets.token_hex(8))

    def exist(self) -> bool:
        """Return whether other routers use the store."""
        return max(self.count, self.siblings) > 0

    async def run(self) -> None:
        """Poll until cancelled; while the store does not answer, keep the last count."""
        try:
            while True:
                await self.refresh()
                await asyncio.sleep(POLL_S)
        finally:
            with contextlib.suppress(StoreError):
                await call_store(self._leave, limit_s=LEAVE_S)

    async def refresh(self) -> None:
        """Give a sign of life and count the other routers."""
        try:
            count = await call_store(self._note)
        except StoreError as error:
            log.warning("the other routers cannot be counted: %s", error)
            return
        if count != self.count:
            log.info("%d other routers use the store", count)
        self.count = count

    def _note(self) -> int:
        with write_session(self.store) as session:
            return note_router(session, self._id, at=self.now())

    def _leave(self) -> None:
        with write_session(self.store) as session:
            delete_router(session, self._id)
