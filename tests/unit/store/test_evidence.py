from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine

from store.database import read_session, write_session
from store.errors import NotFound
from store.records import Citation, FaultRecord, PromotionState
from store.repositories.adapters import save_adapter, save_training_run
from store.repositories.capabilities import save_labels
from store.repositories.environments import save_admission
from store.repositories.evidence import LabelCounts, Traffic, TrajectoryEvidence, evidence_chain
from store.repositories.llm_replies import save_citations, save_faults
from store.repositories.trajectories import save_trajectories
from store.types import AdmissionReport, Check, Label, Outcome, Turn, Verdict
from tests.unit.store.chain import (
    CAPABILITY,
    CYCLE,
    FINDING,
    GATE,
    HASH,
    REPORT,
    SOURCE,
    T0,
    adapter,
    save_chain,
    save_origin,
    training_run,
    trajectory,
)
from traced.cli.evidence_text import chain_lines
from traced.scoring.evidence import OutcomeSources

NAME = "date-reasoning@v1"
NOBODY = OutcomeSources(Counter(), Counter())


def test_the_chain_from_trajectories_to_traffic(engine: Engine) -> None:
    with write_session(engine) as session:
        save_chain(session)
    with read_session(engine) as session:
        chain = evidence_chain(session, NAME)
    failed, verdict = Outcome.FAILURE, Verdict.LACKING
    assert chain.missing == []
    assert chain.adapter == adapter()
    assert chain.cycle == CYCLE
    assert chain.trajectories == [
        TrajectoryEvidence("t1", "desk", "train", "41", 0, "base", failed, {0: verdict, 1: verdict}, [2]),
        TrajectoryEvidence("t2", "desk", "train", "41", 1, "base", Outcome.SUCCESS, {0: Verdict.NA, 1: Verdict.NA}, []),
    ]
    assert LabelCounts(0, failed, verdict, 1) in chain.labels
    assert len(chain.labels) == 4
    assert (chain.capability, chain.finding) == (CAPABILITY, FINDING)
    assert (chain.environment.hash, chain.environment.source_code) == (HASH, SOURCE)
    assert [admission.report for admission in chain.admissions] == [REPORT]
    assert (chain.training.id, chain.training.rollouts, len(chain.iterations)) == ("r1", 64, 1)
    assert [gate.result for gate in chain.gates] == [GATE]
    assert [approval.who for approval in chain.approvals] == ["Ada"]
    assert [promotion.state for promotion in chain.promotions] == [PromotionState.LIVE]
    assert chain.traffic == Traffic(1, 1)
    assert chain.traffic.share == 1.0


def test_a_rejected_environment_is_reported_with_advice(engine: Engine) -> None:
    evidence = {"seed": 3, "where": "other process", "difference": "'\x1b[31ma' against '\x1b[31mb'"}
    report = AdmissionReport(HASH, False, [Check("determinism", False, evidence, 0.5)])
    with write_session(engine) as session:
        save_chain(session)
        save_admission(session, report, cycle_id=CYCLE.id, at=T0)
    with read_session(engine) as session:
        lines = list(chain_lines(evidence_chain(session, NAME), NOBODY))
    assert "admission    refused, 0 of 1 checks passed" in lines
    [failed] = [line for line in lines if "failed:" in line]
    line = "determinism: Seed 3, played in a second process with another hash seed, gives other bytes: '␛[31ma' against"
    assert failed.startswith(f"             failed: {line}")
    assert "{'seed'" not in failed


def test_citations_and_fault_attributions_are_shown(engine: Engine) -> None:
    citations = [Citation("c1", CAPABILITY.name, place, "t1", 1 + place % 2) for place in range(1, 7)]
    with write_session(engine) as session:
        save_chain(session)
        save_citations(session, citations)
        save_faults(session, [FaultRecord("c1", "t2", "simulator", 1, "It left.")])
        chain = evidence_chain(session, NAME)
    assert (len(chain.citations), chain.faults) == (7, {"agent": 1, "simulator": 1})
    bounds: dict[str, Any] = {
        "agreement": 0.75,
        "delta_low": 0.8,
        "delta_high": 1.0,
        "coverage_low": 0.25,
        "coverage_high": 0.75,
    }
    lines = list(chain_lines(replace(chain, finding=replace(FINDING, **bounds)), NOBODY))
    assert "faults       1 agent, 1 simulator; only faults of the agent are analysed" in lines
    (citation_line,) = [line for line in lines if line.startswith("citations ")]
    assert citation_line.startswith("citations    message 2 of t1, message 2 of t1, message 1 of t1")
    assert citation_line.endswith("and 2 more")
    line = "gap +0.90 [+0.80, +1.00], coverage 0.50 [0.25, 0.75], 2 of 2 runs agree, alpha 0.75: retained"
    assert f"contrast     {line}" in lines


def test_missing_links_are_named(engine: Engine) -> None:
    with write_session(engine) as session:
        save_origin(session)
        save_training_run(session, training_run())
        save_adapter(session, adapter())
        chain = evidence_chain(session, NAME)
    assert chain.missing == ["training metrics", "gate", "approval", "promotion"]
    assert chain.traffic.share is None


def test_production_trajectories_are_marked(engine: Engine) -> None:
    with write_session(engine) as session:
        save_chain(session)
        save_trajectories(session, [trajectory("router-1", split="", cycle_id=None)])
        save_labels(session, "c1", [Label("router-1", CAPABILITY.name, 0, Verdict.PRESENT)])
        chain = evidence_chain(session, NAME)
    assert {trajectory_evidence.id: trajectory_evidence.production for trajectory_evidence in chain.trajectories} == {
        "t1": False,
        "t2": False,
        "router-1": True,
    }
    expected = "trajectories 3 analysed: 2 failure, 1 success; 2 from the environment, 1 from production"
    assert expected in chain_lines(chain, NOBODY)


def test_an_unknown_adapter_is_named(engine: Engine) -> None:
    with read_session(engine) as session, pytest.raises(NotFound, match="'x@v1'"):
        evidence_chain(session, "x@v1")


def test_lengths_of_messages_are_those_of_the_gates_episodes_on_the_target(engine: Engine) -> None:
    def turns(*lengths: int) -> list[Turn]:
        return [Turn(2, [1], [7] * length, [-0.5] * length, "stop") for length in lengths]

    with write_session(engine) as session:
        save_chain(session)
        lines = list(chain_lines(evidence_chain(session, NAME), NOBODY))
        assert not any(line.startswith("messages") for line in lines)
        gate: dict[str, Any] = {"split": "gate", "model": NAME}
        episodes = [
            trajectory("g1", split="gate", turns=turns(8, 12)),
            trajectory("g2", **gate, turns=turns(16, 20, 18)),
            trajectory("g3", **gate, turns=turns(14)),
            trajectory("g4", **gate, turns=[]),
            trajectory("g5", **gate, turns=turns(900), source="env:1"),
        ]
        save_trajectories(session, episodes)
        lines = list(chain_lines(evidence_chain(session, NAME), NOBODY))
    expected = "base 10 tokens on average, adapter 17 (+70 %), in the gate's episodes on the target"
    assert f"messages     {expected}" in lines
