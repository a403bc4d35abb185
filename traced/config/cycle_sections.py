"""Settings of the pipeline: the stages of a cycle, the gate, promotion, the language model, outcomes and prompts.

Class docstrings and field descriptions are shown to users by ``traced init``.
"""

import os
import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from agents.llm.endpoint import MIN_KEY_LENGTH
from traced.config.section import Margin, Positive, Section, Share, Temperature

Policy = Literal["immediate", "canary", "shadow"]
Tracker = Literal["tensorboard", "wandb", "mlflow"]
# A text of at least this length without a path separator or a suffix is more likely a key than the name of a file.
KEY_LIKE_LENGTH = 20


class CollectSection(Section):
    """Episodes of the live system on the train split of the target, the input of the analysis."""

    episodes: Positive = Field(default=400, description="episodes to record")
    temperature: Temperature = Field(default=1.0, description="sampling temperature")
    concurrency: Positive = Field(default=64, description="concurrent episodes; a target may allow fewer")
    max_turns: Positive = Field(
        default=16, description="assistant messages after which an episode ends; a target's own limit comes first"
    )
    base_share: Share = Field(
        default=0.2,
        description="share of the episodes that the base model plays once adapters are live: tasks of an earlier cycle "
        "again, which shows whether the target has changed",
    )


class AnalysisSection(Section):
    """Contrastive capability identification (TRACE, section 3)."""

    analyst: Literal["builtin", "llm"] = Field(
        default="builtin", description='"builtin": rules over the tool calls; "llm": the language model of [llm]'
    )
    runs: int = Field(default=0, ge=0, description="labelling runs; 0: the analyst's default (builtin 10, llm 5)")
    delta: Share = Field(
        default=0.20, description="minimum contrastive gap: rate of lacking in failures minus rate in successes"
    )
    rho: Share = Field(default=0.10, description="minimum coverage: share of failures with the capability lacking")
    consistency: Share = Field(default=0.80, description="minimum share of the runs in which gap and coverage hold")
    min_agreement: Share = Field(default=0.40, description="minimum agreement between the runs (Krippendorff's alpha)")
    strict: bool = Field(
        default=False,
        description="whether the low end of the gap's interval must reach delta, and not only the gap; a gap within "
        "tasks must come from five of them",
    )
    attributed: int = Field(
        default=100,
        ge=0,
        description="maximum number of failures of the live system whose tasks are played again with each live adapter",
    )
    production: int = Field(
        default=500, ge=0, description="newest judged production conversations to analyse as well; 0: none"
    )


class SynthesisSection(Section):
    """Synthesis of a training environment for a capability."""

    synthesizer: Literal["builtin", "llm"] = Field(
        default="builtin", description='"builtin": templates without a model; "llm": the language model of [llm]'
    )
    attempts: Positive = Field(default=5, description="builtin: maximum number of environments per capability")
    starts: Positive = Field(default=3, description="llm: maximum number of starts from scratch per capability")
    candidates: Positive = Field(default=1, description="llm: environments written in parallel at each start")
    repairs: int = Field(default=5, ge=0, description="llm: repairs of a rejected environment before the next start")
    file_tokens: Positive = Field(default=16384, description="llm: maximum tokens of one answer, reasoning included")
    max_tokens: int = Field(
        default=1_000_000, ge=0, description="llm: maximum tokens per capability, prompts included; 0: no limit"
    )
    max_cost: float = Field(
        default=0.0, ge=0, description="llm: maximum cost per capability, at the prices of [llm]; 0: no limit"
    )
    max_minutes: float = Field(
        default=60.0, ge=0, description="llm: maximum minutes of waiting for answers per capability; 0: no limit"
    )

    @property
    def environments_per_start(self) -> int:
        """The number of environments per start of a model: its candidates, then the repairs."""
        return self.candidates + self.repairs

    @property
    def max_environments(self) -> int:
        """The number of environments written before synthesis of a capability fails."""
        return self.attempts if self.synthesizer == "builtin" else self.starts * self.environments_per_start


class AdmissionSection(Section):
    """Checks that a synthetic environment must pass before training."""

    seeds: Positive = Field(default=32, description="seeds played by the oracle, the policies and the adversaries")
    base_seeds: Positive = Field(default=16, description="groups of rollouts of the base model")
    base_rollouts: int = Field(default=16, ge=2, description="rollouts per group")
    mean_low: Share = Field(default=0.05, description="minimum mean reward of the base model")
    mean_high: Share = Field(default=0.95, description="maximum mean reward of the base model")
    mixed: Share = Field(default=0.50, description="minimum share of groups with different rewards")


