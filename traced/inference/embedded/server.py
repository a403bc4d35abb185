"""The embedded engine's OpenAI-compatible HTTP API.

GET /health, /v1/models, /metrics (the adapters in use, as in vLLM); POST /v1/chat/completions, /v1/completions,
/v1/responses, /v1/messages, /v1/messages/count_tokens, /v1/embeddings (the base model's hidden states), /tokenize,
/v1/load_lora_adapter, /v1/unload_lora_adapter. Every error has OpenAI's form: 404 unknown model, 400 invalid
request (``context_length_exceeded`` for a context that is too long), 500 engine failure. If a client disconnects, its
request is cancelled. A stream carries the whole message in one delta; while the request waits or runs, the stream
has a comment line every ``SIGN_S`` seconds in which the engine has worked, so that a client can tell slow from stuck.

Not covered: authentication (the server listens on the loopback by default), stored responses (the router keeps them).
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException

from sandbox.contract import Message
from traced.inference.chat_format import ChatFormat, count_calls
from traced.inference.embedded import anthropic, responses
from traced.inference.embedded.engine import Engine, Generation, Sampling
from traced.inference.embedded.protocol import (
    ChatRequest,
    EmbeddingRequest,
    GenerationRequest,
    LoadAdapter,
    StreamOptions,
    TextRequest,
    TokenizeRequest,
    UnloadAdapter,
    chat_logprobs,
    embeddings,
    text_logprobs,
    usage,
)
from traced.inference.embedded.structure import TAGS, forced_call, format_schema
from traced.inference.errors import ContextLengthError, ModelError, RequestError, ServingError, UnknownModelError
from traced.inference.generation import Tokenizer

T = TypeVar("T")
# Builds the answer to a request, or its lines in a stream.
Answer = Callable[[list[Generation]], dict[str, Any]]
Conversion = Callable[[dict[str, Any]], dict[str, Any]]
Lines = Callable[[dict[str, Any]], list[str]]
SIGN_S = 5.0
# nginx's status for a client that closed the connection.
CLIENT_CLOSED = 499


def build_app(engine: Engine, *, base_name: str = "base") -> FastAPI:
    """Build the web application; it starts the engine's thread on startup and stops it on shutdown."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.stop)

    app = FastAPI(title="traced embedded engine", lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_errors(app)
    _add_adapters(app, engine, base_name)
    _add_completions(app, engine, base_name)
    _add_embeddings(app, engine, base_name)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ServingError)
    async def serving(_: Request, error: ServingError) -> JSONResponse:
        return _error(_status(error), str(error), code=_code(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        problems = [f"{'.'.join(str(part) for part in p['loc'][1:]) or 'body'}: {p['msg']}" for p in error.errors()]
        return _error(400, "; ".join(problems))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, str(error.detail))


def _add_adapters(app: FastAPI, engine: Engine, base_name: str) -> None:
    started = int(time.time())

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        names = ",".join(sorted(await asyncio.to_thread(engine.adapters_in_use)))
        labels = f'max_lora="0",running_lora_adapters="{names}",waiting_lora_adapters=""'
        return PlainTextResponse(f"vllm:lora_requests_info{{{labels}}} {time.time()}\n")

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        base = {"id": base_name, "object": "model", "created": started, "owned_by": "traced", "parent": None}
        base["max_model_len"] = engine.max_length
        adapters = [
            {**base, "id": name, "parent": base_name, "digest": engine.adapter_digest(name)}
            for name in engine.adapters()
        ]
        return {"object": "list", "data": [base, *adapters]}

    @app.post("/v1/load_lora_adapter")
    async def load(body: LoadAdapter) -> PlainTextResponse:
        if body.lora_name == base_name:
            raise RequestError(f"{base_name!r} is the base model's name")
        await asyncio.to_thread(engine.load_adapter, body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload(body: UnloadAdapter) -> PlainTextResponse:
        await asyncio.to_thread(engine.unload_adapter, body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _add_completions(app: FastAPI, engine: Engine, base_name: str) -> None:
    tokenizer = engine.tokenizer
    chat_format = ChatFormat(tokenizer)

    async def serve(
        http: Request,
        body: GenerationRequest,
        prompt_ids: list[int],
        samplings: list[Sampling],
        *,
        answer: Answer,
        lines: Lines,
    ) -> Response:
        adapter = None if body.model == base_name else body.model

        def submit() -> list[Future[Generation]]:
            return [engine.submit(prompt_ids, sampling, adapter) for sampling in samplings]

        # The first grammar takes about a second.
        jobs = await asyncio.to_thread(submit) if samplings[0].grammar else submit()
        if body.stream:
            return await _stream(http, engine, jobs, answer, lines)
        generations = await _results_unless_closed(http, jobs)
        return Response(status_code=CLIENT_CLOSED) if generations is None else JSONResponse(answer(generations))

    async def serve_chat(
        http: Request,
        body: ChatRequest,
        lines: Lines,
        convert: Conversion | None = None,
    ) -> Response:
        body.refuse_unsupported()
        prompt_ids = _rendered(chat_format, body)
        limit = body.max_completion_tokens or body.max_tokens or engine.max_length
        top = (body.top_logprobs or 0) if body.logprobs else 0

        def answer(generations: list[Generation]) -> dict[str, Any]:
            choices = [_chat_choice(chat_format, body, generation) for generation in generations]
            response = _envelope("chat.completion", body, prompt_ids, generations) | {"choices": _numbered(choices)}
            return convert(response) if convert else response

        return await serve(
            http,
            body,
            prompt_ids,
            body.sampling(limit, top, body.grammar(_tags(chat_format))),
            answer=answer,
            lines=lines,
        )

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, http: Request) -> Response:
        return await serve_chat(http, body, partial(_events, body.stream_options))

    @app.post("/v1/responses")
    async def respond(body: responses.ResponsesRequest, http: Request) -> Response:
        return await serve_chat(http, body.chat_request(), responses.event_lines, body.response)

    @app.post("/v1/messages")
    async def message(body: anthropic.MessagesRequest, http: Request) -> Response:
        return await serve_chat(http, body.chat_request(), anthropic.event_lines, body.response)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: anthropic.CountTokensRequest) -> dict[str, int]:
        return {"input_tokens": len(_rendered(chat_format, body.chat_request()))}

    @app.post("/v1/completions")
    async def complete(body: TextRequest, http: Request) -> Response:
        body.refuse_unsupported()
        prompt_ids = _prompt_ids(tokenizer, body.prompt)

        def answer(generations: list[Generation]) -> dict[str, Any]:
            choices = [_text_choice(tokenizer, body, generation) for generation in generations]
            return _envelope("text_completion", body, prompt_ids, generations) | {"choices": _numbered(choices)}

        samplings = body.sampling(body.max_tokens or 16, body.logprobs or 0)
        return await serve(
            http, body, prompt_ids, samplings, answer=answer, lines=partial(_events, body.stream_options)
        )

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, object]:
        ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        return {"count": len(ids), "max_model_len": engine.max_length, "tokens": ids}


