"""People's decisions, and the log of what was promoted and rolled back.

Invariants: decisions and log entries are only added, the newest one counts; a decision keeps the gate result that the
person had before them; only an adapter version whose newest decision is approval can go live or on trial (canary,
shadow); of a capability at most one version is live and one on trial; rolling back a live version brings back the one
that was live before, is still approved and was not rolled back since; rolling back one on trial leaves what is live. A
canary whose control is rolled back gets a new entry with the new control: what was judged against the old one is over.
Fails: ``NotApproved``, ``NotLive``, ``NotFound``. Not covered: whether a gate has to pass first (``traced.registry``).

Gate results with their paired comparisons.

Invariants: results are only added, in the order of writing; the newest one of an adapter version counts.
Fails: a result on an adapter version that is not stored is a ``BrokenReference``.

How adapter versions stand with people, and the pairs of episodes that their gates have compared.

Invariants: each question is a bounded number of queries, and none reads messages. A pair is the same task and trial of
one source and split, played in the adapter's own cycle by the base and by the adapter. Not covered: which of them an
interval was computed from (``repositories.gates`` has its figures).
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime

from sqlalchemy import select as columns
from sqlmodel import Session, and_, case, col, func, select

from store.content import digest, insert_new
from store.errors import NotApproved, NotLive
from store.records import Approval, Decision, GateRecord, Promotion, PromotionState, Trial
from store.repositories.adapters import get_adapter
from store.repositories.trajectories import in_cycle
from store.tables import AdapterRow, ApprovalRow, ComparisonRow, GateRow, PromotionRow, TrajectoryRow
from store.types import GateAnswer, GateResult, Outcome, PairedDifference


def save_gate(session: Session, result: GateResult, *, cycle_id: str, at: datetime) -> str:
    """Store a gate result and its comparisons; returns its id."""
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
    """The gate results of an adapter version, oldest first."""
    query = select(GateRow).where(GateRow.adapter == adapter).order_by(col(GateRow.seq))
    return [_record(session, row) for row in session.exec(query)]


def latest_gate(session: Session, adapter: str) -> GateRecord | None:
    """The newest gate result of an adapter version, None when there is none."""
    return next(reversed(list_gates(session, adapter)), None)


def latest_answers(session: Session) -> dict[str, GateAnswer]:
    """The newest answer on each adapter version that has one, in one query."""
    newest = select(func.max(GateRow.seq)).group_by(col(GateRow.adapter))
    rows = session.exec(select(GateRow.adapter, GateRow.answer).where(col(GateRow.seq).in_(newest)))
    return {adapter: GateAnswer(answer) for adapter, answer in rows}


def _record(session: Session, row: GateRow) -> GateRecord:
    query = select(ComparisonRow).where(ComparisonRow.gate_id == row.id).order_by(col(ComparisonRow.position))
    comparisons = [_comparison(comparison) for comparison in session.exec(query)]
    result = GateResult(row.adapter, GateAnswer(row.answer), comparisons, row.rounds)
    return GateRecord(row.id, row.cycle_id, row.at, result)


def _comparison(row: ComparisonRow) -> PairedDifference:
    values = row.model_dump(exclude={"gate_id", "position"})
    return PairedDifference(**{**values, "answer": GateAnswer(row.answer)})


def save_approval(session: Session, approval: Approval) -> Approval:
    """Store a decision and return it with the gate result it was about (the newest one unless named)."""
    get_adapter(session, approval.adapter)
    gate = latest_gate(session, approval.adapter)
    gate_id = approval.gate_id or (gate.id if gate is not None else None)
    values = {**asdict(approval), "decision": approval.decision.value, "gate_id": gate_id}
    insert_new(session, ApprovalRow, [{"id": digest(values), **values}])
    return Approval(**{**values, "decision": approval.decision})


def list_approvals(session: Session, adapter: str) -> list[Approval]:
    """The decisions on an adapter version, oldest first."""
    query = select(ApprovalRow).where(ApprovalRow.adapter == adapter).order_by(col(ApprovalRow.seq))
    return [
        Approval(**{**row.model_dump(exclude={"seq", "id"}), "decision": Decision(row.decision)})
        for row in session.exec(query)
    ]


def latest_approval(session: Session, adapter: str) -> Approval | None:
    """The newest decision on an adapter version, None when nobody has decided."""
    return next(reversed(list_approvals(session, adapter)), None)


def latest_decisions(session: Session) -> dict[str, Decision]:
    """The newest decision on each adapter version that has one, in one query."""
    newest = select(func.max(ApprovalRow.seq)).group_by(col(ApprovalRow.adapter))
    rows = session.exec(select(ApprovalRow.adapter, ApprovalRow.decision).where(col(ApprovalRow.seq).in_(newest)))
    return {adapter: Decision(decision) for adapter, decision in rows}


def promote(session: Session, adapter: str, *, who: str, at: datetime, reason: str = "") -> Promotion:
    """Put an approved adapter version live in place of its capability's live one; live already is no error."""
    capability = _approved_capability(session, adapter)
    _lock(session, capability)
    live = {promotion.adapter: promotion for promotion in live_adapters(session)}
    if adapter in live:
        return live[adapter]
    _end_trial(session, capability, adapter, who=who, at=at)
    previous = next((name for name in live if get_adapter(session, name).capability == capability), None)
    if previous is not None:
        before = live[previous].previous
        _append(session, Promotion(previous, PromotionState.SUPERSEDED, who, at, f"{adapter} takes its place", before))
    return _append(session, Promotion(adapter, PromotionState.LIVE, who, at, reason, previous))


