"""Whether every part can do its work, asked of the parts: the store, the disk, Docker, and the service's own state.

Invariants: nothing is changed by asking; all parts are asked side by side and the answer comes within ``PATIENCE_S``,
whatever hangs: a part that has not answered is dead, and is not asked a second time while it still owes an answer.
How it fails: a part's failure is its entry in ``Readiness.dead``, in its own words. Not covered: devices (``/devices``)
and what holds a stage up (``/status``).

The service's figures for Prometheus.

Invariants: counts come from the store, so that they survive restarts; labels are few and bounded (states, stages) and
never ids. Not covered: figures of engines and the router.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock, Thread

import sqlalchemy
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import func
from sqlmodel import col, select

from sandbox.docker_engine import connect
from store.database import reading, session
from store.repositories.attempts import AttemptState
from store.repositories.cycles import try_writing
from store.service_tables import AttemptRow
from store.tables import CycleRow, PromotionRow
from traced.api.control import Control
from traced.client.models import Readiness
from traced.core.errors import TracedError

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


def prometheus(control: Control) -> bytes:
    """All figures, in the text format (``prometheus_client.CONTENT_TYPE_LATEST``)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(control))
    return generate_latest(registry)


@dataclass(eq=False)
class _Figures(Collector):
    """The families, read afresh."""

    control: Control

    def collect(self) -> Iterator[Metric]:
        """Each family in turn."""
        status = self.control.status()
        up_s = (self.control.now() - self.control.since).total_seconds()
        yield GaugeMetricFamily("traced_up_seconds", "since the service started", value=up_s)
        yield GaugeMetricFamily("traced_cycle_running", "a cycle is at work", value=float(status.running is not None))
        yield GaugeMetricFamily("traced_waiting_adapters", "adapters that wait for a person", value=len(status.waiting))
        live = sum(one.live for one in status.adapters)
        yield GaugeMetricFamily("traced_live_adapters", "adapters that take traffic", value=live)
        yield GaugeMetricFamily("traced_parked_inputs", "inputs that wait for their release", value=len(status.parked))
        yield GaugeMetricFamily(
            "traced_held_up_stages", "stages that wait for their surroundings", value=len(status.held_up)
        )
        yield from self._counted()

    def _counted(self) -> Iterator[Metric]:
        with reading(self.control.store) as opened:
            by_state = select(CycleRow.state, func.count()).group_by(col(CycleRow.state))
            cycles = opened.exec(by_state).all()
            by_end = select(AttemptRow.stage, AttemptRow.state, func.count())
            by_end = by_end.where(AttemptRow.state != AttemptState.RUNNING.value)  # a counter never falls
            attempts = opened.exec(by_end.group_by(col(AttemptRow.stage), col(AttemptRow.state))).all()
            by_entry = select(PromotionRow.state, func.count()).group_by(col(PromotionRow.state))
            promotions = opened.exec(by_entry).all()
        by_cycle = GaugeMetricFamily("traced_cycles", "cycles by state", labels=["state"])
        for state, count in sorted(cycles):
            by_cycle.add_metric([state], count)
        yield by_cycle
        ended = CounterMetricFamily("traced_attempts", "attempts at stages by their end", labels=["stage", "state"])
        for stage, state, count in sorted(attempts):
            ended.add_metric([stage, state], count)
        yield ended
        entries = CounterMetricFamily("traced_promotions", "entries of the promotion log", labels=["state"])
        for state, count in sorted(promotions):
            entries.add_metric([state], count)
        yield entries
