"""``traced restore``: replace a data directory by the content of a backup.

Invariants: nothing is changed before every member was extracted beside the data directory and matches its checksum. The
data directory is then swapped in one step, so a killed restore leaves the old one whole. The old directory is moved
aside, never deleted. The adapters' paths in the store are changed if the data directory has another path. Backups and
logs that lie in the directory stay in it.

The swap: renameat2(2) with RENAME_EXCHANGE exchanges the two names atomically, so at any moment, also after a kill, the
name leads to the old directory or to the new one. On a file system that cannot exchange names, two renames follow each
other; after a kill between them, the old directory is whole under its new name.

A restore runs nothing from the backup: only files of the kinds that a backup has are accepted, PostgreSQL's are loaded
by pg_restore, and the settings that name commands are comments until a person has read them
(``traced.maintenance.restored_settings``). It asks before it revives or loses decisions of people
(``traced.maintenance.decision_changes``).

Errors: ``BackupDamaged``, ``RestoreRefused`` (among others for a mount point and for a parent directory that may not be
written), ``AlreadyRunning``; all of them change nothing. With PostgreSQL the database is loaded just before the
directories are swapped: after a kill or an error of the file system between the two, run the same command again with
``--force``.

Not covered: two file systems; rows of the backed-up daemon that refer to its processes
(``traced.maintenance.orphans``).
"""

import ctypes
import errno
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from store.database import known_revisions, redacted_url
from store.errors import StoreError
from store.text import sanitize_line
from traced.config.settings import TARGETS, Settings
from traced.core.errors import TracedError
from traced.core.files import flush, free_name
from traced.core.ownership import CYCLE_LOCK, SERVICE_LOCK, exclusive_access
from traced.core.permissions import tighten
from traced.maintenance import archive
from traced.maintenance.archive import Manifest
from traced.maintenance.backup import BACKUPS, CHECKPOINTS, CONFIG, DUMP, STORE, marked_alive, sqlite_file
from traced.maintenance.databases import Tables, dumped_data, load_dump, relocate_sqlite, tables_at
from traced.maintenance.decision_changes import TABLES, Rows, database_rows, decision_changes, script_rows, sqlite_rows
from traced.maintenance.errors import BackupDamaged, RestoreRefused
from traced.maintenance.restored_settings import disable_commands, disable_targets

AT_FDCWD, RENAME_EXCHANGE = -100, 2
# Errors of rows that traced never writes, in a store that is damaged or forged.
UNREADABLE = (sqlite3.Error, LookupError, TypeError, ValueError)
PLAIN_SCRIPT = "store.sql"  # PostgreSQL's store in backups of earlier versions
# The names of the files that ``traced.maintenance.backup`` puts into a backup.
MEMBER = re.compile(
    rf"{re.escape(STORE)}|{re.escape(DUMP)}|{re.escape(CHECKPOINTS)}|{re.escape(CONFIG)}|environments/[^/]+\.py"
    rf"|{re.escape(TARGETS)}/[^/]+\.toml"
    r"|adapters/[^/]+@v[0-9]+/.+|runs/[^/]+/(?!training/).+"
)


def put_in_place(new: Path, target: Path, backup_path: Path) -> None:
    """Move ``new`` to ``target`` and the old ``target`` to ``backup_path``.

    All three are siblings, and ``backup_path`` must not exist. Raises ``RestoreRefused``.
    """
    try:
        if _exchange(new, target):
            os.rename(new, backup_path)
        else:
            os.rename(target, backup_path)
            os.rename(new, target)
    except OSError as error:
        raise _write_error(error, target) from error


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names; return False if the kernel or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(number, os.strerror(number), str(second))


def mount_point(target: Path) -> RestoreRefused:
    """Return the error for a data directory that is a mount point and cannot be swapped."""
    return RestoreRefused(
        f"{target} is a mount point, but a restore replaces the whole directory",
        hint=f"traced restore FILE --data-dir {target / 'data'}",
    )


def _write_error(error: OSError, target: Path) -> RestoreRefused:
    if error.errno == errno.EBUSY:
        return mount_point(target)
    return RestoreRefused(
        f"{target} cannot be replaced: {error.strerror}",
        hint=f"run the command as a user with write access to {target.parent}",
    )


NOT_DATA = {SERVICE_LOCK, CYCLE_LOCK, BACKUPS, "logs"}  # entries that do not count as data


@dataclass(frozen=True)
class Restored:
    """The result of a restore.

    ``aside`` is the new path of the old directory, ``aside_schema`` the schema that PostgreSQL's old tables were moved
    to; both are None if there was nothing to move. ``commands`` are the lines of the settings that are off because they
    name a command, ``decisions`` a line for each decision that was revived or lost.
    """

    data_dir: Path
    manifest: Manifest
    aside: Path | None
    aside_schema: str | None
    commands: list[str]
    decisions: list[str]


