"""Who may ask: keys, quotas, the address."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from store.database import read_session, write_session
from store.errors import StoreUnavailable
from store.repositories.events import list_audit
from store.repositories.serving import list_feedback
from tests.integration.gateway.place import RunningGateway, running_gateway
from tests.unit.store.chain import T0
from tests.waiting import eventually_async
from traced.gateway import live_versions
from traced.gateway.access import create_key, withdraw_key
from traced.inference.errors import ServingError
from traced.registry.decision_rules import Action

ADA = Action("Ada", "local", T0, "for the agent")


async def run(tmp_path: Path, check: Callable[[RunningGateway], Coroutine[Any, Any, None]], **kind: Any) -> None:
    async with running_gateway(tmp_path, **kind) as gateway:
        await check(gateway)


def with_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def feedback(gateway: RunningGateway, key: str, **reference: str) -> int:
    answer = await gateway.http.post("/v1/feedback", json={"score": 1, **reference}, headers=with_key(key))
    return answer.status_code


async def until_status(gateway: RunningGateway, status: int, headers: dict[str, str]) -> Any:
    for _ in range(200):
        answer = await gateway.ask("base", headers=headers)
        if answer.status_code == status:
            return answer
        await asyncio.sleep(0.02)
    raise AssertionError(answer.text)


async def test_once_a_key_exists_requests_need_a_key(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        assert (await gateway.ask("base")).status_code == 200
        with write_session(gateway.store) as session:
            key = create_key(session, ADA, "agent", 0)
        response = await until_status(gateway, 401, {})
        assert (response.json()["error"]["type"], response.json()["error"]["code"]) == (
            "authentication_error",
            "missing_api_key",
        )
        for wrong in (key[:-1], "traced-", "é"):
            headers = {"Authorization": f"Bearer {wrong}".encode()}
            assert (await gateway.ask("base", headers=headers)).status_code == 401
        for path in ("/v1/models", "/v1/feedback"):
            assert (await gateway.http.request("GET" if "models" in path else "POST", path)).status_code == 401
        assert (await gateway.http.get("/alive")).status_code == 200
        answer = await gateway.ask("base", headers=with_key(key))
        assert answer.headers["X-Traced-Conversation"].startswith("conv-")
        with write_session(gateway.store) as session:
            withdraw_key(session, ADA, "agent")
        assert (await until_status(gateway, 401, with_key(key))).json()["error"]["code"] == "invalid_api_key"
        with read_session(gateway.store) as session:
            assert [entry.action for entry in list_audit(session)] == ["revoke key", "add key"]
        assert key.encode() not in (tmp_path / "traced.db").read_bytes()

    await run(tmp_path, check)


async def test_a_keys_quota_is_its_own(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        with write_session(gateway.store) as session:
            limited_key, unlimited_key = create_key(session, ADA, "few", 2), create_key(session, ADA, "many", 0)
        await until_status(gateway, 401, {})
        answers = [await gateway.ask("base", headers=with_key(limited_key)) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert int(answers[-1].headers["Retry-After"]) in range(1, 31)
        assert (await gateway.ask("base", headers=with_key(unlimited_key))).status_code == 200

    await run(tmp_path, check)


async def test_an_address_that_others_reach_needs_a_key(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        raise AssertionError("it serves everybody")

    with pytest.raises(ServingError, match="has no API key yet") as exc_info:
        await run(tmp_path, check, settings={"serving.host": "0.0.0.0"})
    assert exc_info.value.hint == "traced keys add NAME"


async def test_a_gateway_that_cannot_read_the_keys_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> Any:
        raise StoreUnavailable("the store is away")

    async def check(gateway: RunningGateway) -> None:
        raise AssertionError("it serves")

    monkeypatch.setattr(live_versions, "list_keys", away)
    with pytest.raises(StoreUnavailable):
        await run(tmp_path, check)


async def test_a_store_that_goes_away_leaves_the_keys_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> Any:
        raise StoreUnavailable("the store is away")

    async def check(gateway: RunningGateway) -> None:
        with write_session(gateway.store) as session:
            key = create_key(session, ADA, "agent", 0)
        await until_status(gateway, 401, {})
        monkeypatch.setattr(live_versions, "list_keys", away)
        await asyncio.sleep(0.5)
        assert (await gateway.ask("base")).status_code == 401
        assert (await gateway.ask("base", headers=with_key(key))).status_code == 200

    await run(tmp_path, check)


async def test_two_keys_do_not_share_a_conversation(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        with write_session(gateway.store) as session:
            keys = [create_key(session, ADA, name, 0) for name in ("one", "two")]
        await until_status(gateway, 401, {})
        headers = {"X-Traced-Conversation": "same"}
        answers = [await gateway.ask("base", headers=with_key(key) | headers) for key in keys]
        assert [answer.headers["X-Traced-Conversation"] for answer in answers] == ["same", "same"]
        await eventually_async(lambda: gateway.exchanges("one:same") and gateway.exchanges("two:same"))
        response_id = answers[0].json()["id"]
        # The scripted engine counts its answers, so the ids differ.
        assert response_id != answers[1].json()["id"]
        by_response = [await feedback(gateway, key, response_id=response_id) for key in keys]
        by_name = [await feedback(gateway, key, conversation_id="same") for key in keys]
        assert (by_response, by_name) == ([200, 404], [200, 200])
        with read_session(gateway.store) as session:
            assert {row.conversation_id for row in list_feedback(session, ["one:same"])} == {"one:same"}
            assert len(list_feedback(session, ["one:same", "two:same"])) == 3

    await run(tmp_path, check)