class TrainingSection(Section):
    """GRPO on one LoRA adapter."""

    iterations: Positive = Field(default=60, description="maximum number of policy updates")
    solved_after: int = Field(
        default=3, ge=0, description="stop after so many iterations in a row without a failed episode; 0: never"
    )
    at_once: Positive = Field(
        default=2, description="parallel trainings, each with a share of the threads (a service leases devices instead)"
    )
    groups: Positive = Field(default=8, description="seeds per iteration")
    rollouts: int = Field(default=8, ge=2, description="episodes per seed")
    lr: float = Field(default=2e-3, gt=0, description="AdamW learning rate")
    lora_r: Positive = Field(default=16, description="LoRA rank")
    lora_alpha: Positive = Field(default=16, description="LoRA scale")
    clip: float = Field(default=0.28, gt=0, lt=1, description="clip range of the probability ratio")
    kl: float = Field(default=0.0, ge=0, description="coefficient of the KL divergence from the base in the loss")
    entropy_bonus: float = Field(
        default=0.0, ge=0, description="coefficient of the policy's mean entropy per token, which lowers the loss"
    )
    temperature: float = Field(default=1.0, gt=0, le=5, description="sampling temperature of the rollouts")
    start: Literal["fresh", "warm"] = Field(
        default="fresh",
        description='weights that an adapter of a later cycle begins with: "fresh": new ones; "warm": those of its '
        "capability's live version, else those of the version that answers the other conversations if it is no merge",
    )
    max_turns: Positive = Field(default=16, description="assistant messages after which an episode ends")
    max_length: Positive = Field(default=1024, description="tokens of one rollout, all turns")
    micro_batch_tokens: Positive = Field(
        default=4096,
        description="tokens, padding included, of one forward and backward pass; a GPU's memory sets the later ones",
    )
    gradient_checkpointing: Literal["auto", "on", "off"] = Field(
        default="auto",
        description='compute activations again in the backward pass, which saves memory; "auto": on GPUs',
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = Field(
        default="auto", description='attention kernel; "auto": sdpa; "flash_attention_2" needs the package flash-attn'
    )
    processes: Positive = Field(default=1, description="GPUs that share one training, one process on each")
    shard: bool = Field(
        default=False,
        description="split the base model over these processes, for one that does not fit a single GPU; "
        "needs an engine of its own, and passes do not grow beyond micro_batch_tokens",
    )
    overlap: int = Field(
        default=0, ge=0, le=1, description="iterations that the rollouts may be ahead of the update; 0: on-policy"
    )
    open_share: float = Field(
        default=0.5, ge=0, lt=1, description="share of the seeds drawn again because their rewards have differed lately"
    )
    hint_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of each seed's episodes that see the capability's description, which is no part of the "
        "update; a training on the target has none",
    )
    demonstrations: int = Field(
        default=4,
        ge=0,
        description="episodes of a seed that the environment's own solution replaces in the update if all of them "
        "fail; one of training.rollouts is always played. A training on the target has none",
    )
    validate_every: int = Field(
        default=5, ge=0, description="iterations between validations, whose best policy is published; 0: the last one"
    )
    validation_seeds: Positive = Field(
        default=32,
        description="seeds of a validation, played greedily; a fifth of the seeds at most, never trained on; "
        "if that is fewer, each is played several times, at training.temperature",
    )
    recoveries: int = Field(
        default=2,
        ge=0,
        description="times that a training without a gradient, or with a validation that has fallen far, may return to "
        "its best validated policy; 0, or without validation: never",
    )
    recovery_lr: float = Field(default=0.5, gt=0, le=1, description="factor of the learning rate for each of them")
    recovery_temperature: float = Field(
        default=1.2, ge=1, le=2, description="factor of the sampling temperature for each of them"
    )
    recovery_kl: float = Field(default=0.0, ge=0, description="training.kl from the first recovery on, if it is higher")
    recovery_entropy_bonus: float = Field(
        default=0.0, ge=0, description="training.entropy_bonus from the first recovery on, if it is higher"
    )
    recovery_hint_share: float = Field(
        default=0.0, ge=0, lt=1, description="training.hint_share from the first recovery on, if it is higher"
    )
    report_to: list[Tracker] = Field(
        default=[], description='experiment trackers: "tensorboard", "wandb", "mlflow"; each needs its package'
    )
    prompt_first: bool = Field(
        default=False, description="optimize a prompt first, and train no adapter if that is enough (needs [llm])"
    )


