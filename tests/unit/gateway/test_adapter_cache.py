"""The router's copies of adapters from an object store: checked, repeated, removed, and never in the way."""

import asyncio
import errno
import fcntl
import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from store.records import AdapterVersion
from tests.unit.registry.chain import hour, publish_adapter
from tests.waiting import eventually, eventually_async
from traced.core.errors import DiskError
from traced.gateway import adapter_cache
from traced.gateway.adapter_cache import AdapterCache
from traced.gateway.adapter_files import AdapterFiles
from traced.inference.errors import ServingError
from traced.registry.adapter_store import AdapterStore, AdapterStoreError, NotUploaded, StoredFilesChanged

WITHIN_S = 20
WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class Objects(AdapterStore):
    """An object store whose downloads hang and raise ``errors`` first, by version, and are counted."""

    errors: dict[str, list[Exception]] = field(default_factory=dict)
    hanging: dict[str, threading.Event] = field(default_factory=dict)
    downloads: list[str] = field(default_factory=list)

    def download(self, version: AdapterVersion, target: Path) -> None:
        self.downloads.append(version.name)
        if version.name in self.hanging:
            assert self.hanging[version.name].wait(60)
        if self.errors.get(version.name):
            raise self.errors[version.name].pop(0)
        super().download(version, target)

    @contextmanager
    def hang(self, version: AdapterVersion) -> Iterator[None]:
        """Let the downloads of this version hang until the context ends."""
        self.hanging[version.name] = threading.Event()
        try:
            yield
        finally:
            self.hanging.pop(version.name).set()


@dataclass
class Place:
    """Two versions that are uploaded and whose folders are gone, and a router's cache with a clock."""

    cache: AdapterCache
    objects: Objects
    versions: list[AdapterVersion]
    loaded: set[str]
    time: float = 0.0

    def require(self, *versions: AdapterVersion) -> None:
        require(self.cache, *versions)
        self.cache.refresh_and_wait()

    def refresh(self, seconds: float) -> None:
        self.time += seconds
        self.cache.refresh_and_wait()

    def problem(self, version: AdapterVersion) -> str:
        return problem(self.cache, version)

    def worker(self) -> AdapterCache:
        """Another worker's cache in this folder, or that of this router after a restart."""
        return AdapterCache(self.objects, self.cache.folder, self.loaded.__contains__)


def require(cache: AdapterCache, *versions: AdapterVersion) -> None:
    cache.require({cache.location(version): version for version in versions})


def problem(cache: AdapterCache, version: AdapterVersion) -> str:
    try:
        cache.check(cache.location(version))
    except ServingError as error:
        return str(error)
    return ""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    objects, loaded = Objects(f"memory://{tmp_path}/traced"), set[str]()
    versions = [publish_adapter(tmp_path, number) for number in (1, 2)]
    for version in versions:
        objects.upload(version)
    (tmp_path / "adapters").rename(tmp_path / "elsewhere")
    cache = AdapterCache(objects, tmp_path / "router" / "adapter-cache", loaded.__contains__)
    place = Place(cache, objects, versions, loaded)
    cache.clock = lambda: place.time
    return place


def test_a_version_that_is_here_is_not_copied(tmp_path: Path, place: Place) -> None:
    version = place.versions[0]
    (tmp_path / "elsewhere").rename(tmp_path / "adapters")
    assert place.cache.location(version) == Path(version.path)
    place.require(version)
    assert (place.objects.downloads, place.problem(version)) == ([], "")
    # At the same path a data directory of this machine has another version of this name.
    manifest = Path(version.path) / "manifest.json"
    manifest.chmod(0o644)
    manifest.write_bytes((Path(place.versions[1].path) / "manifest.json").read_bytes())
    assert place.cache.location(version).parent == place.cache.folder


def test_a_copy_can_be_loaded_once_it_is_complete(place: Place) -> None:
    version = place.versions[0]
    assert "it is being downloaded from memory://" in place.problem(version)
    place.require(version)
    assert place.problem(version) == ""
    assert (place.cache.location(version) / WEIGHTS).read_bytes() == b"run-1"
    place.refresh(100)
    assert place.objects.downloads == [version.name]


def test_a_download_that_fails_is_repeated_less_and_less_often(place: Place) -> None:
    version = place.versions[0]
    errors: list[Exception] = [NotUploaded("not uploaded yet"), AdapterStoreError("no answer"), DiskError("full")]
    place.objects.errors[version.name] = errors
    place.require(version)
    assert place.problem(version) == "not uploaded yet"
    place.refresh(0.9)
    assert len(place.objects.downloads) == 1
    place.refresh(0.2)
    assert place.problem(version) == "no answer"
    place.refresh(1.9)
    assert len(place.objects.downloads) == 2
    place.refresh(0.2)
    assert place.problem(version) == "full"
    place.refresh(4)
    assert (len(place.objects.downloads), place.problem(version)) == (4, "")


