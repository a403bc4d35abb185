"""An active training as its process leaves it: rows in the store, files in its folder, a stage in the loop."""

import math
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from store.database import write_session
from store.records import Cycle, CycleState, IterationMetrics, RunState, TrainingRun
from store.repositories.adapters import save_iterations, save_training_run, set_training_state
from store.repositories.cycles import save_cycle
from tests.integration.tui.conftest import NOW, RunningApp
from traced.training.job import METRICS, SAMPLES, folder_of_run
from traced.training.metrics import append, read_metrics, write_samples
from traced.training.rollouts import Rollout

CYCLE, CAPABILITY = "c-0004", "payment-methods"
RUN = f"{CYCLE}/{CAPABILITY}/abc"


@dataclass
class ActiveTraining:
    """The folder of a run, and the app whose daemon trains it."""

    tui: RunningApp
    folder: Path

    def iterations(self, first: int, last: int) -> None:
        """Finish the iterations and report progress to the daemon, as the stage's process does."""
        for number in range(first, last + 1):
            append(self.folder / METRICS, figures(number))
        detail = {"done": last, "total": 40, "figure": f"reward {figures(last)['reward']:.2f}"}
        self.tui.control.present.tell("progress", f"train {CAPABILITY}", NOW, detail, CYCLE)

    def samples(self, iteration: int, *replies: str) -> None:
        """Write a group of rollouts, the best first."""
        rollouts = [
            Rollout(0, k, 7, turns=2, reward=1 - k / 2, success=k == 0, messages=conversation(text))
            for k, text in enumerate(replies)
        ]
        write_samples(self.folder / SAMPLES, iteration, rollouts)

    def finish(self, state: RunState) -> None:
        """Remove the stage and store the run's figures and final state."""
        loop: Any = self.tui.control.loop
        loop.running_stages = []
        rows = read_metrics(self.folder / METRICS)
        with write_session(self.tui.control.store) as session:
            save_iterations(session, [IterationMetrics(RUN, int(row["iteration"]), row) for row in rows])
            set_training_state(session, RUN, state, at=NOW + timedelta(hours=1))


def start_training(tui: RunningApp) -> ActiveTraining:
    """Store a running training that has finished no iteration."""
    environment = tui.seeded.environments[CAPABILITY]
    with write_session(tui.control.store) as session:
        save_cycle(session, Cycle(CYCLE, "desk", "bundled", 4, {}, CycleState.RUNNING, NOW))
        run = TrainingRun(
            RUN, CYCLE, CAPABILITY, environment, "bundled", 4, {"iterations": 40}, RunState.RUNNING, NOW
        )  # fmt: skip
        save_training_run(session, run)
    loop: Any = tui.control.loop
    loop.running, loop.running_stages = CYCLE, [f"train {CAPABILITY}"]
    folder = folder_of_run(tui.control.settings.data_dir, CYCLE, CAPABILITY, environment)
    folder.mkdir(parents=True)
    return ActiveTraining(tui, folder)


def figures(number: int) -> dict[str, float]:
    """Return the metrics of an iteration of a training that learns."""
    progress = 1 - math.exp(-number / 8)
    return {
        "iteration": number,
        "reward": 0.2 + 0.5 * progress + 0.02 * math.sin(number * 2.7),
        "success": 0.1 + 0.6 * progress + 0.03 * math.sin(number * 1.9),
        "mixed_groups": 0.8 - 0.3 * progress + 0.05 * math.cos(number * 3.1),
        "kl_from_base": 0.05 * progress**2,
        "entropy": 1.2 - 0.5 * progress,
        "rollout_seconds": 20.0,
        "update_seconds": 10.0,
        "tokens_per_second": 900 + 30 * math.sin(number),
    }


def conversation(last: str) -> list[dict[str, Any]]:
    """Return a conversation with one tool call that ends with ``last``."""
    call = {"id": "c", "type": "function", "function": {"name": "get_order", "arguments": '{"order_id": "W1"}'}}
    return [
        {"role": "system", "content": "You look after the orders of a shop."},
        {"role": "user", "content": "Please put order W1 on my gift card."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "name": "get_order", "content": '{"paid_by": "card"}'},
        {"role": "assistant", "content": last},
    ]
