"""The stations of a cycle as the service's graph calls them: each a supervised child, a capability's failure its own.

Invariants: a job's input hash covers what the station works on (its arguments, the cycle's settings and base model), so
that three failures on the same input are noticed over restarts; what people decided is asked of the store in the
daemon itself. A parked input ends its capability; a parked stage of the whole cycle ends the cycle (``Parked``).
A training is asked once to end at its safe point, however many want it to end: the person who stops it, and whoever
stops the cycle. That a person has stopped it is looked up before it begins and after it has ended (``stages.stopped``).
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
from traced.config.logs import working_on
from traced.config.service_sections import DevicesSection
from traced.core.errors import CapabilityError
from traced.core.signals import cancel_once
from traced.core.telemetry import for_children, span
from traced.jobs.attempts import limits, run_until_settled
from traced.jobs.devices import DeviceReading
from traced.jobs.leases import lending, on_device
from traced.jobs.retry import Ledger
from traced.pipeline import promote
from traced.pipeline.context import Context
from traced.pipeline.graph import PROMPT, Stages
from traced.pipeline.train import make_sure_it_is_wanted, training_folder
from traced.processes.job import Executor, Job, Parked, Report
from traced.training.job import PAUSE

T = TypeVar("T")
STATION = "traced.pipeline.stage_worker"


@dataclass
class Stations:
    """Runs a cycle's stations as jobs; ``at_work`` names those that run now."""

    context: Context
    cycle: Cycle
    overrides: dict[str, Any]
    executor: Executor
    ledger: Ledger
    on_report: Callable[[str, Report], None]
    devices: Callable[[], DevicesSection]  # as they are now: a reload reaches a training that waits or runs
    at_work: list[str] = field(default_factory=list)
    on_change: Callable[[], object] = lambda: None  # called when ``at_work`` has changed
    training: asyncio.Lock = field(default_factory=asyncio.Lock)  # trainings ask for a device one after the other
    _trainings: "dict[str, asyncio.Task[Any]]" = field(default_factory=dict)  # those at work, by capability
    _deciding: asyncio.Lock = field(default_factory=asyncio.Lock)  # no training is over while one is decided about

    async def run(self, stage: str, *given: Any, capability: str = "", variables: dict[str, str] | None = None) -> Any:
        """The station's answer. Raises ``CapabilityError``, or ``Parked`` for a stage of the whole cycle."""
        name = f"{stage} {capability}".strip()
        self.at_work.append(name)
        self.on_change()
        try:
            with working_on(self.cycle.id, stage, capability), span("traced.stage", self._ids(stage, capability)):
                job = self._job(stage, given, capability, {**(variables or {}), **for_children()})
                answer = await run_until_settled(
                    self.executor, job, self.ledger, lambda told: self.on_report(name, told)
                )
        except Parked as error:
            if not capability:
                raise
            raise CapabilityError(error.message, hint=error.hint) from error
        finally:
            self.at_work.remove(name)
            self.on_change()
            await asyncio.to_thread(self._clear_containers)
        return answer["value"]

    async def train(self, capability: str, environment: str) -> Any:
        """The adapter version, trained on a device that nobody else uses meanwhile."""
        name = f"train {capability}"
        lent = await asyncio.to_thread(lending, self.devices, self.context.store, self.ledger, self.cycle.id, name)

        async def work(device: DeviceReading) -> Any:
            visible = {"CUDA_VISIBLE_DEVICES": device.id} if device.kind == "cuda" else {}
            return await self.run("train", capability, environment, capability=capability, variables=visible)

        pause = training_folder(self.context, capability, environment) / PAUSE
        await self._make_sure_it_is_wanted(capability)
        async with self.training:
            at_work = asyncio.create_task(on_device(lent, pause, work, lambda told: self.on_report(name, told)))
            self._trainings[capability] = at_work
            try:
                await _ended(at_work)
            finally:
                async with self._deciding:
                    del self._trainings[capability]
        try:
            await self._make_sure_it_is_wanted(capability)
        except CapabilityError as stop:
            raise stop from None if at_work.cancelled() else at_work.exception()
        return at_work.result()

    async def stop_training(self, capability: str, decide: Callable[[], T]) -> T:
        """What ``decide`` answers, which notes the decision or raises; returns when a training at work has ended.

        It ends at its next safe point, once, whoever else wants it to end meanwhile.
        """
        async with self._deciding:
            decided = await asyncio.to_thread(decide)
            at_work = self._trainings.get(capability)
        if at_work is not None:
            cancel_once(at_work)
            await asyncio.wait({at_work})
        return decided

    async def _make_sure_it_is_wanted(self, capability: str) -> None:
        """Raises ``CapabilityError`` where a person has stopped its training."""
        look = partial(make_sure_it_is_wanted, cycle_id=self.cycle.id, capability=capability)
        await self.ledger.surely(look, partial(self.on_report, f"train {capability}"))

    def _ids(self, stage: str, capability: str) -> dict[str, str]:
        """What a stage's span says."""
        cycle = self.cycle
        work = {"traced.stage": stage, "traced.capability": capability}
        return {"traced.cycle.id": cycle.id, "traced.target": cycle.target, "gen_ai.request.model": cycle.model, **work}

    def _job(self, stage: str, given: tuple[Any, ...], capability: str, variables: dict[str, str]) -> Job:
        settings = self.context.settings
        arguments = {
            "data_dir": str(settings.data_dir),
            "overrides": self.overrides,
            "cycle_id": self.cycle.id,
            "stage": stage,
            "given": list(given),
        }
        key = digest([self.cycle.target, self.cycle.model, self.cycle.seed, self.cycle.config, stage, list(given)])
        limited = limits(settings)
        return Job(STATION, arguments, self.cycle.id, stage, capability, key[:16], limited, variables)

    def _clear_containers(self) -> None:
        """Remove the containers that a station left which was killed; without an engine the next start does it."""
        with contextlib.suppress(SandboxError):
            reap_orphans(self.context.sandbox_owner)

    def stages(self) -> Stages:
        """What the graph calls."""

        async def nothing(stage: str, *given: Any) -> None:
            await self.run(stage, *given)

        async def waiting(cycle_id: str, adapters: list[str]) -> list[str]:
            return await asyncio.to_thread(promote.waiting, self.context, adapters)

        async def asked(cycle_id: str, adapters: list[str]) -> dict[str, int]:
            return await asyncio.to_thread(promote.asked, self.context, adapters)

        async def drop(cycle_id: str, capability: str, stage: str, reason: str) -> None:
            await asyncio.to_thread(self.context.event, stage, StageState.FAILED, capability, reason=reason)

        return Stages(
            collect=lambda cycle_id: nothing("collect"),
            analyze=lambda cycle_id: self.run("analyze"),
            synthesize=lambda cycle_id, name, attempt: self.run("synthesize", name, attempt, capability=name),
            admit=lambda cycle_id, name, environment: self.run("admit", name, environment, capability=name),
            train=lambda cycle_id, name, environment: self.train(name, environment),
            gate=lambda cycle_id, adapter: self.run("gate", adapter, capability=adapter.partition("@")[0]),
            waiting=waiting,
            promote=lambda cycle_id, adapters: promote.promote(self.context, adapters),
            evaluate=lambda cycle_id, promoted: nothing("evaluate", promoted),
            report=lambda cycle_id: nothing("report"),
            drop=drop,
            asked=asked,
            look=lambda cycle_id, adapter, number: self.run(
                "gate", adapter, number, capability=adapter.partition("@")[0]
            ),
            optimize_prompt=lambda cycle_id, name, environment: self.run(PROMPT, name, environment, capability=name),
        )


async def _ended(work: "asyncio.Task[Any]") -> None:
    """Return when it has ended. Who is cancelled meanwhile asks it to end in order, and is cancelled once it has."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as stop:
            cancelled = stop
            cancel_once(work)
    if cancelled is not None:
        if not work.cancelled():
            work.exception()  # seen, so that asyncio does not report it as forgotten
        raise cancelled
