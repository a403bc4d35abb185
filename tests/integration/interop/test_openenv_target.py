"""A running server of OpenEnv is a target: played through OpenEnv's own client, with its own tools and rewards."""

import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.contract import Message
from tests.waiting import eventually
from traced.config.settings import load_settings
from traced.inference.engine_process import free_port
from traced.targets.conformance import check
from traced.targets.errors import TargetFault
from traced.targets.registry import Target, target

pytestmark = pytest.mark.optional
WORLDS = Path(__file__).with_name("openenv_worlds.py")
PYTHON = Path(os.environ.get("TRACED_INTEROP") or Path(__file__).parents[3] / ".interop") / "openenv" / "bin" / "python"


def answers(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/schema", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="module", params=["echo", "counter"])
def world(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Name and URL of a server."""
    if not PYTHON.exists():
        pytest.skip("make interop")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([PYTHON, WORLDS, request.param, str(port)])
    try:
        eventually(lambda: answers(url), within_s=120)
        yield request.param, url
    finally:
        process.terminate()
        process.wait(30)


def server_target(folder: Path, url: str) -> Target:
    table = {"name": "served", "kind": "openenv", "factory": url, "python": str(PYTHON), "options": ["concurrency=8"]}
    return target(load_settings(folder, {f"target.{key}": value for key, value in table.items()}))


def call(name: str, arguments: str) -> Message:
    function = {"name": name, "arguments": arguments}
    calls = [{"id": "c", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


async def test_it_keeps_the_contract(tmp_path: Path, world: tuple[str, str]) -> None:
    results = {result.name: result async for result in check(server_target(tmp_path, world[1]), tasks=4)}
    assert {name for name, result in results.items() if result.ok is False} == set()
    assert results["parallel"].observed == "8 episodes at once can be played"


async def test_an_agent_plays_to_reward_1(tmp_path: Path, world: tuple[str, str]) -> None:
    name, url = world
    async with server_target(tmp_path, url).source() as source:
        episode = source.episode()
        task = await episode.reset(3)
        (tool,) = task.tools
        if name == "echo":
            assert "Say word-3." in task.messages[0]["content"]
            assert tool["function"]["parameters"]["required"] == ["text"]
            turns = [call("act", "{}"), {"role": "assistant", "content": "hm"}, call("act", '{"text": "word-3"}')]
        else:
            assert (tool["function"]["name"], tool["function"]["description"]) == ("add", "Add a number.")
            turns = [call("add", '{"number": "x"}'), call("add", '{"number": 1}'), call("add", '{"number": 2}')]
        steps = [await episode.step(turn) for turn in turns]
        assert [step.done for step in steps] == [False, False, True]
        assert steps[0].messages[0]["content"].startswith("Error: ")
        assert steps[1].messages[0]["content"] == ('{"text": "hm"}' if name == "echo" else "1")
        score = await episode.score()
        assert (score.reward, score.success) == (1.0, True)
        await episode.reset(4)
        assert (await episode.score()).reward == 0.0
        await episode.close()


async def test_an_environment_that_breaks_is_the_targets_fault(tmp_path: Path, world: tuple[str, str]) -> None:
    name, url = world
    if name != "echo":
        pytest.skip("the other one cannot break")
    async with server_target(tmp_path, url).source() as source:
        episode = source.episode()
        await episode.reset(3)
        with pytest.raises(TargetFault, match="the environment broke"):
            await episode.step({"role": "assistant", "content": "break"})
        await episode.close()


async def test_a_server_that_is_away_is_the_targets_fault(tmp_path: Path, world: tuple[str, str]) -> None:
    assert server_target(tmp_path, world[1]).name == "served"
    with pytest.raises(TargetFault, match="Connection refused"):
        server_target(tmp_path / "b", f"http://127.0.0.1:{free_port()}")
