"""An installed environment of verifiers is a target: verifiers runs the rollout, and the agent is its model."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sandbox.contract import Message
from tests.integration.interop.conftest import Installed
from tests.waiting import eventually_async
from traced.config.settings import load_settings
from traced.targets.conformance import check
from traced.targets.errors import TargetFault
from traced.targets.registry import Target, target

pytestmark = pytest.mark.optional
ENVIRONMENTS = Path(__file__).with_name("verifiers_environments")
PYTHON = (
    Path(os.environ.get("TRACED_INTEROP") or Path(__file__).parents[3] / ".interop") / "verifiers" / "bin" / "python"
)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    if not PYTHON.exists():
        pytest.skip("make interop")
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory that keeps the descriptions of the targets."""
    return tmp_path_factory.mktemp("data")


def environment_target(folder: Path, environment: str, *options: str) -> Target:
    table = {"name": "played", "kind": "verifiers", "factory": environment, "python": str(PYTHON), "options": options}
    return target(load_settings(folder, {f"target.{key}": value for key, value in table.items()}))


def text(content: str) -> Message:
    return {"role": "assistant", "content": content}


def add(*arguments: str) -> Message:
    calls = [
        {"id": f"c{number}", "type": "function", "function": {"name": "add", "arguments": value}}
        for number, value in enumerate(arguments)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


@pytest.mark.parametrize("environment", ["reverse_word_v1", "counter_v1"])
async def test_it_keeps_the_contract(folder: Path, environment: str) -> None:
    subject = environment_target(folder, environment, "concurrency=2")
    results = {result.name: result async for result in check(subject, tasks=2)}
    assert {name: result.observed for name, result in results.items() if result.ok is False} == {}
    assert results["floor"].observed == "doing nothing succeeds on 0 of 2"
    assert results["parallel"].observed == "2 episodes at once can be played"


async def test_a_single_answer_is_judged_by_the_rewards_of_the_environment(folder: Path) -> None:
    subject = environment_target(folder, "reverse_word_v1", 'test={"split": "test"}')
    assert subject.description.tasks is not None
    assert {split: len(ids) for split, ids in subject.description.tasks.items()} == {"train": 6, "test": 3}
    async with subject.source() as source:
        episode = source.episode()
        for answer, reward in (("tenalp", 1.0), ("planet", 0.2), ("no", 0.0)):
            task = await episode.reset(subject.division.tasks.index("test-0") if subject.division.tasks else 0)
            assert (task.system, task.tools) == ("Answer with one word.", [])
            assert task.messages == [{"role": "user", "content": "Reverse the word planet."}]
            assert (await episode.score()).reward == 0.0
            step = await episode.step(text(answer))
            assert (step.done, step.messages) == (True, [])
            score = await episode.score()
            assert score.reward == pytest.approx(reward)
            assert score.success == (reward == 1.0)
        assert score.parts == {"exact": 0.0, "length": 0.0}
        await episode.close()


async def test_the_tools_of_a_task_are_played_to_reward_1_and_wrong_arguments_are_answered(folder: Path) -> None:
    subject = environment_target(folder, "counter_v1")
    assert subject.division.tasks is not None
    async with subject.source() as source:
        episode = source.episode()
        task = await episode.reset(subject.division.tasks.index("goal-5"))
        assert [tool["function"]["description"] for tool in task.tools] == ["Add a number to the count."]
        wrong = await episode.step(
            add("{not json", "[]", '{"number": "x"}', '{"number": NaN}', '{"number": "\\ud800"}')
        )
        assert [reply["tool_call_id"] for reply in wrong.messages] == [f"c{number}" for number in range(5)]
        assert all(reply["content"].startswith("Error") for reply in wrong.messages)
        right = await episode.step(add('{"number": 2}', '{"number": 3}'))
        assert [reply["content"] for reply in right.messages] == ["2", "5"]
        assert not right.done
        end = await episode.step(text("done \ud800"))
        assert (end.done, (await episode.score()).success) == (True, True)
        await episode.close()


async def test_an_environment_that_speaks_as_the_user_is_played_turn_by_turn(folder: Path) -> None:
    subject = environment_target(folder, "guess_v1", "limit=12", "success_reward=5")
    assert (subject.description.user, subject.description.max_turns) == ("scripted", 8)
    assert subject.division.tasks is not None
    async with subject.source() as source:
        episode = source.episode()
        await episode.reset(subject.division.tasks.index("6"))  # the seventh number
        replies = [await episode.step(text(guess)) for guess in ("9", "", "7")]
        assert [[reply["content"] for reply in step.messages] for step in replies] == [["lower"], ["higher"], []]
        score = await episode.score()
        assert (replies[-1].done, score.success) == (True, False)
        assert score.reward == pytest.approx(2 / 3)
        await episode.reset(subject.division.tasks.index("6"))
        assert (await episode.step(text("7"))).done
        assert (await episode.score()).success
        await episode.close()


@pytest.mark.parametrize("origin", ["lamp_shop"], indirect=True)
async def test_a_package_with_a_harness_is_played_by_it(
    install: Callable[[str], Installed], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = install("verifiers")
    monkeypatch.setenv("PYTHONPATH", exported.variables["PYTHONPATH"])
    subject = environment_target(folder, exported.package, "limit=8")
    assert subject.division.tasks is not None
    async with subject.source() as source:
        episode = source.episode()
        for seed in (0, 5):
            environment = exported.environment()
            task = environment.reset(seed)
            assert await episode.reset(subject.division.tasks.index(str(seed))) == task
            for message in environment.oracle():
                replies = environment.step(message)
                step = await episode.step(message)
                assert step.messages == replies or step.done
            assert (step.done, (await episode.score()).success) == (True, True)
        await episode.close()


async def test_a_call_after_which_the_environment_stops_is_answered(folder: Path) -> None:
    async with environment_target(folder, "counter_v1").source() as source:
        episode = source.episode()
        await episode.reset(0)
        step = await episode.step(add('{"number": 101}'))
        assert (step.done, [reply["tool_call_id"] for reply in step.messages]) == (True, ["c0"])
        assert (await episode.score()).reward == 0.0
        await episode.close()


async def test_after_max_turns_verifiers_judges_what_there_is(folder: Path) -> None:
    subject = environment_target(folder, "counter_v1", "max_turns=1")
    assert subject.description.max_turns == 1
    assert subject.division.tasks is not None
    async with subject.source() as source:
        episode = source.episode()
        await episode.reset(subject.division.tasks.index("goal-3"))
        assert (await episode.step(add('{"number": 3}'))).done
        assert (await episode.score()).success
        await episode.close()


async def test_a_time_limit_of_verifiers_ends_the_episode(folder: Path) -> None:
    config = 'config={"agent": {"timeout": {"rollout": 0.5}}}'
    async with environment_target(folder, "counter_v1", config).source() as source:
        episode = source.episode()
        await episode.reset(0)
        process = psutil.Process(episode.pid)  # type: ignore[attr-defined]
        # The end of the rollout is the end of its tool server.
        await eventually_async(lambda: not process.children())
        assert (await episode.step(text("done"))).done
        assert (await episode.score()).reward == 0.0
        await episode.close()


@pytest.mark.parametrize(
    ("environment", "message", "fault"),
    [
        ("counter_v1", add('{"number": -1}'), "the counter broke"),
        ("reverse_word_v1", text("judge"), "the judge is away"),
    ],
)
async def test_an_environment_that_breaks_is_the_targets_fault(
    folder: Path, environment: str, message: Message, fault: str
) -> None:
    async with environment_target(folder, environment).source() as source:
        episode = source.episode()
        await episode.reset(0)
        with pytest.raises(TargetFault, match=fault):
            await episode.step(message)
        await episode.close()


async def test_an_episode_that_is_closed_leaves_no_process(folder: Path) -> None:
    async with environment_target(folder, "counter_v1").source() as source:
        episode = source.episode()
        await episode.reset(0)
        process = psutil.Process(episode.pid)  # type: ignore[attr-defined]
        servers = process.children(recursive=True)
        assert servers
        await episode.close()
        await eventually_async(lambda: not any(server.is_running() for server in [process, *servers]))


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ("no-such-world", [], "no environment 'no-such-world' is installed in .*pip install PACKAGE"),
        ("needs_package_v1", [], "needs the package 'no_such_package': .*pip install no_such_package"),
        ("reverse_word_v1", ['config={"taskset": {"colour": 1}}'], "takes other arguments: (.|\n)*colour"),
        ("needs_argument_v1", [], "takes other arguments: (.|\n)*level(.|\n)*--option 'config="),
        ("needs_argument_v1", ['config={"taskset": {"level": 0}}'], "has no tasks in 'all'"),
        ("two_agents_v1", [], "has the agents buyer, seller; traced plays only one"),
        ("old_api", [], "is written for the API before verifiers 0.4"),
    ],
)
def test_what_cannot_be_played_says_why(folder: Path, environment: str, options: list[str], message: str) -> None:
    with pytest.raises(TargetFault, match=message):
        environment_target(folder, environment, *options)


def test_an_interpreter_without_verifiers_says_so(folder: Path) -> None:
    table = {"name": "played", "kind": "verifiers", "factory": "counter_v1"}
    with pytest.raises(TargetFault, match=r"cannot import verifiers 0.4 .*pip install 'verifiers>=0.4'"):
        target(load_settings(folder, {f"target.{key}": value for key, value in table.items()}))


def test_the_command_adds_it_by_its_id(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "traced", "target", "add", "words", "reverse_word_v1", "--kind", "verifiers"]
    variables = {"PYTHONPATH": os.pathsep.join([*sys.path, str(ENVIRONMENTS)])}
    done = subprocess.run(
        [*command, "--python", PYTHON, "--data-dir", tmp_path],
        env=os.environ | variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "Added words (tasks: train 3, gate 1, test 2)" in done.stdout, done.stderr
    assert 'kind = "verifiers"\nfactory = "reverse_word_v1"' in (tmp_path / "targets" / "words.toml").read_text()
