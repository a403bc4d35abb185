"""Canaries and shadows: who gets which conversation, what feedback makes of a canary, what nobody is shown."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from store.database import read_session, write_session
from store.records import ConversationRoute, PromotionState
from store.repositories import promotions
from store.repositories.events import due_notices, list_audit, list_events
from store.repositories.serving import find_routes
from store.types import EndCause, Outcome
from tests.integration.gateway.place import V1, V2, RunningGateway, running_gateway, until_offered
from tests.integration.gateway.upstream import BASE
from tests.unit.store import chain
from tests.waiting import eventually_async
from traced.gateway.canaries import Canaries, strata
from traced.registry.canary import Stratum
from traced.scoring.evidence import Labels

STEPS = {"promotion.steps": [0.3, 0.6], "promotion.min_samples": 5, "promotion.margin": 0.3}
HOOK = {"notify.commands": [{"name": "tell", "argv": ["true"]}]}


async def run(tmp_path: Path, check: Callable[[RunningGateway], Coroutine[Any, Any, None]], **kind: Any) -> None:
    async with running_gateway(tmp_path, **kind) as gateway:
        await check(gateway)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


async def talk(gateway: RunningGateway, names: list[str]) -> dict[str, str]:
    """What each conversation is answered by."""
    models = {}
    for name in names:
        models[name] = text_of(await gateway.ask(headers={"X-Traced-Conversation": name})).removeprefix("signed ")
    return models


async def stored_routes(gateway: RunningGateway, ids: list[str]) -> dict[str, ConversationRoute]:
    """The decisions on these conversations, which are stored a moment after the answers."""

    def routes() -> dict[str, ConversationRoute]:
        with read_session(gateway.store) as session:
            return find_routes(session, ids)

    await eventually_async(lambda: len(routes()) == len(ids))
    return routes()


async def judge(gateway: RunningGateway, models: dict[str, str], succeeds: Callable[[str], bool]) -> None:
    """Feedback on every conversation."""
    for name, model in models.items():
        body = {"conversation_id": name, "score": 1.0 if succeeds(model) else 0.0}
        assert (await gateway.http.post("/v1/feedback", json=body)).status_code == 200


def promotion_state(gateway: RunningGateway, name: str) -> tuple[PromotionState, float | None]:
    with read_session(gateway.store) as session:
        promotion = promotions.list_promotions(session, name)[-1]
    return promotion.state, promotion.share


def names(first: int, last: int) -> list[str]:
    return [f"c-{number}" for number in range(first, last)]


async def test_a_canary_gets_its_share_and_keeps_its_conversations(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.begin(V2, "canary", 0.3)
        await until_offered(gateway, V2)
        models = await talk(gateway, names(0, 150))
        assert 25 <= Counter(models.values())[V2] <= 65  # 45 are expected; the ids are the same every time
        assert set(models.values()) == {V1, V2}
        assert await talk(gateway, names(0, 20)) == {name: models[name] for name in names(0, 20)}
        routes = await stored_routes(gateway, names(0, 150))
        with read_session(gateway.store) as session:
            (trial,) = promotions.trials(session)
        assert {route.trial for route in routes.values()} == {trial.seq}
        assert {name: route.model for name, route in routes.items()} == models
        assert text_of(await gateway.ask(V2)) == f"signed {V2}"  # by its name, whatever the share

        began = time.perf_counter()
        gateway.roll_back(V2)
        name = next(name for name, model in models.items() if model == V2)
        while (await talk(gateway, [name]))[name] != V1:
            assert time.perf_counter() - began < 20.0  # within one second: benchmarks.versions
        assert set((await talk(gateway, [*models, *names(200, 260)])).values()) == {V1}

    await run(tmp_path, check, live=V1)


async def test_shares_are_equal_after_a_restart_and_at_a_second_gateway(tmp_path: Path) -> None:
    async def run_once(with_promotion: bool) -> dict[str, str]:
        async with running_gateway(tmp_path) as gateway:
            if with_promotion:
                gateway.promote(V1)
                gateway.begin(V2, "canary", 0.5)
            await until_offered(gateway, V2)
            first = await talk(gateway, names(0, 30))
            with write_session(gateway.store) as session:  # what was decided is forgotten: the id alone says it again
                session.connection().exec_driver_sql("DELETE FROM conversations")
            return first

    assert await run_once(True) == await run_once(False)


async def test_without_a_live_version_the_base_model_is_the_control(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.begin(V1, "canary", 0.5)
        await until_offered(gateway, V1)
        assert set((await talk(gateway, names(0, 40))).values()) == {V1, BASE}
        gateway.engine.label = "B"  # not this capability's: they take no part
        assert set((await talk(gateway, names(40, 60))).values()) == {BASE}
        routes = await stored_routes(gateway, names(40, 60))
        assert {route.trial for route in routes.values()} == {None}

    await run(tmp_path, check)


async def test_a_canary_that_does_well_goes_on_and_live(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.begin(V2, "canary", 0.3)
        await until_offered(gateway, V2)
        await judge(gateway, await talk(gateway, names(0, 40)), lambda model: model == V2)
        await eventually_async(lambda: promotion_state(gateway, V2) == (PromotionState.CANARY, 0.6))
        with read_session(gateway.store) as session:
            (trial,) = promotions.trials(session)
        number = 40
        while promotion_state(gateway, V2)[0] is PromotionState.CANARY:
            assert number < 200
            await judge(gateway, await talk(gateway, names(number, number + 10)), lambda model: model == V2)
            number += 10
            await asyncio.sleep(0.3)
        assert promotion_state(gateway, V2) == (PromotionState.LIVE, None)
        assert promotion_state(gateway, V1)[0] is PromotionState.SUPERSEDED
        with read_session(gateway.store) as session:
            kinds = [event.kind for event in list_events(session) if event.kind.startswith("canary")]
            audit = [(entry.who, entry.action) for entry in list_audit(session)]
            log = promotions.list_promotions(session, V2)
        assert kinds == ["canary step", "canary promoted"]
        assert ("traced canary", "canary promoted") in audit
        assert log[-2].reason.startswith("not worse than its control so far: ")
        assert "at most 0.3 below that of the control" in log[-1].reason
        await until_offered(gateway, V1, is_offered=False)
        assert trial.seq > 0

    await run(tmp_path, check, live=V1, settings=STEPS)


async def test_a_harmful_canary_is_rolled_back_with_a_notice(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.begin(V2, "canary", 0.3)
        await until_offered(gateway, V2)
        models = await talk(gateway, names(0, 60))
        await judge(gateway, models, lambda model: model == V1)
        await eventually_async(lambda: promotion_state(gateway, V2)[0] is PromotionState.ROLLED_BACK)
        assert promotion_state(gateway, V1)[0] is PromotionState.LIVE
        await until_offered(gateway, V2, is_offered=False)
        assert set((await talk(gateway, list(models))).values()) == {V1}
        with read_session(gateway.store) as session:
            (notice,) = due_notices(session, ["tell"], at=chain.later(10**6), longest_wait=chain.later(1) - chain.T0)
            reason = promotions.list_promotions(session, V2)[-1].reason
        assert notice.body["kind"] == "canary-ended"
        assert reason.startswith("worse than its control: successes 0 of ")

    await run(tmp_path, check, live=V1, settings={**STEPS, **HOOK})


async def test_answers_of_the_base_model_instead_of_the_canary_do_not_count(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.begin(V2, "canary", 1.0)
        await until_offered(gateway, V2)
        assert await talk(gateway, ["whole", "broken"]) == {"whole": V2, "broken": V2}
        gateway.engine.refuses_loads = True
        del gateway.engine.adapters[V2]
        models = await talk(gateway, ["broken"])
        assert models == {"broken": BASE}
        await eventually_async(lambda: len(gateway.exchanges("broken")) == 2)
        await judge(gateway, {"whole": V2, **models}, lambda model: model == V2)
        assert (await stored_routes(gateway, ["broken"]))["broken"].model == V2
        with read_session(gateway.store) as session:
            trial_strata = strata(session, V2, Labels((), ()))
        assert trial_strata == [Stratum(1.0, [True], [])]

    await run(tmp_path, check, live=V1, settings={"serving.silence_s": 0.5})


async def test_a_rollback_by_a_person_is_permanent(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.begin(V2, "canary", 0.3)
        await until_offered(gateway, V2)
        with read_session(gateway.store) as session:
            (trial,) = promotions.trials(session)
        models = await talk(gateway, names(0, 40))
        gateway.roll_back(V2)
        await judge(gateway, models, lambda model: model == V2)
        with write_session(gateway.store) as session:
            assert not promotions.is_newest_entry(session, trial)
        Canaries(gateway.settings, gateway.store, None).review(chain.later(20))  # type: ignore[arg-type]
        assert promotion_state(gateway, V2)[0] is PromotionState.ROLLED_BACK

    await run(tmp_path, check, live=V1, settings=STEPS)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_shadow_is_recorded_and_never_shown(tmp_path: Path, streamed: bool) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.begin(V2, "shadow")
        await until_offered(gateway, V2)
        answer = await gateway.ask(headers={"X-Traced-Conversation": "c"}, stream=streamed)
        assert V2 not in answer.text
        assert answer.headers["X-Traced-Model"] == V1
        await eventually_async(lambda: len(gateway.exchanges("c")) == 2)
        exchange_shown, shadow = sorted(gateway.exchanges("c"), key=lambda exchange: exchange.shadow_of is not None)
        assert (exchange_shown.model, exchange_shown.shadow_of) == (V1, None)
        assert (shadow.model, shadow.shadow_of, shadow.status) == (V2, exchange_shown.id, 200)
        assert "stream" not in gateway.engine.requests[-1] or gateway.engine.requests[-1]["stream"] is False
        assert (await gateway.http.post("/v1/feedback", json={"conversation_id": "c", "score": 1})).status_code == 200
        await eventually_async(lambda: len(gateway.trajectories()) == 2)
        trajectories = {exchange.model: exchange for exchange in gateway.trajectories()}
        assert (trajectories[V1].outcome, trajectories[V1].end_cause) == (Outcome.SUCCESS, EndCause.SILENCE)
        assert (trajectories[V2].outcome, trajectories[V2].end_cause) == (Outcome.UNKNOWN, EndCause.SHADOW)
        assert trajectories[V2].messages[-1]["content"] == f"signed {V2}"
        late = await gateway.http.post("/v1/feedback", json={"conversation_id": "c", "score": 0})
        assert late.json()["trajectories"] == 1
        assert {exchange.outcome for exchange in gateway.trajectories() if exchange.model == V2} == {Outcome.UNKNOWN}

        gateway.roll_back(V2)
        await until_offered(gateway, V2, is_offered=False)
        await gateway.ask(headers={"X-Traced-Conversation": "c"})
        assert gateway.engine.answers[V2] == 1

    await run(tmp_path, check, live=V1, settings={"serving.silence_s": 1.0})


async def test_shadows_never_delay_clients_and_are_skipped_under_load(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.begin(V2, "shadow")
        await until_offered(gateway, V2)
        gateway.engine.slow[V2] = 30.0
        began = time.perf_counter()
        for name in names(0, 3):
            assert text_of(await gateway.ask(headers={"X-Traced-Conversation": name})) == f"signed {V1}"
        assert time.perf_counter() - began < 5
        await eventually_async(lambda: gateway.engine.started[V2] == 1)

    await run(tmp_path, check, live=V1, settings={"promotion.shadow_requests": 1})


async def test_opted_out_conversations_have_no_shadow(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.begin(V2, "shadow")
        await until_offered(gateway, V2)
        await gateway.ask(headers={"X-Traced-Conversation": "private", "X-Traced-Record": "no"})
        await gateway.ask(headers={"X-Traced-Conversation": "c"})
        await eventually_async(lambda: gateway.exchanges("c"))
        assert gateway.engine.answers[V2] == 1
        assert gateway.exchanges("private") == []

    await run(tmp_path, check, live=V1)
