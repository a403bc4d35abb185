"""Which conversation a request belongs to, its position in it, and how model calls form branches.

A conversation has the id that the client sends in a header, else one made of its opening: the messages before the
assistant first answers a user, and the API key. All functions depend on their arguments alone, so that two routers, and
a router after its restart, agree.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from store.types import Message, opening_messages
from traced.core.fast_json import write_json

HEADER = "X-Traced-Conversation"
# Characters of an id that a client chooses.
ID_LIMIT = 200
# Begins the ids of conversations that were received as spans: they never collide with ids from the header.
OTLP_PREFIX = "otlp:"

# The messages of a model call, and its answer.
ModelCall = tuple[list[Message], Message]


def conversation_id(client_id: str | None, messages: Sequence[Message], key_id: str) -> str:
    """The id of the conversation that ``messages`` belong to; ``client_id`` is the id that the client sent."""
    if client_id:
        return f"{key_id}:{client_id}" if key_id else client_id
    # Conversations that open alike share an id, and so one routing decision; position() tells them apart later.
    return "opening-" + digest_of([key_id, [_message_fields(message) for message in opening_messages(messages)]])[:32]


def is_sampled(conversation_id: str, share: float) -> bool:
    """Whether a conversation is in the recorded share of all conversations."""
    if share >= 1:
        return True
    return int.from_bytes(hashlib.blake2b(conversation_id.encode(), digest_size=4).digest()) / 2**32 < share


def position(messages: Sequence[Message]) -> str:
    """The SHA-256 (hex) of a conversation up to here; "" at its beginning."""
    return digest_of([_message_fields(message) for message in messages]) if messages else ""


def history_length(messages: Sequence[Message]) -> int:
    """The number of messages that were exchanged before a request: up to the last one of the assistant."""
    return next((count for count in range(len(messages), 0, -1) if messages[count - 1].get("role") == "assistant"), 0)


def start_position(messages: Sequence[Message]) -> str:
    """The position of a conversation before a call with these messages."""
    return position(messages[: history_length(messages)])


def branches(calls: Sequence[ModelCall]) -> list[list[int]]:
    """Chains of calls by index, each from its first call to one that no other call continues.

    A call continues another one if its messages begin with what the other one ended with. Every call is in a chain,
    equal calls count once, and chains come in the order of their last calls.
    """
    ends: dict[str, int] = {}
    starts: list[str] = []
    for index, (messages, answer) in enumerate(calls):
        starts.append(start_position(messages))
        ends[position([*messages, answer])] = index
    continued = set(starts)
    chains: list[list[int]] = []
    for end, index in ends.items():
        if end in continued:
            continue
        branch = [index]
        while (previous := ends.get(starts[branch[0]])) is not None and previous not in branch:
            branch.insert(0, previous)
        chains.append(branch)
    return chains


def digest_of(value: object) -> str:
    """SHA-256 (hex) of a JSON value."""
    return hashlib.sha256(write_json(value, sort=True)).hexdigest()


def _message_fields(message: Message) -> list[Any]:
    # Only what every client sends back: some drop reasoning, names and refusals.
    calls = message.get("tool_calls") or []
    call_fields = [_call_fields(call) for call in calls] if isinstance(calls, list) else calls
    return [message.get("role"), message.get("content") or "", call_fields, message.get("tool_call_id") or ""]


def _call_fields(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        # Invalid; the engine refuses the request.
        return call
    return [call.get("id"), function.get("name"), function.get("arguments")]
