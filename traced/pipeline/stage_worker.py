"""Run one stage of a cycle as a job: ``python -m traced.pipeline.stage_worker JOB.json`` (``traced.processes.child``).

The job's arguments are ``data_dir``, ``overrides`` (the cycle's settings, dotted), ``cycle_id``, ``stage`` and
``given`` (the stage's own arguments); its value is ``{"value": ...}``. Stages are idempotent, so a killed job is simply
run again. Engine and containers of the stage end with it.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from traced.core import telemetry
from traced.core.progress import Progress
from traced.pipeline.context import open_context
from traced.pipeline.stages import run_stage
from traced.processes.child import Reporter, run_child


class ReportedProgress(Progress):
    """Progress that is reported to the parent process instead of a screen."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(Console(quiet=True))
        self._reporter = reporter

    def start(self, key: str, title: str, total: int = 0) -> None:
        """Report the start of a stage."""
        super().start(key, title, total)
        self._report(key)

    def advance(self, key: str, steps: int = 1, figure: str | None = None, total: int | None = None) -> None:
        """Report ``steps`` more units of work."""
        super().advance(key, steps, figure, total)
        self._report(key)

    def finish(self, key: str, figure: str = "") -> None:
        """Report the end of a stage."""
        super().finish(key, figure)
        self._report(key)

    def _report(self, key: str) -> None:
        line = self.lines[key]
        self._reporter.progress(key, line.done, total=line.total, figure=line.figure, title=line.title)


def work(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, object]:
    """Run the stage and return its value."""
    # Imported here, after the first heartbeat: on a busy machine these imports take seconds.
    from traced.config.settings import load_settings
    from traced.core.resources import Meter

    settings = load_settings(Path(arguments["data_dir"]), arguments["overrides"])

    async def run() -> object:
        with Meter() as meter:
            async with open_context(settings, arguments["cycle_id"], ReportedProgress(reporter), meter) as context:
                return await run_stage(context, arguments["stage"], *arguments["given"])

    telemetry.begin(settings.telemetry.endpoint)
    try:
        with telemetry.continued():
            return {"value": asyncio.run(run())}
    finally:
        telemetry.end()


if __name__ == "__main__":
    sys.exit(run_child(work))
