"""Connect to the Docker engine, create containers under the policy, and remove orphaned containers.

Invariants: every container has exactly the options of ``policy.py``, and labels of its owner and of the process that
started it. Engine errors become EngineDown (or a subclass) or ImageMissing here and nowhere else. Calls block;
asynchronous callers use threads. Not covered: engines behind TLS or SSH (attaching needs a unix or TCP socket).
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
from docker import DockerClient
from docker.errors import APIError, DockerException, ImageNotFound, InvalidVersion, NotFound
from docker.models.containers import Container
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
# Limit for each response while orphans are removed. If the engine hangs, the next start removes the orphans.
ORPHAN_TIMEOUT_SECONDS = 15
# Docker 19.03, the first that supports the whole policy except private cgroups.
MIN_API_VERSION = "1.40"
# The major version since which Docker's default seccomp filter refuses AF_VSOCK.
VSOCK_FILTER_VERSION = 23
DEFAULT_HOST = "unix:///var/run/docker.sock"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Index of the start time, field 22 of ``/proc/PID/stat`` (proc(5)), in the fields after the command's closing
# parenthesis, which begin with field 3.
START_TIME_FIELD = 22 - 3


@contextmanager
def engine_errors(tag: str = "") -> Iterator[None]:
    """Turn the Docker client's exceptions into this package's errors."""
    try:
        yield
    except ImageNotFound as error:
        raise ImageMissing(tag) from error
    except (DockerException, RequestException) as error:
        raise EngineDown(_system_message(error)) from error


def _system_message(error: Exception) -> str:
    """Return the operating system's message without the text that the client's libraries add around it."""
    match = re.search(r"\[Errno \d+\] ([^'\")]+)", str(error))
    return match[1] if match else str(error)


def connect(timeout_s: float = ENGINE_TIMEOUT_SECONDS) -> DockerClient:
    """Return a Docker client whose engine has answered and is new enough; the caller closes it. Raises EngineDown."""
    _check_socket()
    with engine_errors():
        try:
            # This requests the engine's version.
            client = docker.from_env(timeout=timeout_s)
        except InvalidVersion as error:
            raise EngineTooOld("below what the client speaks", MIN_API_VERSION) from error
        try:
            client.ping()
            if version_lt(client.api.api_version, MIN_API_VERSION):
                raise EngineTooOld(client.api.api_version, MIN_API_VERSION)
        except (DockerException, RequestException, EngineTooOld):
            client.close()
            raise
        return client


def weaknesses(client: DockerClient) -> list[str]:
    """Return what this engine permits although the policy relies on the engine to refuse it; empty if nothing is known.

    The result follows from the version and the security options that the engine reports. Raises EngineDown.
    """
    with engine_errors():
        info, version = client.info(), client.version()
    if runtime(info.get("Runtimes") or {}):
        # gVisor has its own kernel, so the engine's filters do not matter.
        return []
    options = [str(option) for option in info.get("SecurityOptions") or []]
    if not any(option.startswith("name=seccomp") and "unconfined" not in option for option in options):
        return ["it filters no system calls (seccomp)"]
    names = [part.get("Name") for part in version.get("Components") or []]
    major = str(version.get("Version", "")).partition(".")[0]
    if "Engine" in names and major.isdecimal() and int(major) < VSOCK_FILTER_VERSION:
        return [
            f"Docker {VSOCK_FILTER_VERSION} and newer refuse AF_VSOCK sockets, this one lets environments open them"
        ]
    return []


def _check_socket() -> None:
    host = os.environ.get("DOCKER_HOST", "") or DEFAULT_HOST
    if host.startswith("unix://"):
        # Try a plain connection first, because the Docker client leaks a socket if nobody listens.
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(host.removeprefix("unix://"))
            except PermissionError as error:
                raise EngineForbidden(host) from error
            except OSError as error:
                raise EngineDown(f"{host}: {error.strerror or error}") from error


def create(
    client: DockerClient,
    image: str,
    command: list[str],
    *,
    limits: SandboxLimits,
    labels: dict[str, str],
    hash_seed: int,
) -> Container:
    """Create a container under the policy without starting it; raises ImageMissing or EngineDown."""
    with engine_errors(image):
        options = container_options(limits, hash_seed=hash_seed, runtime=runtime(client.info().get("Runtimes") or {}))
        return client.containers.create(image, command, labels=labels, **options)


def labels(owner: str, environment: str) -> dict[str, str]:
    """Return the labels of a container that this process starts for ``owner``; ``environment`` is a hash."""
    return {
        LABEL: "1",
        LABEL_OWNER: owner,
        LABEL_ENVIRONMENT: environment,
        LABEL_PROCESS: process_identity(os.getpid()),
    }


def attach(container: Container) -> tuple[socket.socket, Any]:
    """Attach to the stdio of a container that has not started yet; raises EngineDown.

    Returns the socket and the Docker client's wrapper around it; the caller closes both.
    """
    parameters = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1, "logs": 0}
    with engine_errors():
        wrapper = container.attach_socket(params=parameters)
    raw = getattr(wrapper, "_sock", wrapper)
    if not isinstance(raw, socket.socket):
        wrapper.close()
        raise EngineDown(f"its connection is a {type(raw).__name__}; use a unix socket or plain tcp:// in DOCKER_HOST")
    return raw, wrapper


def detach(wrapper: Any) -> None:
    """Close the wrapper that ``attach`` returned."""
    # Close the HTTP response first, because closing it flushes the stream that the wrapper closes.
    response = getattr(wrapper, "_response", None)
    if response is not None:
        response.close()
    wrapper.close()


def wait_for_exit(container: Container, wait_seconds: float) -> tuple[int | None, bool]:
    """Wait for the container's exit and return (exit code, out of memory).

    Returns (None, False) if the container still runs after ``wait_seconds``. Raises EngineDown.
    """
    with engine_errors():
        # The time-out has several exceptions, which a lost connection raises too: the container's state decides.
        with suppress(RequestException):
            container.wait(timeout=wait_seconds)
        container.reload()
    state = container.attrs["State"]
    if state["Running"]:
        return None, False
    return int(state["ExitCode"]), bool(state["OOMKilled"])


def ran_out_of_memory(container: Container) -> bool:
    """Return whether any process of the container was killed for lack of memory; raises EngineDown.

    The engine keeps its last 256 events; its clock is assumed to be this machine's.
    """
    with engine_errors():
        # Code in the container cannot forge the engine's events. ``State.OOMKilled`` is set only when the container
        # has ended.
        events = container.client.api.events(
            since=0, until=time.time(), filters={"container": container.id, "event": "oom"}, decode=True
        )
        try:
            return next(iter(events), None) is not None
        finally:
            events.close()


def remove(container: Container) -> None:
    """Kill and remove the container; do nothing if it is already gone. Raises EngineDown."""
    with engine_errors():
        try:
            container.remove(force=True, v=True)
        except NotFound:
            return
        except APIError as error:
            if error.status_code != 409:  # "removal ... is already in progress"
                raise


def process_identity(pid: int) -> str:
    """Identify a process across pid reuse, as ``pid@start.boot``.

    The start is in clock ticks since boot (proc(5), field 22 of ``/proc/PID/stat``). Raises OSError if there is no such
    process.
    """
    stat = Path(f"/proc/{pid}/stat").read_text()
    # Not the time of day: each time the clock is set, it would change and a living process would look dead.
    ticks = stat.rpartition(")")[2].split()[START_TIME_FIELD]
    return f"{pid}@{ticks}.{BOOT_ID.read_text().strip()}"


def _is_alive(identity: str) -> bool:
    pid = identity.partition("@")[0]
    try:
        return pid.isdecimal() and process_identity(int(pid)) == identity
    except OSError:
        return False


def process_ids(started_by: Iterable[int]) -> list[int]:
    """Return process ids of the running containers that these processes started; empty if no engine answers."""
    pids = {str(pid) for pid in started_by}
    with suppress(EngineDown):
        client = connect()
        try:
            with engine_errors():
                containers = client.containers.list(filters={"label": [LABEL]}, ignore_removed=True)
        finally:
            client.close()
        own_containers = [
            container for container in containers if container.labels.get(LABEL_PROCESS, "").partition("@")[0] in pids
        ]
        return [pid for container in own_containers if (pid := int(container.attrs["State"].get("Pid", 0)))]
    return []


def find_orphans(owner: str) -> list[str]:
    """Return short ids of ``owner``'s containers whose starting process has ended; raises EngineDown.

    Containers started on another machine through the same engine count as orphans: give each machine its own owner.
    """
    return _for_each_orphan(owner, lambda container: None)


def reap_orphans(owner: str) -> list[str]:
    """Remove the containers that ``find_orphans`` lists and return their short ids; raises EngineDown."""
    return _for_each_orphan(owner, remove)


def _for_each_orphan(owner: str, action: Callable[[Container], None]) -> list[str]:
    client = connect(ORPHAN_TIMEOUT_SECONDS)
    try:
        with engine_errors():
            label_filter = [LABEL, f"{LABEL_OWNER}={owner}"]
            containers = client.containers.list(all=True, filters={"label": label_filter}, ignore_removed=True)
        orphans = [container for container in containers if not _is_alive(container.labels.get(LABEL_PROCESS, ""))]
        for container in orphans:
            action(container)
        return [str(container.short_id) for container in orphans]
    finally:
        client.close()
