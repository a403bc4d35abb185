"""Gate results, decisions of people, and the promotion log of adapter versions.

Invariants: all three are only added to, and the newest entry counts; only an approved adapter version can go live or on
trial (canary, shadow); at most one version of a capability is live and one on trial. Not covered: whether a gate has to
pass first (``traced.registry``).
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime

from sqlalchemy import select as columns
from sqlmodel import Session, and_, case, col, func, select

from store.content import digest, insert_new
from store.errors import NotApproved, NotLive
from store.records import Approval, Decision, GateRecord, Promotion, PromotionEntry, PromotionState
from store.repositories.adapters import get_adapter
from store.repositories.trajectories import in_cycle
from store.tables import AdapterRow, ApprovalRow, ComparisonRow, GateRow, PromotionRow, TrajectoryRow
from store.types import GateAnswer, GateResult, Outcome, PairedDifference

ON_TRIAL = (PromotionState.CANARY, PromotionState.SHADOW)


@dataclass(frozen=True)
class GatedAdapter:
    """An adapter version with its newest gate answer and the newest decision on it."""

    name: str
    capability: str
    cycle_id: str
    answer: GateAnswer
    rounds: int
    at: datetime
    decision: Approval | None

    @property
    def awaits_decision(self) -> bool:
        """Whether the gate passed and nobody has decided yet."""
        return self.decision is None and self.answer is GateAnswer.PASS


@dataclass(frozen=True)
class EpisodeResult:
    """The result of an episode, without its messages."""

    id: str
    reward: float
    outcome: Outcome


@dataclass(frozen=True)
class EpisodePair:
    """The episodes of the base model and the adapter on the same task and trial."""

    task_id: str
    trial: int
    base: EpisodeResult
    adapter: EpisodeResult


def save_gate(session: Session, result: GateResult, *, cycle_id: str, at: datetime) -> str:
    """Store a gate result and its comparisons, and return its id."""
    key = digest([asdict(result), cycle_id, at])
    row = {"adapter": result.adapter, "cycle_id": cycle_id, "answer": result.answer.value, "rounds": result.rounds}
    insert_new(session, GateRow, [{"id": key, **row, "at": at}])
    comparisons = [
        {"gate_id": key, "position": position, **asdict(comparison), "answer": comparison.answer.value}
        for position, comparison in enumerate(result.comparisons)
    ]
    insert_new(session, ComparisonRow, comparisons)
    return key


def list_gates(session: Session, adapter: str) -> list[GateRecord]:
    """Return the gate results of an adapter version, oldest first."""
    query = select(GateRow).where(GateRow.adapter == adapter).order_by(col(GateRow.seq))
    return [_record(session, row) for row in session.exec(query)]


def latest_gate(session: Session, adapter: str) -> GateRecord | None:
    """Return the newest gate result of an adapter version, None if there is none."""
    return next(reversed(list_gates(session, adapter)), None)


def latest_answers(session: Session) -> dict[str, GateAnswer]:
    """Return the newest gate answer of each adapter version that has one."""
    newest_seqs = select(func.max(GateRow.seq)).group_by(col(GateRow.adapter))
    rows = session.exec(select(GateRow.adapter, GateRow.answer).where(col(GateRow.seq).in_(newest_seqs)))
    return {adapter: GateAnswer(answer) for adapter, answer in rows}


def save_approval(session: Session, approval: Approval) -> Approval:
    """Store a decision and return it with the id of its gate result (by default the newest)."""
    get_adapter(session, approval.adapter)
    gate = latest_gate(session, approval.adapter)
    gate_id = approval.gate_id or (gate.id if gate is not None else None)
    values = {**asdict(approval), "decision": approval.decision.value, "gate_id": gate_id}
    insert_new(session, ApprovalRow, [{"id": digest(values), **values}])
    return Approval(**{**values, "decision": approval.decision})


def list_approvals(session: Session, adapter: str) -> list[Approval]:
    """Return the decisions on an adapter version, oldest first."""
    query = select(ApprovalRow).where(ApprovalRow.adapter == adapter).order_by(col(ApprovalRow.seq))
    return [
        Approval(**{**row.model_dump(exclude={"seq", "id"}), "decision": Decision(row.decision)})
        for row in session.exec(query)
    ]


def latest_approval(session: Session, adapter: str) -> Approval | None:
    """Return the newest decision on an adapter version, None if there is none."""
    return next(reversed(list_approvals(session, adapter)), None)


def latest_decisions(session: Session) -> dict[str, Decision]:
    """Return the newest decision on each adapter version that has one."""
    newest_seqs = select(func.max(ApprovalRow.seq)).group_by(col(ApprovalRow.adapter))
    rows = session.exec(select(ApprovalRow.adapter, ApprovalRow.decision).where(col(ApprovalRow.seq).in_(newest_seqs)))
    return {adapter: Decision(decision) for adapter, decision in rows}


def promote(session: Session, adapter: str, *, actor: str, at: datetime, reason: str = "") -> Promotion:
    """Make an approved adapter version live in place of the live one of its capability; no error if it is live.

    Raises:
        NotApproved: the newest decision on the version is not an approval.
    """
    capability = _approved_capability(session, adapter)
    _lock(session, capability)
    live = _current(session, capability, PromotionState.LIVE)
    if live is not None and live.adapter == adapter:
        return live
    _end_trial(session, capability, adapter, actor=actor, at=at)
    if live is None:
        return _append(session, Promotion(adapter, PromotionState.LIVE, actor, at, reason))
    successor = f"{adapter} takes its place"
    _append(session, Promotion(live.adapter, PromotionState.SUPERSEDED, actor, at, successor, live.previous))
    return _append(session, Promotion(adapter, PromotionState.LIVE, actor, at, reason, live.adapter))


def put_on_trial(session: Session, promotion: Promotion) -> Promotion:
    """Start a canary or shadow, or move a canary to its next share; repeating the call changes nothing.

    ``previous`` of the entry is set to the live version, its control.

    Raises:
        NotApproved: the newest decision on the version is not an approval.
    """
    adapter = promotion.adapter
    capability = _approved_capability(session, adapter)
    _lock(session, capability)
    live = _current(session, capability, PromotionState.LIVE)
    if live is not None and live.adapter == adapter:
        return live
    trial = _current(session, capability, *ON_TRIAL)
    if trial is not None and trial.adapter == adapter:
        if (trial.state, trial.share) == (promotion.state, promotion.share):
            return trial
    else:
        _end_trial(session, capability, adapter, actor=promotion.who, at=promotion.at)
    return _append(session, replace(promotion, previous=None if live is None else live.adapter))


def roll_back(session: Session, adapter: str, *, actor: str, at: datetime, reason: str = "") -> str | None:
    """Roll back an adapter version that is live or on trial.

    Returns:
        The version of the capability that is live now, None for the base model. Rolling back a version on trial
        leaves the live one.

    Raises:
        NotLive: the version is neither live nor on trial.
    """
    capability = get_adapter(session, adapter).capability
    _lock(session, capability)
    live = _current(session, capability, PromotionState.LIVE)
    trial = _current(session, capability, *ON_TRIAL)
    if trial is not None and trial.adapter == adapter:
        control = None if live is None else live.adapter
        _append(session, Promotion(adapter, PromotionState.ROLLED_BACK, actor, at, reason, control))
        return control
    if live is None or live.adapter != adapter:
        names = ", ".join(sorted(promotion.adapter for promotion in live_adapters(session))) or "none"
        raise NotLive(f"adapter {adapter!r} is not live (live: {names}); see `traced status`")
    candidates = _rollback_candidates(session, capability)
    previous = candidates.pop() if candidates else None
    _append(session, Promotion(adapter, PromotionState.ROLLED_BACK, actor, at, reason, previous))
    cause = f"{adapter} was rolled back"
    if previous is not None:
        before_previous = candidates[-1] if candidates else None
        _append(session, Promotion(previous, PromotionState.LIVE, actor, at, cause, before_previous))
    # A canary gets a new entry with the new control, because its results against the old control no longer count.
    if trial is not None and trial.state is PromotionState.CANARY and trial.adapter != previous:
        _append(session, replace(trial, who=actor, at=at, reason=cause, previous=previous))
    return previous


def rollback_target(session: Session, entry: PromotionEntry) -> str | None:
    """Return the version that a rollback of a live or trial version would leave live; None for the base model."""
    if entry.promotion.state is PromotionState.LIVE:
        return next(reversed(_rollback_candidates(session, entry.capability)), None)
    live = _current(session, entry.capability, PromotionState.LIVE)
    return None if live is None else live.adapter


def live_adapters(session: Session) -> list[Promotion]:
    """Return the newest log entry of every live adapter version, by capability."""
    return [entry.promotion for entry in newest_promotions(session) if entry.promotion.state is PromotionState.LIVE]


def trials(session: Session) -> list[PromotionEntry]:
    """Return the newest log entry of every adapter version on trial, by capability."""
    return [entry for entry in newest_promotions(session) if entry.promotion.state in ON_TRIAL]


def newest_promotions(session: Session) -> list[PromotionEntry]:
    """Return the newest log entry of every version that was ever promoted, by capability."""
    query = select(PromotionRow, AdapterRow).join(AdapterRow, col(PromotionRow.adapter) == col(AdapterRow.name))
    entries: dict[str, PromotionEntry] = {}
    for row, adapter in session.exec(query.order_by(col(AdapterRow.capability), col(PromotionRow.seq))):
        entries[adapter.name] = PromotionEntry(row.seq or 0, adapter.capability, _promotion(row))
    return list(entries.values())


def canary_shares(session: Session, adapter: str) -> dict[int, float]:
    """Return the shares of a version's canary against its current control, by number of the log entry."""
    query = select(PromotionRow).where(PromotionRow.adapter == adapter).order_by(col(PromotionRow.seq))
    shares_by_entry: dict[int, float] = {}
    control: str | None = None
    for row in session.exec(query):
        if row.state != PromotionState.CANARY or row.previous != control:
            # A new canary, or a new control: results against the old control no longer count.
            shares_by_entry = {}
        if row.state == PromotionState.CANARY and row.seq is not None and row.share is not None:
            shares_by_entry[row.seq], control = row.share, row.previous
    return shares_by_entry


