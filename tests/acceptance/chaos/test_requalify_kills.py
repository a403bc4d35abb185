"""``traced requalify`` killed with SIGKILL at its boundaries: the same command goes on, and nothing is lost or doubled.

A boundary is the first start or end of a stage for a capability, or the moment when half of the predecessor's gate
episodes are stored. One test kills at those of the stages that requalification adds or changes, the other at all of
them. Both are run before a release: CI has an hour.
"""

import os
import subprocess
import sys
import time
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

import pytest
from sqlalchemy import Engine

from benchmarks.chaos.violations import Remembered, remember, violations
from store.database import open_store, read_session, sqlite_url
from store.repositories.cycles import list_stage_events
from store.repositories.environments import list_environments
from store.repositories.promotions import serving_adapters
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from tests.acceptance.test_requalify import CYCLE, SMALL, save_live_adapter
from tests.integration.test_routing import ADAPTER
from traced.pipeline.handover import find_handover
from traced.pipeline.predecessor import PREDECESSOR

LIMIT_S = 1500.0
POLL_S = 0.05
# The predecessor's episodes, its environments that are admitted again, and the comparison with it.
OWN_STAGES = {"play predecessor", "admit", "hand over"}


class Boundary(NamedTuple):
    """A stage, for a capability or "", in a state: started or finished, or "half" of its episodes stored."""

    stage: str
    capability: str
    state: str


pytestmark = [pytest.mark.docker, pytest.mark.release, pytest.mark.timeout(LIMIT_S + 300)]


@pytest.mark.parametrize("stages", [OWN_STAGES, None])
def test_killed_at_its_boundaries_it_goes_on(stages: Set[str] | None, tmp_path: Path) -> None:
    data_dir = tmp_path / "traced-data"
    marks = {"TRACED_DATA_DIR": str(data_dir)}
    save_live_adapter(data_dir)
    store = open_store(sqlite_url(data_dir / "traced.db"))
    remembered: Remembered = {}
    breaches_before = {*violations(store, data_dir, remembered, marks)}
    killed: list[Boundary] = []
    deadline = time.monotonic() + LIMIT_S
    while (boundary := killed_at_next(store, tmp_path, marks, stages, {*killed}, deadline)) is not None:
        killed.append(boundary)
        remember(store, remembered)
    assert {*violations(store, data_dir, remembered, marks)} <= breaches_before
    assert (stages or {"collect", "analyze", "compose", "report"}) <= {boundary.stage for boundary in killed}
    assert Boundary("play predecessor", "", "half") in killed
    with read_session(store) as session:
        episodes = TrajectoryFilter(source="desk", split="gate", model=PREDECESSOR, cycle_id=CYCLE)
        assert len(list_trajectories(session, episodes)) == SMALL["gate.seeds"]
        assert len([row for row in list_environments(session, CYCLE) if row.synthesizer == "inherited"]) == 1
        handover, new = find_handover(session, CYCLE), serving_adapters(session, "bundled-large")
        assert serving_adapters(session, "bundled") == [ADAPTER]
    store.dispose()
    assert handover is not None
    assert new == (list(handover.versions) if handover.answer.value == "pass" else [])


def killed_at_next(
    store: Engine, folder: Path, marks: dict[str, str], stages: Set[str] | None, killed: Set[Boundary], deadline: float
) -> Boundary | None:
    """Run the command and kill it at the next boundary of ``stages`` (None: all); None if it ended with code 0."""
    words = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "traced", "requalify", "--model", "bundled-large", "--yes", "--json", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"} | marks
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
            new = [b for b in boundaries(store) if b not in killed and (stages is None or b.stage in stages)]
            if new:
                return new[0]
            time.sleep(POLL_S)
        assert process.returncode == 0, (folder / "log").read_text()[-2000:]
        return None
    finally:
        process.kill()
        process.wait()


def boundaries(store: Engine) -> list[Boundary]:
    """Return the boundaries that the cycle has passed, oldest first."""
    with read_session(store) as session:
        events = [Boundary(e.stage, e.capability or "", e.state.value) for e in list_stage_events(session, CYCLE)]
        episodes = TrajectoryFilter(source="desk", split="gate", model=PREDECESSOR, cycle_id=CYCLE)
        is_half = len(list_trajectories(session, episodes)) >= SMALL["gate.seeds"] / 2
    return [*dict.fromkeys(events), *([Boundary("play predecessor", "", "half")] if is_half else [])]
