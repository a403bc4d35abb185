"""Recognise the conversation that a request belongs to.

In this order: the client's own name for it (the header ``X-Traced-Conversation``, ``metadata.conversation_id``, the
Responses API's ``conversation`` or ``previous_response_id``); a repetition of a request that got no answer; the newest
answer of this router in the request's history; a summary that this router wrote. Otherwise the conversation is new.

Invariants:
- Requests of different API keys never share a conversation, nor do requests whose ``user``, ``safety_identifier`` or
  ``prompt_cache_key`` differ, unless the client names the conversation.
- An opening alone identifies nothing: two users may open alike.
- Where several conversations of a key have the same history word for word, a request continues the one whose last
  answer it is and which no other request has continued yet; of these, the newest.
- A conversation is forgotten after ``expiry_s`` seconds without a request.
- A position is in memory before the client has the end of the answer, and soon in the store; where other routers use
  the store, before the client has the end (``until_known``).
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sqlalchemy import Engine

from store.database import read_session
from store.errors import StoreError
from store.records import ConversationPosition, ConversationRoute
from store.repositories.positions import StoredConversation, find_conversations
from store.types import Message
from traced.core.fast_json import write_json
from traced.gateway.batching import Batcher
from traced.gateway.conversation_writer import ConversationWriter
from traced.gateway.errors import Refusal
from traced.ingest.conversations import HEADER, ID_LIMIT, History, client_name, digest_of, key_digest, qualified_id
from traced.ingest.customers import CustomerHash

# Maximum numbers in memory; what is older is looked up in the store.
MAX_CONVERSATIONS = 50_000
MAX_POSITIONS = 100_000
MAX_REQUESTS = 10_000
MAX_SYSTEMS = 3
# Conversations with one position, or requests with the same messages; many users open alike and get the same answer.
MAX_ALIKE = 128
# Clients repeat a request that failed within this time.
RETRY_S = 60.0
# Stainless' clients, such as OpenAI's and Anthropic's, count the repetitions of a request in this header.
RETRY_HEADER = "x-stainless-retry-count"
# A request does not wait longer for the store.
LOOKUP_S = 1.0
# Fields of a request that name a user or a prefix. They separate conversations and never join them.
SEPARATORS = ("user", "safety_identifier", "prompt_cache_key")

# The prefix of the names that the router gives.
NEW_PREFIX = "conv-"

Separators = tuple[str, str, str]


@dataclass(frozen=True)
class RequestNames:
    """What a client states about a request's conversation.

    Args:
        conversation: The client's name for it, "" without one.
        previous_response: The id of the response that the request continues, "" without one.
        separators: Digests of the fields ``SEPARATORS``, "" for a missing one.
        is_retry: Whether the client states that it repeats a request.
    """

    conversation: str = ""
    previous_response: str = ""
    separators: Separators = ("", "", "")
    is_retry: bool = False


@dataclass(eq=False)
class Conversation:
    """A conversation in memory.

    Args:
        id: Unique over all API keys.
        seen_at: The time of its last request.
        systems: The digests of its last different system prompts.
        last_digests: The digests of its last answer's position.
        is_continued: Whether a request has continued its last answer.
        route: The routing decision, None before the first one.
        may_be_stored: Whether the store may have a decision of another router or of an earlier life.
        deciding: The decision in progress.
    """

    id: str
    key_id: str
    seen_at: datetime
    separators: Separators = ("", "", "")
    systems: tuple[str, ...] = ()
    last_digests: frozenset[str] = frozenset()
    is_continued: bool = False
    route: ConversationRoute | None = None
    may_be_stored: bool = False
    deciding: "asyncio.Task[ConversationRoute] | None" = None

    @property
    def is_named(self) -> bool:
        """Whether its client named it."""
        return not client_name(self.id, self.key_id).startswith(NEW_PREFIX)

    def admits(self, separators: Separators) -> bool:
        """Return whether a request with these separators can belong to the conversation."""
        return self.separators == separators


@dataclass(frozen=True)
class _Position:
    conversation: Conversation
    system: str


@dataclass
class _Request:
    """A request that waits for its answer, failed or was answered recently."""

    conversation: Conversation
    at: datetime
    state: str = "running"


@dataclass
class Conversations:
    """The conversations of one gateway, which one event loop uses.

    Args:
        has_peers: Whether other routers use the same store.
    """

    store: Engine
    writer: ConversationWriter
    now: Callable[[], datetime]
    expiry_s: float
    has_peers: Callable[[], bool] = lambda: False
    _by_id: "OrderedDict[str, Conversation]" = field(default_factory=OrderedDict)
    _positions: "OrderedDict[str, list[_Position]]" = field(default_factory=OrderedDict)
    _requests: "OrderedDict[tuple[str, str], list[_Request]]" = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._lookup = Batcher(self._read)

    async def find(self, names: RequestNames, history: History, key_id: str) -> Conversation:
        """Return the conversation of a request, a new one if nothing shows that it continues another."""
        now = self.now()
        conversation: Conversation | None
        if names.conversation:
            conversation = self._by_name(qualified_id(names.conversation, key_id), key_id, now)
        else:
            conversation = await self._by_response(names, key_id, now)
            conversation = conversation or self._repeated(names, history, now)
            conversation = conversation or await self._continued(names, history, key_id, now)
            conversation = conversation or await self._summarised(names, history, key_id, now)
            new_id = qualified_id(f"{NEW_PREFIX}{secrets.token_hex(16)}", key_id)
            conversation = conversation or self._created(new_id, key_id, now)
        conversation.seen_at = now
        if conversation.id in self._by_id:
            self._by_id.move_to_end(conversation.id)
        conversation.separators = names.separators
        self._note_request(conversation, history, now)
        return conversation

    def note_answer(
        self, conversation: Conversation, history: History, answer: Message | None, response_id: str
    ) -> None:
        """Remember the position after the model's answer; ``answer`` is None if there is no message in it."""
        self._set_state(conversation, history, "answered")
        digests = [_response_digest(response_id, conversation.key_id)]
        if answer is not None:
            digests += self._positions_after(conversation, history, answer)
        self._add_positions(conversation, history, digests)

    def note_stop(self, conversation: Conversation, history: History, answers: Sequence[Message]) -> None:
        """Remember the positions after a stream that its client stopped; it may have any of these ``answers``."""
        self._set_state(conversation, history, "answered")
        digests = [digest for answer in answers for digest in self._positions_after(conversation, history, answer)]
        self._add_positions(conversation, history, digests)

    def _positions_after(self, conversation: Conversation, history: History, answer: Message) -> list[str]:
        position = history.position_after(answer)
        if history.system not in conversation.systems:
            conversation.systems = (*conversation.systems, history.system)[-MAX_SYSTEMS:]
        return [position.digest, position.exchange, *history.summaries_in(answer, conversation.systems)]

    def _add_positions(self, conversation: Conversation, history: History, digests: Sequence[str]) -> None:
        digests = list(dict.fromkeys(digest for digest in digests if digest))
        conversation.last_digests, conversation.is_continued = frozenset(digests), False
        conversation.seen_at = self.now()
        for digest in digests:
            self._add_position(digest, _Position(conversation, history.system))
        separators = conversation.separators
        self.writer.add_positions(
            [
                ConversationPosition(digest, conversation.id, history.system, separators, conversation.seen_at)
                for digest in digests
            ]
        )

    async def until_known(self, conversation: Conversation) -> None:
        """Wait until other routers know the positions of a conversation; its client may send the next turn to them."""
        if self.has_peers() and not conversation.is_named:
            await self.writer.wait_until_stored()

    def note_failure(self, conversation: Conversation, history: History, *, has_begun: bool = False) -> None:
        """Remember that a request got no answer, or only the beginning of one, so that its repetition is recognised."""
        self._set_state(conversation, history, "answered" if has_begun else "failed")

    async def stored_route(self, conversation: Conversation) -> ConversationRoute | None:
        """Return the valid decision that the store has of a conversation; raises ``StoreError``, ``TimeoutError``."""
        entry = dict(await self._ask(((), (conversation.id,)))).get(conversation.id)
        if entry is None or self._is_expired(entry, self.now()):
            return None
        return _valid_route(entry)

    def _by_name(self, conversation_id: str, key_id: str, now: datetime) -> Conversation:
        conversation = self._by_id.get(conversation_id)
        if conversation is None:
            conversation = self._created(conversation_id, key_id, now)
            conversation.may_be_stored = True
        elif self._is_silent(conversation.seen_at, now):
            conversation.route, conversation.may_be_stored = None, True
        return conversation

    async def _by_response(self, names: RequestNames, key_id: str, now: datetime) -> Conversation | None:
        if not names.previous_response:
            return None
        digest = _response_digest(names.previous_response, key_id)
        if digest not in self._positions:
            await self._load([digest], key_id, now)
        conversations = [position.conversation for position in self._positions.get(digest, [])]
        return next((item for item in conversations if not self._is_silent(item.seen_at, now)), None)

    def _repeated(self, names: RequestNames, history: History, now: datetime) -> Conversation | None:
        """Return the conversation whose unanswered request this one repeats."""
        earliest_at = now - timedelta(seconds=RETRY_S)
        fitting = [
            request
            for request in reversed(self._requests.get((history.request, history.system), []))
            # Who names conversations, names them in a repetition as well.
            if request.at > earliest_at
            and request.conversation.admits(names.separators)
            and not request.conversation.is_named
        ]
        # Of several users who open alike, the one whose request failed repeats it.
        for state in ("failed", "running", "answered") if names.is_retry else ("failed",):
            requests = [request for request in fitting if request.state == state]
            if requests and (state != "answered" or len(requests) == 1):
                return requests[0].conversation
        return None

    async def _continued(
        self, names: RequestNames, history: History, key_id: str, now: datetime
    ) -> Conversation | None:
        if not history.answers:
            return None
        last_answer = history.answers[0].digest
        # What another router has answered since tells conversations with the same history apart.
        if self.has_peers() or not self._fitting(last_answer, names, now):
            digests = [digest for answer in history.answers for digest in (answer.digest, answer.exchange) if digest]
            await self._load(digests, key_id, now)
        for index, answer in enumerate(history.answers):
            # An older answer, after which the history differs, must be that of one conversation alone.
            conversation = (
                self._unique(answer.digest, names, now)
                if index
                else self._likeliest(answer.digest, names, history, now)
            )
            if conversation is not None:
                if answer.digest in conversation.last_digests:
                    conversation.is_continued = True
                return conversation
            # Part of the history was removed or replaced.
            if (conversation := self._unique(answer.exchange, names, now)) is not None:
                return conversation
        return None

    async def _summarised(
        self, names: RequestNames, history: History, key_id: str, now: datetime
    ) -> Conversation | None:
        digests = history.summaries()
        if digests and not any(self._fitting(digest, names, now) for digest in digests):
            await self._load(digests, key_id, now)
        conversations = (self._unique(digest, names, now) for digest in digests)
        return next((conversation for conversation in conversations if conversation is not None), None)

    def _likeliest(self, digest: str, names: RequestNames, history: History, now: datetime) -> Conversation | None:
        """Return the conversation at this position that a request most likely continues."""

        def rank(position: _Position) -> tuple[bool, bool, bool, datetime]:
            conversation = position.conversation
            is_waiting = digest in conversation.last_digests and not conversation.is_continued
            # Who names conversations, names all requests of one.
            return not conversation.is_named, position.system == history.system, is_waiting, conversation.seen_at

        positions = self._fitting(digest, names, now)
        return max(positions, key=rank).conversation if positions else None

    def _unique(self, digest: str, names: RequestNames, now: datetime) -> Conversation | None:
        """Return the conversation at this position; None if there are several."""
        # By id: one that was removed from memory and read again is there twice.
        conversations = {
            position.conversation.id: position.conversation for position in self._fitting(digest, names, now)
        }
        return conversations.popitem()[1] if len(conversations) == 1 else None

    def _fitting(self, digest: str, names: RequestNames, now: datetime) -> list[_Position]:
        return [
            position
            for position in (self._positions.get(digest, ()) if digest else ())
            if not self._is_silent(position.conversation.seen_at, now)
            and position.conversation.admits(names.separators)
        ]

    def _created(self, conversation_id: str, key_id: str, now: datetime) -> Conversation:
        conversation = Conversation(conversation_id, key_id, now)
        self._by_id[conversation_id] = conversation
        if len(self._by_id) > MAX_CONVERSATIONS:
            self._by_id.popitem(last=False)
        return conversation

    def _add_position(self, digest: str, position: _Position) -> None:
        positions = self._positions.setdefault(digest, [])
        if position not in positions:
            positions.append(position)
            del positions[:-MAX_ALIKE]
        self._positions.move_to_end(digest)
        if len(self._positions) > MAX_POSITIONS:
            self._positions.popitem(last=False)

    def _note_request(self, conversation: Conversation, history: History, now: datetime) -> None:
        key = (history.request, history.system)
        requests = [request for request in self._requests.get(key, ()) if request.conversation is not conversation]
        self._requests[key] = [*requests[1 - MAX_ALIKE :], _Request(conversation, now)]
        self._requests.move_to_end(key)
        if len(self._requests) > MAX_REQUESTS:
            self._requests.popitem(last=False)

    def _set_state(self, conversation: Conversation, history: History, state: str) -> None:
        for request in self._requests.get((history.request, history.system), ()):
            if request.conversation is conversation:
                request.state = state

    async def _load(self, digests: Sequence[str], key_id: str, now: datetime) -> None:
        """Read the conversations with these positions from the store into memory; skip it if the store is away."""
        try:
            conversations = await self._ask((tuple(digests), ()))
        except (StoreError, TimeoutError):
            return
        for conversation_id, entry in conversations:
            if entry is None or self._is_expired(entry, now):
                continue
            conversation = self._by_id.get(conversation_id)
            if conversation is None:
                conversation = self._created(conversation_id, key_id, entry.last_at or now)
                conversation.last_digests, conversation.route = entry.last_digests, _valid_route(entry)
                conversation.may_be_stored = conversation.route is None
            elif entry.last_at is not None and entry.last_at > conversation.seen_at:
                # Another router has answered meanwhile.
                conversation.last_digests, conversation.is_continued = entry.last_digests, False
                conversation.seen_at = entry.last_at
                conversation.route = _valid_route(entry) or conversation.route
            for position in entry.positions:
                conversation.separators = position.separators
                self._add_position(position.digest, _Position(conversation, position.system))

    async def _ask(self, query: tuple[tuple[str, ...], tuple[str, ...]]) -> list[tuple[str, StoredConversation | None]]:
        """Look up digests or ids; raises ``TimeoutError``, at once while an earlier look-up has no answer."""
        if self._lookup.is_hung(LOOKUP_S):
            raise TimeoutError
        async with asyncio.timeout(LOOKUP_S):
            return await self._lookup.ask(query)

    def _read(
        self, queries: Sequence[tuple[tuple[str, ...], tuple[str, ...]]]
    ) -> list[list[tuple[str, StoredConversation | None]]]:
        """Answer lookups by digests or ids: for each one the conversations with their ids."""
        digests = {digest for query_digests, _ in queries for digest in query_digests}
        ids = {conversation_id for _, query_ids in queries for conversation_id in query_ids}
        with read_session(self.store) as session:
            conversations = find_conversations(session, digests=digests, ids=ids)
        return [
            list(_matching(conversations, set(query_digests), set(query_ids))) for query_digests, query_ids in queries
        ]

    def _is_expired(self, entry: StoredConversation, now: datetime) -> bool:
        times = [entry.last_at, entry.route.at if entry.route is not None else None]
        return self._is_silent(max(time for time in times if time is not None), now)

    def _is_silent(self, seen_at: datetime, now: datetime) -> bool:
        return now - seen_at > timedelta(seconds=self.expiry_s)