def is_newest_entry(session: Session, entry: PromotionEntry) -> bool:
    """Whether an entry is still the newest of its version; locks its capability until the end of the transaction."""
    _lock(session, entry.capability)
    newest_seq = select(func.max(PromotionRow.seq)).where(PromotionRow.adapter == entry.promotion.adapter)
    return session.exec(newest_seq).one() == entry.seq


def last_promotion(session: Session) -> int:
    """Return the number of the newest log entry, 0 if there is none; it grows with every change of what is live."""
    return session.exec(select(func.max(PromotionRow.seq))).one() or 0


def list_promotions(session: Session, adapter: str) -> list[Promotion]:
    """Return the promotion log of an adapter version, oldest first."""
    query = select(PromotionRow).where(PromotionRow.adapter == adapter).order_by(col(PromotionRow.seq))
    return [_promotion(row) for row in session.exec(query)]


def list_gated_adapters(session: Session, *, limit: int, name: str | None = None) -> list[GatedAdapter]:
    """Return adapter versions with a gate answer: those awaiting a decision first, then newest first."""
    newest_gate = select(func.max(GateRow.seq)).group_by(col(GateRow.adapter))
    newest_decision = select(func.max(ApprovalRow.seq)).group_by(col(ApprovalRow.adapter))
    gate_of = and_(col(GateRow.adapter) == col(AdapterRow.name), col(GateRow.seq).in_(newest_gate))
    decision_of = and_(col(ApprovalRow.adapter) == col(AdapterRow.name), col(ApprovalRow.seq).in_(newest_decision))
    waits = and_(col(ApprovalRow.seq).is_(None), col(GateRow.answer) == GateAnswer.PASS.value)
    query = (
        columns(col(AdapterRow.name), col(AdapterRow.capability), col(AdapterRow.cycle_id), GateRow, ApprovalRow)
        .join(GateRow, gate_of)
        .join(ApprovalRow, decision_of, isouter=True)
        .order_by(
            case((waits, 0), else_=1),
            func.coalesce(col(ApprovalRow.at), col(GateRow.at)).desc(),
            col(AdapterRow.name),
        )
        .limit(limit)
    )
    if name is not None:
        query = query.where(col(AdapterRow.name) == name)
    return [
        GatedAdapter(key, capability, cycle, GateAnswer(gate.answer), gate.rounds, gate.at, _decision(approval))
        for key, capability, cycle, gate, approval in session.execute(query)
    ]


