"""The promotion log of adapter versions: which of them are live or on trial.

Invariants: rows are only added, and the newest one counts. Only an approved adapter version that is not in
quarantine can go live or on trial (canary, shadow). Of each base model at most one version of a capability is live, and
at most one is on trial; versions of another base model are untouched. A quarantine adds no row: ``serving_adapters``
has what answers in place of a live version in quarantine.

``go_live``, ``start_trial`` and ``undo`` are pure: from a ``PromotionLog`` they compute the entries of a change of
traffic, which the caller appends while it holds the lock of the capability. Not covered: whether a gate has to pass
first (``traced.registry``).
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime

from sqlmodel import Session, col, func, select

from store.content import digest
from store.errors import NotApproved, NotFound, NotLive
from store.records import (
    AdapterVersion,
    Approval,
    Cycle,
    CycleState,
    Decision,
    GateRecord,
    Promotion,
    PromotionEntry,
    PromotionState,
    StageEvent,
    StageState,
)
from store.repositories.adapters import get_adapter, quarantined_adapters
from store.repositories.cycles import HANDOVER, PREDECESSOR, fallen_versions, get_cycle, save_stage_event
from store.repositories.gates import insert_approval, latest_approval, latest_decisions, latest_gate
from store.tables import (
    AdapterRow,
    CycleRow,
    PromotionRow,
    StageEventRow,
)
from store.types import GateAnswer

ON_TRIAL = (PromotionState.CANARY, PromotionState.SHADOW)
GATE = "gate"  # name of the stage
TAG_DIGITS = 16

Change = Approval | Promotion | StageEvent  # a row that a decision adds


@dataclass(frozen=True)
class PromotionLog:
    """The promotion log of a capability on one base model, oldest entry first.

    ``approved`` has the names of its approved versions that are not in quarantine.
    """

    entries: Sequence[Promotion] = ()
    approved: Collection[str] = ()

    @property
    def newest(self) -> dict[str, Promotion]:
        """The newest entry of each version, by version name."""
        return {entry.adapter: entry for entry in self.entries}

    def current(self, *states: PromotionState) -> Promotion | None:
        """Return the newest entry of the version that is in one of these states, None if no version is."""
        return next((entry for entry in self.newest.values() if entry.state in states), None)


@dataclass(frozen=True)
class AdapterState:
    """Everything that a decision on an adapter version depends on.

    ``gate`` and ``approval`` are the newest ones of the version, ``log`` is the promotion log of its capability.
    ``gate_events`` are the events of the cycle's gate stage, oldest first. ``live`` names the live versions of its base
    model, ``fallen`` those in whose environments the live system does worse than before, by the cycle's watch.
    ``predecessor`` is the base model from which the cycle's takes over, "" without one, and ``handover`` why the
    comparison with it does not speak for the version.
    """

    version: AdapterVersion
    cycle: Cycle
    gate: GateRecord | None = None
    approval: Approval | None = None
    log: PromotionLog = field(default_factory=PromotionLog)
    gate_events: Sequence[StageEvent] = ()
    live: Sequence[str] = ()
    fallen: Sequence[str] = ()
    predecessor: str = ""
    handover: str = ""

    @property
    def tag(self) -> str:
        """The identity of the state: another one after each gate result, decision, promotion and rollback.

        Of the decisions on other versions of the capability, those count that a rollback depends on: which are
        approved.
        """
        gate_id = None if self.gate is None else self.gate.id
        approval = None if self.approval is None else asdict(self.approval)
        entries, approved = [asdict(entry) for entry in self.log.entries], sorted(self.log.approved)
        return digest([gate_id, approval, entries, approved])[:TAG_DIGITS]


def read_adapter_state(session: Session, adapter: str, *, lock: bool = True) -> AdapterState:
    """Lock the capability of an adapter version and return the state of the version; raises ``NotFound``."""
    capability = adapter.partition("@")[0]
    if lock:
        _lock(session, capability)
    query = select(AdapterRow, CycleRow).join(CycleRow, col(AdapterRow.cycle_id) == col(CycleRow.id))
    rows = session.exec(query.where(AdapterRow.name == adapter)).first()
    if rows is None:
        raise NotFound("adapter", adapter)
    version, cycle = rows
    events = select(StageEventRow).where(StageEventRow.cycle_id == cycle.id, StageEventRow.stage == GATE)
    return AdapterState(
        AdapterVersion(**version.model_dump()),
        Cycle(**{**cycle.model_dump(), "state": CycleState(cycle.state)}),
        latest_gate(session, adapter),
        latest_approval(session, adapter),
        _log(session, capability, cycle.model),
        [_stage_event(row) for row in session.exec(events.order_by(col(StageEventRow.seq)))],
        [promotion.adapter for promotion in live_adapters(session, cycle.model)],
        fallen_versions(session, cycle.id),
        *_handover(session, cycle.id, adapter),
    )


def _handover(session: Session, cycle_id: str, adapter: str) -> tuple[str, str]:
    """Return the base model that a cycle takes over from, and why its handover does not speak for a version."""
    query = select(StageEventRow).where(
        StageEventRow.cycle_id == cycle_id, col(StageEventRow.stage).in_([PREDECESSOR, HANDOVER])
    )
    events = [_stage_event(row) for row in session.exec(query.order_by(col(StageEventRow.seq)))]
    predecessors = [event.detail["model"] for event in events if event.stage == PREDECESSOR]
    if not predecessors:
        return "", ""
    model = str(predecessors[0])
    details = [event.detail for event in events if event.stage == HANDOVER and "handover" in event.detail]
    if not details:
        return model, f"it has not been compared with what is live on {model} yet"
    if details[-1]["answer"] != GateAnswer.PASS:
        return model, f"its handover is {details[-1]['answer']}: {details[-1]['text']}"
    versions = details[-1]["handover"]["versions"]
    if adapter not in versions:
        return model, "it did not take part in the comparison of its handover"
    decisions, quarantined = latest_decisions(session), quarantined_adapters(session)
    missing = [name for name in versions if name in quarantined or decisions.get(name) is Decision.REJECTED]
    if missing:
        return model, f"the comparison of its handover was made with {', '.join(missing)}, which is not approved"
    gates = {name: latest_gate(session, name) for name in versions}
    failing = [name for name, gate in gates.items() if gate and gate.result.answer is not GateAnswer.PASS]
    if failing:
        return model, f"the comparison of its handover was made with {', '.join(failing)}, whose gate does not pass"
    return model, ""


def save_changes(session: Session, changes: Iterable[Change], model: str) -> list[str]:
    """Add the rows of a decision, and return the versions of the base model that are live afterwards, by capability."""
    for change in changes:
        if isinstance(change, Approval):
            insert_approval(session, change)
        elif isinstance(change, Promotion):
            _append(session, change)
        else:
            save_stage_event(session, change)
    return [promotion.adapter for promotion in live_adapters(session, model)]


def go_live(log: PromotionLog, entry: Promotion) -> list[Promotion]:
    """Return the entries that make the version of ``entry`` live in place of the live one; none if it is live."""
    live = log.current(PromotionState.LIVE)
    if live is None:
        return [*_end_trial(log, entry), entry]
    if live.adapter == entry.adapter:
        return []
    successor = f"{entry.adapter} takes its place"
    superseded = Promotion(live.adapter, PromotionState.SUPERSEDED, entry.who, entry.at, successor, live.previous)
    return [*_end_trial(log, entry), superseded, replace(entry, previous=live.adapter)]


def start_trial(log: PromotionLog, entry: Promotion) -> list[Promotion]:
    """Return the entries that start the canary or shadow of ``entry``, or change the share of a canary.

    ``Promotion.previous`` of the returned entry is the live version, the control of the trial. No entries are returned
    if the version is live, or if it is on the same trial with the same share.
    """
    live, trial = log.current(PromotionState.LIVE), log.current(*ON_TRIAL)
    if live is not None and live.adapter == entry.adapter:
        return []
    if trial is not None and (trial.adapter, trial.state, trial.share) == (entry.adapter, entry.state, entry.share):
        return []
    return [*_end_trial(log, entry), replace(entry, previous=None if live is None else live.adapter)]


def undo(log: PromotionLog, entry: Promotion) -> list[Promotion]:
    """Return the entries that roll back the version of ``entry``; none if it is neither live nor on trial.

    The first returned entry is ``entry`` with ``Promotion.previous`` set to the version that is live after the
    rollback, None for the base model.
    """
    live, trial = log.current(PromotionState.LIVE), log.current(*ON_TRIAL)
    if trial is not None and trial.adapter == entry.adapter:
        return [replace(entry, previous=None if live is None else live.adapter)]
    if live is None or live.adapter != entry.adapter:
        return []
    candidates = _rollback_candidates(log)
    previous = candidates.pop() if candidates else None
    entries = [replace(entry, previous=previous)]
    cause = f"{entry.adapter} was rolled back"
    if previous is not None:
        before_previous = candidates[-1] if candidates else None
        entries.append(Promotion(previous, PromotionState.LIVE, entry.who, entry.at, cause, before_previous))
    # A canary gets a new entry with the new control, because its results against the old control no longer count.
    if trial is not None and trial.state is PromotionState.CANARY and trial.adapter != previous:
        entries.append(replace(trial, who=entry.who, at=entry.at, reason=cause, previous=previous))
    return entries


def not_live_error(adapter: str, live: Iterable[str]) -> NotLive:
    """Return the error for the rollback of a version that is neither live nor on trial."""
    return NotLive(f"adapter {adapter!r} is not live (live: {', '.join(sorted(live)) or 'none'}); see `traced status`")


def promote(session: Session, adapter: str, *, actor: str, at: datetime, reason: str = "") -> Promotion:
    """Make an approved adapter version live in place of the live one of its capability, and return its newest entry.

    Nothing changes if the version is live already.

    Raises:
        NotFound: the version is not stored.
        NotApproved: the newest decision on the version is not an approval.
    """
    log = _approved_log(session, adapter)
    return _append_all(session, log, go_live(log, Promotion(adapter, PromotionState.LIVE, actor, at, reason)), adapter)


def put_on_trial(session: Session, promotion: Promotion) -> Promotion:
    """Start a canary or shadow, or change the share of a canary; repeating the call changes nothing.

    Returns:
        The newest log entry of the version. Its ``Promotion.previous`` is the live version, the control of the trial.

    Raises:
        NotFound: the version is not stored.
        NotApproved: the newest decision on the version is not an approval.
    """
    log = _approved_log(session, promotion.adapter)
    return _append_all(session, log, start_trial(log, promotion), promotion.adapter)


def roll_back(session: Session, adapter: str, *, actor: str, at: datetime, reason: str = "") -> str | None:
    """Roll back an adapter version that is live or on trial.

    Returns:
        The version of the capability that is live afterwards, None for the base model. The rollback of a version on
        trial does not change the live version.

    Raises:
        NotFound: the version is not stored.
        NotLive: the version is neither live nor on trial.
    """
    capability, model = get_adapter(session, adapter).capability, model_of(session, adapter)
    _lock(session, capability)
    log = _log(session, capability, model)
    entries = undo(log, Promotion(adapter, PromotionState.ROLLED_BACK, actor, at, reason))
    if not entries:
        raise not_live_error(adapter, (promotion.adapter for promotion in live_adapters(session, model)))
    _append_all(session, log, entries, adapter)
    return entries[0].previous


def rollback_target(session: Session, entry: PromotionEntry) -> str | None:
    """Return the version that is live after a rollback of the version of ``entry``, None for the base model."""
    log = _log(session, entry.capability, entry.model)
    if entry.promotion.state is PromotionState.LIVE:
        return next(reversed(_rollback_candidates(log)), None)
    live = log.current(PromotionState.LIVE)
    return None if live is None else live.adapter


def live_adapters(session: Session, model: str | None = None) -> list[Promotion]:
    """Return the newest log entry of every live adapter version (of a base model), by capability."""
    return [entry.promotion for entry in newest_promotions(session, model) if entry.is_live]


def promoted_at(session: Session, target: str, model: str | None = None) -> datetime | None:
    """Return when the newest live version (of a base model) was promoted, of those from cycles of a target."""
    live = live_adapters(session, model)
    cycles = {entry.adapter: get_cycle(session, get_adapter(session, entry.adapter).cycle_id) for entry in live}
    return max((entry.at for entry in live if cycles[entry.adapter].target == target), default=None)


def in_service(session: Session) -> dict[str, str]:
    """Return the base models that have versions that are live or on trial, each with its first such version.

    The one whose versions took traffic first comes first.
    """
    entries = [e for e in newest_promotions(session) if e.is_live or e.promotion.state in ON_TRIAL]
    versions: dict[str, str] = {}
    for entry in sorted(entries, key=lambda entry: entry.seq):
        versions.setdefault(entry.model, entry.promotion.adapter)
    return versions


def served_base(session: Session, model: str, fits: Callable[[str], bool] = lambda _: True) -> str:
    """Return the base model whose adapter versions a router with this base model serves.

    It is the one of this name. Where no version in service has it, the folder may have been renamed, or a server may
    have another name for the model: then it is the base model that was in service first, of those that fit.

    Args:
        fits: Whether an adapter version belongs to the router's base model, as far as its files say.
    """
    versions = in_service(session)
    if model in versions:
        return model
    return next((name for name, version in versions.items() if fits(version)), model)


def serving_adapters(session: Session, model: str) -> list[str]:
    """Return the versions of a base model that answer the conversations of their capabilities, by capability.

    These are the live versions; in place of one in quarantine, the version that its rollback would restore, if any.
    """
    quarantined = quarantined_adapters(session)
    names = []
    for entry in newest_promotions(session, model):
        if entry.is_live:
            name = entry.promotion.adapter
            names.append(rollback_target(session, entry) if name in quarantined else name)
    return [name for name in names if name is not None]


def trials(session: Session, model: str | None = None) -> list[PromotionEntry]:
    """Return the newest log entry of every adapter version (of a base model) on trial, by capability."""
    return [entry for entry in newest_promotions(session, model) if entry.promotion.state in ON_TRIAL]


def newest_promotions(session: Session, model: str | None = None) -> list[PromotionEntry]:
    """Return the newest log entry of every promoted version (of a base model), by capability."""
    query = (
        select(PromotionRow, AdapterRow, CycleRow.model)
        .join(AdapterRow, col(PromotionRow.adapter) == col(AdapterRow.name))
        .join(CycleRow, col(AdapterRow.cycle_id) == col(CycleRow.id))
        .order_by(col(AdapterRow.capability), col(PromotionRow.seq))
    )
    entries: dict[str, PromotionEntry] = {}
    for row, adapter, base in session.exec(query):
        if model in (None, base):
            entries[adapter.name] = PromotionEntry(row.seq or 0, adapter.capability, _promotion(row), base)
    return list(entries.values())


def model_of(session: Session, adapter: str) -> str:
    """Return the name of the base model that an adapter version was trained on; raises ``NotFound``."""
    query = select(CycleRow.model).join(AdapterRow, col(AdapterRow.cycle_id) == col(CycleRow.id))
    model = session.exec(query.where(AdapterRow.name == adapter)).first()
    if model is None:
        raise NotFound("adapter", adapter)
    return model


def base_models(session: Session) -> dict[str, str]:
    """Return the name of the base model of every adapter version, by name of the version."""
    query = select(AdapterRow.name, CycleRow.model).join(CycleRow, col(AdapterRow.cycle_id) == col(CycleRow.id))
    return dict(session.exec(query).all())


def canary_shares(session: Session, adapter: str) -> dict[int, float]:
    """Return the shares that a version's canary has had against its current control, by number of the log entry."""
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
    """Lock the capability until the end of the transaction; return whether ``entry`` is the newest of its version."""
    _lock(session, entry.capability)
    newest_seq = select(func.max(PromotionRow.seq)).where(PromotionRow.adapter == entry.promotion.adapter)
    return session.exec(newest_seq).one() == entry.seq