def test_one_version_that_fails_does_not_keep_another_back(place: Place) -> None:
    place.objects.errors[place.versions[0].name] = [AdapterStoreError("no answer")]
    place.require(*place.versions)
    assert [place.problem(version) for version in place.versions] == ["no answer", ""]


@pytest.mark.parametrize("is_copied", [True, False], ids=["in the cache", "to be downloaded"])
def test_a_download_that_hangs_does_not_keep_another_version_back(
    place: Place, monkeypatch: pytest.MonkeyPatch, is_copied: bool
) -> None:
    monkeypatch.setattr(adapter_cache, "POLL_S", 0.01)
    new, old = place.versions
    if is_copied:
        place.require(old)
    restarted, other = place.worker(), place.worker()
    require(restarted, new, old)
    require(other, old)
    with place.objects.hang(new), restarted.running(), other.running():
        eventually(lambda: new.name in place.objects.downloads)
        eventually(lambda: problem(restarted, old) == problem(other, old) == "", within_s=WITHIN_S)
        assert "being downloaded" in problem(restarted, new)
        assert place.objects.downloads.count(old.name) == 1
    restarted.refresh_and_wait()
    assert problem(restarted, new) == ""
    assert place.objects.downloads.count(new.name) == 1


def test_two_workers_download_a_version_once(place: Place) -> None:
    version = place.versions[0]
    workers = [place.worker(), place.worker()]
    with place.objects.hang(version):
        for worker in workers:
            require(worker, version)
            worker.refresh()
        eventually(lambda: place.objects.downloads)
    for worker in workers:
        worker.refresh_and_wait()
        assert problem(worker, version) == ""
    assert place.objects.downloads == [version.name]


def test_a_version_that_is_required_again_waits_for_the_download_that_hangs(place: Place) -> None:
    version = place.versions[0]
    with place.objects.hang(version):
        for required in ([version], [], [version]):
            require(place.cache, *required)
            place.cache.refresh()
        assert sum(thread.name.startswith(version.name) for thread in threading.enumerate()) == 1
    place.refresh(0)
    assert (place.problem(version), place.objects.downloads) == ("", [version.name])


def test_a_download_that_ends_after_its_version_was_dropped_is_removed(place: Place) -> None:
    version = place.versions[0]
    with place.objects.hang(version):
        require(place.cache, version)
        place.cache.refresh()
        require(place.cache)
        place.cache.refresh()
    place.refresh(0)
    place.refresh(0)
    assert not place.cache.location(version).exists()
    assert "being downloaded" in place.problem(version)


def test_a_copy_that_was_damaged_before_the_start_is_fetched_again(place: Place) -> None:
    version = place.versions[0]
    place.require(version)
    weights = place.cache.location(version) / WEIGHTS
    weights.write_bytes(b"run-2")
    second = place.worker()
    require(second, version)
    with pytest.raises(ServingError):
        second.check(second.location(version))
    second.refresh_and_wait()
    second.check(second.location(version))
    assert weights.read_bytes() == b"run-1"
    third = place.worker()
    require(third, version)
    third.refresh_and_wait()
    assert len(place.objects.downloads) == 2  # an intact copy is used as it is


def test_a_copy_that_is_damaged_before_its_load_is_fetched_again_without_a_quarantine(place: Place) -> None:
    version = place.versions[0]
    place.require(version)
    path = place.cache.location(version)
    # There is no store in which a quarantine could be written.
    files = AdapterFiles(None, [], lambda: hour(1), place.cache, {path: version})  # type: ignore[arg-type]
    files.verify(path)()
    (path / WEIGHTS).write_bytes(b"run-2")
    with pytest.raises(ServingError, match="is not what was published"):
        files.verify(path)
    assert "being downloaded" in place.problem(version)
    place.refresh(0)
    files.verify(path)()
    assert ((path / WEIGHTS).read_bytes(), len(place.objects.downloads)) == (b"run-1", 2)


def test_a_wrong_copy_in_the_object_store_is_reported_by_each_download(place: Place) -> None:
    version, reports = place.versions[0], list[str]()
    place.cache.on_changed = lambda changed, reason: reports.append(f"{changed.name}: {reason}")
    place.objects.errors[version.name] = [StoredFilesChanged("other files"), AdapterStoreError("no answer")]
    place.require(version)
    place.refresh(1)
    assert reports == [f"{version.name}: other files"]


