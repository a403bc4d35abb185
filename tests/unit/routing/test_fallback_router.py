"""Routers in turn: who decides, who fell out and why, how long each may take, and decisions that are only failures."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import pytest

from sandbox.contract import Task
from traced.inference.errors import EngineError
from traced.routing.routers import FallbackRouter, RoutedPolicy, RoutingDecision

TASK = Task("", [{"role": "user", "content": "Hello"}], [])


@dataclass
class Fixed:
    """A router with one answer, or one failure, after some time."""

    name: str
    answer: str | Exception
    delay_s: float = 0.0
    calls: int = 0

    async def choose(self, task: Task) -> RoutingDecision:
        self.calls += 1
        await asyncio.sleep(self.delay_s)
        if isinstance(self.answer, Exception):
            raise self.answer
        return RoutingDecision(self.answer, {self.answer: -0.1}, 0.0, router=self.name)


async def test_the_best_router_decides_and_the_others_are_not_asked() -> None:
    second = Fixed("labels", "tools@v1")
    decision = await FallbackRouter([Fixed("hidden-state", "dates@v1"), second]).choose(TASK)
    assert (decision.model, decision.router, decision.fallbacks) == ("dates@v1", "hidden-state", {})
    assert second.calls == 0


async def test_a_failure_falls_back_to_the_next_router_with_its_reason() -> None:
    routers = [Fixed("hidden-state", EngineError("down")), Fixed("labels", "tools@v1")]
    decision = await FallbackRouter(routers).choose(TASK)
    assert (decision.model, decision.router, decision.failed, decision.reason) == ("tools@v1", "labels", False, "")
    assert decision.fallbacks == {"hidden-state": "down"}


async def test_a_slow_router_leaves_time_for_the_next() -> None:
    routers = [Fixed("hidden-state", "dates@v1", delay_s=30), Fixed("labels", "tools@v1", delay_s=0.05)]
    decision = await FallbackRouter(routers, timeout_s=0.4).choose(TASK)
    assert (decision.model, decision.fallbacks) == ("tools@v1", {"hidden-state": "no decision within 0.2 s"})
    assert decision.seconds < 0.4


@pytest.mark.parametrize("excluded", [{}, {"hidden-state": "no embeddings"}])
async def test_without_any_router_the_base_serves_and_the_decision_is_a_failure(excluded: dict[str, str]) -> None:
    decision = await FallbackRouter([Fixed("labels", EngineError("down"))], excluded).choose(TASK)
    assert (decision.model, decision.router, decision.failed) == ("base", "", True)
    assert decision.reason == "; ".join(f"{name}: {text}" for name, text in (excluded | {"labels": "down"}).items())


async def test_the_base_as_a_choice_is_no_failure() -> None:
    decision = await FallbackRouter([Fixed("labels", "base")]).choose(TASK)
    assert (decision.model, decision.failed, decision.reason) == ("base", False, "")


async def test_a_defect_is_logged_and_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        decision = await FallbackRouter([Fixed("labels", ZeroDivisionError("x"))]).choose(TASK)
    assert decision.reason == "labels: a defect of traced: ZeroDivisionError"
    assert "the router labels failed" in caplog.text


async def test_a_failed_decision_is_not_kept() -> None:
    router = Fixed("labels", EngineError("down"))
    policy_of: Any = None  # nothing is completed
    policy = RoutedPolicy(policy_of, FallbackRouter([router]))
    assert (await policy.route(TASK.messages)).failed
    router.answer = "tools@v1"
    assert (await policy.route(TASK.messages)).model == "tools@v1"
