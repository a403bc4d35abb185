"""The posture as the engine records it, and as an intruder inside the container meets it."""

import asyncio
import json
import socket
from typing import Any

import pytest

from sandbox.client import SandboxSource
from sandbox.image import Image
from sandbox.policy import SandboxLimits
from tests.integration.sandbox.conftest import ENVIRONMENTS

pytestmark = pytest.mark.docker
MIB = 1024 * 1024
GOLDEN_HOST = {
    "Binds": None,
    "CapAdd": None,
    "CapDrop": ["ALL"],
    "Devices": None,
    "DeviceRequests": None,
    "GroupAdd": None,
    "Init": True,
    "IpcMode": "none",
    "Links": None,
    "LogConfig": {"Type": "none", "Config": {}},
    "Memory": 256 * MIB,
    "MemorySwap": 256 * MIB,
    "NanoCpus": 1_000_000_000,
    "NetworkMode": "none",
    "PidMode": "",
    "PidsLimit": 32,
    "Privileged": False,
    "PublishAllPorts": False,
    "ReadonlyRootfs": True,
    "SecurityOpt": ["no-new-privileges:true"],
    "Tmpfs": {"/tmp": "rw,nosuid,nodev,noexec,mode=1777,size=16m"},
    "UTSMode": "",
    "UsernsMode": "",
    "VolumesFrom": None,
}
GOLDEN_ULIMITS = [{"Name": "core", "Hard": 0, "Soft": 0}, {"Name": "nofile", "Hard": 64, "Soft": 64}]


def test_the_golden_posture_of_a_running_container(engine: Any, lamp_shop: str) -> None:
    async def main() -> dict[str, Any]:
        async with SandboxSource(lamp_shop, owner="test-posture") as source:
            sandbox = await source.sandbox()
            return await asyncio.to_thread(lambda: engine.containers.get(sandbox.container_id).attrs)

    found = asyncio.run(main())
    host = found["HostConfig"]
    assert {
        name: host.get(name) or GOLDEN_HOST[name] if not GOLDEN_HOST[name] else host[name] for name in GOLDEN_HOST
    } == (GOLDEN_HOST)
    assert sorted(host["Ulimits"], key=lambda limit: limit["Name"]) == GOLDEN_ULIMITS
    assert {"/proc/kcore", "/proc/keys", "/sys/firmware"} <= set(host["MaskedPaths"])
    assert found["Config"]["User"] == "65534:65534"
    assert found["Config"]["Labels"]["traced.owner"] == "test-posture"
    assert found["Mounts"] == []
    assert list(found["NetworkSettings"]["Networks"]) == ["none"]


@pytest.fixture(scope="module")
def seen(image: Image) -> dict[str, Any]:
    """What the intruder reports from inside."""

    async def main() -> dict[str, Any]:
        async with SandboxSource((ENVIRONMENTS / "intruder.py").read_text(), owner="test-posture") as source:
            report: dict[str, Any] = json.loads((await source.episode().reset(0)).system)
            return report

    return asyncio.run(main())


def test_there_is_no_network(seen: dict[str, Any]) -> None:
    assert seen["connect"] == OSError.__name__
    assert seen["resolve"] == socket.gaierror.__name__
    assert seen["interfaces"] in (["lo"], ["lo", "sit0"], ["lo", "tunl0"])


@pytest.mark.parametrize("where", ["/", "/app", "/etc", "/dev", "/dev/shm"])
def test_nothing_but_tmp_can_be_written(seen: dict[str, Any], where: str) -> None:
    assert seen["write /tmp"] == "wrote"
    assert seen[f"write {where}"] in {"OSError", "PermissionError", "FileNotFoundError"}


def test_tmp_is_small_and_cannot_be_executed_from(seen: dict[str, Any]) -> None:
    assert seen["fill /tmp"] == "OSError"
    assert seen["run /tmp"] == "PermissionError"


def test_a_fork_bomb_stops_within_the_process_limit(seen: dict[str, Any]) -> None:
    count, error = seen["forks"].split()
    assert 0 < int(count) < SandboxLimits().pids
    assert error == "BlockingIOError"


def test_open_files_are_limited(seen: dict[str, Any]) -> None:
    count, errno = seen["files"].split()
    assert int(count) < SandboxLimits().open_files
    assert errno == "24"


def test_no_privilege_is_held_or_gained(seen: dict[str, Any]) -> None:
    assert seen["uid"] == 65534
    assert seen["setuid"] == "PermissionError"
    assert int(seen["capabilities"], 16) == int(seen["bounding"], 16) == 0
    assert seen["no_new_privileges"] == "1"
    assert seen["seccomp"] == "2"
    assert seen["mount"] in {"OSError", "PermissionError"}


def test_there_is_no_shell_and_no_secret(seen: dict[str, Any]) -> None:
    assert seen["shells"] == []
    assert seen["secrets"] == []
