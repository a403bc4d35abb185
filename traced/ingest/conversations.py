"""Which conversation a request belongs to, and where in it the request stands.

A conversation has the id that the client names in a header, or one made of its opening: the messages before the
assistant first answers a user, and whose key it is. Conversations without an id that open alike share a decision, which
is as it should be; which of their exchanges follow one another is told by ``position``: the SHA-256 of the messages up
to a point, in the form in which clients send them back.

Invariants: both depend on nothing but their arguments, so that two routers and a restart agree.

Which calls of a model follow one another: a conversation that goes on, and one that branches.

A call whose messages begin with what another one ended with follows it (``identity.position``). Invariants: every call
is in a branch, calls that say the same count once; branches come in the order of their ends, and what several branches
begin with is in each of them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from store.types import opening_messages
from traced.core.fast_json import write_json

HEADER = "X-Traced-Conversation"
ID_LIMIT = 200  # characters
OTLP_PREFIX = "otlp:"  # before the name of a conversation that spans told of


def conversation_id(client_id: str | None, messages: Sequence[Mapping[str, Any]], key_id: str) -> str:
    """The id of the conversation that ``messages`` belong to; ``named`` is what the client calls it, if anything."""
    if client_id:
        return f"{key_id}:{client_id}" if key_id else client_id
    return "opening-" + digest_of([key_id, [_message_fields(message) for message in opening_messages(messages)]])[:32]


def is_sampled(conversation_id: str, share: float) -> bool:
    """Whether a conversation is among the ``share`` of all that are recorded."""
    if share >= 1:
        return True
    return int.from_bytes(hashlib.blake2b(conversation_id.encode(), digest_size=4).digest()) / 2**32 < share


def position(messages: Sequence[Mapping[str, Any]]) -> str:
    """Where a conversation stands after these messages; "" at its beginning."""
    return digest_of([_message_fields(message) for message in messages]) if messages else ""


def history_length(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many of the messages had been exchanged before this request: up to the last one of the assistant."""
    return next((count for count in range(len(messages), 0, -1) if messages[count - 1].get("role") == "assistant"), 0)


def _message_fields(message: Mapping[str, Any]) -> list[Any]:
    """What of a message every client sends back."""
    calls = message.get("tool_calls") or []
    call_fields = [_call_fields(call) for call in calls] if isinstance(calls, list) else calls
    return [message.get("role"), message.get("content") or "", call_fields, message.get("tool_call_id") or ""]


def _call_fields(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call  # the engine will refuse it
    return [call.get("id"), function.get("name"), function.get("arguments")]


def digest_of(value: Any) -> str:
    """SHA-256 (hex) of a JSON value."""
    return hashlib.sha256(write_json(value, sort=True)).hexdigest()


ModelCall = tuple[list[dict[str, Any]], dict[str, Any]]  # the messages of a call, and its answer


def branches(calls: Sequence[ModelCall]) -> list[list[int]]:
    """Chains of calls (by index), each from a beginning to an end that nothing follows."""
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


def start_position(messages: Sequence[dict[str, Any]]) -> str:
    """Where the conversation stood before a call with these messages."""
    return position(messages[: history_length(messages)])
