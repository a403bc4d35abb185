"""Which model answers: decisions, promotions and rollbacks while requests are in flight, engines that come and go."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from store.database import open_store, read_session, write_session
from store.records import ConversationRoute
from store.repositories.serving import find_routes, list_keys, save_routes
from tests.integration.gateway.place import (
    USER,
    V1,
    V2,
    RunningGateway,
    models,
    running_gateway,
    until_offered,
)
from tests.integration.gateway.upstream import BASE
from tests.waiting import eventually_async
from traced.config.settings import load_settings
from traced.gateway import live_versions
from traced.gateway.peers import POLL_S
from traced.gateway.server import open_gateway


async def run(tmp_path: Path, check: Callable[[RunningGateway], Coroutine[Any, Any, None]], **kind: Any) -> None:
    async with running_gateway(tmp_path, **kind) as gateway:
        await check(gateway)


async def route_of(gateway: RunningGateway, conversation_id: str) -> ConversationRoute:
    """Wait for the stored decision on a conversation, which is written behind the answer."""

    def routes() -> list[ConversationRoute]:
        with read_session(gateway.store) as session:
            return list(find_routes(session, [conversation_id]).values())

    await eventually_async(routes)
    (route,) = routes()
    return route


async def until_prepared(gateway: RunningGateway) -> None:
    """Wait until the router has decided on its empty task, with which it begins at an engine."""
    assert (await gateway.ask()).status_code == 200
    await asyncio.sleep(0.1)


def text_of(answer: Any) -> str:
    return answer.json()["choices"][0]["message"]["content"]


async def test_auto_gives_a_conversation_to_the_adapter_that_the_base_model_names(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        answer = await gateway.ask()
        assert (text_of(answer), answer.headers["X-Traced-Model"]) == (f"signed {V1}", V1)
        gateway.engine.label = "B"  # the base model would decide otherwise now: the conversation stays
        messages = [*USER, {"role": "assistant", "content": f"signed {V1}"}, {"role": "user", "content": "Sure?"}]
        assert text_of(await gateway.ask(messages=messages)) == f"signed {V1}"
        other = await gateway.ask(messages=[{"role": "user", "content": "Hello"}])
        assert (text_of(other), other.headers["X-Traced-Model"]) == (f"signed {BASE}", "base")
        stored_route = await route_of(gateway, answer.headers["X-Traced-Conversation"])
        assert (stored_route.model, stored_route.why) == (V1, "")
        assert stored_route.logprobs == pytest.approx({V1: -0.1})

    await run(tmp_path, check, live=V1)


async def test_a_second_router_and_a_restart_decide_the_same(tmp_path: Path) -> None:
    async def first_model() -> str:
        async with running_gateway(tmp_path, live=V1) as gateway:
            return text_of(await gateway.ask(headers={"X-Traced-Conversation": "c-7"}))

    async def second_model() -> str:
        async with running_gateway(tmp_path) as gateway:
            gateway.engine.label = "B"
            return text_of(await gateway.ask(headers={"X-Traced-Conversation": "c-7"}, messages=USER[1:]))

    assert await first_model() == await second_model() == f"signed {V1}"


async def test_a_decision_of_another_gateway_takes_precedence(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        with write_session(gateway.store) as session:
            save_routes(session, [ConversationRoute("c-8", "base", {}, 0.0, "", datetime.now(UTC))])
        assert text_of(await gateway.ask(headers={"X-Traced-Conversation": "c-8"})) == f"signed {BASE}"

    await run(tmp_path, check, live=V1)


async def test_labels_that_are_no_single_tokens_of_the_engines_tokenizer_decide_nothing(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.engine.letters_a_token = 2
        assert text_of(await gateway.ask(headers={"X-Traced-Conversation": "pairs"})) == f"signed {BASE}"
        stored_route = await route_of(gateway, "pairs")
        assert stored_route.is_failure
        assert stored_route.why.startswith("labels: label 'A' is not a single token after 'Answer:'")

    await run(tmp_path, check, live=V1)


async def test_an_explicit_model_bypasses_the_decision(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        assert await models(gateway) == ["auto", "base", V1]
        assert text_of(await gateway.ask("base")) == f"signed {BASE}"
        assert text_of(await gateway.ask(BASE)) == f"signed {BASE}"
        assert text_of(await gateway.ask(V1)) == f"signed {V1}"
        response = await gateway.ask(V2)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert V1 in response.json()["error"]["message"]

    await run(tmp_path, check, live=V1)


@pytest.mark.parametrize("failure", ["silent", "slow", "senseless"])
async def test_routing_never_fails_a_request(tmp_path: Path, failure: str) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.engine.routing_delay_s = {"silent": 30.0, "slow": 0.5}.get(failure, 0.0)
        gateway.engine.label = "zebra" if failure == "senseless" else "A"
        answer = await gateway.ask(headers={"X-Traced-Conversation": failure})
        assert text_of(answer) == f"signed {BASE}"
        stored_route = await route_of(gateway, failure)
        reason = "no label was among the likely next tokens" if failure == "senseless" else "no decision within 0.2 s"
        assert (stored_route.is_failure, stored_route.why) == (True, f"labels: {reason}")

    await run(tmp_path, check, live=V1, settings={"serving.routing_timeout_s": 0.2})


async def test_a_promotion_and_a_rollback_take_effect_while_requests_are_in_flight(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        assert text_of(await gateway.ask()) == f"signed {BASE}"
        gateway.promote(V1)
        await until_offered(gateway, V1)
        assert gateway.engine.adapters == {V1: str(tmp_path / "adapters" / V1)}
        gateway.engine.delay_s = 0.8
        slow = asyncio.create_task(gateway.ask(V1))
        await eventually_async(lambda: gateway.engine.running)
        gateway.roll_back(V1)
        await until_offered(gateway, V1, is_offered=False)
        assert V1 in gateway.engine.adapters  # its last request still runs
        assert text_of(await slow) == f"signed {V1}"
        await eventually_async(lambda: not gateway.engine.adapters)

    await run(tmp_path, check)


async def test_only_a_rollback_of_its_own_adapter_moves_a_conversation_in_progress(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        async def model_of(name: str) -> str:
            text: str = text_of(await gateway.ask(headers={"X-Traced-Conversation": name}))
            return text.removeprefix("signed ")

        # The names are those of the models that the conversations begin with.
        assert await model_of("v1") == V1
        gateway.promote(V2)
        await until_offered(gateway, V2)
        assert (await model_of("v2"), await model_of("v1")) == (V2, V1)
        assert V1 not in await models(gateway)
        gateway.roll_back(V2)
        await until_offered(gateway, V1)
        assert (await model_of("v2"), await model_of("v1")) == (V1, V1)
        gateway.roll_back(V1)
        await until_offered(gateway, V1, is_offered=False)
        assert (await model_of("base"), await model_of("v1")) == (BASE, BASE)
        gateway.promote(V2)
        await until_offered(gateway, V2)
        assert (await model_of("base"), await model_of("new")) == (BASE, V2)

    await run(tmp_path, check, live=V1)


async def test_a_superseded_version_without_a_slot_hands_its_conversations_to_its_successor(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        headers = {"X-Traced-Conversation": "c"}
        assert text_of(await gateway.ask(headers=headers)) == f"signed {V1}"
        gateway.promote(V2)
        await until_offered(gateway, V2)
        assert text_of(await gateway.ask(headers=headers)) == f"signed {V2}"
        assert gateway.engine.adapters == {V2: str(tmp_path / "adapters" / V2)}

    await run(tmp_path, check, live=V1, settings={"serving.max_adapters": 1})


async def test_an_engine_never_holds_more_adapters_than_it_has_slots(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.promote(V2)  # in V1's place: only one slot
        await until_offered(gateway, V2)
        assert gateway.engine.most_loaded == 1
        assert gateway.engine.loads == [V1, V2]

    await run(tmp_path, check, live=V1, settings={"serving.max_adapters": 1})


async def test_an_engine_that_lost_its_adapters_gets_them_again_and_the_base_answers_meanwhile(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        assert text_of(await gateway.ask()) == f"signed {V1}"
        gateway.engine.refuses_loads = True
        gateway.engine.adapters.clear()
        assert text_of(await gateway.ask()) == f"signed {BASE}"
        gateway.engine.refuses_loads = False
        await until_offered(gateway, V1)
        assert text_of(await gateway.ask()) == f"signed {V1}"

    await run(tmp_path, check, live=V1)


async def test_replicas_share_the_work_keep_conversations_together_and_one_may_die(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        first, other = gateway.engines
        for number in range(40):  # so many that each engine has four of them, whatever its port
            for _ in range(2):
                assert (await gateway.ask("base", headers={"X-Traced-Conversation": f"c-{number}"})).status_code == 200
        answer_counts = [engine.answers[BASE] for engine in (first, other)]
        assert sum(answer_counts) == 80
        # Both turns of a conversation are at one engine.
        assert all(count % 2 == 0 and count >= 8 for count in answer_counts), answer_counts
        await first.stop()
        answers = await asyncio.gather(
            *(gateway.ask(messages=[{"role": "user", "content": str(n)}]) for n in range(20))
        )
        assert {answer.status_code for answer in answers} == {200}
        assert (await gateway.http.get("/ready")).json()["engines"][first.url] != "ok"
        await first.reset()
        await eventually_async(lambda: V1 in first.adapters)
        await other.stop()

        async def is_away() -> bool:
            return (await gateway.http.get("/ready")).json()["engines"][other.url] != "ok"

        # The router knows later than the engine that the engine has the adapter.
        await eventually_async(is_away)
        await until_offered(gateway, V1)
        assert text_of(await gateway.ask(V1)) == f"signed {V1}"

    await run(tmp_path, check, engines=2, live=V1)


async def test_without_an_engine_the_response_is_503_with_retry_after(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        await until_prepared(gateway)
        await gateway.engine.stop()
        response = await gateway.ask()
        assert (response.status_code, response.headers["Retry-After"]) == (503, "2")
        assert response.json()["error"]["code"] == "engine_unavailable"
        assert (await gateway.http.get("/ready")).status_code == 503
        assert (await gateway.http.get("/alive")).status_code == 200
        await gateway.engine.reset()
        await eventually_async(lambda: gateway.engine.adapters)
        assert (await gateway.ask()).status_code == 200

    await run(tmp_path, check, live=V1)


async def test_an_engine_that_hangs_holds_up_no_rollback(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        for engine in gateway.engines:
            engine.health_delay_s = 12.0
        await asyncio.sleep(0.6)  # the health checks of both are under way
        gateway.roll_back(V1)
        began = time.monotonic()
        await until_offered(gateway, V1, is_offered=False)
        assert text_of(await gateway.ask()) == f"signed {BASE}"
        assert time.monotonic() - began < 8.0

    await run(tmp_path, check, engines=2, live=V1)


async def test_a_follower_that_fails_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(gateway: RunningGateway) -> None:
        real = list_keys
        failed: list[bool] = []

        def fail_once(session: Any) -> Any:
            if not failed:
                failed.append(True)
                raise RuntimeError("a defect")
            return real(session)

        monkeypatch.setattr(live_versions, "list_keys", fail_once)
        await eventually_async(lambda: failed)
        gateway.promote(V1)
        await until_offered(gateway, V1)

    await run(tmp_path, check)


async def test_a_path_that_an_engine_does_not_know_takes_no_adapter_away(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.engine.knows_responses = False
        response = await gateway.http.post("/v1/responses", json={"model": V1, "input": "Which day?"})
        assert response.status_code == 404
        assert V1 in await models(gateway)
        assert text_of(await gateway.ask(V1)) == f"signed {V1}"

    await run(tmp_path, check, live=V1)


async def test_a_conversation_that_nobody_could_answer_is_decided_when_somebody_can(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        await until_prepared(gateway)
        await gateway.engine.stop()
        await until_offered(gateway, V1, is_offered=False)
        headers = {"X-Traced-Conversation": "c-9"}
        assert (await gateway.ask(headers=headers)).status_code == 503
        with read_session(gateway.store) as session:
            assert find_routes(session, ["c-9"]) == {}
        await gateway.engine.reset()
        await until_offered(gateway, V1)
        assert text_of(await gateway.ask(headers=headers)) == f"signed {V1}"

    await run(tmp_path, check, live=V1)


async def test_two_routers_on_two_data_directories_share_conversations(tmp_path: Path) -> None:
    async with running_gateway(tmp_path / "first", live=V1) as first:
        overrides = {"serving.port": 0, "routing.router": "labels", "store.url": first.settings.store_url}
        second_settings = load_settings(tmp_path / "second", overrides)
        store = open_store(first.settings.store_url)
        async with open_gateway(second_settings, store, [first.engine.url]) as url:
            await asyncio.sleep(2 * POLL_S)
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
                routers = [first.http, http]
                messages: list[Any] = list(USER)
                names: set[str] = set()
                for turn in range(6):
                    gateway = replace(first, http=routers[turn % 2])
                    answer = await gateway.ask(messages=messages)
                    names.add(answer.headers["X-Traced-Conversation"])
                    assert text_of(answer) == f"signed {V1}"
                    # The base model would decide otherwise now.
                    first.engine.label = "B"
                    messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"And {turn}?"}]
        store.dispose()
    assert len(names) == 1
