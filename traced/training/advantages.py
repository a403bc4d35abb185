"""Group-relative advantages and which groups carry any signal (TRACE, section 3; GRPO, arXiv 2402.03300).

Invariants: the deviation is the population's (1/K) within the group; a group whose rewards are all equal, or that lost
a rollout to an infrastructure failure (reward None), is not kept and has advantage 0 throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-4  # TRL's; keeps the quotient finite
EQUAL = 1e-6  # rewards closer than this do not differ


@dataclass(frozen=True)
class Advantages:
    """``values`` [G * K], ``kept`` [G * K] (bool) and the number of mixed groups."""

    values: Tensor
    kept: Tensor
    mixed: int


def group_advantages(rewards: Sequence[float | None], size: int) -> Advantages:
    """(r - mean) / (population deviation + 1e-4) within consecutive groups of ``size`` rewards in [0, 1]."""
    grouped = torch.tensor([float("nan") if r is None else r for r in rewards], dtype=torch.float64).view(-1, size)
    lost = grouped.isnan().any(dim=1)
    spread = (grouped.amax(dim=1) - grouped.amin(dim=1)) > EQUAL
    mixed = spread & ~lost
    deviation = grouped.std(dim=1, correction=0, keepdim=True)
    values = (grouped - grouped.mean(dim=1, keepdim=True)) / (deviation + EPSILON)
    values = torch.where(mixed[:, None], values, 0.0)
    kept = mixed[:, None].expand_as(grouped)
    return Advantages(values.reshape(-1).float(), kept.reshape(-1), int(mixed.sum()))
