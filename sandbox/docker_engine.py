"""The Docker engine: reaching it, making a container under the policy, and clearing away what a crash left behind.

Invariants: every container made here carries the policy of ``policy.py`` unchanged and the labels of its owner and of
the process that started it. Every error of the engine becomes EngineDown (or its kinds) or ImageMissing here and
nowhere else. Calls block; asynchronous callers run them on threads. Not covered: engines behind TLS or SSH (attaching
needs a plain unix or TCP socket).
"""

import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, DockerException, ImageNotFound, InvalidVersion, NotFound
from docker.utils import version_lt
from requests.exceptions import RequestException

from sandbox.errors import EngineDown, EngineForbidden, EngineTooOld, ImageMissing
from sandbox.policy import (
    LABEL,
    LABEL_ENVIRONMENT,
    LABEL_OWNER,
    LABEL_PROCESS,
    SandboxLimits,
    container_options,
    runtime,
)

ENGINE_TIMEOUT_SECONDS = 120
CLEARING_SECONDS = 15  # for each answer while orphans are cleared away: where an engine hangs, the next time does it
API_NEEDED = "1.40"  # Docker 19.03: all of the policy, private cgroups apart
FILTERS_VSOCK = 23  # the major version of Docker since which the default seccomp filter refuses AF_VSOCK
DEFAULT_HOST = "unix:///var/run/docker.sock"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
START_FIELD = 22 - 3  # of what follows the command's closing parenthesis, which holds field 3 first


@contextmanager
def engine_errors(tag: str = "") -> Iterator[None]:
    """Turn the Docker client's exceptions into this package's."""
    try:
        yield
    except ImageNotFound as error:
        raise ImageMissing(tag) from error
    except (DockerException, RequestException) as error:
        raise EngineDown(_said(error)) from error


def _said(error: Exception) -> str:
    """What the system said, where that can be told from the layers of the client's libraries around it."""
    found = re.search(r"\[Errno \d+\] ([^'\")]+)", str(error))
    return found[1] if found else str(error)


def connect(timeout_s: float = ENGINE_TIMEOUT_SECONDS) -> Any:
    """A Docker client whose engine has answered and is new enough; raises EngineDown. The caller closes it."""
    _knock()
    with engine_errors():
        try:
            client = docker.from_env(timeout=timeout_s)  # asks for the engine's version
        except InvalidVersion as error:
            raise EngineTooOld("below what the client speaks", API_NEEDED) from error
        try:
            client.ping()
            if version_lt(client.api.api_version, API_NEEDED):
                raise EngineTooOld(client.api.api_version, API_NEEDED)
        except (DockerException, RequestException, EngineTooOld):
            client.close()
            raise
        return client


def weaknesses(client: Any) -> list[str]:
    """What this engine lets a container do that the policy counts on an engine to refuse; [] where nothing is known.

    Told from what the engine says of itself: Docker's version, and whether it filters system calls.
    """
    with engine_errors():
        info, version = client.info(), client.version()
    if runtime(info.get("Runtimes") or {}):
        return []  # gVisor's kernel, whatever the engine filters
    options = [str(option) for option in info.get("SecurityOptions") or []]
    if not any(option.startswith("name=seccomp") and "unconfined" not in option for option in options):
        return ["it filters no system calls (seccomp)"]
    names = [part.get("Name") for part in version.get("Components") or []]
    major = str(version.get("Version", "")).partition(".")[0]
    if "Engine" in names and major.isdecimal() and int(major) < FILTERS_VSOCK:
        return [f"Docker {FILTERS_VSOCK} and newer refuse AF_VSOCK sockets, this one lets environments open them"]
    return []


def _knock() -> None:
    """Try the unix socket first: the Docker client leaks its own socket where nobody listens."""
    host = os.environ.get("DOCKER_HOST", "") or DEFAULT_HOST
    if host.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as knocking:
            try:
                knocking.connect(host.removeprefix("unix://"))
            except PermissionError as error:
                raise EngineForbidden(host) from error
            except OSError as error:
                raise EngineDown(f"{host}: {error.strerror or error}") from error


def create(
    client: Any, image: str, command: list[str], *, limits: SandboxLimits, labels: dict[str, str], hash_seed: int
) -> Any:
    """A created (not started) container under the policy; raises ImageMissing or EngineDown."""
    with engine_errors(image):
        options = container_options(limits, hash_seed=hash_seed, runtime=runtime(client.info().get("Runtimes") or {}))
        return client.containers.create(image, command, labels=labels, **options)


