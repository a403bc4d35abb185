"""Which weights of a base model a LoRA adapter changes: all linear layers, and the experts of a mixture of experts.

Experts are no linear layers: transformers stacks the weights of all experts of a layer in one parameter with the
dimensions (experts, output, input). PEFT adapts such a parameter with one pair of matrices per expert
(``target_parameters``). Not adapted: embeddings, the LM head, norms, the router that chooses the experts, and, beside
experts, dense layers and shared experts whose names PEFT takes for those of experts.
"""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

from traced.training.job import TrainingJob

ADAPTER = "default"  # PEFT's name for the one adapter of a model
EXPERT_DIMENSIONS = 3
CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.ConvTranspose1d)  # their kernels have three dimensions as well
ROUTER = re.compile(r"(^|_)(gate|router)$")  # gate, router, shared_expert_gate; not gate_proj


@dataclass(frozen=True)
class AdapterTargets:
    """Names, without the layer's prefix, of linear modules and of stacked expert parameters; sorted."""

    modules: list[str]
    parameters: list[str]


def adapter_targets(model: Any) -> AdapterTargets:
    """Return what an adapter of this base changes."""
    head = model.get_output_embeddings()
    modules, parameters = set(), set()
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(module, torch.nn.Linear) and module is not head:
            modules.add(name)
        elif not isinstance(module, CONVOLUTIONS):
            stacks = [key for key, weight in module.named_parameters(recurse=False) if weight.ndim == EXPERT_DIMENSIONS]
            parameters |= {f"{name}.{key}" for key in stacks}
    if parameters:
        # Most routers are no linear layer, but some are.
        modules = {name for name in modules if not ROUTER.search(name)}
    # Sorted, because PEFT keeps sets, and an adapter's config must be reproducible.
    return AdapterTargets(sorted(modules), sorted(parameters))


def lora_config(job: TrainingJob, model: Any) -> LoraConfig:
    """Return the configuration of the job's adapter."""
    targets = adapter_targets(model)
    config = LoraConfig(
        r=job.lora_r,
        lora_alpha=job.lora_alpha,
        target_modules=targets.modules,
        target_parameters=targets.parameters or None,
        task_type="CAUSAL_LM",
    )
    if targets.parameters:
        config.target_modules = sorted(_not_converted(config, model))
    return config


def _not_converted(config: LoraConfig, model: Any) -> set[str]:
    """Return the target modules without those that PEFT takes for experts of an older layout.

    In some families (DeepSeek, GLM-4 MoE, Qwen3-Next ...) dense layers and shared experts have the names that experts
    had. PEFT would leave them out all the same, and double the rank of the experts, which a server would refuse.
    """
    converted = copy.deepcopy(config)
    convert_peft_config_for_transformers(converted, model, None)
    return set(converted.target_modules or ())


def trained_share(model: Any) -> float:
    """Return the share of trained parameters among all parameters, adapter included."""
    parameters = list(model.parameters())
    adapted = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return adapted / sum(parameter.numel() for parameter in parameters)


def folded_weights(peft_model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name in the base model and W + scale * B A of each adapted weight."""
    for name, layer in peft_model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            # Wrappers of several parameters of one module are nested.
            owner = name.replace(".base_layer", "")
            parameter = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
            base_layer: Any = layer.get_base_layer()
            yield f"{owner}.{parameter}", getattr(base_layer, parameter) + layer.get_delta_weight(ADAPTER)
