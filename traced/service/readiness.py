"""Whether every part can do its work, asked of the parts: the store, the disk, Docker, and the service's own state.

Invariants: nothing is changed by asking; all parts are asked side by side and the answer comes within ``PATIENCE_S``,
whatever hangs: a part that has not answered is dead, and is not asked a second time while it still owes an answer.
How it fails: a part's failure is its entry in ``Readiness.dead``, in its own words. Not covered: devices (``/devices``)
and what holds a stage up (``/status``).
"""

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock, Thread

import sqlalchemy

from sandbox.docker_engine import connect
from store.database import session
from store.repositories.targets import try_writing
from traced.client.models import Readiness
from traced.errors import TracedError
from traced.service.control import Control

PATIENCE_S = 5.0
LEAST_FREE = 32 * 2**20  # bytes; an adapter of a small model and its checkpoint need about as much

Part = Callable[[], object]  # returns when the part can work, and raises why it cannot


@dataclass
class Parts:
    """The parts by name; calling it asks them all."""

    parts: Mapping[str, Part]
    patience_s: float = PATIENCE_S
    _owed: dict[str, "Future[object]"] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def __call__(self) -> Readiness:
        """Which parts are dead, and why. May be called on any thread."""
        with self._lock:
            asked = {name: self._ask(name, part) for name, part in self.parts.items()}
        wait(asked.values(), timeout=self.patience_s)
        found = {name: _told(future, self.patience_s) for name, future in asked.items()}
        dead = {name: why for name, why in found.items() if why}
        return Readiness(ready=not dead, dead=dead)

    def _ask(self, name: str, part: Part) -> "Future[object]":
        if name not in self._owed or self._owed[name].done():
            self._owed[name] = future = Future[object]()
            Thread(target=_answer, args=(part, future), name=f"ready {name}", daemon=True).start()
        return self._owed[name]


def parts_of(control: Control) -> Parts:
    """The parts that a service needs."""
    return Parts(
        {
            "service": partial(_service, control),
            "store": partial(_store, control.store),
            "disk": partial(_disk, control.settings.data_dir),
            "docker": _docker,
        }
    )


def _service(control: Control) -> None:
    if control.state != "ready":
        raise TracedError(f"it is {control.state}")


def _store(store: sqlalchemy.Engine) -> None:
    """Whether it can be written: a lock that is not given back, or a database that only reads, is no use here."""
    with session(store) as opened:
        try_writing(opened)


def _disk(data_dir: Path) -> None:
    if not os.access(data_dir, os.W_OK):
        raise TracedError(f"{data_dir} cannot be written to")
    free = shutil.disk_usage(data_dir).free
    if free < LEAST_FREE:
        raise TracedError(f"{data_dir} has {free / 2**20:.0f} MiB left, fewer than {LEAST_FREE / 2**20:.0f}")


def _docker() -> None:
    connect().close()


def _answer(part: Part, future: "Future[object]") -> None:
    try:
        future.set_result(part())
    except Exception as error:
        future.set_exception(error)


def _told(future: "Future[object]", patience_s: float) -> str:
    """Why a part cannot work; "" when it can."""
    if not future.done():
        return f"no answer within {patience_s:g} s"
    error = future.exception()
    return "" if error is None else str(error) or type(error).__name__
