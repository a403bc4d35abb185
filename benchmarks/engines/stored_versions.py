"""Approved adapter versions in a store, with what they came from; imports no library for models."""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Engine

from store.database import write_session
from store.records import (
    AdapterVersion,
    Approval,
    Cycle,
    CycleState,
    Decision,
    EnvironmentRecord,
    RunState,
    TrainingRun,
)
from store.repositories import adapters, cycles, environments, gates
from store.repositories import adapters as training
from store.repositories import capabilities as analysis
from store.types import Capability, GateAnswer, GateResult, PairedDifference

START = datetime(2026, 1, 1, tzinfo=UTC)
ACTOR = "benchmark"
HASH = hashlib.sha256(b"").hexdigest()
WEIGHTS = "adapter_model.safetensors"


def save_versions(store: Engine, paths: Mapping[tuple[str, int], Path]) -> None:
    """Save approved versions, given by capability and number, with the folders of their weights."""
    difference = PairedDifference("target", 300, 0.4, 0.6, 0.2, 0.1, 0.3, 0.95, 0.0, GateAnswer.PASS)
    with write_session(store) as session:
        cycles.save_cycle(session, Cycle("c1", "desk", "bundled", 0, {}, CycleState.RUNNING, START))
        skills = sorted({skill for skill, _ in paths})
        capabilities = [
            Capability(skill, f"Kind {skill}", f"Tasks of {skill}.", "one comes", "", "") for skill in skills
        ]
        analysis.save_capabilities(session, "c1", capabilities)
        source = EnvironmentRecord(HASH, "", "c1", skills[0], 0, "builtin", START)
        environments.save_environment(session, source)
        training.save_training_run(
            session, TrainingRun("r1", "c1", skills[0], HASH, "bundled", 0, {}, RunState.RUNNING, START)
        )
        for (skill, number), path in paths.items():
            name = f"{skill}@v{number}"
            files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}
            version = AdapterVersion(name, skill, number, str(path.absolute()), files, "c1", "r1", HASH, START)
            adapters.save_adapter(session, version)
            gates.save_gate(session, GateResult(name, GateAnswer.PASS, [difference], 2), cycle_id="c1", at=START)
            gates.save_approval(session, Approval(name, Decision.APPROVED, ACTOR, START, ""))
