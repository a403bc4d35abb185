"""Verify the files of an adapter version when an engine of the router loads them.

Invariants: an engine is asked to load only files that have the hashes of the store; an adapter takes traffic only if
nothing was written to its folder between this check and the end of the loading. Files that differ put the version in
quarantine, except in a copy from an object store, which is fetched again.

Not covered: adapters that an engine has loaded already when the router starts, and a copy that is wrong in the object
store itself (``traced.gateway.adapter_cache``).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

from sqlalchemy import Engine

from store.errors import StoreError
from store.records import AdapterVersion
from traced.core.errors import AdapterChanged, PromotionError
from traced.gateway.adapter_cache import AdapterCache
from traced.inference.errors import ServingError
from traced.registry.integrity import FolderState, check_files, folder_state, quarantine

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

    def verify(self, path: Path) -> Callable[[], None]:
        """Check the files in a folder, and return the check for when an engine has loaded them.

        Both raise ``ServingError``, and may take seconds for large files.
        """
        version = self.versions.get(path)
        if version is None:
            raise ServingError(f"the adapter in {path} is not live")
        state = folder_state(path)
        self._check(version, path)
        return partial(self._check_loaded, version, path, state)

    def put_in_quarantine(self, version: AdapterVersion, reason: str) -> None:
        """Put a version in quarantine; while the store does not answer, only a log line reports it."""
        try:
            quarantine(self.store, AdapterChanged(version.name, reason), self.hooks, self.now())
        except StoreError as error:
            log.error("%s has changed (%s), and its quarantine cannot be stored: %s", version.name, reason, error)

    def _check(self, version: AdapterVersion, path: Path) -> None:
        try:
            check_files(version, path)
        except AdapterChanged as error:
            if self.cache is not None and path.parent == self.cache.folder:
                self.cache.discard(path)
            else:
                self.put_in_quarantine(version, error.reason)
            raise ServingError(error.message, hint=error.hint) from error
        except PromotionError as error:
            raise ServingError(error.message, hint=error.hint) from error

    def _check_loaded(self, version: AdapterVersion, path: Path, state: FolderState) -> None:
        if folder_state(path) != state:
            self._check(version, path)
            # The engine may have read other bytes all the same.
            raise ServingError(f"{path} was written to while the engine loaded it, which is repeated")
