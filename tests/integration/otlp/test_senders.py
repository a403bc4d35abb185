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
from tests.integration.gateway.place import Place, place, until
from tests.integration.otlp.agent import OPENING, STATE, TOOL
from tests.integration.otlp.model import ARGUMENTS, CALL, SAID, elsewhere

DATA = Path(__file__).parents[2] / "data" / "otlp"
CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
SOON = {"serving.silence_s": 2.0}
WHOLE = [
    *OPENING,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": STATE},
    {"role": "assistant", "content": SAID},
]


def run(tmp_path: Path, check: Callable[[Place], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def inside() -> None:
        async with place(tmp_path, settings={**SOON, **settings}) as made:
            await check(made)

    asyncio.run(inside())


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


async def two_trajectories(made: Place) -> list[Trajectory]:
    await until(lambda: len(made.trajectories()) == 2)
    for one in made.trajectories():
        assert (one.outcome, one.task_id.startswith("otlp:")) == (Outcome.UNKNOWN, True)
        first, second = made.exchanges(one.task_id)
        assert {first.trajectory_id, second.trajectory_id} == {one.id}
        assert (first.status, second.status) == (200, 200)
    return made.trajectories()


@pytest.mark.parametrize(
    ("kind", "capture", "tools"),
    [
        ("openai-v2", "span_only", []),
        ("openai-v2", "event_only", []),  # a log record has the messages, and comes in a request of its own
        ("openai-v2", "span_and_event", []),
        ("openinference", "", [TOOL]),
    ],
)
def test_an_agents_calls_become_a_trajectory_each(
    tmp_path: Path, kind: str, capture: str, tools: list[dict[str, Any]]
) -> None:
    async def check(made: Place) -> None:
        async with elsewhere() as model:
            histories = await work(model, made.url, kind, **{CAPTURE: capture})
        for one in await two_trajectories(made):
            assert one.messages == WHOLE
            assert (one.model, one.tools) == ("far-1", tools)
            exchanges = made.exchanges(one.task_id)
            streamed = exchanges[0].response_id.endswith("True")
            assert [each.response_id for each in exchanges] == [
                f"chatcmpl-{what}-{streamed}" for what in ("called", "said")
            ]
            assert {each.prompt_tokens for each in exchanges} == ({0} if streamed else {5})
        assert [len(history) for history in histories] == [len(WHOLE)] * 2
        told = (await made.http.get("/ready")).json()["spans"]
        assert told == {"recorded": 4, "waiting": 0, "rejected": {}}

    run(tmp_path, check)


def recorded(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return read


@pytest.mark.parametrize("order", [("traces", "logs"), ("logs", "traces"), ("logs", "logs", "traces", "traces")])
def test_messages_that_come_as_log_records_find_their_spans(tmp_path: Path, order: tuple[str, ...]) -> None:
    async def check(made: Place) -> None:
        sent = recorded("openai-v2-2.1b0")
        for signal in order:
            assert (await made.http.post(f"/v1/{signal}", json=sent[signal])).status_code == 200
        for one in await two_trajectories(made):
            said, arguments = WHOLE[2]["tool_calls"][0], ARGUMENTS.replace(" ", "")
            call = {**said, "function": {**said["function"], "arguments": arguments}}
            assert one.messages == [*WHOLE[:2], {**WHOLE[2], "tool_calls": [call]}, *WHOLE[3:]]
            assert one.model == "m-1"
        assert (await made.http.get("/ready")).json()["spans"]["waiting"] == 0

    run(tmp_path, check)


def test_a_sender_that_captures_no_content_is_told_so(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        async with elsewhere() as model:
            await work(model, made.url, "openai-v2")
        waiting = await made.http.post("/v1/traces", json=recorded("openai-v2-2.1b0-no-content")["traces"])
        assert f"4 wait for log records with their messages; if none come: {'the span'}" in waiting.text
        assert f"{CAPTURE}=span_only" in waiting.text
        aside = tmp_path / "spool" / "damaged-otlp.jsonl"
        await until(lambda: aside.exists() and len(aside.read_text().splitlines()) == 8)
        whys = {json.loads(line)["why"] for line in aside.read_text().splitlines()}
        assert [f"{CAPTURE}=span_only" in why for why in whys] == [True]
        ((why, count),) = (await made.http.get("/ready")).json()["spans"]["rejected"].items()
        assert (why in whys, count) == (True, 8)
        refused = await made.http.post("/v1/logs", json=recorded("openai-v2-2.1b0-no-content")["logs"])
        assert refused.status_code == 200  # they wait for their spans, and go where those went
        assert made.trajectories() == []

    run(tmp_path, check, **{"serving.span_wait_s": 1.0})


def test_a_call_that_goes_through_the_router_too_is_recorded_once(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        await work(f"{made.url}/v1", made.url, "openai-v2", **{CAPTURE: "span_only"})
        await until(lambda: made.trajectories())
        told = (await made.http.get("/ready")).json()["spans"]
        assert told["recorded"] == 2
        await until(lambda: not list((tmp_path / "spool").glob("exchanges-*")))
        (one,) = made.trajectories()  # both histories are alike
        assert one.task_id.startswith("opening-")
        assert {each.id[:9] for each in made.exchanges(one.task_id)} == {"exchange-"}

    run(tmp_path, check)
