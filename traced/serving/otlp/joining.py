"""Spans and the log records that belong to them, which come in any order and in different requests.

Older senders tell a call's messages as log records (``gen_ai.user.message`` ... ``gen_ai.choice``), newer ones may tell
them in one record; a record names its span. What has not found its partner after ``wait_s`` is given up, and so is the
oldest where more than ``most_bytes`` would wait.

Invariants: a record that comes twice counts once; what comes for a span that is complete already is known and left.
Used by one thread at a time. Not covered: a router that is killed loses what waits (its senders were told that it was
taken), and partners that are sent to different routers never meet.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from traced.serving.otlp.wire import Event, Record, Span

Name = tuple[str, str, str]  # whose key, trace, span
MOST_BYTES = 32 * 2**20
REMEMBERED = 20_000  # complete spans


@dataclass
class Waiting:
    """What there is of one call."""

    since: float
    span: Span | None = None
    events: list[Event] = field(default_factory=list)
    size: int = 0


@dataclass
class Joins:
    """Calls that wait for their span or for their messages."""

    wait_s: float
    clock: Callable[[], float]
    most_bytes: int = MOST_BYTES
    _waiting: OrderedDict[Name, Waiting] = field(default_factory=OrderedDict)
    _complete: OrderedDict[Name, None] = field(default_factory=OrderedDict)
    _size: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def events(self, name: Name) -> list[Event]:
        """What has come for a span."""
        found = self._waiting.get(name)
        return found.events if found else []

    def is_complete(self, name: Name) -> bool:
        """Whether this span was taken already."""
        return name in self._complete

    def hold(self, name: Name, span: Span) -> None:
        """Let a span wait for its messages."""
        one = self._one(name)
        if one.span is None:
            one.span = span
            self._grow(one, span.size)

    def add(self, name: Name, record: Record) -> Span | None:
        """Let a record wait with the others; returns their span if it is there."""
        one = self._one(name)
        if record.event not in one.events:
            one.events.append(record.event)
            self._grow(one, record.size)
        return one.span

    def complete(self, name: Name) -> None:
        """A span has all that it needs, and is stored."""
        self._drop(name)
        self._complete[name] = None
        if len(self._complete) > REMEMBERED:
            self._complete.popitem(last=False)

    def given_up(self, *, all_of_them: bool = False) -> Iterator[tuple[Name, Waiting]]:
        """What waits no longer, the oldest first."""
        while self._waiting:
            name, one = next(iter(self._waiting.items()))
            late = self.clock() - one.since >= self.wait_s
            if not (late or all_of_them or self._size > self.most_bytes):
                return
            self._drop(name)
            yield name, one

    def _one(self, name: Name) -> Waiting:
        return self._waiting.setdefault(name, Waiting(self.clock()))

    def _grow(self, one: Waiting, size: int) -> None:
        one.size += size
        self._size += size

    def _drop(self, name: Name) -> None:
        one = self._waiting.pop(name, None)
        if one is not None:
            self._size -= one.size
