"""One table: which end of an attempt counts against its input."""

import errno
import importlib
import inspect
import subprocess
import sys

import pytest

from agents.errors import BudgetSpent, ModelRefused, ModelUnavailable, OutOfForm, SynthesisError
from sandbox.errors import (
    AgentFault,
    Deadline,
    EngineDown,
    EngineForbidden,
    EngineTooOld,
    EnvironmentFault,
    ImageMissing,
    ProtocolFault,
    SandboxError,
    WorkerDied,
)
from store.errors import NotFound, StoreConflict, StoreUnavailable, StoreVersionError
from traced.core.errors import CapabilityError, ConfigError, DiskError, GateError, StageError, TracedError, cause_of
from traced.inference.errors import (
    EngineError,
    EngineStartError,
    ModelError,
    RequestError,
    RouterFitError,
    TemplateError,
)
from traced.llm.connection import LlmError
from traced.processes.job import FAULT_BY_ERROR, FaultAttribution, JobOutcome, StartError, attribute_fault, describe
from traced.targets.errors import SimulatorError, TargetFault
from traced.training.errors import EngineLost, EnvironmentFailed, JobChangedError, JobError, TrainerDied, TrainingError

INPUT, UNCLEAR, INFRASTRUCTURE, ANSWER, NOBODY = FaultAttribution


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


ERRORS: list[tuple[Exception, FaultAttribution]] = [
    # mendable, and nothing to do with the input
    (EngineDown("refused"), INFRASTRUCTURE),
    (ImageMissing("traced:1"), INFRASTRUCTURE),
    (DiskError("full"), INFRASTRUCTURE),
    (OSError(errno.ENOSPC, "No space left on device"), INFRASTRUCTURE),
    (cause_of(OSError(errno.ENOSPC, "No space left on device")), INFRASTRUCTURE),
    (cause_of(ExceptionGroup("tasks", [ValueError("x"), EngineDown("refused")])), INFRASTRUCTURE),
    (raised_from(StageError("cannot save"), OSError(errno.EROFS, "Read-only file system")), INFRASTRUCTURE),
    (PermissionError(errno.EACCES, "Permission denied"), INFRASTRUCTURE),
    (EngineForbidden("unix:///x"), INFRASTRUCTURE),
    (EngineTooOld("1.39", "1.40"), INFRASTRUCTURE),
    (ModelError("no model directory"), INFRASTRUCTURE),
    (EngineStartError("silent"), INFRASTRUCTURE),
    (EngineLost("no engine answers"), INFRASTRUCTURE),
    (ModelUnavailable("503 for 300 s"), INFRASTRUCTURE),
    (ModelRefused("the key is not accepted"), INFRASTRUCTURE),
    (LlmError("the setting llm.model is empty"), INFRASTRUCTURE),
    (StoreUnavailable("locked"), INFRASTRUCTURE),
    (StoreVersionError("newer"), INFRASTRUCTURE),
    (ConfigError("unknown key"), INFRASTRUCTURE),
    (StartError("no more processes"), INFRASTRUCTURE),
    (TargetFault("it cannot be loaded"), INFRASTRUCTURE),
    # something shared died
    (EngineError("gone"), UNCLEAR),
    (WorkerDied(137, oom=False), UNCLEAR),
    (SandboxError("an episode's detail"), UNCLEAR),
    (SimulatorError("broke"), UNCLEAR),
    (TrainerDied("code -9"), UNCLEAR),
    (ConnectionResetError(errno.ECONNRESET, "reset"), UNCLEAR),
    (OSError(errno.EMFILE, "Too many open files"), UNCLEAR),
    # the input's
    (EnvironmentFault("step", "boom"), INPUT),
    (AgentFault("the message has 5000000 bytes"), INPUT),
    (ProtocolFault("no JSON"), INPUT),
    (Deadline("step", 5, "worker"), INPUT),
    (EnvironmentFailed("no rollout survived"), INPUT),
    (JobError("rollouts is 1"), INPUT),
    (JobChangedError("another job's"), INPUT),
    (TrainingError("stopped"), INPUT),
    (StageError("no trajectories"), INPUT),
    (GateError("pairs are missing"), INPUT),
    (SynthesisError("too few"), INPUT),
    (OutOfForm("no usable answer"), INPUT),
    (BudgetSpent("1000 tokens of 1000"), INPUT),
    (RequestError("too long"), INPUT),
    (RouterFitError("too few"), INPUT),
    (TemplateError("no"), INPUT),
    (NotFound("adapter", "x@v1"), INPUT),
    (StoreConflict("other content"), INPUT),
    (TracedError("something"), INPUT),
    (KeyError("a defect"), INPUT),
    (MemoryError(), INPUT),
    (FileNotFoundError(errno.ENOENT, "No such file"), INPUT),
    # no failure at all
    (CapabilityError("the gate said no"), ANSWER),
    (raised_from(CapabilityError("the environment broke"), OSError(errno.ENOSPC, "full")), ANSWER),
]


@pytest.mark.parametrize(("error", "expected"), ERRORS, ids=lambda value: getattr(value, "value", type(value).__name__))
def test_fault_attribution_of_errors(error: Exception, expected: FaultAttribution) -> None:
    assert attribute_fault(JobOutcome.FAILED, describe(error), None) is expected


@pytest.mark.parametrize(
    ("outcome", "signal", "expected"),
    [
        (JobOutcome.FINISHED, None, NOBODY),
        (JobOutcome.STOPPED, None, NOBODY),
        (JobOutcome.HUNG, "SIGKILL", INPUT),
        (JobOutcome.STALLED, None, INPUT),
        (JobOutcome.OUT_OF_MEMORY, "SIGKILL", INPUT),
        (JobOutcome.CRASHED, None, INPUT),
        (JobOutcome.CRASHED, "SIGSEGV", INPUT),
        (JobOutcome.CRASHED, "SIGKILL", UNCLEAR),
        (JobOutcome.CRASHED, "SIGTERM", UNCLEAR),
    ],
)
def test_fault_attribution_of_outcomes(outcome: JobOutcome, signal: str | None, expected: FaultAttribution) -> None:
    assert attribute_fault(outcome, None, signal) is expected


MODULES = ["traced.core.errors", "traced.processes.job", "store.errors", "sandbox.errors", "agents.errors"]
MODULES += [f"traced.{package}.errors" for package in ("training", "inference", "rollouts", "ingest.importers")]
MODULES += ["traced.llm.connection"]


def test_every_name_in_the_table_is_an_existing_error() -> None:
    modules = [importlib.import_module(name) for name in MODULES]
    names = {name for module in modules for name, kind in vars(module).items() if inspect.isclass(kind)}
    assert set(FAULT_BY_ERROR) - names == {"ConnectionError", "OperationalError"}  # Python's own, and the databases'


def test_a_child_reports_its_failure_without_heavy_imports() -> None:
    code = "import sys, traced.processes.child; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "sqlalchemy", "langgraph", "docker", "psutil"} & set(loaded) == set()
