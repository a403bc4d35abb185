"""Cycles, analysis, environments, training, adapters and gates: saving twice, conflicts, unknown ids."""

import hashlib
import math
from dataclasses import replace

import pytest
from sqlmodel import Session

from store.errors import NotFound, StoreConflict
from store.records import CycleState, EnvironmentRecord, IterationMetrics, RunState, StageEvent, StageState
from store.repositories import adapters, capabilities, cycles, environments, gates, serving
from store.repositories import adapters as training
from store.types import GateAnswer, Label, Verdict
from tests.unit.store.chain import (
    CAPABILITY,
    CYCLE,
    FINDING,
    GATE,
    HASH,
    REPORT,
    SOURCE,
    adapter,
    later,
    save_chain,
    training_run,
)


@pytest.fixture(autouse=True)
def chain(db: Session) -> None:
    save_chain(db)


def test_saving_the_whole_chain_twice_adds_no_row(db: Session) -> None:
    save_chain(db)
    assert len(cycles.list_stage_events(db, "c1")) == 1
    assert len(capabilities.list_labels(db, "c1")) == 4
    assert len(environments.list_admissions(db, HASH)) == 1
    assert len(gates.list_gates(db, "date-reasoning@v1")) == 1
    assert serving.count_routed(db) == {"date-reasoning@v1": 1}


def test_cycles(db: Session) -> None:
    assert cycles.get_cycle(db, "c1") == CYCLE
    cycles.save_cycle(db, replace(CYCLE, id="c2", target="tau-bench", created_at=later(60)))
    assert [cycle.id for cycle in cycles.list_cycles(db)] == ["c2", "c1"]
    assert [cycle.id for cycle in cycles.list_cycles(db, limit=1)] == ["c2"]
    assert [cycle.id for cycle in cycles.list_cycles(db, target="desk")] == ["c1"]
    cycles.set_cycle_state(db, "c1", CycleState.FINISHED, at=later(99), summary={"gain": 0.2})
    finished = cycles.get_cycle(db, "c1")
    assert (finished.state, finished.finished_at, finished.summary) == (CycleState.FINISHED, later(99), {"gain": 0.2})
    cycles.set_cycle_state(db, "c1", CycleState.RUNNING, at=later(100))
    assert cycles.get_cycle(db, "c1") == replace(CYCLE, summary={"gain": 0.2})


def test_a_cycle_id_is_not_used_for_another_cycle(db: Session) -> None:
    with pytest.raises(StoreConflict, match="another id"):
        cycles.save_cycle(db, replace(CYCLE, seed=8))


def test_stage_events_come_in_the_order_of_writing(db: Session) -> None:
    event = StageEvent("c1", "train", StageState.FAILED, later(1), CAPABILITY.name, {"reason": "loss", "at": math.inf})
    cycles.save_stage_event(db, event)
    collected, failed = cycles.list_stage_events(db, "c1")
    assert collected.stage == "collect"
    assert failed == replace(event, detail={"reason": "loss", "at": None})


def test_analysis(db: Session) -> None:
    assert capabilities.list_capabilities(db, "c1") == [CAPABILITY]
    assert capabilities.get_capability(db, "c1", CAPABILITY.name) == CAPABILITY
    assert capabilities.list_findings(db, "c1") == [FINDING] == capabilities.list_findings(db, "c1", retained=True)
    assert capabilities.list_findings(db, "c1", retained=False) == []
    assert capabilities.list_labels(db, "c1", run=1, capability=CAPABILITY.name) == [
        Label("t1", CAPABILITY.name, 1, Verdict.LACKING, 2),
        Label("t2", CAPABILITY.name, 1, Verdict.NA, None),
    ]
    assert capabilities.list_labels(db, "c1", capability="other") == []


