"""What an adapter of a base model reaches, and how much memory training and serving it take: computed, not measured.

The model is built on torch's "meta" device, which has shapes and no memory: a model of 30B parameters takes a second.
The estimates leave out fragments and the workspaces of kernels; ``MemoryNeed.minimum`` is what is needed without doubt.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer

from traced.inference.errors import ModelError
from traced.training.job import TrainingJob
from traced.training.lora import EXPERT_DIMENSIONS, adapter_targets, lora_config

# Bytes per weight of the adapter in training: the weight, its gradient and AdamW's two moments, in float32.
TRAINED_BYTES = 16
FLOAT32, BFLOAT16 = 4, 2
# Memory of the CUDA context and of the libraries' workspaces.
CUDA_BYTES = 2**30
LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that something needs: ``minimum`` for certain, ``estimate`` as an estimate."""

    minimum: int
    estimate: int


@dataclass(frozen=True)
class Footprint:
    """Sizes of a base model and of an adapter of it.

    Args:
        parameters: Number of the base's weights.
        adapter_parameters: Number of the adapter's weights.
        adapted: Number of the base's weights that the adapter changes.
        missed_experts: Names of the expert weights that it does not change.
        missed_layers: Names of the linear layers beside experts that it does not change (``lora.lora_config``).
        layers: Number of layers.
        hidden: Width of the residual stream.
        layer_width: Inputs and outputs of the linear layers that one token passes in a layer, added up.
        layer_experts: Number of the stacked weights of experts in the largest layer; 0 without.
        cache_width: Numbers that a token adds to the key-value cache, over all layers.
        positions: The longest context that the model supports.
    """

    parameters: int
    adapter_parameters: int
    adapted: int
    missed_experts: tuple[str, ...]
    missed_layers: tuple[str, ...]
    layers: int
    hidden: int
    layer_width: int
    layer_experts: int
    cache_width: int
    positions: int

    @property
    def adapter_share(self) -> float:
        """Return the adapter's weights as a share of the base's."""
        return self.adapter_parameters / self.parameters

    def training(self, tokens: int, *, weight_bytes: int, recompute: bool, shards: int = 1) -> MemoryNeed:
        """Return the memory of one training process.

        Args:
            tokens: Tokens of one forward and backward pass.
            weight_bytes: Bytes per weight of the base.
            recompute: Whether activations are computed again in the backward pass.
            shards: Processes over which the base is split.
        """
        weights = self.parameters * weight_bytes // shards + self.adapter_parameters * TRAINED_BYTES
        activations_kept = self.layers * self.hidden * weight_bytes * tokens
        # PEFT computes the adapter's part of each linear layer in float32.
        layer = self.layer_width * (weight_bytes + FLOAT32) * tokens
        # PEFT makes a copy of all experts of a layer, with the adapter's product added. A gradient takes a third more:
        # that of gate and up, two thirds, comes when the copy of down, one third, is free.
        copies = self.layer_experts * weight_bytes
        layers_kept = 1 if recompute else self.layers
        activations = activations_kept + (layer + copies) * layers_kept + copies // 3
        return MemoryNeed(weights + activations_kept + copies, weights + activations)

    def serving(self, adapters: int, tokens: int, *, weight_bytes: int, sequences: int = 1) -> MemoryNeed:
        """Return the memory of an engine with this many adapters: at least one sequence, likely ``sequences``."""
        fixed = (self.parameters + adapters * self.adapter_parameters) * weight_bytes
        sequence = self.cache_width * weight_bytes * tokens
        return MemoryNeed(fixed + sequence, fixed + sequences * sequence)