def test_a_copy_that_is_not_live_is_removed_once_no_engine_has_it(place: Place) -> None:
    first, second = place.versions
    place.require(first, second)
    place.loaded.add(first.name)
    place.require(second)
    assert place.cache.location(first).is_dir()
    place.loaded.clear()
    place.refresh(0)
    assert not place.cache.location(first).exists()
    assert place.cache.location(second).is_dir()
    assert "being downloaded" in place.problem(first)
    place.require(first, second)
    assert place.problem(first) == ""


def test_a_copy_that_another_worker_removed_is_fetched_again(place: Place) -> None:
    version = place.versions[0]
    place.require(version)
    other = place.worker()
    other.require({})
    other.refresh()
    assert not place.cache.location(version).exists()
    place.refresh(0)
    assert (place.cache.location(version).is_dir(), place.problem(version)) == (True, "")


def test_nothing_is_removed_before_the_router_knows_what_is_live(place: Place) -> None:
    place.require(place.versions[0])
    restarted = place.worker()
    restarted.refresh()
    assert place.cache.location(place.versions[0]).is_dir()


def test_what_a_killed_download_left_is_removed(place: Place) -> None:
    leftover = place.cache.folder / ".error-recovery@v1-0.partial"
    leftover.mkdir(parents=True)
    place.require(place.versions[0])
    assert not leftover.exists()


def test_a_data_directory_that_cannot_be_written_is_a_problem_of_the_adapter(place: Place) -> None:
    place.cache.folder.parent.mkdir(parents=True)
    place.cache.folder.touch()
    place.require(place.versions[0])
    assert "File exists" in place.problem(place.versions[0])


def test_an_intact_copy_on_a_read_only_disk_serves(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.require(*place.versions)
    make_read_only(monkeypatch)
    restarted = place.worker()
    require(restarted, *place.versions)
    restarted.refresh_and_wait()
    assert [problem(restarted, version) for version in place.versions] == ["", ""]


@pytest.mark.parametrize("function", ["flock", "rmtree"])
def test_a_removal_that_fails_is_logged_once_and_repeated_less_and_less_often(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    first, second = place.versions
    place.require(first, second)
    with monkeypatch.context() as patch:
        attempts = make_read_only(patch, function)
        place.require(second)
        for _ in range(50):
            place.refresh(0.2)
        # At once and after 1, 2 and 4 s.
        assert len(attempts) == 4
        (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
        assert (record.exc_info, "Read-only file system" in record.message) == (None, True)
        assert place.problem(second) == ""
        # A copy that has lost some of its files is not under its name.
        assert place.cache.location(first).exists() == (function == "flock")
    place.refresh(30)
    assert [path.name for path in place.cache.folder.iterdir() if path.is_dir()] == [place.cache.location(second).name]


def test_an_unexpected_error_is_logged_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place.require(*place.versions)
    monkeypatch.setattr(place.cache, "is_loaded", {}.__getitem__)
    place.require(place.versions[1])
    place.refresh(100)
    assert [record.exc_info is not None for record in caplog.records if record.levelno >= logging.WARNING] == [True]


def test_one_copy_that_cannot_be_removed_does_not_keep_another(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.require(*place.versions)
    first, second = (place.cache.location(version) for version in place.versions)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path == first:
            raise OSError(errno.EACCES, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    place.require()
    assert (first.exists(), second.exists()) == (True, False)


def test_what_another_worker_downloads_is_no_leftover(place: Place) -> None:
    place.require()
    staging = place.cache.folder / f".{place.cache.location(place.versions[0]).name}.partial"
    staging.mkdir(parents=True)
    with staging.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        place.refresh(0)
        assert staging.exists()
    place.refresh(0)
    assert not staging.exists()


def make_read_only(monkeypatch: pytest.MonkeyPatch, function: str = "flock") -> list[object]:
    """Let a function of the cache fail as on a read-only disk; returns a list that grows with each call."""
    attempts: list[object] = []

    def refuse(*arguments: object, **options: object) -> None:
        attempts.append(arguments)
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(fcntl if function == "flock" else shutil, function, refuse)
    return attempts


async def test_an_object_store_that_hangs_holds_up_neither_the_start_nor_the_event_loop(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, downloading = threading.Event(), threading.Event()

    def hang(objects: Objects, version: AdapterVersion, target: Path) -> None:
        downloading.set()
        assert released.wait(60)

    monkeypatch.setattr(adapter_cache, "START_S", 0.05)
    monkeypatch.setattr(Objects, "download", hang)
    version = place.versions[0]
    place.cache.require({place.cache.location(version): version})
    async with asyncio.timeout(20):
        await place.cache.start()
    await eventually_async(downloading.is_set)
    assert "being downloaded" in place.problem(version)
    with place.cache.running():
        await asyncio.sleep(0)
    released.set()
