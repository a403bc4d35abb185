"""Find and remove what a killed process left behind, when the next one starts.

    containers   of this owner whose starting process has ended
    staging      ``.NAME.partial`` (training, prune), ``NAME.partial`` (environments), ``.staging-*`` (publications),
                 ``.partial-backup-*`` and ``.DIR.restoring-*`` (backups and restores)
    leases       of dead holders

Invariants: the caller of ``sweep`` holds the directory's lock (``traced.core.ownership``). The staging of a backup, a
restore or a publication that is still running is recognised by its flock and kept; other staging is kept while it is
newer than ``min_age``. Everything that is removed is reported; a second call finds nothing more.

Errors: a Docker engine that does not answer is reported as an ``Orphan``, every other error is raised. Not covered:
attempts of dead holders and their children (``traced.jobs.attempts.recover_lost_attempts``), and the databases' own
journals, which the databases clean up themselves.
"""

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import Engine

from sandbox.docker_engine import reap_orphans
from sandbox.errors import EngineDown
from store.database import write_session
from store.repositories.leases import HolderCheck, delete_dead_leases
from traced.maintenance.backup import BACKUPS, STAGING, is_alive
from traced.maintenance.prune import ignore_missing
from traced.maintenance.restore import staging_prefix

SEARCHED = ("adapters", "environments", "runs", "models", "logs")  # folders that may contain staging
AT_ONCE = timedelta(0)


@dataclass(frozen=True)
class Orphan:
    """Something that a killed process left behind; ``removed`` is False if it is only reported."""

    kind: str
    name: str
    removed: bool = True


def sweep(
    data_dir: Path,
    store: Engine,
    alive: HolderCheck,
    *,
    now: datetime,
    owner: str,
    min_age: timedelta = AT_ONCE,
) -> list[Orphan]:
    """Remove orphans and return them; staging written to within the last ``min_age`` may be in use and is kept."""
    orphans = [*_containers(owner)]
    left = [*_removed(_staging(data_dir, now - min_age)), *_of_publications(data_dir / "adapters")]
    orphans += [Orphan("staging", str(path)) for path in left]
    with write_session(store) as session:
        orphans += [Orphan("lease", name) for name in delete_dead_leases(session, alive, at=now)]
    return orphans


def _containers(owner: str) -> Iterator[Orphan]:
    try:
        yield from (Orphan("container", name) for name in reap_orphans(owner))
    except EngineDown as error:
        yield Orphan("container", f"not checked: {error}", removed=False)


def _staging(data_dir: Path, settled_at: datetime) -> Iterator[Path]:
    for folder in SEARCHED:
        for path in _partial(data_dir / folder):
            if _latest_mtime(path) <= settled_at.timestamp():
                yield path
    kept_by_flock = [*(data_dir / BACKUPS).glob(f"{STAGING}*"), *data_dir.parent.glob(f"{staging_prefix(data_dir)}*")]
    yield from (path for path in kept_by_flock if path.is_dir() and not is_alive(path))


def _partial(folder: Path) -> Iterator[Path]:
    """Yield ``.NAME.partial`` and ``NAME.partial`` below ``folder``, without looking inside them."""
    for entry in sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else ():
        if entry.name.endswith(".partial"):
            yield entry
        else:
            yield from _partial(entry)


def _of_publications(adapters: Path) -> list[Path]:
    """Remove the staging of publications and return it; [] while a publication holds the lock of ``adapters``."""
    lock = adapters / ".lock"
    if not lock.exists():
        return []
    with lock.open("r+") as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return []
        return [*_removed(sorted(adapters.glob(".staging-*")))]


def _removed(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, onerror=ignore_missing)
        else:
            path.unlink(missing_ok=True)
        yield path


def _latest_mtime(path: Path) -> float:
    """Return when ``path`` or anything below it was last written to, in seconds since the epoch."""
    times = [path.lstat().st_mtime]
    for folder, _, files in os.walk(path):
        times += [os.lstat(os.path.join(folder, name)).st_mtime for name in [".", *files]]
    return max(times)