class RoutingSection(Section):
    """Choice of the adapter that serves a conversation."""

    router: Literal["hidden-state", "labels"] = Field(
        default="hidden-state",
        description="classifier on hidden states, where there are embeddings, or label tokens as in TRACE",
    )
    embeddings_url: str = Field(
        default="", description="OpenAI-compatible embeddings server for the classifier; the engine's own if empty"
    )
    embeddings_model: str = Field(default="", description="its model, if it lists several")
    when: Literal["conversation", "turn"] = Field(
        default="conversation",
        description="whether a conversation keeps its adapter, or each message of its user may move it to another one",
    )
    margin: float = Field(
        default=2.0,
        ge=0,
        description="with routing.when = turn: how much likelier (nats) another adapter must be to take over",
    )


class CompositionSection(Section):
    """Choice of how the adapters of a cycle answer together."""

    seeds: int = Field(
        default=200, ge=0, description="train seeds on which the candidates are compared; 0: always a router"
    )
    candidates: list[Literal["single", "router", "turn", "merged", "mixture", "distilled"]] = Field(
        default=["single", "router", "turn", "merged"],
        description='what is compared: one adapter alone, a router per conversation or per "turn", a merged adapter; '
        '"mixture" and "distilled" also train one in all environments, on their rewards or from the adapters',
    )


class HeldOutSection(Section):
    """The held-out split, used once at the end."""

    seeds: Positive = Field(default=300, description="test seeds")


def _validate_steps(steps: list[float]) -> list[float]:
    if not steps or any(not 0 < share < 1 for share in steps) or sorted(set(steps)) != steps:
        raise ValueError("shares must be increasing and between 0 and 1, e.g. [0.05, 0.25, 0.5]")
    return steps


class GateSection(Section):
    """Paired comparison of adapter and base on the same seeds."""

    seeds: Positive = Field(default=200, description="seeds added per round and comparison")
    trials: Positive = Field(default=1, description="episodes per seed and model")
    max_rounds: Positive = Field(default=3, description="rounds after which inconclusive is final")
    level: float = Field(default=0.95, gt=0.5, lt=1, description="confidence level over all rounds together")
    environment_margin: Margin = Field(
        default=0.02,
        description="lower bound of the gain on the capability's environment must exceed this; may be negative",
    )
    target_margin: Margin = Field(default=0.0, description="lower bound of the gain on the target must exceed this")
    target_detectable: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="a list of target tasks that cannot show a gain of this size need not show one",
    )
    regression_margin: Share = Field(
        default=0.05,
        description="maximum loss, by the interval's lower bound, on regression tasks, in the environments of live "
        "adapters (live, watch), in the replay of held-out conversations and at a handover",
    )
    largest_regression_margin: Share = Field(
        default=0.15,
        description="maximum loss there if they are too few to rule out less; not required if too few for this one",
    )
    temperature: Temperature | Literal["auto"] = Field(
        default="auto",
        description='sampling temperature of both models; 0: greedy; "auto": engine.temperature, or '
        "collect.temperature if that is 0 and tasks are played in several trials",
    )


class PromotionSection(Section):
    """Promotion of an approved adapter to live traffic."""

    policy: Policy = Field(
        default="immediate",
        description='"immediate", "canary" (a growing share, tested on feedback) or "shadow" (recorded, not returned)',
    )
    steps: Annotated[list[float], AfterValidator(_validate_steps)] = Field(
        default=[0.05, 0.25, 0.5], description="shares of its capability's conversations that a canary gets in turn"
    )
    min_samples: Positive = Field(default=30, description="judged canary conversations needed for the next share")
    alpha: float = Field(
        default=0.05, gt=0, lt=0.5, description="maximum probability of a wrong rollback, and of a wrong promotion"
    )
    margin: float = Field(
        default=0.1, gt=0, lt=1, description="loss of success rate that must be ruled out before a canary goes live"
    )
    shadow_requests: Positive = Field(default=4, description="concurrent shadow requests at the engines")


def valid_base_url(text: str) -> str:
    """Validate a setting: "" or an HTTP URL without credentials; raises ``ValueError``."""
    if not text:
        return text
    parts = urlsplit(text)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("a URL must not contain credentials; name the variable of the key in api_key_env")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("not an HTTP URL; write e.g. http://127.0.0.1:8000/v1")
    return text


def valid_variable(text: str) -> str:
    """Validate a setting: "" or the name of an environment variable; raises ``ValueError``."""
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*|", text):
        raise ValueError("write the name of a variable in capital letters, e.g. OPENAI_API_KEY, not the key itself")
    return text


def valid_key_file(text: str) -> str:
    """Validate a setting: "" or a path that does not look like a key; raises ``ValueError``."""
    if len(text) >= KEY_LIKE_LENGTH and not set(text) & set("/\\."):
        raise ValueError("write the path of a file with the key, e.g. ./key, not the key itself")
    return text


