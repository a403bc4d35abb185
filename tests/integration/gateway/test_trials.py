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
from store.records import PromotionState
from store.repositories import promotions
from store.repositories.events import due_notices, list_audit, list_events
from store.repositories.serving import find_routes
from store.types import EndCause, Outcome
from tests.integration.gateway.place import V1, V2, Place, place, until, until_offered
from tests.integration.gateway.upstream import BASE
from tests.unit.store import chain
from traced.evaluation.sequential import Arm
from traced.gateway.canaries import Canaries, strata
from traced.registry.canary import Stratum
from traced.scoring.evidence import Labels

STEPS = {"promotion.steps": [0.3, 0.6], "promotion.min_samples": 5, "promotion.margin": 0.3}
HOOK = {"notify.commands": [{"name": "tell", "argv": ["true"]}]}


def run(tmp_path: Path, check: Callable[[Place], Coroutine[Any, Any, None]], **kind: Any) -> None:
    async def inside() -> None:
        async with place(tmp_path, **kind) as made:
            await check(made)

    asyncio.run(inside())


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


async def talk(made: Place, names: list[str]) -> dict[str, str]:
    """What each conversation is answered by."""
    found = {}
    for name in names:
        found[name] = said(await made.ask(headers={"X-Traced-Conversation": name})).removeprefix("signed ")
    return found


async def judge(made: Place, answered: dict[str, str], succeeds: Callable[[str], bool]) -> None:
    """Feedback on every conversation."""
    for name, model in answered.items():
        told = {"conversation_id": name, "score": 1.0 if succeeds(model) else 0.0}
        assert (await made.http.post("/v1/feedback", json=told)).status_code == 200


def standing(made: Place, name: str) -> tuple[PromotionState, float | None]:
    with read_session(made.store) as opened:
        newest = promotions.list_promotions(opened, name)[-1]
    return newest.state, newest.share


def names(first: int, last: int) -> list[str]:
    return [f"c-{number}" for number in range(first, last)]


