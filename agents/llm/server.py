"""Sends one request to an OpenAI-compatible server through langchain-openai, and lists the models of a server.

Answers are read as a stream, so that silence in the middle is noticed. A stream without a finish reason counts as
dropped. Redirects are reported and not followed. LangSmith tracing is off. Proxy settings of the environment apply only
to servers on other machines.

Every failure becomes ``Transient`` (a retry may help), ``UnsupportedRequest`` (a request of another form may succeed),
``ModelRefused`` or ``ModelDenied``. Their texts quote the server without the key. Library exceptions are not chained,
because their frames hold the key.

The protocol has no field for a model's context length; ``CONTEXT_FIELDS`` lists the names that servers use: vLLM
``max_model_len``, OpenRouter and Together ``context_length``, Groq ``context_window``, Mistral and LM Studio
``max_context_length``, llama.cpp ``meta.n_ctx_train``.
"""

import asyncio
import contextlib
import logging
import math
import re
import ssl
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from agents.errors import ModelDenied, ModelRefused
from agents.llm.endpoint import Endpoint
from agents.llm.question import ChatMessage
from agents.llm.structured_output import NOT_THIS_WAY, TOO_LONG

if TYPE_CHECKING:
    import openai
    from langchain_core.messages import AIMessageChunk, BaseMessage
    from langchain_openai import ChatOpenAI


# Characters of a server's message in an error.
MAX_EXCERPT = 500
# Characters of a finish reason.
MAX_REASON = 40
# A stream is cut off after this many characters per allowed token plus ``READ_MARGIN``.
CHARACTERS_PER_TOKEN = 16
READ_MARGIN = 65_536
MOST_TOKENS = 2**31 - 1
TOO_MANY_REQUESTS, CONFLICT, REQUEST_TIMEOUT, NOT_IMPLEMENTED = 429, 409, 408, 501
QUOTA_CODES = ("insufficient_quota", "billing_not_active", "billing_hard_limit_reached")

HTML_PAGE, HTML_TAG = re.compile(r"\s*<(!doctype|html|head|body|\?xml)\b", re.IGNORECASE), re.compile(r"<[^<>]*>")

# At level DEBUG these loggers write headers, and among them a key that the server echoes.
HEADER_LOGGERS = ("openai", "httpcore", "httpcore2")
# Warnings of langchain-openai about models without native structured output, which is handled here.
IGNORED_WARNINGS = ("This model does not support OpenAI's structured", "Invalid schema for OpenAI's structured")
LIST_TIMEOUT_S = 15.0
CONTEXT_FIELDS = ("max_model_len", "context_length", "context_window", "max_context_length", "n_ctx", "n_ctx_train")


