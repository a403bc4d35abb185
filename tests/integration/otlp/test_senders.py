"""Spans as their senders' own packages make them, from an agent's process to trajectories in the store."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from store.types import Outcome, Trajectory
from tests.integration.gateway.place import RunningGateway, running_gateway
from tests.integration.otlp.agent import OPENING_MESSAGES, STATE, TOOL
from tests.integration.otlp.model import ANSWER, ARGUMENTS, CALL, elsewhere
from tests.waiting import eventually_async

DATA = Path(__file__).parents[2] / "data" / "otlp"
CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
SETTINGS = {"serving.silence_s": 2.0}
CONVERSATION: list[dict[str, Any]] = [
    *OPENING_MESSAGES,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": STATE},
    {"role": "assistant", "content": ANSWER},
]


async def run(tmp_path: Path, check: Callable[[RunningGateway], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async with running_gateway(tmp_path, settings={**SETTINGS, **settings}) as gateway:
        await check(gateway)


async def work(calls: str, spans: str, kind: str, **environment: str) -> list[list[dict[str, Any]]]:
    """Let the agent work; returns its histories."""
    command = [sys.executable, "-m", "tests.integration.otlp.agent", calls, spans, kind]
    agent = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **environment}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await asyncio.wait_for(agent.communicate(), timeout=60)
    assert agent.returncode == 0, errors.decode()
    assert b"Failed to export" not in errors, errors.decode()
    return [json.loads(line) for line in out.splitlines()]


async def two_trajectories(gateway: RunningGateway) -> list[Trajectory]:
    await eventually_async(lambda: len(gateway.trajectories()) == 2)
    for trajectory in gateway.trajectories():
        assert (trajectory.outcome, trajectory.task_id.startswith("otlp:")) == (Outcome.UNKNOWN, True)
        first, second = gateway.exchanges(trajectory.task_id)
        assert {first.trajectory_id, second.trajectory_id} == {trajectory.id}
        assert (first.status, second.status) == (200, 200)
    return gateway.trajectories()


@pytest.mark.parametrize(
    ("kind", "capture", "tools"),
    [
        ("openai-v2", "span_only", []),
        ("openai-v2", "event_only", []),  # a log record has the messages, and comes in a request of its own
        ("openai-v2", "span_and_event", []),
        ("openinference", "", [TOOL]),
    ],
)
async def test_an_agents_calls_become_a_trajectory_each(
    tmp_path: Path, kind: str, capture: str, tools: list[dict[str, Any]]
) -> None:
    async def check(gateway: RunningGateway) -> None:
        async with elsewhere() as model:
            histories = await work(model, gateway.url, kind, **{CAPTURE: capture})
        for trajectory in await two_trajectories(gateway):
            assert trajectory.messages == CONVERSATION
            assert (trajectory.model, trajectory.tools) == ("far-1", tools)
            exchanges = gateway.exchanges(trajectory.task_id)
            streamed = exchanges[0].response_id.endswith("True")
            assert [exchange.response_id for exchange in exchanges] == [
                f"chatcmpl-{reply}-{streamed}" for reply in ("called", "said")
            ]
            assert {exchange.prompt_tokens for exchange in exchanges} == ({0} if streamed else {5})
        assert [len(history) for history in histories] == [len(CONVERSATION)] * 2
        span_counts = (await gateway.http.get("/ready")).json()["spans"]
        assert span_counts == {"recorded": 4, "waiting": 0, "rejected": {}}

    await run(tmp_path, check)


def recorded_requests(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return content


@pytest.mark.parametrize("order", [("traces", "logs"), ("logs", "traces"), ("logs", "logs", "traces", "traces")])
async def test_messages_that_come_as_log_records_find_their_spans(tmp_path: Path, order: tuple[str, ...]) -> None:
    async def check(gateway: RunningGateway) -> None:
        requests = recorded_requests("openai-v2-2.1b0")
        for signal in order:
            assert (await gateway.http.post(f"/v1/{signal}", json=requests[signal])).status_code == 200
        for trajectory in await two_trajectories(gateway):
            tool_call, arguments = CONVERSATION[2]["tool_calls"][0], ARGUMENTS.replace(" ", "")
            call = {**tool_call, "function": {**tool_call["function"], "arguments": arguments}}
            assert trajectory.messages == [
                *CONVERSATION[:2],
                {**CONVERSATION[2], "tool_calls": [call]},
                *CONVERSATION[3:],
            ]
            assert trajectory.model == "m-1"
        assert (await gateway.http.get("/ready")).json()["spans"]["waiting"] == 0

    await run(tmp_path, check)


async def test_a_sender_without_content_gets_an_explanation(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        async with elsewhere() as model:
            await work(model, gateway.url, "openai-v2")
        waiting = await gateway.http.post("/v1/traces", json=recorded_requests("openai-v2-2.1b0-no-content")["traces"])
        assert f"4 spans wait for log records with their messages; if none arrive: {'the span'}" in waiting.text
        assert f"{CAPTURE}=span_only" in waiting.text
        bad_spans_file = tmp_path / "spool" / "damaged-otlp.jsonl"
        await eventually_async(lambda: bad_spans_file.exists() and len(bad_spans_file.read_text().splitlines()) == 8)
        whys = {json.loads(line)["why"] for line in bad_spans_file.read_text().splitlines()}
        assert [f"{CAPTURE}=span_only" in reason for reason in whys] == [True]
        ((reason, count),) = (await gateway.http.get("/ready")).json()["spans"]["rejected"].items()
        assert (reason in whys, count) == (True, 8)
        response = await gateway.http.post("/v1/logs", json=recorded_requests("openai-v2-2.1b0-no-content")["logs"])
        assert response.status_code == 200  # they wait for their spans, and go where those went
        assert gateway.trajectories() == []

    await run(tmp_path, check, **{"serving.span_wait_s": 1.0})


async def test_a_traced_call_through_the_gateway_is_recorded_once(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        await work(f"{gateway.url}/v1", gateway.url, "openai-v2", **{CAPTURE: "span_only"})
        await eventually_async(lambda: len(gateway.trajectories()) == 2)
        span_counts = (await gateway.http.get("/ready")).json()["spans"]
        assert span_counts["recorded"] == 2
        await eventually_async(lambda: not list((tmp_path / "spool").glob("exchanges-*")))
        # The two calls have the same history, which this router did not answer: each is a conversation.
        names = [trajectory.task_id for trajectory in gateway.trajectories()]
        assert [name.startswith("conv-") for name in names] == [True, True]
        assert {exchange.id[:9] for name in names for exchange in gateway.exchanges(name)} == {"exchange-"}

    await run(tmp_path, check)
