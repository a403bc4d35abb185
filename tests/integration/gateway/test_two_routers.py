"""A few seconds of ``benchmarks.soak`` with two routers on one PostgreSQL: a kill of each kind, and no violation."""

import pytest

from benchmarks.soak.two_routers import Plan, measure

pytestmark = pytest.mark.slow


def test_two_routers_agree_and_lose_nothing() -> None:
    figures = measure(Plan(seconds=8.0, kill_interval_s=0.7, clients=4, versions=3, recovery_s=0.5))
    assert all(figures["kills"].get(kind, 0) >= 1 for kind in ("engine", "router", "recorder")), figures
    assert figures["requests"] > 50, figures
    assert figures["explained"]["next turn on the other router"] > 10, figures
    assert {name: figures[name] for name in figures["aims"] if figures[name] > figures["aims"][name]} == {}, figures
