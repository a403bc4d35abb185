"""A target in a process of its own: what it does wrong costs one episode, and is never the agent's fault."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from sandbox.contract import Message
from sandbox.errors import AgentFault, EnvironmentFault
from store.types import EndCause, Outcome
from traced.inference.client import Completion
from traced.rollouts.episodes import EpisodeJob, Limits, run_episodes
from traced.targets.errors import SimulatorError, TargetFault
from traced.targets.process import Launch, MainProcess, ProcessSource

WORLDS = Path(__file__).with_name("worlds.py")


def launch(tmp_path: Path, world: str = "Echo", **limits: Any) -> Launch:
    return Launch(f"{WORLDS}:{world}", tmp_path / "target.log", **limits)


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


async def test_an_episode_is_played_in_a_process_of_its_own(tmp_path: Path) -> None:
    async with ProcessSource("echo", launch(tmp_path)) as source:
        episode, other = source.episode(), source.episode()
        task = await episode.reset(3)
        assert (task.system, task.messages[0]["content"]) == ("Repeat the word.", "word-3")
        await other.reset(4)
        assert len({episode.pid, other.pid, os.getpid()}) == 3
        assert (await episode.step(say("print"))).done is False
        assert (await episode.score()).success is False
        assert (await episode.step(say("word-3"))).done is True
        assert (await episode.score()).success is True
        assert (await other.score()).success is False
        assert await other.gold_message() == say("word-4")
        pid = episode.pid
        await episode.close()
        await other.close()
    assert "printed by the world" in (tmp_path / "target.log").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_another_interpreter_without_traced_has_the_contract(tmp_path: Path) -> None:
    # -I: neither the folder of traced nor PYTHONPATH can be imported.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    async with ProcessSource("echo", launch(tmp_path, python=str(python))) as source:
        episode = source.episode()
        assert (await episode.reset(1)).system == "Repeat the word."
        await episode.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise", "'step' of the target raised RuntimeError: the world broke"),
        ("die", "the process of the episode ended during 'step'"),
        ("hang", "'step' of the target took more than 0.5 s"),
    ],
)
async def test_a_failure_costs_its_own_episode(tmp_path: Path, text: str, message: str) -> None:
    async with ProcessSource("echo", launch(tmp_path, step_s=0.5)) as source:
        failing, other = source.episode(), source.episode()
        await failing.reset(1)
        await other.reset(2)
        with pytest.raises(TargetFault, match=message):
            await failing.step(say(text))
        assert (await other.step(say("word-2"))).done is True
        await failing.reset(3)
        assert (await failing.step(say("word-3"))).done is True
        await failing.close()
        await other.close()


async def test_what_the_contract_forbids_is_a_fault_of_the_environment(tmp_path: Path) -> None:
    async with ProcessSource("echo", launch(tmp_path)) as source:
        episode = source.episode()
        await episode.reset(1)
        with pytest.raises(EnvironmentFault, match="role 'narrator'"):
            await episode.step(say("nonsense"))
        with pytest.raises(AgentFault, match="no JSON"):
            await episode.step(say(float("nan")))  # type: ignore[arg-type]
        await episode.close()


async def test_a_killed_main_process_is_started_again(tmp_path: Path) -> None:
    async with ProcessSource("echo", launch(tmp_path)) as source:
        episode = source.episode()
        await episode.reset(1)
        assert source._main is not None
        main_pid = source._main._child.pid
        os.kill(main_pid, signal.SIGKILL)
        await asyncio.to_thread(source._main._child.wait, 10)
        # The kernel ends the forks with it.
        with pytest.raises(TargetFault, match="ended during 'step'"):
            await episode.step(say("word-1"))
        await episode.reset(2)
        assert (await episode.step(say("word-2"))).done is True
        assert source.restarts == 1
        await episode.close()


@pytest.mark.parametrize(
    ("world", "message"),
    [
        ("fail_to_load", "cannot be loaded by .*: OSError: no database"),
        ("number", "returns a int with neither environment"),
        ("missing", "has no class or function 'missing'"),
    ],
)
async def test_a_target_that_cannot_be_loaded_says_why(tmp_path: Path, world: str, message: str) -> None:
    with pytest.raises(TargetFault, match=message):
        await MainProcess.start(launch(tmp_path, world))


async def test_loading_has_a_time_limit_and_shows_what_was_printed(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("import time\nprint('reading the database', flush=True)\ntime.sleep(60)\n")
    with pytest.raises(TargetFault, match=r"not loaded within 1 s; it printed:\nreading the database") as info:
        await MainProcess.start(Launch(str(file), tmp_path / "log", start_s=1.0))
    assert info.value.hint.startswith("target.start_s")
    file.write_text("import os\nos._exit(7)\n")
    with pytest.raises(TargetFault, match=r"ended while it was loaded \(exit code 7\)"):
        await MainProcess.start(Launch(str(file), tmp_path / "log"))


async def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetFault, match="interpreter of the target cannot be started") as info:
        await MainProcess.start(launch(tmp_path, python="/no/python"))
    assert info.value.hint.startswith("target.python")


class Words:
    """A policy that says one text after another."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    async def complete(self, messages: list[Message], tools: list[Any], *, seed: int) -> Completion:
        count = sum(message["role"] == "assistant" for message in messages)
        return Completion(say(self.texts[min(count, len(self.texts) - 1)]), [], [], [], "stop")


