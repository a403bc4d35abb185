"""One instance per data directory: flock(2) on ``DIR/traced.lock``, with the holder written in it.

``DIR/cycle.lock`` is held in the same way by whoever works on cycles: the service, and a verb while it runs.

Invariants: the kernel's lock alone decides; it ends with the process that holds it, however that dies, so what an
earlier holder left in the file is no obstacle. The file itself is never removed (removing it would let two processes
lock two files of one name). The descriptor is not inherited by programs that the holder starts.

Fails: ``AlreadyRunning`` names the holder; ``DataDirectoryUnusable`` says why the file cannot be opened.
Not covered: children forked without exec (they share the lock until they end), and network file systems that keep
locks to one machine.

The name by which the Docker engine knows whose a sandbox container is: one for each data directory.

Invariants: drawn at the first ask and kept in ``DIR/sandbox-owner``; no backup takes it along. Services of two data
directories on one engine never clear each other's containers away, also where each runs in a container itself and
cannot see whether the other's processes live. How it fails: ``DataDirectoryUnusable``.
Not covered: a directory copied with everything in it, whose copy has the same name.

Who holds something: a process named so that a later process can tell whether it is still there.

A holder's text is ``host/boot/pid/ticks``: host name, the kernel's boot id, process id, and the process's start in
clock ticks since boot (proc(5), field 22 of ``/proc/PID/stat``), which no later process of the same id shares and which
no change of the wall clock moves; and ``/use`` behind it where one process holds several things.

``is_alive`` answers None where it cannot know: another host (or container) holds it, and only its heartbeats can tell.
"""

import contextlib
import errno
import fcntl
import getpass
import json
import os
import platform
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from traced.core.errors import AlreadyRunning, DataDirectoryUnusable
from traced.core.files import flush

FILE = "sandbox-owner"


def sandbox_owner(data_dir: Path) -> str:
    """The owner's name of the containers that work on ``data_dir``."""
    path = data_dir / FILE
    try:
        if not path.exists() or not path.stat().st_size:  # an empty one is what a power cut left
            _draw(path)
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise DataDirectoryUnusable(
            f"{path} cannot be made or read: {error.strerror}", hint="check the directory's permissions and space"
        ) from error


def _draw(path: Path) -> None:
    """Make the file, whole; whoever comes second takes what the first has drawn."""
    staged = path.with_name(f".{FILE}.{secrets.token_hex(4)}.partial")
    try:
        staged.write_text(f"traced-{secrets.token_hex(8)}\n", encoding="utf-8")
        flush(staged)
        if path.exists() and not path.stat().st_size:
            path.unlink()
        with contextlib.suppress(FileExistsError):
            os.link(staged, path)
    finally:
        staged.unlink(missing_ok=True)


FILE_NAME = "traced.lock"
CYCLES = "cycle.lock"
TRIES = 10  # a look by `holder` keeps the lock for an instant: that must not stop a daemon from starting
PAUSE_S = 0.05
FULL = (errno.ENOSPC, errno.EDQUOT)  # the lock holds all the same, only its holder stays unnamed


@dataclass(frozen=True)
class Holder:
    """Who holds a data directory; ``since`` is ISO 8601 in UTC. All empty where the file cannot say."""

    pid: int = 0
    host: str = ""
    since: str = ""
    version: str = ""

    def __str__(self) -> str:
        if not self.pid:
            return "a process that has not written its name yet"
        return f"process {self.pid} on {self.host} (traced {self.version}, since {self.since})"


@contextmanager
def hold(data_dir: Path, *, now: Callable[[], datetime], version: str, file_name: str = FILE_NAME) -> Iterator[Holder]:
    """Hold ``data_dir`` for the time of the body; raises ``AlreadyRunning`` or ``DataDirectoryUnusable``."""
    path = data_dir / file_name
    descriptor = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        if not _locked(descriptor, fcntl.LOCK_EX, TRIES):
            raise AlreadyRunning(
                f"{data_dir} is in use by {_read(descriptor)}",
                hint=f"traced status --data-dir {data_dir} (or choose another --data-dir)",
            )
        me = Holder(os.getpid(), socket.gethostname(), now().isoformat(timespec="seconds"), version)
        _write(descriptor, json.dumps(asdict(me)) + "\n", path)
        yield me
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)  # and with it the lock


@contextmanager
def alone(data_dir: Path, now: datetime) -> Iterator[None]:
    """Nobody else works on ``data_dir`` during the body, neither a service nor a verb; raises as ``hold`` does."""
    ours = version("traced")
    with (
        hold(data_dir, now=lambda: now, version=ours),
        hold(data_dir, now=lambda: now, version=ours, file_name=CYCLES),
    ):
        yield


def holder(data_dir: Path) -> Holder | None:
    """Who holds ``data_dir`` now, None: nobody; raises ``DataDirectoryUnusable`` where that cannot be told."""
    path = data_dir / FILE_NAME
    if not path.exists():
        return None
    descriptor = _open(path, os.O_RDONLY)
    try:
        return None if _locked(descriptor, fcntl.LOCK_SH, 1) else _read(descriptor)
    finally:
        os.close(descriptor)


def _open(path: Path, flags: int) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _unusable(path, error) from error


def _locked(descriptor: int, kind: int, tries: int) -> bool:
    for attempt in range(tries):
        if attempt:
            time.sleep(PAUSE_S)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            continue
    return False


def _write(descriptor: int, text: str, path: Path) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
    except OSError as error:
        if error.errno not in FULL:
            raise _unusable(path, error) from error


def _read(descriptor: int) -> Holder:
    try:
        return Holder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):  # empty, cut short, or written by something else: the lock counts all the same
        return Holder()


def _unusable(path: Path, error: OSError) -> DataDirectoryUnusable:
    hints = {
        errno.EROFS: "mount it read-write, or choose another --data-dir",
        **dict.fromkeys(FULL, "free some space, or choose another --data-dir"),
        errno.ELOOP: f"remove the symbolic link {path}",
    }
    hint = hints.get(error.errno or 0, f"ls -ld {path.parent}; then choose another --data-dir or give this user access")
    return DataDirectoryUnusable(f"{path} cannot be used: {error.strerror}", hint=hint)


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
START_FIELD = 22 - 3  # of what follows the command's closing parenthesis, which holds field 3 first


def this_holder(use: str = "") -> str:
    """The holder that this process is; ``use`` tells apart what it holds."""
    own = f"{platform.node()}/{_boot_id()}/{os.getpid()}/{_start_ticks(os.getpid())}"
    return f"{own}/{use}" if use else own


def is_alive(holder: str) -> bool | None:
    """Whether that process is still there; None where this machine cannot know."""
    host, boot, pid, ticks = (holder.split("/") + [""] * 4)[:4]
    if host != platform.node() or not pid.isdigit():
        return None
    return boot == _boot_id() and ticks == str(_start_ticks(int(pid)))


def process_of(holder: str) -> int | None:
    """The id of that process where it lives on this machine, else None."""
    return int(holder.split("/")[2]) if is_alive(holder) else None


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _start_ticks(pid: int) -> int:
    """Start of a live process in clock ticks since boot, -1 when there is none (a zombie holds nothing any more)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[START_FIELD])


def this_user() -> str:
    """Whose process this is."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in some containers
        return f"uid {os.getuid()}"
