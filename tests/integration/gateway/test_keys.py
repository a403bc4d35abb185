"""Who may ask: keys, quotas, the address."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from store.database import read_session, write_session
from store.errors import StoreUnavailable
from store.repositories.events import list_audit
from tests.integration.gateway.place import Place, place
from tests.unit.store.chain import T0
from traced.gateway import model_choice
from traced.gateway.access import create_key, withdraw_key
from traced.inference.errors import ServingError
from traced.registry.decisions import Act

ADA = Act("Ada", "local", T0, "for the agent")


def run(tmp_path: Path, check: Callable[[Place], Coroutine[Any, Any, None]], **kind: Any) -> None:
    async def inside() -> None:
        async with place(tmp_path, **kind) as made:
            await check(made)

    asyncio.run(inside())


def with_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def until_status(made: Place, status: int, headers: dict[str, str]) -> Any:
    for _ in range(200):
        answer = await made.ask("base", headers=headers)
        if answer.status_code == status:
            return answer
        await asyncio.sleep(0.02)
    raise AssertionError(answer.text)


def test_once_there_is_a_key_only_those_who_have_one_may_ask(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        assert (await made.ask("base")).status_code == 200
        with write_session(made.store) as opened:
            key = create_key(opened, ADA, "agent", 0)
        refused = await until_status(made, 401, {})
        assert (refused.json()["error"]["type"], refused.json()["error"]["code"]) == (
            "authentication_error",
            "missing_api_key",
        )
        for wrong in (key[:-1], "traced-", "é"):
            headers = {"Authorization": f"Bearer {wrong}".encode()}  # type: ignore[dict-item]
            assert (await made.ask("base", headers=headers)).status_code == 401
        for path in ("/v1/models", "/v1/feedback"):
            assert (await made.http.request("GET" if "models" in path else "POST", path)).status_code == 401
        assert (await made.http.get("/alive")).status_code == 200
        answer = await made.ask("base", headers=with_key(key))
        assert answer.headers["X-Traced-Conversation"].startswith("opening-")
        with write_session(made.store) as opened:
            withdraw_key(opened, ADA, "agent")
        assert (await until_status(made, 401, with_key(key))).json()["error"]["code"] == "invalid_api_key"
        with read_session(made.store) as opened:
            assert [entry.action for entry in list_audit(opened)] == ["revoke key", "add key"]
        assert key.encode() not in (tmp_path / "traced.db").read_bytes()

    run(tmp_path, check)


def test_a_keys_quota_is_its_own(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        with write_session(made.store) as opened:
            few, many = create_key(opened, ADA, "few", 2), create_key(opened, ADA, "many", 0)
        await until_status(made, 401, {})
        answers = [await made.ask("base", headers=with_key(few)) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert int(answers[-1].headers["Retry-After"]) in range(1, 31)
        assert (await made.ask("base", headers=with_key(many))).status_code == 200

    run(tmp_path, check)


def test_an_address_that_others_reach_needs_a_key(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        raise AssertionError("it serves everybody")

    with pytest.raises(ServingError, match="no key exists yet") as caught:
        run(tmp_path, check, settings={"serving.host": "0.0.0.0"})
    assert caught.value.hint == "traced keys add NAME"


def test_a_router_that_cannot_read_who_may_ask_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any) -> Any:
        raise StoreUnavailable("the store is away")

    async def check(made: Place) -> None:
        raise AssertionError("it serves")

    monkeypatch.setattr(model_choice, "list_keys", away)
    with pytest.raises(StoreUnavailable):
        run(tmp_path, check)


def test_a_store_that_goes_away_leaves_the_keys_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any) -> Any:
        raise StoreUnavailable("the store is away")

    async def check(made: Place) -> None:
        with write_session(made.store) as opened:
            key = create_key(opened, ADA, "agent", 0)
        await until_status(made, 401, {})
        monkeypatch.setattr(model_choice, "list_keys", away)
        await asyncio.sleep(0.5)
        assert (await made.ask("base")).status_code == 401
        assert (await made.ask("base", headers=with_key(key))).status_code == 200

    run(tmp_path, check)


def test_two_keys_do_not_share_a_conversation(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        with write_session(made.store) as opened:
            keys = [create_key(opened, ADA, name, 0) for name in ("one", "two")]
        await until_status(made, 401, {})
        named = {"X-Traced-Conversation": "same"}
        told = [
            (await made.ask("base", headers=with_key(key) | named)).headers["X-Traced-Conversation"] for key in keys
        ]
        assert told == ["one:same", "two:same"]

    run(tmp_path, check)
