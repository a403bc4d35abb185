"""A log file that cannot fill the disk, and its last lines.

Invariants: ``path`` and ``path.1`` together never hold more than ``limit`` bytes; the newest text is always kept. A
disk that refuses (full, read-only, gone) never holds up who writes: the text is then dropped, but for the last lines,
which are kept in memory too. Not covered: two writers of one path.
"""

import os
from io import FileIO
from pathlib import Path

KEPT_BYTES = 16 * 1024  # the end of the log that is kept in memory


class BoundedLog:
    """Appends to ``path``; at half of ``limit`` bytes the file becomes ``path.1``."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self._half = max(limit // 2, 1)
        self._file: FileIO | None = None
        self._size = 0
        self._end = b""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
            self._end = self._read_end()
        except OSError:
            self._drop()

    def write(self, text: bytes) -> None:
        """Append ``text``; never raises for the disk's sake."""
        self._end = (self._end + text)[-KEPT_BYTES:]
        rest = text[-2 * self._half :]  # more than the limit at once: its end is what counts
        try:
            while rest:
                if self._size >= self._half:
                    self._rotate()
                rest = self._append(rest)
        except OSError:
            self._drop()

    def last_lines(self, count: int) -> list[str]:
        """The last ``count`` lines."""
        return self._end.decode(errors="replace").splitlines()[-count:]

    def close(self) -> None:
        """Close the file; the last lines stay readable."""
        self._drop()

    def _open(self) -> None:
        self._file = FileIO(self.path, "ab")
        self._size = self._file.tell()

    def _append(self, text: bytes) -> bytes:
        """Write what fits into the current half; what is left."""
        if self._file is None:
            self._open()
        assert self._file is not None
        written = self._file.write(text[: self._half - self._size]) if self._size < self._half else 0
        self._size += written
        return text[written:]

    def _rotate(self) -> None:
        self._drop()
        os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))
        self._open()

    def _drop(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read_end(self) -> bytes:
        with self.path.open("rb") as stream:
            stream.seek(max(self._size - KEPT_BYTES, 0))
            return stream.read(KEPT_BYTES)