BaseUrl = Annotated[str, AfterValidator(valid_base_url)]
Variable = Annotated[str, AfterValidator(valid_variable)]
KeyFile = Annotated[str, AfterValidator(valid_key_file)]
Seconds = Annotated[float, Field(gt=0)]
Price = Annotated[float, Field(ge=0)]
Limit = Annotated[int, Field(ge=0)]


class ModelSection(Section):
    """A language model and the key of its server."""

    model: str = Field(default="", description='name of the model at its server; "": none')
    base_url: BaseUrl = Field(default="", description='URL of its server, e.g. "http://127.0.0.1:8000/v1"; "": OpenAI')
    api_key_env: Variable = Field(default="OPENAI_API_KEY", description="environment variable with its API key")
    api_key_file: KeyFile = Field(default="", description="file with its API key, instead of the variable")

    @model_validator(mode="after")
    def _refuse_stored_key(self) -> Self:
        # Model and URL are stored with every cycle, where a key must never be.
        key = os.environ.get(self.api_key_env, "").strip()
        for name in ("model", "base_url"):
            if len(key) >= MIN_KEY_LENGTH and key in getattr(self, name):
                raise ValueError(f"{name} contains the key in the variable {self.api_key_env}; remove the key")
        return self


class LlmSection(ModelSection):
    """The language model of analyst "llm" and synthesizer "llm" (test it with `traced llm check`)."""

    concurrency: Positive = Field(default=8, description="concurrent requests")
    requests_per_minute: Limit = Field(default=0, description="maximum requests per minute; 0: no limit")
    tokens_per_minute: Limit = Field(default=0, description="maximum tokens per minute, prompt and answer; 0: no limit")
    connect_s: Seconds = Field(default=10.0, description="seconds to connect")
    silence_s: Seconds = Field(default=120.0, description="seconds without data, before or during an answer")
    timeout_s: Seconds = Field(default=600.0, description="seconds for a complete answer")
    patience_s: Seconds = Field(default=300.0, description="seconds during which a failing request is retried")
    context_tokens: Limit = Field(default=0, description="maximum tokens of prompt and answer; 0: ask the server")
    prompt_price: Price = Field(default=0.0, description="price of a million prompt tokens")
    completion_price: Price = Field(default=0.0, description="price of a million completion tokens")


class UserSection(LlmSection):
    """The language model that is the user of a target, if it asks for one (test it with `traced llm check --user`)."""

    temperature: Temperature = Field(default=0.0, description="sampling temperature of the user's messages")
    max_tokens: Positive = Field(default=512, description="maximum tokens of one message of the user")


# These keys of [training] change its time, memory and reports, and the rounding at most.
EXECUTION_KEYS = {"gradient_checkpointing", "attention", "processes", "shard", "report_to"}
# Of [llm], only these keys change the results of a cycle; the others are limits and credentials.
RESULT_KEYS = {"model", "base_url", "context_tokens"}
REQUEST_KEYS = set(LlmSection.model_fields) - RESULT_KEYS


class JudgeSection(ModelSection):
    """A model that judges conversations; its verdicts are used only if its agreement with labels is high enough."""

    model: str = Field(default="", description='name of the model at its server; "": no judge')
    prompt: str = Field(default="", description='file with its instructions; "": the built-in ones')
    temperature: Temperature = Field(default=0.0, description="sampling temperature")
    timeout_s: float = Field(default=60.0, gt=0, description="seconds for one answer")
    concurrency: Positive = Field(default=4, description="conversations judged concurrently")
    per_minute: int = Field(default=0, ge=0, description="maximum requests per minute; 0: no limit")
    max_characters: Positive = Field(
        default=100_000, description="maximum length of a judged conversation; longer ones stay unknown"
    )
    min_agreement: Margin = Field(default=0.6, description="minimum agreement with labels (Cohen's kappa)")
    min_labels: Positive = Field(default=30, description="minimum number of labelled conversations to measure it")


class OutcomesSection(Section):
    """Outcomes of conversations without feedback."""

    rules: str = Field(default="", description='file of rules (test it with `traced outcomes check FILE`); "": none')
    judge: JudgeSection = Field(default=JudgeSection(), description="the judge")


class PromptingSection(Section):
    """Optimization of a prompt (GEPA) instead of training an adapter, with as many rollouts as the training."""

    minibatch: Positive = Field(default=8, description="training seeds per improvement of a prompt")
    validation: Positive = Field(
        default=64, description="seeds on which improved prompts are compared; at most a third of the rollouts"
    )
    max_tokens: int = Field(
        default=1_000_000, ge=0, description="maximum tokens per capability, prompts and answers; 0: no limit"
    )
    max_cost: float = Field(default=0.0, ge=0, description="maximum cost, at the prices of [llm]; 0: no limit")
    max_minutes: float = Field(default=0.0, ge=0, description="maximum minutes of waiting for answers; 0: no limit")
