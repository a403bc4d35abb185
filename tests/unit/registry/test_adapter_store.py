"""Upload and download of adapter versions, on fsspec's memory and file systems, with faults planted in them."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from sqlalchemy import Engine

from store.database import open_store, read_session, write_session
from store.errors import NotFound
from store.records import AdapterVersion
from store.repositories.adapters import get_adapter
from store.repositories.promotions import live_adapters
from store.types import GateAnswer
from tests.unit.registry.chain import hour, publish_adapter, seed_adapter, seed_cycle
from tests.unit.registry.tampering import flip_byte
from traced.core.errors import AdapterChanged, PromotionError
from traced.registry import adapter_store
from traced.registry.adapter_store import (
    AdapterStore,
    AdapterStoreError,
    NotUploaded,
    folder_name,
    upload_before_traffic,
    upload_in_service,
)
from traced.registry.decision_rules import Action
from traced.registry.decisions import approve, roll_back
from traced.registry.integrity import quarantining

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    engine = open_store("sqlite://")
    with write_session(engine) as session:
        seed_cycle(session)
    yield engine
    engine.dispose()


@pytest.fixture(params=["memory", "file"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> AdapterStore:
    return AdapterStore(f"{request.param}://{tmp_path}/bucket/traced")


def trained_adapter(
    store: Engine, tmp_path: Path, number: int = 1, answer: GateAnswer = GateAnswer.PASS
) -> AdapterVersion:
    with write_session(store) as session:
        return get_adapter(session, seed_adapter(session, tmp_path, number, answer))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def remote(objects: AdapterStore, version: AdapterVersion) -> tuple[Any, str]:
    file_system, root = fsspec.url_to_fs(objects.url)
    (folder,) = file_system.ls(f"{root}/adapters/{version.name}", detail=False)
    return file_system, folder


def test_a_download_has_the_files_that_were_uploaded(tmp_path: Path, objects: AdapterStore) -> None:
    version = publish_adapter(tmp_path, 1)
    objects.upload(version)
    objects.download(version, tmp_path / "cache" / "x")
    assert contents(tmp_path / "cache" / "x") == contents(Path(version.path))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["x"]


def test_an_upload_that_is_complete_is_not_repeated_and_a_damaged_one_is(tmp_path: Path, objects: AdapterStore) -> None:
    version = publish_adapter(tmp_path, 1)
    objects.upload(version)
    file_system, folder = remote(objects, version)
    file_system.pipe_file(f"{folder}/{WEIGHTS}", b"run-2")  # of the same size
    objects.upload(version)
    assert file_system.cat_file(f"{folder}/{WEIGHTS}") == b"run-2"
    file_system.pipe_file(f"{folder}/{WEIGHTS}", b"run")
    objects.upload(version)
    assert file_system.cat_file(f"{folder}/{WEIGHTS}") == b"run-1"


class SlowFileSystem(AsyncFileSystem):
    """The memory file system as a library with an event loop; files arrive in four parts, ``part_s`` apart."""

    part_s = 0.0
    hangs_in = ""

    async def _info(self, path: str, **options: Any) -> Any:
        if self.hangs_in == "info":
            await asyncio.Event().wait()
        return MemoryFileSystem().info(path)

    async def _put_file(self, source: str, target: str, **options: Any) -> None:
        MemoryFileSystem().put_file(source, target)

    async def _get_file(self, source: str, target: str, **options: Any) -> None:
        content = MemoryFileSystem().cat_file(source)
        size = -(-len(content) // 4)
        for end in range(size, len(content) + size, size):
            if self.hangs_in == "file" and end > size:
                await asyncio.Event().wait()
            await asyncio.sleep(self.part_s)
            Path(target).write_bytes(content[:end])


@pytest.fixture
def slow_objects(tmp_path: Path) -> AdapterStore:
    fsspec.register_implementation("slow", SlowFileSystem, clobber=True)
    return AdapterStore(f"slow://{tmp_path}/traced")


@pytest.mark.parametrize("hangs_in", ["info", "file"])
def test_a_download_that_hangs_fails(
    tmp_path: Path, slow_objects: AdapterStore, monkeypatch: pytest.MonkeyPatch, hangs_in: str
) -> None:
    version = publish_adapter(tmp_path, 1)
    slow_objects.upload(version)
    with monkeypatch.context() as patch:
        patch.setattr(adapter_store, "LIMIT_S", 0.05)
        patch.setattr(SlowFileSystem, "hangs_in", hangs_in)
        with pytest.raises(AdapterStoreError, match="has not arrived in time"):
            slow_objects.download(version, tmp_path / "cache" / "x")
    assert not list(tmp_path.glob("cache/*"))
    slow_objects.download(version, tmp_path / "cache" / "x")
    assert contents(tmp_path / "cache" / "x") == contents(Path(version.path))


def test_a_larger_file_may_take_longer(
    tmp_path: Path, slow_objects: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = publish_adapter(tmp_path, 1)
    slow_objects.upload(version)
    monkeypatch.setattr(SlowFileSystem, "part_s", 0.04)  # 0.16 s for each file
    monkeypatch.setattr(adapter_store, "LIMIT_S", 0.1)
    with pytest.raises(AdapterStoreError, match="has not arrived in time"):
        slow_objects.download(version, tmp_path / "x")
    monkeypatch.setattr(adapter_store, "MIN_BYTES_PER_S", 0.2)
    slow_objects.download(version, tmp_path / "x")
    assert contents(tmp_path / "x") == contents(Path(version.path))


@pytest.mark.parametrize("fault", ["byte", "missing", "other manifest"])
def test_files_that_are_not_the_published_ones_are_refused(tmp_path: Path, objects: AdapterStore, fault: str) -> None:
    version, target = publish_adapter(tmp_path, 1), tmp_path / "cache" / "x"
    objects.upload(version)
    file_system, folder = remote(objects, version)
    if fault == "byte":
        file_system.pipe_file(f"{folder}/{WEIGHTS}", b"run-2")
    elif fault == "missing":
        file_system.rm_file(f"{folder}/{WEIGHTS}")
    else:
        # Files and manifest agree with each other, but not with the database.
        other = publish_adapter(tmp_path, 2)
        for name, content in contents(Path(other.path)).items():
            file_system.pipe_file(f"{folder}/{name}", content)
    with pytest.raises(AdapterStoreError, match="are not those that were published"):
        objects.download(version, target)
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_manifest_a_version_is_not_uploaded(tmp_path: Path, objects: AdapterStore) -> None:
    version = publish_adapter(tmp_path, 1)
    with pytest.raises(NotUploaded, match=r"is not uploaded to .* yet"):
        objects.download(version, tmp_path / "x")
    objects.upload(version)
    file_system, folder = remote(objects, version)
    file_system.rm_file(f"{folder}/manifest.json")
    with pytest.raises(NotUploaded):
        objects.download(version, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_versions_of_one_name_with_other_content_do_not_meet(tmp_path: Path, objects: AdapterStore) -> None:
    version = publish_adapter(tmp_path, 1)
    other = replace(version, files={**version.files, WEIGHTS: "0" * 64})
    objects.upload(version)
    with pytest.raises(NotUploaded):
        objects.download(other, tmp_path / "x")
    assert folder_name(version) != folder_name(other)


def test_files_that_changed_since_publication_are_not_uploaded(tmp_path: Path, objects: AdapterStore) -> None:
    version = publish_adapter(tmp_path, 1)
    with pytest.raises(PromotionError, match="error-recovery@v1 is not what was published"):
        objects.upload(replace(version, files={**version.files, WEIGHTS: "0" * 64}))
    weights = Path(version.path) / WEIGHTS
    weights.chmod(0o644)
    weights.write_bytes(b"x")
    with pytest.raises(PromotionError, match="error-recovery@v1 is not what was published"):
        objects.upload(version)
    with pytest.raises(NotUploaded):
        objects.download(version, tmp_path / "x")


def decide(store: Engine, objects: AdapterStore, name: str) -> None:
    """Approve as the command and the service do."""
    upload_before_traffic(objects.url, store, [name])
    with write_session(store) as session:
        approve(session, Action("ann", "local", hour(9)), name)


def live(store: Engine) -> list[str]:
    with read_session(store) as session:
        return [promotion.adapter for promotion in live_adapters(session)]


@pytest.mark.parametrize("files", [0, 1, 2])
def test_half_an_upload_puts_nothing_live_and_is_repeated(
    store: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    objects = AdapterStore(f"memory://{tmp_path}/traced")
    version = trained_adapter(store, tmp_path)
    put_file = MemoryFileSystem.put_file
    uploaded: list[str] = []

    def put_some(file_system: MemoryFileSystem, source: str, target: str, **options: Any) -> None:
        if len(uploaded) == files:
            raise TimeoutError("no answer")
        put_file(file_system, source, target, **options)
        uploaded.append(target)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", put_some)
        with pytest.raises(AdapterStoreError, match="failed: TimeoutError: no answer"):
            decide(store, objects, version.name)
    assert live(store) == []
    with pytest.raises(NotUploaded):
        objects.download(version, tmp_path / "x")
    decide(store, objects, version.name)
    assert live(store) == [version.name]
    objects.download(version, tmp_path / "x")


def test_a_store_that_loses_what_it_took_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = publish_adapter(tmp_path, 1)
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *arguments, **options: None)
    with pytest.raises(AdapterStoreError, match="does not have all of error-recovery@v1 after its upload"):
        AdapterStore(f"memory://{tmp_path}/traced").upload(version)


def test_an_outage_is_not_a_missing_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects, version = AdapterStore(f"memory://{tmp_path}/traced"), publish_adapter(tmp_path, 1)
    objects.upload(version)

    def no_answer(file_system: MemoryFileSystem, path: str, **options: Any) -> None:
        raise RuntimeError("connection reset")

    monkeypatch.setattr(MemoryFileSystem, "info", no_answer)
    with pytest.raises(AdapterStoreError, match="failed: RuntimeError: connection reset") as raised:
        objects.download(version, tmp_path / "x")
    assert not isinstance(raised.value, NotUploaded)


def test_only_versions_that_may_be_approved_are_uploaded(store: Engine, tmp_path: Path, objects: AdapterStore) -> None:
    version = trained_adapter(store, tmp_path, 1, GateAnswer.FAIL)
    upload_before_traffic(objects.url, store, [version.name])
    with pytest.raises(NotUploaded):
        objects.download(version, tmp_path / "x")
    with pytest.raises(NotFound):
        upload_before_traffic(objects.url, store, ["nothing@v1"])
    upload_before_traffic("", store, ["nothing@v1"])
    upload_before_traffic("/mnt/traced", store, ["nothing@v1"])


def test_versions_in_service_are_uploaded_later_if_their_files_are_here(
    store: Engine, tmp_path: Path, objects: AdapterStore
) -> None:
    versions = [trained_adapter(store, tmp_path, number) for number in (1, 2, 3, 4)]
    for number, version in enumerate(versions[:3]):
        with write_session(store) as session:
            approve(session, Action("ann", "local", hour(10 + number)), version.name)
    with write_session(store) as session:
        roll_back(session, Action("ann", "local", hour(20)), versions[2].name)
    shutil.rmtree(versions[0].path)  # trained elsewhere
    upload_in_service(objects.url, store)

    def is_uploaded(version: AdapterVersion) -> bool:
        try:
            objects.download(version, tmp_path / version.name)
        except NotUploaded:
            return False
        return True

    # v2 is live again; v1 has no files here, v3 was rolled back, v4 was never approved.
    assert [is_uploaded(version) for version in versions] == [False, True, False, False]


def test_a_changed_version_in_service_does_not_keep_the_others_from_the_object_store(
    store: Engine, tmp_path: Path, objects: AdapterStore
) -> None:
    versions = [trained_adapter(store, tmp_path, number) for number in (1, 2)]
    for number, version in enumerate(versions):
        with write_session(store) as session:
            approve(session, Action("ann", "local", hour(10 + number)), version.name)
    flip_byte(Path(versions[1].path) / WEIGHTS)
    with pytest.raises(AdapterChanged), quarantining(store, [], lambda: hour(20)):
        upload_in_service(objects.url, store)
    upload_in_service(objects.url, store)
    objects.download(versions[0], tmp_path / "x")
    with pytest.raises(NotUploaded):
        objects.download(versions[1], tmp_path / "y")


def test_a_missing_library_is_named() -> None:
    fsspec.register_implementation("nosuch", "no_such_module.FileSystem", errtxt="Install nosuchfs", clobber=True)
    for call in (AdapterStore("nosuch://bucket").check_installed, AdapterStore("nosuch://bucket").probe):
        with pytest.raises(AdapterStoreError, match="its library is missing: Install nosuchfs"):
            call()
    with pytest.raises(AdapterStoreError, match="Protocol not known"):
        AdapterStore("unheard-of://bucket").check_installed()


def test_a_probe_leaves_nothing_and_reports_what_cannot_be_written(tmp_path: Path) -> None:
    AdapterStore(f"file://{tmp_path}/bucket").probe()
    assert list((tmp_path / "bucket").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(AdapterStoreError, match=r"the object store file://.*/file failed: "):
        AdapterStore(f"file://{tmp_path}/file").probe()


def test_messages_have_no_password() -> None:
    assert AdapterStore("sftp://ann:secret@host/traced").display_url == "sftp://***@host/traced"
    assert AdapterStore("abfs://container@account/traced").display_url == "abfs://container@account/traced"


def test_the_manifest_is_that_of_the_publication(tmp_path: Path, objects: AdapterStore) -> None:
    version = publish_adapter(tmp_path, 1)
    objects.upload(version)
    file_system, folder = remote(objects, version)
    assert json.loads(file_system.cat_file(f"{folder}/manifest.json"))["files"] == version.files
