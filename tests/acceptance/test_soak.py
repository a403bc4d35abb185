"""A minute of ``benchmarks.soak`` with one router: under traffic, promotions, rollbacks and kills it loses nothing."""

import pytest

from benchmarks.soak.one_router import Plan, measure


@pytest.mark.release
@pytest.mark.timeout(600)
def test_nothing_is_lost_and_no_answer_is_anothers() -> None:
    # How soon a rollback counts is the benchmark's.
    figures = measure(Plan(seconds=50, kill_interval_s=9, clients=8, lag_s=10))
    assert figures["requests"] > 200, figures
    assert figures["promotions"] > 8, figures
    assert min(figures["kills"].get(name, 0) for name in ("embedded", "recorder")) >= 2, figures
    assert {name: figures[name] for name in figures["aims"]} == figures["aims"], figures
