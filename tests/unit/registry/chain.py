"""A store with everything up to a published adapter, for tests of decisions and promotions."""

import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlmodel import Session

from store.records import (
    AdapterVersion,
    Cycle,
    CycleState,
    EnvironmentRecord,
    Finding,
    IterationMetrics,
    RunState,
    TrainingRun,
)
from store.repositories.adapters import save_adapter, save_iterations, save_training_run
from store.repositories.capabilities import save_capabilities, save_findings, save_labels
from store.repositories.cycles import save_cycle
from store.repositories.environments import save_admission, save_environment
from store.repositories.gates import save_gate
from store.repositories.trajectories import save_trajectories
from store.types import (
    AdmissionReport,
    Capability,
    Check,
    EndCause,
    GateAnswer,
    GateResult,
    Label,
    Outcome,
    PairedDifference,
    Trajectory,
    Verdict,
)
from traced.registry.publication import publish

START = datetime(2026, 1, 1, tzinfo=UTC)
CAPABILITY = "error-recovery"
SOURCE = "class Environment: ..."
ENVIRONMENT = hashlib.sha256(SOURCE.encode()).hexdigest()


def hour(number: int) -> datetime:
    return START + timedelta(hours=number)


def seed_cycle(session: Session) -> None:
    """Save a cycle with a failed trajectory that lacks the capability, its finding and an admitted environment."""
    save_cycle(session, Cycle("c1", "desk", "bundled", 0, {}, CycleState.WAITING, START))
    messages = [{"role": "system", "content": "policy"}, {"role": "user", "content": "hello"}]
    failed = Trajectory(
        "t1", "desk", "train", "7", 0, "base", 1.0, messages, [], [], 0.0, Outcome.FAILURE, EndCause.DONE, cycle_id="c1"
    )
    save_trajectories(session, [failed])
    texts = ("Error recovery", "Tries again after an error.", "after an error", "tries again", "gives up")
    save_capabilities(session, "c1", [Capability(CAPABILITY, *texts)])
    save_labels(session, "c1", [Label("t1", CAPABILITY, run, Verdict.LACKING, 1) for run in range(10)])
    save_findings(session, [Finding("c1", CAPABILITY, 0.5, 0.4, 0.1, 0.6, 10, 10, True)])
    save_environment(session, EnvironmentRecord(ENVIRONMENT, SOURCE, "c1", CAPABILITY, 3, "builtin", START))
    report = AdmissionReport(ENVIRONMENT, True, [Check("oracle", True, {"solved": 20}, 0.1)])
    save_admission(session, report, cycle_id="c1", at=START)


def publish_adapter(data_dir: Path, number: int) -> AdapterVersion:
    """Publish version ``number``, whose weights are the bytes of "run-NUMBER"; nothing is stored."""
    run_id = f"run-{number}"
    source = data_dir / "training" / run_id
    source.mkdir(parents=True)
    (source / "adapter_config.json").write_text("{}")
    (source / "adapter_model.safetensors").write_bytes(run_id.encode())
    publication = publish(source, data_dir / "adapters", CAPABILITY, origin=run_id)
    return AdapterVersion(
        publication.name,
        CAPABILITY,
        publication.version,
        str(publication.path),
        publication.files,
        "c1",
        run_id,
        ENVIRONMENT,
        hour(number),
    )


def seed_adapter(session: Session, data_dir: Path, number: int, answer: GateAnswer | None = GateAnswer.PASS) -> str:
    """Publish version ``number`` from its own training run, with a gate of the given answer (None: no gate)."""
    version = publish_adapter(data_dir, number)
    run_id = version.training_run_id
    run = TrainingRun(
        run_id, "c1", CAPABILITY, ENVIRONMENT, "bundled", 0, {}, RunState.FINISHED, hour(number), rollouts=64
    )
    save_training_run(session, run)
    save_iterations(session, [IterationMetrics(run_id, i, {"reward": 0.2 + 0.1 * i}) for i in range(3)])
    save_adapter(session, version)
    if answer is not None:
        difference = PairedDifference("target", 200, 0.2, 0.5, 0.3, 0.2, 0.4, 0.983, 0.0, answer)
        save_gate(session, GateResult(version.name, answer, [difference], 1), cycle_id="c1", at=hour(number))
    return version.name