def put_on_trial(session: Session, promotion: Promotion) -> Promotion:
    """Begin a canary or shadow, or give a canary its next share; the same once more changes nothing.

    ``previous`` is what is live, whatever it says. Raises ``NotApproved``.
    """
    adapter = promotion.adapter
    capability = _approved_capability(session, adapter)
    _lock(session, capability)
    live = [one.adapter for one in live_adapters(session)]
    if adapter in live:
        return _latest(session, adapter)
    standing = next((one.promotion for one in trials(session) if one.capability == capability), None)
    if standing is not None and standing.adapter == adapter:
        if (standing.state, standing.share) == (promotion.state, promotion.share):
            return standing
    else:
        _end_trial(session, capability, adapter, who=promotion.who, at=promotion.at)
    previous = next((name for name in live if get_adapter(session, name).capability == capability), None)
    return _append(session, replace(promotion, previous=previous))


def roll_back(session: Session, adapter: str, *, who: str, at: datetime, reason: str = "") -> str | None:
    """Take a live adapter version back; returns the version of the capability that is live now, None for the base."""
    capability = get_adapter(session, adapter).capability
    _lock(session, capability)
    live = {promotion.adapter: promotion for promotion in live_adapters(session)}
    tried = next((one.promotion for one in trials(session) if one.capability == capability), None)
    if tried is not None and tried.adapter == adapter:
        standing = next((name for name in live if get_adapter(session, name).capability == capability), None)
        _append(session, Promotion(adapter, PromotionState.ROLLED_BACK, who, at, reason, standing))
        return standing
    if adapter not in live:
        raise NotLive(
            f"adapter {adapter!r} is not live (live: {', '.join(sorted(live)) or 'none'}); see `traced status`"
        )
    before = _before(session, capability)
    previous = before.pop() if before else None
    _append(session, Promotion(adapter, PromotionState.ROLLED_BACK, who, at, reason, previous))
    why = f"{adapter} was rolled back"
    if previous is not None:
        _append(session, Promotion(previous, PromotionState.LIVE, who, at, why, before[-1] if before else None))
    if tried is not None and tried.state is PromotionState.CANARY and tried.adapter != previous:
        _append(session, replace(tried, who=who, at=at, reason=why, previous=previous))
    return previous


