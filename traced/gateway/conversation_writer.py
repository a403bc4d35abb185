"""Store positions and routing decisions behind the answers, in batches.

Invariants: rows are stored in the order in which they were added. While the store does not answer they are kept, the
newest ``MAX_WAITING`` of them. A decision that another router stored first is handed to its conversation. What a
request waits for is written at once; once the store has kept one waiting for ``LIMIT_S``, none waits until it answers.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import Engine

from store.database import write_session
from store.errors import StoreError
from store.records import ConversationPosition, ConversationRoute
from store.repositories.positions import replace_invalid_routes, save_positions
from traced.gateway.store_calls import call_store

# A batch collects what arrives within this time: a batch of its own for every row would take the event loop's time.
LINGER_S = 0.05
RETRY_S = 1.0
LIMIT_S = 1.0
# Seconds that a router which ends waits for the store.
FLUSH_S = 5.0
MAX_WAITING = 50_000
MAX_BATCH = 2000
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _NewRoute:
    route: ConversationRoute
    use: Callable[[ConversationRoute], None]
    is_move: bool


@dataclass(frozen=True)
class _Mark:
    """``is_stored`` is done when every row that was added before it is stored."""

    is_stored: "asyncio.Future[None]"


_Row = ConversationPosition | _NewRoute | _Mark


@dataclass
class ConversationWriter:
    """Stores what the gateway has decided and answered; ``run`` has to run while it is used.

    Args:
        expiry_s: Seconds of silence after which a new decision replaces the stored one.
    """

    store: Engine
    now: Callable[[], datetime]
    expiry_s: float
    _waiting: "deque[_Row]" = field(default_factory=deque)
    _added: asyncio.Event = field(default_factory=asyncio.Event)
    _urgent: asyncio.Event = field(default_factory=asyncio.Event)
    _is_late: bool = False
    _problem: str = ""

    @property
    def waiting(self) -> int:
        """Return the number of rows that are not stored yet."""
        return len(self._waiting)

    def add_positions(self, positions: Sequence[ConversationPosition]) -> None:
        """Store positions soon."""
        self._add(*positions)

    def add_route(
        self, route: ConversationRoute, use: Callable[[ConversationRoute], None], *, is_move: bool = False
    ) -> None:
        """Store a decision soon; ``use`` is called with the valid one, which another router may have stored first.

        With ``is_move`` the decision replaces an earlier one.
        """
        self._add(_NewRoute(route, use, is_move))

    async def wait_until_stored(self) -> None:
        """Wait until everything that was added is stored, unless the store does not answer."""
        if self._is_late or self._problem:
            return
        is_stored = asyncio.get_running_loop().create_future()
        self._add(_Mark(is_stored))
        self._urgent.set()
        try:
            async with asyncio.timeout(LIMIT_S):
                await is_stored
        except TimeoutError:
            self._is_late = True
            log.warning("no request waits for positions and decisions until the store answers")

    async def run(self) -> None:
        """Store what is added, until cancelled."""
        while True:
            await self._added.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await self._urgent.wait()
            if not await self._write_batch():
                await asyncio.sleep(RETRY_S)

    async def flush(self) -> None:
        """Store everything that waits; give up at the first error, or after ``FLUSH_S`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                while self._waiting and await self._write_batch():
                    pass

    def _add(self, *rows: _Row) -> None:
        self._waiting.extend(rows)
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
        self._added.set()

    async def _write_batch(self) -> bool:
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
        if not self._waiting:
            self._added.clear()
            self._urgent.clear()
        positions = [row for row in batch if isinstance(row, ConversationPosition)]
        routes = [row for row in batch if isinstance(row, _NewRoute)]
        marks = [row for row in batch if isinstance(row, _Mark)]
        write = asyncio.ensure_future(call_store(partial(self._write, positions, routes), limit_s=None))
        try:
            valid_routes = await asyncio.shield(write)
        except asyncio.CancelledError:
            # The transaction ends before the store is closed.
            await asyncio.wait([write], timeout=FLUSH_S)
            if not write.done() or write.exception() is not None:
                self._waiting.extendleft(reversed(batch))
            raise
        except StoreError as error:
            if self._problem != str(error):
                self._problem = str(error)
                log.warning("positions and routing decisions wait, the store does not accept them: %s", error)
            self._waiting.extendleft(reversed(batch))
            self._added.set()
            return False
        self._problem, self._is_late = "", False
        for row, route in zip(routes, valid_routes, strict=True):
            row.use(route)
        for mark in marks:
            if not mark.is_stored.done():
                mark.is_stored.set_result(None)
        return True

    def _write(self, positions: Sequence[ConversationPosition], rows: Sequence[_NewRoute]) -> list[ConversationRoute]:
        # The newest decision on a conversation: an earlier one in the batch has failed or was left.
        decisions = {row.route.id: row.route for row in rows}
        # In one order everywhere: two routers that insert the same keys in different orders wait for each other.
        routes = sorted(decisions.values(), key=lambda route: route.id)
        positions = sorted(positions, key=lambda position: (position.digest, position.conversation_id))
        moved_ids = [row.route.id for row in rows if row.is_move]
        with write_session(self.store) as session:
            # Before the positions: an answer in this batch would make an expired decision valid again.
            expired_before = self.now() - timedelta(seconds=self.expiry_s)
            valid = replace_invalid_routes(session, routes, expired_before=expired_before, moved_ids=moved_ids)
            save_positions(session, positions)
        # Another router may have deleted the row of a decision meanwhile.
        return [valid.get(row.route.id, row.route) for row in rows]
