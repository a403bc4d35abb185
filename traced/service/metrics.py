"""The service's figures for Prometheus.

Invariants: counts come from the store, so that they survive restarts; labels are few and bounded (states, stages) and
never ids. Not covered: figures of engines and the router.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import func
from sqlmodel import col, select

from store.database import reading
from store.repositories.attempts import AttemptState
from store.service_tables import AttemptRow
from store.tables import CycleRow, PromotionRow
from traced.service.control import Control


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
