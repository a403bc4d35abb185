"""The calls of a trace export on their way to being put together, in a scratch database on disk.

Invariants: adding the same call or score twice leaves one, the later; what was committed survives a kill. Traces are
keyed by a hash of their ids, and everything else in it has been redacted before. It takes about as much disk as the
export does, and is removed once the import is done. Fails: ``sqlite3.Error`` where the disk is full.
"""

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from store.content import digest
from store.types import Message, Tool
from traced.importers.errors import ImportFailed
from traced.importers.reading import storable

LONGEST_ERROR = 2000  # characters: the rest of it is a traceback
SCHEMA = """
CREATE TABLE IF NOT EXISTS calls (trace TEXT, id TEXT, at TEXT, body TEXT, PRIMARY KEY (trace, id));
CREATE TABLE IF NOT EXISTS scores
    (trace TEXT, call TEXT, name TEXT, id TEXT, value TEXT, PRIMARY KEY (trace, call, name, id));
"""


@dataclass(frozen=True)
class Call:
    """One call of a model. ``trace`` groups; ``task`` is the trace's name as it may be stored; ``at`` sorts."""

    trace: str
    task: str
    id: str
    at: str
    messages: list[Message]
    answer: Message | None
    tools: list[Tool]
    error: str = ""


@dataclass(frozen=True)
class Score:
    """What somebody said of a call, or of its trace where ``call`` is "" (see ``traces.kept``)."""

    trace: str
    call: str
    name: str
    id: str
    value: Any


class Spill:
    """The scratch database in ``path``; made where it does not exist."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> "Spill":
        self._database = sqlite3.connect(self._path)
        try:
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.executescript(SCHEMA)
        except sqlite3.DatabaseError as error:
            raise ImportFailed(f"{self._path}: {error}", hint="traced import --from-start") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, at: TracebackType | None
    ) -> None:
        self._database.close()
        if isinstance(raised, sqlite3.Error):
            raise ImportFailed(f"{self._path}: {raised}", hint="make room on the disk, then the same again") from raised

    def add(self, parts: Sequence[Call | Score]) -> None:
        """Keep calls and scores."""
        for part in parts:
            trace = digest(part.trace)[:32]
            if isinstance(part, Call):
                body = {key: value for key, value in vars(part).items() if key not in ("trace", "id", "at")}
                self._put("calls", trace, digest(part.id)[:32], storable(part.at), json.dumps(body))
            else:
                call = digest(part.call)[:32] if part.call else ""
                self._put("scores", trace, call, storable(part.name), digest(part.id)[:32], json.dumps(part.value))

    def commit(self) -> None:
        """Let what was added survive a kill."""
        self._database.commit()

    def traces(self, after: str) -> Iterator[tuple[str, list[Call], list[Score]]]:
        """Every trace with calls behind ``after``: its key, its calls in the order of their times, its scores."""
        found = self._next(after)
        while found is not None:
            rows = self._database.execute("SELECT id, at, body FROM calls WHERE trace = ? ORDER BY at, id", (found,))
            calls = [Call(trace=found, id=key, at=at, **json.loads(body)) for key, at, body in rows]
            said = self._database.execute("SELECT * FROM scores WHERE trace = ? ORDER BY call, name, id", (found,))
            yield found, calls, [Score(found, call, name, key, json.loads(value)) for _, call, name, key, value in said]
            found = self._next(found)

    def _put(self, table: str, *values: str) -> None:
        marks = ", ".join("?" * len(values))
        self._database.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", values)

    def _next(self, after: str) -> str | None:
        row = self._database.execute("SELECT min(trace) FROM calls WHERE trace > ?", (after,)).fetchone()
        return row[0] if row else None
