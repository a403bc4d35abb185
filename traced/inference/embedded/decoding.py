"""One request on its way through the engine: what it has sampled, when it ends, and where its result goes.

A request ends at a stop token, at a stop text, or at ``limit`` tokens, the smaller of ``max_tokens`` and the room left
in the context.

Choosing the next token for a whole batch at once.

Each request draws its uniform numbers from its own seed before it starts, one per token, so that neither batching nor
the order of arrival changes a sample. Sampling inverts the cumulative distribution.
"""

from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import torch
from torch import Tensor

from traced.inference.embedded.cache import Slot
from traced.inference.embedded.generation import Generation, Request, Sampling
from traced.inference.errors import ContextLengthError, RequestError

UNIFORM_MAX = 1.0 - 2.0**-20  # keeps u * total below the total in float32


def draw_uniforms(sampling: Sampling, count: int) -> list[float]:
    """``count`` numbers in [0, 1) from the request's seed; a fresh seed when it has none. Empty for greedy."""
    if sampling.temperature <= 0:
        return []
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed % 2**63)
    drawn: list[float] = torch.rand(count, generator=generator).clamp_(max=UNIFORM_MAX).tolist()
    return drawn


def choose(logits: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Pick one token per row of ``logits`` [n, vocabulary].

    Returns token ids [n], their log-probs [n] and all log-probs [n, vocabulary] under softmax(logits / T); T = 0 means
    arg-max and the plain softmax. ``uniforms[i]`` in [0, 1) decides row i.
    """
    greedy = [t <= 0 for t in temperatures]
    if any(t not in (0.0, 1.0) for t in temperatures):
        logits = logits / torch.tensor([t if t > 0 else 1.0 for t in temperatures], dtype=logits.dtype)[:, None]
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    if all(greedy):
        ids = logprobs.argmax(dim=-1)
    else:
        cumulative = logprobs.exp().cumsum(dim=-1)
        bar = cumulative[:, -1:] * torch.tensor(uniforms, dtype=cumulative.dtype)[:, None]
        ids = torch.searchsorted(cumulative, bar, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
        if any(greedy):
            ids = torch.where(torch.tensor(greedy), logprobs.argmax(dim=-1), ids)
    return ids, logprobs.gather(1, ids[:, None])[:, 0], logprobs


def top_logprobs(row: Tensor, count: int) -> dict[int, float]:
    """The ``count`` most likely token ids of a row of log-probs, most likely first."""
    values, ids = row.topk(min(count, row.shape[-1]))
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


class Running:
    """A request with its future, its slot once it has one, and its tokens so far."""

    slot: Slot  # from ``take_slot`` on

    def __init__(self, request: Request, max_length: int) -> None:
        self.request = request
        self.future: Future[Generation] = Future()
        self.limit = min(request.sampling.max_tokens, max_length - len(request.prompt_ids))
        self.temperature = request.sampling.temperature
        self.placed = False
        self._uniforms = draw_uniforms(request.sampling, self.limit)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[dict[int, float]] = []

    def take_slot(self, slot: Slot) -> None:
        """Settle in a slot; from now on tokens go there."""
        self.slot, self.placed = slot, True

    @property
    def to_prefill(self) -> int:
        """Prompt tokens that are not in the slot yet."""
        return len(self.slot.tokens) - self.slot.cached

    def uniform(self) -> float:
        """The random number that decides the next token."""
        return self._uniforms[len(self._ids)] if self._uniforms else 0.0

    def take(self, token: int, logprob: float, table: Tensor) -> None:
        """Record the next token; ``table`` holds all log-probs [vocabulary] it was chosen from."""
        self._ids.append(token)
        self._logprobs.append(logprob)
        self.slot.tokens.append(token)
        if self.request.sampling.top_logprobs:
            self._top.append(top_logprobs(table, self.request.sampling.top_logprobs))

    def finish_reason(self, stops: frozenset[int], tokenizer: Any) -> str | None:
        """Why the request has ended, or None while it goes on."""
        if self._ids[-1] in stops or self._says_stop(tokenizer):
            return "stop"
        return "length" if len(self._ids) >= self.limit else None

    def _says_stop(self, tokenizer: Any) -> bool:
        wanted = self.request.sampling.stop
        if not wanted:
            return False
        reach = 4 * max(map(len, wanted)) + 4  # a character has at most four bytes, a token at least one
        end = tokenizer.decode(self._ids[-reach:], skip_special_tokens=True)
        return any(text in end for text in wanted)

    def finish(self, reason: str) -> None:
        """Hand the result over, unless nobody waits for it any more."""
        try:
            self.future.set_result(Generation(self._ids, self._logprobs, reason, self._top))
        except InvalidStateError:
            return  # cancelled at the last moment


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
