"""Trajectories of cycles and of production, with their tool schemas and packed token ids.

Invariants: the first recording under an id is kept, except that a trajectory without an outcome of the agent
(``infrastructure``, ``unknown``) is replaced by a later one unless a label, fault attribution, citation or routing
choice refers to it; the split stays even then. A later recording adds the start that the first one lacked. Listings are
ordered by source, split, task id, trial, model and id. A "reported" trajectory is one that no cycle recorded:
production or an import.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, delete, exists, not_, or_, tuple_, update
from sqlalchemy import select as columns
from sqlmodel import Session, col, func, select
from sqlmodel.sql.expression import SelectOfScalar

from store.content import BATCH, batches, digest, insert_new, pack, unpack
from store.errors import NotFound
from store.service_tables import ExchangeRow, FeedbackRow
from store.tables import CitationRow, FaultRow, LabelRow, RoutingRow, ToolsetRow, TrajectoryRow, TurnsRow
from store.types import EndCause, Outcome, Tool, Trajectory

ORDER = tuple(col(getattr(TrajectoryRow, name)) for name in ("source", "split", "task_id", "trial", "model", "id"))
# Older versions stored neither customer nor start, so these must not make a trajectory another one.
UNDIGESTED = ("turns", "customer", "started_at")
JUDGED_OUTCOMES = [outcome.value for outcome in Outcome if outcome.is_judged]


@dataclass(frozen=True)
class TrajectoryFilter:
    """Criteria for a listing of trajectories; None matches everything."""

    outcome: Outcome | None = None
    source: str | None = None
    split: str | None = None
    model: str | None = None
    cycle_id: str | None = None
    task_id: str | None = None


@dataclass(frozen=True)
class SaveResult:
    """The result of a save: numbers of added and unchanged trajectories, and ids whose content differs from the store.

    ``overwritten`` are the ids whose stored content was replaced, ``rejected`` those whose stored content was kept.
    """

    added: int = 0
    unchanged: int = 0
    overwritten: list[str] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)


EVERYTHING = TrajectoryFilter()


def save_trajectories(session: Session, trajectories: Iterable[Trajectory]) -> SaveResult:
    """Store trajectories; an id that is stored already is no error, see ``SaveResult``."""
    incoming = {trajectory.id: trajectory for trajectory in trajectories}
    digests = _stored_digests(session, list(incoming))
    for key, (_, _, split) in digests.items():
        # The stored split may have been updated since; "" is none.
        incoming[key] = replace(incoming[key], split=split or incoming[key].split)
    new: list[Trajectory] = []
    unchanged: list[Trajectory] = []
    overwritten: list[str] = []
    rejected: list[str] = []
    for trajectory in incoming.values():
        if trajectory.id not in digests:
            new.append(trajectory)
            continue
        stored_digest, outcome, _ = digests[trajectory.id]
        if stored_digest == _digest(trajectory):
            unchanged.append(trajectory)
        # A recording without an outcome of the agent is no evidence, so a repeated episode may replace it.
        elif not Outcome(outcome).is_judged and not _is_cited(session, trajectory.id):
            overwritten.append(trajectory.id)
        else:
            rejected.append(trajectory.id)
    _delete(session, overwritten)
    _insert(session, new + [incoming[key] for key in overwritten])
    _add_starts(session, {row.id: row.started_at for row in unchanged if row.started_at is not None})
    return SaveResult(len(new), len(unchanged), overwritten, rejected)


def update_outcome(session: Session, trajectory: Trajectory) -> bool:
    """Update outcome and reward of a reported trajectory.

    Returns:
        False if the trajectory is not stored, a cycle recorded it, or a label, fault attribution, citation or routing
            choice refers to it.
    """
    row = _unused_row(session, trajectory.id)
    if row is None:
        return False
    row.outcome, row.reward = trajectory.outcome.value, trajectory.reward
    row.digest = _digest(replace(trajectory, split=row.split))
    session.add(row)
    session.flush()
    return True


def update_context(session: Session, trajectory: Trajectory) -> bool:
    """Update messages and tools of a reported trajectory, whose outcome stays.

    Returns:
        False if the trajectory is not stored, a cycle recorded it, or a label, fault attribution, citation or routing
            choice refers to it.
    """
    row = _unused_row(session, trajectory.id)
    if row is None:
        return False
    toolset_hash = digest(trajectory.tools)
    insert_new(session, ToolsetRow, [{"hash": toolset_hash, "tools": trajectory.tools}])
    [current] = get_trajectories(session, [trajectory.id])
    updated = replace(current, messages=trajectory.messages, tools=trajectory.tools)
    row.messages, row.toolset_hash, row.digest = trajectory.messages, toolset_hash, _digest(updated)
    session.add(row)
    session.flush()
    return True


def delete_reported(session: Session, trajectory_id: str) -> bool:
    """Delete a reported trajectory and the feedback under its id.

    Returns:
        False if the trajectory is not stored, a cycle recorded it, or a label, fault attribution, citation or routing
            choice refers to it.
    """
    row = _unused_row(session, trajectory_id)
    if row is None:
        return False
    session.expunge(row)
    session.execute(delete(FeedbackRow).where(col(FeedbackRow.conversation_id) == trajectory_id))
    _delete(session, [trajectory_id])
    return True


def judged_ids(session: Session, ids: Iterable[str]) -> set[str]:
    """Return those of ``ids`` that are stored with an outcome of the agent, so that no new episode is needed."""
    existing = _stored_digests(session, list(ids))
    return {key for key, (_, outcome, _) in existing.items() if Outcome(outcome).is_judged}


def get_trajectory(session: Session, trajectory_id: str, *, tokens: bool = True) -> Trajectory:
    """Return a trajectory by id; raises ``NotFound``."""
    trajectories = get_trajectories(session, [trajectory_id], tokens=tokens)
    if not trajectories:
        raise NotFound("trajectory", trajectory_id)
    return trajectories[0]


def get_trajectories(session: Session, ids: Sequence[str], *, tokens: bool = True) -> list[Trajectory]:
    """Return trajectories by id, in listing order; unknown ids are left out."""
    trajectories: list[Trajectory] = []
    for batch in batches(ids):
        query = select(TrajectoryRow).where(col(TrajectoryRow.id).in_(batch))
        trajectories += _read(session, query, tokens=tokens)
    return sorted(trajectories, key=lambda t: (t.source, t.split, t.task_id, t.trial, t.model, t.id))


def list_trajectories(
    session: Session,
    criteria: TrajectoryFilter = EVERYTHING,
    *,
    tokens: bool = False,
    limit: int | None = None,
    after_id: str | None = None,
) -> list[Trajectory]:
    """Return a page of trajectories.

    Args:
        criteria: which trajectories to list.
        tokens: whether to read ``Trajectory.turns``, which has most of the bytes.
        limit: trajectories per page.
        after_id: the last id of the previous page; raises ``NotFound`` if it is unknown.
    """
    query = select(TrajectoryRow).where(*_conditions(criteria)).order_by(*ORDER).limit(limit)
    if after_id is not None:
        row = session.get(TrajectoryRow, after_id)
        if row is None:
            raise NotFound("trajectory", after_id, "take `after` from the previous page")
        query = query.where(tuple_(*ORDER) > tuple_(row.source, row.split, row.task_id, row.trial, row.model, row.id))
    return _read(session, query, tokens=tokens)


def iterate_trajectories(
    session: Session, criteria: TrajectoryFilter = EVERYTHING, *, tokens: bool = False, page: int = 200
) -> Iterator[Trajectory]:
    """Yield all matching trajectories, reading one page at a time."""
    last_id: str | None = None
    while trajectories := list_trajectories(session, criteria, tokens=tokens, limit=page, after_id=last_id):
        yield from trajectories
        last_id = trajectories[-1].id


def count_customers(session: Session, source: str) -> Counter[str]:
    """Return the number of reported trajectories of a source by customer ("": none)."""
    customer = col(TrajectoryRow.customer)
    is_reported = (TrajectoryRow.source == source, col(TrajectoryRow.cycle_id).is_(None))
    rows = session.exec(select(customer, func.count()).where(*is_reported).group_by(customer))
    return Counter(dict(rows.all()))


def conversations_of_customer(session: Session, source: str, customer: str) -> list[tuple[str, str, str]]:
    """Return id, task and split of the reported trajectories of a customer, in order of the ids."""
    query = select(TrajectoryRow.id, TrajectoryRow.task_id, TrajectoryRow.split).where(
        TrajectoryRow.source == source, TrajectoryRow.customer == customer
    )
    return list(session.exec(query.where(col(TrajectoryRow.cycle_id).is_(None)).order_by(col(TrajectoryRow.id))))


def update_splits(session: Session, splits: Mapping[str, str]) -> None:
    """Give stored trajectories other splits, by id."""
    for batch in batches(list(splits)):
        for trajectory in get_trajectories(session, batch, tokens=False):
            split = splits[trajectory.id]
            values = {"split": split, "digest": _digest(replace(trajectory, split=split))}
            session.execute(update(TrajectoryRow).where(col(TrajectoryRow.id) == trajectory.id).values(**values))


def iterate_ids(session: Session, criteria: TrajectoryFilter = EVERYTHING) -> Iterator[str]:
    """Yield the ids of all matching trajectories in listing order, reading one page at a time."""
    query = select(col(TrajectoryRow.id)).where(*_conditions(criteria)).order_by(*ORDER)
    yield from session.exec(query, execution_options={"yield_per": BATCH})


def is_stored(session: Session, trajectory_id: str) -> bool:
    """Return whether a trajectory with this id is stored."""
    return bool(_stored_digests(session, [trajectory_id]))


def count_reported(session: Session, source: str) -> dict[Outcome, int]:
    """Return the number of reported trajectories of a source by outcome, 0 included."""
    outcome = col(TrajectoryRow.outcome)
    is_reported = (TrajectoryRow.source == source, col(TrajectoryRow.cycle_id).is_(None))
    rows = session.exec(select(outcome, func.count()).where(*is_reported).group_by(outcome))
    return dict.fromkeys(Outcome, 0) | {Outcome(name): count for name, count in rows}


def count_outcomes(session: Session, criteria: TrajectoryFilter) -> dict[Outcome, int]:
    """Return the number of matching trajectories by outcome, without those that have none."""
    outcome = col(TrajectoryRow.outcome)
    rows = session.exec(select(outcome, func.count()).where(*_conditions(criteria)).group_by(outcome))
    return {Outcome(name): count for name, count in rows}


def message_lengths(session: Session, criteria: TrajectoryFilter, models: Sequence[str]) -> dict[str, float]:
    """Return the mean number of tokens per message, by model; episodes without token ids are left out."""
    query = (
        select(TrajectoryRow.model, func.sum(TurnsRow.completion_tokens), func.sum(TurnsRow.turns))
        .join(TurnsRow, col(TurnsRow.trajectory_id) == col(TrajectoryRow.id))
        .where(*_conditions(criteria), in_cycle(col(TrajectoryRow.model)).in_(models), col(TurnsRow.turns) > 0)
        .group_by(col(TrajectoryRow.model))
        .order_by(col(TrajectoryRow.model))
    )
    return {model: tokens / turns for model, tokens, turns in session.exec(query)}


def reported_sources(session: Session) -> list[str]:
    """Return the sources that have reported trajectories, in ascending order."""
    source = col(TrajectoryRow.source)
    return list(session.exec(select(source).where(col(TrajectoryRow.cycle_id).is_(None)).distinct().order_by(source)))


def reported_ids(
    session: Session, source: str, outcomes: Collection[Outcome] = tuple(Outcome), limit: int | None = None
) -> list[str]:
    """Return ids of reported trajectories: those with exchanges, newest first, then imports in listing order."""
    is_part = col(ExchangeRow.trajectory_id) == col(TrajectoryRow.id)
    last_at = select(func.max(col(ExchangeRow.at))).where(is_part).scalar_subquery()
    query = select(col(TrajectoryRow.id)).where(
        TrajectoryRow.source == source,
        col(TrajectoryRow.cycle_id).is_(None),
        col(TrajectoryRow.outcome).in_([outcome.value for outcome in outcomes]),
    )
    return list(session.exec(query.order_by(last_at.is_(None), last_at.desc(), *ORDER).limit(limit)))


def in_cycle(column: Any) -> Any:
    """Return the column as an expression that SQLite does not look up in the listing index.

    Queries for one cycle use it: with the plain column SQLite would scan that index, which covers all cycles.
    """
    return column + ""


def newest_judged_ids(
    session: Session, source: str, models: Collection[str], *, limit: int, start: datetime | None = None
) -> list[str]:
    """Return ids of judged, reported trajectories of a source in which only ``models`` answered.

    They are ordered by their last exchange, newest first; trajectories without exchanges come last.

    Args:
        start: Only those that began at this time or later; trajectories without a time are left out then.
    """
    if limit == 0:
        return []
    is_part = col(ExchangeRow.trajectory_id) == col(TrajectoryRow.id)
    last = select(func.max(ExchangeRow.at)).where(is_part).correlate(TrajectoryRow).scalar_subquery()
    query = select(TrajectoryRow.id).where(
        TrajectoryRow.source == source,
        col(TrajectoryRow.outcome).in_(JUDGED_OUTCOMES),
        col(TrajectoryRow.cycle_id).is_(None),
        TrajectoryRow.split == "",
        col(TrajectoryRow.model).in_(models),
        TrajectoryRow.end_cause != EndCause.SHADOW.value,
        not_(exists().where(is_part, col(ExchangeRow.model).not_in(models))),
    )
    if start is not None:
        query = query.where(col(TrajectoryRow.started_at) >= start)
    order = (last.desc().nulls_last(), col(TrajectoryRow.id))
    return list(session.exec(query.order_by(*order).limit(limit)))


@dataclass(frozen=True)
class JudgedRow:
    """A judged trajectory without its messages; ``toolset_hash`` identifies its list of tools."""

    id: str
    toolset_hash: str
    started_at: datetime | None
    outcome: Outcome


def judged_in_split(
    session: Session, source: str, split: str, *, adapters: Collection[str] = (), start: datetime | None = None
) -> list[JudgedRow]:
    """Return the judged trajectories of a split of a source, in order of the ids.

    Args:
        adapters: The adapter versions whose trajectories are included; those in which others answered are left out.
        start: As in ``newest_judged_ids``.
    """
    query = select(TrajectoryRow.id, TrajectoryRow.toolset_hash, TrajectoryRow.started_at, TrajectoryRow.outcome).where(
        *_in_split(source, split, adapters, start), col(TrajectoryRow.outcome).in_(JUDGED_OUTCOMES)
    )
    rows = session.exec(query.order_by(col(TrajectoryRow.id)))
    return [JudgedRow(key, toolset, started_at, Outcome(outcome)) for key, toolset, started_at, outcome in rows]


def outcomes_in_split(
    session: Session, source: str, split: str, *, adapters: Collection[str] = (), start: datetime | None = None
) -> Counter[Outcome]:
    """Return the number of trajectories of a split by outcome; arguments as for ``judged_in_split``."""
    outcome = col(TrajectoryRow.outcome)
    query = select(outcome, func.count()).where(*_in_split(source, split, adapters, start)).group_by(outcome)
    return Counter({Outcome(name): count for name, count in session.exec(query)})


def _in_split(source: str, split: str, adapters: Collection[str], start: datetime | None) -> list[ColumnElement[bool]]:
    is_part = col(ExchangeRow.trajectory_id) == col(TrajectoryRow.id)
    return [
        col(TrajectoryRow.source) == source,
        col(TrajectoryRow.split) == split,
        _is_answered_by(col(TrajectoryRow.model), adapters),
        # The model of a trajectory is that of its last answer.
        not_(exists().where(is_part, not_(_is_answered_by(col(ExchangeRow.model), adapters)))),
        col(TrajectoryRow.end_cause) != EndCause.SHADOW.value,
        *([] if start is None else [col(TrajectoryRow.started_at) >= start]),
    ]


def _is_answered_by(model: Any, adapters: Collection[str]) -> ColumnElement[bool]:
    """Return whether a model is one of these adapter versions, or none at all."""
    return or_(model.not_like("%@v%"), model.in_(adapters))


def get_toolsets(session: Session, hashes: Collection[str]) -> dict[str, list[Tool]]:
    """Return lists of tools by hash."""
    toolsets: dict[str, list[Tool]] = {}
    for batch in batches(list(hashes)):
        query = select(ToolsetRow).where(col(ToolsetRow.hash).in_(batch))
        toolsets |= {row.hash: row.tools for row in session.exec(query)}
    return toolsets


def judged_since(
    session: Session, source: str, start: datetime, *, limit: int
) -> tuple[list[tuple[datetime, bool]], bool]:
    """Return the end time and success of judged, reported trajectories, and whether ``limit`` was reached.

    Only the ``limit`` exchanges settled last after ``start`` are read, without shadows. The end of a trajectory is the
    time of its last exchange, so trajectories without exchanges are left out.
    """
    exchange = (col(ExchangeRow.trajectory_id), col(ExchangeRow.at))
    newest_exchanges = (
        columns(*exchange)
        .where(col(ExchangeRow.settled_at) > start, exchange[0].is_not(None), col(ExchangeRow.shadow_of).is_(None))
        .order_by(col(ExchangeRow.settled_at).desc())
        .limit(limit)
        .subquery()
    )
    ends = columns(
        newest_exchanges.c.trajectory_id, func.max(newest_exchanges.c.at).label("at"), func.count().label("exchanges")
    )
    conversation_ends = ends.group_by(newest_exchanges.c.trajectory_id).subquery()
    trajectory_columns = (col(TrajectoryRow.outcome), col(TrajectoryRow.source), col(TrajectoryRow.cycle_id))
    query = columns(conversation_ends.c.at, *trajectory_columns, conversation_ends.c.exchanges)
    rows = session.execute(
        query.join(conversation_ends, conversation_ends.c.trajectory_id == col(TrajectoryRow.id))
    ).all()
    results = [
        (at, outcome == Outcome.SUCCESS.value)
        for at, outcome, row_source, cycle_id, _ in rows
        if row_source == source and cycle_id is None and outcome in JUDGED_OUTCOMES
    ]
    return results, sum(row[4] for row in rows) >= limit


def lock_outcomes(session: Session, ids: Sequence[str]) -> dict[str, Outcome]:
    """Lock trajectories until the end of the transaction and return their outcomes; deleted ones are left out.

    The outcomes then cannot change before labels are stored in the same transaction.
    """
    outcomes: dict[str, Outcome] = {}
    for batch in batches(ids):
        query = select(TrajectoryRow.id, TrajectoryRow.outcome).where(col(TrajectoryRow.id).in_(batch))
        # Rows are locked in a fixed order, so that two transactions with the same rows cannot deadlock.
        query = query.order_by(col(TrajectoryRow.id))
        outcomes |= {key: Outcome(outcome) for key, outcome in session.exec(query.with_for_update())}
    return outcomes


def _conditions(criteria: TrajectoryFilter) -> list[ColumnElement[bool]]:
    values = {name: value for name, value in asdict(criteria).items() if value is not None}
    columns = {name: col(getattr(TrajectoryRow, name)) for name in values}
    if criteria.cycle_id is not None:
        columns |= {name: in_cycle(column) for name, column in columns.items() if name != "cycle_id"}
    return [columns[name] == str(value) for name, value in values.items()]


def _read(session: Session, query: SelectOfScalar[TrajectoryRow], *, tokens: bool) -> list[Trajectory]:
    rows = session.exec(query).all()
    toolsets: dict[str, list[Tool]] = {}
    for toolset_hash in {row.toolset_hash for row in rows}:
        toolset = session.get(ToolsetRow, toolset_hash)
        toolsets[toolset_hash] = toolset.tools if toolset is not None else []
    turns = _packed_turns(session, [row.id for row in rows]) if tokens else {}
    return [_trajectory(row, toolsets[row.toolset_hash], turns.get(row.id)) for row in rows]


def _packed_turns(session: Session, ids: Sequence[str]) -> dict[str, bytes]:
    packed_turns: dict[str, bytes] = {}
    for batch in batches(ids):
        query = select(col(TurnsRow.trajectory_id), col(TurnsRow.packed)).where(col(TurnsRow.trajectory_id).in_(batch))
        packed_turns.update(session.exec(query).all())
    return packed_turns


def _trajectory(row: TrajectoryRow, tools: list[Tool], turns: bytes | None) -> Trajectory:
    values = row.model_dump(exclude={"digest", "toolset_hash"})
    values["outcome"], values["end_cause"] = Outcome(row.outcome), EndCause(row.end_cause)
    return Trajectory(**values, tools=tools, turns=unpack(turns) if turns is not None else [])


def _stored_digests(session: Session, ids: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Return digest, outcome and split of stored trajectories, by id."""
    columns = (col(TrajectoryRow.id), col(TrajectoryRow.digest), col(TrajectoryRow.outcome), col(TrajectoryRow.split))
    digests: dict[str, tuple[str, str, str]] = {}
    for batch in batches(ids):
        rows = session.exec(select(*columns).where(columns[0].in_(batch)))
        digests |= {key: (digest, outcome, split) for key, digest, outcome, split in rows}
    return digests


