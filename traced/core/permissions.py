"""Who may read and write the files of traced: their owner alone, whatever the umask of the shell.

``private_umask`` is called at every entry point, and child processes inherit it: files are 0600 and folders 0700, those
of SQLite and other libraries included. ``check_directory`` and ``check_settings_file`` refuse what others could have
written: the settings name commands, and the data directory holds what the service loads. ``tighten`` removes the
permissions of others from a data directory of an earlier version; it follows no symbolic link.

Not covered: folders above the data directory, and files to which the settings point outside of it.
"""

import os
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path

from traced.core.errors import ConfigError, DataDirectoryUnusable

UMASK = 0o077
FOLDER, FILE = 0o700, 0o600
FOREIGN = 0o077
FOREIGN_WRITE = 0o022


@dataclass(frozen=True)
class Tightened:
    """The number of files and folders from which the permissions of group and others were removed."""

    files: int = 0
    folders: int = 0

    def __bool__(self) -> bool:
        return bool(self.files or self.folders)

    def __str__(self) -> str:
        return f"{self.files} files and {self.folders} folders"


def private_umask() -> None:
    """Let this process and its children create files and folders for their owner alone."""
    os.umask(UMASK)


def private_opener(path: str, flags: int) -> int:
    """Open a file for ``open``; a new file belongs to its owner alone under any umask."""
    return os.open(path, flags | os.O_CLOEXEC, FILE)


def check_directory(path: Path) -> None:
    """Refuse an existing data directory that another user can write; raises ``DataDirectoryUnusable``."""
    reason = _reason(path)
    if reason:
        raise DataDirectoryUnusable(f"the data directory {path} {reason[0]}", hint=reason[1])


def check_settings_file(path: Path) -> None:
    """Refuse a settings file that another user can write, because it names commands; raises ``ConfigError``."""
    reason = _reason(path)
    if reason:
        raise ConfigError(f"{path} {reason[0]}", hint=f"{reason[1]}, after a look at what it contains")


def tighten(data_dir: Path) -> Tightened:
    """Remove the permissions of group and others from a data directory and all that is in it.

    Symbolic links are not followed. What this user may not change (on a read-only mount, of another owner) stays.
    """
    counts = {stat.S_IFREG: 0, stat.S_IFDIR: 0}
    for _, _, names, descriptor in os.fwalk(data_dir, follow_symlinks=False):
        counts[stat.S_IFDIR] += _tighten_open(descriptor)
        for name in names:
            counts[stat.S_IFREG] += _tighten_file(name, descriptor)
    return Tightened(counts[stat.S_IFREG], counts[stat.S_IFDIR])


def _reason(path: Path) -> tuple[str, str] | None:
    """Return why others can write ``path`` and what to do, None if they cannot or it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    if status.st_mode & FOREIGN_WRITE:
        return (
            f"can be written by other users (mode {stat.S_IMODE(status.st_mode):04o})",
            f"chmod go-w {shlex.quote(str(path))}",
        )
    user = os.geteuid()
    # Root may look after another user's service; root's own files are as trustworthy as this user's.
    if user and status.st_uid not in (user, 0):
        return (
            f"belongs to another user (uid {status.st_uid})",
            f"run the command as that user, or chown {shlex.quote(str(path))}",
        )
    return None


def _tighten_file(name: str, folder: int) -> bool:
    try:
        # A file with several names may have one outside of the data directory, planted there by somebody else.
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or not status.st_mode & FOREIGN:
            return False
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return False
    try:
        return _tighten_open(descriptor)
    finally:
        os.close(descriptor)


def _tighten_open(descriptor: int) -> bool:
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if not mode & FOREIGN:
        return False
    try:
        # Bits of the owner stay as they are: the files of adapters are read-only.
        os.fchmod(descriptor, mode & stat.S_IRWXU)
    except OSError:
        return False
    return True
