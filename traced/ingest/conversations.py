"""Find the conversation of a request and the request's position in it, and chain model calls to branches.

A conversation has the id that the client sends in a header, else an id derived from its opening: the messages before
the assistant first answers a user, and the API key. All functions depend on their arguments only, so that several
gateways, and a gateway after a restart, get the same results.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from store.types import Message, opening_messages
from traced.core.fast_json import write_json

HEADER = "X-Traced-Conversation"
# Maximum number of characters of an id that a client chooses.
ID_LIMIT = 200
# The prefix of the ids of conversations that were received as spans. It keeps them apart from ids from the header.
OTLP_PREFIX = "otlp:"

# The messages of a model call and its answer.
ModelCall = tuple[list[Message], Message]


def conversation_id(client_id: str | None, messages: Sequence[Message], key_id: str) -> str:
    """Return the id of the conversation that ``messages`` belong to.

    Args:
        client_id: The id that the client sent, if any.
        messages: The messages of the request.
        key_id: The id of the API key, "" without one.
    """
    if client_id:
        return f"{key_id}:{client_id}" if key_id else client_id
    # Conversations with the same opening share an id, and therefore a routing decision; branches() separates them.
    return "opening-" + digest_of([key_id, [_message_fields(message) for message in opening_messages(messages)]])[:32]


def is_sampled(conversation_id: str, share: float) -> bool:
    """Return whether a conversation belongs to the recorded ``share`` (in 0-1) of all conversations."""
    if share >= 1:
        return True
    return int.from_bytes(hashlib.blake2b(conversation_id.encode(), digest_size=4).digest()) / 2**32 < share


def position(messages: Sequence[Message]) -> str:
    """Return the SHA-256 (hex) of a conversation's messages so far, which identifies the position; "" without any."""
    return digest_of([_message_fields(message) for message in messages]) if messages else ""


def history_length(messages: Sequence[Message]) -> int:
    """Return the number of messages exchanged before a request, which are those up to the assistant's last message."""
    return next((count for count in range(len(messages), 0, -1) if messages[count - 1].get("role") == "assistant"), 0)


def start_position(messages: Sequence[Message]) -> str:
    """Return the position of a conversation before a call with these messages."""
    return position(messages[: history_length(messages)])


def branches(calls: Sequence[ModelCall]) -> list[list[int]]:
    """Chain model calls to branches, each from a first call to a call that no other call continues.

    A call continues another call if its messages up to the assistant's last one are the other call's messages and
    answer. Every call is in a branch; equal calls count once.

    Returns:
        The branches as lists of indices into ``calls``, in the order of their last calls.
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
    """Return the SHA-256 (hex) of a JSON value."""
    return hashlib.sha256(write_json(value, sort=True)).hexdigest()


def _message_fields(message: Message) -> list[Any]:
    # Only fields that every client sends back are used: some clients drop reasoning, names and refusals.
    calls = message.get("tool_calls") or []
    call_fields = [_call_fields(call) for call in calls] if isinstance(calls, list) else calls
    return [message.get("role"), message.get("content") or "", call_fields, message.get("tool_call_id") or ""]


def _call_fields(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        # The call is invalid; the engine refuses the request.
        return call
    return [call.get("id"), function.get("name"), function.get("arguments")]
