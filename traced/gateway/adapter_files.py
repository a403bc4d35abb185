"""Verify the files of an adapter version when an engine of the router loads them.

Invariants: an engine is asked to load only files that have the hashes of the store; an adapter takes traffic only if
nothing was written to its folder between this check and the end of the loading. Files that differ put the version in
quarantine, except in a copy from an object store, which is fetched again.

Not covered: adapters that an engine has loaded already when the router starts.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

from sqlalchemy import Engine

from store.database import write_session
from store.errors import StoreError
from store.records import AdapterVersion, Event
from store.repositories.events import save_event
from traced.core.errors import AdapterChanged, PromotionError
from traced.gateway.adapter_cache import AdapterCache
from traced.inference.errors import ServingError
from traced.notifications.messages import adapter_copy_changed, announce
from traced.registry.integrity import FolderState, check_files, folder_state, quarantine

COPY_CHANGED = "adapter copy changed"  # event kind

log = logging.getLogger(__name__)


@dataclass
class AdapterFiles:
    """The files of the versions that the router needs.

    Args:
        hooks: The names of the notification hooks.
        cache: The copies from an object store; None: without one.
        versions: The required versions by their folders, set by ``PromotionFollower``.
    """

    store: Engine
    hooks: Sequence[str]
    now: Callable[[], datetime]
    cache: AdapterCache | None = None
    versions: Mapping[Path, AdapterVersion] = field(default_factory=dict)
    _announced: set[str] = field(default_factory=set)

    def verify(self, path: Path) -> Callable[[], None]:
        """Check the files in a folder, and return the check for when an engine has loaded them.

        Both raise ``ServingError``, and may take seconds for large files.
        """
        version = self.versions.get(path)
        if version is None:
            raise ServingError(f"the adapter in {path} is not live")
        # ``serving.adapters_root`` may be the path for the engines only, of the folder that the cycles wrote here.
        folder = path if path.is_dir() else Path(version.path)
        state = folder_state(folder)
        self._check(version, folder)
        return partial(self._check_loaded, version, folder, state)

    def report_stored_copy(self, version: AdapterVersion, reason: str) -> None:
        """Tell a person, once for each start of the router, that a copy in the object store is wrong.

        The version is not put in quarantine: no router loads the copy, and those that have the right files go on.
        """
        if version.name in self._announced:
            return
        log.error("%s: %s", version.name, reason)
        at = self.now()
        try:
            with write_session(self.store) as session:
                save_event(session, Event(at, COPY_CHANGED, version.name, version.cycle_id, {"reason": reason}))
                announce(session, adapter_copy_changed(version.name, reason, at), self.hooks, at=at)
        except StoreError as error:
            log.warning("the notice of a wrong copy of %s cannot be stored: %s", version.name, error)
            return
        self._announced.add(version.name)

    def _quarantine(self, error: AdapterChanged) -> None:
        try:
            quarantine(self.store, error, self.hooks, self.now())
        except StoreError as store_error:
            log.error("%s has changed, and its quarantine cannot be stored: %s", error.adapter, store_error)

    def _check(self, version: AdapterVersion, path: Path) -> None:
        try:
            check_files(version, path)
        except AdapterChanged as error:
            if self.cache is not None and path.parent == self.cache.folder:
                self.cache.discard(path)
            else:
                self._quarantine(error)
            raise ServingError(error.message, hint=error.hint) from error
        except PromotionError as error:
            raise ServingError(
                f"{error.message}; the router reads an adapter before an engine does",
                hint="mount the adapters under serving.adapters_root for the router too, or set an object store's URL",
            ) from error

    def _check_loaded(self, version: AdapterVersion, path: Path, state: FolderState) -> None:
        if folder_state(path) != state:
            self._check(version, path)
            # The engine may have read other bytes all the same.
            raise ServingError(f"{path} was written to while the engine loaded it, which is repeated")
