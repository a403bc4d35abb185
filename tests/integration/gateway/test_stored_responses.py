"""Answers of the responses form that clients continue by id: on any engine and any router, for their own key only."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from sqlmodel import select

from store.database import read_session, write_session
from store.errors import StoreUnavailable
from store.repositories import responses
from store.service_tables import ResponseRow
from tests.integration.gateway.place import RunningGateway, running_gateway
from tests.integration.gateway.test_keys import ADA, until_status, with_key
from tests.integration.gateway.upstream import BASE
from tests.waiting import eventually_async
from traced.gateway import stored_responses
from traced.gateway.access import create_key
from traced.gateway.server import open_gateway

QUESTION = "Please look up order W7."
TOOL = {"type": "function", "name": "get_order", "strict": False, "parameters": {"type": "object", "properties": {}}}


async def run(tmp_path: Path, check: Callable[[RunningGateway], Coroutine[Any, Any, None]], **kind: Any) -> None:
    async with running_gateway(tmp_path, **kind) as gateway:
        await check(gateway)


def client_of(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


async def respond(gateway: RunningGateway, status: int = 200, **options: Any) -> dict[str, Any]:
    headers = options.pop("headers", None)
    response = await gateway.http.post("/v1/responses", json={"model": "base"} | options, headers=headers)
    assert response.status_code == status, response.text
    return dict(response.json())


def stored_ids(gateway: RunningGateway) -> set[str]:
    with read_session(gateway.store) as session:
        return set(session.exec(select(ResponseRow.id)))


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_is_continued_by_its_id_on_any_engine(tmp_path: Path, streamed: bool) -> None:
    async def check(gateway: RunningGateway) -> None:
        async with client_of(gateway.url) as client:

            async def ask(**options: Any) -> Any:
                options |= {"model": "base", "instructions": "Be brief.", "tools": [TOOL]}
                if not streamed:
                    return await client.responses.create(**options)
                async with client.responses.stream(**options) as stream:
                    return await stream.get_final_response()

            first = await ask(input=QUESTION)
            text, call = first.output
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "shipped"}
            for engine in gateway.engines:
                if engine.requests:
                    await engine.stop()  # another one has to go on
            second = await ask(input=[result], previous_response_id=first.id)
            third = await ask(input="Thanks.", previous_response_id=second.id)
            assert third.output_text == f"signed {BASE}"
            (engine,) = [engine for engine in gateway.engines if len(engine.requests) == 2]
            request = engine.requests[-1]
            assert "previous_response_id" not in request
            items = [item.get("role") or item["type"] for item in request["input"]]
            roles = ["user", "assistant", "function_call", "function_call_output", "assistant", "user"]
            assert items == roles
            assert request["input"][1]["id"] == text.id
            retrieved = await client.responses.retrieve(second.id)
            assert (retrieved.id, retrieved.previous_response_id) == (second.id, first.id)
            assert [item.id for item in retrieved.output] == [item.id for item in second.output]
            await client.responses.delete(second.id)
            with pytest.raises(openai.NotFoundError, match=second.id):
                await client.responses.retrieve(second.id)
            with pytest.raises(openai.NotFoundError) as exc_info:
                await ask(input="Again.", previous_response_id=second.id)
            assert exc_info.value.code == "previous_response_not_found"
            assert (await ask(input="Again.", previous_response_id=third.id)).output_text

    await run(tmp_path, check, engines=2)


async def test_a_stream_is_continued_before_its_connection_ends(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.engine.stays_open = True
        async with client_of(gateway.url) as client:
            stream: Any = await client.responses.create(model="base", input=QUESTION, stream=True)
            async for event in stream:
                if event.type == "response.completed":
                    break
            second = await client.responses.create(
                model="base", input="Thanks.", previous_response_id=event.response.id
            )
            assert second.status == "completed"
            await stream.close()

    await run(tmp_path, check)


async def test_a_response_belongs_to_its_key(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        with write_session(gateway.store) as session:
            ann, bob = (create_key(session, ADA, name, 0) for name in ("ann", "bob"))
        await until_status(gateway, 401, {})
        response = await respond(gateway, input=QUESTION, headers=with_key(ann))
        path = f"/v1/responses/{response['id']}"
        for headers, status in ((with_key(bob), 404), ({}, 401)):
            for method in ("GET", "DELETE"):
                assert (await gateway.http.request(method, path, headers=headers)).status_code == status
            await respond(gateway, status, input="x", previous_response_id=response["id"], headers=headers)
        assert (await gateway.http.get(path, headers=with_key(ann))).json()["output"] == response["output"]
        assert (await gateway.http.delete(path, headers=with_key(ann))).json()["deleted"] is True

    await run(tmp_path, check)


async def test_responses_outlive_the_router_and_are_found_by_others(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        ids = [(await respond(gateway, input=QUESTION))["id"]]
        engines = [engine.url for engine in gateway.engines]
        body = {"model": "base", "input": "Thanks.", "previous_response_id": ids[0]}
        async with (
            open_gateway(gateway.settings, gateway.store, engines) as url,
            httpx.AsyncClient(trust_env=False) as other,
        ):
            ids.append((await other.post(f"{url}/v1/responses", json=body)).json()["id"])
        third = await respond(gateway, input="Well?", previous_response_id=ids[1])
        assert len(gateway.engine.requests[-1]["input"]) == 5
        assert (await gateway.http.delete(f"/v1/responses/{ids[1]}")).status_code == 200
        assert stored_ids(gateway) == {ids[0], third["id"]}

    await run(tmp_path, check)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_has_the_end_of_its_answer_only_when_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    save = responses.save_responses

    def save_slowly(*arguments: Any) -> None:
        time.sleep(0.2)
        save(*arguments)

    monkeypatch.setattr(stored_responses, "save_responses", save_slowly)

    async def check(gateway: RunningGateway) -> None:
        answer = await gateway.http.post("/v1/responses", json={"model": "base", "input": QUESTION, "stream": streamed})
        assert answer.status_code == 200
        (response_id,) = stored_ids(gateway)
        assert response_id in answer.text

    await run(tmp_path, check)


async def test_no_client_waits_longer_for_a_store_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "LIMIT_S", 0.1)
    release, save = threading.Event(), responses.save_responses

    def hang(*arguments: Any) -> None:
        release.wait(30)
        save(*arguments)

    monkeypatch.setattr(stored_responses, "save_responses", hang)

    async def check(gateway: RunningGateway) -> None:
        first = await respond(gateway, input=QUESTION)
        monkeypatch.setattr(stored_responses, "LIMIT_S", 30.0)  # known to hang: nobody waits at all
        second = await respond(gateway, input=QUESTION)
        assert stored_ids(gateway) == set()
        release.set()
        await eventually_async(lambda: stored_ids(gateway) == {first["id"], second["id"]})

    try:
        await run(tmp_path, check)
    finally:
        release.set()


async def test_a_response_is_written_when_the_store_accepts_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_responses, "WRITE_RETRY_S", 0.05)
    save, is_full = responses.save_responses, [True]

    def save_if_possible(*arguments: Any) -> None:
        if is_full[0]:
            raise StoreUnavailable("the disk is full")
        save(*arguments)

    monkeypatch.setattr(stored_responses, "save_responses", save_if_possible)

    async def check(gateway: RunningGateway) -> None:
        first = await respond(gateway, input=QUESTION)
        await asyncio.sleep(0.2)
        # Meanwhile it can be continued from the memory.
        await respond(gateway, input="Thanks.", previous_response_id=first["id"], store=False)
        assert stored_ids(gateway) == set()
        is_full[0] = False
        await eventually_async(lambda: stored_ids(gateway) == {first["id"]})

    await run(tmp_path, check)


async def test_responses_that_the_store_never_accepts_take_bounded_memory_and_do_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stored_responses, "MEMORY_BYTES", 3000)
    monkeypatch.setattr(stored_responses, "FLUSH_S", 0.1)

    def refuse(*_: Any) -> None:
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(stored_responses, "save_responses", refuse)

    async def check(gateway: RunningGateway) -> None:
        answers = [await respond(gateway, input=f"{'long ' * 200}{number}") for number in range(6)]
        await respond(gateway, 404, input="Thanks.", previous_response_id=answers[0]["id"])
        await respond(gateway, input="Thanks.", previous_response_id=answers[-1]["id"], store=False)

    started = time.monotonic()
    await run(tmp_path, check)
    assert time.monotonic() - started < 20.0
    assert "is lost: the store has not accepted it" in caplog.text
    assert "responses are lost: the store has not accepted them" in caplog.text


async def test_expired_responses_are_not_found_and_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "EXPIRY_INTERVAL_S", 0.05)

    async def check(gateway: RunningGateway) -> None:
        response = await respond(gateway, input=QUESTION)
        await eventually_async(lambda: stored_ids(gateway))
        monkeypatch.setattr(stored_responses, "LIFETIME", timedelta(0))
        await respond(gateway, 404, input="Thanks.", previous_response_id=response["id"])
        assert (await gateway.http.get(f"/v1/responses/{response['id']}")).status_code == 404
        await eventually_async(lambda: not stored_ids(gateway))

    await run(tmp_path, check)


async def test_what_a_client_does_not_want_stored_is_not(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        unstored = await respond(gateway, input=QUESTION, store=False)
        private = await respond(gateway, input=QUESTION, headers={"X-Traced-Record": "no"})
        await respond(gateway, 404, input="Thanks.", previous_response_id=unstored["id"])
        # The router itself still knows it, but not the store.
        await respond(gateway, input="Thanks.", previous_response_id=private["id"])
        await eventually_async(lambda: len(stored_ids(gateway)) == 1)
        assert private["id"] not in stored_ids(gateway)

    await run(tmp_path, check)


async def test_with_redaction_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "MEMORY_BYTES", 3000)

    async def check(gateway: RunningGateway) -> None:
        ids = [(await respond(gateway, input=f"{QUESTION} {n}"))["id"] for n in range(5)]
        await respond(gateway, input="Thanks.", previous_response_id=ids[-1])
        assert gateway.engine.requests[-1]["input"][0]["content"] == f"{QUESTION} 4"
        await respond(gateway, 404, input="Thanks.", previous_response_id=ids[0])  # memory is bounded
        assert stored_ids(gateway) == set()

    await run(tmp_path, check, settings={"serving.redact": ["W7"]})


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"input": QUESTION, "background": True}, 400, "background"),
        ({"input": QUESTION, "previous_response_id": "nobody"}, 404, "nobody"),
        ({"input": QUESTION, "previous_response_id": 3}, 404, "3"),
        ({"input": [3]}, 400, "list of objects"),
        ({}, 400, "list of objects"),
    ],
)
async def test_wrong_requests_are_refused(tmp_path: Path, body: dict[str, Any], status: int, word: str) -> None:
    async def check(gateway: RunningGateway) -> None:
        error = (await respond(gateway, status, **body))["error"]
        assert (error["type"], word in error["message"]) == ("invalid_request_error", True)
        assert gateway.engine.requests == []

    await run(tmp_path, check)


async def test_a_conversation_is_limited_as_a_request_is(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        large = "x" * 600_000
        first = await respond(gateway, input=large)
        await respond(gateway, input="Thanks.", previous_response_id=first["id"])
        error = (await respond(gateway, 413, input=large, previous_response_id=first["id"]))["error"]
        assert "1 MiB" in error["message"]

    await run(tmp_path, check, settings={"serving.body_mb": 1})


async def test_only_complete_answers_are_kept(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.engine.break_after = 4
        answer = await gateway.http.post("/v1/responses", json={"model": "base", "input": QUESTION, "stream": True})
        created = json.loads(answer.text.split("data: ")[1].split("\n")[0])
        assert created["type"] == "response.created"
        assert (await gateway.http.get(f"/v1/responses/{created['response']['id']}")).status_code == 404
        gateway.engine.status = 429
        await respond(gateway, 429, input=QUESTION)
        await asyncio.sleep(0.1)
        assert stored_ids(gateway) == set()

    await run(tmp_path, check)
