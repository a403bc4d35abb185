"""Which model answers: decisions, promotions and rollbacks while requests are in flight, engines that come and go."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from store.database import read_session, write_session
from store.records import ConversationRoute
from store.repositories.serving import find_routes, save_routes
from tests.integration.gateway.place import USER, V1, V2, Place, models, place, until, until_offered
from tests.integration.gateway.upstream import BASE
from tests.unit.store.chain import T0
from traced.gateway import model_choice


def run(tmp_path: Path, check: Callable[[Place], Coroutine[Any, Any, None]], **kind: Any) -> None:
    async def inside() -> None:
        async with place(tmp_path, **kind) as made:
            await check(made)

    asyncio.run(inside())


def said(answer: Any) -> str:
    return answer.json()["choices"][0]["message"]["content"]


def test_auto_gives_a_conversation_to_the_adapter_that_the_base_model_names(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        answer = await made.ask()
        assert (said(answer), answer.headers["X-Traced-Model"]) == (f"signed {V1}", V1)
        made.engine.label = "B"  # the base model would decide otherwise now: the conversation stays
        more = [*USER, {"role": "assistant", "content": "Monday."}, {"role": "user", "content": "Sure?"}]
        assert said(await made.ask(said=more)) == f"signed {V1}"
        other = await made.ask(said=[{"role": "user", "content": "Hello"}])
        assert (said(other), other.headers["X-Traced-Model"]) == (f"signed {BASE}", "base")
        with read_session(made.store) as opened:
            (kept,) = find_routes(opened, [answer.headers["X-Traced-Conversation"]]).values()
        assert (kept.model, kept.logprobs, kept.why) == (V1, {V1: pytest.approx(-0.1)}, "")

    run(tmp_path, check, live=V1)


def test_a_second_router_and_a_restart_decide_the_same(tmp_path: Path) -> None:
    async def once() -> str:
        async with place(tmp_path, live=V1) as made:
            return said(await made.ask(headers={"X-Traced-Conversation": "c-7"}))

    async def again() -> str:
        async with place(tmp_path) as made:
            made.engine.label = "B"
            return said(await made.ask(headers={"X-Traced-Conversation": "c-7"}, said=USER[1:]))

    assert asyncio.run(once()) == asyncio.run(again()) == f"signed {V1}"


def test_what_another_router_decided_meanwhile_counts(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        made.engine.routing_delay_s = 0.3
        asking = asyncio.create_task(made.ask(headers={"X-Traced-Conversation": "c-8"}))
        await asyncio.sleep(0.1)
        with write_session(made.store) as opened:
            save_routes(opened, [ConversationRoute("c-8", "base", {}, 0.0, "", T0)])
        assert said(await asking) == f"signed {BASE}"

    run(tmp_path, check, live=V1)


def test_labels_that_are_no_single_tokens_of_the_engines_tokenizer_decide_nothing(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        made.engine.letters_a_token = 2
        assert said(await made.ask(headers={"X-Traced-Conversation": "pairs"})) == f"signed {BASE}"
        with read_session(made.store) as opened:
            (kept,) = find_routes(opened, ["pairs"]).values()
        assert kept.why.startswith("routing failed: label 'A' is not a single token after 'Answer:'")

    run(tmp_path, check, live=V1)


def test_an_explicit_model_bypasses_the_decision(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        assert await models(made) == ["auto", "base", V1]
        assert said(await made.ask("base")) == f"signed {BASE}"
        assert said(await made.ask(BASE)) == f"signed {BASE}"
        assert said(await made.ask(V1)) == f"signed {V1}"
        refused = await made.ask(V2)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert V1 in refused.json()["error"]["message"]

    run(tmp_path, check, live=V1)


@pytest.mark.parametrize("how", ["silent", "slow", "senseless"])
def test_routing_never_fails_a_request(tmp_path: Path, how: str) -> None:
    async def check(made: Place) -> None:
        made.engine.routing_delay_s = {"silent": 30.0, "slow": 0.5}.get(how, 0.0)
        made.engine.label = "zebra" if how == "senseless" else "A"
        answer = await made.ask(headers={"X-Traced-Conversation": how})
        assert said(answer) == f"signed {BASE}"
        with read_session(made.store) as opened:
            (kept,) = find_routes(opened, [how]).values()
        assert kept.why == {"senseless": "no label was among the likely next tokens"}.get(
            how, "no decision within 0.2 s"
        )

    run(tmp_path, check, live=V1, settings={"serving.routing_timeout_s": 0.2})


def test_a_promotion_and_a_rollback_take_effect_while_requests_are_in_flight(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        assert said(await made.ask()) == f"signed {BASE}"
        made.promote(V1)
        await until_offered(made, V1)
        assert made.engine.adapters == {V1: f"/data/{V1}"}
        made.engine.delay_s = 0.8
        slow = asyncio.create_task(made.ask(V1))
        await until(lambda: made.engine.running)
        made.roll_back(V1)
        await until_offered(made, V1, offered=False)
        assert V1 in made.engine.adapters  # its last request still runs
        assert said(await slow) == f"signed {V1}"
        await until(lambda: not made.engine.adapters)

    run(tmp_path, check)


def test_a_rolled_back_conversation_goes_on_with_the_base_and_a_superseded_one_with_the_new_version(
    tmp_path: Path,
) -> None:
    async def check(made: Place) -> None:
        assert said(await made.ask()) == f"signed {V1}"
        made.promote(V2)
        await until_offered(made, V2)
        assert said(await made.ask()) == f"signed {V2}"
        made.roll_back(V2)
        await until_offered(made, V1)
        assert said(await made.ask()) == f"signed {V1}"
        made.roll_back(V1)
        await until_offered(made, V1, offered=False)
        assert said(await made.ask()) == f"signed {BASE}"

    run(tmp_path, check, live=V1)


def test_an_engine_never_holds_more_adapters_than_it_has_slots(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        made.promote(V2)  # in V1's place: only one slot
        await until_offered(made, V2)
        assert made.engine.most_loaded == 1
        assert made.engine.loads == [V1, V2]

    run(tmp_path, check, live=V1, settings={"serving.max_adapters": 1})


def test_an_engine_that_lost_its_adapters_gets_them_again_and_the_base_answers_meanwhile(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        assert said(await made.ask()) == f"signed {V1}"
        made.engine.refuses_loads = True
        made.engine.adapters.clear()
        assert said(await made.ask()) == f"signed {BASE}"
        made.engine.refuses_loads = False
        await until_offered(made, V1)
        assert said(await made.ask()) == f"signed {V1}"

    run(tmp_path, check, live=V1)


def test_replicas_share_the_work_keep_conversations_together_and_one_may_die(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        one, other = made.engines
        for number in range(20):
            for _ in range(2):
                assert (await made.ask("base", headers={"X-Traced-Conversation": f"c-{number}"})).status_code == 200
        kept = [engine.answers[BASE] for engine in (one, other)]
        assert sum(kept) == 40
        assert all(count % 2 == 0 and count >= 8 for count in kept)  # both turns of a conversation at one engine
        await one.stop()
        answers = await asyncio.gather(*(made.ask(said=[{"role": "user", "content": str(n)}]) for n in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert (await made.http.get("/ready")).json()["engines"][one.url] != "ok"
        await one.again()
        await until(lambda: V1 in one.adapters)
        await other.stop()
        assert said(await made.ask(V1)) == f"signed {V1}"

    run(tmp_path, check, engines=2, live=V1)


def test_without_any_engine_the_answer_says_so_and_when_to_ask_again(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        await made.engine.stop()
        refused = await made.ask()
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "2")
        assert refused.json()["error"]["code"] == "engine_unavailable"
        assert (await made.http.get("/ready")).status_code == 503
        assert (await made.http.get("/alive")).status_code == 200
        await made.engine.again()
        await until(lambda: made.engine.adapters)
        assert (await made.ask()).status_code == 200

    run(tmp_path, check, live=V1)


def test_an_engine_that_hangs_holds_up_no_rollback(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        for engine in made.engines:
            engine.health_delay_s = 4.0
        await asyncio.sleep(0.6)  # both are being asked how they are
        made.roll_back(V1)
        began = time.monotonic()
        await until_offered(made, V1, offered=False)
        assert said(await made.ask()) == f"signed {BASE}"
        assert time.monotonic() - began < 2.0

    run(tmp_path, check, engines=2, live=V1)


def test_a_follower_that_fails_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(made: Place) -> None:
        real, failed = model_choice.list_keys, []

        def once(opened: Any) -> Any:
            if not failed:
                failed.append(True)
                raise RuntimeError("a defect")
            return real(opened)

        monkeypatch.setattr(model_choice, "list_keys", once)
        await until(lambda: failed)
        made.promote(V1)
        await until_offered(made, V1)

    run(tmp_path, check)


def test_a_path_that_an_engine_does_not_know_takes_no_adapter_away(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        made.engine.knows_responses = False
        refused = await made.http.post("/v1/responses", json={"model": V1, "input": "Which day?"})
        assert refused.status_code == 404
        assert V1 in await models(made)
        assert said(await made.ask(V1)) == f"signed {V1}"

    run(tmp_path, check, live=V1)


def test_a_conversation_that_nobody_could_answer_is_decided_when_somebody_can(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        await made.engine.stop()
        await until_offered(made, V1, offered=False)
        named = {"X-Traced-Conversation": "c-9"}
        assert (await made.ask(headers=named)).status_code == 503
        with read_session(made.store) as opened:
            assert find_routes(opened, ["c-9"]) == {}
        await made.engine.again()
        await until_offered(made, V1)
        assert said(await made.ask(headers=named)) == f"signed {V1}"

    run(tmp_path, check, live=V1)