def test_a_canary_gets_its_share_and_keeps_what_it_got(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        made.begin(V2, "canary", 0.3)
        await until_offered(made, V2)
        answered = await talk(made, names(0, 150))
        assert 25 <= Counter(answered.values())[V2] <= 65  # 45 are expected; the ids are the same every time
        assert set(answered.values()) == {V1, V2}
        assert await talk(made, names(0, 20)) == {name: answered[name] for name in names(0, 20)}
        with read_session(made.store) as opened:
            routes = find_routes(opened, names(0, 150))
            (trial,) = promotions.trials(opened)
        assert {route.trial for route in routes.values()} == {trial.seq}
        assert {name: route.model for name, route in routes.items()} == answered
        assert said(await made.ask(V2)) == f"signed {V2}"  # by its name, whatever the share

        began = time.perf_counter()
        made.roll_back(V2)
        one = next(name for name, model in answered.items() if model == V2)
        while (await talk(made, [one]))[one] != V1:
            assert time.perf_counter() - began < 20.0  # within one second: benchmarks.versions
        assert set((await talk(made, [*answered, *names(200, 260)])).values()) == {V1}

    run(tmp_path, check, live=V1)


def test_a_restart_and_a_second_router_share_out_alike(tmp_path: Path) -> None:
    async def once(begin: bool) -> dict[str, str]:
        async with place(tmp_path) as made:
            if begin:
                made.promote(V1)
                made.begin(V2, "canary", 0.5)
            await until_offered(made, V2)
            first = await talk(made, names(0, 30))
            with write_session(made.store) as opened:  # what was decided is forgotten: the id alone says it again
                opened.connection().exec_driver_sql("DELETE FROM conversations")
            return first

    assert asyncio.run(once(True)) == asyncio.run(once(False))


def test_one_without_a_champion_shares_with_the_base_model(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        made.begin(V1, "canary", 0.5)
        await until_offered(made, V1)
        assert set((await talk(made, names(0, 40))).values()) == {V1, BASE}
        made.engine.label = "B"  # not this capability's: they take no part
        assert set((await talk(made, names(40, 60))).values()) == {BASE}
        with read_session(made.store) as opened:
            assert {route.trial for route in find_routes(opened, names(40, 60)).values()} == {None}

    run(tmp_path, check)


def test_a_canary_that_does_well_goes_on_and_live(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        made.begin(V2, "canary", 0.3)
        await until_offered(made, V2)
        await judge(made, await talk(made, names(0, 40)), lambda model: model == V2)
        await until(lambda: standing(made, V2) == (PromotionState.CANARY, 0.6))
        with read_session(made.store) as opened:
            (trial,) = promotions.trials(opened)
        number = 40
        while standing(made, V2)[0] is PromotionState.CANARY:
            assert number < 200
            await judge(made, await talk(made, names(number, number + 10)), lambda model: model == V2)
            number += 10
            await asyncio.sleep(0.3)
        assert standing(made, V2) == (PromotionState.LIVE, None)
        assert standing(made, V1)[0] is PromotionState.SUPERSEDED
        with read_session(made.store) as opened:
            told = [event.kind for event in list_events(opened) if event.kind.startswith("canary")]
            kept = [(entry.who, entry.action) for entry in list_audit(opened)]
            log = promotions.list_promotions(opened, V2)
        assert told == ["canary step", "canary promoted"]
        assert ("traced canary", "canary promoted") in kept
        assert log[-2].reason.startswith("no harm seen: ")
        assert "within 0.3 of the control" in log[-1].reason
        await until_offered(made, V1, offered=False)
        assert trial.seq > 0

    run(tmp_path, check, live=V1, settings=STEPS)


def test_a_canary_that_does_harm_is_rolled_back_and_people_are_told(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        made.begin(V2, "canary", 0.3)
        await until_offered(made, V2)
        answered = await talk(made, names(0, 60))
        await judge(made, answered, lambda model: model == V1)
        await until(lambda: standing(made, V2)[0] is PromotionState.ROLLED_BACK)
        assert standing(made, V1)[0] is PromotionState.LIVE
        await until_offered(made, V2, offered=False)
        assert set((await talk(made, list(answered))).values()) == {V1}
        with read_session(made.store) as opened:
            (notice,) = due_notices(opened, ["tell"], at=chain.later(10**6), longest_wait=chain.later(1) - chain.T0)
            reason = promotions.list_promotions(opened, V2)[-1].reason
        assert notice.body["kind"] == "canary-ended"
        assert reason.startswith("it is worse: 0 of ")

    run(tmp_path, check, live=V1, settings={**STEPS, **HOOK})


def test_what_the_base_model_answered_in_its_stead_is_not_counted_against_a_canary(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        made.begin(V2, "canary", 1.0)
        await until_offered(made, V2)
        assert await talk(made, ["whole", "broken"]) == {"whole": V2, "broken": V2}
        made.engine.refuses_loads = True
        del made.engine.adapters[V2]
        answered = await talk(made, ["broken"])
        assert answered == {"broken": BASE}
        await until(lambda: len(made.exchanges("broken")) == 2)
        await judge(made, {"whole": V2, **answered}, lambda model: model == V2)
        with read_session(made.store) as opened:
            assert find_routes(opened, ["broken"])["broken"].model == V2
            found = strata(opened, V2, Labels((), ()))
        assert found == [Stratum(1.0, Arm(1, 1), Arm(0, 0))]

    run(tmp_path, check, live=V1, settings={"serving.silence_s": 0.5})


def test_what_a_person_rolled_back_stays_back(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        made.begin(V2, "canary", 0.3)
        await until_offered(made, V2)
        with read_session(made.store) as opened:
            (trial,) = promotions.trials(opened)
        answered = await talk(made, names(0, 40))
        made.roll_back(V2)
        await judge(made, answered, lambda model: model == V2)
        with write_session(made.store) as opened:
            assert not promotions.is_newest_entry(opened, trial)
        Canaries(made.settings, made.store, None).review(chain.later(20))  # type: ignore[arg-type]
        assert standing(made, V2)[0] is PromotionState.ROLLED_BACK

    run(tmp_path, check, live=V1, settings=STEPS)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_shadow_is_recorded_and_nobody_sees_it(tmp_path: Path, streamed: bool) -> None:
    async def check(made: Place) -> None:
        made.begin(V2, "shadow")
        await until_offered(made, V2)
        answer = await made.ask(headers={"X-Traced-Conversation": "c"}, stream=streamed)
        assert V2 not in answer.text
        assert answer.headers["X-Traced-Model"] == V1
        await until(lambda: len(made.exchanges("c")) == 2)
        shown, shadow = sorted(made.exchanges("c"), key=lambda one: one.shadow_of is not None)
        assert (shown.model, shown.shadow_of) == (V1, None)
        assert (shadow.model, shadow.shadow_of, shadow.status) == (V2, shown.id, 200)
        assert "stream" not in made.engine.asked[-1] or made.engine.asked[-1]["stream"] is False
        assert (await made.http.post("/v1/feedback", json={"conversation_id": "c", "score": 1})).status_code == 200
        await until(lambda: len(made.trajectories()) == 2)
        found = {one.model: one for one in made.trajectories()}
        assert (found[V1].outcome, found[V1].end_cause) == (Outcome.SUCCESS, EndCause.SILENCE)
        assert (found[V2].outcome, found[V2].end_cause) == (Outcome.UNKNOWN, EndCause.SHADOW)
        assert found[V2].messages[-1]["content"] == f"signed {V2}"
        late = await made.http.post("/v1/feedback", json={"conversation_id": "c", "score": 0})
        assert late.json()["trajectories"] == 1
        assert {one.outcome for one in made.trajectories() if one.model == V2} == {Outcome.UNKNOWN}

        made.roll_back(V2)
        await until_offered(made, V2, offered=False)
        await made.ask(headers={"X-Traced-Conversation": "c"})
        assert made.engine.answers[V2] == 1

    run(tmp_path, check, live=V1, settings={"serving.silence_s": 1.0})


def test_a_shadow_holds_nobody_up_and_is_left_out_where_there_is_no_room(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        made.begin(V2, "shadow")
        await until_offered(made, V2)
        made.engine.slow[V2] = 30.0
        began = time.perf_counter()
        for name in names(0, 3):
            assert said(await made.ask(headers={"X-Traced-Conversation": name})) == f"signed {V1}"
        assert time.perf_counter() - began < 5
        await until(lambda: made.engine.begun[V2] == 1)

    run(tmp_path, check, live=V1, settings={"promotion.shadow_requests": 1})


def test_who_keeps_out_of_the_record_has_no_shadow(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        made.begin(V2, "shadow")
        await until_offered(made, V2)
        await made.ask(headers={"X-Traced-Conversation": "private", "X-Traced-Record": "no"})
        await made.ask(headers={"X-Traced-Conversation": "c"})
        await until(lambda: made.exchanges("c"))
        assert made.engine.answers[V2] == 1
        assert made.exchanges("private") == []

    run(tmp_path, check, live=V1)
