"""An executor that returns scripted results and writes the rows that the real stages would have written.

The store, the graph, the checkpointer, attempts and promotions are real; no stage is executed and no model is needed.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from sandbox.hashing import environment_hash
from store.database import write_session
from store.records import (
    AdapterVersion,
    CycleState,
    EnvironmentRecord,
    Event,
    RunState,
    StageEvent,
    StageState,
    TrainingRun,
)
from store.repositories.adapters import get_adapter, save_adapter, save_training_run
from store.repositories.capabilities import save_capabilities
from store.repositories.cycles import get_cycle, save_stage_event, set_cycle_state
from store.repositories.environments import save_environment
from store.repositories.events import save_event
from store.repositories.gates import save_gate
from store.types import Capability, GateAnswer, GateResult, PairedDifference
from tests.unit.store.chain import T0
from traced.core.errors import CapabilityError
from traced.core.files import flush
from traced.processes.job import Evidence, Failure, Job, JobOutcome, Report, ReportKind, Result, describe
from traced.registry.publication import publish

FINISHED = Evidence(0, None, "exit code 0", [], 0, 0.0, "", {})
CRASHED = Result(JobOutcome.CRASHED, None, None, Evidence(None, "SIGSEGV", "ended by SIGSEGV", [], 0, 0.0, "", {}))
SUMMARY = {"verdict": "It won nothing."}  # of a finished cycle


def failed(*types: str) -> Result:
    """Return the result of a child process that raised an error of these types."""
    return Result(JobOutcome.FAILED, None, Failure(list(types), "so it said"), FINISHED)


@dataclass
class Scripted:
    """Executor whose first attempts at a stage end with the results in ``ends``; later attempts finish."""

    store: Engine
    data_dir: Path
    capabilities: tuple[str, ...] = ("alpha", "beta")
    ends: dict[str, list[Result]] = field(default_factory=dict)  # "train alpha" -> results of its first attempts
    callbacks: dict[str, Callable[[], Any]] = field(default_factory=dict)  # called when the stage starts
    blocked_stages: set[str] = field(default_factory=set)  # stages that run until they are cancelled
    round_answers: dict[str, GateAnswer] = field(default_factory=dict)  # of gate rounds after the first; default: pass
    stage_runs: list[str] = field(default_factory=list)

    async def run(self, job: Job, on_report: Callable[[Report], None]) -> Result:
        name = f"{job.stage} {job.capability}".strip()
        self.stage_runs.append(name)
        on_report(Report(ReportKind.STARTED, {"pid": 1}))
        self.callbacks.pop(name, lambda: None)()
        if name in self.blocked_stages:
            await asyncio.Event().wait()
        if self.ends.get(name):
            return self.ends[name].pop(0)
        try:
            value = getattr(self, f"_{job.stage}")(job.cycle_id, *job.arguments.get("given", []))
        except CapabilityError as error:
            return Result(JobOutcome.FAILED, None, describe(error), FINISHED)
        return Result(JobOutcome.FINISHED, {"value": value}, None, FINISHED)

    def _preflight(self, cycle_id: str) -> None:
        return None

    def _collect(self, cycle_id: str) -> None:
        return None

    def _analyze(self, cycle_id: str) -> list[str]:
        capabilities = [Capability(name, name, "", "", "", "") for name in self.capabilities]
        with write_session(self.store) as session:
            save_capabilities(session, cycle_id, capabilities)
        return list(self.capabilities)

    def _attribute(self, cycle_id: str, capabilities: list[str]) -> list[str]:
        return capabilities

    def _synthesize(self, cycle_id: str, capability: str, attempt: int) -> str:
        source = f"{cycle_id} {capability} {attempt}"
        digest = environment_hash(source)
        with write_session(self.store) as session:
            save_environment(session, EnvironmentRecord(digest, source, cycle_id, capability, attempt, "scripted", T0))
        return digest

    def _admit(self, cycle_id: str, capability: str, environment: str) -> bool:
        return True

    def _train(self, cycle_id: str, capability: str, environment: str) -> str:
        run = f"{cycle_id}/{capability}"
        folder = self.data_dir / "runs" / run
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / name).write_text(run)
        published = publish(folder, self.data_dir / "adapters", capability, origin=run)
        flush(self.data_dir)
        ids = (cycle_id, run, environment)
        version = AdapterVersion(
            published.name, capability, published.version, str(published.path), published.files, *ids, T0
        )
        with write_session(self.store) as session:
            save_training_run(
                session, TrainingRun(run, cycle_id, capability, environment, "m", 0, {}, RunState.FINISHED, T0)
            )
            save_adapter(session, version)
        return published.name

    def _gate(self, cycle_id: str, adapter: str, round_number: int = 1) -> bool:
        figures = PairedDifference("target", 9, 0.4, 0.6, 0.2, 0.1, 0.3, 0.95, 0.0, GateAnswer.PASS)
        with write_session(self.store) as session:
            version = get_adapter(session, adapter)
            at = version.created_at + timedelta(hours=round_number)
            answer = self.round_answers.get(adapter, GateAnswer.PASS) if round_number > 1 else GateAnswer.PASS
            save_gate(session, GateResult(adapter, answer, [figures], round_number), cycle_id=cycle_id, at=at)
            event = StageEvent(cycle_id, "gate", StageState.FINISHED, at, version.capability, {"adapter": adapter})
            save_stage_event(session, event)
        if answer is not GateAnswer.PASS:
            raise CapabilityError(f"the gate of {adapter} answered {answer.value}")
        return True

    def _compose(self, cycle_id: str, adapters: list[str], joint_versions: list[str]) -> list[str]:
        return []

    def _evaluate(self, cycle_id: str, adapters: list[str]) -> None:
        return None

    def _report(self, cycle_id: str) -> None:
        with write_session(self.store) as session:
            at = get_cycle(session, cycle_id).created_at
            save_event(session, Event(at, "cycle finished", cycle_id, cycle_id))
            set_cycle_state(session, cycle_id, CycleState.FINISHED, at=at, summary=dict(SUMMARY))
