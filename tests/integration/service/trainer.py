"""A training as a child process, which says what happens to it by files in its run's folder.

``begun``: its run is in the store. Asked to pause it says ``asked``, and leaves its ``checkpoint`` once the test lets
it (``go``); where ``last`` lies there it ends by itself instead. ``cut short``: it was stopped before that.
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

BEGUN, ASKED, GO, LAST, CHECKPOINT, CUT_SHORT = "begun", "asked", "go", "last", "checkpoint", "cut short"


def work(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    data_dir, cycle, (capability, environment) = (arguments[name] for name in ("data_dir", "cycle_id", "given"))
    folder, run = folder_of_run(Path(data_dir), cycle, capability, environment), f"{cycle}/{capability}"
    store = open_store(sqlite_url(Path(data_dir) / "traced.db"))

    def note(state: RunState) -> None:
        with write_session(store) as opened:
            set_training_state(opened, run, state, at=T0)

    with write_session(store) as opened:
        begun = TrainingRun(run, cycle, capability, environment, "m", 0, {}, RunState.RUNNING, T0)
        save_training_run(opened, begun)
    note(RunState.RUNNING)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / BEGUN).touch()
        _wait_for(folder / PAUSE)
        (folder / ASKED).touch()
        _wait_for(folder / GO)
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