def brought_back(session: Session, standing: Trial) -> str | None:
    """What a rollback of a version that is live or on trial would leave live; None for the base model."""
    if standing.promotion.state is PromotionState.LIVE:
        return next(reversed(_before(session, standing.capability)), None)
    live = [one for one in newest_entries(session) if one.promotion.state is PromotionState.LIVE]
    return next((one.promotion.adapter for one in live if one.capability == standing.capability), None)


def live_adapters(session: Session) -> list[Promotion]:
    """The newest log entry of every adapter version that is live, by capability."""
    return [one.promotion for one in newest_entries(session) if one.promotion.state is PromotionState.LIVE]


def trials(session: Session) -> list[Trial]:
    """The versions that are on trial, by capability."""
    on_trial = (PromotionState.CANARY, PromotionState.SHADOW)
    return [one for one in newest_entries(session) if one.promotion.state in on_trial]


def newest_entries(session: Session) -> list[Trial]:
    """The newest log entry of every version that was ever promoted, by capability."""
    query = select(PromotionRow, AdapterRow).join(AdapterRow, col(PromotionRow.adapter) == col(AdapterRow.name))
    newest: dict[str, Trial] = {}
    for row, adapter in session.exec(query.order_by(col(AdapterRow.capability), col(PromotionRow.seq))):
        newest[adapter.name] = Trial(row.seq or 0, adapter.capability, _promotion(row))
    return list(newest.values())


def shares(session: Session, adapter: str) -> dict[int, float]:
    """The log entries of a version's canary beside its present control, by number, with the share that each gave it."""
    query = select(PromotionRow).where(PromotionRow.adapter == adapter).order_by(col(PromotionRow.seq))
    found: dict[int, float] = {}
    control: str | None = None
    for row in session.exec(query):
        if row.state != PromotionState.CANARY or row.previous != control:
            found = {}  # it is a canary anew
        if row.state == PromotionState.CANARY and row.seq is not None and row.share is not None:
            found[row.seq], control = row.share, row.previous
    return found


def is_newest(session: Session, trial: Trial) -> bool:
    """Whether nothing has been added on its version since; until the end of the transaction nobody else can."""
    _lock(session, trial.capability)
    newest = select(func.max(PromotionRow.seq)).where(PromotionRow.adapter == trial.promotion.adapter)
    return session.exec(newest).one() == trial.seq


def last_promotion(session: Session) -> int:
    """The number of the log's newest entry; 0 where it is empty. It grows with every change of what is live."""
    return session.exec(select(func.max(PromotionRow.seq))).one() or 0


def list_promotions(session: Session, adapter: str) -> list[Promotion]:
    """The promotion log of an adapter version, oldest first."""
    query = select(PromotionRow).where(PromotionRow.adapter == adapter).order_by(col(PromotionRow.seq))
    return [_promotion(row) for row in session.exec(query)]


def _lock(session: Session, capability: str) -> None:
    """One change of what serves a capability at a time (SQLite has one writer anyway)."""
    session.exec(select(AdapterRow.name).where(AdapterRow.capability == capability).with_for_update()).all()


def _approved_capability(session: Session, adapter: str) -> str:
    version = get_adapter(session, adapter)
    if not _is_approved(session, adapter):
        raise NotApproved(f"adapter {adapter!r} has no approval; run `traced approve {adapter}` first")
    return version.capability


def _end_trial(session: Session, capability: str, successor: str, *, who: str, at: datetime) -> None:
    """End what is on trial for a capability, unless it is the successor itself."""
    for one in trials(session):
        if one.capability == capability and one.promotion.adapter != successor:
            ended = replace(one.promotion, state=PromotionState.SUPERSEDED, who=who, at=at, share=None)
            _append(session, replace(ended, reason=f"{successor} takes its place"))


