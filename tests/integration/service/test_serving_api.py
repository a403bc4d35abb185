"""Serving through the control API: models, a canary, the router's own word, decisions, conversations."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from store.database import write_session
from store.records import ConversationRoute, Exchange, Feedback, Promotion, PromotionState
from store.repositories import adapters, gates, promotions, serving
from tests.integration.gateway.place import running_gateway
from tests.integration.service.api_server import READER, expect_refusal, on_tcp, serve_api
from tests.unit.store.chain import CYCLE, T0, adapter, approval, later
from traced.api.control import Control
from traced.api.routes import serving as serving_views
from traced.client import Client
from traced.client.serving import Arm, ModelView
from traced.ingest.losses import LINES, LossLedger

NOW = T0 + timedelta(days=1)  # first time of the control's clock
V1, V2 = "date-reasoning@v1", "date-reasoning@v2"


async def ask(control: Control, path: Path, check: Callable[[Client], Awaitable[None]]) -> None:
    async with serve_api(control, path) as client:
        await check(client)


def by_name(models: list[ModelView]) -> dict[str, ModelView]:
    return {model.name: model for model in models}


def save_judged_conversations(store: Engine, model: str, trial: int, scores: list[float]) -> None:
    """Save one conversation of a trial, with customer feedback, for each score."""
    with write_session(store) as session:
        for number, score in enumerate(scores):
            key = f"{model}-{trial}-{number}"
            serving.save_routes(session, [ConversationRoute(key, model, {}, 0.01, "", NOW, trial)])
            serving.save_exchanges(session, [Exchange(f"e-{key}", key, NOW, model, 200, 0.5)])
            serving.save_feedback(session, Feedback(key, NOW, score=score, who="customer"))


def begin_canary(store: Engine, *shares: float) -> list[int]:
    """Put version 2 on trial beside the live version 1 and return the numbers of its promotion entries."""
    with write_session(store) as session:
        adapters.save_adapter(session, adapter(2))
        gates.save_approval(session, approval(V2))
        for share in shares:
            canary = Promotion(V2, PromotionState.CANARY, "Ada", NOW - timedelta(hours=1), "try it", share=share)
            promotions.put_on_trial(session, canary)
        return list(promotions.canary_shares(session, V2))


async def test_the_models_and_their_traffic(control: Control, store: Engine, path: Path) -> None:
    recent = NOW - timedelta(minutes=5)
    with write_session(store) as session:
        exchanges = [Exchange("a", "c-1", recent, "base", 200, 1.5), Exchange("b", "c-2", recent, "gpt-9", 429, 0.1)]
        serving.save_exchanges(session, exchanges)
        for number, (score, label, author) in enumerate([(1.0, "", "x"), (None, "bad", "x"), (None, "?", "x")]):
            feedback = Feedback("c-1", recent, score=score, label=label, who=author, comment=str(number))
            serving.save_feedback(session, feedback)
        serving.save_feedback(session, Feedback("c-1", recent, label="success", score=1.0, who="rules:1"))

    async def check(client: Client) -> None:
        response = await client.serving.models()
        assert [(model.name, model.state) for model in response.models] == [
            ("base", "base"),
            (V1, "live"),
            ("gpt-9", "other"),
        ]
        models = by_name(response.models)
        base = models["base"]
        assert (base.hour, base.day, base.p50_s, base.p99_s, base.failures) == (1, 1, 1.5, 1.5, {})
        assert (base.liked, base.disliked, base.remarks) == (1, 1, 1)  # labels by rules are not counted
        assert base.of_day == pytest.approx(1 / 3)
        assert models["gpt-9"].failures == {429: 1}
        live = models[V1]
        assert (base.base_model, live.base_model) == ("", CYCLE.model)
        assert (live.who, live.brought_back, live.canary) == ("Ada", "base", None)
        assert not response.partial

    await ask(control, path, check)


async def test_a_canary_with_what_its_evidence_says(control: Control, store: Engine, path: Path) -> None:
    first, second = begin_canary(store, 0.05, 0.25)
    save_judged_conversations(store, V2, first, [1.0] * 30)
    save_judged_conversations(store, V1, first, [0.0] * 190)
    save_judged_conversations(store, V2, second, [1.0, 0.0])

    async def check(client: Client) -> None:
        model = by_name((await client.serving.models()).models)[V2]
        canary = model.canary
        assert canary is not None
        assert (model.state, model.share, model.brought_back, canary.control) == ("canary", 0.25, V1, V1)
        assert [(step.share, step.state) for step in canary.steps] == [(0.05, "done"), (0.25, "now"), (0.5, "next")]
        assert canary.steps[0].challenger == Arm(judged=30, successes=30)
        assert canary.steps[0].control == Arm(judged=190, successes=0)
        assert canary.steps[1].challenger == Arm(judged=2, successes=1)
        assert canary.harm is not None
        assert canary.fine is not None
        assert canary.harm < 0 < canary.enough < canary.fine
        assert (canary.conversations, canary.verdict, canary.needed) == (222, "wait", 30)
        await client.roll_back(V2, "enough seen")
        rolled_back = by_name((await client.serving.models()).models)[V2]
        assert (rolled_back.state, rolled_back.reason, rolled_back.canary, rolled_back.brought_back) == (
            "rolled_back",
            "enough seen",
            None,
            "",
        )

    await ask(control, path, check)


async def test_a_canary_of_very_many_conversations_is_left_to_the_router(
    control: Control, store: Engine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_views, "MOST_IN_TRIAL", 3)
    (trial,) = begin_canary(store, 0.25)
    save_judged_conversations(store, V2, trial, [1.0] * 4)

    async def check(client: Client) -> None:
        canary = by_name((await client.serving.models()).models)[V2].canary
        assert canary is not None
        assert (canary.uncounted, canary.harm, canary.fine, canary.conversations) == (True, None, None, 4)
        assert [(step.share, step.state) for step in canary.steps] == [(0.25, "now"), (0.5, "next")]

    await ask(control, path, check)


async def test_decisions_page_by_page(control: Control, store: Engine, path: Path) -> None:
    with write_session(store) as session:
        odd = ConversationRoute("odd", "base", {"base": float("-inf")}, 2.0, "why" * 1000, later(99))
        routes = [ConversationRoute(f"c-{number}", "base", {"base": -0.1}, 0.01, "", later(10)) for number in range(5)]
        serving.save_routes(session, [*routes, odd])

    async def check(client: Client) -> None:
        page = await client.serving.decisions(limit=3)
        assert [decision.id for decision in page.decisions] == ["odd", "c-4", "c-3"]
        assert page.decisions[0].logprobs == {"base": None}
        assert len(page.decisions[0].why) == serving_views.TEXT
        behind = await client.serving.decisions(limit=100, before=page.next)
        assert [decision.id for decision in behind.decisions] == ["c-2", "c-1", "c-0", "conv-1"]
        assert behind.next is None
        assert [decision.id for decision in (await client.serving.decisions(model=V1)).decisions] == ["conv-1"]
        assert (await expect_refusal(client.serving.decisions(before="1; DROP TABLE"))).status == 404

    await ask(control, path, check)


async def test_one_conversation(control: Control, store: Engine, path: Path) -> None:
    with write_session(store) as session:
        exchanges = [Exchange(f"m-{number:03d}", "many/..?", later(number), "base", 200, 0.1) for number in range(205)]
        serving.save_exchanges(session, [replace(exchange, detail="x" * 9000) for exchange in exchanges])

    async def check(client: Client) -> None:
        conversation = await client.serving.conversation("conv-1")
        assert conversation.decision is not None
        assert conversation.decision.model == V1
        assert [exchange.id for exchange in conversation.exchanges] == ["exchange-1"]
        assert [(feedback.who, feedback.comment) for feedback in conversation.feedback] == [("Ada", "so so")]
        assert (conversation.trajectories, conversation.left_out) == ([], 0)
        long = await client.serving.conversation("many/..?")
        assert (long.decision, len(long.exchanges), long.left_out) == (None, serving_views.MAX_RECORDS, 5)
        assert long.exchanges[-1].id == "m-204"
        assert len(long.exchanges[0].detail) == serving_views.TEXT
        assert (await expect_refusal(client.serving.conversation("nobody"))).status == 404

    await ask(control, path, check)


async def test_the_router_that_is_not_there(control: Control, path: Path) -> None:
    spool = control.settings.data_dir / "spool"
    spool.mkdir()
    (spool / "exchanges-1-1.jsonl").write_text("x")
    LossLedger(spool).note(LINES, "kept", 2)
    serving_settings = control.settings.serving.model_copy(update={"port": 9})
    control.settings = control.settings.model_copy(update={"serving": serving_settings})

    async def check(client: Client) -> None:
        health = await client.serving.router()
        assert (health.state, health.expected, health.engines) == ("away", False, {})
        assert "refused" in health.trouble
        assert (health.waiting_files, health.damaged) == (1, 2)
        assert health.losses.startswith("2 unreadable recorded exchanges, the last at ")
        assert health.decided_by.startswith("label tokens; no classifier was fitted")

    await ask(control, path, check)


async def test_the_router_says_how_its_engines_are(control: Control, path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "router"
    folder.mkdir()
    async with running_gateway(folder, engines=2) as router, serve_api(control, path) as client:
        port = int(router.url.rpartition(":")[2])
        serving_settings = control.settings.serving.model_copy(update={"port": port})
        control.settings = control.settings.model_copy(update={"serving": serving_settings})
        health = await client.serving.router()
        assert (health.state, health.address, health.trouble) == ("ready", router.url, "")
        assert health.engines == {engine.url: "ok" for engine in router.engines}


async def test_a_reader_may_look_and_not_roll_back(control: Control) -> None:
    async with on_tcp(control, READER) as client:
        assert (await client.serving.models()).models[1].name == V1
        assert (await expect_refusal(client.roll_back(V1, "no"))).status == 403
        assert by_name((await client.serving.models()).models)[V1].state == "live"
