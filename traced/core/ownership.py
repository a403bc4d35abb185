"""Exclusive ownership of a data directory, and identities of the processes and containers that hold resources.

Invariants: ownership depends only on flock(2) on ``DIR/traced.lock`` (services) and ``DIR/cycle.lock`` (services and
commands that work on cycles). The kernel releases a lock when its process dies; the text that an earlier holder left in
the file has no effect. Not covered: children forked without exec, which share the lock, and network file systems with
local locks.

A holder's identity is ``host/boot/pid/ticks`` or ``host/boot/pid/ticks/use``: host name, boot id of the kernel, process
id, and start of the process in clock ticks since boot (proc(5)), which no later process with the same id shares.
"""

import contextlib
import errno
import fcntl
import json
import os
import platform
import pwd
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
from traced.core.permissions import FILE, FOLDER, check_directory

OWNER_FILE = "sandbox-owner"
SERVICE_LOCK = "traced.lock"
CYCLE_LOCK = "cycle.lock"
SERVICE = "service"
RESERVE = "reserve"  # a file whose space is for emergencies, see ``traced.core.reserve``
# Several attempts, because ``current_holder`` takes the lock for an instant, which must not stop a daemon from
# starting.
LOCK_ATTEMPTS = 10
LOCK_RETRY_S = 0.05
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Field 22 of /proc/PID/stat, counted from the text after the command's closing parenthesis, which starts with field 3.
START_FIELD = 22 - 3


@dataclass(frozen=True)
class Holder:
    """The process that holds a data directory; ``since`` is ISO 8601 in UTC. Empty if the file is unreadable.

    ``purpose`` is ``SERVICE`` for the service, "" for a command.
    """

    pid: int = 0
    host: str = ""
    since: str = ""
    version: str = ""
    purpose: str = ""

    def __str__(self) -> str:
        if not self.pid:
            return "an unknown process"
        return f"process {self.pid} on {self.host} (traced {self.version}, since {self.since})"


@contextmanager
def hold_directory(
    data_dir: Path, *, now: Callable[[], datetime], version: str, file_name: str = SERVICE_LOCK, purpose: str = ""
) -> Iterator[Holder]:
    """Hold the lock of a data directory during the block.

    Raises:
        AlreadyRunning: another process holds it.
        DataDirectoryUnusable: the lock file cannot be opened, or other users can write the directory.
    """
    check_directory(data_dir)
    path = data_dir / file_name
    descriptor = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        if not _try_lock(descriptor, fcntl.LOCK_EX, LOCK_ATTEMPTS):
            raise AlreadyRunning(
                f"{data_dir} is in use by {_read_holder(descriptor)}",
                hint=f"check it with traced status --data-dir {data_dir}, or choose another --data-dir",
            )
        this_process = Holder(os.getpid(), socket.gethostname(), now().isoformat(timespec="seconds"), version, purpose)
        _write_holder(descriptor, json.dumps(asdict(this_process)) + "\n", path)
        yield this_process
        os.ftruncate(descriptor, 0)
    finally:
        # Closing releases the lock. The file stays: removing it would let two processes lock two files of one name.
        os.close(descriptor)


@contextmanager
def exclusive_access(data_dir: Path, now: datetime, purpose: str = "") -> Iterator[None]:
    """Hold both locks of a data directory during the block: no service runs and no command works on cycles."""
    traced_version = version("traced")
    with (
        hold_directory(data_dir, now=lambda: now, version=traced_version, purpose=purpose),
        hold_directory(data_dir, now=lambda: now, version=traced_version, file_name=CYCLE_LOCK),
    ):
        yield


def current_holder(data_dir: Path, file_name: str = SERVICE_LOCK) -> Holder | None:
    """Return the holder of a data directory, None if there is none; raises ``DataDirectoryUnusable``."""
    check_directory(data_dir)
    path = data_dir / file_name
    if not path.exists():
        return None
    descriptor = _open(path, os.O_RDONLY)
    try:
        return None if _try_lock(descriptor, fcntl.LOCK_SH, 1) else _read_holder(descriptor)
    finally:
        os.close(descriptor)


