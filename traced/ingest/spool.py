"""Files of recorded exchanges on their way into the store, so that neither a kill nor an unreachable store loses one.

    DIR/spool/exchanges-PID-LIFE-N.jsonl    written and locked by one gateway; the recorder takes unlocked files

Invariants: ``write`` has handed the line to the kernel when it returns, so only a crash of the machine can lose it;
files are synchronized when they are handed over, every ``FLUSH_INTERVAL_S``. How it fails: on a full disk ``try_write``
counts the lost exchange and the request continues. Not covered: redaction, and storing (``traced.gateway.recorder``).
"""

import asyncio
import codecs
import errno
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from store.records import Exchange
from traced.core.fast_json import write_json

FLUSH_INTERVAL_S = 0.25
# The age of a file at which the store counts as unreachable.
LATE_S = 10.0
FILE_PATTERN = "exchanges-*.jsonl"
log = logging.getLogger(__name__)


@dataclass
class Spool:
    """The spool of one gateway; used from one event loop."""

    folder: Path
    written_count: int = 0
    lost_count: int = 0
    # Process ids repeat, in a container always.
    _life: str = field(default_factory=lambda: secrets.token_hex(4))
    _file: IO[bytes] | None = None
    _number: int = 0
    _full: str = ""

    async def run(self) -> None:
        """Hand files over to the recorder until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            await self.flush()

    async def flush(self) -> None:
        """Hand the current file over to the recorder."""
        file, self._file = self._file, None
        if file is None:
            return
        handover = asyncio.ensure_future(asyncio.to_thread(_hand_over, file))
        try:
            await asyncio.shield(handover)
        except asyncio.CancelledError:
            # Shutting down waits for the synchronization, else the last exchanges could be lost.
            await handover
            raise

    def try_write(self, line: bytes) -> None:
        """Write a line; never raises: a line that cannot be written is counted in ``lost_count``."""
        try:
            self.write(line)
        except OSError as error:
            self.count_lost(str(error))

    def write(self, line: bytes) -> None:
        """Write a line; raises ``OSError``, for senders that retry."""
        try:
            if self._file is None:
                self._file = self._open()
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            # An incomplete line must be the last of its file, so the next line gets a new one.
            if self._file is not None:
                self._file.close()
                self._file = None
            raise
        self.written_count += 1
        self._full = ""

    def count_lost(self, reason: str) -> None:
        """Count and log an exchange that could not be recorded."""
        self.lost_count += 1
        self._full = f"{self.lost_count} conversations could not be recorded: {reason}"
        log.error("%s", self._full)

    @property
    def problem(self) -> str:
        """Why exchanges are not recorded or not stored; "" if they are."""
        if self._full:
            return self._full
        late = [path for path in self.folder.glob(FILE_PATTERN) if _age(path) > LATE_S]
        return f"{len(late)} files wait in {self.folder}: the store does not accept them" if late else ""

    def _open(self) -> IO[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._number += 1
        name = f"exchanges-{os.getpid()}-{self._life}-{self._number}.jsonl"
        file = (self.folder / f".{name}").open("ab", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX)
        # The recorder must not see the file before it is locked.
        (self.folder / f".{name}").rename(self.folder / name)
        return file


def line_of(exchange: Exchange, raw: bytes, request: Mapping[str, Any], answer: bytes, *, streamed: bool) -> bytes:
    """The spool line of an exchange.

    Args:
        exchange: Everything but its body.
        raw: The bytes of the request.
        request: The parsed request.
        answer: The bytes of the answer.
        streamed: Whether the answer is a stream of server-sent events.
    """
    # Not asdict: its deep copies took a fifth of the time of a request.
    fields = vars(exchange) | {"at": exchange.at.isoformat(), "streamed": streamed}
    fields["answer"] = answer.decode("utf-8", "replace")
    head = write_json(fields)
    raw = raw.removeprefix(codecs.BOM_UTF8)
    # A client may send JSON in UTF-16 or UTF-32.
    if (not raw.isascii() and not _is_utf8(raw)) or b"\0" in raw:
        raw = write_json(request)
    # Between JSON values a line break is white space, and inside a string it is always escaped.
    return b'%b,"request":%b}\n' % (head[:-1], raw.replace(b"\n", b" ").replace(b"\r", b" "))


def complete_line(exchange: Exchange) -> bytes:
    """The spool line of an exchange that has a body."""
    fields = vars(exchange) | {"at": exchange.at.isoformat()}
    return write_json(fields) + b"\n"


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _hand_over(file: IO[bytes]) -> None:
    with file:
        os.fsync(file.fileno())


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
