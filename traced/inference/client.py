"""Client of one OpenAI-compatible engine: embedded, vLLM with ``return_token_ids``, or a server without token ids.

Invariants: completions carry the engine's own token ids and log-probs, and text is never re-tokenised; a malformed
tool call of the model is plain content, not an exception; a client belongs to one event loop. A request in token ids is
streamed and has no limit of total time: it fails if the engine sends nothing for ``silence_s``, for this or any other
request of this client, unless the engine sleeps. Other requests fail if nothing arrives for ``silence_s``. A completion
that the engine broke off is an error, not a short answer. Errors: ``RequestError`` for an invalid request,
``EngineError`` if the engine fails or does not answer. Requests are not retried.
"""

import asyncio
import contextlib
import json
import logging
import math
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

from sandbox.contract import Message, Tool
from traced.core.errors import ConfigError
from traced.inference.errors import ContextLengthError, EngineError, OverloadedError, RequestError, UnknownModelError
from traced.inference.generation import Generation, Request
from traced.inference.routing_prompt import ANSWER, label_ids_in

T = TypeVar("T")
log = logging.getLogger(__name__)

# Shorter than the 5 s of uvicorn, and so of vLLM, so that a connection is rarely reused while the server closes it.
KEEP_ALIVE_S = 4.0
EMBEDDING_BATCH = 64
# aiohttp is used instead of httpx, whose pool takes time quadratic in its connections at every request.
CONNECTIONS = 1024
CONNECT_S = 10.0
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
# traced's name for the base model.
BASE = "base"
# The most log-probs per token that vLLM returns by default.
TOP_LOGPROBS = 20
SILENCE_S = 300.0
# A silent engine is asked this often whether it sleeps, and has ``PROBE_S`` to answer.
SLEEP_POLL_S = 30.0
PROBE_S = 5.0
SLEEP_LIMIT_S = 3600.0
REFUSED_FOR_NOW = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)
AWAKE = re.compile(r'vllm:engine_sleep_state\{.*sleep_state="awake".*\} 1(\.0)?')
# The value is the second in which these were the adapters.
ADAPTERS_IN_USE = re.compile(r"vllm:lora_requests_info\{(.*)\} ([0-9.e+]+)")
ADAPTER_NAMES = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')
# A server's first chunk repeats the token ids of the prompt, in one line.
READ_BUFFER = 2**22
# vLLM takes the missing ones of these fields from the model's generation config, which changes the distribution.
UNCHANGED_DISTRIBUTION = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


