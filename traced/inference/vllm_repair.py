"""Repair vLLM's LoRA kernels for a CPU, inside its worker processes (``--worker-extension-cls``).

vLLM 0.32.0 (``vllm.lora.ops.torch_ops``, vLLM's pull request 48421) looks up a row's weights by its adapter's slot. A
row without an adapter has slot -1, which Python counts from the end. A base request in a batch with an adapter's
request is therefore answered with the adapter in the last slot. A vLLM without this fault is not changed. A user who
starts vLLM with adapters on a CPU has to pass the same flag, with traced's code on the ``PYTHONPATH``.
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
    """The class for ``--worker-extension-cls``; it is empty, because importing this module does the repair."""


def repair() -> bool:
    """Repair vLLM in this process if it has the fault; return whether it had."""
    shrink: Shrink = getattr(importlib.import_module(KERNELS), SHRINK)
    if not is_faulty(shrink):
        return False
    for name in USERS:
        setattr(importlib.import_module(name), SHRINK, masked_shrink(shrink))
    return True


def is_faulty(shrink: Shrink) -> bool:
    """Return whether the kernel applies an adapter's weights to a row without an adapter."""
    output = torch.zeros(1, 1)
    shrink(torch.ones(1, 1), torch.ones(2, 1, 1), output, torch.tensor([NO_ADAPTER]), 1.0)
    return bool(output.item())


def masked_shrink(shrink: Shrink) -> Shrink:
    """Wrap the kernel so that rows without an adapter get zeros, so that LoRA's second product adds nothing to them."""

    def wrapper(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, slots, scaling)
        output.masked_fill_((slots == NO_ADAPTER)[:, None], 0)

    return wrapper


# The repair runs only in vLLM's workers: other processes that import this module have not loaded vLLM.
if "vllm" in sys.modules:
    repair()
