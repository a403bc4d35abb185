"""Imported inside vLLM's workers on a CPU (``--worker-extension-cls``): base requests keep the base model's weights.

vLLM's kernels for a CPU (0.32.0, ``vllm.lora.ops.torch_ops``) look a row's weights up by its adapter's slot, and a row
without an adapter has slot -1, which counts from the end: a base request that shares a batch with an adapter's request
is answered by the adapter in the last slot (its pull request 48421). Its kernels for a GPU leave such rows out. Here
the first of the two products is made zero for them, so that the second adds nothing.

Invariant: nothing is changed where the fault is not found. Not covered: engines that somebody else starts; whoever runs
vLLM with adapters on a CPU gives it the same flag, with traced's code on its ``PYTHONPATH``.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

KERNELS = "vllm.lora.ops.torch_ops.lora_ops"
USERS = (KERNELS, "vllm.lora.ops.torch_ops", "vllm.lora.punica_wrapper.punica_cpu")
SHRINK = "bgmv_shrink"
NONE = -1  # a row's slot where it has no adapter

Shrink = Callable[..., None]


class Repaired:
    """What vLLM mixes into its worker: nothing."""


def repair() -> bool:
    """Repair this process's vLLM where it needs it; whether it did."""
    shrink: Shrink = getattr(importlib.import_module(KERNELS), SHRINK)
    if not is_faulty(shrink):
        return False
    for name in USERS:
        setattr(importlib.import_module(name), SHRINK, repaired(shrink))
    return True


def is_faulty(shrink: Shrink) -> bool:
    """Whether a row without an adapter gets one's weights."""
    made = torch.zeros(1, 1)
    shrink(torch.ones(1, 1), torch.ones(2, 1, 1), made, torch.tensor([NONE]), 1.0)
    return bool(made.item())


def repaired(shrink: Shrink) -> Shrink:
    """The kernel, with nothing for rows that have no adapter."""

    def shrunk(inputs: Any, weights: Any, output: Any, slots: Any, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, slots, scaling)
        output.masked_fill_((slots == NONE)[:, None], 0)

    return shrunk


if "vllm" in sys.modules:  # a worker imports this, and nothing else that does has it
    repair()