def test_analysis_results_are_immutable(db: Session) -> None:
    with pytest.raises(StoreConflict, match="analyse again"):
        capabilities.save_capabilities(db, "c1", [replace(CAPABILITY, description="other")])
    with pytest.raises(StoreConflict, match="analyse again"):
        capabilities.save_labels(db, "c1", [Label("t1", CAPABILITY.name, 0, Verdict.PRESENT, 2)])
    with pytest.raises(StoreConflict, match="analyse again"):
        capabilities.save_findings(db, [replace(FINDING, retained=False)])


def test_environments(db: Session) -> None:
    environment = environments.get_environment(db, HASH)
    assert environment == EnvironmentRecord(HASH, SOURCE, "c1", CAPABILITY.name, 7, "builtin", later(2))
    (admission,) = environments.list_admissions(db, HASH)
    assert (admission.report, admission.cycle_id, admission.at) == (REPORT, "c1", later(3))
    rejected = replace(REPORT, admitted=False)
    environments.save_admission(db, rejected, cycle_id="c1", at=later(30))
    assert [record.report.admitted for record in environments.list_admissions(db, HASH)] == [True, False]
    assert environments.list_admissions(db, HASH, cycle_id="c2") == []


def test_environments_by_hash_prefix(db: Session) -> None:
    source = "class Environment: ..."
    other = hashlib.sha256(source.encode()).hexdigest()
    environment = EnvironmentRecord(other, source, "c1", CAPABILITY.name, 8, "builtin", later(3))
    environments.save_environment(db, environment)
    assert environments.find_hashes(db, HASH[:8], limit=9) == [HASH]
    assert environments.find_hashes(db, "", limit=9) == sorted([HASH, other])
    assert environments.find_hashes(db, "", limit=1) == [min(HASH, other)]
    assert environments.find_hashes(db, "%", limit=9) == []


def test_the_same_source_from_two_cycles_has_two_origins(db: Session) -> None:
    cycles.save_cycle(db, replace(CYCLE, id="c2"))
    capabilities.save_capabilities(db, "c2", [CAPABILITY])
    repeated = replace(environments.get_environment(db, HASH), cycle_id="c2", at=later(50))
    environments.save_environment(db, repeated)
    assert environments.get_environment(db, HASH, cycle_id="c2") == repeated
    assert environments.list_environments(db, "c2") == [repeated]
    assert environments.get_environment(db, HASH).cycle_id == "c1"


def test_a_hash_that_is_not_the_sources_is_refused(db: Session) -> None:
    with pytest.raises(StoreConflict, match="hash it again"):
        environments.save_environment(db, replace(environments.get_environment(db, HASH), source_code="other"))


def test_training(db: Session) -> None:
    finished = replace(training_run(), state=RunState.FINISHED, finished_at=later(5), rollouts=64)
    assert training.get_training_run(db, "r1") == finished
    assert training.list_training_runs(db, "c1") == [finished]
    [first] = training.list_iterations(db, "r1")
    assert first.values["reward"] == 0.3
    assert math.isnan(first.values["loss"])
    resumed = [IterationMetrics("r1", 0, {"reward": 0.4}), IterationMetrics("r1", 1, {"reward": 0.5})]
    training.save_iterations(db, resumed)
    assert training.list_iterations(db, "r1") == resumed
    training.set_training_state(db, "r1", RunState.RUNNING, at=later(9))
    assert training.get_training_run(db, "r1") == replace(training_run(), rollouts=64)
    with pytest.raises(StoreConflict, match="seed"):
        training.save_training_run(db, replace(training_run(), seed=1))


def test_newest_training_runs_and_iteration_ranges(db: Session) -> None:
    for number in range(3):
        training.save_training_run(db, replace(training_run(f"r-{number}"), started_at=later(20 + number)))
    assert [run.id for run in training.newest_training_runs(db, limit=2)] == ["r-2", "r-1"]
    iterations = [IterationMetrics("r-1", number, {"reward": number / 10}) for number in range(1, 6)]
    training.save_iterations(db, iterations)
    assert training.list_iterations(db, "r-1", after_iteration=2, limit=2) == iterations[2:4]
    ranges = training.iteration_ranges(db, ["r-1", "r-2", "r1"])
    assert (ranges["r-1"].first, ranges["r-1"].last, ranges["r-1"].count) == (iterations[0], iterations[-1], 5)
    assert set(ranges) == {"r-1", "r1"}
    assert adapters.adapters_of_runs(db, ["r1", "r-1"]) == {"r1": "date-reasoning@v1"}