class MetaModel:
    """A base model with the adapter of a job, without memory; raises ``ModelError`` for an unknown architecture."""

    def __init__(self, job: TrainingJob) -> None:
        # Imported here because transformers takes seconds to import.
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig, AutoModelForCausalLM

        self.folder = Path(job.model_path)
        try:
            self.config = AutoConfig.from_pretrained(self.folder, local_files_only=True)
            with torch.device("meta"):
                base = AutoModelForCausalLM.from_config(self.config)
        except (OSError, ValueError, KeyError, ImportError, AttributeError, StrictDataclassError) as error:
            raise ModelError(f"the model in {self.folder} cannot be built: {error}") from error
        # A weight that is shared with the embeddings counts once.
        self.parameters = sum(weight.numel() for weight in base.parameters())
        weights = base.named_parameters()
        self.stacked = {name: weight.numel() for name, weight in weights if weight.ndim == EXPERT_DIMENSIONS}
        config = lora_config(job, base)
        self.missed_layers = tuple(sorted(set(adapter_targets(base).modules) - set(config.target_modules or ())))
        with torch.device("meta"):
            self.model: Any = get_peft_model(base, config)

    @cached_property
    def footprint(self) -> Footprint:
        """Return the sizes of model and adapter."""
        text: Any = self.config.get_text_config()
        adapted = dict(self._adapted())
        adapter_parameters = sum(weight.numel() for weight in self.model.parameters() if weight.requires_grad)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return Footprint(
            parameters=self.parameters,
            adapter_parameters=adapter_parameters,
            adapted=sum(adapted.values()),
            missed_experts=tuple(sorted({LAYER.sub(".layers.*.", n) for n in self.stacked if n not in adapted})),
            missed_layers=self.missed_layers,
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            layer_width=self._layer_width(text),
            layer_experts=max(self._experts_of_layers().values(), default=0),
            cache_width=2 * text.num_hidden_layers * heads * width,
            positions=getattr(text, "max_position_embeddings", None) or 2**31,
        )

    @property
    def can_be_split(self) -> bool:
        """Return whether transformers can split the model layer by layer over several processes."""
        from transformers.distributed.fsdp import expand_fsdp_plan

        base = self.model.get_base_model()
        parts, _ = expand_fsdp_plan(base, base.fsdp_plan or {})
        layers = [name for name, _ in parts if name.rpartition(".")[2].isdigit()]
        return len(layers) >= self.config.get_text_config().num_hidden_layers

    def save_probe(self, folder: Path) -> None:
        """Write an adapter of the right rank and layout whose weights are 0, for the first and the last layer.

        An engine that serves it serves the trained adapters, and it has a few percent of their size.
        """
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        config = self.model.peft_config["default"]
        config.base_model_name_or_path, config.inference_mode = str(self.folder), True
        config.save_pretrained(folder)
        state = get_peft_model_state_dict(self.model)
        numbers = [int(match[1]) for name in state if (match := LAYER.search(name))]
        ends = {min(numbers), max(numbers)} if numbers else set()
        end_weights = {
            name: torch.zeros(weight.shape, dtype=torch.float32)
            for name, weight in state.items()
            if (match := LAYER.search(name)) is None or int(match[1]) in ends
        }
        save_file(end_weights, folder / "adapter_model.safetensors")

    def _adapted(self) -> Iterator[tuple[str, int]]:
        """Yield the name and the size of each base weight that the adapter changes."""
        for name, layer in self.model.get_base_model().named_modules():
            if isinstance(layer, LoraLayer):
                parameter = getattr(layer, "parameter_name", "weight")
                base_layer: Any = layer.get_base_layer()
                yield f"{name.replace('.base_layer', '')}.{parameter}", getattr(base_layer, parameter).numel()

    def _experts_of_layers(self) -> Counter[str]:
        """Return the number of the experts' weights of each layer that the adapter changes."""
        numbers: Counter[str] = Counter()
        for name, size in self._adapted():
            if name in self.stacked and (match := LAYER.search(name)):
                numbers[match[1]] += size
        return numbers

    def _layer_width(self, text: Any) -> int:
        base = self.model.get_base_model()
        linear = [
            (name, module.in_features + module.out_features)
            for name, module in base.named_modules()
            if isinstance(module, torch.nn.Linear) and LAYER.search(name) and "lora_" not in name
        ]
        dense = sum(width for _, width in linear) / max(1, text.num_hidden_layers)
        active = getattr(text, "num_experts_per_tok", None) or 0
        expert = getattr(text, "moe_intermediate_size", None) or text.hidden_size
        experts = active * (2 * text.hidden_size + 3 * expert) if self.stacked else 0
        return math.ceil(dense + experts)
