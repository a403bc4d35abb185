"""The settings of the gate and of how an approved adapter goes live, ``[gate]`` and ``[promotion]``."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from traced.section import Margin, Positive, Section, Share

Policy = Literal["immediate", "canary", "shadow"]


def _rising(steps: list[float]) -> list[float]:
    if not steps or any(not 0 < share < 1 for share in steps) or sorted(set(steps)) != steps:
        raise ValueError("shares rise, each above 0 and below 1, e.g. [0.05, 0.25, 0.5]")
    return steps


class GateSection(Section):
    """Paired comparison of adapter and base on the same seeds."""

    seeds: Positive = Field(default=200, description="seeds added per round and comparison")
    trials: Positive = Field(default=1, description="episodes per seed and model")
    max_rounds: Positive = Field(default=3, description="rounds after which inconclusive is final")
    level: float = Field(default=0.95, gt=0.5, lt=1, description="confidence over all rounds together")
    environment_margin: Margin = Field(
        default=0.02, description="gain that the low bound clears on the capability's environment; a loss if negative"
    )
    target_margin: Margin = Field(default=0.0, description="gain that the low bound clears on the target")
    untouched_margin: Share = Field(default=0.05, description="loss that the low bound excludes on untouched tasks")


class PromotionSection(Section):
    """How an approved adapter goes live."""

    policy: Policy = Field(
        default="immediate",
        description='"immediate", "canary" (a growing share, judged by feedback) or "shadow" (recorded, never shown)',
    )
    steps: Annotated[list[float], AfterValidator(_rising)] = Field(
        default=[0.05, 0.25, 0.5], description="a canary's shares of its capability's conversations; then it is live"
    )
    min_samples: Positive = Field(default=30, description="judged conversations of a canary before its next share")
    alpha: float = Field(default=0.05, gt=0, lt=0.5, description="chance of a wrong rollback, and of a wrong pass")
    margin: float = Field(default=0.1, gt=0, lt=1, description="loss of success rate that the last step excludes")
    shadow_requests: Positive = Field(default=4, description="shadow requests at the engines at once")
