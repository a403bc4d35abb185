"""Power cuts during a cycle, the short version of ``python -m benchmarks.chaos --profile power``."""

import pytest

from benchmarks.chaos.power.profile import cut_cycles
from benchmarks.chaos.power.recording import missing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.skipif(bool(missing()), reason=missing())]


def test_a_cycle_loses_nothing_and_goes_on() -> None:
    result = cut_cycles("sqlite", 2, 7, 1, print)
    assert result.violations == []
    assert result.points == 2
