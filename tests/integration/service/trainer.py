"""A simulated training in a child process that reports its progress by files in its run's folder.

``begun``: the run is in the store. ``asked``: a pause was requested. Once the test writes ``go``, the training writes
``checkpoint``, or finishes if the test has written ``last``. ``cut short``: it was interrupted before that.
"""

import sys
import time
from pathlib import Path
from typing import Any

from store.database import open_store, sqlite_url, write_session
from store.records import RunState, TrainingRun
from store.repositories.adapters import save_training_run, set_training_state
from tests.unit.store.chain import T0
from traced.processes.child import Reporter, run_child
from traced.training.errors import TrainingPaused
from traced.training.job import PAUSE, folder_of_run

STARTED, PAUSE_REQUESTED, RELEASE = "begun", "asked", "go"
LAST, CHECKPOINT, CUT_SHORT = "last", "checkpoint", "cut short"


def work(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    data_dir, cycle, (capability, environment) = (arguments[name] for name in ("data_dir", "cycle_id", "given"))
    folder, run = folder_of_run(Path(data_dir), cycle, capability, environment), f"{cycle}/{capability}"
    store = open_store(sqlite_url(Path(data_dir) / "traced.db"))

    def note(state: RunState) -> None:
        with write_session(store) as session:
            set_training_state(session, run, state, at=T0)

    with write_session(store) as session:
        training_run = TrainingRun(run, cycle, capability, environment, "m", 0, {}, RunState.RUNNING, T0)
        save_training_run(session, training_run)
    note(RunState.RUNNING)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STARTED).touch()
        _wait_for(folder / PAUSE)
        (folder / PAUSE_REQUESTED).touch()
        _wait_for(folder / RELEASE)
        if (folder / LAST).exists():
            note(RunState.FINISHED)
            return {"value": f"{capability}@v1"}
        (folder / CHECKPOINT).touch()
        note(RunState.INTERRUPTED)
        raise TrainingPaused("paused after iteration 2 of 4")
    except KeyboardInterrupt:
        (folder / CUT_SHORT).touch()
        note(RunState.INTERRUPTED)
        raise
    finally:
        store.dispose()


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(run_child(work))