SettingsOf = Callable[[Path], Settings]  # returns the settings of a data directory with its traced.toml
Accept = Callable[[list[str]], bool]  # returns whether a person accepts these changes of decisions


def accept_none(changes: list[str]) -> bool:
    """Accept no change of a decision."""
    return False


def restore(
    file: Path,
    data_dir: Path,
    settings_of: SettingsOf,
    *,
    now: datetime,
    force: bool = False,
    accept: Accept = accept_none,
) -> Restored:
    """Replace ``data_dir`` by the backup in ``file``; raises ``UpkeepError``.

    Args:
        file: A file of ``back_up``.
        data_dir: The directory to replace.
        settings_of: Returns the settings of a directory.
        now: The time, for the names of what is moved aside.
        force: Move existing data aside; without it they are an error.
        accept: Called if decisions would be revived or lost; False is an error.
    """
    if os.path.ismount(data_dir):
        raise mount_point(data_dir)
    with exclusive_access(data_dir, now):
        if not force:
            _refuse_data(data_dir)
        with _staging(data_dir) as staging:
            manifest = archive.extract(file, staging)
            _refuse_unexpected(manifest)
            _refuse_newer(manifest)
            commands = disable_commands(staging / CONFIG) + disable_targets(staging / TARGETS)
            stamp = f"{now:%Y%m%dT%H%M%SZ}"
            backup_path = free_name(data_dir.with_name(f"{data_dir.name}.before-{stamp}"))
            load = _Load(staging, data_dir, settings_of(staging), manifest, f"before_{stamp.lower()}", force)
            _refuse_other_store(load)
            decisions = _changed_decisions(load, settings_of)
            if decisions and not accept(decisions):
                raise RestoreRefused(
                    f"the restore would change decisions of people: {'; '.join(decisions)}",
                    hint="--accept, if that is what you want",
                )
            aside_schema = _load_store(load)
            _like(data_dir, staging)
            for path in [*staging.rglob("*"), staging]:
                flush(path)
            put_in_place(staging, data_dir, backup_path)
            old_directory = _settle(data_dir, backup_path)
            # A power cut after the answer must not bring the old data back.
            for path in (data_dir, data_dir.parent):
                flush(path)
    return Restored(data_dir, manifest, backup_path if old_directory else None, aside_schema, commands, decisions)


def _refuse_data(data_dir: Path) -> None:
    entries = sorted(path.name for path in data_dir.iterdir() if path.name not in NOT_DATA)
    if entries:
        raise RestoreRefused(
            f"{data_dir} already holds data ({', '.join(entries[:5])})",
            hint="use another --data-dir, or --force to move the data aside",
        )


def _refuse_unexpected(manifest: Manifest) -> None:
    """Refuse files that no backup has: the service would load some of them, such as its pickled schedule."""
    if PLAIN_SCRIPT in manifest.members:
        raise RestoreRefused(
            f"the backup holds the database as a plain SQL script ({PLAIN_SCRIPT}), which could run any command here",
            hint=f"restore it with traced {manifest.traced} in a virtual machine, upgrade there, and back up again",
        )
    unexpected = sorted(name for name in manifest.members if not MEMBER.fullmatch(name))
    if unexpected:
        names = ", ".join(map(sanitize_line, unexpected[:5]))
        raise RestoreRefused(f"the file holds what traced never backs up: {names}", hint="use another backup file")


def _refuse_newer(manifest: Manifest) -> None:
    if manifest.schema not in known_revisions():
        raise RestoreRefused(
            f"the backup has schema {manifest.schema!r}, written by traced {manifest.traced}, which this version "
            "does not support",
            hint="upgrade traced",
        )


@dataclass(frozen=True)
class _Load:
    """The backup to load and its destination; PostgreSQL's old tables are moved to the schema ``backup_schema``."""

    staging: Path
    data_dir: Path
    settings: Settings
    manifest: Manifest
    backup_schema: str
    force: bool

    @property
    def moves(self) -> tuple[str, str] | None:
        """Return the (old, new) data directory, or None if they are equal."""
        pair = (self.manifest.data_dir, str(self.data_dir))
        return pair if pair[0] != pair[1] else None