def own_identity(use: str = "") -> str:
    """Return the identity of this process; ``use`` distinguishes several things that it holds."""
    process = f"{platform.node()}/{_boot_id()}/{os.getpid()}/{_start_ticks(os.getpid())}"
    return f"{process}/{use}" if use else process


def is_alive(holder: str) -> bool | None:
    """Whether the process of a holder is alive; None if it belongs to another host or container."""
    host, boot, pid, ticks = (holder.split("/") + [""] * 4)[:4]
    if host != platform.node() or not pid.isdigit():
        return None
    return boot == _boot_id() and ticks == str(_start_ticks(int(pid)))


def process_of(holder: str) -> int | None:
    """Return the process id of a holder that is alive on this machine, else None."""
    return int(holder.split("/")[2]) if is_alive(holder) else None


def this_user() -> str:
    """Return the name of the user of this process."""
    return user_name(os.getuid())


def user_name(uid: int) -> str:
    """Return the name of a Unix user, "uid 10001" if it has none, as in some containers."""
    # Never from LOGNAME or USER, which anybody can set: the name is stored as that of an authenticated person.
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def sandbox_owner(data_dir: Path) -> str:
    """Return the owner label of the sandbox containers of a data directory, created at the first call.

    The label keeps services of several data directories on one Docker engine from removing each other's containers. A
    copied data directory has the same label.
    """
    path = data_dir / OWNER_FILE
    try:
        # A power failure may leave an empty file.
        if not path.exists() or not path.stat().st_size:
            _create_owner_file(path)
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise DataDirectoryUnusable(
            f"{path} cannot be created or read: {error.strerror}", hint="check the directory's permissions and space"
        ) from error


def _create_owner_file(path: Path) -> None:
    # A hard link to a complete file: of two processes that race, the second one uses the file of the first.
    staging = path.with_name(f".{OWNER_FILE}.{secrets.token_hex(4)}.partial")
    try:
        staging.write_text(f"traced-{secrets.token_hex(8)}\n", encoding="utf-8")
        flush(staging)
        if path.exists() and not path.stat().st_size:
            path.unlink()
        with contextlib.suppress(FileExistsError):
            os.link(staging, path)
    finally:
        staging.unlink(missing_ok=True)


def _open(path: Path, flags: int) -> int:
    try:
        path.parent.mkdir(FOLDER, parents=True, exist_ok=True)
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE)
    except OSError as error:
        raise _unusable(path, error) from error


def _try_lock(descriptor: int, kind: int, tries: int) -> bool:
    for attempt in range(tries):
        if attempt:
            time.sleep(LOCK_RETRY_S)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            continue
    return False


def _write_holder(descriptor: int, text: str, path: Path) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
    except OSError as error:
        # On a full disk the lock is held nevertheless; only its holder is unknown.
        if error.errno not in DISK_FULL_ERRNOS:
            raise _unusable(path, error) from error
        with contextlib.suppress(OSError):
            # A rollback has to know that the holder is a service.
            (path.parent / RESERVE).unlink(missing_ok=True)
            os.pwrite(descriptor, text.encode(), 0)


def _read_holder(descriptor: int) -> Holder:
    try:
        return Holder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):
        # The file is empty, truncated or foreign; the lock is held nevertheless.
        return Holder()


def _unusable(path: Path, error: OSError) -> DataDirectoryUnusable:
    hints = {
        errno.EROFS: "mount it read-write, or choose another --data-dir",
        **dict.fromkeys(DISK_FULL_ERRNOS, "free some space, or choose another --data-dir"),
        errno.ELOOP: f"remove the symbolic link {path}",
    }
    hint = hints.get(error.errno or 0, f"ls -ld {path.parent}; then choose another --data-dir or give this user access")
    return DataDirectoryUnusable(f"{path} cannot be used: {error.strerror}", hint=hint)


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _start_ticks(pid: int) -> int:
    """Return the start of a live process in clock ticks since boot, -1 if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    # A zombie no longer holds anything.
    return -1 if fields[0] in "ZX" else int(fields[START_FIELD])
