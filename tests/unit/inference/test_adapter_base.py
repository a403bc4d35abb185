"""An adapter knows its base model, and another base is refused."""

import asyncio
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from traced.inference import adapter_base
from traced.inference.adapter_base import FILE, base_digest, check_base, known_base_digest, record_base
from traced.inference.errors import ModelError
from traced.inference.model_files import BUNDLED, ModelFiles
from traced.inference.replicas import Replicas
from traced.inference.start import RunningEngine


def model(folder: Path, weights: bytes) -> ModelFiles:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    return ModelFiles(folder.name, folder)


def adapter(tmp_path: Path, base: ModelFiles) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    record_base(folder, base, tmp_path)
    return folder


def test_an_adapter_of_another_base_is_refused_with_both_names(tmp_path: Path) -> None:
    base, other = model(tmp_path / "one", b"1"), model(tmp_path / "two", b"2")
    folder = adapter(tmp_path, base)
    check_base(folder, base, tmp_path)
    # A copy under another name is the same base.
    check_base(folder, model(tmp_path / "copy", b"1"), tmp_path)
    with pytest.raises(ModelError, match=r"was trained on one .* and the base model is two") as failure:
        check_base(folder, other, tmp_path)
    assert "model.spec" in failure.value.hint


def test_an_adapter_of_an_earlier_version_is_not_checked(tmp_path: Path) -> None:
    check_base(tmp_path, model(tmp_path / "one", b"1"), tmp_path)


def test_a_broken_record_is_an_error_and_no_permission(tmp_path: Path) -> None:
    folder = adapter(tmp_path, model(tmp_path / "one", b"1"))
    (folder / FILE).write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        check_base(folder, model(tmp_path / "two", b"2"), tmp_path)


def test_the_digest_of_large_weights_is_read_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_base, "DIGEST_KEPT_FROM_BYTES", 1)
    digests = Mock(side_effect=adapter_base._digest)
    monkeypatch.setattr(adapter_base, "_digest", digests)
    base = model(tmp_path / "one", b"1")
    assert known_base_digest(str(base.path), tmp_path) == ""  # status does not wait for it
    first = base_digest(base.path, tmp_path)
    assert base_digest(base.path, tmp_path) == first
    assert known_base_digest(str(base.path), tmp_path) == first
    assert digests.call_count == 1
    weights = base.path / "model.safetensors"
    times = weights.stat()
    weights.write_bytes(b"2")
    # As a copy that keeps times: size and time are the same.
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert known_base_digest(str(base.path), tmp_path) == ""
    assert base_digest(base.path, tmp_path) != first


def test_the_digest_of_a_small_or_missing_model_is_known_at_once(tmp_path: Path) -> None:
    base = model(tmp_path / "one", b"1")
    assert known_base_digest(str(base.path), tmp_path) == base_digest(base.path, tmp_path)
    assert known_base_digest("smollm2", tmp_path) == known_base_digest(str(tmp_path / "none"), tmp_path) == ""
    assert known_base_digest("", tmp_path) == base_digest(BUNDLED, tmp_path)


def test_a_cycle_does_not_serve_an_adapter_of_another_base(tmp_path: Path) -> None:
    folder = adapter(tmp_path, model(tmp_path / "one", b"1"))
    other = model(tmp_path / "two", b"2")
    # Without servers: the refusal comes before any request.
    engine = RunningEngine(
        "vllm", Replicas([]), tmp_path, None, 8, check_adapter=lambda path: check_base(path, other, tmp_path)
    )
    with pytest.raises(ModelError, match="was trained on one"):
        asyncio.run(engine.serve("skill@v1", folder))
    assert engine.served_names == {}
