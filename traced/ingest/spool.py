"""Exchanges on their way into the store: a line in a file first, so that neither a router that is killed nor a store
that is away for a while loses one.

    DIR/spool/exchanges-PID-LIFE-N.jsonl    written by one router under a lock; ``storing`` takes what is not locked

Invariants: ``add`` has handed the line to the kernel when it returns, so only the machine's own end can lose it (a file
is synchronised when it is handed over, every ``TURN_S``). How it fails: where the disk is full ``add`` counts what it
could not keep and the request goes on. Not covered: what is redacted (before ``add``), the way into the store
(``storing``).
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
LATE_S = 10.0  # a file that has waited for so long is told
FILE_PATTERN = "exchanges-*.jsonl"
log = logging.getLogger(__name__)


@dataclass
class Spool:
    """One router's spool. It belongs to one event loop."""

    folder: Path
    written_count: int = 0
    lost_count: int = 0  # lines that could not be written
    _life: str = field(default_factory=lambda: secrets.token_hex(4))  # process ids come again, in a container always
    _file: IO[bytes] | None = None
    _number: int = 0
    _full: str = ""

    async def run(self) -> None:
        """Hand files over until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            await self.flush()

    async def flush(self) -> None:
        """Hand over what was written."""
        file, self._file = self._file, None
        if file is None:
            return
        handover = asyncio.ensure_future(asyncio.to_thread(_hand_over, file))
        try:
            await asyncio.shield(handover)
        except asyncio.CancelledError:
            await handover  # who ends the router waits for it
            raise

    def try_write(self, line: bytes) -> None:
        """Keep a line (``line_of``). Never raises: what cannot be kept is counted in ``lost``."""
        try:
            self.write(line)
        except OSError as error:
            self.count_lost(str(error))

    def write(self, line: bytes) -> None:
        """Keep a line; raises ``OSError``, for those whose sender comes again."""
        try:
            if self._file is None:
                self._file = self._open()
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            if self._file is not None:  # the half line is its last: what comes next has a file of its own
                self._file.close()
                self._file = None
            raise
        self.written_count += 1
        self._full = ""

    def count_lost(self, reason: str) -> None:
        """Count an exchange that could not be kept."""
        self.lost_count += 1
        self._full = f"{self.lost_count} conversations were not recorded: {reason}"
        log.error("%s", self._full)

    @property
    def problem(self) -> str:
        """Why conversations are not recorded, or not in the store yet; "" where they are."""
        if self._full:
            return self._full
        late = [path for path in self.folder.glob(FILE_PATTERN) if _age(path) > LATE_S]
        return f"conversations wait in {self.folder} ({len(late)} files): the store does not take them" if late else ""

    def _open(self) -> IO[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._number += 1
        name = f"exchanges-{os.getpid()}-{self._life}-{self._number}.jsonl"
        file = (self.folder / f".{name}").open("ab", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX)
        (self.folder / f".{name}").rename(self.folder / name)  # seen by others only once it is locked
        return file


def line_of(exchange: Exchange, raw: bytes, request: Mapping[str, Any], answer: bytes, *, streamed: bool) -> bytes:
    """The line of an exchange: its figures, the request (``raw`` as it came), and the answer's bytes as they came."""
    # not asdict: its copies took a fifth of a whole request
    fields = vars(exchange) | {"at": exchange.at.isoformat(), "streamed": streamed}
    fields["answer"] = answer.decode("utf-8", "replace")
    head = write_json(fields)
    raw = raw.removeprefix(codecs.BOM_UTF8)
    if (not raw.isascii() and not _is_utf8(raw)) or b"\0" in raw:  # JSON may come in other encodings
        raw = write_json(request)
    # between JSON's values a line's end is space, and inside a text it is always escaped
    return b'%b,"request":%b}\n' % (head[:-1], raw.replace(b"\n", b" ").replace(b"\r", b" "))


def complete_line(exchange: Exchange) -> bytes:
    """The line of an exchange that has its body already."""
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
