"""The settings of a cycle's stations: ``[collect]``, ``[analysis]``, ``[synthesis]`` and on to ``[test]``."""

from typing import Literal

from pydantic import Field

from traced.section import Positive, Section, Share, Temperature


class CollectSection(Section):
    """Episodes of the base model on the target's train split, the analysis' input."""

    episodes: Positive = Field(default=400, description="episodes to record")
    temperature: Temperature = Field(default=1.0, description="sampling temperature")
    concurrency: Positive = Field(default=64, description="episodes that run at once")
    max_turns: Positive = Field(default=16, description="assistant messages after which an episode ends")


class AnalysisSection(Section):
    """Contrastive capability identification (TRACE, section 3)."""

    analyst: Literal["builtin", "llm"] = Field(
        default="builtin", description="who analyses: rules over the tool calls, or a language model (see [llm])"
    )
    runs: int = Field(default=0, ge=0, description="labelling runs; 0 is the analyst's own: builtin 10, llm 5")
    delta: Share = Field(
        default=0.20, description="least contrastive gap: lacking among failures minus among successes"
    )
    rho: Share = Field(default=0.10, description="least coverage: share of failures that lack the capability")
    consistency: Share = Field(default=0.80, description="share of the runs in which both must hold")
    min_agreement: Share = Field(
        default=0.40, description="least agreement between the runs (Krippendorff's alpha), whatever the gap"
    )
    production: int = Field(
        default=500, ge=0, description="newest judged conversations of production that are mined as well; 0 is none"
    )


class SynthesisSection(Section):
    """Writing a training environment for a capability."""

    synthesizer: Literal["builtin", "llm"] = Field(
        default="builtin", description='"builtin" needs no model; "llm" is the one of [llm]'
    )
    attempts: Positive = Field(
        default=5, description="environments the builtin one writes before a capability is given up"
    )
    starts: Positive = Field(default=3, description="times that a model begins afresh, the first one included")
    candidates: Positive = Field(default=1, description="environments that a model writes at once when it begins")
    repairs: int = Field(default=5, ge=0, description="times that a model mends a refused one before it begins afresh")
    file_tokens: Positive = Field(default=8192, description="tokens of one answer of a model, its reasoning included")
    max_tokens: int = Field(
        default=1_000_000, ge=0, description="tokens for one capability, prompts included; 0 is no bound"
    )
    max_cost: float = Field(
        default=0.0, ge=0, description="money for one capability, by the prices of [llm]; 0 is no bound"
    )
    max_minutes: float = Field(
        default=60.0, ge=0, description="minutes of waiting for the model for one capability; 0 is no bound"
    )

    @property
    def a_start(self) -> int:
        """Environments of one start of a model: its candidates, then the repairs."""
        return self.candidates + self.repairs

    @property
    def most(self) -> int:
        """Environments that are written before a capability is given up."""
        return self.attempts if self.synthesizer == "builtin" else self.starts * self.a_start


class AdmissionSection(Section):
    """What a synthetic environment passes before anything trains on it."""

    seeds: Positive = Field(default=32, description="seeds that the oracle, the policies and the adversaries play")
    base_seeds: Positive = Field(default=16, description="groups of the base model's rollouts")
    base_rollouts: int = Field(default=16, ge=2, description="rollouts in each group")
    mean_low: Share = Field(default=0.05, description="least mean reward of the base model")
    mean_high: Share = Field(default=0.95, description="greatest mean reward of the base model")
    mixed: Share = Field(default=0.50, description="least share of groups whose rewards differ")


class TrainingSection(Section):
    """GRPO on one LoRA adapter; the defaults suit the bundled model (the paper's 1e-5 and 40 iterations, 30B)."""

    iterations: Positive = Field(default=60, description="policy updates, at most")
    solved_after: int = Field(
        default=3, ge=0, description="iterations in a row without a failed episode that end a training; 0 is never"
    )
    at_once: Positive = Field(
        default=2, description="trainings side by side, each with its share of the threads; a service's lease devices"
    )
    groups: Positive = Field(default=8, description="seeds per iteration")
    rollouts: int = Field(default=8, ge=2, description="episodes per seed")
    lr: float = Field(default=2e-3, gt=0, description="AdamW learning rate")
    lora_r: Positive = Field(default=16, description="LoRA rank")
    lora_alpha: Positive = Field(default=16, description="LoRA scale")
    clip: float = Field(default=0.28, gt=0, lt=1, description="clip range of the probability ratio")
    temperature: float = Field(default=1.0, gt=0, le=5, description="sampling temperature of the rollouts")
    max_turns: Positive = Field(default=16, description="assistant messages after which an episode ends")
    max_length: Positive = Field(default=1024, description="tokens of one rollout, all turns")
    prompt_first: bool = Field(
        default=False, description="try a prompt before, and train no adapter where that is enough (needs [llm])"
    )


class RoutingSection(Section):
    """Which adapter serves a conversation."""

    router: Literal["hidden-state", "labels"] = Field(
        default="hidden-state",
        description="a classifier on the base model's hidden state, or the paper's label tokens (small models cannot)",
    )


class HeldOutSection(Section):
    """The held-out split, touched once at the end."""

    seeds: Positive = Field(default=300, description="test seeds")