def last_promotion(session: Session) -> int:
    """Return the number of the newest log entry, 0 if there is none; every promotion and rollback increases it."""
    return session.exec(select(func.max(PromotionRow.seq))).one() or 0


def last_change(session: Session, model: str | None = None, *, ignored_actor: str) -> list[Promotion]:
    """Return the log entries of the newest promotion or rollback by another actor, oldest first; [] without one.

    Args:
        model: The base model of the versions; None: any.
    """
    rows = select(PromotionRow)
    if model is not None:
        names = select(AdapterRow.name).join(CycleRow, col(AdapterRow.cycle_id) == col(CycleRow.id))
        rows = rows.where(col(PromotionRow.adapter).in_(names.where(CycleRow.model == model)))
    newest_first = rows.where(PromotionRow.who != ignored_actor).order_by(col(PromotionRow.seq).desc())
    newest = session.exec(newest_first.limit(1)).first()
    if newest is None:
        return []
    query = rows.where(PromotionRow.at == newest.at, PromotionRow.who == newest.who)
    return [_promotion(row) for row in session.exec(query.order_by(col(PromotionRow.seq)))]


def list_promotions(session: Session, adapter: str) -> list[Promotion]:
    """Return the promotion log of an adapter version, oldest first."""
    query = select(PromotionRow).where(PromotionRow.adapter == adapter).order_by(col(PromotionRow.seq))
    return [_promotion(row) for row in session.exec(query)]


