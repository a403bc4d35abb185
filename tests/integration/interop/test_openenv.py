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
    command: list[str | Path] = [installed.programs / "python", "-m", f"{installed.package}.server.app"]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", "0"],
        env=installed.variables,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert server.stderr is not None
    try:
        output = []
        for line in server.stderr:
            output.append(line)
            if match := re.search(r"running on (http://\S+)", line):
                break
        assert match, "".join(output)
        yield match[1]
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


def test_the_graders_accept_the_replayed_plan_and_the_file_lists(installed: Installed, url: str) -> None:
    done = installed.run("python", REPLAYING, installed.folder, url)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    passed = {name for name, (status, *_) in report["checks"].items() if status == "pass"}
    assert passed == {
        "static.manifest",
        "runtime.startup",
        "runtime.reward_well_formed",
        "runtime.observation_schema",
        "runtime.state_contract",
    }
    statuses = {status for name, (status, *_) in report["checks"].items() if name not in passed}
    assert statuses == {"skip"}, report["checks"]
    assert report["to publish"] == ["Recommended directory missing: outputs/"]
    assert [line.partition(" - ")[0] for line in report["to serve"]] == ["Missing uv.lock"]


def test_the_client_plays_the_oracle_to_reward_1(installed: Installed, url: str) -> None:
    done = installed.run("python", "-m", f"{installed.package}.oracle", "--url", url, "--episodes", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    output = [json.loads(line) for line in done.stdout.splitlines()]
    assert [message["seed"] for message in output] == [0, 1, 2, 3]
    assert {(message["reward"], message["success"], message["differences"]) for message in output} == {(1.0, True, 0)}
    assert all(message["messages"] > 1 for message in output)


@pytest.mark.parametrize("origin", ["lamp_shop"], indirect=True)
def test_its_server_starts_from_the_folder_as_in_its_image(installed: Installed) -> None:
    variables = {**installed.variables, "PYTHONPATH": str(installed.folder)}
    code = "from server.app import app; print(app.title)"
    done = subprocess.run(
        [installed.programs / "python", "-B", "-c", code],
        cwd=installed.folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
