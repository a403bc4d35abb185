"""Keep the answers of the responses form, so that clients can continue them by id, retrieve and delete them.

A request with ``previous_response_id`` is sent to the engine with the whole conversation as its input, so any engine
can continue an answer of another one, and engines store nothing.

Invariants: a response belongs to the key that made it and does not exist for other keys. Every router finds a response
as soon as its client has the end of it, and it survives a power cut from then on. While the store does not accept
responses within ``LIMIT_S``, no client waits for it: the newest ``MEMORY_BYTES`` of them are in memory, and are written
when it does. A response that must not be written to the store (redaction, ``X-Traced-Record: no``) is only in this
router's memory. Responses expire after ``LIFETIME``. Errors: ``Refusal`` 404 for a response that does not exist (any
more), 503 if the store does not answer. Not covered: ``background``.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import Any

from sqlalchemy import Engine

from store.database import read_session, write_session
from store.errors import StoreError
from store.records import StoredResponse
from store.repositories.responses import delete_response, delete_responses_before, get_response, save_responses
from traced.core.fast_json import write_json
from traced.gateway.batching import Batcher
from traced.gateway.errors import Refusal
from traced.gateway.forwarding import PendingExchange
from traced.gateway.store_calls import call_store
from traced.inference.forms.responses import input_items
from traced.ingest.responses import response_object

# As long as OpenAI keeps them.
LIFETIME = timedelta(days=30)
EXPIRY_INTERVAL_S = 3600.0
# Maximum size of the responses that are in memory only, as JSON.
MEMORY_BYTES = 64 * 2**20
# Seconds that a client waits for the end of its answer until the store has it.
LIMIT_S = 1.0
# Seconds to wait for a response that another router has not stored yet.
PATIENCE_S = 0.5
RETRY_S = 0.1
# Seconds between two attempts to write a response.
WRITE_RETRY_S = 2.0
# Seconds that a router which ends waits for the store.
FLUSH_S = 5.0
EXPIRY_BATCH = 500
Key = tuple[str, str]
log = logging.getLogger(__name__)


@dataclass
class StoredResponses:
    """The responses that clients of this router may continue."""

    store: Engine
    now: Callable[[], datetime]
    # The responses that are not in the store, with their sizes; the id of the response and of the key identify one.
    _memory: "OrderedDict[Key, tuple[StoredResponse, int]]" = field(default_factory=OrderedDict)
    _writes: "dict[Key, asyncio.Task[None]]" = field(default_factory=dict)
    # By exchange id; set once the store has accepted or refused the response.
    _attempted: "dict[str, asyncio.Event]" = field(default_factory=dict)
    _problem: str = ""

    def __post_init__(self) -> None:
        # By key, so that a response that has to leave the memory does not wait there for the store.
        self._batcher: Batcher[Key, None] = Batcher(self._save)

    async def resolve(self, raw: bytes, body: dict[str, object], key_id: str) -> tuple[bytes, dict[str, object]]:
        """Return the request with the whole conversation as its input; without ``previous_response_id`` unchanged.

        The returned body still has the id, the returned bytes do not. Raises ``Refusal``.
        """
        if body.get("background"):
            raise Refusal(400, "background is not supported; leave it out", param="background")
        previous_id = body.get("previous_response_id")
        if previous_id is None:
            return raw, body
        previous = await self._find(str(previous_id), key_id)
        if previous is None:
            raise Refusal(
                404,
                f"Previous response with id {previous_id!r} not found.",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        try:
            items = [*previous.input, *previous.response["output"], *input_items(body)]
        except ValueError as error:
            raise Refusal(400, str(error), param="input") from error
        body = {**body, "input": items}
        return write_json({name: body[name] for name in body if name != "previous_response_id"}), body

    def keep(self, exchange: PendingExchange, key_id: str, *, in_store: bool) -> None:
        """Keep the response of a finished exchange, unless it failed or its client asked not to store it.

        Args:
            exchange: The exchange, whose body has the whole input.
            key_id: The key that made the request, "" without one.
            in_store: Whether the response may be written to the store.
        """
        if exchange.status != HTTPStatus.OK or exchange.shadow_of is not None or exchange.body.get("store") is False:
            return
        response = response_object(bytes(exchange.answer), streamed=exchange.streamed)
        if response is None:
            return
        content = {**response, "previous_response_id": exchange.body.get("previous_response_id"), "store": True}
        record = StoredResponse(response["id"], key_id, self.now(), input_items(exchange.body), content)
        key = (record.id, key_id)
        self._memory[key] = (record, len(exchange.raw) + len(exchange.answer))
        while sum(size for _, size in self._memory.values()) > MEMORY_BYTES and len(self._memory) > 1:
            oldest_key, _ = self._memory.popitem(last=False)
            if (write := self._writes.get(oldest_key)) is not None:
                log.error("response %s is lost: the store has not accepted it", oldest_key[0])
                write.cancel()
        if in_store:
            self._attempted[exchange.id] = attempted = asyncio.Event()
            self._writes[key] = task = asyncio.create_task(self._write(key, attempted))
            task.add_done_callback(lambda _: self._writes.pop(key, None))
            task.add_done_callback(lambda _: attempted.set())
            task.add_done_callback(lambda _: self._attempted.pop(exchange.id, None))

    async def wait_until_stored(self, exchange_id: str) -> None:
        """Wait until the response of an exchange is stored; not longer than ``LIMIT_S``, nor while the store fails."""
        attempted = self._attempted.get(exchange_id)
        if attempted is None or self._problem:
            return
        try:
            async with asyncio.timeout(LIMIT_S):
                await attempted.wait()
        except TimeoutError:
            self._note_problem(f"no answer within {LIMIT_S:g} s")

    async def retrieve(self, response_id: str, key_id: str) -> Mapping[str, Any]:
        """Return a response as its client got it; raises ``Refusal``."""
        record = await self._find(response_id, key_id)
        if record is None:
            raise _missing_error(response_id)
        return record.response

    async def delete(self, response_id: str, key_id: str) -> None:
        """Delete a response; raises ``Refusal``."""
        await self.retrieve(response_id, key_id)
        key = (response_id, key_id)
        self._memory.pop(key, None)
        if (write := self._writes.get(key)) is not None:
            # A write that has begun must not store it after the deletion.
            await asyncio.wait([write], timeout=WRITE_RETRY_S)
        try:
            await call_store(partial(self._delete, key))
        except StoreError as error:
            raise _unavailable_error(error) from error

    async def run(self) -> None:
        """Delete expired responses from the store, until cancelled."""
        while True:
            try:
                # In small transactions, between which others can write.
                while await call_store(self._expire, limit_s=None) == EXPIRY_BATCH:
                    continue
            except StoreError as error:
                log.warning("expired responses could not be deleted: %s", error)
            await asyncio.sleep(EXPIRY_INTERVAL_S)

    async def flush(self) -> None:
        """Wait until every response has been written, at most ``FLUSH_S`` seconds."""
        writes = list(self._writes.values())
        if not writes:
            return
        _, pending = await asyncio.wait(writes, timeout=FLUSH_S)
        if pending:
            log.error("%d responses are lost: the store has not accepted them", len(pending))
        for write in pending:
            write.cancel()

    async def _find(self, response_id: str, key_id: str) -> StoredResponse | None:
        # Ids of engines are plain text, and not every database can search for another.
        if not (response_id.isascii() and response_id.isprintable()):
            return None
        deadline = time.monotonic() + PATIENCE_S
        while True:
            record, _ = self._memory.get((response_id, key_id), (None, 0))
            try:
                record = record or await call_store(partial(self._read, response_id, key_id))
            except StoreError as error:
                raise _unavailable_error(error) from error
            if record is not None:
                return record if record.at > self.now() - LIFETIME else None
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(RETRY_S)

    async def _write(self, key: Key, attempted: asyncio.Event) -> None:
        while key in self._memory:
            try:
                await self._batcher.ask(key)
            except StoreError as error:
                self._note_problem(str(error))
                attempted.set()
                await asyncio.sleep(WRITE_RETRY_S)
            else:
                self._problem = ""
                # Another router may delete it from now on.
                self._memory.pop(key, None)

    def _note_problem(self, problem: str) -> None:
        if self._problem != problem:
            self._problem = problem
            log.warning("responses are only in memory, the store does not accept them: %s", problem)

    def _save(self, keys: Sequence[Key]) -> list[None]:
        records = [entry[0] for key in keys if (entry := self._memory.get(key)) is not None]
        with write_session(self.store) as session:
            save_responses(session, records)
        return [None] * len(keys)

    def _read(self, response_id: str, key_id: str) -> StoredResponse | None:
        with read_session(self.store) as session:
            return get_response(session, response_id, key_id)

    def _delete(self, key: Key) -> None:
        with write_session(self.store) as session:
            delete_response(session, *key)

    def _expire(self) -> int:
        with write_session(self.store) as session:
            return delete_responses_before(session, self.now() - LIFETIME, limit=EXPIRY_BATCH)


def _missing_error(response_id: str) -> Refusal:
    return Refusal(404, f"Response with id {response_id!r} not found.", code="response_not_found", param="response_id")


def _unavailable_error(error: StoreError) -> Refusal:
    # The error names the database, which is not for clients.
    log.warning("stored responses cannot be read: %s", error)
    return Refusal(503, "the store does not answer; repeat the request later", retry_after=5)