def gate_pairs(
    session: Session, *, adapter: str, base: str, cycle_id: str, source: str, split: str
) -> Iterator[EpisodePair]:
    """Yield the episode pairs of a cycle for one source and split, by task and trial."""
    episodes = {model: _episodes(session, model, cycle_id, source, split) for model in (base, adapter)}
    for key in sorted(episodes[base].keys() & episodes[adapter].keys()):
        yield EpisodePair(*key, episodes[base][key], episodes[adapter][key])


def _record(session: Session, row: GateRow) -> GateRecord:
    query = select(ComparisonRow).where(ComparisonRow.gate_id == row.id).order_by(col(ComparisonRow.position))
    comparisons = [_comparison(comparison) for comparison in session.exec(query)]
    result = GateResult(row.adapter, GateAnswer(row.answer), comparisons, row.rounds)
    return GateRecord(row.id, row.cycle_id, row.at, result)


def _comparison(row: ComparisonRow) -> PairedDifference:
    values = row.model_dump(exclude={"gate_id", "position"})
    return PairedDifference(**{**values, "answer": GateAnswer(row.answer)})


def _lock(session: Session, capability: str) -> None:
    # One change per capability at a time. SQLite ignores FOR UPDATE; its single writer gives the same guarantee.
    session.exec(select(AdapterRow.name).where(AdapterRow.capability == capability).with_for_update()).all()