class Transient(Exception):
    """A failure that a retry may fix; ``retry_after`` is the delay that the server asked for, in seconds."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ConnectionLost(Transient):
    """The server failed or the answer never completed; the circuit breaker counts these failures."""


class UnsupportedRequest(Exception):
    """The server does not accept a request of this form; ``param`` is the field it blames, if any."""

    def __init__(self, message: str, *, param: str = "") -> None:
        super().__init__(message)
        self.param = param


@dataclass
class RawResponse:
    """An answer as it arrived; token counts are None if the server reported none."""

    text: str = ""
    refusal: str = ""
    # Call number -> JSON text.
    tool_arguments: dict[int, str] = field(default_factory=dict)
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    # Seconds until the first chunk.
    first_s: float = 0.0

    @property
    def content(self) -> str:
        """The arguments of the tool calls, one per line; the text if there are none."""
        return "\n".join(self.tool_arguments[number] for number in sorted(self.tool_arguments)) or self.text


@contextlib.asynccontextmanager
async def open_client(endpoint: Endpoint) -> "AsyncIterator[ChatOpenAI]":
    """Open a client with its own connection pool.

    Raises:
        ModelDenied: the environment's proxy or certificate settings are invalid.
    """
    from openai import DefaultAsyncHttpxClient, DefaultHttpxClient, Timeout

    for name in HEADER_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    timeouts = Timeout(endpoint.silence_s, connect=endpoint.connect_s, pool=None)
    # It trusts no certificate. Loading those of the machine takes 40 ms, which a server without TLS does not need.
    no_trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    verify = no_trust if endpoint.is_local and endpoint.base_url.startswith("http://") else True
    try:
        http_client = DefaultAsyncHttpxClient(
            timeout=timeouts, follow_redirects=False, trust_env=not endpoint.is_local, verify=verify
        )
    # Only the environment can make this fail: the proxy variables and the certificate file.
    except Exception as error:
        message = f"{endpoint.name} is not reachable from here: {error}"
        raise ModelDenied(message, hint="the variables HTTPS_PROXY, ALL_PROXY, NO_PROXY and SSL_CERT_FILE") from None
    # Without a synchronous client the library creates one from the environment.
    with DefaultHttpxClient(trust_env=False, verify=no_trust) as sync_client:
        async with http_client as client:
            yield _client(endpoint, client, sync_client, timeouts)


def _client(
    endpoint: Endpoint,
    http: "openai.DefaultAsyncHttpxClient",
    sync_client: "openai.DefaultHttpxClient",
    timeouts: "openai.Timeout",
) -> "ChatOpenAI":
    from langchain_core.outputs import ChatGenerationChunk
    from langchain_openai import ChatOpenAI

    class KeepingRefusals(ChatOpenAI):
        """ChatOpenAI whose stream keeps the refusal text, which the library drops."""

        def _convert_chunk_to_generation_chunk(self, chunk: Any, *args: Any) -> ChatGenerationChunk | None:
            generation_chunk = super()._convert_chunk_to_generation_chunk(chunk, *args)
            choices = chunk.get("choices") or []
            refusal = ((choices[0].get("delta") or {}) if choices else {}).get("refusal")
            if generation_chunk is not None and refusal:
                generation_chunk.message.additional_kwargs["refusal"] = str(refusal)
            return generation_chunk

    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    return KeepingRefusals(
        model=endpoint.model,
        base_url=endpoint.base_url,
        api_key=endpoint.key,
        timeout=timeouts,
        max_retries=0,
        use_responses_api=False,
        # The request body asks for the usage (``stream_options``).
        stream_usage=False,
        stream_chunk_timeout=None,
        default_headers={"X-Traced-Record": "no"},
        http_async_client=http,
        http_client=sync_client,
        # Otherwise the library warns about proxies that it would not use.
        http_socket_options=(),
        openai_proxy=None,
    )


async def request_completion(
    client: "ChatOpenAI",
    endpoint: Endpoint,
    messages: Sequence[ChatMessage],
    body: Mapping[str, object],
    max_tokens: int,
) -> RawResponse:
    """Send messages and return the streamed answer.

    Args:
        body: further fields of the request.
        max_tokens: bounds the answer; see ``CHARACTERS_PER_TOKEN``.

    Raises:
        Transient, UnsupportedRequest, ModelRefused: see the module.
    """
    try:
        async with asyncio.timeout(endpoint.timeout_s):
            response = await _read_stream(client, messages, body, CHARACTERS_PER_TOKEN * max_tokens + READ_MARGIN)
    except TimeoutError:
        raise ConnectionLost(f"no complete answer in {endpoint.timeout_s:g} s ({endpoint.section}.timeout_s)") from None
    # The library raises many exception types, and anything it cannot read is the server's failure.
    except Exception as error:
        failure = _failure(error, endpoint)
    else:
        if not response.finish_reason:
            raise ConnectionLost("the answer ended without a finish reason")
        response.text, response.refusal = endpoint.clean(response.text), endpoint.clean(response.refusal)
        response.finish_reason = endpoint.clean(response.finish_reason)[:MAX_REASON]
        response.tool_arguments = {
            number: endpoint.clean(arguments) for number, arguments in response.tool_arguments.items()
        }
        return response
    raise failure


async def list_models(client: "ChatOpenAI", endpoint: Endpoint, timeout_s: float) -> list[dict[str, object]]:
    """Return the entries of the server's model list; raises the same exceptions as ``request_completion``."""
    try:
        async with asyncio.timeout(timeout_s):
            page = await client.root_async_client.models.list()
            return [model.model_dump() for model in page.data]
    except TimeoutError:
        raise ConnectionLost(f"no list of models in {timeout_s:g} s") from None
    # The library treats any response body as a list.
    except (AttributeError, TypeError, ValueError):
        failure: Exception = UnsupportedRequest("the response is not a model list of OpenAI's protocol")
    except Exception as error:
        failure = _failure(error, endpoint)
    raise failure


async def _read_stream(
    client: "ChatOpenAI", messages: Sequence[ChatMessage], body: Mapping[str, object], limit: int
) -> RawResponse:
    from langsmith import tracing_context

    response, loop = RawResponse(), asyncio.get_running_loop()
    started, length = loop.time(), 0
    chunks: Any = client.astream([_langchain_message(message) for message in messages], extra_body=body)
    with tracing_context(enabled=False):
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                response.first_s = response.first_s or loop.time() - started
                length += _append_chunk(response, chunk)
                if length > limit:
                    response.finish_reason = "length"
                    break
    return response


def _append_chunk(response: RawResponse, chunk: "AIMessageChunk") -> int:
    """Append a chunk to the response; return its length in characters."""
    text, refusal = str(chunk.text), str(chunk.additional_kwargs.get("refusal", ""))
    response.text += text
    response.refusal += refusal
    length = len(text) + len(refusal)
    for call in getattr(chunk, "tool_call_chunks", []):
        arguments, number = str(call.get("args") or ""), call.get("index") or 0
        response.tool_arguments[number] = response.tool_arguments.get(number, "") + arguments
        length += len(arguments)
    response.finish_reason = str(chunk.response_metadata.get("finish_reason") or response.finish_reason)
    if used := chunk.usage_metadata:
        response.prompt_tokens = min(max(0, int(used["input_tokens"])), MOST_TOKENS)
        response.completion_tokens = min(max(0, int(used["output_tokens"])), MOST_TOKENS)
    return length


