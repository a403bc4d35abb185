"""What the router keeps of a conversation, what becomes of it, and what feedback does."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from store.errors import StoreUnavailable
from store.types import Outcome
from tests.integration.gateway.place import USER, V1, RunningGateway, running_gateway
from tests.waiting import eventually_async
from traced.gateway import feedback as feedback_receiver
from traced.gateway import recorder
from traced.ingest import spool

NO_SILENCE = {"serving.silence_s": 0}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_order", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "get_order", "parameters": {"type": "object"}}}


async def run(tmp_path: Path, check: Callable[[RunningGateway], Coroutine[Any, Any, None]], **kind: Any) -> None:
    async with running_gateway(tmp_path, **kind) as gateway:
        await check(gateway)


def answer_of(answer: Any) -> dict[str, Any]:
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


async def feedback(gateway: RunningGateway, **body: Any) -> Any:
    return await gateway.http.post("/v1/feedback", content=json.dumps(body))


async def test_a_conversation_becomes_one_trajectory(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        first = await gateway.ask(tools=[TOOL])
        messages = [*USER, answer_of(first), {"role": "user", "content": "Sure?"}]
        second = await gateway.ask(messages=messages, tools=[TOOL], stream=True)
        assert second.headers["X-Traced-Conversation"] == first.headers["X-Traced-Conversation"]
        await eventually_async(lambda: len(gateway.exchanges(first.headers["X-Traced-Conversation"])) == 2)
        assert gateway.trajectories() == []  # it has not been silent for long enough

    await run(tmp_path, check, live=V1)

    async def later(gateway: RunningGateway) -> None:
        await eventually_async(gateway.trajectories)
        (trajectory,) = gateway.trajectories()
        roles = ["system", "user", "assistant", "user", "assistant"]
        assert [message["role"] for message in trajectory.messages] == roles
        assert trajectory.messages[-1]["content"] == f"signed {V1}"
        assert (trajectory.model, trajectory.tools, trajectory.outcome) == (V1, [TOOL], Outcome.UNKNOWN)
        exchanges = gateway.exchanges(trajectory.task_id)
        assert [exchange.body for exchange in exchanges] == [None, None]
        assert {exchange.trajectory_id for exchange in exchanges} == {trajectory.id}
        assert exchanges[0].prompt_tokens == 5

    await run(tmp_path, later, settings=NO_SILENCE)


async def test_conversations_with_the_same_opening_are_separate(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        first = answer_of(await gateway.ask("base"))
        for word in ("Sure?", "Thanks."):
            await gateway.ask("base", messages=[*USER, first, {"role": "user", "content": word}])
        await eventually_async(lambda: len(gateway.trajectories()) == 2)
        assert {trajectory.messages[3]["content"] for trajectory in gateway.trajectories()} == {"Sure?", "Thanks."}

    await run(tmp_path, check, settings={"serving.silence_s": 0.5})


async def test_a_conversation_that_goes_on_after_it_was_settled_counts_once(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        first = await gateway.ask("base", headers={"X-Traced-Conversation": "c"})
        assert (await feedback(gateway, response_id=first.json()["id"], score=1)).status_code == 200
        await eventually_async(gateway.trajectories)
        (trajectory,) = gateway.trajectories()
        assert trajectory.outcome is Outcome.SUCCESS
        messages = [*USER, answer_of(first), {"role": "user", "content": "Sure?"}]
        await gateway.ask("base", messages=messages, headers={"X-Traced-Conversation": "c"})
        await eventually_async(lambda: [len(trajectory.messages) for trajectory in gateway.trajectories()] == [5])
        (long,) = gateway.trajectories()
        assert long.outcome is Outcome.SUCCESS  # what was said of the first answer counts for all of it
        assert len({trajectory.trajectory_id for trajectory in gateway.exchanges("c")}) == 1
        late = await feedback(gateway, conversation_id="c", score=0)
        assert late.json()["trajectories"] == 1
        assert [trajectory.outcome for trajectory in gateway.trajectories()] == [Outcome.FAILURE]

    await run(tmp_path, check, settings=NO_SILENCE)


@pytest.mark.parametrize(
    ("feedback_body", "outcome", "reward"),
    [
        ({"score": 0.75}, Outcome.SUCCESS, 0.75),
        ({"score": 0}, Outcome.FAILURE, 0.0),
        ({"label": "thumbs_down", "comment": "\x1b[31mno\ud800"}, Outcome.FAILURE, 0.0),
        ({"label": "meh"}, Outcome.UNKNOWN, 0.0),
    ],
)
async def test_feedback_judges_before_and_after(
    tmp_path: Path, feedback_body: dict[str, Any], outcome: Outcome, reward: float
) -> None:
    async def check(gateway: RunningGateway) -> None:
        response = await gateway.ask("base", headers={"X-Traced-Conversation": "early"})
        feedback_response = await feedback(gateway, response_id=response.json()["id"], who="Ada", **feedback_body)
        assert feedback_response.json()["conversation_id"] == "early"
        await gateway.ask("base", headers={"X-Traced-Conversation": "late"})
        await eventually_async(lambda: len(gateway.trajectories()) == 2)
        assert (await feedback(gateway, conversation_id="late", **feedback_body)).status_code == 200
        assert [(trajectory.outcome, trajectory.reward) for trajectory in gateway.trajectories()] == [
            (outcome, reward)
        ] * 2
        await feedback(gateway, conversation_id="late", score=1)  # somebody thinks otherwise: the newest counts
        outcomes = {trajectory.task_id: trajectory.outcome for trajectory in gateway.trajectories()}
        assert outcomes == {"early": outcome, "late": Outcome.SUCCESS}

    await run(tmp_path, check, settings=NO_SILENCE)


@pytest.mark.parametrize(
    ("feedback_body", "status", "word"),
    [
        ({}, 400, "conversation_id or response_id"),
        ({"response_id": "x"}, 400, "score, label or comment"),
        ({"response_id": "x", "score": 2}, 400, "from 0 to 1"),
        ({"response_id": "x", "score": True}, 400, "from 0 to 1"),
        ({"response_id": 7, "score": 1}, 400, "response_id must be text"),
        ({"response_id": "nobody", "score": 1}, 404, "nobody"),
        ({"conversation_id": "nobody", "score": 1}, 404, "nobody"),
    ],
)
async def test_empty_feedback_is_refused(tmp_path: Path, feedback_body: dict[str, Any], status: int, word: str) -> None:
    async def check(gateway: RunningGateway) -> None:
        response = await feedback(gateway, **feedback_body)
        assert response.status_code == status
        assert word in response.json()["error"]["message"]

    await run(tmp_path, check)


async def test_opted_out_conversations_are_not_recorded(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        headers = {"X-Traced-Conversation": "private", "X-Traced-Record": "no"}
        assert (await gateway.ask("base", headers=headers)).status_code == 200
        for number in range(60):
            await gateway.ask("base", headers={"X-Traced-Conversation": f"c-{number}"})
        numbers: list[int] = []
        # Until two polls see the same exchanges: then all are stored.
        for _ in range(50):
            await asyncio.sleep(0.6)
            previous, numbers = numbers, [number for number in range(60) if gateway.exchanges(f"c-{number}")]
            if numbers and numbers == previous:
                break
        assert 10 < len(numbers) < 50
        assert gateway.exchanges("private") == []

    await run(tmp_path, check, settings={"serving.record": 0.5})


async def test_a_failure_of_the_machinery_is_no_trajectory_but_is_accounted_for(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.engine.status = 500
        await gateway.ask("base", headers={"X-Traced-Conversation": "c-1"})
        await eventually_async(lambda: gateway.exchanges("c-1"))
        await asyncio.sleep(0.6)
        (exchange,) = gateway.exchanges("c-1")
        assert (exchange.status, exchange.body, exchange.trajectory_id) == (500, None, None)
        assert "slow down" in exchange.detail
        assert gateway.trajectories() == []

    await run(tmp_path, check, settings=NO_SILENCE)


async def recording_contains(gateway: RunningGateway, text: str) -> bool:
    return text in (await gateway.http.get("/ready")).json()["recording"]


async def test_exchanges_wait_in_the_spool_without_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = StoreUnavailable("the store is away")

    async def check(gateway: RunningGateway) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(spool, "LATE_S", 0.3)
            patched.setattr(recorder, "save_exchanges", lambda *_: (_ for _ in ()).throw(away))
            for number in range(3):
                assert (await gateway.ask("base", headers={"X-Traced-Conversation": f"c-{number}"})).status_code == 200
            await eventually_async(lambda: recording_contains(gateway, "files wait in"))
        await eventually_async(lambda: all(gateway.exchanges(f"c-{number}") for number in range(3)))
        await eventually_async(lambda: recording_contains(gateway, "ok"))

    await run(tmp_path, check)


async def test_feedback_waits_for_a_late_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = StoreUnavailable("the store is away")
    monkeypatch.setattr(feedback_receiver, "PATIENCE_S", 0.2)

    async def check(gateway: RunningGateway) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(recorder, "save_exchanges", lambda *_: (_ for _ in ()).throw(away))
            response = await gateway.ask("base", headers={"X-Traced-Conversation": "c"})
            with monkeypatch.context() as impatient:
                impatient.setattr(feedback_receiver, "RECORDER_PATIENCE_S", 0.4)
                late = await feedback(gateway, conversation_id="c", score=1)
            assert (late.status_code, late.headers["Retry-After"]) == (503, "5")
            waiting = asyncio.ensure_future(feedback(gateway, response_id=response.json()["id"], score=1))
            unknown = asyncio.ensure_future(feedback(gateway, conversation_id="other", score=1))
            await asyncio.sleep(1)
            assert not waiting.done()
            assert not unknown.done()
        assert (await waiting).json()["conversation_id"] == "c"
        assert (await unknown).status_code == 404
        await eventually_async(lambda: not spool.queued_files(tmp_path / "spool"))
        assert (await feedback(gateway, conversation_id="other", score=1)).status_code == 404

    await run(tmp_path, check)


async def test_a_stream_that_speaks_of_its_own_end_is_recorded_whole(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.engine.words = ["data: [DONE]", " is how ", "a stream ends"]
        await gateway.ask("base", stream=True, headers={"X-Traced-Conversation": "c"})
        await eventually_async(lambda: gateway.exchanges("c"))
        (exchange,) = gateway.exchanges("c")
        assert exchange.body is not None
        assert exchange.body["answer"]["content"] == "data: [DONE] is how a stream ends"

    await run(tmp_path, check)
