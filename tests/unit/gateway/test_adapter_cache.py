"""The router's copies of adapters from an object store: checked, repeated, removed, and never in the way."""

import asyncio
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from store.records import AdapterVersion
from tests.unit.registry.chain import publish_adapter
from traced.core.errors import DiskError
from traced.gateway import adapter_cache
from traced.gateway.adapter_cache import AdapterCache
from traced.inference.errors import ServingError
from traced.registry.adapter_store import AdapterStore, AdapterStoreError, NotUploaded

WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class Objects(AdapterStore):
    """An object store whose downloads raise ``errors`` first, and are counted."""

    errors: list[Exception] = field(default_factory=list)
    downloads: list[str] = field(default_factory=list)

    def download(self, version: AdapterVersion, target: Path) -> None:
        self.downloads.append(version.name)
        if self.errors:
            raise self.errors.pop(0)
        super().download(version, target)


@dataclass
class Place:
    """Two versions that are uploaded and whose folders are gone, and a router's cache with a clock."""

    cache: AdapterCache
    objects: Objects
    versions: list[AdapterVersion]
    loaded: set[str]
    time: float = 0.0

    def require(self, *versions: AdapterVersion) -> None:
        self.cache.require({self.cache.location(version): version for version in versions})
        self.cache.refresh()

    def refresh(self, seconds: float) -> None:
        self.time += seconds
        self.cache.refresh()

    def problem(self, version: AdapterVersion) -> str:
        try:
            self.cache.check(self.cache.location(version))
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
    place.objects.errors.extend([NotUploaded("not uploaded yet"), AdapterStoreError("no answer"), DiskError("full")])
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
    place.objects.errors.append(AdapterStoreError("no answer"))
    place.require(*place.versions)
    assert [place.problem(version) for version in place.versions] == ["no answer", ""]


def test_a_copy_that_was_damaged_before_the_start_is_fetched_again(place: Place) -> None:
    version = place.versions[0]
    place.require(version)
    weights = place.cache.location(version) / WEIGHTS
    weights.write_bytes(b"run-2")
    second = AdapterCache(place.objects, place.cache.folder, place.loaded.__contains__)
    second.require({second.location(version): version})
    with pytest.raises(ServingError):
        second.check(second.location(version))
    second.refresh()
    second.check(second.location(version))
    assert weights.read_bytes() == b"run-1"
    third = AdapterCache(place.objects, place.cache.folder, place.loaded.__contains__)
    third.require({third.location(version): version})
    third.refresh()
    assert len(place.objects.downloads) == 2  # an intact copy is used as it is


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
    other = AdapterCache(place.objects, place.cache.folder, place.loaded.__contains__)
    other.require({})
    other.refresh()
    assert not place.cache.location(version).exists()
    place.refresh(0)
    assert (place.cache.location(version).is_dir(), place.problem(version)) == (True, "")


def test_nothing_is_removed_before_the_router_knows_what_is_live(place: Place) -> None:
    place.require(place.versions[0])
    restarted = AdapterCache(place.objects, place.cache.folder, place.loaded.__contains__)
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
    assert downloading.is_set()
    assert "being downloaded" in place.problem(version)
    with place.cache.running():
        await asyncio.sleep(0)
    released.set()
