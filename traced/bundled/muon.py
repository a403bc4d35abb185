"""Muon: momentum, made orthogonal, as the update of weight matrices (Jordan et al., 2024).

For a model of this size it reaches copying and looking up by key in a third of the steps that AdamW needs. The
orthogonalisation runs in float32 on all matrices of one shape at once: ``torch.optim.Muon`` runs it in bfloat16, which
processors without such instructions emulate at several times the cost of the rest of the step.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic iteration towards singular values near 1
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay; for matrices only (2-D parameters)."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, *, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        if any(param.ndim != 2 for group in self.param_groups for param in group["params"]):
            raise ValueError("Muon takes matrices only; give vectors and embeddings to another optimizer")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Apply the gradients; parameters without one are left as they are."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    update = self._momentum(param, group["momentum"])
                    by_shape.setdefault(tuple(param.shape), []).append((param, update))
            for shape, pairs in by_shape.items():
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                updates = orthogonal(torch.stack([update for _, update in pairs]))
                for (param, _), update in zip(pairs, updates, strict=True):
                    param.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)

    def _momentum(self, param: Tensor, momentum: float) -> Tensor:
        state = self.state[param]
        if not state:
            state["buffer"] = torch.zeros_like(param)
        assert param.grad is not None
        state["buffer"].lerp_(param.grad, 1 - momentum)
        return param.grad.lerp(state["buffer"], momentum)


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices (count x rows x columns) with the same singular vectors and singular values of about 0.7 to 1.2."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
