"""What the router keeps of a conversation, what becomes of it, and what feedback does."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from store.errors import StoreUnavailable
from store.types import Outcome
from tests.integration.gateway.place import USER, V1, Place, place, until
from traced.gateway import recorder
from traced.ingest import spool

SOON = {"serving.silence_s": 0}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_order", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "get_order", "parameters": {"type": "object"}}}


def run(tmp_path: Path, check: Callable[[Place], Coroutine[Any, Any, None]], **kind: Any) -> None:
    async def inside() -> None:
        async with place(tmp_path, **kind) as made:
            await check(made)

    asyncio.run(inside())


def answer_of(answer: Any) -> dict[str, Any]:
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


async def feedback(made: Place, **told: Any) -> Any:
    return await made.http.post("/v1/feedback", content=json.dumps(told))


def test_a_conversation_becomes_one_trajectory(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        first = await made.ask(tools=[TOOL])
        more = [*USER, answer_of(first), {"role": "user", "content": "Sure?"}]
        second = await made.ask(said=more, tools=[TOOL], stream=True)
        assert second.headers["X-Traced-Conversation"] == first.headers["X-Traced-Conversation"]
        await until(lambda: len(made.exchanges(first.headers["X-Traced-Conversation"])) == 2)
        assert made.trajectories() == []  # it has not been silent for long enough

    run(tmp_path, check, live=V1)

    async def later(made: Place) -> None:
        await until(made.trajectories)
        (trajectory,) = made.trajectories()
        roles = ["system", "user", "assistant", "user", "assistant"]
        assert [message["role"] for message in trajectory.messages] == roles
        assert trajectory.messages[-1]["content"] == f"signed {V1}"
        assert (trajectory.model, trajectory.tools, trajectory.outcome) == (V1, [TOOL], Outcome.UNKNOWN)
        kept = made.exchanges(trajectory.task_id)
        assert [one.body for one in kept] == [None, None]
        assert {one.trajectory_id for one in kept} == {trajectory.id}
        assert kept[0].prompt_tokens == 5

    run(tmp_path, later, settings=SOON)


def test_conversations_that_open_alike_and_go_on_apart_are_two(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        first = answer_of(await made.ask("base"))
        for word in ("Sure?", "Thanks."):
            await made.ask("base", said=[*USER, first, {"role": "user", "content": word}])
        await until(lambda: len(made.trajectories()) == 2)
        assert {one.messages[3]["content"] for one in made.trajectories()} == {"Sure?", "Thanks."}

    run(tmp_path, check, settings={"serving.silence_s": 0.5})


def test_a_conversation_that_goes_on_after_it_was_settled_counts_once(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        first = await made.ask("base", headers={"X-Traced-Conversation": "c"})
        assert (await feedback(made, response_id=first.json()["id"], score=1)).status_code == 200
        await until(made.trajectories)
        (short,) = made.trajectories()
        assert short.outcome is Outcome.SUCCESS
        more = [*USER, answer_of(first), {"role": "user", "content": "Sure?"}]
        await made.ask("base", said=more, headers={"X-Traced-Conversation": "c"})
        await until(lambda: [len(one.messages) for one in made.trajectories()] == [5])
        (long,) = made.trajectories()
        assert long.outcome is Outcome.SUCCESS  # what was said of the first answer counts for all of it
        assert len({one.trajectory_id for one in made.exchanges("c")}) == 1
        late = await feedback(made, conversation_id="c", score=0)
        assert late.json()["trajectories"] == 1
        assert [one.outcome for one in made.trajectories()] == [Outcome.FAILURE]

    run(tmp_path, check, settings=SOON)


@pytest.mark.parametrize(
    ("told", "outcome", "reward"),
    [
        ({"score": 0.75}, Outcome.SUCCESS, 0.75),
        ({"score": 0}, Outcome.FAILURE, 0.0),
        ({"label": "thumbs_down", "comment": "\x1b[31mno\ud800"}, Outcome.FAILURE, 0.0),
        ({"label": "meh"}, Outcome.UNKNOWN, 0.0),
    ],
)
def test_feedback_judges_before_and_after(
    tmp_path: Path, told: dict[str, Any], outcome: Outcome, reward: float
) -> None:
    async def check(made: Place) -> None:
        early = await made.ask("base", headers={"X-Traced-Conversation": "early"})
        taken = await feedback(made, response_id=early.json()["id"], who="Ada", **told)
        assert taken.json()["conversation_id"] == "early"
        await made.ask("base", headers={"X-Traced-Conversation": "late"})
        await until(lambda: len(made.trajectories()) == 2)
        assert (await feedback(made, conversation_id="late", **told)).status_code == 200
        assert [(one.outcome, one.reward) for one in made.trajectories()] == [(outcome, reward)] * 2
        await feedback(made, conversation_id="late", score=1)  # somebody thinks otherwise: the newest counts
        found = {one.task_id: one.outcome for one in made.trajectories()}
        assert found == {"early": outcome, "late": Outcome.SUCCESS}

    run(tmp_path, check, settings=SOON)


@pytest.mark.parametrize(
    ("told", "status", "word"),
    [
        ({}, 400, "conversation_id or response_id"),
        ({"response_id": "x"}, 400, "score, label or comment"),
        ({"response_id": "x", "score": 2}, 400, "from 0 to 1"),
        ({"response_id": "x", "score": True}, 400, "from 0 to 1"),
        ({"response_id": 7, "score": 1}, 400, "response_id is text"),
        ({"response_id": "nobody", "score": 1}, 404, "nobody"),
        ({"conversation_id": "nobody", "score": 1}, 404, "nobody"),
    ],
)
def test_feedback_that_says_nothing_is_refused(tmp_path: Path, told: dict[str, Any], status: int, word: str) -> None:
    async def check(made: Place) -> None:
        refused = await feedback(made, **told)
        assert refused.status_code == status
        assert word in refused.json()["error"]["message"]

    run(tmp_path, check)


def test_what_shall_not_be_kept_is_not(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        headers = {"X-Traced-Conversation": "private", "X-Traced-Record": "no"}
        assert (await made.ask("base", headers=headers)).status_code == 200
        for number in range(60):
            await made.ask("base", headers={"X-Traced-Conversation": f"c-{number}"})
        kept: list[int] = []
        for _ in range(50):  # until all that is stored is there
            await asyncio.sleep(0.6)
            before, kept = kept, [number for number in range(60) if made.exchanges(f"c-{number}")]
            if kept and kept == before:
                break
        assert 10 < len(kept) < 50
        assert made.exchanges("private") == []

    run(tmp_path, check, settings={"serving.record": 0.5})


def test_a_failure_of_the_machinery_is_no_trajectory_but_is_accounted_for(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        made.engine.status = 500
        await made.ask("base", headers={"X-Traced-Conversation": "c-1"})
        await until(lambda: made.exchanges("c-1"))
        await asyncio.sleep(0.6)
        (kept,) = made.exchanges("c-1")
        assert (kept.status, kept.body, kept.trajectory_id) == (500, None, None)
        assert "slow down" in kept.detail
        assert made.trajectories() == []

    run(tmp_path, check, settings=SOON)


def test_what_the_store_does_not_take_waits_in_the_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = StoreUnavailable("the store is away")

    async def check(made: Place) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(spool, "LATE_S", 0.3)
            patched.setattr(recorder, "save_exchanges", lambda *_: (_ for _ in ()).throw(away))
            for number in range(3):
                assert (await made.ask("base", headers={"X-Traced-Conversation": f"c-{number}"})).status_code == 200
            await asyncio.sleep(0.8)
            assert "files wait in" in (await made.http.get("/ready")).json()["recording"]
        await until(lambda: all(made.exchanges(f"c-{number}") for number in range(3)))
        assert (await made.http.get("/ready")).json()["recording"] == "ok"

    run(tmp_path, check)


def test_a_stream_that_speaks_of_its_own_end_is_recorded_whole(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        made.engine.words = ["data: [DONE]", " is how ", "a stream ends"]
        await made.ask("base", stream=True, headers={"X-Traced-Conversation": "c"})
        await until(lambda: made.exchanges("c"))
        (kept,) = made.exchanges("c")
        assert kept.body is not None
        assert kept.body["answer"]["content"] == "data: [DONE] is how a stream ends"

    run(tmp_path, check)
