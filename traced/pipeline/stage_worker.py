"""One station of a cycle as a job: ``python -m traced.pipeline.stage_worker JOB.json`` (``traced.processes.child``).

The job's arguments: ``data_dir``, ``overrides`` (the cycle's own settings, dotted), ``stage`` and ``given``. The value
is ``{"value": ...}``, whatever the stage answers.

Invariants: a station is idempotent, so a job that was killed is run again as it stands; its progress is its episodes
or iterations, counted from where an earlier attempt had come to. The engine and containers that a station starts are
its own and end with it.
"""

import asyncio
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from store.types import GateAnswer
from traced.core import telemetry
from traced.core.progress import Progress
from traced.pipeline.context import opened
from traced.processes.child import Reporter, run_child


class ReportedProgress(Progress):
    """Progress that goes to the parent instead of a screen."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(Console(quiet=True))
        self._reporter = reporter

    def start(self, key: str, title: str, total: int = 0) -> None:
        """A stage begins."""
        super().start(key, title, total)
        self._tell(key)

    def advance(self, key: str, steps: int = 1, figure: str | None = None, total: int | None = None) -> None:
        """``steps`` more are done."""
        super().advance(key, steps, figure, total)
        self._tell(key)

    def finish(self, key: str, figure: str = "") -> None:
        """A stage is over."""
        super().finish(key, figure)
        self._tell(key)

    def _tell(self, key: str) -> None:
        line = self.lines[key]
        self._reporter.progress(key, line.done, total=line.total, figure=line.figure, title=line.title)


def _as_it_is(answer: Any) -> Any:
    return answer


def _why_no_training(patch: Any) -> str:
    from traced.pipeline.optimize_prompt import why_no_training

    return why_no_training(patch)


def _nothing(answer: Any) -> None:
    return None  # what these answer is in the store


ANSWERS: dict[str, Callable[[Any], Any]] = {
    "collect": _nothing,
    "analyze": _as_it_is,
    "synthesize": _as_it_is,
    "admit": _as_it_is,
    "optimize-prompt": _why_no_training,
    "train": _as_it_is,
    "gate": lambda result: result.answer is GateAnswer.PASS,
    "evaluate": _nothing,
    "report": _nothing,
}


def work(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    """Do the station's work. Its imports come here, when the heartbeat beats already: a busy machine is slow."""
    from traced.config.settings import load_settings
    from traced.core.resources import Meter

    stage = arguments["stage"]
    answer = ANSWERS[stage]
    settings = load_settings(Path(arguments["data_dir"]), arguments["overrides"])
    name = stage.replace("-", "_")
    act = getattr(import_module(f"traced.pipeline.{name}"), name)

    async def run() -> Any:
        with Meter() as meter:
            async with opened(settings, arguments["cycle_id"], ReportedProgress(reporter), meter) as context:
                return answer(await act(context, *arguments["given"]))

    telemetry.begin(settings.telemetry.endpoint)
    try:
        with telemetry.continued():
            return {"value": asyncio.run(run())}
    finally:
        telemetry.end()


if __name__ == "__main__":
    sys.exit(run_child(work))
