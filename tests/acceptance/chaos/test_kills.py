"""kill -9 of every process of a real service, at node boundaries and at random moments, until a real cycle is done.

The short version: ``python -m benchmarks.chaos`` is the long one. Each has a Docker engine of its own, which needs
root; without it neither the engine nor sandbox workers are killed. PostgreSQL's campaign is left to people in CI, which
has an hour: the campaign of SQLite kills every kind of process.
"""

import os
from pathlib import Path

import pytest

from benchmarks.chaos import postgres
from benchmarks.chaos.__main__ import service_environment
from benchmarks.chaos.campaign import Campaign
from benchmarks.chaos.victims import kinds

KILLS = {"sqlite": 9, "postgres": 3}
# Enough for one capability with an environment.
EPISODES = 84
TIMEOUT_S = 1500.0

pytestmark = [pytest.mark.docker, pytest.mark.timeout(TIMEOUT_S + 300)]


@pytest.mark.parametrize(
    "store",
    [
        "sqlite",
        pytest.param(
            "postgres",
            marks=[
                pytest.mark.optional,
                pytest.mark.skipif(bool(postgres.missing()), reason=postgres.missing()),
                pytest.mark.release,
            ],
        ),
    ],
)
def test_killed_again_and_again_nothing_is_lost(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", os.environ.get("DOCKER_HOST", ""))  # put back at the end
    with service_environment(store, 0, EPISODES) as (place, engine):
        campaign = Campaign(place, engine, KILLS[store], seed=1, timeout_s=TIMEOUT_S)
        campaign.run()
        figures = campaign.figures()
        assert campaign.violations == [], place.last_lines(40)
        assert figures["kills"] == campaign.kills
        assert figures["cycles"].get("finished", 0) >= 1
        assert store != "sqlite" or {kill.victim for kill in campaign.done} == {*kinds(engine)}
        assert Path(place.data_dir / "runs").is_dir()