def _digest(trajectory: Trajectory) -> str:
    return digest({key: value for key, value in vars(trajectory).items() if key not in UNDIGESTED})


def _unused_row(session: Session, trajectory_id: str) -> TrajectoryRow | None:
    """Return the row of a reported trajectory that no evidence refers to, None if it is none.

    The row is locked, because an analysis may be about to store labels of the trajectory.
    """
    row = session.get(TrajectoryRow, trajectory_id, with_for_update=True)
    return None if row is None or row.cycle_id is not None or _is_cited(session, trajectory_id) else row


def _is_cited(session: Session, trajectory_id: str) -> bool:
    if session.get(RoutingRow, trajectory_id) is not None:
        return True
    return any(
        session.exec(select(column).where(column == trajectory_id).limit(1)).first() is not None
        for column in (col(table.trajectory_id) for table in (LabelRow, FaultRow, CitationRow))
    )


def _add_starts(session: Session, starts: Mapping[str, datetime]) -> None:
    for batch in batches(list(starts)):
        query = select(TrajectoryRow.id).where(
            col(TrajectoryRow.id).in_(batch), col(TrajectoryRow.started_at).is_(None)
        )
        for key in session.exec(query).all():
            session.execute(update(TrajectoryRow).where(col(TrajectoryRow.id) == key).values(started_at=starts[key]))


