"""POST /v1/embeddings and the pass behind it: the same vector alone, in a batch, beside adapters and under load."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.unit.inference import tiny
from tests.unit.inference.embedded.test_server import serving
from traced.inference.client import EngineClient
from traced.inference.embedded.engine import Engine
from traced.inference.embedded.forward import PASS_TOKENS, EmbeddingJob, embed
from traced.inference.errors import ContextLengthError, EngineError, RequestError, UnknownModelError

torch.set_num_threads(1)
WORDS = tiny.tokenizer()
TEXTS = ["Please return the lamp.", "Hi", "order W4821 " * 9, "Which day is it?"]
Check = Callable[[httpx.AsyncClient, EngineClient, Engine], Coroutine[Any, Any, None]]


async def run(check: Check) -> None:
    async with serving() as (http, client, engine):
        await check(http, client, engine)


def expected(text: str) -> list[float]:
    """Mean and last of the last hidden state, by transformers alone."""
    ids = torch.tensor([WORDS.encode(text)])
    with torch.inference_mode():
        states = tiny.qwen3(len(WORDS))(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
    return [*states.mean(0).tolist(), *states[-1].tolist()]


async def test_a_text_has_the_same_vector_alone_and_in_a_batch() -> None:
    async def check(http: httpx.AsyncClient, client: EngineClient, _: Engine) -> None:
        together = await client.embeddings(TEXTS)
        for text, vector in zip(TEXTS, together, strict=True):
            (single_vector,) = await client.embeddings([text])
            assert vector == pytest.approx(single_vector, abs=1e-5)
            assert vector == pytest.approx(expected(text), abs=1e-5)
        assert await client.embeddings(TEXTS) == together
        assert await client.embeddings([]) == []

    await run(check)


async def test_answers_have_openais_shape_for_every_form_of_input() -> None:
    async def check(http: httpx.AsyncClient, client: EngineClient, _: Engine) -> None:
        ids = WORDS.encode("Hi there")
        for inputs, count in [("Hi there", 1), (["Hi there"], 1), (ids, 1), ([ids, ids], 2)]:
            body = (await http.post("/v1/embeddings", json={"model": "base", "input": inputs})).json()
            assert body["object"] == "list"
            assert body["model"] == "base"
            assert [(entry["object"], entry["index"]) for entry in body["data"]] == [
                ("embedding", i) for i in range(count)
            ]
            assert body["data"][-1]["embedding"] == pytest.approx(expected("Hi there"), abs=1e-5)
            assert body["usage"] == {"prompt_tokens": count * len(ids), "total_tokens": count * len(ids)}

    await run(check)


async def test_many_texts_are_asked_for_in_several_requests() -> None:
    async def check(http: httpx.AsyncClient, client: EngineClient, _: Engine) -> None:
        texts = [f"order W{i}" for i in range(150)]
        vectors = await client.embeddings(texts)
        assert len(vectors) == len(texts)
        (last,) = await client.embeddings([texts[-1]])
        assert vectors[-1] == pytest.approx(last, abs=1e-5)

    await run(check)


async def test_vectors_stay_the_base_models_beside_adapters_and_completions(tmp_path: Path) -> None:
    tiny.save_adapter(tmp_path, seed=1)

    async def check(_: httpx.AsyncClient, client: EngineClient, __: Engine) -> None:
        await client.load_adapter("dates@v1", tmp_path)
        conversations = [[{"role": "user", "content": f"order W{i}"}] for i in range(8)]
        talk = [client.chat("dates@v1", m, [], temperature=0.0, max_tokens=24) for m in conversations]
        completions = asyncio.gather(*talk)
        embedded = await asyncio.gather(*(client.embeddings([text]) for text in TEXTS))
        for text, (vector,) in zip(TEXTS, embedded, strict=True):
            assert vector == pytest.approx(expected(text), abs=1e-5)
        references = [await client.chat("dates@v1", m, [], temperature=0.0, max_tokens=24) for m in conversations]
        assert [c.completion_ids for c in await completions] == [c.completion_ids for c in references]
        with pytest.raises(RequestError, match="base model's"):
            await client.embeddings(["x"], "dates@v1")

    await run(check)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "nobody", "input": "x"}, 404, "nobody"),
        ({"model": "base"}, 400, "input"),
        ({"model": "base", "input": []}, 400, "input"),
        ({"model": "base", "input": ""}, 400, "input"),
        ({"model": "base", "input": [[]]}, 400, "empty"),
        ({"model": "base", "input": [10**9]}, 400, "token ids"),
        ({"model": "base", "input": ["x", "word " * 600]}, 400, "the context holds 512"),
        ({"model": "base", "input": "x", "encoding_format": "base64"}, 400, "'float'"),
        ({"model": "base", "input": "x", "dimensions": 8}, 400, "dimensions=8"),
    ],
)
async def test_invalid_requests_get_distinct_errors(body: dict[str, Any], status: int, message: str) -> None:
    async def check(http: httpx.AsyncClient, _: EngineClient, __: Engine) -> None:
        answer = await http.post("/v1/embeddings", json=body)
        assert answer.status_code == status
        assert message in answer.json()["error"]["message"]

    await run(check)


async def test_the_client_attributes_failures() -> None:
    async def check(_: httpx.AsyncClient, client: EngineClient, __: Engine) -> None:
        with pytest.raises(UnknownModelError, match="nobody"):
            await client.embeddings(["x"], "nobody")
        with pytest.raises(ContextLengthError):
            await client.embeddings(["word " * 600])

    await run(check)


def test_a_broken_model_fails_the_job_and_not_the_engine() -> None:
    model = tiny.qwen3(len(WORDS))
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    engine = Engine(model, WORDS)
    engine.start()
    try:
        for _ in range(2):
            with pytest.raises(EngineError, match="not finite"):
                engine.submit_embeddings([[5, 6]]).result(60)
    finally:
        engine.stop()
    with pytest.raises(EngineError, match="not running"):
        engine.submit_embeddings([[5, 6]])


def test_a_stopped_engine_fails_waiting_jobs() -> None:
    job = EmbeddingJob([[5]])
    job.fail(EngineError("the engine was stopped"))
    with pytest.raises(EngineError, match="stopped"):
        job.future.result(0)
    cancelled = EmbeddingJob([[5]])
    assert cancelled.future.cancel()
    cancelled.fail(EngineError("the engine was stopped"))
    assert cancelled.future.cancelled()


def test_passes_stay_within_their_budget() -> None:
    class Counting:
        device = torch.device("cpu")
        """A forward pass that notes its shapes."""

        def __init__(self) -> None:
            self.shapes: list[tuple[int, int]] = []

        def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
            self.shapes.append((tokens.shape[0], tokens.shape[1]))
            return tokens[:, :, None].float()

    forward: Any = Counting()
    prompts = [[n] * (1 + 97 * n % 600) for n in range(40)]
    vectors = embed(forward, prompts)
    assert vectors == [[float(n), float(n)] for n in range(40)]
    assert all(rows * width <= PASS_TOKENS for rows, width in forward.shapes)
    assert len(forward.shapes) < 10
