"""Plain types of the running service: what the repositories of ``store.service_tables`` take and give back.

Invariants: every time is timezone-aware and comes from the caller.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class Event:
    """Something a listener may want to know; ``seq`` orders events and is 0 until the store has given one."""

    at: datetime
    kind: str
    subject: str = ""
    cycle_id: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    seq: int = 0


@dataclass(frozen=True)
class AuditEntry:
    """What somebody decided; ``role`` is "operator", "read-only" or "local" (the socket's own user)."""

    at: datetime
    who: str
    role: str
    action: str
    subject: str
    reason: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    seq: int = 0


@dataclass(frozen=True)
class TargetStanding:
    """Whether cycles of a target may begin, and when the last one did and why.

    ``asked_for`` is why another one was asked for that has not begun, ``cannot_begin`` what keeps one that is due from
    beginning; "" where there is none.
    """

    name: str
    paused_at: datetime | None = None
    paused_by: str = ""
    last_started_at: datetime | None = None
    last_cause: str = ""
    asked_for: str = ""
    cannot_begin: str = ""
