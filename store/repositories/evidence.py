"""The evidence chain of one adapter version: everything that led to it, and everything that became of it.

Invariants: read from the rows' own references, nothing is guessed; a link that is not stored is named in ``missing``.
Fails: ``NotFound`` for an adapter version that is not stored. Not covered: rendering (``traced explain``), and the
messages of the trajectories (``repositories.trajectories`` has them under the ids given here).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from sqlmodel import Session

from store.records import (
    AdapterVersion,
    AdmissionRecord,
    Approval,
    Citation,
    Cycle,
    EnvironmentRecord,
    Finding,
    GateRecord,
    IterationMetrics,
    Promotion,
    TrainingRun,
)
from store.repositories.adapters import get_adapter, get_training_run, list_iterations
from store.repositories.capabilities import get_capability, list_findings, list_labels
from store.repositories.cycles import get_cycle
from store.repositories.environments import get_environment, list_admissions
from store.repositories.llm_replies import list_citations, list_faults
from store.repositories.promotions import list_approvals, list_gates, list_promotions
from store.repositories.serving import traffic
from store.repositories.traffic import Served, served
from store.repositories.trajectories import get_trajectories
from store.types import Capability, Label, Outcome, Trajectory, Verdict


@dataclass(frozen=True)
class TrajectoryEvidence:
    """One analysed trajectory and what each labelling run said of the capability in it.

    ``verdicts`` maps run to verdict; ``cited`` are the message indices that decided them, sorted; ``production``: no
    cycle has recorded it.
    """

    id: str
    source: str
    split: str
    task_id: str
    trial: int
    model: str
    outcome: Outcome
    verdicts: dict[int, Verdict]
    cited: list[int]
    production: bool = False


@dataclass(frozen=True)
class LabelCounts:
    """How often one labelling run gave a verdict to trajectories of an outcome."""

    run: int
    outcome: Outcome
    verdict: Verdict
    trajectories: int


@dataclass(frozen=True)
class Traffic:
    """Conversations that were routed in tests: the adapter's and everyone's; ``share`` is None before the first one."""

    conversations: int
    routed: int

    @property
    def share(self) -> float | None:
        """The adapter's part of the routed conversations, 0-1."""
        return self.conversations / self.routed if self.routed else None


@dataclass(frozen=True)
class EvidenceChain:
    """The chain in the order of the data's way; lists are empty and ``finding`` is None where nothing is stored.

    ``faults`` counts the cycle's failures by whose fault they were, where its analyst has asked.
    """

    adapter: AdapterVersion
    cycle: Cycle
    trajectories: list[TrajectoryEvidence]
    labels: list[LabelCounts]
    capability: Capability
    citations: list[Citation]
    faults: dict[str, int]
    finding: Finding | None
    environment: EnvironmentRecord
    admissions: list[AdmissionRecord]
    training: TrainingRun
    iterations: list[IterationMetrics]
    gates: list[GateRecord]
    approvals: list[Approval]
    promotions: list[Promotion]
    traffic: Traffic
    served: Served
    missing: list[str]


def evidence_chain(session: Session, adapter: str) -> EvidenceChain:
    """Everything stored about ``adapter``'s origin and fate; raises ``NotFound``."""
    version = get_adapter(session, adapter)
    training = get_training_run(session, version.training_run_id)
    cycle_id, capability = training.cycle_id, training.capability
    labels = list_labels(session, cycle_id, capability=capability)
    trajectories = get_trajectories(session, sorted({label.trajectory_id for label in labels}), tokens=False)
    findings = {finding.capability: finding for finding in list_findings(session, cycle_id)}
    finding, iterations = findings.get(capability), list_iterations(session, training.id)
    admissions = list_admissions(session, version.environment_hash)
    gates, approvals = list_gates(session, adapter), list_approvals(session, adapter)
    promotions = list_promotions(session, adapter)
    links: dict[str, object] = {
        "trajectories": trajectories,
        "labels": labels,
        "finding": finding,
        "admission": admissions,
        "training metrics": iterations,
        "gate": gates,
        "approval": approvals,
        "promotion": promotions,
    }
    return EvidenceChain(
        adapter=version,
        cycle=get_cycle(session, cycle_id),
        trajectories=_trajectory_evidence(trajectories, labels),
        labels=_label_counts(trajectories, labels),
        capability=get_capability(session, cycle_id, capability),
        citations=list_citations(session, cycle_id, capability=capability),
        faults=Counter(one.fault for one in list_faults(session, cycle_id)),
        finding=finding,
        environment=get_environment(session, version.environment_hash, cycle_id=cycle_id),
        admissions=admissions,
        training=training,
        iterations=iterations,
        gates=gates,
        approvals=approvals,
        promotions=promotions,
        traffic=_traffic(session, adapter),
        served=served(session, adapter),
        missing=[name for name, found in links.items() if not found],
    )


def _trajectory_evidence(trajectories: Iterable[Trajectory], labels: Iterable[Label]) -> list[TrajectoryEvidence]:
    verdicts: dict[str, dict[int, Verdict]] = {}
    cited: dict[str, set[int]] = {}
    for label in labels:
        verdicts.setdefault(label.trajectory_id, {})[label.run] = label.verdict
        if label.message_index is not None:
            cited.setdefault(label.trajectory_id, set()).add(label.message_index)
    return [
        TrajectoryEvidence(
            t.id,
            t.source,
            t.split,
            t.task_id,
            t.trial,
            t.model,
            t.outcome,
            verdicts[t.id],
            sorted(cited.get(t.id, ())),
            t.cycle_id is None,
        )
        for t in trajectories
    ]


def _label_counts(trajectories: Iterable[Trajectory], labels: Iterable[Label]) -> list[LabelCounts]:
    outcomes = {trajectory.id: trajectory.outcome for trajectory in trajectories}
    counts = Counter((label.run, outcomes[label.trajectory_id], label.verdict) for label in labels)
    return [LabelCounts(*cell, trajectories=count) for cell, count in sorted(counts.items())]


def _traffic(session: Session, adapter: str) -> Traffic:
    by_model = traffic(session)
    return Traffic(by_model.get(adapter, 0), sum(by_model.values()))
