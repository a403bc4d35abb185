"""Capabilities over all cycles, and label tables with bounded reads."""

from datetime import timedelta

import pytest
from sqlmodel import Session

from store.errors import NotFound
from store.records import Cycle, CycleState, RunState
from store.repositories import capabilities, cycles
from store.repositories import capabilities as analysis
from store.repositories.capabilities import CapabilityOutputs, LabelTable
from store.repositories.trajectories import save_trajectories
from store.types import Label, Outcome, Verdict
from tests.unit.store.chain import CAPABILITY, FINDING, HASH, T0, save_chain, trajectory

NAME = CAPABILITY.name


def test_an_empty_store_has_no_capabilities(db: Session) -> None:
    assert capabilities.newest_capabilities(db, limit=10) == []
    assert capabilities.label_table(db, "c1", NAME, limit=10) == LabelTable([], [], 0)
    assert capabilities.outputs_of_cycles(db, ["c1"]) == {}
    with pytest.raises(NotFound):
        capabilities.list_capability_entries(db, NAME, limit=10)


def test_the_newest_cycle_defines_a_capability(db: Session) -> None:
    save_chain(db)
    cycles.save_cycle(db, Cycle("c0", "desk", "bundled", 7, {}, CycleState.RUNNING, T0 + timedelta(days=1)))
    analysis.save_capabilities(db, "c0", [CAPABILITY])
    entries = capabilities.newest_capabilities(db, limit=10)
    assert [(entry.cycle_id, entry.capability, entry.finding) for entry in entries] == [("c0", CAPABILITY, None)]
    history = capabilities.list_capability_entries(db, NAME, limit=10)
    assert [(entry.cycle_id, entry.finding) for entry in history] == [("c0", None), ("c1", FINDING)]
    assert capabilities.list_capability_entries(db, NAME, limit=1) == entries
    assert capabilities.get_capability_entry(db, NAME, "c1") == history[1]
    assert capabilities.outputs_of_cycles(db, ["c0", "c1"]) == {
        ("c1", NAME): CapabilityOutputs(HASH, True, RunState.FINISHED)
    }
    assert capabilities.outputs_of_cycles(db, ["c0"]) == {}


def test_a_label_table_has_the_first_trajectories_of_every_run(db: Session) -> None:
    save_chain(db)
    keys = [f"t{number}" for number in range(4, 8)]
    save_trajectories(db, [trajectory(key, Outcome.SUCCESS) for key in keys])
    labels = [Label(key, NAME, run, Verdict.PRESENT, 1) for run in (0, 1) for key in keys]
    analysis.save_labels(db, "c1", labels)
    full_table = capabilities.label_table(db, "c1", NAME, limit=100)
    assert (full_table.runs, full_table.trajectories) == ([0, 1], 6)
    assert full_table.labels == analysis.list_labels(db, "c1", capability=NAME)
    part = capabilities.label_table(db, "c1", NAME, limit=3)
    assert (part.runs, part.trajectories) == ([0, 1], 6)
    assert part.labels == [entry for entry in full_table.labels if entry.trajectory_id in ("t1", "t2", "t4")]
    assert capabilities.label_table(db, "c1", "another", limit=3) == LabelTable([], [], 0)
    headers = capabilities.trajectory_headers(db, ["t1", "t4", "none"])
    assert {key: entry.outcome for key, entry in headers.items()} == {"t1": Outcome.FAILURE, "t4": Outcome.SUCCESS}