def _add_embeddings(app: FastAPI, engine: Engine, base_name: str) -> None:
    @app.post("/v1/embeddings")
    async def embed(body: EmbeddingRequest, http: Request) -> Response:
        if body.model in engine.adapters():
            raise RequestError(f"embeddings are the base model's; ask {base_name!r} instead of {body.model!r}")
        if body.model != base_name:
            raise UnknownModelError(f"no model {body.model!r}; embeddings are served by {base_name!r}")
        prompts = [_prompt_ids(engine.tokenizer, prompt) for prompt in body.prompts()]
        results = await _results_unless_closed(http, [engine.submit_embeddings(prompts)])
        if results is None:
            return Response(status_code=CLIENT_CLOSED)
        return JSONResponse(embeddings(body.model, prompts, results[0]))


async def _results_unless_closed(http: Request, jobs: Sequence[Future[T]]) -> list[T] | None:
    """Return the jobs' results, or cancel the jobs and return None if the client disconnects first."""
    results = _results(jobs)
    try:
        return results.result() if await _first(http, results) is results else None
    finally:
        _cancel(results, jobs)


async def _first(
    http: Request, results: "asyncio.Future[list[T]]", timeout_s: float | None = None
) -> "asyncio.Future[Any] | None":
    """Return ``results`` if they are there first, another future if the client disconnects first, None if neither."""
    disconnect = asyncio.ensure_future(_disconnected(http))
    futures: set[asyncio.Future[Any]] = {results, disconnect}
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED, timeout=timeout_s)
        return next((future for future in (results, disconnect) if future.done()), None)
    finally:
        disconnect.cancel()


def _results(jobs: Sequence[Future[T]]) -> "asyncio.Future[list[T]]":
    return asyncio.gather(*map(asyncio.wrap_future, jobs))


def _cancel(results: "asyncio.Future[Any]", jobs: Sequence[Future[Any]]) -> None:
    if not results.done():
        results.cancel()
    for job in jobs:
        job.cancel()


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        continue


def _rendered(chat_format: ChatFormat, body: ChatRequest) -> list[int]:
    try:
        return chat_format.render(body.messages, body.offered_tools())
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise RequestError(f"the chat template cannot render these messages: {error!r}") from error


def _prompt_ids(tokenizer: Tokenizer, prompt: str | list[int] | list[str]) -> list[int]:
    texts = [prompt] if isinstance(prompt, str) else [part for part in prompt if isinstance(part, str)]
    if len(texts) > 1:
        raise RequestError(f"one prompt per request; got {len(texts)}")
    ids: list[int] = tokenizer.encode(texts[0]) if texts else [part for part in prompt if isinstance(part, int)]
    return ids


def _envelope(
    kind: str, body: GenerationRequest, prompt_ids: list[int], generations: list[Generation]
) -> dict[str, Any]:
    # OpenAI's and vLLM's names of answers.
    prefix = {"chat.completion": "chatcmpl", "text_completion": "cmpl"}[kind]
    envelope = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": body.model}
    if body.return_token_ids:
        envelope["prompt_token_ids"] = prompt_ids
    return {**envelope, "usage": usage(prompt_ids, generations)}


