"""Two minutes of ``benchmarks.soak`` with one router: the router under traffic, promotions, rollbacks and kills loses nothing."""

import pytest

from benchmarks.soak.one_router import Plan, measure


@pytest.mark.timeout(600)
def test_nothing_is_lost_and_no_answer_is_anothers() -> None:
    figures = measure(
        Plan(seconds=120, kill_interval_s=22, clients=8, lag_s=10)
    )  # how soon a rollback counts is the benchmark's
    assert figures["requests"] > 500, figures
    assert figures["promotions"] > 20, figures
    assert min(figures["kills"].get(name, 0) for name in ("embedded", "recorder")) >= 2, figures
    assert {name: figures[name] for name in figures["aims"]} == figures["aims"], figures
