"""What the engine is asked for and how its refusals are told, where no engine here can show it."""

from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError, NotFound
from requests import Response
from requests.exceptions import ConnectionError, ReadTimeout

from sandbox.docker_engine import create, remove, wait_for_exit, weaknesses
from sandbox.errors import EngineDown
from sandbox.policy import SandboxLimits, container_options


def client_of(runtimes: dict[str, object] | None) -> Any:
    """Create a client whose engine has these runtimes; a created container records its arguments."""
    containers = SimpleNamespace(create=lambda image, command, **options: (image, command, options))
    return SimpleNamespace(info=lambda: {"Runtimes": runtimes}, containers=containers)


@pytest.mark.parametrize(
    ("runtimes", "expected_runtime"), [({"runc": {}, "runsc": {}}, "runsc"), ({"runc": {}}, None), (None, None)]
)
def test_a_container_is_asked_for_with_the_policy_and_its_labels_alone(
    runtimes: dict[str, object] | None, expected_runtime: str | None
) -> None:
    limits = SandboxLimits(memory_mb=64)
    container: Any = create(client_of(runtimes), "image", ["go"], limits=limits, labels={"a": "b"}, hash_seed=7)
    assert container == (
        "image",
        ["go"],
        {"labels": {"a": "b"}, **container_options(limits, hash_seed=7, runtime=expected_runtime)},
    )


def api_error(status: int) -> APIError:
    response = Response()
    response.status_code = status
    return (NotFound if status == 404 else APIError)("refused", response=response)


@pytest.mark.parametrize(("status", "is_raised"), [(404, False), (409, False), (500, True)])
def test_only_a_failed_removal_is_raised(status: int, is_raised: bool) -> None:
    """404: it is gone; 409: somebody else is at it."""

    def fail(**options: bool) -> None:
        assert options == {"force": True, "v": True}
        raise api_error(status)

    container = SimpleNamespace(remove=fail)
    if is_raised:
        with pytest.raises(EngineDown, match="500 Server Error"):
            remove(container)
    else:
        remove(container)


def ended_container(
    state: dict[str, object], *, wait_error: Exception | None = None, engine_is_down: bool = False
) -> Any:
    """Create a container in this state, whose wait or engine fails."""

    def wait(*, timeout: float) -> None:
        if wait_error is not None:
            raise wait_error

    def reload() -> None:
        if engine_is_down:
            raise ConnectionError("[Errno 2] No such file or directory")

    return SimpleNamespace(wait=wait, reload=reload, attrs={"State": state})


RUNNING: dict[str, object] = {"Running": True, "ExitCode": 0, "OOMKilled": False}
KILLED: dict[str, object] = {"Running": False, "ExitCode": 137, "OOMKilled": True}


def test_the_state_decides_whether_a_container_has_ended() -> None:
    assert wait_for_exit(ended_container(KILLED), 1.0) == (137, True)
    assert wait_for_exit(ended_container(KILLED, wait_error=ReadTimeout()), 1.0) == (137, True)
    assert wait_for_exit(ended_container(RUNNING, wait_error=ReadTimeout()), 1.0) == (None, False)
    assert wait_for_exit(ended_container(RUNNING, wait_error=ConnectionError("Read timed out.")), 1.0) == (None, False)


def test_an_engine_that_is_gone_is_not_the_containers_fault() -> None:
    with pytest.raises(EngineDown, match="No such file"):
        wait_for_exit(ended_container(RUNNING, wait_error=ConnectionError("refused"), engine_is_down=True), 1.0)


FILTERED = {"SecurityOptions": ["name=seccomp,profile=default"]}


def engine(version: str, *, component: str = "Engine", **info: object) -> Any:
    version_info = {"Version": version, "Components": [{"Name": component}]}
    return SimpleNamespace(info=lambda: {**FILTERED, **info}, version=lambda: version_info)


@pytest.mark.parametrize(
    "old",
    [
        engine("20.10.24+dfsg1"),
        engine("19.03.8"),
        engine("27.0.1", SecurityOptions=["name=cgroupns"]),
        engine("27.0.1", SecurityOptions=["name=seccomp,profile=unconfined"]),
        engine("27.0.1", SecurityOptions=None),
    ],
)
def test_an_engine_that_refuses_too_little_is_reported(old: Any) -> None:
    assert len(weaknesses(old)) == 1


@pytest.mark.parametrize(
    "fine",
    [
        engine("23.0.0"),
        engine("4.9.3", component="Podman Engine"),
        engine("20.10.24", Runtimes={"runsc": {}}),
        engine("dev"),
    ],
)
def test_other_engines_have_no_known_weakness(fine: Any) -> None:
    assert weaknesses(fine) == []
