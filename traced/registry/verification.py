"""Check everything in a store that is named by its content, and end the quarantine of an adapter version.

Checked are the files of every adapter version, live ones first, the sources of the environments, and the hash chain of
the audit log. Files that differ put their version in quarantine (``traced.registry.integrity``).

Errors: ``AdapterChanged`` and PromotionError of ``release``, and the store's. Not covered: copies of routers, and
adapters that engines have loaded.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from sqlalchemy import Engine
from sqlmodel import Session

from store.database import read_session, write_session
from store.records import AdapterVersion
from store.repositories.adapters import end_quarantine, get_adapter, list_adapters
from store.repositories.environments import environment_sources
from store.repositories.events import check_audit
from store.repositories.promotions import newest_promotions
from traced.core.errors import AdapterChanged, PromotionError
from traced.registry.adapter_store import IN_SERVICE, AdapterStore, NotUploaded, StoredFilesChanged, is_url
from traced.registry.decisions import Action, record
from traced.registry.integrity import check_files, quarantining, stored_version


@dataclass(frozen=True)
class Problem:
    """Something that is not what it was when it was stored; ``kind`` is "adapter", "environment" or "audit"."""

    kind: str
    name: str
    text: str


def ordered_versions(session: Session) -> list[AdapterVersion]:
    """Return all adapter versions: those that take traffic, or may again after a rollback, first."""
    states = {entry.promotion.adapter: entry.promotion.state for entry in newest_promotions(session)}

    def rank(version: AdapterVersion) -> int:
        state = states.get(version.name)
        return IN_SERVICE.index(state) if state in IN_SERVICE else len(IN_SERVICE)

    return sorted(list_adapters(session), key=rank)


def check_everywhere(version: AdapterVersion, root: str) -> None:
    """Check the files of a version on this machine, and in the object store if ``root`` is a URL.

    Args:
        root: ``serving.adapters_root``.

    Raises:
        AdapterChanged: Files differ.
        PromotionError: The files are in neither place, or cannot be read.
    """
    is_here = Path(version.path).is_dir()
    if is_here or not is_url(root):
        check_files(version)
    if not is_url(root):
        return
    try:
        with TemporaryDirectory(prefix="traced-verify-") as folder:
            AdapterStore(root).download(version, Path(folder) / version.name)
    except StoredFilesChanged as error:
        raise AdapterChanged(version.name, error.message) from error
    except NotUploaded:
        if not is_here:
            raise


def adapter_problems(store: Engine, root: str, hooks: Sequence[str], now: Callable[[], datetime]) -> Iterator[Problem]:
    """Check every adapter version, and yield those in quarantine and those whose files cannot be read."""
    with read_session(store) as session:
        versions = ordered_versions(session)
    for version in versions:
        try:
            with quarantining(store, hooks, now):
                check_everywhere(version, root)
        except AdapterChanged as error:
            yield Problem("adapter", version.name, f"in quarantine: {error.reason}")
        except PromotionError as error:
            yield Problem("adapter", version.name, error.message)
        else:
            if version.quarantined_at is not None:
                text = f"in quarantine, and its files are right: traced verify --release {version.name}"
                yield Problem("adapter", version.name, text)


def row_problems(store: Engine) -> Iterator[Problem]:
    """Check the sources of the environments and the hash chain of the audit log."""
    with read_session(store) as session:
        for key, source_code in environment_sources(session):
            if hashlib.sha256(source_code.encode()).hexdigest() != key:
                yield Problem("environment", key, "its source is not the one that was stored under this hash")
        entry = check_audit(session)
        if entry is not None:
            text = f"entry {entry.seq} ({entry.action} by {entry.who}), or one before it, was changed or removed"
            yield Problem("audit", str(entry.seq), text)


def release(store: Engine, root: str, action: Action, name: str) -> AdapterVersion:
    """End the quarantine of an adapter version whose files are those that were published, and return the version.

    Raises:
        AdapterChanged: The files still differ.
        PromotionError: The version is not in quarantine, or its files cannot be read.
        NotFound: There is no such version.
    """
    version = stored_version(store, name)
    if version.quarantined_at is None:
        raise PromotionError(f"{name} is not in quarantine", hint="traced status")
    check_everywhere(version, root)
    with write_session(store) as session:
        end_quarantine(session, name)
        record(session, action, "release adapter", name, cycle_id=version.cycle_id, was=version.quarantine_reason)
        return get_adapter(session, name)