def _changed_decisions(load: _Load, settings_of: SettingsOf) -> list[str]:
    """Return a line for each decision in the current store that the restore would revive or lose.

    A store without tables has no decision to revive or lose: a restore on a new machine asks nothing.
    """
    settings_in_use = [load.settings]
    # The backup may replace the settings too, and with them the database that the service uses.
    changes: list[str] = []
    try:
        settings_in_use.append(settings_of(load.data_dir))
    except TracedError as error:
        changes.append(
            f"the settings in {load.data_dir} cannot be read, so a store that they name is not compared: {error}"
        )
    readers: dict[str, Callable[[], Rows | None]] = {}
    for file in {load.data_dir / STORE, *map(sqlite_file, settings_in_use)} - {None, load.staging / STORE}:
        if file is not None and file.exists():
            readers[str(file)] = partial(sqlite_rows, file)
    for url in {settings.store_url for settings in settings_in_use if sqlite_file(settings) is None}:
        readers[redacted_url(make_url(url))] = partial(database_rows, url)
    backup = _backup_rows(load) if readers else {}
    for store, read_rows in readers.items():
        try:
            if (current := read_rows()) is not None:
                changes += decision_changes(current, backup)
        except (*UNREADABLE, SQLAlchemyError, StoreError) as error:
            changes.append(f"the decisions in {store} cannot be read, and may be lost or revived: {error}")
    return changes


def _backup_rows(load: _Load) -> Rows:
    try:
        if load.manifest.database == "sqlite":
            return sqlite_rows(load.staging / STORE) or {table: [] for table in TABLES}
        script = load.staging / "decisions.sql"
        dumped_data(load.staging / DUMP, TABLES, script)
        rows = script_rows(script)
    except UNREADABLE as error:
        raise BackupDamaged(
            f"the store in the backup cannot be read: {error}", hint="use another backup file"
        ) from error
    script.unlink()
    return rows


def _refuse_other_store(load: _Load) -> None:
    """Refuse a store of another kind or at another place than the backup's."""
    file, target = sqlite_file(load.settings), load.data_dir / STORE
    kind = "postgresql" if file is None else "sqlite"
    if kind != load.manifest.database:
        raise RestoreRefused(
            f"the backup contains a {load.manifest.database} store, but the settings name a {kind} store",
            hint="--set store.url=URL of an empty database of that kind",
        )
    if file is None:
        _existing_tables(load)
    elif file not in (load.staging / STORE, target):
        raise RestoreRefused(
            f"the settings name the store {file}, but a restore writes to {target}",
            hint=f"--set store.url=sqlite:///{target}, and the same in traced.toml",
        )


def _load_store(load: _Load) -> str | None:
    """Load the store at its new place.

    Returns the schema that PostgreSQL's old tables were moved to, None if there were none.
    """
    if sqlite_file(load.settings) is None:
        return _load_postgres(load)
    if load.moves:
        relocate_sqlite(load.staging / STORE, *load.moves)
    return None


def _existing_tables(load: _Load) -> Tables:
    """Return the tables that the load moves aside; raises ``RestoreRefused`` if it may not."""
    existing = tables_at(load.settings.store_url)
    if existing.namespace != load.manifest.namespace:
        raise RestoreRefused(
            f"the backup's tables are in schema {load.manifest.namespace!r}, the database's in {existing.namespace!r}",
            hint="set the search_path of the role to the backup's",
        )
    if existing.names and not load.force:
        raise RestoreRefused("the database already holds tables of traced", hint="use --force to move them aside")
    return existing


def _load_postgres(load: _Load) -> str | None:
    existing = _existing_tables(load)
    dump = load.staging / DUMP
    load_dump(load.settings.store_url, dump, existing, load.backup_schema, load.moves)
    dump.unlink()
    return load.backup_schema if existing.names else None


@contextmanager
def _staging(data_dir: Path) -> Iterator[Path]:
    """Create a sibling folder of ``data_dir``, and remove it at the end unless it has replaced ``data_dir``."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=staging_prefix(data_dir), dir=data_dir.parent))
    except OSError as error:
        raise RestoreRefused(
            f"cannot write in {data_dir.parent}: {error.strerror}", hint="run the command as a user with write access"
        ) from error
    try:
        with marked_alive(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def staging_prefix(data_dir: Path) -> str:
    """Return the prefix of the staging folder's name for a restore into ``data_dir``."""
    return f".{data_dir.name}.restoring-"


def _like(old: Path, new: Path) -> None:
    """Close both directories to other users and, as root, give the new one the owner of the old one."""
    tighten(old)
    tighten(new)
    status = old.stat()
    if os.geteuid() == 0:
        for path in [new, *new.rglob("*")]:
            os.chown(path, status.st_uid, status.st_gid, follow_symlinks=False)


def _settle(data_dir: Path, backup_path: Path) -> bool:
    """Move backups and logs back into ``data_dir``; return whether ``backup_path`` still holds data, else delete it."""
    for name in (BACKUPS, "logs"):
        if (backup_path / name).exists():
            os.rename(backup_path / name, data_dir / name)
    if all(path.name in (SERVICE_LOCK, CYCLE_LOCK) for path in backup_path.iterdir()):
        shutil.rmtree(backup_path)
        return False
    return True