def _approved_capability(session: Session, adapter: str) -> str:
    version = get_adapter(session, adapter)
    if not _is_approved(session, adapter):
        raise NotApproved(f"adapter {adapter!r} has no approval; run `traced approve {adapter}` first")
    return version.capability


def _end_trial(session: Session, capability: str, successor: str, *, actor: str, at: datetime) -> None:
    """End the trial of a capability, unless the successor itself is on trial."""
    for entry in trials(session):
        if entry.capability == capability and entry.promotion.adapter != successor:
            closing_entry = replace(entry.promotion, state=PromotionState.SUPERSEDED, who=actor, at=at, share=None)
            _append(session, replace(closing_entry, reason=f"{successor} takes its place"))


def _rollback_history(session: Session, capability: str) -> list[str]:
    """Return the formerly live versions of a capability, each once; the live one, if any, is the last."""
    query = select(PromotionRow).join(AdapterRow, col(PromotionRow.adapter) == col(AdapterRow.name))
    query = query.where(AdapterRow.capability == capability).order_by(col(PromotionRow.seq))
    versions: list[str] = []
    live: str | None = None
    for row in session.exec(query):
        # A rollback may skip versions whose approval was revoked; these leave the history too.
        if row.state == PromotionState.ROLLED_BACK and row.adapter == live:
            versions = versions[: versions.index(row.previous) + 1] if row.previous in versions[:-1] else []
            live = None
        elif row.state in (PromotionState.ROLLED_BACK, PromotionState.LIVE):
            versions = [name for name in versions if name != row.adapter]
        if row.state == PromotionState.LIVE:
            versions, live = [*versions, row.adapter], row.adapter
    return versions


def _rollback_candidates(session: Session, capability: str) -> list[str]:
    """Return the approved versions that a rollback of the live one can restore, the next one last."""
    candidates = _rollback_history(session, capability)[:-1]
    while candidates and not _is_approved(session, candidates[-1]):
        candidates.pop()
    return candidates


def _is_approved(session: Session, adapter: str) -> bool:
    approval = latest_approval(session, adapter)
    return approval is not None and approval.decision is Decision.APPROVED


def _current(session: Session, capability: str, *states: PromotionState) -> Promotion | None:
    entries = (entry for entry in newest_promotions(session) if entry.capability == capability)
    return next((entry.promotion for entry in entries if entry.promotion.state in states), None)


def _append(session: Session, promotion: Promotion) -> Promotion:
    session.add(PromotionRow(**{**asdict(promotion), "state": promotion.state.value}))
    session.flush()
    return promotion


def _promotion(row: PromotionRow) -> Promotion:
    return Promotion(**{**row.model_dump(exclude={"seq"}), "state": PromotionState(row.state)})


def _episodes(
    session: Session, model: str, cycle_id: str, source: str, split: str
) -> dict[tuple[str, int], EpisodeResult]:
    row = TrajectoryRow
    query = columns(col(row.task_id), col(row.trial), col(row.id), col(row.reward), col(row.outcome)).where(
        col(row.cycle_id) == cycle_id,
        in_cycle(col(row.source)) == source,
        in_cycle(col(row.split)) == split,
        in_cycle(col(row.model)) == model,
    )
    return {
        (task, trial): EpisodeResult(key, reward, Outcome(outcome))
        for task, trial, key, reward, outcome in session.execute(query)
    }


def _decision(row: ApprovalRow | None) -> Approval | None:
    if row is None:
        return None
    return Approval(**{**row.model_dump(exclude={"seq", "id"}), "decision": Decision(row.decision)})
