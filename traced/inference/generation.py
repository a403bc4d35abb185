"""Requests to an engine in token ids, their results, and the part of a tokenizer that engines use. Imports no torch."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from sandbox.contract import Message


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the embedded engine uses."""

    eos_token_id: int | None
    chat_template: Any

    def apply_chat_template(self, conversation: list[Message], **options: Any) -> Any:
        """Render a conversation as text, or as token ids with the option ``tokenize=True``."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Return the token ids of ``text``."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str:
        """Return the text of the token ids."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return the token ids by token."""
        ...


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Args:
        temperature: 0 means greedy sampling.
        max_tokens: Maximum number of tokens to sample.
        seed: None means a fresh seed.
        top_logprobs: The number of likeliest tokens to report per step.
        stop: Texts that end the completion; their tokens are still part of it.
        stop_ids: Token ids that end the completion, besides those that the engine knows; part of it as well.
        grammar: Grammar of llguidance (Lark) that the completion has to match, "" for free text.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    seed: int | None = None
    top_logprobs: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    grammar: str = ""


@dataclass(frozen=True)
class Request:
    """A completion request; without an adapter the base model serves it (in the trainer: the live model).

    The same request gives the same ``Generation`` whatever else is in the batch, up to float rounding.
    """

    prompt_ids: list[int]
    sampling: Sampling
    adapter: str | None = None


@dataclass(frozen=True)
class Generation:
    """The result of a request.

    Args:
        ids: The sampled tokens, with the end-of-turn token if it was sampled.
        logprobs: The log-probs of ``ids`` in nats, under softmax(logits / T), or the plain softmax for T = 0.
        finish_reason: "stop" or "length".
        top: Per token, the likeliest token ids with their log-probs under the same distribution.
        server: The URL of the engine that answered; "" in the engine's own process.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    top: list[dict[int, float]] = field(default_factory=list)
    server: str = ""