def request_names(
    headers: Mapping[str, str], body: Mapping[str, object], key_id: str, customers: CustomerHash
) -> RequestNames:
    """Read what a client states about the conversation; raises ``Refusal`` 400 for an invalid header."""
    name = headers.get(HEADER)
    if name is not None and not _is_name(name):
        raise Refusal(400, f"{HEADER} takes 1 to {ID_LIMIT} printable ASCII characters")
    metadata = body.get("metadata")
    metadata_name = metadata.get("conversation_id") if isinstance(metadata, Mapping) else None
    responses_name = body.get("conversation")
    if isinstance(responses_name, Mapping):
        responses_name = responses_name.get("id")
    previous = body.get("previous_response_id")
    values = [_as_text(body.get(field_name)) for field_name in SEPARATORS]
    # Anthropic's form names the user in its metadata.
    if isinstance(metadata, Mapping) and not values[0]:
        values[0] = _as_text(metadata.get("user_id"))
    # The digests are stored, so they are made of a keyed hash: names of users can be guessed.
    separators = [
        key_digest(key_id, field_name, customers(value)) for field_name, value in zip(SEPARATORS, values, strict=True)
    ]
    return RequestNames(
        name or _name_of(metadata_name) or _name_of(responses_name),
        previous if isinstance(previous, str) else "",
        (separators[0], separators[1], separators[2]),
        headers.get(RETRY_HEADER, "0") not in ("", "0"),
    )


def _matching(
    conversations: Mapping[str, StoredConversation], digests: set[str], ids: set[str]
) -> Iterator[tuple[str, StoredConversation | None]]:
    for conversation_id, entry in conversations.items():
        if conversation_id in ids or any(position.digest in digests for position in entry.positions):
            yield conversation_id, entry


def _valid_route(entry: StoredConversation) -> ConversationRoute | None:
    return None if entry.route is None or entry.route.is_failure else entry.route


def _is_name(name: str) -> bool:
    return 0 < len(name) <= ID_LIMIT and name.isascii() and name.isprintable()


def _name_of(value: object) -> str:
    """Return a value of the body as the name of a conversation; a value that is no valid name is replaced by a hash."""
    text = _as_text(value)
    return text if not text or _is_name(text) else f"id-{digest_of(text)[:32]}"


def _as_text(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return write_json(value, sort=True).decode()


def _response_digest(response_id: str, key_id: str) -> str:
    return key_digest(key_id, "response", response_id)
