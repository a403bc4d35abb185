"""Trajectories, their tools (stored once per list) and their packed token ids.

Invariants: a stored trajectory is evidence, so the first recording under an id stays; an outcome ``infrastructure`` or
``unknown`` is not evidence of the agent and gives way to a later one, unless something refers to it. Listings come in
the order of source, split, task id, trial, model and id, whatever the order of saving and whatever the cycle's id.
Fails: an unknown ``cycle_id`` is a ``BrokenReference``. Not covered: deleting.

Production's trajectories: those that no cycle recorded, chosen and held for an analysis.

Invariants: a conversation in which any other model answered is not the asked one's; ``hold`` keeps what it returns as
it is until the transaction ends, so that labels stored in it speak of the outcome that they were made with.
Not covered: making them (``traced.ingest.settlement``, ``traced.ingest.importers.formats``).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, delete, exists, not_, tuple_
from sqlalchemy import select as columns
from sqlmodel import Session, col, func, select
from sqlmodel.sql.expression import SelectOfScalar

from store.content import digest, insert_new, pack, unpack
from store.errors import NotFound
from store.service_tables import ExchangeRow, FeedbackRow
from store.tables import LabelRow, RoutingRow, ToolsetRow, TrajectoryRow, TurnsRow
from store.types import EndCause, Outcome, Tool, Trajectory

ORDER = tuple(col(getattr(TrajectoryRow, name)) for name in ("source", "split", "task_id", "trial", "model", "id"))
IDS_PER_QUERY = 500


@dataclass(frozen=True)
class TrajectoryFilter:
    """Which trajectories to list; None leaves a property open."""

    outcome: Outcome | None = None
    source: str | None = None
    split: str | None = None
    model: str | None = None
    cycle_id: str | None = None
    task_id: str | None = None


EVERYTHING = TrajectoryFilter()


@dataclass(frozen=True)
class Saved:
    """What a save did. ``kept``: ids stored before with other content, which stays; read those back from the store."""

    added: int = 0
    same: int = 0
    replaced: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


def save_trajectories(session: Session, trajectories: Iterable[Trajectory]) -> Saved:
    """Store trajectories; those that are there already are no error (see ``Saved`` and the module's invariants)."""
    offered = {trajectory.id: trajectory for trajectory in trajectories}
    stored = _stored_digests(session, list(offered))
    new, same = [], 0
    replaced: list[str] = []
    kept: list[str] = []
    for trajectory in offered.values():
        known = stored.get(trajectory.id)
        if known is None:
            new.append(trajectory)
        elif known[0] == _digest(trajectory):
            same += 1
        elif not Outcome(known[1]).judged and not _is_cited(session, trajectory.id):
            replaced.append(trajectory.id)
        else:
            kept.append(trajectory.id)
    _forget(session, replaced)
    _insert(session, new + [offered[key] for key in replaced])
    return Saved(len(new), same, replaced, kept)


def rejudge_trajectory(session: Session, trajectory: Trajectory) -> bool:
    """Give production's trajectory the outcome and reward that people's feedback says by now.

    Returns False, and changes nothing, where evidence of a cycle refers to it.
    """
    row = session.get(TrajectoryRow, trajectory.id, with_for_update=True)  # an analysis may be about to cite it
    if row is None or row.cycle_id is not None or _is_cited(session, trajectory.id):
        return False
    row.outcome, row.reward, row.digest = trajectory.outcome.value, trajectory.reward, _digest(trajectory)
    session.add(row)
    session.flush()
    return True


def delete_reported(session: Session, trajectory_id: str) -> bool:
    """Delete production's trajectory with the verdicts on it; False where evidence of a cycle refers to it."""
    row = session.get(TrajectoryRow, trajectory_id, with_for_update=True)  # an analysis may be about to cite it
    if row is None or row.cycle_id is not None or _is_cited(session, trajectory_id):
        return False
    session.expunge(row)
    session.execute(delete(FeedbackRow).where(col(FeedbackRow.conversation_id) == trajectory_id))
    _forget(session, [trajectory_id])
    return True


def known_trajectories(session: Session, ids: Iterable[str]) -> set[str]:
    """Those of ``ids`` that are stored with an outcome of the agent, so that there is no need to run them again."""
    stored = _stored_digests(session, list(ids))
    return {key for key, (_, outcome) in stored.items() if Outcome(outcome).judged}


def get_trajectory(session: Session, trajectory_id: str, *, tokens: bool = True) -> Trajectory:
    """The trajectory of this id; raises ``NotFound``."""
    found = get_trajectories(session, [trajectory_id], tokens=tokens)
    if not found:
        raise NotFound("trajectory", trajectory_id)
    return found[0]


def get_trajectories(session: Session, ids: Sequence[str], *, tokens: bool = True) -> list[Trajectory]:
    """The trajectories of these ids, in the listing's order; unknown ids are left out."""
    found: list[Trajectory] = []
    for start in range(0, len(ids), IDS_PER_QUERY):
        chosen = col(TrajectoryRow.id).in_(ids[start : start + IDS_PER_QUERY])
        found += _read(session, select(TrajectoryRow).where(chosen), tokens=tokens)
    return sorted(found, key=lambda t: (t.source, t.split, t.task_id, t.trial, t.model, t.id))


def list_trajectories(
    session: Session,
    wanted: TrajectoryFilter = EVERYTHING,
    *,
    tokens: bool = False,
    limit: int | None = None,
    after: str | None = None,
) -> list[Trajectory]:
    """One page of trajectories: at most ``limit``, beginning behind the trajectory of id ``after``.

    ``tokens=False`` leaves ``turns`` empty (they are most of the bytes). Raises ``NotFound`` for an unknown ``after``.
    """
    query = select(TrajectoryRow).where(*_conditions(wanted)).order_by(*ORDER).limit(limit)
    if after is not None:
        row = session.get(TrajectoryRow, after)
        if row is None:
            raise NotFound("trajectory", after, "take `after` from the page before")
        query = query.where(tuple_(*ORDER) > tuple_(row.source, row.split, row.task_id, row.trial, row.model, row.id))
    return _read(session, query, tokens=tokens)


def iterate_trajectories(
    session: Session, wanted: TrajectoryFilter = EVERYTHING, *, tokens: bool = False, page: int = 200
) -> Iterator[Trajectory]:
    """All trajectories of a filter, page by page, so that memory stays bounded."""
    after: str | None = None
    while found := list_trajectories(session, wanted, tokens=tokens, limit=page, after=after):
        yield from found
        after = found[-1].id


def iterate_ids(session: Session, wanted: TrajectoryFilter = EVERYTHING) -> Iterator[str]:
    """The ids of all trajectories of a filter, in the listing's order, a page of them in memory at a time."""
    query = select(col(TrajectoryRow.id)).where(*_conditions(wanted)).order_by(*ORDER)
    yield from session.exec(query, execution_options={"yield_per": IDS_PER_QUERY})


def is_stored(session: Session, trajectory_id: str) -> bool:
    """Whether there is a trajectory of this id."""
    return bool(_stored_digests(session, [trajectory_id]))


def count_reported(session: Session, source: str) -> dict[Outcome, int]:
    """How many trajectories of each outcome the source has reported itself, those that cycles recorded aside."""
    outcome = col(TrajectoryRow.outcome)
    chosen = (TrajectoryRow.source == source, col(TrajectoryRow.cycle_id).is_(None))
    rows = session.exec(select(outcome, func.count()).where(*chosen).group_by(outcome))
    return dict.fromkeys(Outcome, 0) | {Outcome(name): count for name, count in rows}


def reported_sources(session: Session) -> list[str]:
    """The sources that have trajectories which no cycle recorded."""
    source = col(TrajectoryRow.source)
    return list(session.exec(select(source).where(col(TrajectoryRow.cycle_id).is_(None)).distinct().order_by(source)))


def reported_ids(
    session: Session, source: str, outcomes: Collection[Outcome] = tuple(Outcome), limit: int | None = None
) -> list[str]:
    """Trajectories of these outcomes that no cycle recorded: production's newest first, then the others as listed."""
    newest = select(func.max(col(ExchangeRow.at))).where(col(ExchangeRow.trajectory_id) == col(TrajectoryRow.id))
    last = newest.scalar_subquery()
    query = select(col(TrajectoryRow.id)).where(
        TrajectoryRow.source == source,
        col(TrajectoryRow.cycle_id).is_(None),
        col(TrajectoryRow.outcome).in_([outcome.value for outcome in outcomes]),
    )
    return list(session.exec(query.order_by(last.is_(None), last.desc(), *ORDER).limit(limit)))


def _conditions(wanted: TrajectoryFilter) -> list[ColumnElement[bool]]:
    chosen = {name: value for name, value in asdict(wanted).items() if value is not None}
    columns = {name: col(getattr(TrajectoryRow, name)) for name in chosen}
    if wanted.cycle_id is not None:
        columns |= {name: in_cycle(column) for name, column in columns.items() if name != "cycle_id"}
    return [columns[name] == str(value) for name, value in chosen.items()]


def in_cycle(column: Any) -> Any:
    """A column's value for a query of one cycle: by the column SQLite would go through the listing of all cycles."""
    return column + ""


def _read(session: Session, query: SelectOfScalar[TrajectoryRow], *, tokens: bool) -> list[Trajectory]:
    rows = session.exec(query).all()
    toolsets: dict[str, list[Tool]] = {}
    for hashed in {row.toolset_hash for row in rows}:
        toolset = session.get(ToolsetRow, hashed)
        toolsets[hashed] = toolset.tools if toolset is not None else []
    packed = _packed_turns(session, [row.id for row in rows]) if tokens else {}
    return [_trajectory(row, toolsets[row.toolset_hash], packed.get(row.id)) for row in rows]


def _packed_turns(session: Session, ids: Sequence[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for start in range(0, len(ids), IDS_PER_QUERY):
        chosen = col(TurnsRow.trajectory_id).in_(ids[start : start + IDS_PER_QUERY])
        found.update(session.exec(select(col(TurnsRow.trajectory_id), col(TurnsRow.packed)).where(chosen)).all())
    return found


def _trajectory(row: TrajectoryRow, tools: list[Tool], packed: bytes | None) -> Trajectory:
    values = row.model_dump(exclude={"digest", "toolset_hash"})
    values["outcome"], values["end_cause"] = Outcome(row.outcome), EndCause(row.end_cause)
    return Trajectory(**values, tools=tools, turns=unpack(packed) if packed is not None else [])


def _stored_digests(session: Session, ids: Sequence[str]) -> dict[str, tuple[str, str]]:
    columns = (col(TrajectoryRow.id), col(TrajectoryRow.digest), col(TrajectoryRow.outcome))
    found: dict[str, tuple[str, str]] = {}
    for start in range(0, len(ids), IDS_PER_QUERY):
        chosen = columns[0].in_(ids[start : start + IDS_PER_QUERY])
        found.update({key: (digest, outcome) for key, digest, outcome in session.exec(select(*columns).where(chosen))})
    return found


def _digest(trajectory: Trajectory) -> str:
    return digest({key: value for key, value in vars(trajectory).items() if key != "turns"})


def _is_cited(session: Session, trajectory_id: str) -> bool:
    label = session.exec(select(LabelRow).where(LabelRow.trajectory_id == trajectory_id).limit(1)).first()
    return label is not None or session.get(RoutingRow, trajectory_id) is not None


def _forget(session: Session, ids: Sequence[str]) -> None:
    for key in ids:
        session.execute(delete(TurnsRow).where(col(TurnsRow.trajectory_id) == key))
        session.execute(delete(TrajectoryRow).where(col(TrajectoryRow.id) == key))


def _insert(session: Session, trajectories: Sequence[Trajectory]) -> None:
    by_object = {id(trajectory.tools): trajectory.tools for trajectory in trajectories}  # most share one list
    hashes = {key: digest(tools) for key, tools in by_object.items()}
    toolsets = {hashes[key]: tools for key, tools in by_object.items()}
    insert_new(session, ToolsetRow, [{"hash": key, "tools": tools} for key, tools in toolsets.items()])
    insert_new(session, TrajectoryRow, [_trajectory_values(one, hashes[id(one.tools)]) for one in trajectories])
    insert_new(session, TurnsRow, [_turns_values(trajectory) for trajectory in trajectories if trajectory.turns])


def _trajectory_values(trajectory: Trajectory, toolset_hash: str) -> dict[str, object]:
    values = {key: value for key, value in vars(trajectory).items() if key not in ("turns", "tools")}
    values |= {"outcome": trajectory.outcome.value, "end_cause": trajectory.end_cause.value}
    return values | {"digest": _digest(trajectory), "toolset_hash": toolset_hash}


def _turns_values(trajectory: Trajectory) -> dict[str, object]:
    completion_tokens = sum(len(turn.completion_ids) for turn in trajectory.turns)
    counts = {"turns": len(trajectory.turns), "completion_tokens": completion_tokens}
    return {"trajectory_id": trajectory.id, **counts, "packed": pack(trajectory.turns)}


JUDGED = [outcome.value for outcome in Outcome if outcome.judged]


def newest_judged(session: Session, source: str, model: str, *, limit: int) -> list[str]:
    """Ids of judged trajectories of a source that ``model`` alone has answered, the newest first.

    The time is that of the last exchange; trajectories without exchanges come last.
    """
    if limit == 0:
        return []
    part = col(ExchangeRow.trajectory_id) == col(TrajectoryRow.id)
    last = select(func.max(ExchangeRow.at)).where(part).correlate(TrajectoryRow).scalar_subquery()
    query = select(TrajectoryRow.id).where(
        TrajectoryRow.source == source,
        col(TrajectoryRow.outcome).in_(JUDGED),
        col(TrajectoryRow.cycle_id).is_(None),
        TrajectoryRow.split == "",
        TrajectoryRow.model == model,
        not_(exists().where(part, col(ExchangeRow.model) != model)),
    )
    order = (last.desc().nulls_last(), col(TrajectoryRow.id))
    return list(session.exec(query.order_by(*order).limit(limit)))


def judged_since(
    session: Session, source: str, since: datetime, *, most: int
) -> tuple[list[tuple[datetime, bool]], bool]:
    """When each judged conversation of a source ended, and whether in success; True if there were more than that.

    Those of the ``most`` exchanges that were settled last, after ``since``; what came without exchanges has no time.
    """
    exchange = (col(ExchangeRow.trajectory_id), col(ExchangeRow.at))
    newest = (
        columns(*exchange)
        .where(col(ExchangeRow.settled_at) > since, exchange[0].is_not(None), col(ExchangeRow.shadow_of).is_(None))
        .order_by(col(ExchangeRow.settled_at).desc())
        .limit(most)
        .subquery()
    )
    last = columns(newest.c.trajectory_id, func.max(newest.c.at).label("at"), func.count().label("exchanges"))
    ended = last.group_by(newest.c.trajectory_id).subquery()
    of = (col(TrajectoryRow.outcome), col(TrajectoryRow.source), col(TrajectoryRow.cycle_id))
    query = columns(ended.c.at, *of, ended.c.exchanges)
    rows = session.execute(query.join(ended, ended.c.trajectory_id == col(TrajectoryRow.id))).all()
    found = [
        (at, outcome == Outcome.SUCCESS.value)
        for at, outcome, its_source, cycle_id, _ in rows
        if its_source == source and cycle_id is None and outcome in JUDGED
    ]
    return found, sum(row[4] for row in rows) >= most


def hold(session: Session, ids: Sequence[str]) -> dict[str, Outcome]:
    """The outcomes of trajectories, which nobody can change or delete before the transaction ends; gone ones are not
    in it."""
    found: dict[str, Outcome] = {}
    for start in range(0, len(ids), IDS_PER_QUERY):
        chosen = col(TrajectoryRow.id).in_(ids[start : start + IDS_PER_QUERY])
        query = select(TrajectoryRow.id, TrajectoryRow.outcome).where(chosen).order_by(col(TrajectoryRow.id))
        found |= {key: Outcome(outcome) for key, outcome in session.exec(query.with_for_update())}
    return found
