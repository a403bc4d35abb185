"""The image of the Dockerfile, built on an imported base and started: who it runs as, what it can, how it stops."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sandbox.docker_engine import connect
from tests.integration.deployment.base_image import import_base
from tests.waiting import eventually

pytestmark = pytest.mark.docker
ROOT = Path(__file__).parents[3]
BASE, IMAGE_NAME = "traced-test-base", "traced-test-image"
OFFLINE = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
CONFINED = [
    *("--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    *("--read-only", "--tmpfs", "/tmp"),
]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    docker_client = connect()
    yield docker_client
    docker_client.close()


@pytest.fixture(scope="module")
def image(client: Any) -> Iterator[Any]:
    import_base(client, BASE, "1")
    try:
        built_image, _ = client.images.build(
            path=str(ROOT),
            tag=f"{IMAGE_NAME}:1",
            buildargs={"BASE_IMAGE": f"{BASE}:1", **OFFLINE},
            network_mode="none",
            rm=True,
            forcerm=True,
        )
        yield built_image
        client.images.remove(f"{IMAGE_NAME}:1", force=True)
    finally:
        client.images.remove(f"{BASE}:1", force=True)


def test_the_image_says_how_it_is_run(image: Any) -> None:
    config = image.attrs["Config"]
    assert config["User"] == "10001:10001"
    assert (config["StopSignal"], config["Volumes"]) == ("SIGTERM", {"/data": {}})
    assert config["Healthcheck"]["Test"] == ["CMD", "python3", "-P", "-m", "traced", "status", "--alive"]
    assert (config["Entrypoint"], config["Cmd"]) == (["python3", "-P", "-m", "traced"], ["up"])


def docker(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["docker", *words], capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def name() -> Iterator[str]:
    """Name of a container; the container and its volume are removed after the test."""
    container_name = f"{IMAGE_NAME}-{os.getpid()}"
    yield container_name
    docker("rm", "--force", "--volumes", container_name)


def test_the_command_runs_confined_on_a_volume_of_its_own(image: Any, name: str) -> None:
    done = docker("run", "--name", name, *CONFINED, image.id, "doctor", "--json")
    assert done.stdout, done.stderr
    findings = {finding["name"]: finding for finding in json.loads(done.stdout.splitlines()[-1])["findings"]}
    for good in ("python", "packages", "data directory", "store"):
        assert findings[good]["ok"], findings[good]
    assert findings["data directory"]["seen"].startswith("/data")
    assert findings["torch"]["seen"] == "cannot be imported: No module named 'torch'"  # the base is a lean one


def test_the_service_is_healthy_answers_and_drains_on_stop(image: Any, name: str) -> None:
    started = docker("run", "--detach", "--name", name, *CONFINED, image.id)
    assert started.returncode == 0, started.stderr
    health = image.attrs["Config"]["Healthcheck"]["Test"][1:]
    wait_until_healthy(name, health)
    assert docker("exec", name, *health).stdout == "The service answers.\n"
    traced = [*image.attrs["Config"]["Entrypoint"], "status", "--json"]
    status = json.loads(docker("exec", name, *traced).stdout)
    assert (status["data_dir"], status["cycles"], status["paused"]) == ("/data", [], {})
    paused = docker("exec", name, *image.attrs["Config"]["Entrypoint"], "pause", "--reason", "to see")
    assert paused.returncode == 0, paused.stderr
    assert json.loads(docker("exec", name, *traced).stdout)["paused"] == {"desk": "uid 10001"}
    assert docker("stop", "--time", "30", name).returncode == 0
    assert docker("inspect", "--format", "{{.State.ExitCode}}", name).stdout.strip() == "0"
    logs = docker("logs", name)
    assert '"cause": "SIGTERM"' in logs.stdout + logs.stderr
    assert docker("start", name).returncode == 0  # the volume is as it was
    wait_until_healthy(name, health)
    assert json.loads(docker("exec", name, *traced).stdout)["paused"] == {"desk": "uid 10001"}


def wait_until_healthy(name: str, health: list[str]) -> None:
    """Wait until the container's health check passes; fail at once when the container has exited."""

    def is_healthy() -> bool:
        assert docker("inspect", "--format", "{{.State.Running}}", name).stdout == "true\n", docker("logs", name)
        return docker("exec", name, *health).returncode == 0

    eventually(is_healthy, within_s=120, every_s=0.5, message=lambda: docker("logs", name))


def test_compose_names_no_registry_and_hands_over_secrets_as_files() -> None:
    text = (ROOT / "compose.yaml").read_text()
    compose = yaml.safe_load(text)
    assert set(compose["services"]) == {"traced", "postgres", "vllm"}
    traced, postgres = compose["services"]["traced"], compose["services"]["postgres"]
    assert traced["environment"]["TRACED_STORE__PASSWORD_FILE"] == postgres["environment"]["POSTGRES_PASSWORD_FILE"]
    assert "PASSWORD:" not in text.replace("PASSWORD_FILE:", "")
    for service in compose["services"].values():
        first = service["image"].removeprefix("${").partition(":-")[2].partition("/")[0]
        assert "." not in first.partition(":")[0]  # a registry's host has a dot before the first slash
