"""One stage of a cycle as a job: ``python -m traced.pipeline.stage_worker JOB.json`` (see
``traced.processes.child``).

The job's arguments are ``data_dir``, ``overrides`` (the cycle's settings, dotted), ``cycle_id``, ``stage`` and
``given`` (the stage's own arguments); its value is ``{"value": ...}``. Stages are idempotent, so a killed job is
simply run again. Engine and containers of the stage end with it.
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
from traced.pipeline.context import open_context
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


def _unchanged(answer: object) -> object:
    return answer


def _skip_reason(patch: Any) -> str:
    from traced.pipeline.optimize_prompt import skip_reason

    return skip_reason(patch)


def _no_value(answer: object) -> None:
    return None


# The JSON value of each stage; None for stages whose result is in the store.
ANSWERS: dict[str, Callable[[Any], object]] = {
    "collect": _no_value,
    "analyze": _unchanged,
    "synthesize": _unchanged,
    "admit": _unchanged,
    "optimize-prompt": _skip_reason,
    "train": _unchanged,
    "gate": lambda result: result.answer is GateAnswer.PASS,
    "evaluate": _no_value,
    "report": _no_value,
}


def work(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, object]:
    """Run the stage and return its value."""
    # Imported here, after the first heartbeat: on a busy machine these imports take seconds.
    from traced.config.settings import load_settings
    from traced.core.resources import Meter

    stage = arguments["stage"]
    answer = ANSWERS[stage]
    settings = load_settings(Path(arguments["data_dir"]), arguments["overrides"])
    name = stage.replace("-", "_")
    run_stage = getattr(import_module(f"traced.pipeline.{name}"), name)

    async def run() -> object:
        with Meter() as meter:
            async with open_context(settings, arguments["cycle_id"], ReportedProgress(reporter), meter) as context:
                return answer(await run_stage(context, *arguments["given"]))

    telemetry.begin(settings.telemetry.endpoint)
    try:
        with telemetry.continued():
            return {"value": asyncio.run(run())}
    finally:
        telemetry.end()


if __name__ == "__main__":
    sys.exit(run_child(work))
