"""A training that is at work, as its process would leave it: rows in the store, files in its folder, the loop at it."""

import math
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from store.database import write_session
from store.records import Cycle, CycleState, IterationMetrics, RunState, TrainingRun
from store.repositories.adapters import save_iterations, save_training_run, set_training_state
from store.repositories.cycles import save_cycle
from tests.integration.tui.conftest import AT, Running
from traced.training.job import METRICS, SAMPLES, folder_of_run
from traced.training.metrics import append, read_metrics, write_samples
from traced.training.rollouts import Rollout

CYCLE, CAPABILITY = "c-0004", "payment-methods"
RUN = f"{CYCLE}/{CAPABILITY}/abc"


@dataclass
class AtWork:
    """The files of the run, and the daemon that has it at work."""

    on: Running
    folder: Path

    def iterations(self, first: int, last: int) -> None:
        """These are over, each told to the daemon as the stage's process tells it."""
        for number in range(first, last + 1):
            append(self.folder / METRICS, figures(number))
        detail = {"done": last, "total": 40, "figure": f"reward {figures(last)['reward']:.2f}"}
        self.on.control.present.tell("progress", f"train {CAPABILITY}", AT, detail, CYCLE)

    def samples(self, iteration: int, *said: str) -> None:
        """Rollouts of a group, the best first."""
        played = [
            Rollout(0, k, 7, turns=2, reward=1 - k / 2, success=k == 0, messages=talk(text))
            for k, text in enumerate(said)
        ]
        write_samples(self.folder / SAMPLES, iteration, played)

    def ended(self, state: RunState) -> None:
        """The process is gone, and its figures are in the store."""
        loop: Any = self.on.control.loop
        loop.running_stages = []
        told = read_metrics(self.folder / METRICS)
        with write_session(self.on.control.store) as opened:
            save_iterations(opened, [IterationMetrics(RUN, int(one["iteration"]), one) for one in told])
            set_training_state(opened, RUN, state, at=AT + timedelta(hours=1))


def begin(on: Running) -> AtWork:
    """Before its first iteration is over."""
    environment = on.seeded.environments[CAPABILITY]
    with write_session(on.control.store) as opened:
        save_cycle(opened, Cycle(CYCLE, "desk", "bundled", 4, {}, CycleState.RUNNING, AT))
        run = TrainingRun(
            RUN, CYCLE, CAPABILITY, environment, "bundled", 4, {"iterations": 40}, RunState.RUNNING, AT
        )  # fmt: skip
        save_training_run(opened, run)
    loop: Any = on.control.loop
    loop.running, loop.running_stages = CYCLE, [f"train {CAPABILITY}"]
    folder = folder_of_run(on.control.settings.data_dir, CYCLE, CAPABILITY, environment)
    folder.mkdir(parents=True)
    return AtWork(on, folder)


def figures(number: int) -> dict[str, float]:
    """Those of an iteration that learns."""
    grown = 1 - math.exp(-number / 8)
    return {
        "iteration": number,
        "reward": 0.2 + 0.5 * grown + 0.02 * math.sin(number * 2.7),
        "success": 0.1 + 0.6 * grown + 0.03 * math.sin(number * 1.9),
        "mixed_groups": 0.8 - 0.3 * grown + 0.05 * math.cos(number * 3.1),
        "kl_from_base": 0.05 * grown**2,
        "entropy": 1.2 - 0.5 * grown,
        "rollout_seconds": 20.0,
        "update_seconds": 10.0,
        "tokens_per_second": 900 + 30 * math.sin(number),
    }


def talk(last: str) -> list[dict[str, Any]]:
    """A conversation with one call that ends so."""
    call = {"id": "c", "type": "function", "function": {"name": "get_order", "arguments": '{"order_id": "W1"}'}}
    return [
        {"role": "system", "content": "You look after the orders of a shop."},
        {"role": "user", "content": "Please put order W1 on my gift card."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "name": "get_order", "content": '{"paid_by": "card"}'},
        {"role": "assistant", "content": last},
    ]