def _langchain_message(message: ChatMessage) -> "BaseMessage":
    """Return a langchain message, which is no template: braces are plain text."""
    from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

    kinds: dict[str, type[BaseMessage]] = {"system": SystemMessage, "user": HumanMessage, "assistant": AIMessage}
    return kinds[message.role](message.text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _failure(error: Exception, endpoint: Endpoint) -> Exception:
    """Return the exception to raise for an exception of the library."""
    import openai

    *_, cause = _causes(error)
    if isinstance(cause, RuntimeError) and not isinstance(cause, RecursionError):
        # Not the server's failure: a closed event loop, or a test's guard against network calls.
        return cause
    excerpt = endpoint.clean(" ".join(_error_text(error).split()))[:MAX_EXCERPT]
    if isinstance(error, openai.APIStatusError):
        return _status_failure(error, excerpt, endpoint)
    if isinstance(error, openai.APITimeoutError):
        # Compared by name, because the library may bring another copy of httpx.
        if "ConnectTimeout" in {type(exception).__name__ for exception in _causes(error)}:
            return ConnectionLost(f"no connection in {endpoint.connect_s:g} s ({endpoint.section}.connect_s)")
        return ConnectionLost(f"no data for {endpoint.silence_s:g} s ({endpoint.section}.silence_s)")
    if isinstance(error, openai.APIConnectionError):
        return ConnectionLost(f"the connection failed: {endpoint.clean(str(cause)) or type(cause).__name__}")
    return ConnectionLost(f"the response is not in OpenAI's protocol: {type(error).__name__}: {excerpt}")


def _status_failure(error: "openai.APIStatusError", excerpt: str, endpoint: Endpoint) -> Exception:
    status, section = error.status_code, endpoint.section
    body: Mapping[str, object] = error.body if isinstance(error.body, dict) else {}
    code = str(body.get("code") or body.get("type") or "")
    retry_after = retry_delay(error.response.headers.get("retry-after"), datetime.now(UTC))
    message = f"{endpoint.name} answered with status {status}: {excerpt}"
    if status == TOO_MANY_REQUESTS and code not in QUOTA_CODES:
        return Transient(f"status {status}: {excerpt}", retry_after=retry_after)
    if status in (REQUEST_TIMEOUT, CONFLICT) or (status >= 500 and status != NOT_IMPLEMENTED):
        return ConnectionLost(f"status {status}: {excerpt}", retry_after=retry_after)
    if status in NOT_THIS_WAY and not TOO_LONG.search(f"{excerpt} {code}"):
        return UnsupportedRequest(message, param=str(body.get("param") or ""))
    if status in NOT_THIS_WAY or status == 413:
        return ModelRefused(message, hint=f"{section}.context_tokens: questions are cut to that size")
    hints = {
        401: f"{section}.api_key_env or {section}.api_key_file: the key is not accepted",
        403: f"{section}.model: the key has no permission for it",
        404: f"{section}.base_url (it ends in /v1 as a rule) and {section}.model",
    }
    if status < 400:
        elsewhere = endpoint.clean(str(error.response.headers.get("location", "elsewhere")))[:MAX_EXCERPT]
        return ModelDenied(
            f"{message} (redirects to {elsewhere})", hint=f"{section}.base_url: the address it redirects to"
        )
    return ModelDenied(message, hint=hints.get(status, "the server's account and its limits"))


def retry_delay(retry_after: str | None, now: datetime) -> float | None:
    """Return the seconds of a ``Retry-After`` header (RFC 9110, 10.2.3: seconds or a date), None if unreadable."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(retry_after) - now).total_seconds()
        except (ValueError, TypeError):
            return None
    return min(max(0.0, seconds), 1e9) if not math.isnan(seconds) else None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, then its causes."""
    while error is not None:
        yield error
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__


def _error_text(error: Exception) -> str:
    body = getattr(error, "body", None)
    # OpenAI, FastAPI and vLLM use different fields.
    detail = body.get("message") or body.get("detail") if isinstance(body, dict) else body
    text = str(detail or getattr(error, "message", "") or error)
    return f"an HTML page: {HTML_TAG.sub(' ', text)}" if HTML_PAGE.match(text) else text


class ModelListUnavailable(Exception):
    """The server lists no models; ``failure`` is a ``Transient``, ``UnsupportedRequest`` or ``ModelRefused``."""

    def __init__(self, failure: Exception) -> None:
        super().__init__(str(failure))
        self.failure = failure


async def context_lengths(endpoint: Endpoint) -> dict[str, int]:
    """Return the server's models with their context in tokens, 0 if unknown; raises ``ModelListUnavailable``."""
    async with open_client(endpoint) as client:
        try:
            entries = await list_models(client, endpoint, LIST_TIMEOUT_S)
        # The next question meets the same failure and reports it.
        except Exception as error:
            raise ModelListUnavailable(error) from None
    return {endpoint.clean(str(entry.get("id"))): _context(entry) for entry in entries}


def _context(entry: dict[str, object]) -> int:
    meta = entry.get("meta")
    fields = {**(meta if isinstance(meta, dict) else {}), **entry}
    for name in CONTEXT_FIELDS:
        length = fields.get(name)
        if isinstance(length, int) and 0 < length < 2**31:
            return length
    return 0
