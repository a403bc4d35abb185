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

TURN_S = 0.25
LATE_S = 10.0  # a file that has waited for so long is told
FILES = "exchanges-*.jsonl"
log = logging.getLogger(__name__)


@dataclass
class Spool:
    """One router's spool. It belongs to one event loop."""

    folder: Path
    kept: int = 0
    lost: int = 0  # lines that could not be written
    _life: str = field(default_factory=lambda: secrets.token_hex(4))  # process ids come again, in a container always
    _file: IO[bytes] | None = None
    _number: int = 0
    _full: str = ""

    async def keep(self) -> None:
        """Hand files over until cancelled."""
        while True:
            await asyncio.sleep(TURN_S)
            await self.turn()

    async def turn(self) -> None:
        """Hand over what was written."""
        written, self._file = self._file, None
        if written is None:
            return
        handed = asyncio.ensure_future(asyncio.to_thread(_hand_over, written))
        try:
            await asyncio.shield(handed)
        except asyncio.CancelledError:
            await handed  # who ends the router waits for it
            raise

    def add(self, line: bytes) -> None:
        """Keep a line (``line_of``). Never raises: what cannot be kept is counted in ``lost``."""
        try:
            self.put(line)
        except OSError as error:
            self.lose(str(error))

    def put(self, line: bytes) -> None:
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
        self.kept += 1
        self._full = ""

    def lose(self, why: str) -> None:
        """Count an exchange that could not be kept."""
        self.lost += 1
        self._full = f"{self.lost} conversations were not recorded: {why}"
        log.error("%s", self._full)

    @property
    def trouble(self) -> str:
        """Why conversations are not recorded, or not in the store yet; "" where they are."""
        if self._full:
            return self._full
        late = [path for path in self.folder.glob(FILES) if _age(path) > LATE_S]
        return f"conversations wait in {self.folder} ({len(late)} files): the store does not take them" if late else ""

    def _open(self) -> IO[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._number += 1
        name = f"exchanges-{os.getpid()}-{self._life}-{self._number}.jsonl"
        opened = (self.folder / f".{name}").open("ab", buffering=0)
        fcntl.flock(opened, fcntl.LOCK_EX)
        (self.folder / f".{name}").rename(self.folder / name)  # seen by others only once it is locked
        return opened


def line_of(exchange: Exchange, raw: bytes, request: Mapping[str, Any], answer: bytes, *, streamed: bool) -> bytes:
    """The line of an exchange: its figures, the request (``raw`` as it came), and the answer's bytes as they came."""
    # not asdict: its copies took a fifth of a whole request
    told = vars(exchange) | {"at": exchange.at.isoformat(), "streamed": streamed}
    told["answer"] = answer.decode("utf-8", "replace")
    head = write_json(told)
    raw = raw.removeprefix(codecs.BOM_UTF8)
    if (not raw.isascii() and not _is_utf8(raw)) or b"\0" in raw:  # JSON may come in other encodings
        raw = write_json(request)
    # between JSON's values a line's end is space, and inside a text it is always escaped
    return b'%b,"request":%b}\n' % (head[:-1], raw.replace(b"\n", b" ").replace(b"\r", b" "))


def complete_line(exchange: Exchange) -> bytes:
    """The line of an exchange that has its body already."""
    told = vars(exchange) | {"at": exchange.at.isoformat()}
    return write_json(told) + b"\n"


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _hand_over(written: IO[bytes]) -> None:
    with written:
        os.fsync(written.fileno())


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
