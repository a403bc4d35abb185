"""The table ``[prompting]`` of the settings: what ``traced optimize-prompt`` works with."""

from pydantic import Field

from traced.section import Positive, Section


class PromptingSection(Section):
    """Evolving a prompt patch (GEPA) where an adapter would be trained, with as many rollouts as its training."""

    minibatch: Positive = Field(default=8, description="training seeds that a text is bettered on")
    validation: Positive = Field(
        default=64, description="seeds that the texts which did better are compared on; at most a third of the rollouts"
    )
    max_tokens: int = Field(
        default=1_000_000, ge=0, description="tokens of the language model for one capability, both ways; 0: no bound"
    )
    max_cost: float = Field(default=0.0, ge=0, description="what they may cost, by the prices of [llm]; 0: no bound")
    max_minutes: float = Field(default=0.0, ge=0, description="minutes of waiting for its answers; 0: no bound")
