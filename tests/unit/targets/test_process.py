"""A target in a process of its own: what it does wrong costs one episode, and is never the agent's fault."""

import asyncio
import os
import signal
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from sandbox.contract import Message
from sandbox.errors import AgentFault
from sandbox.goal_user import MAX_USER_TURNS
from store.types import EndCause, Outcome
from tests.unit.targets.worlds import WithTasks
from tests.waiting import eventually_async
from traced.inference.client import Completion
from traced.rollouts.episodes import EpisodeJob, Limits, run_episodes
from traced.targets.description import read_description
from traced.targets.errors import SimulatorError, TargetFault
from traced.targets.process import Launch, MainProcess, ProcessEpisode, ProcessSource

WORLDS = Path(__file__).with_name("worlds.py")


def launch(tmp_path: Path, world: str = "Echo", **limits: Any) -> Launch:
    return Launch(f"{WORLDS}:{world}", tmp_path / "target.log", **limits)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended; its parent may not have collected it yet."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    # The second one if it ends between opening and reading.
    except (FileNotFoundError, ProcessLookupError):
        return True


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
        ("text", r"'step' of the target raised TypeError: step\(\) returned str; it must return a list of messages"),
        ("die", "the process of the episode ended during 'step'"),
        ("hang", "'step' of the target took more than 0.5 s"),
    ],
)
async def test_a_failure_costs_its_own_episode(tmp_path: Path, text: str, message: str) -> None:
    async with ProcessSource("echo", launch(tmp_path, step_s=0.5)) as source:
        failing, other = source.episode(), source.episode()
        await failing.reset(1)
        await other.reset(2)
        pid = failing.pid
        with pytest.raises(TargetFault, match=message):
            await failing.step(say(text))
        if text == "hang":
            # Its process ends at once, and not when the episode is closed.
            await eventually_async(lambda: has_ended(pid))
        assert (await other.step(say("word-2"))).done is True
        await failing.reset(3)
        assert (await failing.step(say("word-3"))).done is True
        await failing.close()
        await other.close()


async def test_what_the_contract_forbids_is_a_fault_of_the_environment(tmp_path: Path) -> None:
    async with ProcessSource("echo", launch(tmp_path)) as source:
        episode = source.episode()
        await episode.reset(1)
        with pytest.raises(TargetFault, match=r"what the contract forbids: .*role 'narrator'"):
            await episode.step(say("nonsense"))
        with pytest.raises(AgentFault, match="no JSON"):
            await episode.step(say(float("nan")))  # type: ignore[arg-type]
        await episode.close()


async def test_an_episode_that_was_closed_has_ended(tmp_path: Path) -> None:
    async with ProcessSource("echo", launch(tmp_path)) as source:
        for _ in range(20):
            episode = source.episode()
            await episode.reset(1)
            pid = episode.pid
            await episode.close()
            assert has_ended(pid)


async def test_closing_an_episode_waits_until_its_process_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ProcessEpisode, "_kill", lambda episode: asyncio.get_running_loop().call_later(0.3, os.kill, episode.pid, 9)
    )
    async with ProcessSource("echo", launch(tmp_path)) as source:
        episode = source.episode()
        await episode.reset(1)
        await episode.close()
        assert has_ended(episode.pid)


async def test_no_more_episodes_are_open_than_the_target_allows(tmp_path: Path) -> None:
    start_options = launch(tmp_path, "WithTasks", options={"concurrency": 2})
    description = read_description("echo", WithTasks(concurrency=2).description)
    async with ProcessSource("echo", start_options, expected=description) as source:
        first, second, third = source.episode(), source.episode(), source.episode()
        await first.reset(1)
        await second.reset(2)
        waiting = asyncio.create_task(third.reset(3))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        await first.close()
        await waiting
        await third.reset(4)  # it keeps its place
        for episode in (second, third):
            await episode.close()


async def test_a_failed_fork_costs_one_episode(tmp_path: Path) -> None:
    file = tmp_path / "crowded.py"
    refuse = """
        import os
        fork, failures = os.fork, [OSError(11, "no process is free")]

        def fork_later():
            if failures:
                raise failures.pop()
            return fork()

        os.fork = fork_later
    """
    file.write_text(WORLDS.read_text() + textwrap.dedent(refuse))
    async with ProcessSource("echo", Launch(f"{file}:Echo", tmp_path / "target.log")) as source:
        episode = source.episode()
        with pytest.raises(TargetFault, match="ended during 'reset'"):
            await episode.reset(1)
        await episode.reset(2)
        await episode.close()
        assert source.restarts == 0
    assert "no process for an episode: [Errno 11]" in (tmp_path / "target.log").read_text()


