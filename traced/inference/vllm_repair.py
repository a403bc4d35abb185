"""Repairs vLLM's LoRA kernels for a CPU, inside its workers (``--worker-extension-cls``).

vLLM 0.32.0 (``vllm.lora.ops.torch_ops``, its pull request 48421) looks a row's weights up by its adapter's slot. A row
without an adapter has slot -1, which counts from the end, so a base request in a batch with an adapter's request is
answered by the adapter in the last slot. Nothing is changed where the fault is not found. Whoever starts vLLM with
adapters on a CPU themselves gives it the same flag, with traced's code on its ``PYTHONPATH``.
"""

import importlib
import sys
from collections.abc import Callable

import torch
from torch import Tensor

KERNELS = "vllm.lora.ops.torch_ops.lora_ops"
USERS = (KERNELS, "vllm.lora.ops.torch_ops", "vllm.lora.punica_wrapper.punica_cpu")
SHRINK = "bgmv_shrink"
# The slot of a row without an adapter.
NO_ADAPTER = -1

Shrink = Callable[..., None]


class Repaired:
    """The class that ``--worker-extension-cls`` has to name; importing it is what counts."""


def repair() -> bool:
    """Repair this process's vLLM if it has the fault; returns whether it did."""
    shrink: Shrink = getattr(importlib.import_module(KERNELS), SHRINK)
    if not is_faulty(shrink):
        return False
    for name in USERS:
        setattr(importlib.import_module(name), SHRINK, masked_shrink(shrink))
    return True


def is_faulty(shrink: Shrink) -> bool:
    """Whether a row without an adapter gets the weights of one."""
    output = torch.zeros(1, 1)
    shrink(torch.ones(1, 1), torch.ones(2, 1, 1), output, torch.tensor([NO_ADAPTER]), 1.0)
    return bool(output.item())


def masked_shrink(shrink: Shrink) -> Shrink:
    """Wrap the kernel so that rows without an adapter get zeros, to which the second product adds nothing."""

    def wrapper(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, slots, scaling)
        output.masked_fill_((slots == NO_ADAPTER)[:, None], 0)

    return wrapper


# Only in vLLM's workers: nothing else that imports this module has vLLM loaded.
if "vllm" in sys.modules:
    repair()