def _lived(session: Session, capability: str) -> list[str]:
    """The versions that rollbacks of a capability go back through, each once; the live one, if any, is the last."""
    query = select(PromotionRow).join(AdapterRow, col(PromotionRow.adapter) == col(AdapterRow.name))
    query = query.where(AdapterRow.capability == capability).order_by(col(PromotionRow.seq))
    lived: list[str] = []
    live: str | None = None
    for row in session.exec(query):
        if row.state == PromotionState.ROLLED_BACK and row.adapter == live:  # what it passed over is behind it too
            lived = lived[: lived.index(row.previous) + 1] if row.previous in lived[:-1] else []
            live = None
        elif row.state in (PromotionState.ROLLED_BACK, PromotionState.LIVE):
            lived = [name for name in lived if name != row.adapter]
        if row.state == PromotionState.LIVE:
            lived, live = [*lived, row.adapter], row.adapter
    return lived


def _before(session: Session, capability: str) -> list[str]:
    """The versions that a rollback of the live one can go back to, the nearest last."""
    before = _lived(session, capability)[:-1]
    while before and not _is_approved(session, before[-1]):
        before.pop()
    return before


def _is_approved(session: Session, adapter: str) -> bool:
    decided = latest_approval(session, adapter)
    return decided is not None and decided.decision is Decision.APPROVED


def _latest(session: Session, adapter: str) -> Promotion:
    return list_promotions(session, adapter)[-1]


def _append(session: Session, promotion: Promotion) -> Promotion:
    session.add(PromotionRow(**{**asdict(promotion), "state": promotion.state.value}))
    session.flush()
    return promotion


def _promotion(row: PromotionRow) -> Promotion:
    return Promotion(**{**row.model_dump(exclude={"seq"}), "state": PromotionState(row.state)})


@dataclass(frozen=True)
class Judged:
    """An adapter version with its gate's newest answer and the newest decision on it."""

    name: str
    capability: str
    cycle_id: str
    answer: GateAnswer
    rounds: int
    at: datetime
    decision: Approval | None

    @property
    def waits(self) -> bool:
        """Whether a person has to decide."""
        return self.decision is None and self.answer is GateAnswer.PASS


@dataclass(frozen=True)
class Played:
    """One episode, without its messages."""

    id: str
    reward: float
    outcome: Outcome


@dataclass(frozen=True)
class PlayedPair:
    """One task and trial, by both models."""

    task_id: str
    trial: int
    base: Played
    adapter: Played


def list_judged(session: Session, *, limit: int, name: str | None = None) -> list[Judged]:
    """Adapter versions whose gate has answered: those that wait first, then as decided or answered, newest first."""
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
        Judged(key, capability, cycle, GateAnswer(gate.answer), gate.rounds, gate.at, _decision(decided))
        for key, capability, cycle, gate, decided in session.execute(query)
    ]


def gate_pairs(
    session: Session, *, adapter: str, base: str, cycle_id: str, source: str, split: str
) -> Iterator[PlayedPair]:
    """The pairs of one source and split, by task and trial."""
    of = {model: _played(session, model, cycle_id, source, split) for model in (base, adapter)}
    for key in sorted(of[base].keys() & of[adapter].keys()):
        yield PlayedPair(*key, of[base][key], of[adapter][key])


def _played(session: Session, model: str, cycle_id: str, source: str, split: str) -> dict[tuple[str, int], Played]:
    row = TrajectoryRow
    query = columns(col(row.task_id), col(row.trial), col(row.id), col(row.reward), col(row.outcome)).where(
        col(row.cycle_id) == cycle_id,
        in_cycle(col(row.source)) == source,
        in_cycle(col(row.split)) == split,
        in_cycle(col(row.model)) == model,
    )
    return {
        (task, trial): Played(key, reward, Outcome(told)) for task, trial, key, reward, told in session.execute(query)
    }


def _decision(row: ApprovalRow | None) -> Approval | None:
    if row is None:
        return None
    return Approval(**{**row.model_dump(exclude={"seq", "id"}), "decision": Decision(row.decision)})
