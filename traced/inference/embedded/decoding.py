"""Sample the next tokens of a batch, and keep the state of running requests.

Each request draws one uniform number per token from its own seed before it starts, so that neither batching nor the
order of arrival changes a sample. A request ends at a stop token, at a stop text, or at its ``limit`` of tokens.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError

import torch
from torch import Tensor

from traced.inference.embedded.cache import Slot
from traced.inference.embedded.structure import Constraint
from traced.inference.errors import ContextLengthError, RequestError
from traced.inference.generation import Generation, Request, Sampling, Tokenizer

# Keeps u * total below the total in float32.
UNIFORM_MAX = 1.0 - 2.0**-20


def draw_uniforms(sampling: Sampling, count: int) -> list[float]:
    """Return ``count`` uniform numbers in [0, 1) from the request's seed, or a fresh seed; none for greedy sampling."""
    if sampling.temperature <= 0:
        return []
    # Drawn on the CPU, so that a seed gives the same sample on every device.
    generator = torch.Generator("cpu")
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed % 2**63)
    uniforms: list[float] = torch.rand(count, generator=generator, device="cpu").clamp_(max=UNIFORM_MAX).tolist()
    return uniforms


def choose(logits: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token per row of ``logits`` [n, vocabulary].

    Args:
        temperatures: T of each row; 0 means arg-max, with log-probs under the plain softmax.
        uniforms: The random number of each row, in [0, 1).

    Returns:
        The token ids [n], their log-probs [n] and all log-probs [n, vocabulary], under softmax(logits / T).
    """
    greedy, device = [t <= 0 for t in temperatures], logits.device
    logits = logits.float()
    if any(t not in (0.0, 1.0) for t in temperatures):
        logits = logits / torch.tensor([t if t > 0 else 1.0 for t in temperatures], device=device)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    if all(greedy):
        ids = logprobs.argmax(dim=-1)
    else:
        cumulative = logprobs.exp().cumsum(dim=-1)
        # Sampling by inversion of the cumulative distribution.
        threshold = cumulative[:, -1:] * torch.tensor(uniforms, dtype=cumulative.dtype, device=device)[:, None]
        ids = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
        if any(greedy):
            ids = torch.where(torch.tensor(greedy, device=device), logprobs.argmax(dim=-1), ids)
    return ids, logprobs.gather(1, ids[:, None])[:, 0], logprobs


def top_logprobs(row: Tensor, count: int) -> dict[int, float]:
    """Return the ``count`` likeliest token ids of a row of log-probs with their log-probs, likeliest first."""
    values, ids = row.topk(min(count, row.shape[-1]))
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    # A constraint gives the probability 0 to all tokens that it forbids.
    return {token: value for token, value in pairs if value > -math.inf}


class RunningRequest:
    """An accepted request with its future, its slot (set by ``assign_slot``) and the tokens sampled so far."""

    slot: Slot

    def __init__(self, request: Request, max_length: int, constraint: Constraint | None = None) -> None:
        self.request, self.constraint = request, constraint
        self.future: Future[Generation] = Future()
        self.limit = min(request.sampling.max_tokens, max_length - len(request.prompt_ids))
        self.temperature = request.sampling.temperature
        self.has_slot = False
        self._uniforms = draw_uniforms(request.sampling, self.limit)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[dict[int, float]] = []

    def assign_slot(self, slot: Slot) -> None:
        """Set the slot whose row of the cache the request uses."""
        self.slot, self.has_slot = slot, True

    @property
    def prefill_length(self) -> int:
        """Return the number of the slot's tokens that are not in the cache yet."""
        return len(self.slot.tokens) - self.slot.cached

    def uniform(self) -> float:
        """Return the uniform number for the next token; 0 for greedy sampling."""
        return self._uniforms[len(self._ids)] if self._uniforms else 0.0

    def append(self, token: int, logprob: float, table: Tensor) -> None:
        """Append the next token; ``table`` holds the log-probs [vocabulary] from which it was sampled."""
        self._ids.append(token)
        self._logprobs.append(logprob)
        self.slot.tokens.append(token)
        if self.constraint is not None:
            self.constraint.consume(token)
        if self.request.sampling.top_logprobs:
            self._top.append(top_logprobs(table, self.request.sampling.top_logprobs))

    def finish_reason(self, stops: frozenset[int], tokenizer: Tokenizer) -> str | None:
        """Return "stop" or "length" if the request has ended, or None while it continues."""
        last = self._ids[-1]
        if last in stops or last in self.request.sampling.stop_ids or self._ends_with_stop_text(tokenizer):
            return "stop"
        if self.constraint is not None and self.constraint.is_complete:
            return "stop"
        return "length" if len(self._ids) >= self.limit else None

    def _ends_with_stop_text(self, tokenizer: Tokenizer) -> bool:
        stop_texts = self.request.sampling.stop
        if not stop_texts:
            return False
        # These tokens contain at least the longest text: a character has at most four bytes, a token at least one.
        count = 4 * max(map(len, stop_texts)) + 4
        end = tokenizer.decode(self._ids[-count:], skip_special_tokens=True)
        return any(text in end for text in stop_texts)

    def finish(self, reason: str) -> None:
        """Set the future's result with the finish reason."""
        # The future may have been cancelled meanwhile.
        try:
            self.future.set_result(Generation(self._ids, self._logprobs, reason, self._top))
        except InvalidStateError:
            return


def check_request(request: Request, max_length: int, vocabulary: int) -> None:
    """Raise ``RequestError`` for a request that can never be served."""
    prompt, sampling = request.prompt_ids, request.sampling
    if not prompt:
        raise RequestError("the prompt is empty; at least one token is needed")
    if len(prompt) >= max_length:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens and the context holds {max_length}",
            hint="send a shorter conversation",
        )
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        raise RequestError(f"token ids must lie in 0..{vocabulary - 1}, got {min(prompt)}..{max(prompt)}")
    if sampling.max_tokens < 1 or sampling.temperature < 0 or sampling.top_logprobs < 0:
        raise RequestError(f"max_tokens must be at least 1, temperature and top_logprobs not negative: {sampling}")