@dataclass(frozen=True)
class Completion:
    """One sampled assistant message, with the token ids and log-probs of the engine.

    Args:
        prompt_ids: The exact prompt that the engine used.
        completion_ids: The sampled tokens, with the end-of-turn token if it was sampled.
        logprobs: In nats, one per sampled token.
        finish_reason: "stop", "length" or "tool_calls".
    """

    message: Message
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class EngineClient:
    """Client of one engine; close it with ``aclose`` or use it as an asynchronous context manager."""

    def __init__(self, url: str, *, silence_s: float = SILENCE_S, key: str = "", base: str = BASE) -> None:
        self.url = url
        self.silence_s = silence_s
        # Monotonic second of the last data from the engine, for any streamed request.
        self._last_data = time.monotonic()
        self._probed_at = -math.inf
        self._asleep_since: float | None = None
        # The engine's own name for the base model.
        self.base = base
        self._headers = {"Authorization": f"Bearer {key}"} if key else None
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silence_s)
        # Created at the first request, because it belongs to the running event loop.
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "EngineClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()

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
        """Request one assistant message with its token ids and log-probs (nats)."""
        model = self.base if model == BASE else model
        body = {"model": model, "messages": list(messages), "temperature": temperature, "max_tokens": max_tokens}
        body |= {"seed": seed, "logprobs": True, "return_token_ids": True}
        answer = await self._post("/v1/chat/completions", body | ({"tools": list(tools)} if tools else {}))
        try:
            completion = _completion(answer)
            _complete(self.url, completion.finish_reason)
            return completion
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(f"{self.url} answered without token ids or log-probs: {error!r}") from error

    async def chat_text(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, temperature: float, max_tokens: int, seed: int
    ) -> Completion:
        """Stream one assistant message of the base model from a server that need not know token ids."""
        body: dict[str, object] = {"model": self.base, "messages": list(messages), "stream": True, "seed": seed}
        body |= {"temperature": temperature, "max_tokens": max_tokens, **({"tools": list(tools)} if tools else {})}
        content, finish_reason = "", ""
        calls: dict[int, dict[str, Any]] = {}
        async with contextlib.aclosing(self._stream("/v1/chat/completions", body)) as chunks:
            async for chunk in chunks:
                for choice in chunk.get("choices") or []:
                    delta = choice.get("delta") or {}
                    content += delta.get("content") or ""
                    finish_reason = choice.get("finish_reason") or finish_reason
                    for part in delta.get("tool_calls") or []:
                        _add_call_part(calls, part)
        message: Message = {"role": "assistant", "content": content or None}
        if calls:
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
        return Completion(message, [], [], [], _complete(self.url, finish_reason))

    async def generate(self, request: Request) -> Generation:
        """Complete a prompt of token ids; the model is the adapter of the request, or the base."""
        sampling = request.sampling
        body: dict[str, object] = {"model": request.adapter or self.base, "prompt": request.prompt_ids, "stream": True}
        body |= {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "seed": sampling.seed}
        body |= {"logprobs": sampling.top_logprobs, "return_token_ids": True, **UNCHANGED_DISTRIBUTION}
        body |= {"stop": list(sampling.stop), "stop_token_ids": list(sampling.stop_ids)}
        ids: list[int] = []
        logprobs: list[float] = []
        finish_reason = ""
        async with contextlib.aclosing(self._stream("/v1/completions", body)) as chunks:
            async for chunk in chunks:
                try:
                    for choice in chunk["choices"]:
                        ids += choice.get("token_ids") or []
                        logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
                        finish_reason = choice.get("finish_reason") or finish_reason
                except (KeyError, TypeError, AttributeError) as error:
                    raise EngineError(f"{self.url} sent a chunk without choices: {error!r}") from error
        if not ids or len(ids) != len(logprobs):
            raise EngineError(
                f"{self.url} answered with {len(ids)} token ids and {len(logprobs)} log-probs; one log-prob per token "
                "is needed",
                hint="use a server with return_token_ids, such as vLLM",
            )
        return Generation(ids, logprobs, _complete(self.url, finish_reason), server=self.url)

    async def label_logprobs(
        self,
        prompt: str | Sequence[Message],
        labels: Sequence[str],
        model: str = "base",
        allowed_ids: Sequence[int] = (),
    ) -> dict[str, float]:
        """Return the log-prob (nats) of each label as the next token.

        Without ``allowed_ids`` a label counts with and without a space before it. Labels outside the engine's
        ``TOP_LOGPROBS`` likeliest tokens are left out, except the likeliest label of an engine that supports
        ``allowed_token_ids``.

        Args:
            allowed_ids: The token ids of the labels. vLLM samples among them alone; the log-probs are then those
                among the labels (with ``--logprobs-mode processed_logprobs``), or among all tokens.
        """
        # vLLM's /generative_scoring is not used: it returns the probability of the first label alone, so it needs a
        # request per label, and in vLLM 0.32 it truncates the top log-probs of other requests in the same step.
        model = self.base if model == BASE else model
        allowed = {"allowed_token_ids": list(allowed_ids)} if allowed_ids else {}
        if isinstance(prompt, str):
            body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "logprobs": TOP_LOGPROBS}
            answer = await self._post("/v1/completions", body | allowed)
        else:
            body = {"model": model, "messages": list(prompt), "max_tokens": 1, "temperature": 0.0}
            body |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
            answer = await self._post("/v1/chat/completions", body | allowed)
        try:
            logprobs = answer["choices"][0]["logprobs"]
            if isinstance(prompt, str):
                top = logprobs["top_logprobs"][0]
            else:
                top = {entry["token"]: entry["logprob"] for entry in logprobs["content"][0]["top_logprobs"]}
            if allowed_ids:
                return {label: float(top[label]) for label in labels if label in top}
            return _label_logprobs(top, labels)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise EngineError(f"{self.url} answered without the log-probs of its first token: {error!r}") from error

    async def label_ids(self, labels: Sequence[str]) -> dict[str, int]:
        """Return the token id of each label after ``Answer:``.

        Raises:
            RoutingPromptError: A label is not a single token, or two labels share one.
        """
        # One after the other, so that one connection serves them all.
        stem, *answers = [await self.token_ids(ANSWER + label) for label in ("", *labels)]
        return label_ids_in(stem, dict(zip(labels, answers, strict=True)))

    async def token_ids(self, text: str) -> list[int]:
        """Return the server's token ids of a text, without special tokens of its own."""
        body = {"model": self.base, "prompt": text, "add_special_tokens": False}
        answer = await self._post("/tokenize", body)
        try:
            return list(answer["tokens"])
        except (KeyError, TypeError) as error:
            raise EngineError(f"{self.url} answered without token ids: {error!r}") from error

    async def embeddings(self, texts: Sequence[str], model: str = "base") -> list[list[float]]:
        """Return one vector per text, in order; a request holds at most ``EMBEDDING_BATCH`` texts."""
        embeddings: list[list[float]] = []
        model = self.base if model == BASE else model
        for start in range(0, len(texts), EMBEDDING_BATCH):
            batch = list(texts[start : start + EMBEDDING_BATCH])
            answer = await self._post("/v1/embeddings", {"model": model, "input": batch, "encoding_format": "float"})
            try:
                vectors = {entry["index"]: entry["embedding"] for entry in answer["data"]}
                embeddings += [vectors[index] for index in range(len(batch))]
            except (KeyError, TypeError) as error:
                raise EngineError(f"{self.url} answered without the embeddings: {error!r}") from error
        return embeddings

    async def load_adapter(self, name: str, path: Path) -> None:
        """Serve the PEFT directory at ``path`` (on the engine's machine) under ``name``."""
        # vLLM has to know whether the weights of experts are stacked, as PEFT writes them.
        body = {"lora_name": name, "lora_path": str(path), "is_3d_lora_weight": _has_stacked_experts(path)}
        await self._post("/v1/load_lora_adapter", body)

    async def unload_adapter(self, name: str) -> None:
        """Stop serving an adapter."""
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def sleep(self) -> None:
        """Free the engine's device memory once its requests have ended (vLLM's sleep mode)."""
        await self._post("/sleep?level=1&mode=wait", {})

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps; False if it has no sleep mode."""
        # An engine without sleep mode answers 404.
        try:
            answer = await self._request("GET", "/is_sleeping")
        except RequestError:
            return False
        return isinstance(answer, dict) and answer.get("is_sleeping") is True

    async def is_draining(self) -> bool:
        """Return whether an engine that ``is_sleeping`` still completes requests; it must not be woken up then.

        If vLLM 0.32 is woken up in this state, it falls asleep at its next pause and accepts requests all the same.
        """
        # vLLM sets this gauge once it sleeps. Without metrics the answer is False.
        try:
            metrics = await self._request("GET", "/metrics")
        except RequestError:
            return False
        return any(AWAKE.fullmatch(line) is not None for line in str(metrics).splitlines())

    async def adapters_in_use(self, names: Collection[str]) -> set[str] | None:
        """Return those of the adapters with which requests of any client run or wait; None if it is not reported.

        Requests that the engine receives during this call may be missing.
        """
        used = await self._reported_adapters()
        if used is not None and used.issuperset(names):
            return set(names)
        # vLLM reports the adapter of a request from its first token on. It starts requests in the order of arrival, so
        # all that arrived before this one have their first token when this one is answered.
        body = {"model": self.base, "prompt": "Hi", "max_tokens": 1, "temperature": 0.0}
        await self._post("/v1/completions", body)
        used = await self._reported_adapters()
        return None if used is None else used & set(names)

    async def _reported_adapters(self) -> set[str] | None:
        try:
            metrics = await self._request("GET", "/metrics")
        except RequestError:
            return None
        reports = [match for line in str(metrics).splitlines() if (match := ADAPTERS_IN_USE.fullmatch(line))]
        if not reports:
            return None
        # vLLM never removes a sample: the one with the latest second holds.
        labels = max(reports, key=lambda report: float(report[2]))[1]
        return {name for names in ADAPTER_NAMES.findall(labels) for name in names.split(",")} - {""}

    async def wake_up(self) -> None:
        """Wake up an engine that ``EngineClient.sleep`` put to sleep."""
        await self._post("/wake_up", {})

    async def model_entry(self, name: str) -> dict[str, Any] | None:
        """Return what the engine's list of models states about a name; None if it is not in the list."""
        answer = await self._request("GET", "/v1/models")
        try:
            return next((entry for entry in answer["data"] if entry["id"] == name), None)
        except (KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"{self.url} answered without a list of models: {error!r}") from error

    async def models(self) -> list[str]:
        """Return the names that requests may use: base models first, then adapters."""
        bases, adapters = await self.bases_and_adapters()
        return bases + adapters

    async def bases_and_adapters(self) -> tuple[list[str], list[str]]:
        """Return the names of the engine's base models (a proxy lists several) and those of its adapters."""
        answer = await self._request("GET", "/v1/models")
        try:
            bases = [entry["id"] for entry in answer["data"] if entry.get("parent") is None]
            return bases, [entry["id"] for entry in answer["data"] if entry.get("parent") is not None]
        except (KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"{self.url} answered without a list of models: {error!r}") from error

    async def context_length(self) -> int:
        """Return the maximum tokens of prompt and completion that the server states for the base; 0: none."""
        entry = await self.model_entry(self.base)
        try:
            return int((entry or {}).get("max_model_len") or 0)
        except (TypeError, ValueError) as error:
            raise EngineError(f"{self.url} states no length of {self.base!r}: {error!r}") from error

    async def health(self) -> bool:
        """Return whether the engine answers ``/health`` with success."""
        try:
            async with self._session().get(f"{self.url}/health", timeout=HEALTH_TIMEOUT) as response:
                return response.ok
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=CONNECTIONS, keepalive_timeout=KEEP_ALIVE_S)
            self._http = aiohttp.ClientSession(
                connector=connector, timeout=self._timeout, headers=self._headers, read_bufsize=READ_BUFFER
            )
        return self._http

    async def _stream(self, path: str, body: Mapping[str, object]) -> AsyncGenerator[Any]:
        """Yield the JSON objects of a stream of server-sent events."""
        url = self.url + path
        self._last_data = time.monotonic()
        try:
            async with await self._begin_stream(url, body) as response:
                if not response.ok:
                    raise _http_error(url, await _http_answer(response))
                rest = b""
                while data := await self._while_alive(response.content.readany()):
                    self._last_data, self._asleep_since = time.monotonic(), None
                    *lines, rest = (rest + data).split(b"\n")
                    for event in _events(lines):
                        if "error" in event:
                            raise EngineError(f"{url} broke off with {json.dumps(event['error'])[:500]}")
                        yield event
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineError(
                f"the answer of the engine at {url} broke off: {type(error).__name__}: {error}",
                hint="check the engine with traced status",
            ) from error

    async def _begin_stream(self, url: str, body: Mapping[str, object]) -> aiohttp.ClientResponse:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=None)
        try:
            return await self._while_alive(self._session().post(url, json=body, timeout=timeout))
        # The server has closed an idle connection at this moment; the request is repeated on a new one.
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
            if isinstance(error, aiohttp.ClientConnectorError):
                raise
            return await self._while_alive(self._session().post(url, json=body, timeout=timeout))

    async def _while_alive(self, answer: Awaitable[T]) -> T:
        """Wait for data; raises ``TimeoutError`` if the engine is awake and sends nothing for ``silence_s``."""
        waiting = asyncio.ensure_future(answer)
        step_s = min(self.silence_s / 10, SLEEP_POLL_S)
        try:
            while not waiting.done():
                silent_s = time.monotonic() - self._last_data
                if silent_s >= self.silence_s:
                    raise TimeoutError(f"no token and no other data for {self.silence_s:g} s (engine.silence_s)")
                await asyncio.wait({waiting}, timeout=min(step_s, self.silence_s - silent_s))
                if not waiting.done() and time.monotonic() - self._last_data >= step_s:
                    await self._look_for_sleep(step_s)
        except BaseException:
            # A response that arrives at this moment would stay open.
            waiting.add_done_callback(_close_response)
            waiting.cancel()
            raise
        return waiting.result()

    async def _look_for_sleep(self, every_s: float) -> None:
        """Exclude the time in which the engine sleeps, for the update of a training, from its silence.

        An engine that is not woken up within ``SLEEP_LIMIT_S`` counts as silent.
        """
        now = time.monotonic()
        # Once for all requests that wait.
        if now - self._probed_at < every_s:
            return
        self._probed_at = now
        is_asleep = False
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(PROBE_S):
                is_asleep = await self.is_sleeping()
        if not is_asleep:
            self._asleep_since = None
            return
        if self._asleep_since is None:
            self._asleep_since = now
            log.info("engine %s sleeps: requests wait until a training wakes it up", self.url)
        if now - self._asleep_since < SLEEP_LIMIT_S:
            self._last_data = time.monotonic()

    async def _post(self, path: str, body: Mapping[str, object]) -> Any:
        return await self._request("POST", path, body)

    async def _request(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        answer = await self._exchange(method, path, body)
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise _http_error(self.url + path, answer)
        if "json" not in answer.content_type:
            return answer.text
        try:
            return json.loads(answer.text)
        except ValueError as error:
            raise EngineError(f"{self.url + path} answered with broken JSON: {answer.text[:200]!r}") from error

    async def _exchange(self, method: str, path: str, body: Mapping[str, object] | None) -> "HttpAnswer":
        """Send a request and return the whole answer; raises ``EngineError`` if there is none."""
        try:
            async with self._session().request(method, self.url + path, json=body) as response:
                return await _http_answer(response)
        except (aiohttp.ClientError, TimeoutError) as error:
            silence = f"no data for {self.silence_s:g} s (engine.silence_s)" if isinstance(error, TimeoutError) else ""
            raise no_answer(self.url + path, silence or f"{type(error).__name__}: {error}") from error


def server_key(file: str) -> str:
    """Return the API key of the servers from ``engine.key_file``, "" without one; raises ``ConfigError``."""
    try:
        key = Path(file).expanduser().read_text("utf-8").strip() if file else ""
    # RuntimeError: the home of an unknown user; ValueError: an invalid path or text.
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"engine.key_file {file} cannot be read: {reason}", hint=f"ls -l {file}") from None
    if file and not key:
        raise ConfigError(f"engine.key_file {file} is empty", hint="write the API key into it")
    return key