def _delete(session: Session, ids: Sequence[str]) -> None:
    for key in ids:
        session.execute(delete(TurnsRow).where(col(TurnsRow.trajectory_id) == key))
        session.execute(delete(TrajectoryRow).where(col(TrajectoryRow.id) == key))


def _insert(session: Session, trajectories: Sequence[Trajectory]) -> None:
    # Most trajectories of a batch share one list of tools, so hash each list object once.
    by_object = {id(trajectory.tools): trajectory.tools for trajectory in trajectories}
    hashes = {key: digest(tools) for key, tools in by_object.items()}
    toolsets = {hashes[key]: tools for key, tools in by_object.items()}
    insert_new(session, ToolsetRow, [{"hash": key, "tools": tools} for key, tools in toolsets.items()])
    rows = [_trajectory_values(trajectory, hashes[id(trajectory.tools)]) for trajectory in trajectories]
    insert_new(session, TrajectoryRow, rows)
    insert_new(session, TurnsRow, [_turns_values(trajectory) for trajectory in trajectories if trajectory.turns])


def _trajectory_values(trajectory: Trajectory, toolset_hash: str) -> dict[str, object]:
    values = {key: value for key, value in vars(trajectory).items() if key not in ("turns", "tools")}
    values |= {"outcome": trajectory.outcome.value, "end_cause": trajectory.end_cause.value}
    return values | {"digest": _digest(trajectory), "toolset_hash": toolset_hash}


def _turns_values(trajectory: Trajectory) -> dict[str, object]:
    completion_tokens = sum(len(turn.completion_ids) for turn in trajectory.turns)
    counts = {"turns": len(trajectory.turns), "completion_tokens": completion_tokens}
    return {"trajectory_id": trajectory.id, **counts, "packed": pack(trajectory.turns)}
