"""One station of a cycle as a job: ``python -m traced.service.station JOB.json`` (``traced.executor.child``).

The job's arguments: ``data_dir``, ``overrides`` (the cycle's own settings, dotted), ``stage`` and ``given``. The value
is ``{"value": ...}``, whatever the stage answers.

Invariants: a station is idempotent, so a job that was killed is run again as it stands; its progress is its episodes
or iterations, counted from where an earlier attempt had come to. The engine and containers that a station starts are
its own and end with it.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from store.types import GateAnswer
from traced import telemetry
from traced.config import load_settings
from traced.executor.child import Reporter, run_child
from traced.meter import Meter
from traced.progress import Progress
from traced.stages import admit, analyze, collect, evaluate, gate, report, synthesize, train
from traced.stages.context import Context, opened


class ReportedProgress(Progress):
    """Progress that goes to the parent instead of a screen."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(Console(quiet=True))
        self._reporter = reporter

    def start(self, key: str, title: str, total: int = 0) -> None:
        """A stage begins."""
        super().start(key, title, total)
        self._tell(key)

    def advance(self, key: str, steps: int = 1, figure: str | None = None) -> None:
        """``steps`` more are done."""
        super().advance(key, steps, figure)
        self._tell(key)

    def finish(self, key: str, figure: str = "") -> None:
        """A stage is over."""
        super().finish(key, figure)
        self._tell(key)

    def _tell(self, key: str) -> None:
        line = self.lines[key]
        self._reporter.progress(key, line.done, total=line.total, figure=line.figure, title=line.title)


async def _collect(context: Context) -> None:
    await collect.collect(context)


async def _gate(context: Context, adapter: str) -> bool:
    return (await gate.gate(context, adapter)).answer is GateAnswer.PASS


async def _evaluate(context: Context, promoted: list[str]) -> None:
    await evaluate.evaluate(context, promoted)


async def _report(context: Context) -> None:
    await report.report(context)


STATIONS: dict[str, Callable[..., Awaitable[Any]]] = {
    "collect": _collect,
    "analyze": analyze.analyze,
    "synthesize": synthesize.synthesize,
    "admit": admit.admit,
    "train": train.train,
    "gate": _gate,
    "evaluate": _evaluate,
    "report": _report,
}


def work(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    """Do the station's work."""
    settings = load_settings(Path(arguments["data_dir"]), arguments["overrides"])

    async def run() -> Any:
        with Meter() as meter:
            async with opened(settings, arguments["cycle_id"], ReportedProgress(reporter), meter) as context:
                return await STATIONS[arguments["stage"]](context, *arguments["given"])

    telemetry.begin(settings.telemetry.endpoint)
    try:
        with telemetry.continued():
            return {"value": asyncio.run(run())}
    finally:
        telemetry.end()


if __name__ == "__main__":
    sys.exit(run_child(work))
