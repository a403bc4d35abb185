"""``traced backup``: back up in one file everything in a data directory that cannot be made again.

The content, in this order: the graph's checkpoints, the store, the published adapters, the environments, the runs'
folders without their trainings, the settings. The order keeps a backup of a directory in use consistent. The store is
copied after the checkpoints, so it holds everything that a checkpoint refers to (a node that ran in between is run
again and finds its work done). The files that the store's rows name were published before those rows.

Invariants: a running daemon is not blocked; the backup appears under its name only after it was read back and every
checksum matched; a failure leaves nothing behind. A staging folder is locked with flock(2) while it is filled
(``marked_alive``), and the kernel removes the lock however the process ends.

Errors: ``BackupFailed``, and errors of the disk. Not covered: models, training checkpoints, logs, earlier backups;
secrets other than those in the copied files; network file systems whose flock is local to one machine; exclusive use of
a whole data directory (``traced.core.ownership``).
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from sqlalchemy.engine import make_url

from store.database import connect, read_session, revision
from store.repositories.adapters import list_adapters
from store.schema_version import HEAD
from traced.config.settings import TARGETS, Settings
from traced.core.errors import AdapterChanged
from traced.core.files import flush, free_name, make_folder
from traced.core.location import find_settings_file
from traced.maintenance import archive
from traced.maintenance.archive import Manifest, Writer
from traced.maintenance.databases import copy_sqlite, dump_postgres, is_sqlite
from traced.maintenance.errors import BackupFailed
from traced.registry.integrity import quarantine
from traced.registry.publication import MANIFEST as ADAPTER_MANIFEST
from traced.registry.publication import NAME


@contextmanager
def marked_alive(folder: Path) -> Iterator[None]:
    """Lock ``folder`` while the body runs, which tells other processes that this one still fills it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def is_alive(folder: Path) -> bool:
    """Return whether a process holds ``folder`` by ``marked_alive``."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return not _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


BACKUPS = "backups"
SUFFIX = ".tar.zst"
STAGING = ".partial-backup-"
STORE, DUMP, CHECKPOINTS, CONFIG = "traced.db", "store.dump", "checkpoints.db", "traced.toml"


@dataclass(frozen=True)
class Backup:
    """A backup that was written and verified; ``size`` in bytes.

    ``changed`` names the adapter versions in it whose files are not what was published.
    """

    path: Path
    size: int
    manifest: Manifest
    changed: list[str] = field(default_factory=list)


def back_up(settings: Settings, target: Path | None = None, *, now: datetime, label: str = "traced") -> Backup:
    """Back up the data directory to ``target`` (default: DIR/backups/LABEL-TIME.tar.zst); raises ``BackupFailed``."""
    path = target or free_name(settings.data_dir / BACKUPS / f"{label}-{now:%Y%m%dT%H%M%SZ}", SUFFIX)
    if path.exists():
        raise BackupFailed(f"{path} exists already", hint="name another file")
    schema = schema_of(settings)
    with _staging(path.parent) as folder:
        staging = folder / "archive"
        with archive.writing(staging) as writer:
            namespace = _add_databases(writer, settings, folder)
            _add_files(writer, settings.data_dir)
            writer.close_with(_manifest(settings, schema, namespace, writer, now))
        manifest = archive.verify(staging)
        os.rename(staging, path)
        flush(path.parent)
    return Backup(path, path.stat().st_size, manifest, _changed_adapters(settings, manifest, now))


def _changed_adapters(settings: Settings, manifest: Manifest, now: datetime) -> list[str]:
    """Compare the adapters of a backup with the hashes in the store, and put those that differ in quarantine.

    The backup of a store that is about to be upgraded is not compared, because its schema has no quarantine.
    """
    if manifest.schema != HEAD:
        return []
    engine = connect(settings.store_url)
    try:
        with read_session(engine) as session:
            versions = list_adapters(session)
        changed = []
        for adapter in versions:
            folder = f"adapters/{adapter.name}/"
            hashes = {name.removeprefix(folder): h for name, h in manifest.members.items() if name.startswith(folder)}
            hashes.pop(ADAPTER_MANIFEST, None)
            # A version of another data directory, or newer than the backup, is not in it.
            if hashes and hashes != adapter.files:
                names = sorted({name for name, _ in hashes.items() ^ adapter.files.items()})
                error = AdapterChanged(adapter.name, f"{', '.join(names)} changed in a backup of {settings.data_dir}")
                quarantine(engine, error, settings.notify.names, now)
                changed.append(adapter.name)
        return changed
    finally:
        engine.dispose()


def schema_of(settings: Settings) -> str:
    """Return the revision of the settings' store; raises ``BackupFailed`` if there is no store."""
    file = sqlite_file(settings)
    if file is not None and not file.exists():
        raise BackupFailed(f"there is no store at {file}", hint="check --data-dir")
    engine = connect(settings.store_url)
    current = revision(engine)
    engine.dispose()
    if current is None:
        raise BackupFailed(f"{settings.data_dir} has an empty store", hint="check --data-dir and store.url")
    return current


