"""The router's copies of adapter versions from an object store, below its data directory.

    DATA/adapter-cache/NAME-DIGEST/       a version, complete and checked
    DATA/adapter-cache/.NAME-DIGEST.lock  held by the router or worker that downloads or removes this version; stays
    DATA/adapter-cache/.NAME-DIGEST.partial/  a download or a removal; without a holder of the lock, of a killed process

A thread checks the copies of the versions that the router needs, starts a thread for each version that has to be
downloaded, and removes other copies once no engine has them loaded. All are daemon threads, so that an object store
that hangs does not hold up the end of the router.

Invariants: an engine is asked to load a copy only after its files had the SHA-256 of the database in this process
(``traced.gateway.adapter_files`` checks them once more at each load). A
failed download is repeated until it succeeds or the version is no longer required. A download that hangs holds back
no other version, in this process or another. A rollback waits for no download.
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
from traced.registry.adapter_store import AdapterStore, StoredFilesChanged, folder_name, is_url
from traced.registry.integrity import changed_files
from traced.registry.publication import is_published_in

FOLDER = "adapter-cache"
POLL_S = 0.2
# A router that starts waits so long for its adapters; then it serves the base model meanwhile.
START_S = 20.0
# The end of the names in which ``publish_folder`` writes.
PARTIAL = ".partial"
RETRY_S = (1.0, 30.0)  # the first wait, which doubles up to the last
log = logging.getLogger(__name__)


@dataclass
class _Retry:
    """When to repeat what fails: at growing intervals; a problem is logged once."""

    problem: str = ""
    wait_s: float = RETRY_S[0]
    due_at: float = 0.0

    def add_failure(self, subject: str, error: Exception, now: float) -> None:
        problem = str(error) or repr(error)
        if self.problem != problem:
            is_expected = isinstance(error, OSError | TracedError)
            log.warning("%s: %s", subject, problem, exc_info=None if is_expected else error)
        self.problem, self.due_at = problem, now + self.wait_s
        self.wait_s = min(2 * self.wait_s, RETRY_S[1])


@dataclass
class _Download:
    version: AdapterVersion
    retry: _Retry = field(default_factory=_Retry)
    thread: threading.Thread | None = None

    def is_running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()


@dataclass
class AdapterCache:
    """Copies of adapter versions in ``folder``.

    Args:
        is_loaded: Returns whether an engine has the version of this name loaded, or serves a request with it.
        on_changed: Called with a version, and a reason, whose files in the object store are not those published.
    """

    store: AdapterStore
    folder: Path
    is_loaded: Callable[[str], bool]
    on_changed: Callable[[AdapterVersion, str], None] = lambda version, reason: None
    clock: Callable[[], float] = time.monotonic
    # None until the router knows what is live: nothing is removed before.
    _required: dict[Path, AdapterVersion] | None = None
    _missing: dict[Path, _Download] = field(default_factory=dict)
    _complete: set[Path] = field(default_factory=set)
    _removal: _Retry = field(default_factory=_Retry)
    _refresh_problem: str = ""
    # Never held during a download.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def location(self, version: AdapterVersion) -> Path:
        """Return the folder where the cycle wrote a version if it is on this machine, else that of its copy."""
        path = Path(version.path)
        return path if is_published_in(path, version.files) else self.folder / folder_name(version)

    def require(self, versions: Mapping[Path, AdapterVersion]) -> None:
        """Set the versions that the router needs, by their ``location``; those in ``folder`` are fetched."""
        self._required = {path: version for path, version in versions.items() if path.parent == self.folder}

    def check(self, path: Path) -> None:
        """Raise ``ServingError`` if ``path`` is the folder of a copy that is not complete."""
        if path.parent != self.folder or path in self._complete:
            return
        download = self._missing.get(path)
        problem = download.retry.problem if download is not None else ""
        raise ServingError(problem or f"it is being downloaded from {self.store.display_url}")

    def discard(self, path: Path) -> None:
        """Have the copy in ``path`` checked again, and fetched again if it is damaged."""
        with self._lock:
            self._complete.discard(path)

    async def start(self) -> None:
        """Download what is required once, and return when that has ended or after ``START_S``."""
        thread = threading.Thread(target=self.refresh_and_wait, daemon=True)
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
        """Check the copies that are required, start the downloads that are due, and remove what is not required."""
        with self._lock:
            required = self._required
            if required is None:
                return
            try:
                self._refresh(required)
                self._refresh_problem = ""
            except Exception as error:
                # The thread has nobody who could restart it.
                if self._refresh_problem != str(error):
                    log.exception("the copies of adapters in %s could not be updated", self.folder)
                self._refresh_problem = str(error)

    def refresh_and_wait(self) -> None:
        """As ``refresh``, and wait for the downloads in progress, however long they take."""
        self.refresh()
        with self._lock:
            threads = [entry.thread for entry in self._missing.values()]
        for thread in threads:
            if thread is not None:
                thread.join()

    def _refresh(self, required: dict[Path, AdapterVersion]) -> None:
        # Another worker of this data directory may have removed a copy before it knew that the version is live again.
        self._complete = {path for path in self._complete if path in required and path.is_dir()}
        # A thread that hangs is kept: a version that is required again must not get a second one.
        self._missing = {path: entry for path, entry in self._missing.items() if path in required or entry.is_running()}
        for path, version in required.items():
            if path not in self._complete:
                self._missing.setdefault(path, _Download(version))
        now = self.clock()
        attempts = [
            (path, entry)
            for path, entry in self._missing.items()
            if path in required and not entry.is_running() and entry.retry.due_at <= now
        ]
        for path, entry in attempts:
            if _is_usable(path, entry.version):
                self._set_complete(path)
            else:
                entry.thread = threading.Thread(target=self._download, args=(path, entry), daemon=True, name=path.name)
                entry.thread.start()
        if self._removal.due_at <= now and self.folder.is_dir():
            self._remove_unused(required)

    def _download(self, path: Path, entry: _Download) -> None:
        """Download a version; runs in a thread of its own, because the object store may hang."""
        try:
            with self._exclusive(path):
                # Another worker may have downloaded it while this one waited for the lock.
                if not _is_usable(path, entry.version):
                    self.store.download(entry.version, path)
        except Exception as error:
            entry.retry.add_failure(entry.version.name, error, self.clock())
            if isinstance(error, StoredFilesChanged):
                self.on_changed(entry.version, error.message)
            return
        with self._lock:
            self._set_complete(path)

    def _set_complete(self, path: Path) -> None:
        self._complete.add(path)
        entry = self._missing.pop(path)
        log.info("%s is in %s", entry.version.name, path)

    def _remove_unused(self, required: dict[Path, AdapterVersion]) -> None:
        """Remove the copies that neither the router nor an engine needs, and what killed processes left behind."""
        errors: list[OSError] = []
        for path in sorted(path for path in self.folder.iterdir() if path.is_dir()):
            try:
                if path.name.startswith("."):
                    if path.name.endswith(PARTIAL):
                        self._remove_leftover(self.folder / path.name[1:].removesuffix(PARTIAL))
                elif path not in required and not self.is_loaded(path.name.rpartition("-")[0]):
                    self._remove_copy(path)
            except (BlockingIOError, FileNotFoundError):
                pass  # Another thread or worker downloads or removes it.
            except OSError as error:
                errors.append(error)
        if errors:
            self._removal.add_failure(f"unused copies in {self.folder} are not removed", errors[0], self.clock())
        else:
            self._removal = _Retry()

    def _remove_leftover(self, path: Path) -> None:
        with self._exclusive(path, fcntl.LOCK_NB):
            shutil.rmtree(_staging(path))

    def _remove_copy(self, path: Path) -> None:
        with self._exclusive(path, fcntl.LOCK_NB):
            # Renamed first, so that no other worker sees a copy that has lost some of its files.
            shutil.rmtree(path.rename(_staging(path)))
        log.info("%s is removed, it is no longer live", path)

    @contextlib.contextmanager
    def _exclusive(self, path: Path, flags: int = 0) -> Iterator[None]:
        """Hold the lock of one version's folder; raises ``BlockingIOError`` if ``flags`` say not to wait for it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | flags)
            yield


def _is_usable(path: Path, version: AdapterVersion) -> bool:
    """Return whether the copy is intact; a disk that cannot read it, or a worker that replaces it, has it fetched."""
    try:
        return path.is_dir() and not changed_files(path, version.files)
    except OSError:
        return False


def _staging(path: Path) -> Path:
    return path.with_name(f".{path.name}{PARTIAL}")


def open_cache(
    settings: Settings,
    replicas: Callable[[], Iterable[Replica]],
    on_changed: Callable[[AdapterVersion, str], None] = lambda version, reason: None,
) -> AdapterCache | None:
    """Return the cache of the settings, None without an object store; raises ``AdapterStoreError``."""
    root = settings.serving.adapters_root
    if not is_url(root):
        return None
    store = AdapterStore(root)
    store.check_installed()

    def is_loaded(name: str) -> bool:
        return any(name in replica.loaded or replica.running[name] for replica in replicas())

    return AdapterCache(store, settings.data_dir / FOLDER, is_loaded, on_changed)


def adapter_check(cache: AdapterCache | None, check_base: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a function that raises ``ServingError`` for the folder of an adapter that no engine must load."""

    def check(path: Path) -> None:
        if cache is not None:
            cache.check(path)
        check_base(path)

    return check
