"""The service's figures in Prometheus' text format (version 0.0.4).

Invariants: counts come from the store, so that they survive restarts; labels are few and bounded (states, stages) and
never ids. Not covered: figures of engines and the router.
"""

from collections import Counter

from sqlalchemy import func
from sqlmodel import col, select

from store.database import reading
from store.service_tables import AttemptRow
from store.tables import CycleRow, PromotionRow
from traced.service.control import Control


def prometheus(control: Control) -> str:
    """All figures, one family after the other."""
    with reading(control.store) as opened:
        cycles = Counter(dict(opened.exec(select(CycleRow.state, func.count()).group_by(col(CycleRow.state))).all()))
        attempts = opened.exec(
            select(AttemptRow.stage, AttemptRow.state, func.count()).group_by(
                col(AttemptRow.stage), col(AttemptRow.state)
            )
        ).all()
        promotions = opened.exec(select(PromotionRow.state, func.count()).group_by(col(PromotionRow.state))).all()
    status = control.status()
    lines = [
        *_family("traced_up_seconds", "gauge", "since the service started", [("", _seconds(control))]),
        *_family("traced_cycle_running", "gauge", "a cycle is at work", [("", float(status.running is not None))]),
        *_family("traced_waiting_adapters", "gauge", "adapters that wait for a person", [("", len(status.waiting))]),
        *_family("traced_live_adapters", "gauge", "adapters that take traffic", [("", _live(control))]),
        *_family("traced_cycles", "gauge", "cycles by state", [(f'state="{k}"', v) for k, v in sorted(cycles.items())]),
        *_family(
            "traced_attempts_total",
            "counter",
            "attempts at stages by their end",
            [(f'stage="{stage}",state="{state}"', count) for stage, state, count in sorted(attempts)],
        ),
        *_family(
            "traced_promotions_total",
            "counter",
            "entries of the promotion log",
            [(f'state="{state}"', count) for state, count in sorted(promotions)],
        ),
    ]
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, told: str, samples: list[tuple[str, float]]) -> list[str]:
    head = [f"# HELP {name} {told}", f"# TYPE {name} {kind}"]
    return head + [f"{name}{{{labels}}} {value:g}" if labels else f"{name} {value:g}" for labels, value in samples]


def _seconds(control: Control) -> float:
    return (control.now() - control.since).total_seconds()


def _live(control: Control) -> int:
    return sum(one.live for one in control.adapters())
