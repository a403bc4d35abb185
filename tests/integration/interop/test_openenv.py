"""OpenEnv's validators pass an exported package, and its client plays the oracle to reward 1."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.interop.conftest import Installed

pytestmark = pytest.mark.optional
REPLAYING = Path(__file__).with_name("replaying.py")


@pytest.fixture(scope="module")
def installed(install: Callable[[str], Installed]) -> Installed:
    return install("openenv")


@pytest.fixture(scope="module")
def url(installed: Installed) -> Iterator[str]:
    """Of the exported server."""
    command = [installed.programs / "python", "-m", f"{installed.package}.server.app"]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", "0"],
        env=installed.variables,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert server.stderr is not None
    try:
        told = []
        for line in server.stderr:
            told.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                break
        assert found, "".join(told)
        yield found[1]
    finally:
        server.terminate()
        server.communicate(timeout=60)


def test_its_validator_passes_the_folder(installed: Installed) -> None:
    done = installed.run("openenv", "validate", installed.folder, "--level", "static", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"] == "pass"
    assert {result["check_id"]: result["status"] for result in report["results"]} == {"static.manifest": "pass"}


def test_its_validator_passes_the_running_server(installed: Installed, url: str) -> None:
    done = installed.run("openenv", "validate", "--url", url, "--timeout", "60", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["summary"]["failed_criteria"] == []


def test_its_graders_pass_the_replayed_plan_and_its_lists_of_files(installed: Installed, url: str) -> None:
    done = installed.run("python", REPLAYING, installed.folder, url)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    passed = {name for name, (status, *_) in told["checks"].items() if status == "pass"}
    assert passed == {
        "static.manifest",
        "runtime.startup",
        "runtime.reward_well_formed",
        "runtime.observation_schema",
        "runtime.state_contract",
    }
    others = {status for name, (status, *_) in told["checks"].items() if name not in passed}
    assert others == {"skip"}, told["checks"]
    assert told["to publish"] == ["Recommended directory missing: outputs/"]
    assert [line.partition(" - ")[0] for line in told["to serve"]] == ["Missing uv.lock"]


def test_the_client_plays_the_oracle_to_reward_1(installed: Installed, url: str) -> None:
    done = installed.run("python", "-m", f"{installed.package}.oracle", "--url", url, "--episodes", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["seed"] for one in told] == [0, 1, 2, 3]
    assert {(one["reward"], one["success"], one["differences"]) for one in told} == {(1.0, True, 0)}
    assert all(one["messages"] > 1 for one in told)


@pytest.mark.parametrize("origin", ["lamp_shop"], indirect=True)
def test_its_server_starts_from_the_folder_as_in_its_image(installed: Installed) -> None:
    variables = {**installed.variables, "PYTHONPATH": str(installed.folder)}
    ask = "from server.app import app; print(app.title)"
    done = subprocess.run(
        [installed.programs / "python", "-B", "-c", ask],
        cwd=installed.folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
