"""Replace vLLM's LoRA kernels for a CPU, inside its worker processes (``--worker-extension-cls``).

vLLM 0.32.0 (``vllm.lora.ops.torch_ops``, vLLM's pull request 48421) has two faults there. It looks up a row's weights
by its adapter's slot; a row without an adapter has slot -1, which Python counts from the end, so a base request in a
batch with an adapter's request is answered with the adapter in the last slot. And it copies the weights for every row,
which takes ten times as long as the products for a prompt of 1,000 tokens. A vLLM without the first fault is not
changed. A user who starts vLLM with adapters on a CPU has to pass the same flag, with traced's code on the
``PYTHONPATH``.
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


class Repaired:
    """The class for ``--worker-extension-cls``; it is empty, because importing this module does the repair."""


def repair() -> bool:
    """Repair vLLM in this process if it has the fault; return whether it had."""
    if not is_faulty(getattr(importlib.import_module(KERNELS), SHRINK)):
        return False
    for user in USERS:
        for kernel in (bgmv_shrink, bgmv_expand, bgmv_expand_slice):
            setattr(importlib.import_module(user), kernel.__name__, kernel)
    return True


def is_faulty(shrink: Callable[..., None]) -> bool:
    """Return whether the kernel applies an adapter's weights to a row without an adapter."""
    output = torch.zeros(1, 1)
    shrink(torch.ones(1, 1), torch.ones(2, 1, 1), output, torch.tensor([NO_ADAPTER]), 1.0)
    return bool(output.item())


def products(inputs: Tensor, weights: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply each row with the weights of its slot; rows without an adapter get zeros.

    Args:
        inputs: [rows, in].
        weights: [slots, out, in] or [slots, 1, out, in].
        slots: [rows], ``NO_ADAPTER`` for none.

    Returns:
        [rows, out].
    """
    matrices = weights.squeeze(1) if weights.dim() == 4 else weights
    inputs = inputs.to(dtype)
    output = torch.zeros(inputs.shape[0], matrices.shape[1], dtype=dtype)
    for slot in slots.unique().tolist():
        if slot != NO_ADAPTER:
            rows = slots == slot
            output[rows] = inputs[rows] @ matrices[slot].to(dtype).T
    return output


def bgmv_shrink(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, scaling: float = 1.0) -> None:
    """Set ``output`` to the scaled products with the adapters' first matrices, as vLLM's kernel of this name."""
    result = products(inputs, weights, slots, output.dtype)
    output[:, : result.shape[1]] = scaling * result


def bgmv_expand(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, add_inputs: bool = True) -> None:
    """Add the products with the adapters' second matrices to ``output``, or set it to them."""
    result = products(inputs, weights, slots, output.dtype)
    # vLLM pads the output of some layers; a single row is broadcast.
    width = min(result.shape[1], output.shape[1])
    if add_inputs:
        output[:, :width] += result[:, :width]
    else:
        output[:, :width] = result[:, :width]


def bgmv_expand_slice(  # noqa: PLR0917 (vLLM calls it so)
    inputs: Tensor,
    weights: Tensor,
    output: Tensor,
    slots: Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Apply ``bgmv_expand`` to the columns from ``slice_offset`` on of ``output``."""
    result = products(inputs, weights, slots, output.dtype)
    columns = output[:, slice_offset : slice_offset + slice_size]
    if add_inputs:
        columns += result
    else:
        columns[:] = result


# The repair runs only in vLLM's workers: other processes that import this module have not loaded vLLM.
if "vllm" in sys.modules:
    repair()
