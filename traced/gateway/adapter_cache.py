"""The router's copies of adapter versions from an object store, below its data directory.

    DATA/adapter-cache/NAME-DIGEST/       a version, complete and checked
    DATA/adapter-cache/.lock              held by the router or worker that downloads or removes

A thread downloads the versions that the router needs and that are not on this machine, and removes other copies
once no engine has them loaded. It is a daemon thread, so that an object store that hangs does not hold up the end of
the router.

Invariants: an engine is asked to load a copy only after its files had the SHA-256 of the database in this process. A
failed download is repeated until it succeeds or the version is no longer required. A rollback waits for no download.
"""

import asyncio
import contextlib
import fcntl
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from store.records import AdapterVersion
from traced.config.settings import Settings
from traced.core.errors import TracedError
from traced.gateway.engines import Replica
from traced.inference.errors import ServingError
from traced.registry.adapter_store import AdapterStore, folder_name, is_intact, is_url
from traced.registry.publication import is_published_in

FOLDER = "adapter-cache"
POLL_S = 0.2
# A router that starts waits so long for its adapters; then it serves the base model meanwhile.
START_S = 20.0
RETRY_S = (1.0, 30.0)  # the first wait, which doubles up to the last
log = logging.getLogger(__name__)


@dataclass
class _Download:
    version: AdapterVersion
    problem: str = ""
    wait_s: float = RETRY_S[0]
    due_at: float = 0.0


@dataclass
class AdapterCache:
    """Copies of adapter versions in ``folder``.

    Args:
        is_loaded: Returns whether an engine has the version of this name loaded, or serves a request with it.
    """

    store: AdapterStore
    folder: Path
    is_loaded: Callable[[str], bool]
    clock: Callable[[], float] = time.monotonic
    # None until the router knows what is live: nothing is removed before.
    _required: dict[Path, AdapterVersion] | None = None
    _missing: dict[Path, _Download] = field(default_factory=dict)
    _complete: set[Path] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def location(self, version: AdapterVersion) -> Path:
        """Return the folder where the cycle wrote a version if it is on this machine, else that of its copy."""
        path = Path(version.path)
        return path if is_published_in(path, version.files) else self.folder / folder_name(version)

    def require(self, versions: Mapping[Path, AdapterVersion]) -> None:
        """Set the versions that the router needs, by their ``location``; the thread fetches those in ``folder``."""
        self._required = {path: version for path, version in versions.items() if path.parent == self.folder}

    def check(self, path: Path) -> None:
        """Raise ``ServingError`` if ``path`` is the folder of a copy that is not complete."""
        if path.parent != self.folder or path in self._complete:
            return
        download = self._missing.get(path)
        problem = download.problem if download is not None else ""
        raise ServingError(problem or f"it is being downloaded from {self.store.display_url}")

    async def start(self) -> None:
        """Download what is required once, and return when that has ended or after ``START_S``."""
        thread = threading.Thread(target=self.refresh, daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, START_S)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Keep the copies up to date while the context is active."""
        stopped = threading.Event()
        threading.Thread(target=self._run, args=(stopped,), daemon=True, name="adapter cache").start()
        try:
            yield
        finally:
            stopped.set()

    def _run(self, stopped: threading.Event) -> None:
        while not stopped.wait(POLL_S):
            self.refresh()

    def refresh(self) -> None:
        """Download what is required and due, and remove what is not required."""
        with self._lock:
            required = self._required
            if required is None:
                return
            try:
                self._refresh(required)
            except Exception:
                # The thread has nobody who could restart it.
                log.exception("the copies of adapters in %s could not be updated", self.folder)

    def _refresh(self, required: dict[Path, AdapterVersion]) -> None:
        # Another worker of this data directory may have removed a copy before it knew that the version is live again.
        self._complete = {path for path in self._complete if path in required and path.is_dir()}
        self._missing = {path: entry for path, entry in self._missing.items() if path in required}
        for path, version in required.items():
            if path not in self._complete:
                entry = self._missing.setdefault(path, _Download(version))
                if entry.due_at <= self.clock():
                    self._fetch(path, entry)
        if self.folder.is_dir():
            self._remove_unused(required)

    def _fetch(self, path: Path, entry: _Download) -> None:
        try:
            with self._exclusive():
                # A copy of an earlier process may have been damaged since.
                if not (path.is_dir() and is_intact(path, entry.version)):
                    self.store.download(entry.version, path)
        except (OSError, TracedError) as error:
            if entry.problem != str(error):
                log.warning("%s: %s", entry.version.name, error)
            entry.problem, entry.due_at = str(error), self.clock() + entry.wait_s
            entry.wait_s = min(2 * entry.wait_s, RETRY_S[1])
            return
        self._complete.add(path)
        del self._missing[path]
        log.info("%s is in %s", entry.version.name, path)

    def _remove_unused(self, required: dict[Path, AdapterVersion]) -> None:
        unused = [path for path in self.folder.iterdir() if path not in required and not path.name.startswith(".")]
        for path in unused:
            if not self.is_loaded(path.name.rpartition("-")[0]):
                with self._exclusive():
                    shutil.rmtree(path, ignore_errors=True)
                if not path.exists():
                    log.info("%s is removed, it is no longer live", path)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the lock of the folder, and remove the downloads that killed routers left behind."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for leftover in self.folder.glob(".*.partial"):
                shutil.rmtree(leftover)
            yield


def open_cache(settings: Settings, replicas: Callable[[], Iterable[Replica]]) -> AdapterCache | None:
    """Return the cache of the settings, None without an object store; raises ``AdapterStoreError``."""
    root = settings.serving.adapters_root
    if not is_url(root):
        return None
    store = AdapterStore(root)
    store.check_installed()

    def is_loaded(name: str) -> bool:
        return any(name in replica.loaded or replica.running[name] for replica in replicas())

    return AdapterCache(store, settings.data_dir / FOLDER, is_loaded)


def adapter_check(cache: AdapterCache | None, check_base: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a function that raises ``ServingError`` for the folder of an adapter that no engine must load."""

    def check(path: Path) -> None:
        if cache is not None:
            cache.check(path)
        check_base(path)

    return check
