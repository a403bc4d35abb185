"""Which router decides at which engine, what /ready tells of it, and an embeddings server that comes and goes."""

import logging
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.routing.test_hidden_state_router import CLASSIFIER, IDENTITY
from traced.gateway.engines import Pool, Replica
from traced.gateway.live_versions import LiveVersions
from traced.gateway.router_choice import EmbeddingsServer, RouterChoice
from traced.inference.errors import EngineError
from traced.routing.composition import Composition
from traced.routing.preflight import EnginePreflight
from traced.routing.routers import Route

DATES = "dates@v1"
USER = [{"role": "user", "content": "Pick it up in 3 days."}]
NO_EMBEDDINGS = "http://h has no embeddings (POST /v1/embeddings: 404)"
WITH_EMBEDDINGS = EnginePreflight(IDENTITY, "", "", 4096)
WITHOUT_EMBEDDINGS = EnginePreflight(None, NO_EMBEDDINGS, "", 4096)


class Engine:
    """Stands in for the client of an engine: fixed embeddings, and the label of the first adapter."""

    def __init__(self) -> None:
        self.url = "http://h"
        self.base = "base"
        self.embedding: list[float] | Exception = [3.0, 0.1, 1.0]
        self.prepared = self.request_count = 0

    async def embeddings(self, texts: list[str], model: str) -> list[list[float]]:
        if isinstance(self.embedding, Exception):
            raise self.embedding
        return [self.embedding for _ in texts]

    async def label_ids(self, labels: str) -> dict[str, int]:
        self.prepared += 1
        return {label: ord(label) for label in labels}

    async def token_ids(self, text: str) -> list[int]:
        return [0]

    async def label_logprobs(self, *args: Any) -> dict[str, float]:
        self.request_count += 1
        return {"A": -0.1, "B": -3.0}

    async def models(self) -> list[str]:
        return ["encoder"]


def choice(preflight: EnginePreflight | None, **options: Any) -> RouterChoice:
    client: Any = Engine()
    replica = Replica(client, healthy=True, loaded={DATES}, preflight=preflight)
    live = LiveVersions(1, {DATES: Route(DATES, "Dates", "Work out dates.")}, classifier=CLASSIFIER)
    return RouterChoice(Pool([replica], 8), lambda: live, 2.0, use_label_tokens=False, **options)


async def decided_by(choice: RouterChoice, live: LiveVersions | None = None) -> tuple[str, dict[str, str]]:
    decision = await choice.choose("c-1", USER, live or choice.live())
    assert decision.model == (DATES if decision.router else "base")
    assert decision.failed == (not decision.router)
    return decision.router, dict(decision.fallbacks)


async def test_the_classifier_decides_where_the_engine_has_its_embeddings() -> None:
    routers = choice(WITH_EMBEDDINGS)
    assert await decided_by(routers) == ("hidden-state", {})
    assert routers.status() == {"http://h": {"router": "hidden-state"}}


async def test_label_tokens_decide_where_it_has_none_and_the_setting_is_named() -> None:
    routers = choice(WITHOUT_EMBEDDINGS)
    reason = f"{NO_EMBEDDINGS}; set routing.embeddings_url to the URL of an embeddings server"
    assert await decided_by(routers) == ("labels", {"hidden-state": reason})
    assert routers.status() == {"http://h": {"router": "labels", "excluded": {"hidden-state": reason}}}


async def test_other_embeddings_than_those_of_the_fit_do_not_decide() -> None:
    other = replace(IDENTITY, probe=[9.0, 9.0, 9.0])
    router, fallbacks = await decided_by(choice(replace(WITH_EMBEDDINGS, embeddings=other)))
    assert router == "labels"
    assert fallbacks["hidden-state"].startswith("the classifier was fitted on embeddings of base, not of base (size 3)")


async def test_a_failure_at_a_request_falls_back_to_label_tokens(caplog: pytest.LogCaptureFixture) -> None:
    routers = choice(WITH_EMBEDDINGS)
    client: Any = routers.pool.replicas[0].client
    client.embedding = EngineError("down")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert await decided_by(routers) == ("labels", {"hidden-state": "down"})
    assert caplog.text.count("routing fell back to labels: {'hidden-state': 'down'}") == 1


async def test_the_setting_of_label_tokens_asks_for_no_embeddings() -> None:
    routers = choice(WITH_EMBEDDINGS)
    routers.use_label_tokens = True
    assert await decided_by(routers) == ("labels", {})


async def test_a_composition_of_one_model_asks_no_router() -> None:
    routers = choice(None)
    live = replace(routers.live(), composition=Composition((DATES,)))
    routers.live = lambda: live
    assert await decided_by(routers) == ("one model", {})
    assert routers.status() == {"http://h": {"router": "one model"}}
    routers.pool.replicas[0].loaded = set()
    decision = await routers.choose("c-1", USER, live)
    assert (decision.model, decision.failed, decision.reason) == ("base", True, f"no engine has loaded {DATES}")


