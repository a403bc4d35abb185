"""The settings of a cycle's stations: ``[collect]``, ``[analysis]``, ``[synthesis]`` and on to ``[test]``.

The settings of the gate and of how an approved adapter goes live, ``[gate]`` and ``[promotion]``.

The settings of the language model that analyses and synthesises: ``[llm]``.

The settings of outcomes: ``[outcomes]`` and ``[outcomes.judge]``.

The table ``[prompting]`` of the settings: what ``traced optimize-prompt`` works with.
"""

import os
import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from agents.llm.endpoint import SHORTEST_KEY
from traced.config.section import Margin, Positive, Section, Share, Temperature


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


LIKE_A_KEY = 20  # characters: a word without a folder or an ending that is as long is no file's name


def valid_base_url(text: str) -> str:
    """``text`` itself, "" or an address of HTTP without an account; for a setting. Raises ``ValueError``."""
    if not text:
        return text
    parts = urlsplit(text)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("an address holds no account and no key; write the key's variable into api_key_env")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it is no address; write e.g. http://127.0.0.1:8000/v1")
    return text


def valid_variable(text: str) -> str:
    """``text`` itself, "" or the name of an environment variable; for a setting. Raises ``ValueError``."""
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*|", text):
        raise ValueError("it is the name of a variable in capital letters, e.g. OPENAI_API_KEY; the key is its value")
    return text


def valid_key_file(text: str) -> str:
    """``text`` itself, "" or a path that is no key by its looks; for a setting. Raises ``ValueError``."""
    if len(text) >= LIKE_A_KEY and not set(text) & set("/\\."):
        raise ValueError("it is the path of a file that holds the key, e.g. ./key")
    return text


BaseUrl = Annotated[str, AfterValidator(valid_base_url)]
Variable = Annotated[str, AfterValidator(valid_variable)]
KeyFile = Annotated[str, AfterValidator(valid_key_file)]
Seconds = Annotated[float, Field(gt=0)]
Price = Annotated[float, Field(ge=0)]
Limit = Annotated[int, Field(ge=0)]


class LlmSection(Section):
    """The language model behind analyst "llm" and synthesizer "llm" (traced llm check tries it)."""

    model: str = Field(default="", description='model, as its server calls it; "" is none')
    base_url: BaseUrl = Field(default="", description='its server, e.g. "http://127.0.0.1:8000/v1"; "" is OpenAI\'s')
    api_key_env: Variable = Field(default="OPENAI_API_KEY", description="environment variable that holds its API key")
    api_key_file: KeyFile = Field(default="", description="file that holds its API key instead")
    concurrency: Positive = Field(default=8, description="requests under way at once")
    requests_per_minute: Limit = Field(default=0, description="requests a minute; 0 is no limit")
    tokens_per_minute: Limit = Field(default=0, description="tokens a minute, prompts and answers; 0 is no limit")
    connect_s: Seconds = Field(default=10.0, description="seconds for a connection")
    silence_s: Seconds = Field(default=120.0, description="seconds of silence, before an answer or within one")
    timeout_s: Seconds = Field(default=600.0, description="seconds for a whole answer")
    patience_s: Seconds = Field(default=300.0, description="seconds for which a request that fails is tried again")
    context_tokens: Limit = Field(default=0, description="tokens of a question and its answer; 0 asks the server")
    prompt_price: Price = Field(default=0.0, description="price of a million tokens of questions")
    completion_price: Price = Field(default=0.0, description="price of a million tokens of answers")

    @model_validator(mode="after")
    def _what_cycles_keep_holds_no_key(self) -> Self:
        key = os.environ.get(self.api_key_env, "").strip()
        for name in ("model", "base_url"):
            if len(key) >= SHORTEST_KEY and key in getattr(self, name):
                raise ValueError(f"{name} holds the key of the variable {self.api_key_env}; write it without")
        return self


RESULTS = {"model", "base_url", "context_tokens"}  # what a cycle's results depend on
PACE_AND_KEY = set(LlmSection.model_fields) - RESULTS


class JudgeSection(Section):
    """A model that says how a conversation went; it counts once its agreement with labels is measured and enough."""

    model: str = Field(default="", description='model that judges, as its server calls it; "" is no judge')
    base_url: BaseUrl = Field(default="", description='its server, e.g. "http://127.0.0.1:8000/v1"; "" is OpenAI\'s')
    api_key_env: Variable = Field(default="OPENAI_API_KEY", description="environment variable that holds its API key")
    prompt: str = Field(default="", description='file with other instructions for it; "" is the built-in ones')
    temperature: Temperature = Field(default=0.0, description="sampling temperature")
    timeout_s: float = Field(default=60.0, gt=0, description="seconds for one answer")
    concurrency: Positive = Field(default=4, description="conversations judged at once")
    per_minute: int = Field(default=0, ge=0, description="requests a minute; 0 is no limit")
    max_characters: Positive = Field(
        default=100_000, description="longest conversation that is judged; longer ones stay unknown"
    )
    min_agreement: Margin = Field(default=0.6, description="least agreement with labels (Cohen's kappa)")
    min_labels: Positive = Field(default=30, description="fewest labelled conversations that measure it")


class OutcomesSection(Section):
    """Who says whether a conversation went well where nobody gave feedback."""

    rules: str = Field(default="", description='file of rules (traced outcomes check FILE); "" is none')
    judge: JudgeSection = Field(default=JudgeSection(), description="the judge")


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
