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
from traced.ingest.importers.json_file import beginning
from traced.ingest.importers.reader import Resume

FOLDER = "imports"
TOLD = 20  # bad records whose messages are shown


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
        self._state, self.bad_file = folder / f"{name}.json", folder / f"{name}.bad.jsonl"
        self.scratch = folder / f"{name}.scratch"
        about = path.stat()
        head = hashlib.sha256(beginning(path)).hexdigest()
        self._same = {"options": options, "size": about.st_size, "changed_ns": about.st_mtime_ns, "head": head}
        self.counts = Counts()
        self.place: Resume | None = None
        self.last = ""  # the id of a trajectory that was stored by then
        self._kept = 0  # bytes of bad records that the state knows of

    def __enter__(self) -> "Ledger":
        self.bad_file.parent.mkdir(parents=True, exist_ok=True)
        self._aside = self.bad_file.open("ab")
        try:
            fcntl.flock(self._aside, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._aside.close()
            raise AlreadyRunning("the file is being imported already", hint="wait for the other import") from None
        self._resume()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, at: TracebackType | None
    ) -> None:
        if not self._aside.tell() and not self._state.exists():
            self.bad_file.unlink(missing_ok=True)
        self._aside.close()

    def forget(self) -> None:
        """Begin anew."""
        self.counts, self.place, self.last, self._kept = Counts(), None, "", 0
        self._cut(0)
        for path in (self._state, *self._scratch_files()):
            path.unlink(missing_ok=True)

    def leave_out(self, bad: BadRecord) -> None:
        """Keep a bad record aside."""
        self.counts.bad += 1
        if len(self.counts.told) < TOLD:
            self.counts.told.append(bad.message)
        told = {"file": str(bad.path), "record": bad.record, "line": bad.line, "column": bad.column}
        self._aside.write(json.dumps({**told, "reason": bad.cause, "raw": bad.raw}).encode() + b"\n")

    def commit(self, place: Resume) -> None:
        """Everything up to ``place`` has been stored."""
        self._sync()
        self._kept = self._aside.tell()
        state = {"same": self._same, "place": place, "last": self.last, "kept": self._kept}
        partial = self._state.with_suffix(".partial")
        with partial.open("w") as file:
            json.dump({**state, "counts": asdict(self.counts)}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._state)

    def finish(self) -> None:
        """Nothing is left to go on with."""
        self._sync()
        for path in (self._state, *self._scratch_files()):
            path.unlink(missing_ok=True)

    def _resume(self) -> None:
        try:
            state = json.loads(self._state.read_text())
            counts = Counts(**state["counts"])
        except (OSError, ValueError, TypeError, KeyError):
            self.forget()
            return
        if state["same"] != self._same or ("trace" in state["place"] and not self.scratch.exists()):
            self.forget()
            return
        self.counts, self.place, self.last, self._kept = counts, state["place"], state["last"], state["kept"]
        self._cut(self._kept)

    def _cut(self, size: int) -> None:
        self._aside.truncate(size)
        self._aside.seek(0, os.SEEK_END)  # truncating does not move there

    def _sync(self) -> None:
        self._aside.flush()
        os.fsync(self._aside.fileno())

    def _scratch_files(self) -> list[Path]:
        return [self.scratch.with_name(self.scratch.name + end) for end in ("", "-wal", "-shm")]