def _lock(session: Session, capability: str) -> None:
    # Allows one change per capability at a time. SQLite ignores FOR UPDATE, but has a single writer.
    query = select(AdapterRow.name).where(AdapterRow.capability == capability).order_by(col(AdapterRow.name))
    session.exec(query.with_for_update()).all()


def _log(session: Session, capability: str, model: str) -> PromotionLog:
    of_capability = select(AdapterRow.name).join(CycleRow, col(AdapterRow.cycle_id) == col(CycleRow.id))
    names = session.exec(of_capability.where(AdapterRow.capability == capability, CycleRow.model == model)).all()
    query = select(PromotionRow).where(col(PromotionRow.adapter).in_(names)).order_by(col(PromotionRow.seq))
    decisions = latest_decisions(session)
    approved = {name for name in names if decisions.get(name) is Decision.APPROVED}
    approved -= quarantined_adapters(session).keys()
    return PromotionLog([_promotion(row) for row in session.exec(query)], approved)


def _approved_log(session: Session, adapter: str) -> PromotionLog:
    capability = get_adapter(session, adapter).capability
    _lock(session, capability)
    log = _log(session, capability, model_of(session, adapter))
    if adapter in quarantined_adapters(session):
        raise NotApproved(f"adapter {adapter!r} is in quarantine; see `traced verify`")
    if adapter not in log.approved:
        raise NotApproved(f"adapter {adapter!r} has no approval; run `traced approve {adapter}` first")
    return log


