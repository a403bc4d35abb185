"""The checks of an engine: what it offers for routing, asked until it is lost, and adapters that it cannot have."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traced.gateway.engines import Pool, Replica
from traced.inference.errors import EngineError, ModelError, RequestError, ServingError, UnknownModelError


class Engine:
    """Stands in for the client of an engine without embeddings."""

    def __init__(self) -> None:
        self.url = "http://h"
        self.base = ""
        self.probe_count = 0
        self.is_healthy = True
        self.failure: Exception = UnknownModelError("Not Found")
        self.tokenizes = True

    async def health(self) -> bool:
        return self.is_healthy

    async def bases_and_adapters(self) -> tuple[list[str], list[str]]:
        return ["own-name"], []

    async def is_sleeping(self) -> bool:
        return False

    async def embeddings(self, texts: list[str], model: str) -> list[list[float]]:
        self.probe_count += 1
        raise self.failure

    async def label_ids(self, labels: str) -> dict[str, int]:
        if not self.tokenizes:
            raise RequestError("HTTP 404")
        return {label: ord(label) for label in labels}

    async def context_length(self) -> int:
        assert self.base == "own-name"
        return 4096


def pool(client: Any, **options: Any) -> Pool:
    return Pool([Replica(client)], 8, **options)


async def test_an_engine_is_asked_once_and_again_after_it_was_lost() -> None:
    client = Engine()
    engines = pool(client)
    (replica,) = engines.replicas
    for _ in range(2):
        await engines.check_all()
    assert client.probe_count == 1
    assert replica.preflight is not None
    assert replica.preflight.embeddings_problem == "http://h has no embeddings (POST /v1/embeddings: 404)"
    assert (replica.preflight.label_problem, replica.preflight.context) == ("", 4096)
    client.is_healthy = False
    await engines.check_all()
    assert replica.preflight is None
    client.is_healthy, client.tokenizes = True, False
    await engines.check_all()
    assert client.probe_count == 2
    assert replica.preflight is not None
    assert replica.preflight.label_problem.startswith("http://h does not tokenize")


async def test_an_engine_that_fails_the_preflight_serves_and_is_asked_again() -> None:
    client = Engine()
    engines = pool(client)
    client.failure = EngineError("HTTP 503")
    await engines.check_all()
    assert (engines.serves("base"), engines.replicas[0].preflight) == (True, None)
    client.failure = UnknownModelError("Not Found")
    await engines.check_all()
    assert engines.replicas[0].preflight is not None


async def test_an_error_ends_when_another_router_has_loaded_or_unloaded_the_adapter() -> None:
    client, listings = Engine(), [["dates@v1"], ["dates@v1", "tools@v1"], []]

    async def bases_and_adapters() -> tuple[list[str], list[str]]:
        return ["own-name"], listings[0]

    async def refuse(*arguments: object) -> None:
        raise EngineError("HTTP 500")

    client.bases_and_adapters, client.load_adapter, client.unload_adapter = bases_and_adapters, refuse, refuse  # type: ignore[attr-defined,method-assign]
    engines = pool(client, adapters={"tools@v1": Path("tools")})
    (replica,) = engines.replicas
    await engines.check_all()
    assert replica.adapter_errors == {"dates@v1": "HTTP 500", "tools@v1": "HTTP 500"}
    assert engines.refuses("tools@v1")
    listings.pop(0)
    await engines.check_all()
    assert (replica.adapter_errors, engines.refuses("tools@v1")) == ({"dates@v1": "HTTP 500"}, False)
    engines.adapters = {}
    listings.pop(0)
    await engines.check_all()
    assert replica.adapter_errors == {}


async def test_an_adapter_that_is_refused_is_named_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(path: Path) -> None:
        raise ModelError("it was trained on another base")

    engines = pool(Engine(), check_adapter=refuse, adapters={"dates@v1": Path("dates")})
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await engines.check_all()
    assert engines.replicas[0].adapter_errors == {"dates@v1": "it was trained on another base"}
    assert caplog.text.count("it was trained on another base") == 1
    engines.set_adapters({})
    assert engines.replicas[0].adapter_errors == {}


async def test_an_adapter_whose_files_are_written_while_it_is_loaded_is_unloaded() -> None:
    client, calls = Engine(), []

    async def load(name: str, path: Path) -> None:
        calls.append(f"load {name}")

    async def unload(name: str) -> None:
        calls.append(f"unload {name}")

    def verify(path: Path) -> Callable[[], None]:
        def verify_loaded() -> None:
            if len(calls) == 1:
                raise ServingError("it was written to")

        return verify_loaded

    client.load_adapter, client.unload_adapter = load, unload  # type: ignore[attr-defined]
    engines = pool(client, verify_adapter=verify, adapters={"dates@v1": Path("dates")})
    await engines.check_all()
    assert (calls, engines.serves("dates@v1")) == (["load dates@v1", "unload dates@v1"], False)
    await engines.check_all()
    assert (calls[2:], engines.serves("dates@v1")) == (["load dates@v1"], True)
