"""What goes into the embedded engine and what comes out: plain types, no torch.

Invariant: the same ``Request`` gives the same ``Generation`` whatever else is in the batch, up to float rounding: a
seeded request draws its own random numbers.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens: ``temperature`` 0 is greedy, ``seed`` None draws a fresh one.

    One of the texts in ``stop`` ends the answer; the tokens that spell it are still part of it.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    seed: int | None = None
    top_logprobs: int = 0  # how many of the most likely tokens to report per step
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """One completion to make. ``adapter`` None is the base model (in the trainer: the live model as it is)."""

    prompt_ids: list[int]
    sampling: Sampling
    adapter: str | None = None


@dataclass(frozen=True)
class Generation:
    """Sampled tokens, the end-of-turn token included.

    ``logprobs[i]`` (nats) is that of ``ids[i]`` under softmax(logits / T), or under plain softmax for T = 0; ``top[i]``
    maps the most likely token ids to their log-probs under the same distribution. ``finish_reason``: "stop" | "length".
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    top: list[dict[int, float]] = field(default_factory=list)
