"""Requests and responses of the embedded engine's HTTP API: OpenAI's fields, and vLLM's ``return_token_ids``.

A field that is not implemented and would change the answer is refused unless it has its neutral value. Fields that do
not affect the answer (``user``, ``metadata``) are ignored.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sandbox.contract import Message, Tool
from traced.inference.embedded.structure import call_schema, closed, forced_tools, format_schema, grammar_of
from traced.inference.errors import RequestError
from traced.inference.generation import Generation, Sampling, Tokenizer

# Fields that are not implemented, with the values that are accepted because they do not change the answer.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "bad_words": ([],),
}
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128


class GenerationRequest(BaseModel):
    """The fields that chat and text completions share."""

    model_config = ConfigDict(extra="allow")

    model: str
    temperature: float | None = Field(default=None, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    stream: bool | None = False
    return_token_ids: bool | None = False
    stop_token_ids: list[int] | None = None

    def refuse_unsupported(self) -> None:
        """Raise ``RequestError`` if a field that is not implemented has a value that would change the answer."""
        for name, value in (self.model_extra or {}).items():
            if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
                raise RequestError(f"{name}={value!r} is not supported by the embedded engine; leave it out")

    def sampling(self, max_tokens: int, top_logprobs: int, grammar: str = "") -> list[Sampling]:
        """Return the sampling parameters of each of the ``n`` answers, with seeds that count up from ``seed``.

        Raises:
            RequestError: ``n`` is greater than 1 and the temperature 0.
        """
        temperature = 1.0 if self.temperature is None else self.temperature
        count = self.n or 1
        if count > 1 and not temperature:
            raise RequestError(f"n must be 1 where temperature is 0, got {count}: all answers would be the same")
        seeds = [None if self.seed is None else self.seed + i for i in range(count)]
        stops, stop_ids = self.stops(), tuple(self.stop_token_ids or ())
        return [Sampling(temperature, max_tokens, seed, top_logprobs, stops, stop_ids, grammar) for seed in seeds]

    def stops(self) -> tuple[str, ...]:
        """Return the texts that end an answer."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in texts if text)

    def text(self, tokenizer: Tokenizer, generation: Generation) -> str:
        """Return the text of an answer, up to the first stop text."""
        text: str = tokenizer.decode(generation.ids, skip_special_tokens=True)
        return text[: min((text.find(stop) for stop in self.stops() if stop in text), default=None)]

    def stop_text(self, tokenizer: Tokenizer, generation: Generation) -> str | None:
        """Return the stop text that ended an answer, None if it ended otherwise."""
        text = tokenizer.decode(generation.ids, skip_special_tokens=True) if self.stop else ""
        return min((stop for stop in self.stops() if stop in text), key=text.find, default=None)


class StreamOptions(BaseModel):
    """OpenAI's options for streams: whether they end with the token counts."""

    include_usage: bool | None = False


class TokenizeRequest(BaseModel):
    """POST /tokenize, as in vLLM: the token ids of a text."""

    prompt: str
    add_special_tokens: bool = True


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: object = None
    response_format: dict[str, Any] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    stream_options: StreamOptions | None = None

    @classmethod
    def translated(cls, fields: dict[str, Any]) -> "ChatRequest":
        """Return the request with these fields, which come from another form; raises ``RequestError``."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise RequestError(
                "; ".join(f"{problem['loc']}: {problem['msg']}" for problem in error.errors())
            ) from error

    def offered_tools(self) -> list[Tool]:
        """Return the tools for the model, none if ``tool_choice`` is "none"."""
        return [] if self.tool_choice == "none" else self.tools or []

    def forces_call(self) -> bool:
        """Whether the answer has to be a call; raises ``RequestError``."""
        return bool(forced_tools(self.tool_choice, self.tools or []))

    def grammar(self, tags: tuple[str, str]) -> str:
        """Return the grammar that the answer has to match, "" for free text.

        Args:
            tags: The texts around a call in the syntax of the model.

        Raises:
            RequestError: The schema or ``tool_choice`` cannot be used.
        """
        if demanded_tools := forced_tools(self.tool_choice, self.tools or []):
            return grammar_of(closed(call_schema(demanded_tools)), tags)
        schema = format_schema(self.response_format)
        return "" if schema is None else grammar_of(closed(schema))


class TextRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    stream_options: StreamOptions | None = None


class EmbeddingRequest(BaseModel):
    """POST /v1/embeddings: one text or several, as text or as token ids."""

    model: str
    input: str | list[str] | list[int] | list[list[int]] = Field(min_length=1)
    encoding_format: str = "float"
    dimensions: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the texts one by one; raises ``RequestError`` for options that are not implemented."""
        if self.encoding_format != "float":
            raise RequestError(f"encoding_format={self.encoding_format!r} is not supported; use 'float'")
        if self.dimensions is not None:
            raise RequestError(f"dimensions={self.dimensions} is not supported; leave it out")
        if isinstance(self.input, str):
            return [self.input]
        ids = [part for part in self.input if isinstance(part, int)]
        return [ids] if ids else [part for part in self.input if not isinstance(part, int)]


class LoadAdapter(BaseModel):
    """POST /v1/load_lora_adapter."""

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)


class UnloadAdapter(BaseModel):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


def usage(prompt_ids: list[int], generations: Sequence[Generation]) -> dict[str, int]:
    """Return the token counts of a response."""
    sampled = sum(len(generation.ids) for generation in generations)
    return {"prompt_tokens": len(prompt_ids), "completion_tokens": sampled, "total_tokens": len(prompt_ids) + sampled}


def embeddings(model: str, prompts: list[list[int]], vectors: list[list[float]]) -> dict[str, object]:
    """Build the response to an ``EmbeddingRequest``: one vector per text, in order."""
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    tokens = sum(map(len, prompts))
    return {
        "object": "list",
        "data": data,
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def chat_logprobs(tokenizer: Tokenizer, generation: Generation) -> dict[str, object]:
    """Build ``choices[0].logprobs`` of a chat completion: one entry per sampled token."""
    tops = generation.top or [{} for _ in generation.ids]
    content = [
        {**_token(tokenizer, i, lp), "top_logprobs": [_token(tokenizer, j, p) for j, p in top.items()]}
        for i, lp, top in zip(generation.ids, generation.logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: Tokenizer, generation: Generation) -> dict[str, object]:
    """Build ``choices[0].logprobs`` of a text completion."""
    tokens = [tokenizer.decode([i]) for i in generation.ids]
    offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    tops: list[dict[str, float]] = []
    for top in generation.top:
        by_text: dict[str, float] = {}
        # The tokens come likeliest first, so of tokens with the same text the likeliest is kept.
        for token_id, logprob in top.items():
            by_text.setdefault(tokenizer.decode([token_id]), logprob)
        tops.append(by_text)
    return {"tokens": tokens, "token_logprobs": generation.logprobs, "top_logprobs": tops, "text_offset": offsets}


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, object]:
    text = tokenizer.decode([token_id])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
