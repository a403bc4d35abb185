"""Label tokens at every engine: many adapters in rounds, the same choice everywhere, options from the prefix cache."""

import math
import re
from dataclasses import replace

import httpx
import pytest

from benchmarks.engines.signed_adapters import questions
from sandbox.contract import Task
from tests.integration.engines.conftest import LENGTH, Deployment
from traced.inference.client import EngineClient
from traced.inference.routing_prompt import LABELS
from traced.routing.label_router import LabelRouter
from traced.routing.preflight import check_engine
from traced.routing.routers import Route, RoutingDecision

COUNT = 50
TASKS = [Task("", messages, []) for messages in questions(3, seed=5)]
HITS = re.compile(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", re.MULTILINE)
# The first kind's decisions, with which those of the others are compared.
EXPECTED: list[RoutingDecision] = []


def routes() -> list[Route]:
    """Adapters for a product each."""
    things = ["lamp", "mug", "chair", "kettle", "stool", "clock", "desk", "shelf", "rug", "vase"]
    verbs = ["return", "cancel", "pay for", "change", "track"]
    kinds = [(verb, thing) for verb in verbs for thing in things]
    return [
        Route(
            f"skill-{n}@v1", f"{verb} a {thing}".capitalize(), f"Helps to {verb} it.", f"I want to {verb} the {thing}"
        )
        for n, (verb, thing) in enumerate(kinds)
    ]


def shares(decision: RoutingDecision) -> dict[str, float]:
    """The probabilities among the options of the last round."""
    total = sum(map(math.exp, decision.logprobs.values()))
    return {name: math.exp(logprob) / total for name, logprob in decision.logprobs.items()}


async def test_the_preflight_tells_what_an_engine_offers(deployment: Deployment) -> None:
    async with EngineClient(deployment.engine, base=deployment.base) as client:
        preflight = await check_engine(client)
        assert len(await client.label_ids(LABELS)) == len(LABELS)
    assert (preflight.label_problem, preflight.context) == ("", LENGTH)
    if deployment.kind == "embedded":
        assert preflight.embeddings is not None
        assert len(preflight.embeddings.probe) == 256
    else:
        assert preflight.embeddings is None
        assert preflight.embeddings_problem == f"{deployment.engine} has no embeddings (POST /v1/embeddings: 404)"


async def test_fifty_adapters_are_decided_alike_by_every_engine(deployment: Deployment) -> None:
    async with EngineClient(deployment.engine, base=deployment.base) as client:
        router = LabelRouter(client, routes())
        decisions = [await router.choose(task) for task in TASKS]
        if not EXPECTED:
            EXPECTED.extend(decisions)
        for decision, expected in zip(decisions, EXPECTED, strict=True):
            assert decision.model == expected.model
            assert shares(decision) == pytest.approx(shares(expected), abs=2e-3)


async def test_the_options_of_a_second_decision_come_from_the_prefix_cache(deployment: Deployment) -> None:
    if deployment.kind == "embedded":
        return  # it has no metrics

    def hits() -> float:
        metrics = httpx.get(f"{deployment.engine}/metrics", trust_env=False).text
        return sum(float(match) for match in HITS.findall(metrics))

    async with EngineClient(deployment.engine, base=deployment.base) as client:
        router = LabelRouter(client, [replace(route, description="Moves the goods. " * 12) for route in routes()[:6]])
        await router.choose(TASKS[0])
        (prompt,) = router._prompts.values()
        options = len(await client.token_ids(prompt.prefix))
        first_hits = hits()
        await router.choose(TASKS[1])
        # The cache holds whole blocks, of at most 128 tokens.
        assert options > 256
        assert hits() - first_hits >= options - 128
