"""Plain records of the router: its decisions, what was exchanged, feedback."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class ConversationRoute:
    """The model that a conversation was given, with the log-prob (nats) of each option; ``why`` if base by default.

    ``trial`` is the number of the promotion log's entry whose canary or shadow it takes part in.
    """

    id: str
    model: str
    logprobs: dict[str, float]
    seconds: float
    why: str
    at: datetime
    trial: int | None = None


@dataclass(frozen=True)
class Exchange:
    """One request to the router and its answer.

    ``body`` has "messages", "tools" and "answer" (the assistant's message, None where there is none); it is None once
    the exchange is settled. ``trajectory_id`` is the trajectory that it became part of. ``shadow_of`` is the exchange
    whose client got another answer than this one.
    """

    id: str
    conversation_id: str
    at: datetime
    model: str
    status: int
    seconds: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    key_id: str = ""
    response_id: str = ""
    detail: str = ""
    body: dict[str, Any] | None = field(default=None)
    trajectory_id: str | None = None
    shadow_of: str | None = None


@dataclass(frozen=True)
class Feedback:
    """What somebody thought of a conversation, or of the answer ``response_id`` in it; ``score`` is in [0, 1]."""

    conversation_id: str
    at: datetime
    response_id: str = ""
    score: float | None = None
    label: str = ""
    comment: str = ""
    who: str = ""


@dataclass(frozen=True)
class RouterKey:
    """Who may ask the router, how often a minute (0: no limit); ``hash`` is the key's SHA-256 (hex)."""

    id: str
    hash: str
    per_minute: int
    created_at: datetime
    revoked_at: datetime | None = None
