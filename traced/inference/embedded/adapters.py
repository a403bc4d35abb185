"""Several LoRA adapters on one base model; one batch may mix rows of different adapters.

Invariants: a name is never loaded twice with different content; rows without an adapter never use LoRA weights; a
failed load leaves the set of adapters unchanged. Not covered: methods other than LoRA, DoRA, and adapters that replace
whole modules or tokens.
"""

from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from torch import nn

from traced.inference.embedded.lora import BASE, RowAdapters, use_in
from traced.inference.errors import ModelError, RequestError, UnknownModelError
from traced.inference.model_files import adapter_digest

WEIGHTS = "adapter_model.safetensors"


class AdapterSet:
    """The adapters loaded on ``forward_model``, the model to call."""

    def __init__(self, model: nn.Module) -> None:
        self.forward_model: Any = model
        self._peft: PeftModel | None = None
        # PEFT's name by adapter name. The names differ because module names allow no dots, and because a name may be
        # loaded again.
        self._keys: dict[str, str] = {}
        self._hashes: dict[str, str] = {}
        self._loaded = 0
        self._layers: set[nn.Module] = set()
        self._rows = RowAdapters([])

    def names(self) -> list[str]:
        """Return the names of the loaded adapters, in the order of loading."""
        return list(self._keys)

    def digest(self, name: str) -> str | None:
        """Return ``adapter_digest`` of the files that an adapter was loaded from; None if it is not loaded."""
        return self._hashes.get(name)

    def check(self, name: str | None) -> None:
        """Raise ``UnknownModelError`` unless ``name`` is None or loaded."""
        if name is not None and name not in self._keys:
            raise UnknownModelError(
                f"no adapter {name!r} is loaded; loaded: {', '.join(self._keys) or 'none'}",
                hint="POST /v1/load_lora_adapter",
            )

    def load(self, name: str, path: Path) -> None:
        """Load a PEFT LoRA directory under ``name``; loading the same content again does nothing.

        Raises:
            ModelError: The directory is incomplete, unreadable, not LoRA, or does not fit the base model.
            RequestError: The name is loaded with other weights.
        """
        config, digest = _read_config(name, path)
        if name in self._keys:
            if self._hashes[name] == digest:
                return
            raise RequestError(
                f"adapter {name!r} is loaded with other weights", hint="publish a new version under a new name"
            )
        self._loaded += 1
        key = f"a{self._loaded}"
        try:
            self._inject(config, key, path)
        except (RuntimeError, ValueError, KeyError, TypeError, SafetensorError) as error:
            self._delete(key)
            raise ModelError(f"adapter {name!r} at {path} does not fit the base model: {error}") from error
        self._keys[name], self._hashes[name] = key, digest
        self._serve_rows()

    def unload(self, name: str) -> None:
        """Unload an adapter that no running request uses; raises ``UnknownModelError``."""
        self.check(name)
        self._delete(self._keys.pop(name))
        del self._hashes[name]

    def select(self, rows: list[str | None]) -> None:
        """Set the adapter of each row for the next forward pass."""
        if self._peft is not None:
            names = [BASE if name is None else self._keys[name] for name in rows]
            if self._rows.names != names:
                self._rows = RowAdapters(names)

    def _inject(self, config: PeftConfig, key: str, path: Path) -> None:
        if self._peft is None:
            self._peft = PeftModel(self.forward_model, config, adapter_name=key)
            self._serve_rows()
        else:
            self._peft.add_adapter(key, config)
        outcome = self._peft.load_adapter(str(path), adapter_name=key)
        missing = [name for name in getattr(outcome, "missing_keys", []) if key in name.split(".")]
        if missing or getattr(outcome, "unexpected_keys", []):
            raise ValueError(f"{len(missing)} weights missing, unexpected: {outcome.unexpected_keys[:3]}")
        weights = (weight for name, weight in self._peft.named_parameters() if key in name.split("."))
        # In a mixed batch they would spoil the rows of other adapters.
        if not all(bool(weight.isfinite().all()) for weight in weights):
            raise ValueError("its weights are not finite")
        self._peft.eval()

    def _delete(self, key: str) -> None:
        if self._peft is not None and key in self._peft.peft_config:
            self._peft.base_model.delete_adapter(key)

    def _serve_rows(self) -> None:
        for module in self.forward_model.modules():
            if isinstance(module, LoraLayer) and module not in self._layers:
                use_in(module, lambda: self._rows)
                self._layers.add(module)


def _read_config(name: str, path: Path) -> tuple[PeftConfig, str]:
    missing = [file for file in ("adapter_config.json", WEIGHTS) if not (path / file).is_file()]
    if missing:
        raise ModelError(f"adapter {name!r}: {path} lacks {', '.join(missing)}", hint=f"ls {path}")
    try:
        config = PeftConfig.from_pretrained(str(path))
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"adapter {name!r}: {path}/adapter_config.json is not readable: {error}") from error
    if not isinstance(config, LoraConfig):
        raise ModelError(f"adapter {name!r} at {path} is {config.peft_type}, and only LORA is served")
    if config.modules_to_save or config.trainable_token_indices or config.use_dora:
        # PEFT would use such modules for the rows of other adapters too, and refuses DoRA in a mixed batch.
        raise ModelError(f"adapter {name!r} at {path} has modules_to_save, token indices or DoRA; only LoRA is served")
    config.inference_mode = True
    return config, adapter_digest(path)
