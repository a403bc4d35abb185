"""Adds LoRA to linear layers during inference, with fewer operations than PEFT's layers.

In every layer PEFT sorts the rows of a mixed batch by adapter in Python, which takes longer than the arithmetic of a
small model. Here the A and B of all adapters of a pass are put side by side, so that a layer gets two more matrix
products: y = W x + B (c * A x), where c is a row's scaling for its own adapter, and 0 for those of other rows.

Left to PEFT: layers with anything but plain LoRA on an ``nn.Linear`` (a bias, experts, embeddings), and passes
outside of ``torch.inference_mode``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.nn import functional as F

# PEFT's name for "no adapter" in a mixed batch.
BASE = "__base__"


class _Part(NamedTuple):
    """The place of an adapter in the weights of a pass: its name, rank and scaling."""

    key: str
    rank: int
    scaling: float


class RowAdapters:
    """The adapters of a pass's rows.

    Args:
        names: PEFT's name of each row's adapter, or ``BASE``.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.keys = [key for key in dict.fromkeys(names) if key != BASE]
        self.is_uniform = len(set(names)) == 1
        self._factors: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def scale(self, hidden: Tensor, parts: tuple[_Part, ...]) -> None:
        """Multiply A x [n, t, sum of the parts' ranks] by c, in place."""
        key = (parts, hidden.dtype, hidden.device)
        if key not in self._factors:
            rows = [
                [part.scaling * (part.key == name) for part in parts for _ in range(part.rank)] for name in self.names
            ]
            factors = torch.tensor(rows, dtype=hidden.dtype, device=hidden.device)[:, None]
            self._factors[key] = (factors, factors == 0)
        factors, is_other = self._factors[key]
        # Also where an adapter that has diverged gives infinity, whose product with 0 is not 0.
        hidden.mul_(factors).masked_fill_(is_other, 0.0)


def use_in(layer: Any, rows: Callable[[], RowAdapters]) -> None:
    """Let a LoRA layer of PEFT serve the adapters that ``rows`` returns for each pass.

    A copy of the layer would still compute with the weights of this one.
    """
    peft_forward = layer.forward
    can_add = type(layer) is Linear and type(layer.base_layer) is nn.Linear

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        selected = rows()
        if can_add and torch.is_inference_mode_enabled() and _is_plain(layer, selected, x):
            return _with_lora(layer, selected, x)
        result: Tensor = peft_forward(x, *args, adapter_names=selected.names, **kwargs)
        return result

    layer.forward = forward


def _is_plain(layer: Any, selected: RowAdapters, x: Tensor) -> bool:
    has_rows = x.dim() == 3 and len(x) == len(selected.names)
    return has_rows and not any(key in layer.lora_variant or layer.lora_bias.get(key) for key in selected.keys)


def _with_lora(layer: Any, selected: RowAdapters, x: Tensor) -> Tensor:
    result: Tensor = layer.base_layer(x)
    keys = [key for key in selected.keys if key in layer.lora_A]
    if not keys:
        return result
    down = _side_by_side([layer.lora_A[key].weight for key in keys], 0)
    up = _side_by_side([layer.lora_B[key].weight for key in keys], 1)
    hidden = F.linear(x.to(down.dtype), down)
    scaling = 1.0
    if selected.is_uniform:
        scaling = layer.scaling[keys[0]]
    else:
        parts = tuple(_Part(key, layer.lora_A[key].weight.shape[0], layer.scaling[key]) for key in keys)
        selected.scale(hidden, parts)
    if result.dtype != hidden.dtype:
        return (result + F.linear(hidden, up) * scaling).to(result.dtype)
    result.view(-1, result.shape[-1]).addmm_(hidden.view(-1, hidden.shape[-1]), up.t(), alpha=scaling)
    return result


def _side_by_side(weights: list[Tensor], dim: int) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(weights, dim)
