"""Exchanges on their way into the store: a line in a file first, then rows, so that neither a router that is killed nor
a store that is away for a while loses one.

    DIR/spool/exchanges-PID-N.jsonl    written by one router, open under a lock; taken over once that is free
    DIR/spool/damaged.jsonl            lines that cannot be read, kept aside

Invariants: ``add`` has handed the line to the kernel when it returns, so only the machine's own end can lose it (it is
synchronised every ``SYNC_S``); a file is deleted after the transaction that has its rows; rows have ids, so a file
that is read twice adds nothing. How it fails: where the disk is full ``add`` counts what it could not keep and the
request goes on. Not covered: what is redacted (before ``add``), and what becomes of the rows (``settling``).
"""

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from sqlalchemy import Engine

from store.database import session
from store.errors import StoreError
from store.repositories.serving import save_exchanges
from store.serving_records import Exchange
from traced.serving.gateway.reading import exchange_of

LOOK_S = 0.25
SYNC_S = 1.0
BATCH = 500
DAMAGED = "damaged.jsonl"
log = logging.getLogger(__name__)


@dataclass
class Spool:
    """One router's spool; ``start`` begins the thread that brings the lines into the store."""

    folder: Path
    store: Engine
    kept: int = 0
    lost: int = 0  # lines that could not be written
    stored: int = 0
    trouble: str = ""
    tidy: Callable[[], object] = lambda: None  # called between two looks, on the spool's thread
    _file: IO[bytes] | None = None
    _number: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; what earlier routers left behind comes first."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._thread = threading.Thread(target=self._keep, name="spool", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Bring what is there into the store and end; what the store does not take stays for the next router."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._store_all()

    def add(self, line: dict[str, Any]) -> None:
        """Keep a line (JSON values). Never raises: what cannot be kept is counted in ``lost``."""
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            try:
                if self._file is None:
                    self._file = self._open()
                self._file.write(text)
                self.kept += 1
            except OSError as error:
                self.lost += 1
                self.trouble = f"conversations are not recorded: {error}"
                log.error("%s", self.trouble)

    def _open(self) -> IO[bytes]:
        self._number += 1
        name = f"exchanges-{os.getpid()}-{self._number}.jsonl"
        opened = (self.folder / f".{name}").open("ab", buffering=0)
        fcntl.flock(opened, fcntl.LOCK_EX)
        (self.folder / f".{name}").rename(self.folder / name)  # seen by others only once it is locked
        return opened

    def _keep(self) -> None:
        synced = time.monotonic()
        while not self._over.wait(LOOK_S):
            if time.monotonic() - synced >= SYNC_S:
                synced = time.monotonic()
                with self._lock:
                    if self._file is not None:
                        os.fsync(self._file.fileno())
            self._store_all()
            try:
                self.tidy()
            except Exception:
                log.exception("tidying after conversations failed; tried again")

    def _store_all(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
        try:
            for path in sorted(self.folder.glob("exchanges-*.jsonl")):
                self._store_file(path)
        except (OSError, StoreError) as error:
            if self.trouble != str(error):
                log.warning("conversations wait in %s: %s", self.folder, error)
            self.trouble = str(error)
        else:
            self.trouble = ""

    def _store_file(self, path: Path) -> None:
        with path.open("rb") as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # another router writes it
            found: list[Exchange] = []
            for line in opened:
                found += self._read(line)
                if len(found) >= BATCH:
                    self._save(found)
                    found = []
            self._save(found)
            path.unlink(missing_ok=True)

    def _read(self, line: bytes) -> Iterator[Exchange]:
        try:
            yield exchange_of(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            log.warning("a line of the spool is damaged (%s); kept in %s", error, self.folder / DAMAGED)
            with (self.folder / DAMAGED).open("ab") as aside:
                aside.write(line.rstrip(b"\n") + b"\n")

    def _save(self, exchanges: list[Exchange]) -> None:
        if exchanges:
            with session(self.store) as opened:
                save_exchanges(opened, exchanges)
            self.stored += len(exchanges)


def as_line(exchange: Exchange, request: dict[str, Any], answer: bytes, *, streamed: bool) -> dict[str, Any]:
    """The line of an exchange: its figures, the request, and the answer's bytes as they came."""
    line = asdict(exchange) | {"at": exchange.at.isoformat(), "request": request, "streamed": streamed}
    return line | {"answer": answer.decode("utf-8", "replace")}