def _end_trial(log: PromotionLog, successor: Promotion) -> list[Promotion]:
    """Return the entry that ends the trial of the capability; none if the successor itself is on trial."""
    trial = log.current(*ON_TRIAL)
    if trial is None or trial.adapter == successor.adapter:
        return []
    superseded = replace(trial, state=PromotionState.SUPERSEDED, who=successor.who, at=successor.at, share=None)
    return [replace(superseded, reason=f"{successor.adapter} takes its place")]


def _rollback_history(log: PromotionLog) -> list[str]:
    """Return the versions that rollbacks of a capability can lead back to, each once; the live one, if any, is last."""
    versions: list[str] = []
    live: str | None = None
    for entry in log.entries:
        # A rollback may skip versions whose approval was revoked; these are removed from the history too.
        if entry.state is PromotionState.ROLLED_BACK and entry.adapter == live:
            versions = versions[: versions.index(entry.previous) + 1] if entry.previous in versions[:-1] else []
            live = None
        elif entry.state in (PromotionState.ROLLED_BACK, PromotionState.LIVE):
            versions = [name for name in versions if name != entry.adapter]
        if entry.state is PromotionState.LIVE:
            versions, live = [*versions, entry.adapter], entry.adapter
    return versions


def _rollback_candidates(log: PromotionLog) -> list[str]:
    """Return the history before the live version, up to its newest approved version, which a rollback restores."""
    candidates = _rollback_history(log)[:-1]
    while candidates and candidates[-1] not in log.approved:
        candidates.pop()
    return candidates


def _append_all(session: Session, log: PromotionLog, entries: Sequence[Promotion], adapter: str) -> Promotion:
    """Append the entries to the log and return the newest entry of version ``adapter``."""
    for entry in entries:
        _append(session, entry)
    return {**log.newest, **{entry.adapter: entry for entry in entries}}[adapter]


def _append(session: Session, promotion: Promotion) -> None:
    session.add(PromotionRow(**{**asdict(promotion), "state": promotion.state.value}))
    session.flush()


def _promotion(row: PromotionRow) -> Promotion:
    return Promotion(**{**row.model_dump(exclude={"seq"}), "state": PromotionState(row.state)})


def _stage_event(row: StageEventRow) -> StageEvent:
    return StageEvent(row.cycle_id, row.stage, StageState(row.state), row.at, row.capability, row.detail)
