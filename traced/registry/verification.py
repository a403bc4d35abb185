"""Check everything in a store that is named by its content, and end the quarantine of an adapter version.

Checked are the files of every adapter version, live ones first, the sources of the environments, and the hash chain of
the audit log. Files that differ put their version in quarantine (``traced.registry.integrity``). A copy in the object
store that differs does not: no router loads it, and those that have the right files go on.

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

from store.database import damaged_page, read_session, redacted_url, write_session
from store.records import AdapterVersion
from store.repositories.adapters import end_quarantine, get_adapter, list_adapters
from store.repositories.environments import environment_sources
from store.repositories.events import check_audit
from store.repositories.promotions import newest_promotions
from traced.core.errors import AdapterChanged, PromotionError
from traced.registry.adapter_store import IN_SERVICE, AdapterStore, NotUploaded, is_url, local_folder
from traced.registry.decision_rules import Action
from traced.registry.decisions import record
from traced.registry.integrity import check_files, check_usable, quarantining, stored_version


@dataclass(frozen=True)
class Problem:
    """Something that is not as it was stored; ``kind`` is "adapter", "environment", "audit" or "store"."""

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


def adapter_problems(store: Engine, root: str, hooks: Sequence[str], now: Callable[[], datetime]) -> Iterator[Problem]:
    """Check every adapter version here, and its copy in the object store if ``root`` is a URL; yield the problems.

    Args:
        root: ``serving.adapters_root``.
    """
    with read_session(store) as session:
        versions = ordered_versions(session)
    for version in versions:
        try:
            with quarantining(store, hooks, now):
                check_files(version, local_folder(version, root))
        except AdapterChanged as error:
            yield Problem("adapter", version.name, f"in quarantine: {error.reason}")
        except PromotionError as error:
            # A router may have copies from the object store only.
            if not is_url(root):
                yield Problem("adapter", version.name, error.message)
        else:
            if version.quarantined_at is not None:
                text = f"in quarantine, and its files are right: traced verify --release {version.name}"
                yield Problem("adapter", version.name, text)
        if is_url(root):
            yield from _problems_of_copy(version, root)


def _problems_of_copy(version: AdapterVersion, root: str) -> Iterator[Problem]:
    try:
        _check_copy(version, root)
    except NotUploaded as error:
        # Only versions that were approved are uploaded.
        if not local_folder(version, root).is_dir():
            yield Problem("adapter", version.name, error.message)
    except PromotionError as error:
        yield Problem("adapter", version.name, error.message)


def _check_copy(version: AdapterVersion, root: str) -> None:
    """Download a version and compare it; raises ``AdapterStoreError``."""
    with TemporaryDirectory(prefix="traced-verify-") as folder:
        AdapterStore(root).download(version, Path(folder) / version.name)


def problems_in_service(store: Engine, root: str) -> Iterator[Problem]:
    """Check the database file, the audit log, and the local files of the adapter versions in service.

    For ``traced doctor``: it changes nothing, so a version whose files differ is not put in quarantine.
    """
    if (damage := damaged_page(store)) is not None:
        yield Problem("store", redacted_url(store.url), damage)
        return
    with read_session(store) as session:
        yield from _audit_problems(session)
        names = {entry.promotion.adapter for entry in newest_promotions(session) if entry.promotion.state in IN_SERVICE}
        versions = [version for version in ordered_versions(session) if version.name in names]
    for version in versions:
        folder = local_folder(version, root)
        if not folder.is_dir() and is_url(root):
            continue  # it is downloaded at its first use
        try:
            check_usable(version, folder)
        except (AdapterChanged, PromotionError) as error:
            yield Problem("adapter", version.name, error.message)


def row_problems(store: Engine) -> Iterator[Problem]:
    """Check the sources of the environments and the hash chain of the audit log."""
    with read_session(store) as session:
        for key, source_code in environment_sources(session):
            if hashlib.sha256(source_code.encode()).hexdigest() != key:
                yield Problem("environment", key, "its source is not the one that was stored under this hash")
        yield from _audit_problems(session)


def _audit_problems(session: Session) -> Iterator[Problem]:
    number = check_audit(session)
    if number is not None:
        yield Problem("audit", str(number), f"entry {number}, or one before it, was changed or removed")


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
    folder = local_folder(version, root)
    if folder.is_dir() or not is_url(root):
        check_files(version, folder)
    else:
        _check_copy(version, root)
    with write_session(store) as session:
        end_quarantine(session, name)
        record(session, action, "release adapter", name, cycle_id=version.cycle_id, was=version.quarantine_reason)
        return get_adapter(session, name)