@dataclass(frozen=True)
class HttpAnswer:
    """A whole HTTP answer; ``retry_after`` is the header as it came, "" without one."""

    status: int
    content_type: str
    retry_after: str
    text: str


def no_answer(url: str, reason: str) -> EngineError:
    """Return the error for an engine that did not answer."""
    return EngineError(f"no answer from the engine at {url}: {reason}", hint="check the engine with traced status")


async def _http_answer(response: aiohttp.ClientResponse) -> HttpAnswer:
    text = await response.text(errors="replace")
    return HttpAnswer(response.status, response.content_type, response.headers.get("Retry-After", ""), text)


def _close_response(waiting: "asyncio.Future[Any]") -> None:
    """Close the response that a request got which nobody waits for any more."""
    if not waiting.cancelled() and waiting.exception() is None:
        response = waiting.result()
        if isinstance(response, aiohttp.ClientResponse):
            response.close()


def _has_stacked_experts(adapter: Path) -> bool:
    try:
        return bool(json.loads((adapter / "adapter_config.json").read_text()).get("target_parameters"))
    except (OSError, ValueError, AttributeError):
        # The engine reports a broken adapter itself; its folder may also be on the engine's machine alone.
        return False


def _events(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the data of server-sent events; comments and the closing ``[DONE]`` are left out."""
    texts = [line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")]
    return [json.loads(text) for text in texts if text != b"[DONE]"]


def _add_call_part(calls: dict[int, dict[str, Any]], part: Mapping[str, Any]) -> None:
    """Add a streamed part of a tool call; name and arguments arrive in pieces."""
    empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
    call = calls.setdefault(int(part.get("index") or 0), empty)
    call["id"] = part.get("id") or call["id"]
    function = part.get("function") or {}
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


def _completion(answer: Mapping[str, Any]) -> Completion:
    choice = answer["choices"][0]
    message: Message = {"role": "assistant", "content": choice["message"].get("content")}
    if choice["message"].get("tool_calls"):
        message["tool_calls"] = choice["message"]["tool_calls"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return Completion(
        message, list(answer["prompt_token_ids"]), list(choice["token_ids"]), logprobs, choice["finish_reason"]
    )


def _label_logprobs(top: Mapping[str, float], labels: Sequence[str]) -> dict[str, float]:
    # Several tokens may stand for one label ("A" and " A"): their probabilities are added.
    mass = {label: sum(math.exp(p) for token, p in top.items() if token.strip() == label) for label in labels}
    return {label: math.log(p) for label, p in mass.items() if p > 0}


def _complete(url: str, finish_reason: str) -> str:
    """Return the reason why a completion ended; raises ``EngineError`` if the engine broke it off."""
    if finish_reason in ("", "abort", "error"):
        reason = f"with {finish_reason!r}" if finish_reason else "without a reason"
        raise EngineError(
            f"{url} ended a completion {reason}: it is incomplete", hint="check the engine with traced status"
        )
    return finish_reason


def _http_error(url: str, answer: HttpAnswer) -> Exception:
    status, body = answer.status, answer.text
    try:
        detail = json.loads(body)["error"]
        message, code = str(detail["message"]), detail.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code = body[:500], None
    text = f"HTTP {status} from {url}: {message}"
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return EngineError(text)
    if status in REFUSED_FOR_NOW:
        # The header's other form, a date, is rare: the caller's own back-off serves for it.
        seconds = answer.retry_after
        return OverloadedError(text, retry_after_s=float(seconds) if seconds.isdecimal() else 0.0)
    # vLLM sends no code for this error, only a text.
    if code == "context_length_exceeded" or "maximum context length" in message:
        return ContextLengthError(text)
    return UnknownModelError(text) if status == HTTPStatus.NOT_FOUND else RequestError(text)
