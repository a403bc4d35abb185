import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from traced.core.errors import PromotionError
from traced.registry import publication
from traced.registry.integrity import changed_files
from traced.registry.publication import publish, read_manifest, versions


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    source = tmp_path / "run" / "adapter"
    (source / "extra").mkdir(parents=True)
    (source / "adapter_config.json").write_text('{"r": 16}')
    (source / "adapter_model.safetensors").write_bytes(b"weights")
    (source / "extra" / "notes.json").write_text("{}")
    return source


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    return tmp_path / "data" / "adapters"


def test_a_version_is_complete_read_only_and_verified(adapter: Path, adapters: Path) -> None:
    published = publish(adapter, adapters, "error-recovery", origin="run-1")
    assert published.path == adapters / "error-recovery@v1"
    assert (published.path / "adapter_model.safetensors").read_bytes() == b"weights"
    assert set(published.files) == {"adapter_config.json", "adapter_model.safetensors", "extra/notes.json"}
    assert published == read_manifest(published.path)
    assert changed_files(published.path, published.files) == []
    assert all(not path.stat().st_mode & 0o222 for path in published.path.rglob("*") if path.is_file())


def test_numbers_go_up_per_capability_and_earlier_versions_stay_as_they_were(adapter: Path, adapters: Path) -> None:
    first = publish(adapter, adapters, "error-recovery", origin="run-1")
    (adapter / "adapter_model.safetensors").write_bytes(b"other weights")
    second = publish(adapter, adapters, "error-recovery", origin="run-2")
    other = publish(adapter, adapters, "date-reasoning", origin="run-3")
    assert [second.name, other.name] == ["error-recovery@v2", "date-reasoning@v1"]
    assert changed_files(first.path, first.files) == []
    assert versions(adapters) == [other, first, second]
    assert versions(adapters, "error-recovery") == [first, second]


def test_publishing_again_after_an_interruption_is_one_version(adapter: Path, adapters: Path) -> None:
    first = publish(adapter, adapters, "error-recovery", origin="run-1")
    assert publish(adapter, adapters, "error-recovery", origin="run-1") == first
    assert publish(adapter, adapters, "error-recovery", origin="run-2").version == 2


@pytest.mark.parametrize("break_at", ["copyfile", "fsync", "rename"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_nothing_half_written_and_the_next_attempt_succeeds(
    adapter: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch, break_at: str, error: BaseException
) -> None:
    def raise_error(*args: object, **kwargs: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(shutil if break_at == "copyfile" else os, break_at, raise_error)
        with pytest.raises((PromotionError, KeyboardInterrupt)) as raised:
            publish(adapter, adapters, "error-recovery", origin="run-1")
    if isinstance(error, OSError):
        assert "No space left on device" in str(raised.value)
        assert "free some space" in str(raised.value)
    assert [path.name for path in adapters.iterdir()] == [".lock"]
    assert publish(adapter, adapters, "error-recovery", origin="run-1").name == "error-recovery@v1"


def test_leftovers_of_a_killed_process_are_cleared(adapter: Path, adapters: Path) -> None:
    (adapters / ".staging-error-recovery@v1").mkdir(parents=True)
    (adapters / ".staging-error-recovery@v1" / "adapter_model.safetensors").write_bytes(b"half")
    published = publish(adapter, adapters, "error-recovery", origin="run-1")
    assert changed_files(published.path, published.files) == []
    assert not list(adapters.glob(".staging-*"))


def test_a_full_device_is_reported(adapter: Path, tmp_path: Path) -> None:
    """/dev/full answers ENOSPC to every write, as a full disk does."""
    with pytest.raises(OSError, match="No space left") as raised:
        Path("/dev/full").write_text("x" * 10_000)
    assert "free some space" in publication._next_step(raised.value)


def test_what_is_no_adapter_or_no_name_is_refused(adapter: Path, adapters: Path) -> None:
    for name in ("../evil", "Error-Recovery", "a@v1", ""):
        with pytest.raises(PromotionError, match="not a capability name"):
            publish(adapter, adapters, name, origin="run-1")
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(PromotionError, match=r"adapter_config\.json is missing"):
        publish(adapter, adapters, "error-recovery", origin="run-1")
    assert not adapters.exists()


def test_an_unreadable_manifest_is_an_error_not_a_missing_version(adapter: Path, adapters: Path) -> None:
    path = publish(adapter, adapters, "error-recovery", origin="run-1").path
    (path / "manifest.json").chmod(0o644)
    (path / "manifest.json").write_text(json.dumps({"name": "error-recovery@v1"}))
    with pytest.raises(PromotionError, match=r"manifest\.json cannot be read"):
        versions(adapters)
