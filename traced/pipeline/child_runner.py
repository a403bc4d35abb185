"""Runs the stages of a cycle as supervised child processes, for the daemon.

Invariants: a job's input hash covers the stage, its arguments, the cycle's settings and its base model, so repeated
failures on one input are recognised across restarts. A quarantined input ends its capability; a quarantined stage of
the whole cycle ends the cycle with ``Quarantined``. A training is asked to stop once, at its next safe point, however
many callers request it.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from sandbox.docker_engine import reap_orphans
from sandbox.errors import SandboxError
from store.content import digest
from store.records import Cycle, StageState
from traced.config.logs import bind_ids
from traced.config.service_sections import DevicesSection
from traced.core.errors import CapabilityError
from traced.core.signals import cancel_once
from traced.core.telemetry import child_environment, span
from traced.jobs.attempts import limits, run_until_settled
from traced.jobs.devices import DeviceReading
from traced.jobs.leases import device_access, run_on_device
from traced.jobs.retry import AttemptLedger
from traced.pipeline.context import Context
from traced.pipeline.train import check_not_stopped, training_folder
from traced.processes.job import Executor, Job, Quarantined, Report
from traced.training.device import TrainingDevice
from traced.training.job import PAUSE

T = TypeVar("T")
STAGE_MODULE = "traced.pipeline.stage_worker"


@dataclass
class ChildStageRunner:
    """Runs a cycle's stages as child jobs; ``running_stages`` names those that run now."""

    context: Context
    cycle: Cycle
    overrides: dict[str, Any]
    executor: Executor
    ledger: AttemptLedger
    on_report: Callable[[str, Report], None]
    # A callable, because a reload of the settings must reach trainings that already wait or run.
    devices: Callable[[], DevicesSection]
    running_stages: list[str] = field(default_factory=list)
    on_change: Callable[[], object] = lambda: None  # called when ``running_stages`` has changed
    # Trainings request a device one at a time, so that two of them never compete for the same lease.
    training: asyncio.Lock = field(default_factory=asyncio.Lock)
    _trainings: "dict[str, asyncio.Task[Any]]" = field(default_factory=dict)  # by capability
    # Held while a stop is decided, so a training cannot finish between the decision and the look-up of its task.
    _decision_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, stage: str, *arguments: Any, capability: str = "") -> Any:
        """Run a stage in a child process and return its value; a training waits for a device first.

        Raises:
            CapabilityError: The input of a capability's stage is quarantined, or a person has stopped the training.
            Quarantined: The input of a stage of the whole cycle is quarantined.
        """
        if stage == "train":
            return await self._train(*arguments)
        return await self._run(stage, *arguments, capability=capability)

    async def _run(
        self, stage: str, *arguments: Any, capability: str = "", variables: dict[str, str] | None = None
    ) -> Any:
        name = f"{stage} {capability}".strip()
        self.running_stages.append(name)
        self.on_change()
        try:
            with bind_ids(self.cycle.id, stage, capability), span("traced.stage", self._ids(stage, capability)):
                job = self._job(stage, arguments, capability, {**(variables or {}), **child_environment()})
                answer = await run_until_settled(
                    self.executor, job, self.ledger, lambda report: self.on_report(name, report)
                )
        except Quarantined as error:
            if not capability:
                raise
            raise CapabilityError(error.message, hint=error.hint) from error
        finally:
            self.running_stages.remove(name)
            self.on_change()
            # Also after a failure: a killed child cannot remove its own containers.
            await asyncio.to_thread(self._clear_containers)
        return answer["value"]

    async def _train(self, capability: str, environment: str) -> Any:
        """Train on a leased device and return the adapter version."""
        name = f"train {capability}"
        access = await asyncio.to_thread(
            partial(device_access, data_dir=self.context.data_dir, count=self.context.settings.training.processes),
            self.devices,
            self.context.store,
            self.ledger,
            self.cycle.id,
            name,
        )

        async def work(devices: tuple[DeviceReading, ...]) -> Any:
            kind = devices[0].kind
            gpus = tuple(device.id for device in devices) if kind == "cuda" else ()
            variables = TrainingDevice(kind, gpus).stage_variables
            return await self._run("train", capability, environment, capability=capability, variables=variables)

        pause = training_folder(self.context, capability, environment) / PAUSE
        await self._check_not_stopped(capability)
        async with self.training:
            training_task = asyncio.create_task(
                run_on_device(access, pause, work, lambda report: self.on_report(name, report))
            )
            self._trainings[capability] = training_task
            try:
                await _wait_until_done(training_task)
            finally:
                async with self._decision_lock:
                    del self._trainings[capability]
        try:
            await self._check_not_stopped(capability)
        except CapabilityError as stop:
            # A person's stop takes precedence over the error it caused, which stays attached as the cause.
            raise stop from None if training_task.cancelled() else training_task.exception()
        return training_task.result()

    async def stop_training(self, capability: str, decide: Callable[[], T]) -> T:
        """Record the decision made by ``decide`` and return it once a running training has ended.

        ``decide`` may raise; nothing is stopped then. The training ends at its next safe point.
        """
        async with self._decision_lock:
            decision = await asyncio.to_thread(decide)
            training_task = self._trainings.get(capability)
        if training_task is not None:
            cancel_once(training_task)
            await asyncio.wait({training_task})
        return decision

    async def _check_not_stopped(self, capability: str) -> None:
        """Raise ``CapabilityError`` if a person has stopped this training."""
        check = partial(check_not_stopped, cycle_id=self.cycle.id, capability=capability)
        await self.ledger.retried_transaction(check, partial(self.on_report, f"train {capability}"))

    def _ids(self, stage: str, capability: str) -> dict[str, str]:
        cycle = self.cycle
        work = {"traced.stage": stage, "traced.capability": capability}
        return {"traced.cycle.id": cycle.id, "traced.target": cycle.target, "gen_ai.request.model": cycle.model, **work}

    def _job(self, stage: str, stage_arguments: tuple[Any, ...], capability: str, variables: dict[str, str]) -> Job:
        settings = self.context.settings
        arguments = {
            "data_dir": str(settings.data_dir),
            "overrides": self.overrides,
            "cycle_id": self.cycle.id,
            "stage": stage,
            "given": list(stage_arguments),
        }
        key = digest(
            [self.cycle.target, self.cycle.model, self.cycle.seed, self.cycle.config, stage, list(stage_arguments)]
        )
        job_limits = limits(settings)
        return Job(STAGE_MODULE, arguments, self.cycle.id, stage, capability, key[:16], job_limits, variables)

    def _clear_containers(self) -> None:
        """Remove containers left behind by a killed stage; if Docker is down, the next start removes them."""
        with contextlib.suppress(SandboxError):
            reap_orphans(self.context.sandbox_owner)

    async def drop(self, cycle_id: str, capability: str, stage: str, reason: str) -> None:
        """Record that the cycle continues without the capability."""
        await asyncio.to_thread(self.context.event, stage, StageState.FAILED, capability, reason=reason)


async def _wait_until_done(work: "asyncio.Task[Any]") -> None:
    """Wait for the task. A cancellation of the caller cancels the task once, waits for its end, and is raised then."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as stop:
            cancelled = stop
            cancel_once(work)
    if cancelled is not None:
        if not work.cancelled():
            # Retrieve the exception, otherwise asyncio logs it as never retrieved.
            work.exception()
        raise cancelled
