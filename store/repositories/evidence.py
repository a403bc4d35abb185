"""The evidence chain of an adapter version, from the analysed trajectories to its promotions and traffic."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
from store.repositories.cycles import HANDOVER, get_cycle, list_stage_events
from store.repositories.environments import get_environment, list_admissions, list_origins
from store.repositories.gates import latest_gate, list_approvals, list_gates
from store.repositories.llm_replies import list_citations, list_faults
from store.repositories.promotions import list_promotions
from store.repositories.serving import answering_models, count_routed
from store.repositories.traffic import ModelTraffic, model_traffic
from store.repositories.trajectories import TrajectoryFilter, get_trajectories, message_lengths
from store.types import Capability, Label, Outcome, Trajectory, Verdict

BASE = "base"  # name of the base model in episodes
# The event of a cycle that records what was live when it began, and the model of the live system's episodes.
INCUMBENT = "incumbent"
ATTRIBUTE = "attribute"  # the event with the kinds of the live system's failures
INHERITED = "inherited"  # the synthesizer of an environment that a cycle has taken over from another base model


@dataclass(frozen=True)
class TrajectoryEvidence:
    """An analysed trajectory with the labels of the capability.

    ``model`` is the one that answered; ``verdicts`` maps labelling run to verdict; ``cited`` has the sorted indices of
    the deciding messages; ``production`` is true if no cycle recorded the trajectory.
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
    """The number of trajectories of an outcome to which one labelling run gave a verdict."""

    run: int
    outcome: Outcome
    verdict: Verdict
    trajectories: int


@dataclass(frozen=True)
class Traffic:
    """The number of test conversations of the adapter's cycle routed to the adapter, and to any model."""

    conversations: int
    routed: int

    @property
    def share(self) -> float | None:
        """The adapter's share of the routed conversations, 0-1; None if no conversation was routed."""
        return self.conversations / self.routed if self.routed else None


@dataclass(frozen=True)
class MessageLengths:
    """The mean number of tokens per message of two models on the same tasks: no success rate shows that cost."""

    base: float
    adapter: float


