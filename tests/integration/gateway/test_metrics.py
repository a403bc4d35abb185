"""What load balancers, clients and Prometheus read: /health, one model, /metrics."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from store.database import write_session
from tests.integration.gateway.place import USER, V1, RunningGateway, running_gateway
from tests.integration.gateway.test_keys import ADA, until_status, with_key
from tests.integration.gateway.upstream import BASE
from tests.waiting import eventually_async
from traced.gateway import app
from traced.gateway.access import create_key

Samples = dict[tuple[str, ...], float]


async def run(tmp_path: Path, check: Callable[[RunningGateway], Coroutine[Any, Any, None]], **kind: Any) -> None:
    async with running_gateway(tmp_path, **kind) as gateway:
        await check(gateway)


async def scrape(gateway: RunningGateway) -> Samples:
    """All samples by name and sorted label values."""
    answer = await gateway.http.get("/metrics")
    assert answer.status_code == 200
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_health_needs_no_engine_and_no_key(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        await gateway.engine.stop()
        with write_session(gateway.store) as session:
            create_key(session, ADA, "agent", 0)
        await until_status(gateway, 401, {})
        assert (await gateway.http.get("/health")).status_code == 200

    await run(tmp_path, check)


async def test_one_model_is_retrieved_by_its_name(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            # The engine's name of the base model contains a slash, which the client escapes.
            for name in ("auto", "base", V1, BASE):
                assert (await client.models.retrieve(name)).id == name
            with pytest.raises(openai.NotFoundError, match="no/such") as exc_info:
                await client.models.retrieve("no/such")
            assert exc_info.value.code == "model_not_found"
        assert (await gateway.http.get(f"/v1/models/{BASE}")).json()["id"] == BASE

    await run(tmp_path, check, live=V1)


async def test_requests_latency_tokens_and_records_are_counted(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        await gateway.ask("auto")
        await gateway.ask("base", stream=True)
        await gateway.ask("base", [*USER, {"role": "user", "content": '"usage": {"prompt_tokens": 999}'}])
        await gateway.http.post("/v1/responses", json={"model": "base", "input": "Which day?"})
        await gateway.ask("unknown")
        await gateway.http.get("/nowhere")
        gateway.engine.delay_s = 30
        cancelled_request = asyncio.create_task(gateway.ask("base"))
        await eventually_async(lambda: gateway.engine.running)
        samples = await scrape(gateway)
        assert samples["traced_router_running_requests",] == 1
        cancelled_request.cancel()
        await eventually_async(lambda: not gateway.engine.running)
        samples = await scrape(gateway)
        requests = {key[1:]: value for key, value in samples.items() if key[0] == "traced_router_requests_total"}
        assert requests == {
            ("200", "chat/completions", V1): 1,
            ("200", "base", "chat/completions"): 2,
            ("200", "base", "responses"): 1,
            ("", "404", "chat/completions"): 1,
            ("", "404", "unknown"): 1,
            ("499", "base", "chat/completions"): 1,
            ("", "200", "metrics"): 1,
        }
        for name in ("first_byte", "request"):
            assert samples[f"traced_router_{name}_seconds_count", "chat/completions"] == 3
            assert 0 < samples[f"traced_router_{name}_seconds_sum", "chat/completions"] < 30
        assert samples["traced_router_tokens_total", V1, "prompt"] == 5
        assert samples["traced_router_tokens_total", "base", "completion"] == 3 + 3
        assert samples["traced_router_records_total", "written"] == 6
        assert samples["traced_router_records_total", "lost"] == 0
        assert samples["traced_router_running_requests",] == 0

    await run(tmp_path, check, live=V1)


async def test_engines_circuits_fallbacks_and_losses_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(gateway: RunningGateway) -> None:
        first, second = (engine.url.removeprefix("http://") for engine in gateway.engines)
        gateway.engines[0].break_after = 0
        for number in range(20):
            await gateway.ask("base", stream=True, headers={"X-Traced-Conversation": f"c-{number}"})
        gateway.engines[1].break_after = 0
        assert (await gateway.ask("auto", stream=True)).status_code == 502
        monkeypatch.setattr(app, "line_of", lambda *_, **__: 1 / 0)
        gateway.engines[1].break_after = None
        await gateway.ask("base", stream=True)
        samples = await scrape(gateway)
        assert samples["traced_router_engine_healthy", first] == samples["traced_router_engine_healthy", second] == 1
        # The circuit may have become half-open since.
        assert sum(samples["traced_router_engine_circuit", first, state] for state in ("open", "half-open")) == 1
        assert samples["traced_router_engine_circuit", second, "closed"] == 1
        assert samples["traced_router_engine_failures_total", first] >= 3
        assert samples["traced_router_fallbacks_total", "engine_error"] == 1
        assert samples["traced_router_records_total", "lost"] == 1

    await run(tmp_path, check, engines=2, live=V1)


async def test_beyond_the_loopback_metrics_need_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(gateway: RunningGateway) -> None:
        with write_session(gateway.store) as session:
            key = create_key(session, ADA, "prometheus", 0)
        await until_status(gateway, 401, {})
        assert (await gateway.http.get("/metrics")).status_code == 200
        monkeypatch.setattr(app, "LOOPBACK", ())

        async def statuses() -> list[int]:
            headers: list[dict[str, str]] = [{}, with_key(key)]
            answers: list[httpx.Response] = [
                await gateway.http.get("/metrics", headers=request_headers) for request_headers in headers
            ]
            return [answer.status_code for answer in answers]

        assert await statuses() == [401, 200]

    await run(tmp_path, check)
