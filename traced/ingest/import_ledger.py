"""How far an import has come, and the records that it left out: ``DATA/imports/NAME-KEY.json`` and ``.bad.jsonl``.

Invariants: the state is written after what it tells of has been stored, by one atomic rename, and is there only while
an import is unfinished; it counts for the same file (size, time of change, first bytes) and the same options only. Bad
records written after the state are cut off when the import goes on, so that each is there once. One process at a time
imports a file. A finished import leaves its bad records, if there are any, until the file is imported again.
Fails: ``AlreadyRunning``; OSError for a full disk.
"""

import fcntl
import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from traced.ingest.importers.errors import AlreadyRunning, BadRecord
from traced.ingest.importers.json_file import read_head
from traced.ingest.importers.reader import ResumePoint

FOLDER = "imports"
MAX_MESSAGES = 20  # bad records whose messages are shown


@dataclass
class Counts:
    """What an import has done so far. ``known``: trajectories that were stored before."""

    outcomes: dict[str, int] = field(default_factory=dict)
    added: int = 0
    known: int = 0
    replaced: int = 0
    good: int = 0
    passed: int = 0
    bad: int = 0
    told: list[str] = field(default_factory=list)  # the first messages of bad records


class Ledger:
    """The state of one file's import; a context, in which the file is this process's alone."""

    def __init__(self, data_dir: Path, path: Path, options: dict[str, Any]) -> None:
        key = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:12]
        folder = data_dir / FOLDER
        name = f"{path.name[:60]}-{key}"
        self._state_file, self.bad_file = folder / f"{name}.json", folder / f"{name}.bad.jsonl"
        self.scratch = folder / f"{name}.scratch"
        status = path.stat()
        head = hashlib.sha256(read_head(path)).hexdigest()
        self._identity = {"options": options, "size": status.st_size, "changed_ns": status.st_mtime_ns, "head": head}
        self.counts = Counts()
        self.resume_point: ResumePoint | None = None
        self.last_id = ""  # the id of a trajectory that was stored by then
        self._bad_bytes = 0  # bytes of bad records that the state knows of

    def __enter__(self) -> "Ledger":
        self.bad_file.parent.mkdir(parents=True, exist_ok=True)
        self._bad_records = self.bad_file.open("ab")
        try:
            fcntl.flock(self._bad_records, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._bad_records.close()
            raise AlreadyRunning("the file is being imported already", hint="wait for the other import") from None
        self._resume()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, at: TracebackType | None
    ) -> None:
        if not self._bad_records.tell() and not self._state_file.exists():
            self.bad_file.unlink(missing_ok=True)
        self._bad_records.close()

    def forget(self) -> None:
        """Begin anew."""
        self.counts, self.resume_point, self.last_id, self._bad_bytes = Counts(), None, "", 0
        self._truncate(0)
        for path in (self._state_file, *self._scratch_files()):
            path.unlink(missing_ok=True)

    def leave_out(self, bad: BadRecord) -> None:
        """Keep a bad record aside."""
        self.counts.bad += 1
        if len(self.counts.told) < MAX_MESSAGES:
            self.counts.told.append(bad.message)
        location = {"file": str(bad.path), "record": bad.record, "line": bad.line, "column": bad.column}
        self._bad_records.write(json.dumps({**location, "reason": bad.cause, "raw": bad.raw}).encode() + b"\n")

    def commit(self, place: ResumePoint) -> None:
        """Everything up to ``place`` has been stored."""
        self._sync()
        self._bad_bytes = self._bad_records.tell()
        state = {"same": self._identity, "place": place, "last": self.last_id, "kept": self._bad_bytes}
        partial = self._state_file.with_suffix(".partial")
        with partial.open("w") as file:
            json.dump({**state, "counts": asdict(self.counts)}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._state_file)

    def finish(self) -> None:
        """Nothing is left to go on with."""
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
        self._truncate(self._bad_bytes)

    def _truncate(self, size: int) -> None:
        self._bad_records.truncate(size)
        self._bad_records.seek(0, os.SEEK_END)  # truncating does not move there

    def _sync(self) -> None:
        self._bad_records.flush()
        os.fsync(self._bad_records.fileno())

    def _scratch_files(self) -> list[Path]:
        return [self.scratch.with_name(self.scratch.name + end) for end in ("", "-wal", "-shm")]