def sqlite_file(settings: Settings) -> Path | None:
    """Return the path of the store's SQLite file, None for PostgreSQL."""
    url = settings.store_url
    return Path(str(make_url(url).database)).absolute() if is_sqlite(url) else None


def _add_databases(writer: Writer, settings: Settings, folder: Path) -> str:
    checkpoints = settings.data_dir / CHECKPOINTS
    if checkpoints.exists():
        copy_sqlite(checkpoints, folder / CHECKPOINTS)
        writer.add(CHECKPOINTS, folder / CHECKPOINTS)
    file = sqlite_file(settings)
    if file is None:
        namespace = dump_postgres(settings.store_url, folder / DUMP).namespace
        writer.add(DUMP, folder / DUMP)
        return namespace
    copy_sqlite(file, folder / STORE)
    writer.add(STORE, folder / STORE)
    return ""


def _add_files(writer: Writer, data_dir: Path) -> None:
    paths = sorted([*_adapters(data_dir), *_environments(data_dir), *_runs(data_dir), *_targets(data_dir)])
    for path in paths:
        writer.add(path.relative_to(data_dir).as_posix(), path)
    config = find_settings_file(data_dir)
    if config is not None:
        writer.add(CONFIG, config)


def _adapters(data_dir: Path) -> Iterator[Path]:
    for version_dir in (data_dir / "adapters").glob("*@v*"):
        if NAME.fullmatch(version_dir.name):
            yield from _files(version_dir)


def _environments(data_dir: Path) -> Iterator[Path]:
    return (path for path in (data_dir / "environments").glob("*.py") if path.is_file())


def _targets(data_dir: Path) -> Iterator[Path]:
    """Yield the tables of ``traced target add``."""
    return (path for path in (data_dir / TARGETS).glob("*.toml") if path.is_file() and not path.is_symlink())


def _runs(data_dir: Path) -> Iterator[Path]:
    """Yield the runs' own files (reports, plots, routers), without trainings, whose adapters are published."""
    for run in (data_dir / "runs").glob("*"):
        for entry in run.glob("*"):
            if entry.name != "training" and not entry.name.endswith(".partial"):
                yield from _files(entry)


def _files(path: Path) -> Iterator[Path]:
    if path.is_symlink():
        return
    if path.is_file():
        yield path
    for inner in path.iterdir() if path.is_dir() else ():
        yield from _files(inner)


def _manifest(settings: Settings, revision: str, namespace: str, writer: Writer, now: datetime) -> Manifest:
    database = "sqlite" if is_sqlite(settings.store_url) else "postgresql"
    created_at = now.isoformat()
    return Manifest(
        version("traced"), created_at, str(settings.data_dir), database, revision, namespace, writer.members
    )


@contextmanager
def _staging(parent: Path) -> Iterator[Path]:
    """Create a folder for the copies, readable by its owner alone, and remove it at the end."""
    try:
        make_folder(parent)
        folder = Path(tempfile.mkdtemp(prefix=STAGING, dir=parent))
    except OSError as error:
        raise BackupFailed(f"cannot write in {parent}: {error.strerror}", hint="name another file") from error
    try:
        with marked_alive(folder):
            yield folder
    finally:
        shutil.rmtree(folder)
