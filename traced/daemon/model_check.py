"""The checks that load a model, made before a cycle begins, in a child process: the service loads no torch.

Invariants: one child per call; settings that were refused are checked again after ``INTERVAL``, other settings at once.
How it fails: ``ConfigError`` with the setting to change, also if the child dies; ``StartError`` if it cannot start.
Cancellation stops the child.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from traced.config.settings import Settings
from traced.core.errors import ConfigError
from traced.jobs.attempts import limits
from traced.processes.job import Executor, Job, JobOutcome, Result

STAGE, MODULE = "preflight", "traced.pipeline.preflight_worker"
# A check takes seconds of processor time, and a server that was down may be back.
INTERVAL = timedelta(minutes=1)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Refusal:
    settings: Settings
    error: ConfigError
    at: datetime


@dataclass
class ModelCheck:
    """Checks model, limits and servers of settings, and remembers the last refusal."""

    executor: Executor
    now: Callable[[], datetime]
    _refusal: _Refusal | None = None

    async def run(self, settings: Settings, overrides: dict[str, Any]) -> None:
        """Return if a cycle of these settings can begin.

        Args:
            settings: A reload makes another object, which is checked at once.
            overrides: What the cycle would store of the settings, as dotted keys.

        Raises:
            ConfigError: A check failed, or could not be made.
            StartError: The child could not be started.
        """
        refusal = self._refusal
        # abs: after a step of the clock the settings are checked again.
        if refusal is not None and refusal.settings is settings and abs(self.now() - refusal.at) < INTERVAL:
            raise refusal.error
        log.info("checking model and servers before a cycle")
        arguments = {"data_dir": str(settings.data_dir), "overrides": overrides}
        job = Job(MODULE, arguments, cycle_id="", stage=STAGE, limits=limits(settings))
        error = _error(await self.executor.run(job, lambda report: None))
        self._refusal = None if error is None else _Refusal(settings, error, self.now())
        if error is not None:
            raise error


def _error(result: Result) -> ConfigError | None:
    if result.outcome is JobOutcome.FINISHED:
        return None
    detail, hint = result.evidence.detail, f"less {result.evidence.log}"
    if result.failure is None:
        return ConfigError(f"the check of model and servers did not end: {detail}", hint=hint)
    return ConfigError(result.failure.message, hint=result.failure.hint or hint)
