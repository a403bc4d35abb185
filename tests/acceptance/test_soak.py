"""Two minutes of ``benchmarks.soak``: the router under traffic, promotions, rollbacks and kills loses nothing."""

import pytest

from benchmarks.soak import Plan, measure


@pytest.mark.timeout(600)
def test_nothing_is_lost_and_no_answer_is_anothers() -> None:
    found = measure(Plan(seconds=120, every=22, clients=8, lag_s=10))  # how soon a rollback counts is the benchmark's
    assert found["requests"] > 500, found
    assert found["promotions"] > 20, found
    assert min(found["kills"].get(name, 0) for name in ("embedded", "recorder")) >= 2, found
    assert {name: found[name] for name in found["aims"]} == found["aims"], found