def test_the_newest_iterations_with_a_metric_are_those_of_a_run_like_this(db: Session) -> None:
    configs: list[dict[str, int]] = [{"length": 8}, {"length": 8}, {"length": 9}, {"length": 8}]
    for number, config in enumerate(configs):
        started = later(20 + number)
        training.save_training_run(db, replace(training_run(f"r-{number}"), started_at=started, config=config))
    iterations = [IterationMetrics(f"r-{number}", 1, {"peak": float(number)}) for number in range(3)]
    training.save_iterations(db, [*iterations, IterationMetrics("r-1", 2, {}), IterationMetrics("r-3", 1, {})])
    model = training_run().model
    assert training.newest_iterations(db, model, {"length": 8}, "peak") == iterations[1:2]
    assert training.newest_iterations(db, model, {"length": 9}, "peak") == iterations[2:]
    assert training.newest_iterations(db, model, {"length": 7}, "peak") == []
    assert training.newest_iterations(db, "other", {"length": 8}, "peak") == []


def test_adapter_versions_are_immutable(db: Session) -> None:
    assert adapters.get_adapter(db, "date-reasoning@v1") == adapter()
    adapters.save_adapter(db, replace(adapter(), created_at=later(500)))
    assert adapters.get_adapter(db, "date-reasoning@v1") == adapter()
    with pytest.raises(StoreConflict, match="publish date-reasoning@v2"):
        adapters.save_adapter(db, replace(adapter(), files={"adapter_model.safetensors": "f" * 64}))
    with pytest.raises(StoreConflict, match="not the name"):
        adapters.save_adapter(db, replace(adapter(), version=3))


def test_adapters_are_listed_by_number(db: Session) -> None:
    for version in (10, 2):
        adapters.save_adapter(db, adapter(version))
    expected = [adapter(1), adapter(2), adapter(10)]
    assert adapters.list_adapters(db, capability="date-reasoning") == expected
    assert adapters.list_adapters(db, cycle_id="c1") == expected
    assert adapters.list_adapters(db, cycle_id="c2") == []


def test_the_newest_gate_counts(db: Session) -> None:
    [first] = gates.list_gates(db, "date-reasoning@v1")
    assert (first.result, first.cycle_id, first.at) == (GATE, "c1", later(6))
    gates.save_gate(db, replace(GATE, answer=GateAnswer.FAIL), cycle_id="c1", at=later(60))
    gate = gates.latest_gate(db, "date-reasoning@v1")
    assert gate is not None
    assert gate.result.answer is GateAnswer.FAIL
    assert gates.latest_gate(db, "other@v1") is None


def test_routing_of_a_cycle(db: Session) -> None:
    assert [choice.model for choice in serving.list_routing(db, cycle_id="c1")] == ["date-reasoning@v1"]
    assert serving.list_routing(db, cycle_id="c2") == []
    assert len(serving.list_routing(db)) == 1


def test_unknown_ids_are_named(db: Session) -> None:
    for getter in (cycles.get_cycle, training.get_training_run, adapters.get_adapter, environments.get_environment):
        with pytest.raises(NotFound, match="'nothing'"):
            getter(db, "nothing")
    with pytest.raises(NotFound, match="'nothing'"):
        capabilities.get_capability(db, "c1", "nothing")
    with pytest.raises(NotFound, match="'nothing'"):
        cycles.set_cycle_state(db, "nothing", CycleState.FAILED, at=later(1))
