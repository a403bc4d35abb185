"""Engines join and leave a running router: the list in the store, changed by commands, and a name that is resolved."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from store.database import read_session
from store.repositories.events import list_audit
from tests.integration.gateway.engine_process import engine_processes
from tests.integration.gateway.place import V1, RunningGateway, running_gateway, until_offered
from tests.integration.gateway.test_metrics import scrape
from tests.integration.gateway.upstream import upstreams
from tests.waiting import eventually_async
from traced.cli.main import app
from traced.gateway import engine_sources
from traced.inference.engine_process import free_port
from traced.inference.errors import EngineError

NAME = "dns+http://vllm.models.svc:8000"


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_sources, "POLL_S", 0.05)


async def traced(*arguments: str) -> str:
    """Run a command, and return what it prints."""
    result = await asyncio.to_thread(CliRunner().invoke, app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


async def ready(gateway: RunningGateway) -> Any:
    return (await gateway.http.get("/ready")).json()


async def until_engines(gateway: RunningGateway, *urls: str) -> None:
    """Wait until the router has these engines and all of them are healthy."""

    async def are_ready() -> bool:
        return bool((await ready(gateway))["engines"] == dict.fromkeys(urls, "ok"))

    await eventually_async(are_ready)


async def engine_of(gateway: RunningGateway, number: int, model: str = "base") -> str:
    """Return the text of an answer, which names its engine."""
    response = await gateway.ask(model, headers={"X-Traced-Conversation": f"c-{number}"})
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


async def stream_of(gateway: RunningGateway, number: int, started: asyncio.Event) -> str:
    """Return a whole stream; ``started`` is set at its first event."""
    body = json.dumps({"model": "base", "messages": [], "stream": True})
    headers = {"X-Traced-Conversation": f"c-{number}"}
    text = ""
    async with gateway.http.stream("POST", "/v1/chat/completions", content=body, headers=headers) as response:
        async for chunk in response.aiter_text():
            text += chunk
            started.set()
    return text


@pytest.mark.slow
async def test_engines_are_added_to_a_running_router_and_removed_without_a_lost_request(tmp_path: Path) -> None:
    async with (
        engine_processes(2, waits_for=str(tmp_path)) as engines,
        running_gateway(tmp_path, engines=0, urls=["store"], live=V1) as gateway,
    ):
        first, second = (engine.url for engine in engines)
        (tmp_path / "engine 1").touch()
        assert (await ready(gateway))["ready"] is False
        assert (await gateway.ask("base")).status_code == 503
        options = ["--data-dir", str(tmp_path)]
        assert "now in the list" in await traced("engines", "add", f"{first}/v1/", *options)
        await until_engines(gateway, first)
        await until_offered(gateway, V1)
        started = asyncio.Event()
        stream = asyncio.create_task(stream_of(gateway, 0, started))
        requests = [asyncio.create_task(engine_of(gateway, number, V1)) for number in range(6)]
        await started.wait()
        await traced("engines", "add", second, *options)
        await traced("engines", "remove", first, "--reason", "maintenance", *options)
        await until_engines_leave(gateway, first)
        # The first engine still answers its requests, the second one gets the new ones.
        assert not stream.done()
        late = await asyncio.gather(*(engine_of(gateway, number) for number in range(6)))
        assert set(late) == {"engine 1"}
        (tmp_path / "engine 0").touch()
        text = await stream
        assert "engine 0" in text
        assert text.endswith("data: [DONE]\n\n")
        assert set(await asyncio.gather(*requests)) == {"engine 0"}
        await until_engines(gateway, second)
        await until_offered(gateway, V1)
        labels = {name[1] for name in await scrape(gateway) if name[0] == "traced_router_engine_healthy"}
        assert labels == {second.removeprefix("http://")}
        rows = json.loads((await traced("engines", "list", "--json", *options)).splitlines()[-1])["engines"]
        assert [row["url"] for row in rows] == [second]
        with read_session(gateway.store) as session:
            actions = [(entry.action, entry.subject, entry.reason) for entry in list_audit(session)]
        assert actions == [
            ("remove engine", first, "maintenance"),
            ("add engine", second, ""),
            ("add engine", first, ""),
        ]


async def until_engines_leave(gateway: RunningGateway, url: str) -> None:
    """Wait until the router sends an engine no new requests, and others serve."""

    async def is_leaving() -> bool:
        states = (await ready(gateway))["engines"]
        assert url in states
        return states[url].startswith("leaving: ") and "ok" in states.values()

    await eventually_async(is_leaving)


async def test_the_addresses_of_a_name_are_followed_and_kept_while_it_cannot_be_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: list[str] = []

    async def resolve(entry: str) -> list[str]:
        assert entry == NAME
        if not addresses:
            raise EngineError("the name cannot be resolved")
        return list(addresses)

    monkeypatch.setattr(engine_sources, "resolve", resolve)
    async with (
        upstreams(2) as engines,
        running_gateway(tmp_path, engines=0, urls=[NAME], live=V1) as gateway,
    ):
        first, second = (engine.url for engine in engines)
        assert "cannot be resolved" in (await ready(gateway))["engine_sources"][NAME]
        addresses += [first, second]
        await until_engines(gateway, first, second)
        await until_offered(gateway, V1)
        assert "engine_sources" not in await ready(gateway)
        addresses.remove(first)
        await until_engines(gateway, second)
        addresses.clear()
        await eventually_async(lambda: _has_problem(gateway))
        assert (await ready(gateway))["engines"] == {second: "ok"}
        assert (await gateway.ask(V1)).status_code == 200


async def _has_problem(gateway: RunningGateway) -> bool:
    return "its last engines stay in use: 1" in str((await ready(gateway)).get("engine_sources"))


async def test_a_router_is_ready_through_a_real_name(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engines=1) as other:
        port = other.engine.url.rpartition(":")[2]
        folder = tmp_path / "by-name"
        async with running_gateway(folder, engines=0, urls=[f"dns+http://localhost:{port}"]) as gateway:
            assert (await ready(gateway))["engines"] == {other.engine.url: "ok"}
            assert (await gateway.ask("base")).status_code == 200


@pytest.mark.slow
async def test_traced_serve_uses_the_list_beside_the_engines_of_its_settings(tmp_path: Path) -> None:
    port = free_port()
    async with upstreams(2) as engines, httpx.AsyncClient(trust_env=False) as http:
        first, second = (engine.url for engine in engines)
        pairs = [f"engine.urls={json.dumps([first])}", f"serving.port={port}"]
        options = ["--data-dir", str(tmp_path), *(part for pair in pairs for part in ("--set", pair))]
        with (tmp_path / "out").open("wb") as out:
            router = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "traced", "serve", *options), stdout=out, stderr=out
            )

        async def has_engines(*urls: str) -> bool:
            with contextlib.suppress(httpx.TransportError):
                answer = await http.get(f"http://127.0.0.1:{port}/ready")
                return bool(answer.json()["engines"] == dict.fromkeys(urls, "ok"))
            return False

        try:
            await eventually_async(lambda: has_engines(first), message=(tmp_path / "out").read_text)
            assert await traced("engines", "add", second, *options) == f"{second} is now in the list.\n"
            await eventually_async(lambda: has_engines(first, second))
            (row,) = json.loads((await traced("engines", "list", "--json", *options)).splitlines()[-1])["engines"]
            assert (row["url"], row["state"]) == (second, "ok")
            await traced("engines", "remove", second, *options)
            await eventually_async(lambda: has_engines(first))
        finally:
            router.terminate()
            assert await router.wait() == 0
