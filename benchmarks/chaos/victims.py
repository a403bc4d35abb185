"""Whom to kill: the service, its children, what they started, a sandbox's worker, the Docker engine.

Only processes that carry the place's marks, workers of the engine that ``DOCKER_HOST`` names, and an engine of one's
own are ever found here.
"""

import contextlib
from collections.abc import Iterator

import psutil

from benchmarks.chaos.dockerd import Dockerd
from benchmarks.chaos.place import Place
from benchmarks.chaos.violations import processes
from sandbox.docker_engine import connect
from sandbox.errors import EngineDown
from sandbox.policy import LABEL

MODULES = {
    "stage": "traced.pipeline.stage_worker",
    "trainer": "traced.training.process",
    "engine": "traced.inference.embedded",
}
WORKER = "sandbox.worker"
OF_DOCKER = ("worker", "dockerd")


def kinds(dockerd: Dockerd | None) -> list[str]:
    """Every kind of process that may be killed."""
    return ["daemon", *MODULES, *(OF_DOCKER if dockerd is not None else ())]


def running_processes(place: Place, dockerd: Dockerd | None) -> dict[str, list[psutil.Process]]:
    """The processes of each kind that run now; kinds without one are left out."""
    by_kind: dict[str, list[psutil.Process]] = {}
    for process in processes(place.marks):
        for kind, module in MODULES.items():
            with contextlib.suppress(psutil.Error, OSError):
                if module in process.cmdline():
                    by_kind.setdefault(kind, []).append(process)
    if place.alive:
        by_kind["daemon"] = [psutil.Process(place.pid)]
    if dockerd is not None and dockerd.alive and dockerd.process is not None:
        by_kind["dockerd"] = [psutil.Process(dockerd.process.pid)]
        by_kind |= {"worker": workers} if (workers := [*_workers()]) else {}
    return by_kind


def _workers() -> Iterator[psutil.Process]:
    """The workers inside the containers of the engine."""
    try:
        client = connect()
    except EngineDown:
        return
    with contextlib.closing(client), contextlib.suppress(Exception):  # a container may go while it is looked at
        for container in client.containers.list(filters={"label": [LABEL]}, ignore_removed=True):
            root = psutil.Process(client.api.inspect_container(container.id)["State"]["Pid"])
            yield from (process for process in root.children(recursive=True) if WORKER in process.cmdline())
