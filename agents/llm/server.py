"""One request to an OpenAI-compatible server and what became of it, through langchain-openai.

Invariants: an answer is read as a stream, so that silence in its middle is noticed; one that ends without a reason to
end was dropped. Every way to fail is one of three: ``Transient`` (asking again may help), ``Misunderstood`` (asking
otherwise may), ``ModelRefused`` (neither; nor asking anything else, where it is ``ModelDenied``). Their texts hold the
server's words without the key; the library's exceptions, whose frames hold the key, are not chained. What is asked goes
into the body as it is: the library's own way with response formats would raise on truncated answers and lose them.
Nothing is sent to an address other than the endpoint's: one that sends elsewhere (3xx) is told, not followed; the
environment's tracing (LangSmith) sees nothing; its proxies (HTTPS_PROXY, NO_PROXY) are for other machines only.

The models that a server lists, and how long a context it gives them, where it says so.

The protocol has no name for a context's length; these are the names that servers use: vLLM ``max_model_len``,
OpenRouter and Together ``context_length``, Groq ``context_window``, Mistral and LM Studio ``max_context_length``,
llama.cpp ``meta.n_ctx_train``. How it fails: ``Unlisted``, with the failure that asking for an answer would meet.
"""

import asyncio
import contextlib
import logging
import math
import re
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from agents.errors import ModelDenied, ModelRefused
from agents.llm.endpoint import Endpoint
from agents.llm.question import Said
from agents.llm.structured_output import NOT_THIS_WAY, TOO_LONG

if TYPE_CHECKING:
    import openai
    from langchain_openai import ChatOpenAI


TOLD = 500  # characters of a server's words in an error
REASON = 40  # characters of a reason to end
CHARACTERS_PER_TOKEN = 16  # an answer that is longer than its tokens can be is not read on
SPARE = 65_536
MOST_TOKENS = 2**31 - 1
BUSY, CONFLICT, SLOW, NOT_IMPLEMENTED = 429, 409, 408, 501
NO_MONEY = ("insufficient_quota", "billing_not_active", "billing_hard_limit_reached")

PAGE, TAG = re.compile(r"\s*<(!doctype|html|head|body|\?xml)\b", re.IGNORECASE), re.compile(r"<[^<>]*>")

LOGS_OF_HEADERS = ("openai", "httpcore", "httpcore2")  # at DEBUG, a key that a server says back among them
SAID_BY_US = ("This model does not support OpenAI's structured", "Invalid schema for OpenAI's structured")  # otherwise