@dataclass(frozen=True)
class EvidenceChain:
    """The evidence chain of an adapter version, in the order of the pipeline.

    ``missing`` names the links that are not stored. ``live_before`` are the versions that answered when the cycle
    began, and that the gate compared with; ``attribution`` counts their failures that lacked the capability by kind.
    ``faults`` counts the failures of the cycle by attributed fault.
    ``origin`` is the first origin of an environment that the cycle has taken over, and ``handover`` the cycle's
    comparison with the live system on another base model.
    ``traffic`` counts test conversations, ``served`` is the traffic of the running router. ``members`` are the versions
    that a merged one was made of, each with the answer of its newest gate ("" without one).
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
    lengths: MessageLengths | None
    approvals: list[Approval]
    promotions: list[Promotion]
    traffic: Traffic
    served: ModelTraffic
    missing: list[str]
    live_before: list[str] = field(default_factory=list)
    attribution: dict[str, int] = field(default_factory=dict)
    origin: EnvironmentRecord | None = None
    handover: str = ""
    members: dict[str, str] = field(default_factory=dict)


def evidence_chain(session: Session, adapter: str) -> EvidenceChain:
    """Return everything stored about the origin and the use of an adapter version; raises ``NotFound``."""
    version = get_adapter(session, adapter)
    training = get_training_run(session, version.training_run_id)
    cycle, capability = get_cycle(session, training.cycle_id), training.capability
    cycle_id = cycle.id
    labels = list_labels(session, cycle_id, capability=capability)
    trajectories = get_trajectories(session, sorted({label.trajectory_id for label in labels}), tokens=False)
    findings = {finding.capability: finding for finding in list_findings(session, cycle_id)}
    finding, iterations = findings.get(capability), list_iterations(session, training.id)
    admissions = list_admissions(session, version.environment_hash)
    gates, approvals = list_gates(session, adapter), list_approvals(session, adapter)
    promotions = list_promotions(session, adapter)
    # A merged version has these through its members, which its training run names.
    of_members = "members" in training.config
    links: dict[str, object] = {
        "trajectories": trajectories or of_members,
        "labels": labels or of_members,
        "finding": finding or of_members,
        "admission": admissions,
        "training metrics": iterations or of_members,
        "gate": gates,
        "approval": approvals,
        "promotion": promotions,
    }
    environment = get_environment(session, version.environment_hash, cycle_id=cycle_id)
    is_inherited = environment.synthesizer == INHERITED
    return EvidenceChain(
        adapter=version,
        cycle=cycle,
        trajectories=_trajectory_evidence(trajectories, labels, answering_models(session, trajectories)),
        labels=_label_counts(trajectories, labels),
        capability=get_capability(session, cycle_id, capability),
        citations=list_citations(session, cycle_id, capability=capability),
        faults=Counter(fault.fault for fault in list_faults(session, cycle_id)),
        finding=finding,
        environment=environment,
        admissions=admissions,
        training=training,
        iterations=iterations,
        gates=gates,
        lengths=gate_lengths(session, version, cycle),
        approvals=approvals,
        promotions=promotions,
        traffic=_traffic(session, version),
        served=model_traffic(session, adapter),
        missing=[name for name, records in links.items() if not records],
        live_before=live_before(session, cycle_id),
        attribution=_attribution(session, cycle_id, capability),
        origin=list_origins(session, environment.hash)[0] if is_inherited else None,
        handover=_handover(session, cycle_id),
        members={name: _gate_answer(session, name) for name in training.config.get("members", [])},
    )


def _gate_answer(session: Session, adapter: str) -> str:
    gate = latest_gate(session, adapter)
    return gate.result.answer.value if gate is not None else ""


def _handover(session: Session, cycle_id: str) -> str:
    events = [event for event in list_stage_events(session, cycle_id) if event.stage == HANDOVER]
    return str(events[-1].detail.get("text", "")) if events else ""


def candidate_model(adapter: str) -> str:
    """Return the model of the episodes of the live system with an adapter version."""
    return f"{INCUMBENT} with {adapter}"


def gate_models(session: Session, version: AdapterVersion) -> tuple[str, str]:
    """Return the models of the two sides of a version's gate, the baseline first.

    They are the base model and the version; in a cycle with live adapters, the live system without and with it.
    """
    if live_before(session, version.cycle_id):
        return INCUMBENT, candidate_model(version.name)
    return BASE, version.name


def live_before(session: Session, cycle_id: str) -> list[str]:
    """Return the adapter versions that answered when a cycle began; none if the base model answered alone."""
    for event in list_stage_events(session, cycle_id):
        if event.stage == INCUMBENT:
            return list(event.detail["composition"]["models"])
    return []


def _attribution(session: Session, cycle_id: str, capability: str) -> dict[str, int]:
    for event in reversed(list_stage_events(session, cycle_id)):
        if event.stage == ATTRIBUTE and "kinds" in event.detail:
            return dict(event.detail["kinds"].get(capability, {}))
    return {}


def gate_lengths(session: Session, version: AdapterVersion, cycle: Cycle) -> MessageLengths | None:
    """Return the lengths of messages in the gate's episodes on the target; None if one side has no token ids there."""
    criteria = TrajectoryFilter(source=cycle.target, split="gate", cycle_id=cycle.id)
    baseline, candidate = gate_models(session, version)
    by_model = message_lengths(session, criteria, [baseline, candidate])
    return MessageLengths(by_model[baseline], by_model[candidate]) if len(by_model) == 2 else None


def _trajectory_evidence(
    trajectories: Iterable[Trajectory], labels: Iterable[Label], models: Mapping[str, str]
) -> list[TrajectoryEvidence]:
    verdicts: dict[str, dict[int, Verdict]] = {}
    cited_messages: dict[str, set[int]] = {}
    for label in labels:
        verdicts.setdefault(label.trajectory_id, {})[label.run] = label.verdict
        if label.message_index is not None:
            cited_messages.setdefault(label.trajectory_id, set()).add(label.message_index)
    return [
        TrajectoryEvidence(
            t.id,
            t.source,
            t.split,
            t.task_id,
            t.trial,
            models[t.id],
            t.outcome,
            verdicts[t.id],
            sorted(cited_messages.get(t.id, ())),
            t.cycle_id is None,
        )
        for t in trajectories
    ]


def _label_counts(trajectories: Iterable[Trajectory], labels: Iterable[Label]) -> list[LabelCounts]:
    outcomes = {trajectory.id: trajectory.outcome for trajectory in trajectories}
    counts = Counter((label.run, outcomes[label.trajectory_id], label.verdict) for label in labels)
    return [LabelCounts(*cell, trajectories=count) for cell, count in sorted(counts.items())]


def _traffic(session: Session, version: AdapterVersion) -> Traffic:
    # Other cycles test other systems, in most of which the version has no part.
    by_model = count_routed(session, cycle_id=version.cycle_id)
    return Traffic(by_model.get(version.name, 0), sum(by_model.values()))
