"""A short campaign of ``benchmarks.decisions``: eight clients, fifty faults, no violation."""

import pytest

from benchmarks.decisions.__main__ import measure


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_decisions_hold_while_the_service_fails() -> None:
    figures = measure(faults=50, seed=1)
    assert figures["meets"], figures
    assert figures["operations"] >= 50
    assert figures["answers"]["done"] >= 20
