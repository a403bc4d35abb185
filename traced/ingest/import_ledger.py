"""Keep the progress and the bad records of an import: ``DATA/imports/NAME-KEY.json`` and ``NAME-KEY.bad.jsonl``.

Invariants: the progress is written by one atomic rename after the trajectories that it counts have been stored, and
exists only while an import is unfinished. It is valid only for the same file (size, modification time, first bytes) and
the same options. Errors: ``AlreadyRunning``; OSError for a full disk.
"""

import fcntl
import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from traced.core.files import flush, make_folder
from traced.ingest.importers.errors import AlreadyRunning, BadRecord
from traced.ingest.importers.json_file import read_head
from traced.ingest.importers.reader import ResumePoint

FOLDER = "imports"
# Of the scratch files: an import that an earlier version with other tables has begun starts again from the start.
LAYOUT = 2
# Maximum number of bad records whose messages are printed.
MAX_MESSAGES = 20
# Maximum number of different outcomes that could not be read and are printed.
MAX_UNREAD_VALUES = 5


@dataclass
class Counts:
    """The counts of an import; they are stored as JSON in its progress file.

    ``outcomes`` counts trajectories by outcome. ``added``, ``known`` (stored before) and ``replaced`` (stored before,
    with another outcome now) count trajectories; ``completed`` the known ones that got other tools or prompts,
    ``in_use`` those that did not because a cycle has used them, ``shorter`` those that were left out because a longer
    version of their conversation continues them. ``good`` (valid, with a model call), ``passed`` (valid, without one)
    and ``bad`` count records. ``unread`` counts the trajectories whose outcome could not be read, and ``unread_values``
    has the first few different fields and values of them with their counts. ``told`` has the messages of the first bad
    records.
    """

    outcomes: dict[str, int] = field(default_factory=dict)
    added: int = 0
    known: int = 0
    replaced: int = 0
    completed: int = 0
    in_use: int = 0
    shorter: int = 0
    good: int = 0
    passed: int = 0
    bad: int = 0
    told: list[str] = field(default_factory=list)
    unread: int = 0
    unread_values: dict[str, int] = field(default_factory=dict)


class Ledger:
    """The progress of one file's import; as a context manager it locks the file against other imports.

    Entering the context restores the progress of an unfinished import, or raises ``AlreadyRunning``.
    """

    def __init__(self, data_dir: Path, path: Path, options: dict[str, Any]) -> None:
        key = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:12]
        folder = data_dir / FOLDER
        name = f"{path.name[:60]}-{key}"
        self._state_file, self.bad_file = folder / f"{name}.json", folder / f"{name}.bad.jsonl"
        self.scratch = folder / f"{name}.scratch"
        self.ids_file = folder / f"{name}.ids"
        status = path.stat()
        head = hashlib.sha256(read_head(path)).hexdigest()
        file_state = {"size": status.st_size, "changed_ns": status.st_mtime_ns, "head": head}
        self._identity = {"layout": LAYOUT, "options": options, **file_state}
        self.counts = Counts()
        self.resume_point: ResumePoint | None = None
        # The id of the last stored trajectory. If the store lacks it, the progress is invalid.
        self.last_id = ""
        # The size of the file of bad records in bytes at the last commit.
        self._bad_bytes = 0

    def __enter__(self) -> "Ledger":
        make_folder(self.bad_file.parent)
        self._bad_records = self.bad_file.open("ab")
        try:
            fcntl.flock(self._bad_records, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._bad_records.close()
            raise AlreadyRunning("another process is importing this file", hint="wait for the other import") from None
        self._resume()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._bad_records.tell() and not self._state_file.exists():
            self.bad_file.unlink(missing_ok=True)
        self._bad_records.close()

    def forget(self) -> None:
        """Discard the progress and the bad records."""
        self.counts, self.resume_point, self.last_id, self._bad_bytes = Counts(), None, "", 0
        self._truncate(0)
        for path in (self._state_file, *self._scratch_files()):
            path.unlink(missing_ok=True)

    def leave_out(self, bad: BadRecord) -> None:
        """Count a bad record and write it to the file of bad records."""
        self.counts.bad += 1
        if len(self.counts.told) < MAX_MESSAGES:
            self.counts.told.append(bad.message)
        location = {"file": str(bad.path), "record": bad.record, "line": bad.line, "column": bad.column}
        self._bad_records.write(json.dumps({**location, "reason": bad.cause, "raw": bad.raw}).encode() + b"\n")

    def count_unread(self, text: str) -> None:
        """Count a trajectory whose outcome could not be read; the text says its field and value."""
        values = self.counts.unread_values
        self.counts.unread += 1
        if text in values or len(values) < MAX_UNREAD_VALUES:
            values[text] = values.get(text, 0) + 1

    def commit(self, resume_point: ResumePoint) -> None:
        """Write to the progress file that everything before the resume point has been stored."""
        self._sync()
        self._bad_bytes = self._bad_records.tell()
        state = {"same": self._identity, "place": resume_point, "last": self.last_id, "kept": self._bad_bytes}
        partial = self._state_file.with_suffix(".partial")
        with partial.open("w") as file:
            json.dump({**state, "counts": asdict(self.counts)}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._state_file)

    def finish(self) -> None:
        """Delete the progress and scratch files; the bad records stay until the file is imported again."""
        self._sync()
        for path in (self._state_file, *self._scratch_files()):
            path.unlink(missing_ok=True)

    def _resume(self) -> None:
        try:
            state = json.loads(self._state_file.read_text())
            counts = Counts(**state["counts"])
        except (OSError, ValueError, TypeError, KeyError):
            self.forget()
            return
        if state["same"] != self._identity or ("trace" in state["place"] and not self.scratch.exists()):
            self.forget()
            return
        self.counts, self.resume_point, self.last_id, self._bad_bytes = (
            counts,
            state["place"],
            state["last"],
            state["kept"],
        )
        # Bad records after the last commit will be read again; truncating the file avoids writing them twice.
        self._truncate(self._bad_bytes)

    def _truncate(self, size: int) -> None:
        self._bad_records.truncate(size)
        # Truncating does not move the file position.
        self._bad_records.seek(0, os.SEEK_END)

    def _sync(self) -> None:
        self._bad_records.flush()
        os.fsync(self._bad_records.fileno())
        flush(self.bad_file.parent)

    def _scratch_files(self) -> list[Path]:
        ends = ("", "-wal", "-shm")
        return [file.with_name(file.name + end) for file in (self.scratch, self.ids_file) for end in ends]
