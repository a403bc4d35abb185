"""What the engine is asked for and how its refusals are told, where no engine here can show it."""

from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError, NotFound
from requests import Response

from sandbox.docker_engine import create, remove, weaknesses
from sandbox.errors import EngineDown
from sandbox.policy import SandboxLimits, container_options


def client_of(runtimes: dict[str, object] | None) -> Any:
    """A client whose engine has these runtimes; a container is what it was asked for."""
    made = SimpleNamespace(create=lambda image, command, **options: (image, command, options))
    return SimpleNamespace(info=lambda: {"Runtimes": runtimes}, containers=made)


@pytest.mark.parametrize(
    ("runtimes", "asked"), [({"runc": {}, "runsc": {}}, "runsc"), ({"runc": {}}, None), (None, None)]
)
def test_a_container_is_asked_for_with_the_policy_and_its_labels_alone(
    runtimes: dict[str, object] | None, asked: str | None
) -> None:
    limits = SandboxLimits(memory_mb=64)
    made: Any = create(client_of(runtimes), "image", ["go"], limits=limits, labels={"a": "b"}, hash_seed=7)
    assert made == ("image", ["go"], {"labels": {"a": "b"}, **container_options(limits, hash_seed=7, runtime=asked)})


def refused(status: int) -> APIError:
    response = Response()
    response.status_code = status
    return (NotFound if status == 404 else APIError)("refused", response=response)


@pytest.mark.parametrize(("status", "told"), [(404, False), (409, False), (500, True)])
def test_only_a_removal_that_will_not_come_about_is_told(status: int, told: bool) -> None:
    """404: it is gone; 409: somebody else is at it."""

    def fail(**options: bool) -> None:
        assert options == {"force": True, "v": True}
        raise refused(status)

    container = SimpleNamespace(remove=fail)
    if told:
        with pytest.raises(EngineDown, match="500 Server Error"):
            remove(container)
    else:
        remove(container)


FILTERED = {"SecurityOptions": ["name=seccomp,profile=default"]}


def engine(version: str, *, by: str = "Engine", **info: object) -> Any:
    told = {"Version": version, "Components": [{"Name": by}]}
    return SimpleNamespace(info=lambda: {**FILTERED, **info}, version=lambda: told)


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
def test_an_engine_that_refuses_too_little_is_told(old: Any) -> None:
    assert len(weaknesses(old)) == 1


@pytest.mark.parametrize(
    "fine",
    [engine("23.0.0"), engine("4.9.3", by="Podman Engine"), engine("20.10.24", Runtimes={"runsc": {}}), engine("dev")],
)
def test_of_any_other_nothing_is_known(fine: Any) -> None:
    assert weaknesses(fine) == []
