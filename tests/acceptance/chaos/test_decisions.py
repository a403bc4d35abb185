"""A short campaign of ``benchmarks.decisions``: eight clients, fifty faults, no violation."""

import pytest

from benchmarks.decisions.__main__ import measure


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_decisions_hold_while_the_service_fails() -> None:
    figures = measure(faults=50, seed=1)
    assert figures["meets"], figures
    # On a busy machine fewer fit between the faults; the benchmark has the aim.
    assert figures["operations"] >= 25
    assert figures["answers"]["done"] >= 10
