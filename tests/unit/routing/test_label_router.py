"""The router by labels: which option wins, that a conversation stays with its model, and that routing never fails."""

import asyncio
from typing import Any

import pytest

from sandbox.contract import Task
from tests.unit.routing.recording import RecordingPolicy
from traced.inference.errors import EngineError
from traced.routing.routers import LabelRouter, Route, RoutedPolicy

USER = [{"role": "user", "content": "Hi, I am C381. Please return the lamp."}]


class Scripted:
    """Stands in for the client where the router's own rules are tested: fixed label log-probs."""

    def __init__(self, answer: dict[str, float] | Exception) -> None:
        self.answer = answer
        self.prompts: list[str] = []
        self.models: list[str] = []

    async def check_labels(self, labels: list[str]) -> None:
        assert labels

    async def label_logprobs(self, prompt: str, labels: list[str], model: str) -> dict[str, float]:
        self.prompts.append(prompt)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def policy_of(self, model: str) -> Any:
        """The policy of a model, which is recorded at each completion."""
        return RecordingPolicy(self, model)


ROUTES = [Route("dates@v1", "Dates", "Work out dates.", "in 3 days"), Route("tools@v1", "Tools", "Call tools.")]
TASK = Task("policy", USER, [])


async def test_the_likeliest_label_wins() -> None:
    client: Any = Scripted({"A": -3.0, "B": -0.2, "C": -1.0})
    decision = await LabelRouter(client, ROUTES).choose(TASK)
    assert decision.model == "tools@v1"
    assert decision.logprobs == {"dates@v1": -3.0, "tools@v1": -0.2, "base": -1.0}
    assert decision.reason == ""
    assert "Task: Hi, I am C381." in client.prompts[0]


@pytest.mark.parametrize(
    ("answer", "routes", "reason"),
    [
        (EngineError("down"), ROUTES, "routing failed: down"),
        ({}, ROUTES, "no label"),
        ({"A": 0.0}, [], "no adapter"),
        ({"A": 0.0}, [ROUTES[0]] * 26, "routing failed: 26 skills"),
    ],
)
async def test_routing_never_fails_a_request(answer: Any, routes: list[Route], reason: str) -> None:
    client: Any = Scripted(answer)
    decision = await LabelRouter(client, routes).choose(TASK)
    assert decision.model == "base"
    assert decision.reason.startswith(reason)


async def test_the_first_turn_decides_for_the_whole_conversation() -> None:
    client: Any = Scripted({"A": -0.1, "C": -2.0})
    policy = RoutedPolicy(client.policy_of, LabelRouter(client, ROUTES))
    later = [*USER, {"role": "assistant", "content": "Which order?"}, {"role": "user", "content": "W4821"}]
    await asyncio.gather(*(policy.complete(USER, [], seed=s) for s in range(3)))
    client.answer = {"B": -0.1}
    await policy.complete(later, [], seed=0)
    await policy.complete([{"role": "user", "content": "Another"}], [], seed=0)
    assert client.models == ["dates@v1"] * 4 + ["tools@v1"]
    assert len(client.prompts) == 2
