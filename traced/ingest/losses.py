"""Count records that could not be kept, durably, until a person acknowledges them (``traced records acknowledge``).

    DIR/spool/losses.json    {KIND: {"count", "first", "last", "reason", "in_store"}}, padded to ``FILE_BYTES``

Invariants: the file has its full size from the start of a gateway on, and is overwritten in place, so that most file
systems accept the write when they are full; the processes of a data directory share it under a lock. What cannot be
written yet is kept in memory and written by the next ``save``; ``sync`` secures it against a crash of the machine. The
module imports only the standard library.
"""

import contextlib
import fcntl
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

LOSSES_FILE = "losses.json"
FILE_BYTES = 4096
REASON_LENGTH = 200
# What a count counts: exchanges that are gone, unreadable lines of the spool and unusable calls received as spans.
EXCHANGES, LINES, CALLS = "exchanges", "lines", "calls"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loss:
    """Lost records of one kind: how many, when (ISO 8601), why the last one, and how many of them the store has."""

    count: int
    first: str
    last: str
    reason: str
    in_store: int = 0


Losses = dict[str, Loss]


@dataclass
class LossLedger:
    """Adds the losses of one process to the file in ``folder``; may be used on any thread."""

    folder: Path
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    is_synced: bool = True
    _unsaved: Losses = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def prepare(self) -> None:
        """Create the file, so that it can be overwritten on a full disk."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _open_losses(self.folder):
                pass
        except OSError as error:
            log.warning("lost records cannot be counted durably: %s", error)

    def note(self, kind: str, reason: str, count: int = 1) -> None:
        """Count lost records, in the file if it can be written, else in memory until the next ``save``."""
        at = self.now().isoformat(timespec="seconds")
        # ASCII without control characters, so that the size of the file is bounded.
        text = "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in reason)
        with self._lock:
            _add(self._unsaved, {kind: Loss(count, at, at, text[:REASON_LENGTH])})
        self.save()

    def save(self) -> None:
        """Write the losses that are only in memory, if the file can be written."""
        with self._lock:
            if not self._unsaved:
                return
            try:
                with _open_losses(self.folder) as losses:
                    _add(losses, self._unsaved)
            except OSError:
                return
            self._unsaved.clear()
            self.is_synced = False

    def sync(self) -> None:
        """Synchronize what was saved to disk."""
        with self._lock, contextlib.suppress(OSError), (self.folder / LOSSES_FILE).open("rb") as stream:
            os.fsync(stream.fileno())
            self.is_synced = True

    def current(self) -> Losses:
        """Return all losses of the directory that nobody has acknowledged."""
        try:
            losses = read_losses(self.folder)
        except OSError:
            losses = {}
        with self._lock:
            _add(losses, self._unsaved)
        return losses


def read_losses(folder: Path) -> Losses:
    """Return the losses in the file of a spool folder."""
    try:
        with (folder / LOSSES_FILE).open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH)
            return _parse(stream.read())
    except (FileNotFoundError, NotADirectoryError):
        return {}


def mark_stored(folder: Path, losses: Mapping[str, Loss]) -> None:
    """Note that the store has these losses, as ``read_losses`` returned them; raises ``OSError``."""
    with _open_losses(folder) as current:
        for kind, loss in losses.items():
            if kind in current:
                current[kind] = replace(current[kind], in_store=min(loss.count, current[kind].count))


def remove_losses(folder: Path, losses: Mapping[str, Loss]) -> None:
    """Subtract acknowledged losses, as ``read_losses`` returned them; raises ``OSError``."""
    with _open_losses(folder) as current:
        for kind, loss in losses.items():
            if kind in current:
                remaining, in_store = current[kind].count - loss.count, current[kind].in_store - loss.count
                current[kind] = replace(current[kind], count=max(remaining, 0), in_store=max(in_store, 0))
                if remaining <= 0:
                    del current[kind]


def describe(losses: Mapping[str, Loss]) -> str:
    """Return the losses in words; "" without any."""
    names = {EXCHANGES: "exchanges lost", LINES: "unreadable recorded exchanges", CALLS: "unusable calls in spans"}
    return "; ".join(
        f"{loss.count} {names.get(kind, kind)}, the last at {loss.last} ({loss.reason})"
        for kind, loss in losses.items()
    )


def _add(losses: Losses, new: Mapping[str, Loss]) -> None:
    for kind, loss in new.items():
        old = losses.get(kind)
        losses[kind] = (
            replace(loss, count=old.count + loss.count, first=old.first, in_store=old.in_store) if old else loss
        )


@contextlib.contextmanager
def _open_losses(folder: Path) -> Iterator[Losses]:
    """Lock the file, yield its losses, and write what they were changed to; raises ``OSError``."""
    descriptor = os.open(folder / LOSSES_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        losses = _parse(os.pread(descriptor, FILE_BYTES, 0))
        yield losses
        text = json.dumps({kind: asdict(loss) for kind, loss in losses.items()}).encode()
        content = text.ljust(FILE_BYTES - 1) + b"\n"
        if os.pwrite(descriptor, content, 0) < len(content):
            raise OSError(f"{folder / LOSSES_FILE} is incomplete")
    finally:
        os.close(descriptor)


def _parse(text: bytes) -> Losses:
    if not text.strip():
        return {}
    try:
        return {kind: Loss(**fields) for kind, fields in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        log.warning("%s is damaged; it is begun anew", LOSSES_FILE)
        return {}
