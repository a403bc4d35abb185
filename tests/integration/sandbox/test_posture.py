"""The posture as the engine records it, and as an intruder inside the container meets it."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from sandbox.client import SandboxSource
from sandbox.image import Image
from sandbox.policy import GVISOR, SandboxLimits
from tests.integration.owner import owner
from tests.integration.sandbox.conftest import ENVIRONMENTS

pytestmark = pytest.mark.docker
GOLDEN = Path(__file__).parents[2] / "data/posture.json"
# What the engine's version, its runtime or this very container say; the rest of HostConfig is golden, to the last flag.
VOLATILE = {"ConsoleSize", "CgroupnsMode", "MaskedPaths", "ReadonlyPaths", "Runtime", "ShmSize", "ContainerIDFile"}
OF_CONFIG = (
    *("AttachStderr", "AttachStdin", "AttachStdout", "Entrypoint", "ExposedPorts", "Hostname", "OpenStdin"),
    *("StdinOnce", "Tty", "User", "Volumes", "WorkingDir"),
)


def posture(inspected: dict[str, Any]) -> dict[str, Any]:
    """The parts of ``docker inspect`` that matter; null, false, nothing and empty are the same in them."""
    host = {name: value for name, value in inspected["HostConfig"].items() if name not in VOLATILE and _is_set(value)}
    host["Ulimits"] = sorted(host["Ulimits"], key=lambda limit: str(limit["Name"]))
    config = {name: inspected["Config"].get(name) for name in OF_CONFIG}
    variables = sorted(variable for variable in inspected["Config"]["Env"] if variable.startswith("PYTHONHASHSEED"))
    return {
        "AppArmorUnconfined": inspected["AppArmorProfile"] == "unconfined",
        "Config": {name: value for name, value in config.items() if _is_set(value)} | {"Env": variables},
        "HostConfig": host,
        "Mounts": inspected["Mounts"],
        "Networks": list(inspected["NetworkSettings"]["Networks"]),
        "Ports": inspected["NetworkSettings"].get("Ports") or {},
    }


def _is_set(value: object) -> bool:
    return any(map(_is_set, value.values())) if isinstance(value, dict) else bool(value)


async def test_the_golden_posture_of_a_running_container(engine: Any, lamp_shop: str) -> None:
    async with SandboxSource(lamp_shop, owner=owner("posture")) as source:
        sandbox = await source.sandbox()
        inspected = await asyncio.to_thread(lambda: engine.containers.get(sandbox.container_id).attrs)
    assert posture(inspected) == json.loads(GOLDEN.read_text()), json.dumps(posture(inspected), indent=2)
    assert inspected["HostConfig"]["Runtime"] == (GVISOR if GVISOR in engine.info()["Runtimes"] else "runc")
    assert {"/proc/kcore", "/proc/keys", "/sys/firmware"} <= set(inspected["HostConfig"]["MaskedPaths"])
    assert inspected["Config"]["Labels"]["traced.owner"] == owner("posture")


@pytest.fixture(scope="module")
def report(image: Image) -> dict[str, Any]:
    """What the intruder reports from inside."""

    async def main() -> dict[str, Any]:
        async with SandboxSource((ENVIRONMENTS / "intruder.py").read_text(), owner=owner("posture")) as source:
            report: dict[str, Any] = json.loads((await source.episode().reset(0)).system)
            return report

    return asyncio.run(main())


def test_there_is_no_network(report: dict[str, Any]) -> None:
    assert report["connect"] == OSError.__name__
    assert report["resolve"] == socket.gaierror.__name__
    assert report["interfaces"] in (["lo"], ["lo", "sit0"], ["lo", "tunl0"])


@pytest.mark.parametrize("path", ["/", "/app", "/etc", "/dev", "/dev/shm"])
def test_nothing_but_tmp_can_be_written(report: dict[str, Any], path: str) -> None:
    assert report["write /tmp"] == "wrote"
    assert report[f"write {path}"] in {"OSError", "PermissionError", "FileNotFoundError"}


def test_tmp_is_small_and_cannot_be_executed_from(report: dict[str, Any]) -> None:
    assert report["fill /tmp"] == "OSError"
    assert report["run /tmp"] == "PermissionError"


def test_a_fork_bomb_stops_within_the_process_limit(report: dict[str, Any]) -> None:
    count, error = report["forks"].split()
    assert 0 < int(count) < SandboxLimits().pids
    assert error == "BlockingIOError"


def test_open_files_are_limited(report: dict[str, Any]) -> None:
    count, errno = report["files"].split()
    assert int(count) < SandboxLimits().open_files
    assert errno == "24"


def test_no_privilege_is_held_or_gained(report: dict[str, Any]) -> None:
    assert report["uid"] == 65534
    assert report["setuid"] == "PermissionError"
    assert int(report["capabilities"], 16) == int(report["bounding"], 16) == 0
    assert report["no_new_privileges"] == "1"
    assert report["seccomp"] == "2"
    assert report["mount"] in {"OSError", "PermissionError"}


def test_there_is_no_shell_and_no_secret(report: dict[str, Any]) -> None:
    assert report["shells"] == []
    assert report["secrets"] == []