def labels(owner: str, environment: str) -> dict[str, str]:
    """The labels of a container started by this process for ``owner``."""
    return {
        LABEL: "1",
        LABEL_OWNER: owner,
        LABEL_ENVIRONMENT: environment,
        LABEL_PROCESS: process_identity(os.getpid()),
    }


def attach(container: Any) -> tuple[socket.socket, Any]:
    """The container's stdio as (socket, the client's wrapper of it, to be closed too); attach before starting."""
    parameters = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1, "logs": 0}
    with engine_errors():
        wrapper = container.attach_socket(params=parameters)
    raw = getattr(wrapper, "_sock", wrapper)
    if not isinstance(raw, socket.socket):
        wrapper.close()
        raise EngineDown(f"its connection is a {type(raw).__name__}; use a unix socket or plain tcp:// in DOCKER_HOST")
    return raw, wrapper


def detach(wrapper: Any) -> None:
    """Close what ``attach`` opened; the HTTP response first, for it flushes the stream that the wrapper closes."""
    response = getattr(wrapper, "_response", None)
    if response is not None:
        response.close()
    wrapper.close()


def ended(container: Any, wait_seconds: float) -> tuple[int | None, bool]:
    """(exit code, out of memory) of a container that is ending; (None, False) when it still runs after the wait."""
    try:
        container.wait(timeout=wait_seconds)
        container.reload()
    except (RequestException, DockerException):
        return None, False
    state = container.attrs["State"]
    return int(state["ExitCode"]), bool(state["OOMKilled"])


def ran_out_of_memory(container: Any) -> bool:
    """Whether a process of the container, the worker or a child of it, was killed for memory; raises EngineDown.

    From the engine's own events, which nothing inside can forge; ``State.OOMKilled`` tells it only after the
    container's end. The engine keeps its last 256 events, and its clock is taken to be this machine's.
    """
    with engine_errors():
        told = container.client.api.events(
            since=0, until=time.time(), filters={"container": container.id, "event": "oom"}, decode=True
        )
        try:
            return next(iter(told), None) is not None
        finally:
            told.close()


def remove(container: Any) -> None:
    """Kill and remove; silent when it is gone already."""
    with engine_errors():
        try:
            container.remove(force=True, v=True)
        except NotFound:
            return
        except APIError as error:
            if error.status_code != 409:  # "removal ... is already in progress"
                raise


def process_identity(pid: int) -> str:
    """``pid@start.boot``: process ids are used again, with the start in clock ticks since a named boot they are not.

    proc(5), field 22 of ``/proc/PID/stat``; the time of day would change with every step of the clock, and a living
    process be taken for a dead one. Raises OSError where there is no such process.
    """
    stat = Path(f"/proc/{pid}/stat").read_text()
    ticks = stat.rpartition(")")[2].split()[START_FIELD]
    return f"{pid}@{ticks}.{BOOT_ID.read_text().strip()}"


def _alive(identity: str) -> bool:
    pid = identity.partition("@")[0]
    try:
        return pid.isdecimal() and process_identity(int(pid)) == identity
    except OSError:
        return False


def process_ids(started_by: Iterable[int]) -> list[int]:
    """The first process of each running container that one of these processes started; none where no engine answers."""
    pids = {str(pid) for pid in started_by}
    with suppress(EngineDown):
        client = connect()
        try:
            with engine_errors():
                found = client.containers.list(filters={"label": [LABEL]}, ignore_removed=True)
        finally:
            client.close()
        ours = [one for one in found if one.labels.get(LABEL_PROCESS, "").partition("@")[0] in pids]
        return [pid for one in ours if (pid := int(one.attrs["State"].get("Pid", 0)))]
    return []


def find_orphans(owner: str) -> list[str]:
    """Short ids of ``owner``'s containers whose starting process has ended. Raises EngineDown.

    Containers started on another machine through the same remote engine count as orphans: give each machine its owner.
    """
    return _each_orphan(owner, lambda container: None)


def reap_orphans(owner: str) -> list[str]:
    """Remove what ``find_orphans`` finds; returns the short ids. Raises EngineDown."""
    return _each_orphan(owner, remove)


def _each_orphan(owner: str, act: Callable[[Any], None]) -> list[str]:
    client = connect(CLEARING_SECONDS)
    try:
        with engine_errors():
            marks = [LABEL, f"{LABEL_OWNER}={owner}"]
            found = client.containers.list(all=True, filters={"label": marks}, ignore_removed=True)
        orphans = [container for container in found if not _alive(container.labels.get(LABEL_PROCESS, ""))]
        for container in orphans:
            act(container)
        return [str(container.short_id) for container in orphans]
    finally:
        client.close()
