"""Find the position of a request in its conversation, and chain model calls to branches.

A position is a digest over the messages so far. System prompts are left out of it, because agents write the time or the
task's state into them; they have a digest of their own. All functions depend on their arguments only, so that several
gateways, and a gateway after a restart, get the same results.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

from store.types import Message, opening_messages
from traced.core.fast_json import read_json, write_json

HEADER = "X-Traced-Conversation"
# Maximum number of characters of an id that a client chooses.
ID_LIMIT = 200
# The prefix of the ids of conversations that were received as spans. It keeps them apart from ids from the header.
OTLP_PREFIX = "otlp:"
SYSTEM_ROLES = ("system", "developer")
# The newest answers of a history that are looked up; older ones cannot be the place where a conversation goes on.
MAX_ANSWERS = 32
# A shorter exchange without tool calls ("yes", "Done."; bytes of JSON) occurs in many conversations.
MIN_EXCHANGE = 160
# A summary is recognised by its first words, wherever a sentence, a line or a tag of the message around it ends.
SUMMARY_WORDS = 12
SUMMARY_START = re.compile(r"(?:^|[^\w\s])\s*(?=[\w*#\[(])")
# The part of a message (characters) and the number of places in it where a summary is looked for.
SUMMARY_REACH = 4000
MAX_SUMMARY_STARTS = 100
DIGEST_SIZE = 16
# How the fields of a message end that has no tool calls and is no result of one, see ``_message_fields``.
NO_CALLS, NO_ID = b',[],""]', b',""]'

# The messages of a model call and its answer.
ModelCall = tuple[list[Message], Message]


@dataclass(frozen=True)
class AnsweredPosition:
    """The position after one assistant message of a request.

    Args:
        digest: Over all messages up to this answer.
        exchange: Over the answer and the message before it; "" if they are too short to identify a conversation. It
            holds where the older part of a history was removed or replaced by a summary.
    """

    digest: str
    exchange: str


@dataclass(frozen=True)
class History:
    """The positions of a request.

    Args:
        answers: The positions after the assistant's messages, the newest first, at most ``MAX_ANSWERS``.
        request: The digest over all messages of the request.
        system: The digest over the system prompts; "" without one.
        first_user: The text of the first user message, which may have the summary of an earlier history in it.
        salt: What every digest of this key begins with.
        last_message: The fields of the last message without system prompts.
    """

    answers: tuple[AnsweredPosition, ...]
    request: str
    system: str
    first_user: str
    salt: bytes
    last_message: bytes

    def position_after(self, answer: Message) -> AnsweredPosition:
        """Return the position after the model's ``answer`` to the request."""
        fields = write_json(_message_fields(answer))
        exchange = _exchange_digest(self.salt, self.last_message, fields)
        return AnsweredPosition(_digest(self.request.encode(), fields), exchange)

    def summaries_in(self, answer: Message, systems: Sequence[str]) -> list[str]:
        """Return the digests under which ``answer`` is recognised as the summary in a later request.

        Only an answer in the middle of a conversation can be its summary. ``systems`` are the digests of the system
        prompts of the conversation, because the request for a summary often has another one or none.
        """
        text = _text(answer.get("content"))
        if not self.answers or not isinstance(text, str):
            return []
        digests = [self._summary_digest(text, system) for system in systems]
        return [digest for digest in digests if digest]

    def summaries(self) -> list[str]:
        """Return the digests of what may be the beginning of a summary in the first user message."""
        text = self.first_user[:SUMMARY_REACH]
        places = islice(SUMMARY_START.finditer(text), MAX_SUMMARY_STARTS)
        digests = dict.fromkeys(self._summary_digest(text[place.end() :], self.system) for place in places)
        return [digest for digest in digests if digest]

    def _summary_digest(self, text: str, system: str) -> str:
        words = text.split(None, SUMMARY_WORDS)[:SUMMARY_WORDS]
        if len(words) < SUMMARY_WORDS:
            return ""
        # With the system prompt: what another agent gets as its task begins a conversation of that agent.
        return _digest(self.salt, b"summary", system.encode(), " ".join(words).encode(errors="surrogatepass"))


def history_of(messages: Sequence[Message], key_id: str) -> History:
    """Return the positions of a request of the API key ``key_id`` ("" without one)."""
    salt, digest = _start(key_id)
    answers: list[AnsweredPosition] = []
    last_message = b""
    system: list[bytes] = []
    first_user: Message | None = None
    for message in messages:
        fields = write_json(_message_fields(message))
        if message.get("role") in SYSTEM_ROLES:
            system.append(fields)
            continue
        digest = _digest(digest.encode(), fields)
        if message.get("role") == "assistant":
            exchange = _exchange_digest(salt, last_message, fields)
            answers.append(AnsweredPosition(digest, exchange))
        elif first_user is None and message.get("role") == "user":
            first_user = message
        last_message = fields
    system_digest = _digest(salt, *system) if system else ""
    first_text = _text(first_user.get("content")) if first_user is not None else ""
    newest_first = tuple(reversed(answers[-MAX_ANSWERS:]))
    return History(
        newest_first, digest, system_digest, first_text if isinstance(first_text, str) else "", salt, last_message
    )


def key_digest(key_id: str, kind: str, value: str) -> str:
    """Return the digest of a value that a client sent, such as its user name, under its API key; "" for no value."""
    return _digest(b"key", key_id.encode(), kind.encode(), value.encode(errors="surrogatepass")) if value else ""


def opening_id(messages: Sequence[Message], key_id: str) -> str:
    """Return an id derived from a conversation's opening, for records that name no conversation."""
    return "opening-" + digest_of([key_id, [_message_fields(message) for message in opening_messages(messages)]])[:32]


