"""The engine as a child process, spoken to by OpenAI's own client, and its life and death."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.unit.inference import tiny
from traced.inference.chat_format import load_chat_format
from traced.inference.client import EngineClient
from traced.inference.engine_process import EngineProcess, start_embedded
from traced.inference.errors import ContextLengthError, EngineError, EngineStartError
from traced.inference.policies import TokenPolicy
from traced.inference.replicas import Replicas
from traced.routing.label_router import LabelRouter
from traced.routing.routers import FallbackRouter, Route, RoutedPolicy

USER: list[Any] = [{"role": "user", "content": "Hi, I am C381. Please return the lamp."}]
TOOL: Any = {"type": "function", "function": {"name": "get_order", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("serving")
    tiny.save_model(root / "model")
    for seed, name in enumerate(["dates@v1", "tools@v1"], 1):
        tiny.save_adapter(root / name, seed=seed)
    return root


@pytest.fixture(scope="module")
def engine(root: Path) -> Iterator[EngineProcess]:
    with start_embedded(root / "model", data_dir=root, adapters={"dates@v1": root / "dates@v1"}) as process:
        yield process
    assert not process.alive


def test_openais_client_reads_every_answer(engine: EngineProcess) -> None:
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["base", "dates@v1"]
        completion: Any = client.chat.completions.create(
            model="dates@v1", messages=USER, tools=[TOOL], max_tokens=6, seed=1, logprobs=True, top_logprobs=3
        )
        entries = completion.choices[0].logprobs.content
        assert completion.usage.completion_tokens == len(entries) <= 6
        assert all(len(entry.top_logprobs) == 3 for entry in entries)
        text: Any = client.completions.create(model="base", prompt="Answer:", max_tokens=1, logprobs=5, temperature=0)
        assert len(text.choices[0].logprobs.top_logprobs[0]) <= 5
        stream: Any = client.chat.completions.create(model="base", messages=USER, max_tokens=6, seed=1, stream=True)
        complete_answer = client.chat.completions.create(model="base", messages=USER, max_tokens=6, seed=1)
        parts = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(parts) == complete_answer.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="nobody"):
            client.chat.completions.create(model="nobody", messages=USER)
        with pytest.raises(openai.BadRequestError, match="context"):
            client.completions.create(model="base", prompt=[5] * 600)


async def test_many_conversations_over_several_adapters_at_once(engine: EngineProcess, root: Path) -> None:
    async with EngineClient(engine.url) as client:
        await client.load_adapter("tools@v1", root / "tools@v1")
        assert await client.health()
        models = ["base", "dates@v1", "tools@v1"]
        requests = [(models[i % 3], [{"role": "user", "content": f"order W{i}"}]) for i in range(24)]
        expected = [await client.chat(m, messages, [TOOL], temperature=0, max_tokens=6) for m, messages in requests]
        together = await asyncio.gather(
            *(client.chat(m, messages, [TOOL], temperature=0, max_tokens=6) for m, messages in requests)
        )
        assert [c.completion_ids for c in together] == [c.completion_ids for c in expected]
        await client.unload_adapter("tools@v1")


async def test_routing_over_the_real_engine(engine: EngineProcess, root: Path) -> None:
    async with EngineClient(engine.url) as client:
        router = FallbackRouter([LabelRouter(client, [Route("dates@v1", "Dates", "Work out dates.")])])
        chat_format, replicas = load_chat_format(root / "model"), Replicas([client])

        def policy_of(model: str) -> TokenPolicy:
            adapter = None if model == "base" else model
            return TokenPolicy(replicas, chat_format, adapter, max_length=512, max_tokens=5)

        policy = RoutedPolicy(policy_of, router)
        completion = await policy.complete(USER, [TOOL], seed=1)
        decision = await policy.route([*USER, completion.message])
        expected = await client.chat(decision.model, USER, [TOOL], temperature=1.0, max_tokens=5, seed=1)
        assert completion.completion_ids == expected.completion_ids


def test_an_engine_that_cannot_load_reports_the_reason(tmp_path: Path, root: Path) -> None:
    with pytest.raises(EngineStartError, match=r"(?s)exit code 1 .*cannot be loaded") as exc_info:
        start_embedded(tmp_path, data_dir=tmp_path)
    assert "less " in exc_info.value.hint
    with pytest.raises(EngineStartError, match=r"lacks adapter_config\.json"):
        start_embedded(root / "model", data_dir=tmp_path, adapters={"x": tmp_path})


async def test_the_longest_conversation_is_the_callers_choice(root: Path) -> None:
    async def ask(url: str) -> None:
        async with EngineClient(url) as client:
            await client.chat("base", [{"role": "user", "content": "word " * 200}], [])

    with start_embedded(root / "model", data_dir=root, max_length=64) as engine, pytest.raises(ContextLengthError):
        await ask(engine.url)


def test_a_taken_port_is_named(engine: EngineProcess, root: Path) -> None:
    port = int(engine.url.rsplit(":", 1)[1])
    with pytest.raises(EngineStartError, match=f"port {port}"):
        start_embedded(root / "model", data_dir=root, port=port)


async def test_a_killed_engine_is_an_engine_error(root: Path) -> None:
    with start_embedded(root / "model", data_dir=root) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.child.wait(30)

        async def ask() -> None:
            async with EngineClient(process.url) as client:
                assert not await client.health()
                await client.chat("base", USER, [])

        with pytest.raises(EngineError, match="no answer"):
            await ask()
    process.stop()  # twice is harmless


PARENT = """
import sys
from pathlib import Path
from traced.inference.engine_process import start_embedded
engine = start_embedded(Path(sys.argv[1]), data_dir=Path(sys.argv[2]))
print(engine.pid, flush=True)
sys.stdin.read()
"""


def test_the_engine_never_outlives_a_killed_parent(root: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(root / "model"), str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.kill()
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
