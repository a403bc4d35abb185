"""Whether the files of an adapter version are those that were published, and the quarantine of one whose files are not.

The SHA-256 that count are ``AdapterVersion.files`` in the store, written at the publication. The manifest beside the
files is not read: whoever can replace the weights can replace it too.

Invariants: a version is put in quarantine by the first process that finds a change, which alone reports it: an event, a
notice to the hooks, an error in the log. The promotion log is not changed. A quarantine ends by a person's decision
(``release``), which is refused while the files differ.

How it fails: ``AdapterChanged`` for files that are missing, added, different or replaced by a link; ``PromotionError``
if there is no folder or it cannot be read, which is no evidence of a change and begins no quarantine. Not covered:
bytes that an engine has loaded already.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from sqlalchemy import Engine

from store.database import read_session, write_session
from store.records import AdapterVersion, Event
from store.repositories.adapters import begin_quarantine, get_adapter
from store.repositories.events import save_event
from traced.core.errors import AdapterChanged, PromotionError
from traced.notifications.messages import adapter_quarantined, announce
from traced.registry.publication import MANIFEST

QUARANTINED = "adapter quarantined"  # event kind
MAX_NAMES = 3  # of changed files in a message

# Of the folder and of each entry in it: path, inode, size, and the times of the last change of content and of inode.
FolderState = tuple[tuple[str, int, int, int, int], ...]

log = logging.getLogger(__name__)


def changed_files(path: Path, files: Mapping[str, str]) -> list[str]:
    """Return the names of the files in folder ``path`` that are missing, added or different; reads all of them.

    Args:
        files: The SHA-256 (hex) by relative path; the manifest is not among them, and is not looked at.

    Raises:
        OSError: There is no folder, or it cannot be read.
    """
    hashes = {}
    for entry in _entries(path):
        name = str(entry.relative_to(path))
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            hashes[name] = ""  # nothing that was published
        elif entry.is_file() and name != MANIFEST:
            hashes[name] = _sha256(entry)
    return sorted(name for name in hashes.keys() | files.keys() if hashes.get(name) != files.get(name))


def check_files(version: AdapterVersion, path: Path | None = None) -> None:
    """Compare the files of a version, in its own folder or in ``path``, with the hashes of the store.

    Raises:
        AdapterChanged: A file is missing, added or different.
        PromotionError: There is no folder, or it cannot be read.
    """
    folder = Path(version.path) if path is None else path
    try:
        names = changed_files(folder, version.files)
    except OSError as error:
        raise PromotionError(
            f"the files of {version.name} in {folder} cannot be read: {error.strerror or error}", hint=f"ls -l {folder}"
        ) from error
    if names:
        suffix = f" and {len(names) - MAX_NAMES} others" if len(names) > MAX_NAMES else ""
        raise AdapterChanged(version.name, f"{', '.join(names[:MAX_NAMES])}{suffix} changed in {folder}")


def check_usable(version: AdapterVersion, path: Path | None = None) -> None:
    """Raise ``AdapterChanged`` if a version is in quarantine, and as ``check_files``."""
    if version.quarantined_at is not None:
        raise AdapterChanged(version.name, version.quarantine_reason)
    check_files(version, path)


def folder_state(path: Path) -> FolderState:
    """Return a state that differs after any write to the folder, even one that restores the former bytes.

    () stands for a folder that is missing or cannot be read.
    """
    # The kernel sets the time of an inode's change; no process can set it back.
    try:
        stats = [(str(entry), entry.lstat()) for entry in (path, *_entries(path))]
    except OSError:
        return ()
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats)


def quarantine(store: Engine, error: AdapterChanged, hooks: Sequence[str], at: datetime) -> None:
    """Put a version in quarantine and tell a person; nothing happens if it is in quarantine already."""
    with write_session(store) as session:
        if not begin_quarantine(session, error.adapter, error.reason, at=at):
            return
        cycle_id = get_adapter(session, error.adapter).cycle_id
        save_event(session, Event(at, QUARANTINED, error.adapter, cycle_id, {"reason": error.reason}))
        announce(session, adapter_quarantined(error.adapter, error.reason, at), hooks, at=at)
    log.error("%s is in quarantine and takes no traffic: %s", error.adapter, error.reason)


@contextmanager
def quarantining(store: Engine, hooks: Sequence[str], now: Callable[[], datetime]) -> Iterator[None]:
    """Put the version of an ``AdapterChanged`` that the block raises in quarantine.

    Open it outside of the transaction, which has to have ended before.
    """
    try:
        yield
    except AdapterChanged as error:
        quarantine(store, error, hooks, now())
        raise


def stored_version(store: Engine, name: str) -> AdapterVersion:
    """Return a version as it is stored; raises ``NotFound``."""
    with read_session(store) as session:
        return get_adapter(session, name)


def _entries(path: Path) -> list[Path]:
    """Return everything below a folder, links as such; raises ``OSError`` if there is none or it cannot be read."""
    paths: list[Path] = []
    with os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            paths.append(path / entry.name)
            if entry.is_dir(follow_symlinks=False):
                paths.extend(_entries(path / entry.name))
    return paths


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