async def test_what_the_router_leaves_to_the_base_model_goes_to_the_merged_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def base_is_likelier(self: Engine, *args: Any) -> dict[str, float]:
        return {"A": -3.0, "B": -0.1}

    monkeypatch.setattr(Engine, "label_logprobs", base_is_likelier)
    routers = choice(None)
    routers.pool.replicas[0].preflight = WITHOUT_EMBEDDINGS
    live = replace(routers.live(), composition=Composition((DATES, "merged@v1"), "labels", default="merged@v1"))
    models = []
    for loaded in ({DATES}, {DATES, "merged@v1"}):
        routers.pool.replicas[0].loaded = loaded
        models.append((await routers.choose("c-1", USER, live)).model)
    assert models == ["base", "merged@v1"]


async def test_a_class_of_a_version_that_was_rolled_back_goes_to_the_merged_version() -> None:
    """The classifier was fitted with tools, and the live system of before has a merged version for the rest."""
    routers = choice(WITH_EMBEDDINGS)
    routers.pool.replicas[0].loaded = {DATES, "merged@v1"}
    client: Any = routers.pool.replicas[0].client
    client.embedding = [0.1, 3.0, 1.0]
    assert (await routers.choose("c-1", USER, routers.live())).model == "tools@v1"
    composition = Composition((DATES, "merged@v1"), "hidden-state", default="merged@v1")
    live = replace(routers.live(), composition=composition)
    assert (await routers.choose("c-1", USER, live)).model == "merged@v1"


@pytest.mark.parametrize(("router", "setting"), [("labels", False), ("hidden-state", True)])
async def test_the_router_of_a_composition_comes_before_the_setting(router: str, setting: bool) -> None:
    routers = choice(WITH_EMBEDDINGS)
    routers.use_label_tokens = setting
    live = replace(routers.live(), composition=Composition((DATES,), router))
    assert await decided_by(routers, live) == (router, {})


@pytest.mark.parametrize(
    ("preflight", "words"),
    [
        (None, "http://h was not checked yet"),
        (replace(WITHOUT_EMBEDDINGS, label_problem="label 'A' is no token"), "no token"),
    ],
)
async def test_without_any_router_the_base_serves_and_the_decision_is_a_failure(
    preflight: EnginePreflight | None, words: str
) -> None:
    routers = choice(preflight)
    router, fallbacks = await decided_by(routers)
    assert (router, set(fallbacks)) == ("", {"hidden-state", "labels"})
    assert words in fallbacks["labels"]
    status: Any = routers.status()
    assert status["http://h"]["router"] == "base"


async def test_no_engine_and_no_loaded_adapter_are_failures() -> None:
    routers = choice(WITH_EMBEDDINGS)
    replica = routers.pool.replicas[0]
    replica.loaded.clear()
    assert (await decided_by(routers))[1]["labels"] == "no engine has loaded a live adapter"
    replica.mark_failed("killed")
    assert replica.preflight is None  # another engine may come back
    decision = await routers.choose("c-1", USER, routers.live())
    assert (decision.failed, decision.reason) == (True, "no engine answers")


async def test_prompts_are_prepared_once_per_engine_and_set_of_adapters() -> None:
    routers = choice(WITHOUT_EMBEDDINGS)
    client: Any = routers.pool.replicas[0].client
    for _ in range(3):
        await decided_by(routers)
    assert client.prepared == 1
    routers.pool.replicas[0].preflight = replace(WITHOUT_EMBEDDINGS)  # the engine was lost and is back
    await decided_by(routers)
    assert client.prepared == 2


async def test_options_are_prepared_before_the_first_conversation() -> None:
    routers = choice(WITH_EMBEDDINGS)
    client: Any = routers.pool.replicas[0].client
    for _ in range(2):
        await routers.refresh()
    assert (client.prepared, client.request_count) == (1, 1)
    client.embedding = EngineError("down")
    assert (await decided_by(routers))[0] == "labels"
    assert (client.prepared, client.request_count) == (1, 2)


async def test_the_server_beside_decides_even_if_the_engine_has_embeddings(caplog: pytest.LogCaptureFixture) -> None:
    client: Any = Engine()
    client.url = "http://beside"
    routers = choice(WITH_EMBEDDINGS, server=EmbeddingsServer(client, ""))
    assert routers.server is not None
    assert await decided_by(routers) == ("labels", {"hidden-state": "not checked yet"})
    await routers.refresh()
    assert await decided_by(routers) == ("hidden-state", {})
    client.embedding = EngineError("no answer")
    with caplog.at_level(logging.WARNING):
        await routers.refresh()
        await routers.refresh()
    assert caplog.text.count("routing.embeddings_url: no answer") == 1
    assert await decided_by(routers) == ("labels", {"hidden-state": "no answer"})


async def test_without_a_classifier_the_reason_is_that_of_the_live_versions() -> None:
    routers = choice(WITH_EMBEDDINGS)
    live = replace(routers.live(), classifier=None, classifier_problem="no classifier was fitted")
    assert await decided_by(routers, live) == ("labels", {"hidden-state": "no classifier was fitted"})
