"""Write recorded exchanges to files, so that a killed gateway or an unreachable store loses none of them.

    DIR/spool/exchanges-PID-LIFE-N.jsonl    written and locked by one gateway; the recorder takes unlocked files

Invariants: when ``write`` returns, the kernel has the line, so only a crash of the machine can lose it; after ``sync``
it survives that as well. A file is synced at the latest when it is handed over to the recorder, every
``FLUSH_INTERVAL_S`` seconds. Errors: on a full disk ``Spool.try_write`` counts the lost exchange (``losses``) and the
request continues. Not covered: redaction, and storing (``traced.gateway.recorder``).
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
from traced.core.files import flush, make_folder
from traced.ingest.losses import EXCHANGES, LossLedger

FLUSH_INTERVAL_S = 0.25
# The age of a file in seconds from which the store counts as unreachable.
LATE_S = 10.0
FILE_PATTERN = "exchanges-*.jsonl"
log = logging.getLogger(__name__)


@dataclass
class Spool:
    """The spool of one gateway, which one event loop uses.

    ``written_count`` and ``lost_count`` count exchanges.
    """

    folder: Path
    written_count: int = 0
    lost_count: int = 0
    losses: LossLedger = field(init=False)
    # Distinguishes processes with the same id: process ids repeat, in a container always.
    _life: str = field(default_factory=lambda: secrets.token_hex(4))
    _file: IO[bytes] | None = None
    _number: int = 0
    _full: str = ""
    _synced_count: int = 0
    # Held while a file is synced or handed over: who waits for it meanwhile shares the next sync.
    _disk: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.losses = LossLedger(self.folder)

    async def run(self) -> None:
        """Hand the current file over to the recorder every ``FLUSH_INTERVAL_S`` seconds, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            await self.flush()

    async def flush(self) -> None:
        """Synchronize, close and thereby unlock the current file, so that the recorder takes it."""
        self.losses.save()
        if not self.losses.is_synced:
            await asyncio.to_thread(self.losses.sync)
        async with self._disk:
            file, self._file = self._file, None
            if file is None:
                return
            count = self.written_count
            handover = asyncio.ensure_future(asyncio.to_thread(_hand_over, file, self.folder))
            try:
                await asyncio.shield(handover)
            except asyncio.CancelledError:
                # A shutdown waits for the synchronization, because otherwise the last exchanges could be lost.
                await handover
                raise
            self._synced_count = count

    async def sync(self) -> None:
        """Return once every line written so far would survive a power cut; raises ``OSError``.

        Lines that are written during a sync share the next one.
        """
        target = self.written_count
        async with self._disk:
            if self._synced_count >= target or self._file is None:
                return
            count = self.written_count
            # A descriptor of its own, because a failed write closes the file.
            await asyncio.to_thread(_sync, os.dup(self._file.fileno()), self.folder)
            self._synced_count = count

    def try_write(self, line: bytes) -> None:
        """Write a line; instead of raising ``OSError``, count a line that cannot be written in ``lost_count``."""
        try:
            self.write(line)
        except OSError as error:
            self.count_lost(str(error))

    def write(self, line: bytes) -> None:
        """Write a line; raises ``OSError``, so that the caller can have the sender retry."""
        try:
            if self._file is None:
                self._file = self._open()
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            # An incomplete line must be the last one of its file, so the next line begins a new file. The lines before
            # it may still have to be synced.
            if self._file is not None:
                file, self._file = self._file, None
                _hand_over(file, self.folder)
            raise
        self.written_count += 1
        self._full = ""

    def count_lost(self, reason: str) -> None:
        """Count and log an exchange that could not be recorded."""
        self.lost_count += 1
        self.losses.note(EXCHANGES, reason)
        self._full = f"{self.lost_count} conversations could not be recorded: {reason}"
        log.error("%s", self._full)

    @property
    def problem(self) -> str:
        """Return why exchanges are not recorded or not stored; "" if they are."""
        if self._full:
            return self._full
        late = [path for path in self.folder.glob(FILE_PATTERN) if _age(path) > LATE_S]
        return f"{len(late)} files wait in {self.folder}: the store does not accept them" if late else ""

    def _open(self) -> IO[bytes]:
        make_folder(self.folder)
        if self._number == 0:
            # Who made the folder, such as the ledger of losses, may not have synced its name.
            flush(self.folder.parent)
        self._number += 1
        name = f"exchanges-{os.getpid()}-{self._life}-{self._number}.jsonl"
        file = (self.folder / f".{name}").open("ab", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX)
        # The recorder must not see the file before it is locked.
        (self.folder / f".{name}").rename(self.folder / name)
        return file


def queued_files(folder: Path) -> frozenset[str]:
    """Return the names of the files in a spool folder that the recorder has not stored completely."""
    return frozenset(path.name for path in folder.glob(FILE_PATTERN))


def line_of(
    exchange: Exchange, raw: bytes, request: Mapping[str, Any], answer: bytes, *, streamed: bool, form: str = ""
) -> bytes:
    """Return the spool line of an exchange that consists of a request and an answer.

    Args:
        exchange: The exchange without its body.
        raw: The bytes of the request.
        request: The parsed request.
        answer: The bytes of the answer.
        streamed: Whether the answer is a stream of server-sent events.
        form: The ``Form`` of the request, "" if it is unknown.
    """
    # vars is used instead of asdict, whose deep copies took a fifth of the time of a request.
    fields = _fields(exchange) | {"streamed": streamed, "form": form}
    fields["answer"] = answer.decode("utf-8", "replace")
    head = write_json(fields)
    raw = raw.removeprefix(codecs.BOM_UTF8)
    # A client may send JSON in UTF-16 or UTF-32.
    if (not raw.isascii() and not _is_utf8(raw)) or b"\0" in raw:
        raw = write_json(request)
    # Line breaks can be replaced: between JSON values they are white space, and inside strings they are escaped.
    return b'%b,"request":%b}\n' % (head[:-1], raw.replace(b"\n", b" ").replace(b"\r", b" "))


def complete_line(exchange: Exchange) -> bytes:
    """Return the spool line of an exchange that has a body."""
    return write_json(_fields(exchange)) + b"\n"


def _fields(exchange: Exchange) -> dict[str, Any]:
    started_at = exchange.started_at.isoformat() if exchange.started_at is not None else None
    return vars(exchange) | {"at": exchange.at.isoformat(), "started_at": started_at}


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _hand_over(file: IO[bytes], folder: Path) -> None:
    with file:
        _sync(os.dup(file.fileno()), folder)


def _sync(descriptor: int, folder: Path) -> None:
    """Sync a file and its name, and close the descriptor."""
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    flush(folder)


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