def _numbered(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**choice, "index": index} for index, choice in enumerate(choices)]


def _choice(body: GenerationRequest, generation: Generation) -> dict[str, Any]:
    choice: dict[str, Any] = {"finish_reason": generation.finish_reason, "logprobs": None}
    return {**choice, "token_ids": generation.ids} if body.return_token_ids else choice


def _chat_choice(chat_format: ChatFormat, body: ChatRequest, generation: Generation) -> dict[str, Any]:
    choice = _choice(body, generation)
    tokenizer, first_call = chat_format.tokenizer, count_calls(body.messages)
    if body.forces_call():
        choice["message"] = forced_call(body.text(tokenizer, generation), first_call, _tags(chat_format))
    elif format_schema(body.response_format) is not None:
        choice["message"] = {"role": "assistant", "content": body.text(tokenizer, generation)}
    else:
        choice["message"] = chat_format.parse(
            generation.ids, first_call=first_call, tools=body.offered_tools(), stop=body.stops()
        )
    if "tool_calls" in choice["message"] and generation.finish_reason == "stop":
        choice["finish_reason"] = "tool_calls"
    # As in vLLM: the text that ended the answer.
    choice["stop_reason"] = body.stop_text(tokenizer, generation)
    if body.logprobs:
        choice["logprobs"] = chat_logprobs(tokenizer, generation)
    return choice


def _tags(chat_format: ChatFormat) -> tuple[str, str]:
    return TAGS.get(chat_format.tool_parser, ("", ""))


def _text_choice(tokenizer: Tokenizer, body: TextRequest, generation: Generation) -> dict[str, Any]:
    choice = _choice(body, generation)
    choice["text"] = body.text(tokenizer, generation)
    if body.logprobs is not None:
        choice["logprobs"] = text_logprobs(tokenizer, generation)
    return choice


async def _stream(
    http: Request,
    engine: Engine,
    jobs: Sequence[Future[Generation]],
    answer: Answer,
    lines: Lines,
) -> Response:
    """Return the answer as a stream, which begins after ``SIGN_S`` seconds at the latest."""
    results = _results(jobs)
    try:
        first = await _first(http, results, SIGN_S)
    except BaseException:
        _cancel(results, jobs)
        raise
    if first is None:

        async def events() -> AsyncIterator[str]:
            try:
                async for line in _slow_events(engine, results, answer, lines):
                    yield line
            finally:
                _cancel(results, jobs)

        return StreamingResponse(events(), media_type="text/event-stream")
    if first is not results:
        _cancel(results, jobs)
        return Response(status_code=CLIENT_CLOSED)
    return StreamingResponse(iter(lines(answer(results.result()))), media_type="text/event-stream")


async def _slow_events(
    engine: Engine,
    results: "asyncio.Future[list[Generation]]",
    answer: Answer,
    lines: Lines,
) -> AsyncIterator[str]:
    """Yield a comment whenever the engine has worked, then the answer or the error as server-sent events."""
    steps = -1
    while not results.done():
        if engine.steps != steps:
            steps = engine.steps
            yield f": step {steps}\n\n"
        await asyncio.wait({results}, timeout=SIGN_S)
    try:
        last = lines(answer(results.result()))
    except ServingError as error:
        last = lines(_error_object(_status(error), str(error), code=_code(error)))
    for line in last:
        yield line


def _events(options: StreamOptions | None, answer: dict[str, Any]) -> list[str]:
    """Return a finished answer as server-sent events: each choice, the finish reasons, usage, and ``[DONE]``.

    The usage is sent only if ``options`` request it. An error is one event.
    """
    if "error" in answer:
        return [f"data: {json.dumps(answer)}\n\n"]
    chat = answer["object"] == "chat.completion"
    head = {key: answer[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    choices = [{**choice, "finish_reason": None} for choice in answer["choices"]]
    ends = [{"index": choice["index"], "finish_reason": choice["finish_reason"]} for choice in answer["choices"]]
    if chat:
        for choice in choices:
            choice["delta"] = _delta(choice.pop("message"))
    chunks = [{**head, "choices": [choice]} for choice in choices]
    chunks += [{**head, "choices": [{**end, "delta": {}} if chat else {**end, "text": ""}]} for end in ends]
    if options and options.include_usage:
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return [*lines, "data: [DONE]\n\n"]


def _delta(message: Message) -> Message:
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", []))]
    return {**message, **({"tool_calls": calls} if calls else {})}


def _status(error: ServingError) -> int:
    if isinstance(error, UnknownModelError):
        return 404
    return 400 if isinstance(error, RequestError | ModelError) else 500


def _code(error: ServingError) -> str | None:
    if isinstance(error, ContextLengthError):
        return "context_length_exceeded"
    return "model_not_found" if isinstance(error, UnknownModelError) else None


def _error(status: int, message: str, *, code: str | None = None) -> JSONResponse:
    return JSONResponse(_error_object(status, message, code=code), status)


def _error_object(status: int, message: str, *, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
