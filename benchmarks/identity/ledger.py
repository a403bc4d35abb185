"""What the simulation knows to be true: conversations, the requests of each, and what the router answered to them.

Messages are chat messages, whatever form the client sends. Keys of a message that begin with "_" belong to a client
and are not part of its content.
"""

import json
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

Message = dict[str, Any]
# A client's patience. A router that stops may leave a request without an answer until it ends.
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Conversation:
    """A true conversation: one dialogue of one client, with its edits, retries and compactions.

    Args:
        key: The name of the API key.
        id_form: How the client sends an id: "header", "metadata", "conversation", "previous" (the id of the previous
            response), or "" for none.
        name: The id that it sends, "" where there is none.
        separators: What the client states about its user and its cache: fields of each request.
    """

    number: int
    key: str
    persona: str
    id_form: str
    name: str
    separators: dict[str, str]

    @property
    def sends_id(self) -> bool:
        """Return whether the client sends an id of some form."""
        return self.id_form != ""


@dataclass(frozen=True)
class Attempt:
    """An HTTP response of the router: its status and the headers of identity."""

    status: int
    exchange_id: str
    conversation_name: str
    model: str


@dataclass
class Request:
    """A request as the client sees it; its library may have sent it several times.

    Args:
        messages: As sent, system prompt first where there is one.
        is_follow_up: Whether it continues an answered request of its conversation.
        client: The name of the client library.
        script: The fault that the engine is to show; ``timeout_s`` is the client's patience.
        stop_after: The number of chunks of a stream after which the client leaves.
        answer: The answer as the router sent it, None if the client got none or not all of it.
    """

    conversation: Conversation
    messages: list[Message]
    is_follow_up: bool
    client: str = ""
    tools: list[dict[str, Any]] = field(default_factory=list)
    temperature: float = 0.0
    script: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S
    stop_after: int | None = None
    attempts: list[Attempt] = field(default_factory=list)
    answer: Message | None = None
    response_id: str = ""
    sent_at: float = field(default_factory=monotonic)
    ended_at: float = 0.0

    @property
    def answered_attempt(self) -> Attempt | None:
        """Return the response that the client got, None if it got none or stopped it."""
        return self.attempts[-1] if self.answer is not None else None


@dataclass
class Ledger:
    """All true conversations and their requests, in order of sending."""

    conversations: list[Conversation] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)

    def open(self, key: str, persona: str, id_form: str, separators: dict[str, str]) -> Conversation:
        """Add a true conversation; clients of different keys choose the same names."""
        self.names[key] = self.names.get(key, 0) + 1
        name = f"chat-{self.names[key]}" if id_form not in ("", "previous") else ""
        conversation = Conversation(len(self.conversations), key, persona, id_form, name, separators)
        self.conversations.append(conversation)
        return conversation


# The request on whose behalf the running task uses a client library.
CURRENT: ContextVar[Request] = ContextVar("CURRENT")


async def note_response(response: Any) -> None:
    """Add an HTTP response to the current request: the response hook of every client library's HTTP client."""
    headers = response.headers
    CURRENT.get().attempts.append(
        Attempt(
            response.status_code,
            headers.get("X-Traced-Request", ""),
            headers.get("X-Traced-Conversation", ""),
            headers.get("X-Traced-Model", ""),
        )
    )


def text_of(message: Message) -> str:
    """Return the text of a message whose content is text, a list of parts, or nothing."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


def fingerprint(message: Message) -> str:
    """Return what a message says, the same for every way to write it: outer white space, parts, JSON of arguments."""
    calls = [
        (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    parts = [message["role"], text_of(message).strip(), calls, message.get("tool_call_id", "")]
    return json.dumps(parts, sort_keys=True)


def history_of(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the fingerprints of the messages other than system prompts."""
    return tuple(fingerprint(message) for message in messages if message["role"] != "system")


def system_of(messages: Sequence[Message]) -> str:
    """Return the system prompts of a request."""
    return "\n".join(text_of(message) for message in messages if message["role"] == "system")
