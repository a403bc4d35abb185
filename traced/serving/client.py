"""An asynchronous client of an OpenAI-compatible engine: the embedded one, or vLLM with ``return_token_ids``.

Every completion brings the engine's own token ids and log-probs. Failures are attributed here, once: a wrong request
is a ``RequestError`` (with ``UnknownModelError`` and ``ContextLengthError``), anything else that keeps the engine from
answering is an ``EngineError``. No retries: a caller that may ask again decides so. One client belongs to one event
loop.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from httpx_aiohttp import AiohttpTransport

from sandbox.contract import Message, Tool
from traced.rollout.policy import Completion
from traced.serving.errors import ContextLengthError, EngineError, RequestError, UnknownModelError

KEEP_ALIVE_S = 30.0  # the embedded server keeps idle connections longer
EMBEDDED_TOGETHER = 64
# Through aiohttp: the pool of httpx's own transport takes time quadratic in its connections at every request.
LIMITS = httpx.Limits(max_connections=1024, keepalive_expiry=KEEP_ALIVE_S)
TOP_LOGPROBS = 20  # the most that vLLM grants by default


class EngineClient:
    """Talks to one engine. Close it with ``aclose`` or use it as an asynchronous context manager."""

    def __init__(
        self, url: str, *, timeout_s: float = 120.0, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.url = url
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            transport=transport or AiohttpTransport(trust_env=False, limits=LIMITS),
            trust_env=False,
        )

    async def __aenter__(self) -> "EngineClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def chat(
        self,
        model: str,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        temperature: float = 1.0,
        max_tokens: int = 256,
        seed: int | None = None,
    ) -> Completion:
        """One assistant message with its token ids and log-probs (nats)."""
        body = {"model": model, "messages": list(messages), "temperature": temperature, "max_tokens": max_tokens}
        body |= {"seed": seed, "logprobs": True, "return_token_ids": True}
        answer = await self._post("/v1/chat/completions", body | ({"tools": list(tools)} if tools else {}))
        try:
            return _completion(answer)
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(f"{self.url} answered without token ids or log-probs: {error!r}") from error

    async def label_logprobs(
        self, prompt: str | Sequence[Message], labels: Sequence[str], model: str = "base"
    ) -> dict[str, float]:
        """Log-probs (nats) of each label as the next token, with or without a space before it.

        Labels outside the engine's 20 likeliest tokens are left out.
        """
        if isinstance(prompt, str):
            body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "logprobs": TOP_LOGPROBS}
            answer = await self._post("/v1/completions", body)
            top = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        else:
            body = {"model": model, "messages": list(prompt), "max_tokens": 1, "temperature": 0.0}
            body |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
            answer = await self._post("/v1/chat/completions", body)
            content = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            top = {entry["token"]: entry["logprob"] for entry in content}
        return _labels_among(top, labels)

    async def embeddings(self, texts: Sequence[str], model: str = "base") -> list[list[float]]:
        """One vector per text, in order; ``EMBEDDED_TOGETHER`` texts to a request."""
        found: list[list[float]] = []
        for begin in range(0, len(texts), EMBEDDED_TOGETHER):
            asked = list(texts[begin : begin + EMBEDDED_TOGETHER])
            answer = await self._post("/v1/embeddings", {"model": model, "input": asked, "encoding_format": "float"})
            try:
                vectors = {entry["index"]: entry["embedding"] for entry in answer["data"]}
                found += [vectors[place] for place in range(len(asked))]
            except (KeyError, TypeError) as error:
                raise EngineError(f"{self.url} answered without the embeddings: {error!r}") from error
        return found

    async def load_adapter(self, name: str, path: Path) -> None:
        """Serve the PEFT directory at ``path`` (on the engine's machine) under ``name``."""
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})

    async def unload_adapter(self, name: str) -> None:
        """Stop serving an adapter."""
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def models(self) -> list[str]:
        """Names that requests may use: the base first, then adapters."""
        answer = await self._request("GET", "/v1/models")
        return [entry["id"] for entry in answer["data"]]

    async def health(self) -> bool:
        """Whether the engine answers."""
        try:
            return (await self._http.get("/health")).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return await self._request("POST", path, body)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise EngineError(
                f"no answer from the engine at {self.url}{path}: {type(error).__name__}: {error}", hint="traced status"
            ) from error
        if response.is_error:
            raise _failure(response)
        if "json" not in response.headers.get("content-type", ""):
            return response.text
        try:
            return response.json()
        except ValueError as error:
            raise EngineError(f"{self.url}{path} answered with broken JSON: {response.text[:200]!r}") from error


def _completion(answer: Mapping[str, Any]) -> Completion:
    choice = answer["choices"][0]
    message: Message = {"role": "assistant", "content": choice["message"].get("content")}
    if choice["message"].get("tool_calls"):
        message["tool_calls"] = choice["message"]["tool_calls"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return Completion(
        message, list(answer["prompt_token_ids"]), list(choice["token_ids"]), logprobs, choice["finish_reason"]
    )


def _labels_among(top: Mapping[str, float], labels: Sequence[str]) -> dict[str, float]:
    """Add up the tokens that read as each label."""
    mass = {label: sum(math.exp(p) for token, p in top.items() if token.strip() == label) for label in labels}
    return {label: math.log(p) for label, p in mass.items() if p > 0}


def _failure(response: httpx.Response) -> Exception:
    try:
        detail = response.json()["error"]
        message, code = str(detail["message"]), detail.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code = response.text[:500], None
    text = f"HTTP {response.status_code} from {response.request.url}: {message}"
    if response.is_server_error:
        return EngineError(text)
    if code == "context_length_exceeded" or "maximum context length" in message:  # vLLM says it in words only
        return ContextLengthError(text)
    return UnknownModelError(text) if response.status_code == httpx.codes.NOT_FOUND else RequestError(text)
