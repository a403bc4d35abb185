"""Readiness checks (service state, store, disk, Docker) and Prometheus metrics.

Invariants: checks run in parallel and the report is complete within ``PATIENCE_S``; a check that has not returned
counts as failed and is not started again until it does. Counters are read from the store, so that they survive
restarts; labels are bounded (states, stages), never ids. Not covered: metrics of engines and of the router.
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
from store.database import read_session, write_session
from store.repositories.attempts import AttemptState
from store.repositories.cycles import check_writable
from store.repositories.promotions import live_adapters, served_base
from store.service_tables import AttemptRow
from store.tables import CycleRow, PromotionRow
from traced.api.control import Control
from traced.client.models import Readiness
from traced.core.errors import TracedError
from traced.inference.model_files import base_name

PATIENCE_S = 5.0
LEAST_FREE = 32 * 2**20  # bytes; about the size of an adapter of a small model with its checkpoint

Part = Callable[[], object]  # returns if the part works, raises the reason if not


@dataclass
class Parts:
    """The readiness checks by name; a call runs all of them."""

    parts: Mapping[str, Part]
    patience_s: float = PATIENCE_S
    _unanswered: dict[str, "Future[object]"] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def __call__(self) -> Readiness:
        """Run the checks and report failed parts with the reasons; may be called on any thread."""
        with self._lock:
            futures = {name: self._start_check(name, part) for name, part in self.parts.items()}
        wait(futures.values(), timeout=self.patience_s)
        failures = {name: _failure_reason(future, self.patience_s) for name, future in futures.items()}
        dead = {name: reason for name, reason in failures.items() if reason}
        return Readiness(ready=not dead, dead=dead)

    def _start_check(self, name: str, part: Part) -> "Future[object]":
        if name not in self._unanswered or self._unanswered[name].done():
            self._unanswered[name] = future = Future[object]()
            # A daemon thread instead of a pool: a check that hangs must block neither the others nor the exit.
            Thread(target=_run_check, args=(part, future), name=f"ready {name}", daemon=True).start()
        return self._unanswered[name]


def parts_of(control: Control) -> Parts:
    """Return the readiness checks of the service."""
    return Parts(
        {
            "service": partial(_check_service, control),
            "store": partial(_check_store, control.store),
            "disk": partial(_check_disk, control.settings.data_dir),
            "docker": _check_docker,
        }
    )


def _check_service(control: Control) -> None:
    if control.state != "ready":
        raise TracedError(f"the service is {control.state}")


def _check_store(store: sqlalchemy.Engine) -> None:
    """Check that the store can be written."""
    # A read would also succeed if the write lock is stuck or the database is a read-only replica.
    with write_session(store) as session:
        check_writable(session)


def _check_disk(data_dir: Path) -> None:
    if not os.access(data_dir, os.W_OK):
        raise TracedError(f"{data_dir} cannot be written to")
    free = shutil.disk_usage(data_dir).free
    if free < LEAST_FREE:
        raise TracedError(f"{data_dir} has {free / 2**20:.0f} MiB left, fewer than {LEAST_FREE / 2**20:.0f}")


def _check_docker() -> None:
    connect().close()


def _run_check(part: Part, future: "Future[object]") -> None:
    try:
        future.set_result(part())
    except Exception as error:
        future.set_exception(error)


def _failure_reason(future: "Future[object]", patience_s: float) -> str:
    """Return the reason of a failed check, "" if it passed."""
    if not future.done():
        return f"no answer within {patience_s:g} s"
    error = future.exception()
    return "" if error is None else str(error) or type(error).__name__


def prometheus(control: Control) -> bytes:
    """Return all metrics in Prometheus' text format (``prometheus_client.CONTENT_TYPE_LATEST``)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Metrics(control))
    return generate_latest(registry)


@dataclass(eq=False)
class _Metrics(Collector):
    """Metric families, read from the store at every scrape."""

    control: Control

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        status = self.control.status()
        up_s = (self.control.now() - self.control.since).total_seconds()
        yield GaugeMetricFamily("traced_up_seconds", "seconds since the start of the service", value=up_s)
        yield GaugeMetricFamily(
            "traced_cycle_running", "1 while a cycle is running", value=float(status.running is not None)
        )
        yield GaugeMetricFamily(
            "traced_waiting_adapters", "adapters with a pending decision", value=len(status.waiting)
        )
        with read_session(self.control.store) as session:
            live = len(live_adapters(session, served_base(session, base_name(self.control.settings))))
        yield GaugeMetricFamily(
            "traced_live_adapters", "adapters that take all traffic of their capability", value=live
        )
        yield GaugeMetricFamily("traced_quarantined_inputs", "quarantined inputs", value=len(status.quarantined))
        yield GaugeMetricFamily(
            "traced_blocked_stages", "stages blocked by the infrastructure", value=len(status.blocked)
        )
        yield from self._store_metrics()

    def _store_metrics(self) -> Iterator[Metric]:
        with read_session(self.control.store) as session:
            by_state = select(CycleRow.state, func.count()).group_by(col(CycleRow.state))
            cycles = session.exec(by_state).all()
            by_end = select(AttemptRow.stage, AttemptRow.state, func.count())
            # Running attempts are left out: their number falls, and a counter must not fall.
            by_end = by_end.where(AttemptRow.state != AttemptState.RUNNING.value)
            attempts = session.exec(by_end.group_by(col(AttemptRow.stage), col(AttemptRow.state))).all()
            by_entry = select(PromotionRow.state, func.count()).group_by(col(PromotionRow.state))
            promotions = session.exec(by_entry).all()
        by_cycle = GaugeMetricFamily("traced_cycles", "cycles by state", labels=["state"])
        for state, count in sorted(cycles):
            by_cycle.add_metric([state], count)
        yield by_cycle
        attempt_counts = CounterMetricFamily(
            "traced_attempts", "ended attempts at stages, by final state", labels=["stage", "state"]
        )
        for stage, state, count in sorted(attempts):
            attempt_counts.add_metric([stage, state], count)
        yield attempt_counts
        entries = CounterMetricFamily("traced_promotions", "entries of the promotion log", labels=["state"])
        for state, count in sorted(promotions):
            entries.add_metric([state], count)
        yield entries