class Transient(Exception):
    """It may be answered another time; ``after`` is what the server said to wait, in seconds."""

    def __init__(self, message: str, *, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


class Broken(Transient):
    """The server failed, or nothing came of it: what a circuit breaker counts."""


class Misunderstood(Exception):
    """The server does not take this request as it is; ``param`` is what it names as the cause, "" for nothing."""

    def __init__(self, message: str, *, param: str = "") -> None:
        super().__init__(message)
        self.param = param


@dataclass
class Heard:
    """An answer as it came; tokens are None where the server told none."""

    text: str = ""
    refusal: str = ""
    calls: dict[int, str] = field(default_factory=dict)  # arguments by a call's number
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    first_s: float = 0.0  # until the first piece

    @property
    def said(self) -> str:
        """The arguments of its tool calls, a line each, else its words."""
        return "\n".join(self.calls[number] for number in sorted(self.calls)) or self.text


@contextlib.asynccontextmanager
async def open_client(endpoint: Endpoint) -> "AsyncIterator[ChatOpenAI]":
    """A client with a connection pool of its own; raises ``ModelDenied`` where the environment allows none."""
    from openai import DefaultAsyncHttpxClient, DefaultHttpxClient, Timeout

    for name in LOGS_OF_HEADERS:
        logging.getLogger(name).setLevel(logging.INFO)
    times = Timeout(endpoint.silence_s, connect=endpoint.connect_s, pool=None)
    try:
        made = DefaultAsyncHttpxClient(timeout=times, follow_redirects=False, trust_env=not endpoint.is_here)
    except Exception as error:  # what else is given is the same everywhere
        told = f"{endpoint.name} cannot be asked from here: {error}"
        raise ModelDenied(told, hint="the variables HTTPS_PROXY, ALL_PROXY, NO_PROXY and SSL_CERT_FILE") from None
    with DefaultHttpxClient(trust_env=False) as unused:  # or the library makes one, by the environment
        async with made as http:
            yield _client(endpoint, http, unused, times)


def _client(endpoint: Endpoint, http: Any, unused: Any, times: Any) -> "ChatOpenAI":
    from langchain_core.outputs import ChatGenerationChunk
    from langchain_openai import ChatOpenAI

    class KeepingRefusals(ChatOpenAI):
        """ChatOpenAI whose streams keep the refusal and say whether there was a choice."""

        def _convert_chunk_to_generation_chunk(self, chunk: Any, *others: Any) -> ChatGenerationChunk | None:
            made = super()._convert_chunk_to_generation_chunk(chunk, *others)
            choices = chunk.get("choices") or []
            refusal = ((choices[0].get("delta") or {}) if choices else {}).get("refusal")
            if made is not None and refusal:
                made.message.additional_kwargs["refusal"] = str(refusal)
            return made

    for message in SAID_BY_US:
        warnings.filterwarnings("ignore", message=message)
    return KeepingRefusals(
        model=endpoint.model,
        base_url=endpoint.base_url,
        api_key=endpoint.key,
        timeout=times,
        max_retries=0,
        use_responses_api=False,
        stream_usage=False,  # asked for in the body
        stream_chunk_timeout=None,
        default_headers={"X-Traced-Record": "no"},
        http_async_client=http,
        http_client=unused,
        http_socket_options=(),  # or the library warns of proxies that it would not use
        openai_proxy=None,
    )


async def hear(
    open_client: "ChatOpenAI", endpoint: Endpoint, said: Sequence[Said], asked: dict[str, Any], most: int
) -> Heard:
    """Send a dialogue with what is ``asked`` for; at most about ``most`` tokens are read."""
    try:
        async with asyncio.timeout(endpoint.timeout_s):
            heard = await _read(open_client, said, asked, CHARACTERS_PER_TOKEN * most + SPARE)
    except TimeoutError:
        raise Broken(f"no whole answer in {endpoint.timeout_s:g} s ({endpoint.section}.timeout_s)") from None
    except Exception as error:  # the library's own are many, and whatever it cannot read is the server's doing
        failure = _failure(error, endpoint)
    else:
        if not heard.finish_reason:
            raise Broken("the answer broke off, or held no choice")
        heard.text, heard.refusal = endpoint.clean(heard.text), endpoint.clean(heard.refusal)
        heard.finish_reason = endpoint.clean(heard.finish_reason)[:REASON]
        heard.calls = {number: endpoint.clean(told) for number, told in heard.calls.items()}
        return heard
    raise failure


async def models(open_client: "ChatOpenAI", endpoint: Endpoint, patience: float) -> list[dict[str, Any]]:
    """What the server lists; raises as ``hear`` does."""
    try:
        async with asyncio.timeout(patience):
            page = await open_client.root_async_client.models.list()
            return [one.model_dump() for one in page.data]
    except TimeoutError:
        raise Broken(f"no list of models in {patience:g} s") from None
    except (AttributeError, TypeError, ValueError):  # the library takes whatever came for a list
        failure: Exception = Misunderstood("what came is no list of models in OpenAI's protocol")
    except Exception as error:
        failure = _failure(error, endpoint)
    raise failure


async def _read(open_client: "ChatOpenAI", said: Sequence[Said], asked: dict[str, Any], limit: int) -> Heard:
    from langsmith import tracing_context

    heard, loop = Heard(), asyncio.get_running_loop()
    begun, length = loop.time(), 0
    pieces: Any = open_client.astream([_literal(one) for one in said], extra_body=asked)
    with tracing_context(enabled=False):
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                heard.first_s = heard.first_s or loop.time() - begun
                length += _take(heard, piece)
                if length > limit:
                    heard.finish_reason = "length"
                    break
    return heard


def _take(heard: Heard, piece: Any) -> int:
    """Add a piece of an answer; returns how many characters it has."""
    text, refusal = str(piece.text), str(piece.additional_kwargs.get("refusal", ""))
    heard.text += text
    heard.refusal += refusal
    length = len(text) + len(refusal)
    for call in getattr(piece, "tool_call_chunks", []):
        told, number = str(call.get("args") or ""), call.get("index") or 0
        heard.calls[number] = heard.calls.get(number, "") + told
        length += len(told)
    heard.finish_reason = str(piece.response_metadata.get("finish_reason") or heard.finish_reason)
    if used := piece.usage_metadata:
        heard.prompt_tokens = min(max(0, int(used["input_tokens"])), MOST_TOKENS)
        heard.completion_tokens = min(max(0, int(used["output_tokens"])), MOST_TOKENS)
    return length


def _literal(said: Said) -> Any:
    """A message whose braces are text."""
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

    kinds: dict[str, Any] = {"system": SystemMessage, "user": HumanMessage, "assistant": AIMessage}
    return kinds[said.role](said.text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _failure(error: Exception, endpoint: Endpoint) -> Exception:
    """What an exception of the library means."""
    import openai

    *_, cause = _chain(error)
    if isinstance(cause, RuntimeError) and not isinstance(cause, RecursionError):
        return cause  # no server's doing: a closed loop, a guard against stray calls
    told = endpoint.clean(" ".join(_words(error).split()))[:TOLD]
    if isinstance(error, openai.APIStatusError):
        return _status(error, told, endpoint)
    if isinstance(error, openai.APITimeoutError):
        if "ConnectTimeout" in {type(one).__name__ for one in _chain(error)}:  # of httpx, whichever the library has
            return Broken(f"no connection in {endpoint.connect_s:g} s ({endpoint.section}.connect_s)")
        return Broken(f"silence for {endpoint.silence_s:g} s ({endpoint.section}.silence_s)")
    if isinstance(error, openai.APIConnectionError):
        return Broken(f"the connection failed: {endpoint.clean(str(cause)) or type(cause).__name__}")
    return Broken(f"what came is no answer in OpenAI's protocol: {type(error).__name__}: {told}")


def _status(error: "openai.APIStatusError", told: str, endpoint: Endpoint) -> Exception:
    status, section = error.status_code, endpoint.section
    body: dict[str, Any] = error.body if isinstance(error.body, dict) else {}
    code = str(body.get("code") or body.get("type") or "")
    after = waiting(error.response.headers.get("retry-after"), datetime.now(UTC))
    said = f"{endpoint.name} answered with status {status}: {told}"
    if status == BUSY and code not in NO_MONEY:
        return Transient(f"status {status}: {told}", after=after)
    if status in (SLOW, CONFLICT) or (status >= 500 and status != NOT_IMPLEMENTED):
        return Broken(f"status {status}: {told}", after=after)
    if status in NOT_THIS_WAY and not TOO_LONG.search(f"{told} {code}"):
        return Misunderstood(said, param=str(body.get("param") or ""))
    if status in NOT_THIS_WAY or status == 413:
        return ModelRefused(said, hint=f"{section}.context_tokens, so that questions are cut to what it takes")
    hints = {
        401: f"{section}.api_key_env or {section}.api_key_file: the key is not accepted",
        403: f"{section}.model: the key has no permission for it",
        404: f"{section}.base_url (it ends in /v1 as a rule) and {section}.model",
    }
    if status < 400:
        elsewhere = endpoint.clean(str(error.response.headers.get("location", "elsewhere")))[:TOLD]
        return ModelDenied(f"{said} (it sends to {elsewhere})", hint=f"{section}.base_url, without its detour")
    return ModelDenied(said, hint=hints.get(status, "the server's account and its limits"))


def waiting(retry_after: str | None, now: datetime) -> float | None:
    """The seconds that a ``Retry-After`` header means (RFC 9110, 10.2.3: seconds or a date); None for no sense."""
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


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, what caused it, what caused that."""
    while error is not None:
        yield error
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__


def _words(error: Exception) -> str:
    body = getattr(error, "body", None)
    said = body.get("message") or body.get("detail") if isinstance(body, dict) else body  # OpenAI's, FastAPI's, vLLM's
    told = str(said or getattr(error, "message", "") or error)
    return f"a page: {TAG.sub(' ', told)}" if PAGE.match(told) else told


PATIENCE_S = 15.0
CONTEXT = ("max_model_len", "context_length", "context_window", "max_context_length", "n_ctx", "n_ctx_train")


class Unlisted(Exception):
    """There is no list; ``failure`` is why (``Transient``, ``Misunderstood``, ``ModelRefused``)."""

    def __init__(self, failure: Exception) -> None:
        super().__init__(str(failure))
        self.failure = failure


async def listed(endpoint: Endpoint) -> dict[str, int]:
    """The server's models with their contexts in tokens, 0 where it does not tell; raises ``Unlisted``."""
    async with open_client(endpoint) as chat:
        try:
            found = await models(chat, endpoint, PATIENCE_S)
        except Exception as error:  # whatever it is, asking for an answer will meet it and say so
            raise Unlisted(error) from None
    return {endpoint.clean(str(one.get("id"))): _context(one) for one in found}


def _context(told: dict[str, object]) -> int:
    meta = told.get("meta")
    both = {**(meta if isinstance(meta, dict) else {}), **told}
    for name in CONTEXT:
        length = both.get(name)
        if isinstance(length, int) and 0 < length < 2**31:
            return length
    return 0
