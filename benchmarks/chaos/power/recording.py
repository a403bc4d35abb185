"""What a power cut would leave of a folder: the contents of files and the names in folders as of their last sync.

    recording = Recording(folder, log)        takes what the folder holds now as synced
    with recording.running(): ...             processes that are started now are recorded (LD_PRELOAD, ``synced.c``)
    recording.acknowledge("act", "approve 7") what a client has the answer to, in order with the syncs
    for point in recording.points(): ...      every state in which the power may go

Invariants: whatever is not synced is lost, new names in folders included, which is stricter than most file systems. The
order of syncs and acknowledgements is the real one: a sync is in the log before its caller goes on. Needs Linux and a C
compiler; ``missing`` says what is missing. Not covered: unsynced writes that the kernel happened to write before the
cut, and disks that do not do what fsync(2) asks of them.
"""

import fcntl
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_name("synced.c")
HEAD = struct.Struct("<4sIQQQQ")
BLOCK = struct.Struct("<QQ")
ENTRY = struct.Struct("<QQII")
ACK = ord("A")

Key = tuple[int, int]


def missing() -> str:
    """The missing requirement of a recording, or ""."""
    if not sys.platform.startswith("linux"):
        return "a recording of syncs needs Linux"
    return "" if shutil.which("cc") else "a recording of syncs needs a C compiler (cc)"


@dataclass
class Image:
    """The disk as of the last sync of everything: contents by file, and names with kind, mode and file by folder."""

    root: Key
    files: dict[Key, bytearray] = field(default_factory=dict)
    folders: dict[Key, dict[str, tuple[int, Key]]] = field(default_factory=dict)

    def write(self, target: Path) -> None:
        """Create the folder ``target`` with this content."""
        self._write_folder(self.root, target)

    def _write_folder(self, key: Key, target: Path) -> None:
        target.mkdir()
        for name, (mode, entry) in self.folders.get(key, {}).items():
            path = target / name
            if stat.S_ISDIR(mode):
                self._write_folder(entry, path)
            elif stat.S_ISREG(mode):
                path.write_bytes(self.files.get(entry, b""))
            else:
                continue
            path.chmod(stat.S_IMODE(mode))

    def apply(self, kind: int, key: Key, size: int, body: memoryview) -> None:
        """Apply a record of the log."""
        if kind == ord("D"):
            self.folders[key] = dict(_entries(body))
            return
        content, at = self.files.setdefault(key, bytearray()), 0
        del content[size:]
        content.extend(bytes(size - len(content)))
        while at < len(body):
            place, length = BLOCK.unpack_from(body, at)
            at += BLOCK.size + length
            content[place : place + length] = body[at - length : at]


def _entries(body: memoryview) -> Iterator[tuple[str, tuple[int, Key]]]:
    at = 0
    while at < len(body):
        inode, born, mode, length = ENTRY.unpack_from(body, at)
        at += ENTRY.size + length
        yield os.fsdecode(bytes(body[at - length : at])), (mode, (inode, born))


@dataclass(frozen=True)
class Point:
    """A state in which the power may go: its number, the disk, and what had been acknowledged."""

    number: int
    image: Image
    acknowledged: list[tuple[str, str]]


def acknowledge(log: Path, kind: str, key: str) -> None:
    """Note in the log of a recording what a client has the answer to."""
    body = json.dumps([kind, key]).encode()
    with log.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(HEAD.pack(b"SYNC", ACK, 0, 0, 0, len(body)) + body)


@dataclass
class Recording:
    """The syncs below ``folder``; ``log`` is a new file outside of it."""

    folder: Path
    log: Path
    _base: Image = field(init=False)
    _library: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder, self.log = self.folder.resolve(), self.log.resolve()
        self._library = self.log.with_suffix(".so")
        command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(self._library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        self.log.touch()
        shadow = Path(f"{self.log}.shadow")
        shadow.mkdir()
        # PostgreSQL runs as another user.
        for path, mode in ((self.log, 0o666), (shadow, 0o777), (self._library, 0o755)):
            path.chmod(mode)
        # The same program that records later identifies files and lists folders now.
        with self.running():
            program = "import os, sys\nfor line in sys.stdin.read().splitlines(): os.fsync(os.open(line, os.O_RDONLY))"
            paths = [self.folder, *(path for path in self.folder.rglob("*") if path.is_dir() or path.is_file())]
            text = "\n".join(map(str, paths))
            subprocess.run([sys.executable, "-c", program], input=text, text=True, check=True)
        first = next(self._records())
        self._base = Image(first[1])
        for kind, key, size, body in self._records():
            self._base.apply(kind, key, size, body)
        self._begins_at = self.log.stat().st_size

    @property
    def variables(self) -> dict[str, str]:
        """The environment of processes that are recorded."""
        return {
            "LD_PRELOAD": str(self._library),
            "SYNCED_ROOT": str(self.folder),
            "SYNCED_LOG": str(self.log),
        }

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record the processes that are started meanwhile."""
        os.environ.update(self.variables)
        try:
            yield
        finally:
            for name in self.variables:
                del os.environ[name]

    def acknowledge(self, kind: str, key: str) -> None:
        """As the function of this name, in this recording."""
        acknowledge(self.log, kind, key)

    def count(self) -> int:
        """The number of syncs."""
        return sum(kind != ACK for kind, *_ in self._records(self._begins_at))

    def points(self, numbers: set[int]) -> Iterator[Point]:
        """Yield the states after the syncs with these numbers (from 0: before the first one), each until the next."""
        image, acknowledged, number = self._base, list[tuple[str, str]](), 0
        for kind, key, size, body in self._records(self._begins_at):
            if kind == ACK:
                acknowledged.append(tuple(json.loads(bytes(body))))
                continue
            # Acknowledgements that followed a sync belong to its state.
            if number in numbers:
                yield Point(number, image, acknowledged)
            image.apply(kind, key, size, body)
            number += 1
        if number in numbers:
            yield Point(number, image, acknowledged)

    def _records(self, first: int = 0) -> Iterator[tuple[int, Key, int, memoryview]]:
        content, at = memoryview(self.log.read_bytes()), first
        while at + HEAD.size <= len(content):
            magic, kind, inode, born, size, length = HEAD.unpack_from(content, at)
            if magic != b"SYNC":
                raise ValueError(f"{self.log} is damaged at {at}")
            at += HEAD.size + length
            # The last record may be half-written, by a process that was killed.
            if at <= len(content):
                yield kind, (inode, born), size, content[at - length : at]