def qualified_id(name: str, key_id: str) -> str:
    """Return the id of the conversation that an API key calls ``name``; other keys may use the same name."""
    return f"{key_id}:{name}" if key_id else name


def client_name(conversation_id: str, key_id: str) -> str:
    """Return how the API key calls a conversation: the inverse of ``qualified_id``."""
    return conversation_id.removeprefix(f"{key_id}:") if key_id else conversation_id


def is_sampled(conversation_id: str, share: float) -> bool:
    """Return whether a conversation belongs to the recorded ``share`` (in 0-1) of all conversations."""
    if share >= 1:
        return True
    return int.from_bytes(hashlib.blake2b(conversation_id.encode(), digest_size=4).digest()) / 2**32 < share


def position(messages: Sequence[Message]) -> str:
    """Return the SHA-256 (hex) of a conversation's messages so far, which identifies the position; "" without any."""
    return digest_of([_message_fields(message) for message in messages]) if messages else ""


def position_without_system(messages: Sequence[Message]) -> str:
    """Return the position without the system prompts, which may change during a conversation."""
    return position([message for message in messages if message.get("role") not in SYSTEM_ROLES])


def continues(messages: Sequence[Message], earlier: Sequence[Message]) -> bool:
    """Return whether a conversation goes on from an earlier state of it; system prompts may have changed."""
    beginning = messages[: len(earlier)]
    return len(earlier) < len(messages) and position_without_system(beginning) == position_without_system(earlier)


def history_length(messages: Sequence[Message]) -> int:
    """Return the number of messages exchanged before a request, which are those up to the assistant's last message."""
    return next((count for count in range(len(messages), 0, -1) if messages[count - 1].get("role") == "assistant"), 0)


def turn_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the system prompts and the user's messages of a new turn; [] in the first turn and after tool calls."""
    length = history_length(messages)
    new_messages = [message for message in messages[length:] if message.get("role") == "user"]
    if not length or not new_messages:
        return []
    return [*(message for message in messages if message.get("role") in SYSTEM_ROLES), *new_messages]


def start_position(messages: Sequence[Message]) -> str:
    """Return the position of a conversation before a call with these messages."""
    return position(messages[: history_length(messages)])


def branches(calls: Sequence[ModelCall]) -> list[list[int]]:
    """Chain model calls to branches, each from a first call to a call that no other call continues.

    A call continues another call if its messages up to the assistant's last one are the other call's messages and
    answer; if there is no such call, system prompts may differ. Every call is in a branch; equal calls count once.

    Returns:
        The branches as lists of indices into ``calls``, in the order of their last calls.
    """
    ends: dict[str, int] = {}
    for index, (messages, answer) in enumerate(calls):
        ends[position([*messages, answer])] = index
    loose_ends = {position_without_system([*calls[index][0], calls[index][1]]): index for index in ends.values()}
    previous = {index: _previous(calls[index][0], ends, loose_ends) for index in ends.values()}
    continued = {predecessor for index, predecessor in previous.items() if predecessor != index}
    chains: list[list[int]] = []
    for index in ends.values():
        if index in continued:
            continue
        branch = [index]
        while (predecessor := previous[branch[0]]) is not None and predecessor not in branch:
            branch.insert(0, predecessor)
        chains.append(branch)
    return chains


def digest_of(value: object) -> str:
    """Return the SHA-256 (hex) of a JSON value."""
    return hashlib.sha256(write_json(value, sort=True)).hexdigest()


def _previous(messages: Sequence[Message], ends: Mapping[str, int], loose_ends: Mapping[str, int]) -> int | None:
    history = messages[: history_length(messages)]
    if not history:
        return None
    exact = ends.get(position(history))
    return loose_ends.get(position_without_system(history)) if exact is None else exact


@cache
def _start(key_id: str) -> tuple[bytes, str]:
    """Return the salt of an API key's digests, and the position before its first message."""
    salt = _digest(b"key", key_id.encode()).encode()
    return salt, _digest(salt, b"start")


def _digest(*parts: bytes) -> str:
    state = hashlib.blake2b(digest_size=DIGEST_SIZE)
    for part in parts:
        # The length is part of the input, so that no two lists of parts give the same input.
        state.update(b"%d:" % len(part))
        state.update(part)
    return state.hexdigest()


def _exchange_digest(salt: bytes, last_message: bytes, answer: bytes) -> str:
    # The ids of tool calls are random: a call or a result identifies a conversation however short it is.
    has_ids = not answer.endswith(NO_CALLS) or (bool(last_message) and not last_message.endswith(NO_ID))
    if not has_ids and len(last_message) + len(answer) < MIN_EXCHANGE:
        return ""
    return _digest(salt, b"exchange", last_message, answer)


def _message_fields(message: Message) -> list[Any]:
    # Only fields that every client sends back are used: some clients drop reasoning, names and refusals.
    calls = message.get("tool_calls") or []
    call_fields = [_call_fields(call) for call in calls] if isinstance(calls, list) else calls
    return [message.get("role"), _text(message.get("content")), call_fields, message.get("tool_call_id") or ""]


def _text(content: object) -> object:
    """Return the text of a message's content; parts that are no text, such as images, stay as they are."""
    if isinstance(content, str):
        return content.strip()
    if not isinstance(content, list):
        return content or ""
    texts = [text for text in _texts(content) if text is not None]
    if len(texts) == len(content):
        return "".join(texts).strip()
    return content


def _texts(parts: Sequence[object]) -> Iterator[str | None]:
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        yield text if isinstance(text, str) else None


def _call_fields(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        # The call is invalid; the engine refuses the request.
        return call
    return [call.get("id"), function.get("name"), _arguments(function.get("arguments"))]


def _arguments(arguments: object) -> object:
    """Return the arguments of a call in one form, because clients parse them and write them again."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.dumps(read_json(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
