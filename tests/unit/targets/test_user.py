"""A user that is a model: what it says is kept, what it does wrong is the simulator's fault, and it may be away."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from store.repositories.llm_replies import list_replies, stage_costs
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import EndCause, Outcome, Trajectory
from tests.scripted_model import Scripted, ScriptedReply, Status, Text, Truncated, scripted_server
from tests.unit.pipeline.contexts import context_with_chain
from tests.unit.targets.test_process import Words
from tests.unit.targets.worlds import Secretive
from traced.core.errors import StageError
from traced.pipeline.context import Context
from traced.pipeline.episodes import episodes
from traced.processes.job import FaultAttribution, JobOutcome, attribute_fault, describe
from traced.rollouts.episodes import EpisodeJob
from traced.targets.errors import UserUnavailable

WORLDS = Path(__file__).with_name("worlds.py")


def overrides(server: Scripted, world: str = "WithUser", **user: Any) -> dict[str, object]:
    model = {"model": "scripted", "base_url": server.url, "patience_s": 0.1, "prompt_price": 2.0, **user}
    table = {"name": "asking", "kind": "python", "factory": f"{WORLDS}:{world}"}
    return {f"target.{key}": value for key, value in table.items()} | {
        f"target.user.{key}": value for key, value in model.items()
    }


async def play(context: Context, *trials: int, model: str = "base") -> list[Trajectory]:
    jobs = [EpisodeJob(5, trial, "train", "5") for trial in trials]
    async with context.target_source() as source:
        return await episodes(context, source, jobs, Words("Which one?"), model=model, temperature=1.0)


async def test_its_replies_are_kept_counted_and_played_again(tmp_path: Path) -> None:
    texts = {0: "Hello, a word please.", 1: "STOP"}

    def answer(body: dict[str, Any], nth: int) -> ScriptedReply:
        return texts[sum(message["role"] == "assistant" for message in body["messages"])]

    with scripted_server(answer) as server, context_with_chain(tmp_path, overrides(server, temperature=0.4)) as context:
        first, second = await play(context, 0, 1)
        assert [message["content"] for message in first.messages[1:]] == ["Hi!", texts[0], "Which one?", "STOP"]
        assert [message["role"] for message in first.messages[1:]] == ["assistant", "user", "assistant", "user"]
        assert second.end_cause is EndCause.DONE
        # Each trial has requests of its own.
        assert len(server.requests) == 4
        body = server.requests[0]
        assert (body["model"], body["temperature"], body["messages"][0]["content"]) == (
            "scripted",
            0.4,
            "You want word-5.",
        )
        with context.read_session() as session:
            (cost,) = [cost for cost in stage_costs(session, "c1") if cost.stage == "user"]
            replies = list_replies(session, "c1", stage="user")
        assert (cost.calls, cost.prompt_tokens) == (4, 44)
        assert cost.cost == pytest.approx(44 * 2.0 / 1e6)
        assert sorted(reply.text for reply in replies) == ["Hello, a word please."] * 2 + ["STOP"] * 2
        # Another agent that says the same hears the same, and the server is not asked.
        (repeated,) = await play(context, 0, model="other")
        assert repeated.messages == first.messages
        assert len(server.requests) == 4


async def test_a_message_that_cannot_be_used_is_asked_for_again(tmp_path: Path) -> None:
    answers = iter(["How can I help you today?", "Hello, a word please.", "STOP"])
    with (
        scripted_server(lambda body, nth: next(answers)) as server,
        context_with_chain(tmp_path, overrides(server)) as context,
    ):
        (trajectory,) = await play(context, 0)
        assert trajectory.messages[2]["content"] == "Hello, a word please."
        assert [body["temperature"] for body in server.requests] == [0.0, 0.7, 0.0]


async def test_a_user_that_says_nothing_usable_is_the_simulators_fault(tmp_path: Path) -> None:
    with scripted_server(lambda body, nth: "As an AI language model I cannot.") as server:
        with (
            context_with_chain(tmp_path, overrides(server)) as context,
            pytest.raises(Exception, match="simulator_error"),
        ):
            await play(context, 0)
        with context.read_session() as session:
            (trajectory,) = list_trajectories(session, TrajectoryFilter(source="asking"))
    assert (trajectory.outcome, trajectory.end_cause) == (Outcome.INFRASTRUCTURE, EndCause.SIMULATOR_ERROR)
    assert "no usable message in 3 attempts; the last one: it leaves its role: 'As an AI'" in trajectory.detail


async def test_a_message_that_was_cut_off_is_asked_for_again_and_never_blamed_on_the_sandbox(tmp_path: Path) -> None:
    # Each variant is asked for twice, the second time with more tokens.
    cut_off = Truncated("Hello, I would")
    answers = iter([cut_off, cut_off, Text("A word, please."), Text("STOP")])
    with (
        scripted_server(lambda body, nth: next(answers)) as server,
        context_with_chain(tmp_path, overrides(server)) as context,
    ):
        (trajectory,) = await play(context, 0)
    assert trajectory.messages[2]["content"] == "A word, please."
    with (
        scripted_server(lambda body, nth: cut_off) as server,
        context_with_chain(tmp_path / "b", overrides(server)) as context,
        pytest.raises(StageError, match=r"lost to simulator_error: .*the answer was cut off"),
    ):
        await play(context, 0)


async def test_a_refused_message_is_never_used_again_and_costs_no_later_stage(tmp_path: Path) -> None:
    def answer(body: dict[str, Any], nth: int) -> ScriptedReply:
        if not any(message["role"] == "assistant" for message in body["messages"]):
            return "As an AI I cannot." if nth < 8 else "A word, please."
        return "STOP"

    with scripted_server(answer) as server, context_with_chain(tmp_path, overrides(server)) as context:
        # Both rounds of the first run ask three times each.
        with suppress(StageError):
            await play(context, 0)
        assert len(server.requests) == 6
        (trajectory,) = await play(context, 0)
        assert trajectory.messages[2]["content"] == "A word, please."
        # Two more were refused, and one reply ended the conversation.
        assert len(server.requests) == 10
        assert (await play(context, 0, model="other"))[0].messages == trajectory.messages
        assert len(server.requests) == 10


async def test_a_few_lost_episodes_fail_no_later_run(tmp_path: Path) -> None:
    def answer(body: dict[str, Any], nth: int) -> ScriptedReply:
        if "word-3" in body["messages"][0]["content"]:
            return "As an AI I cannot."
        return "STOP" if any(message["role"] == "assistant" for message in body["messages"]) else "A word, please."

    with scripted_server(answer) as server, context_with_chain(tmp_path, overrides(server)) as context:
        jobs = [EpisodeJob(seed, 0, "train", str(seed)) for seed in range(5)]
        for _ in range(2):
            async with context.target_source() as source:
                trajectories = await episodes(context, source, jobs, Words("Hm?"), model="base", temperature=1.0)
            assert [trajectory.outcome is Outcome.INFRASTRUCTURE for trajectory in trajectories] == [
                seed == 3 for seed in range(5)
            ]


async def test_a_conversation_that_outgrows_the_context_of_the_user_ends_there(tmp_path: Path) -> None:
    def answer(body: dict[str, Any], nth: int) -> ScriptedReply:
        return "A word, please."

    limits: dict[str, Any] = {"context_tokens": 150, "max_tokens": 20}
    with (
        scripted_server(answer) as server,
        context_with_chain(tmp_path, overrides(server, **limits)) as context,
    ):
        async with context.target_source() as source:
            policy = Words("What do you mean by that? " * 30)
            jobs = [EpisodeJob(5, 0, "train", "5")]
            (trajectory,) = await episodes(context, source, jobs, policy, model="base", temperature=1.0)
    assert (trajectory.outcome, trajectory.end_cause) == (Outcome.FAILURE, EndCause.MAX_TOKENS)


async def test_instructions_that_outgrow_the_context_of_the_user_are_no_fault_of_the_agent(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"context_tokens": 30, "max_tokens": 20}
    with (
        scripted_server("A word, please.") as server,
        context_with_chain(tmp_path, overrides(server, **limits)) as context,
        pytest.raises(StageError, match="lost to simulator_error: reset with seed 5: the user's model: "),
    ):
        await play(context, 0)


@pytest.mark.parametrize("status", [Status(503), Status(401)])
async def test_a_user_that_is_away_ends_the_stage_and_the_cycle_waits(tmp_path: Path, status: Status) -> None:
    with (
        scripted_server(lambda body, nth: status) as server,
        context_with_chain(tmp_path, overrides(server)) as context,
    ):
        with pytest.raises(UserUnavailable, match="the user's model cannot be asked: ") as info:
            await play(context, 0)
        assert "target.user." in info.value.hint
        assert attribute_fault(JobOutcome.FAILED, describe(info.value), None) is FaultAttribution.INFRASTRUCTURE
        with context.read_session() as session:
            assert list_replies(session, "c1", stage="user") == []


async def test_a_missing_key_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with (
        scripted_server(lambda body, nth: "") as server,
        context_with_chain(tmp_path, overrides(server, base_url="")) as context,
    ):
        with pytest.raises(UserUnavailable, match="OPENAI_API_KEY is not set") as info:
            await play(context, 0)
        assert "target.user.api_key_file" in info.value.hint


@pytest.mark.parametrize("last", ["STOP", "break", "I was told to say it: canary-of-the-grader-7d1f"])
async def test_nothing_privileged_is_in_what_analyst_synthesizer_and_prompts_get(tmp_path: Path, last: str) -> None:
    def answer(body: dict[str, Any], nth: int) -> ScriptedReply:
        return last if any(message["role"] == "assistant" for message in body["messages"]) else "A word, please."

    with (
        scripted_server(answer) as server,
        context_with_chain(tmp_path, overrides(server, "Secretive")) as context,
    ):
        with suppress(StageError):
            await play(context, 0)
        assert Secretive.SECRET in str(server.requests)
        with context.read_session() as session:
            (trajectory,) = list_trajectories(session, TrajectoryFilter(source="asking"))
        is_judged = trajectory.outcome is not Outcome.INFRASTRUCTURE
        # They get trajectories with a judged outcome only; the others hold what the target says of its own error.
        assert is_judged is (last == "STOP")
        assert not is_judged or Secretive.SECRET not in str(trajectory)
        assert Secretive.SECRET not in str(trajectory.messages) + str(trajectory.tools) + str(trajectory.parts)
