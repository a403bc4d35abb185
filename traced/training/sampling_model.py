"""The model that rollouts sample from: the base with the adapter's current weights folded in, a copy of its own.

Why a copy: a folded layer is one matrix product where PEFT's takes three and a walk through Python, which for a small
model is half of a decode step; and the base under training is never merged and unmerged, so it cannot drift.

Invariants: after ``synchronise`` every weight is W + scale * B A from the pristine W, so errors do not add up and the
copy is on-policy up to float32 rounding. Not covered: adapters other than LoRA on linear layers. The copy costs the
base's memory once more.
"""

import copy
from typing import Any

import torch
from peft.tuners.lora import LoraLayer


def sampling_copy(base: Any) -> Any:
    """A frozen copy of the base model in eval mode, made before PEFT and TRL change the original."""
    return copy.deepcopy(base).requires_grad_(False).eval()


@torch.no_grad()
def synchronise(trained: Any, sampled: Any) -> None:
    """Give ``sampled`` (from ``sampling_copy``) the weights of the PEFT model ``trained`` as they are now."""
    for name, layer in trained.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            folded = layer.get_base_layer().weight + layer.get_delta_weight("default")
            sampled.get_submodule(name).weight.copy_(folded)