async def test_a_start_that_is_cancelled_ends_the_process(tmp_path: Path) -> None:
    file, pid_file = tmp_path / "slow.py", tmp_path / "pid"
    file.write_text(f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n")
    start = asyncio.create_task(MainProcess.start(Launch(str(file), tmp_path / "log")))
    await eventually_async(lambda: pid_file.exists() and pid_file.read_text())
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await eventually_async(lambda: has_ended(int(pid_file.read_text())))


async def test_a_start_may_take_longer_than_a_step(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(1)\n" + WORLDS.read_text())
    async with ProcessSource("echo", Launch(f"{file}:Echo", tmp_path / "log", step_s=0.5)) as source:
        assert source._main is not None
        os.kill(source._main._child.pid, signal.SIGKILL)
        await asyncio.to_thread(source._main._child.wait, 10)
        episodes = [source.episode() for _ in range(3)]
        await asyncio.gather(*(episode.reset(number) for number, episode in enumerate(episodes)))
        assert source.restarts == 1
        for episode in episodes:
            await episode.close()


async def test_a_caller_that_gives_up_does_not_stop_the_restart_of_others(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(0.5)\n" + WORLDS.read_text())
    async with ProcessSource("echo", Launch(f"{file}:Echo", tmp_path / "log")) as source:
        assert source._main is not None
        os.kill(source._main._child.pid, signal.SIGKILL)
        await asyncio.to_thread(source._main._child.wait, 10)
        first, second = source.episode(), source.episode()
        resets = [asyncio.create_task(episode.reset(1)) for episode in (first, second)]
        await asyncio.sleep(0.1)
        resets[0].cancel()
        await resets[1]
        assert source.restarts == 1
        for episode in (first, second):
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


async def test_a_message_has_the_name_of_a_target_that_has_one(tmp_path: Path) -> None:
    with pytest.raises(TargetFault, match="the target acme:orders cannot be loaded by"):
        await MainProcess.start(launch(tmp_path, "fail_to_load", name="acme:orders"))


async def test_a_traceback_has_the_lines_of_the_target_alone(tmp_path: Path) -> None:
    with pytest.raises(TargetFault) as info:
        await MainProcess.start(launch(tmp_path, "fail_to_load"))
    frames = [line.strip() for line in info.value.message.splitlines() if line.lstrip().startswith("File ")]
    assert len(frames) == 1
    assert frames[0].startswith(f'File "{WORLDS}"')


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

    async def reply(self, request: dict[str, Any], trial: int = 0) -> str:
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
        assert person.requests[0] == {"system": "You want word-5.", "goal": "", "messages": [], "stops": ["STOP"]}
        step = await episode.step(say("Which one?"))
        assert (step.messages, step.done) == ([{"role": "user", "content": "STOP"}], True)
        await episode.close()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("speak", "'reset' of the target .* user_request is 'speak'; it must be an object"),
        ({"messages": []}, "'system' in user_request is None; it must be text"),
        ({"system": "", "goal": 3, "messages": []}, "'goal' in user_request is 3; it must be text"),
        ({"system": ""}, "'messages' in user_request is None; it must be a list"),
        ({"system": "", "messages": [{"role": "tool", "content": ""}]}, "a message of user_request has role 'tool'"),
        ({"system": "", "messages": [], "stops": "STOP"}, "'stops' in user_request is 'STOP'; it must be a list"),
        ({"system": "", "messages": [], "stops": [""]}, "'stops' in user_request must be at most 16 texts"),
    ],
)
async def test_a_malformed_request_for_the_user_is_the_targets_fault(
    tmp_path: Path, request_: object, message: str
) -> None:
    start_options = launch(tmp_path, "Talkative", options={"request": request_})
    async with ProcessSource("talkative", start_options, user=Person("so")) as source:
        episode = source.episode()
        with pytest.raises(TargetFault, match=message):
            await episode.reset(5)
        await episode.close()


@pytest.mark.parametrize(("replies", "is_fault"), [(MAX_USER_TURNS, False), (MAX_USER_TURNS + 1, True)])
async def test_a_user_speaks_a_bounded_number_of_times_in_one_turn(
    tmp_path: Path, replies: int, is_fault: bool
) -> None:
    start_options = launch(tmp_path, "Talkative", options={"replies": replies})
    async with ProcessSource("talkative", start_options, user=Person(*["so"] * 9)) as source:
        episode = source.episode()
        with pytest.raises(TargetFault, match="more than 4 messages of the user") if is_fault else nullcontext():
            task = await episode.reset(5)
            assert len(task.messages) == MAX_USER_TURNS
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