@pytest.mark.parametrize("text", ["raise", "die", "hang"])
async def test_trajectories_blame_the_target_and_not_the_agent(tmp_path: Path, text: str) -> None:
    jobs = [EpisodeJob(seed, 0, "train", str(seed)) for seed in range(3)]
    async with ProcessSource("echo", launch(tmp_path, step_s=0.5)) as source:
        trajectories = [
            trajectory
            async for trajectory in run_episodes(source, jobs, Words("hm", text), Limits(), model="m", temperature=1.0)
        ]
    for trajectory in trajectories:
        assert (trajectory.outcome, trajectory.end_cause) == (Outcome.INFRASTRUCTURE, EndCause.TARGET_ERROR)
        assert "step of turn 1: " in trajectory.detail


class Person:
    """A user that says one text after another."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.requests = list(texts), []  # type: tuple[list[str], list[dict[str, Any]]]

    async def reply(self, request: dict[str, Any]) -> str:
        self.requests.append(request)
        if not self.texts:
            raise SimulatorError("the user is away")
        return self.texts.pop(0)


async def test_a_user_speaks_between_the_messages_of_the_agent(tmp_path: Path) -> None:
    person = Person("Hello, word please", "STOP")
    async with ProcessSource("asking", launch(tmp_path, "WithUser"), user=person) as source:
        episode = source.episode()
        task = await episode.reset(5)
        assert [message["role"] for message in task.messages] == ["assistant", "user"]
        assert person.requests[0] == {"system": "You want word-5.", "messages": [], "stops": ["STOP"]}
        step = await episode.step(say("Which one?"))
        assert (step.messages, step.done) == ([{"role": "user", "content": "STOP"}], True)
        await episode.close()


@pytest.mark.parametrize("user", [None, Person()])
async def test_without_an_answering_user_the_simulator_is_blamed(tmp_path: Path, user: Person | None) -> None:
    jobs = [EpisodeJob(0, 0, "train", "0")]
    async with ProcessSource("asking", launch(tmp_path, "WithUser"), user=user) as source:
        (trajectory,) = [
            trajectory
            async for trajectory in run_episodes(source, jobs, Words("hm"), Limits(), model="m", temperature=1.0)
        ]
    assert (trajectory.outcome, trajectory.end_cause) == (Outcome.INFRASTRUCTURE, EndCause.SIMULATOR_ERROR)
