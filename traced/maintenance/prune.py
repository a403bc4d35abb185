"""``traced prune``: count, then delete what the ``[retention]`` settings no longer keep.

Invariants: a dry run changes nothing and names the same things. Never deleted are what evidence refers to
(``store.repositories.retention``), anything of a cycle that has not ended (except old events and logs, and checkpoints
of trainings whose adapter is published), and the run folder of a cycle whose adapter takes traffic. Deletion uses small
transactions and renames, so a daemon may run meanwhile, and the next prune finishes one that was killed. A folder is
first renamed to ``.NAME.partial``, which ``traced.maintenance.orphans`` recognises.

LangGraph's checkpoints: the newest checkpoint of an ended cycle is kept, so that the graph still reports the cycle as
ended. All earlier ones, those of its subgraphs and the writes that led to them are deleted. LangGraph has no call for
this (``delete_thread`` deletes the newest checkpoint as well), so its tables are changed with SQL that SQLite and
PostgreSQL share.

Errors: a Docker engine that does not answer becomes a note in the result; errors of the store and the disk are raised.
Not covered: giving SQLite's file space back to the system (freed space is used again); a checkpoint database with
another layout, which is not changed.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    MetaData,
    Table,
    Text,
    and_,
    cast,
    delete,
    func,
    inspect,
    or_,
    select,
)
from sqlalchemy.exc import DBAPIError

from sandbox.docker_engine import find_orphans, reap_orphans
from sandbox.errors import EngineDown
from store.database import connect, read_session, sqlite_url, unavailable_error, write_session
from store.records import RunState
from store.repositories import retention
from store.repositories.adapters import get_adapter, get_training_run, list_adapters
from store.repositories.promotions import live_adapters, trials
from store.repositories.retention import Amount, Prunable, Scope
from traced.config.settings import Settings
from traced.maintenance.backup import CHECKPOINTS

KEPT_BY_LANGGRAPH = ("writes", "checkpoint_writes", "checkpoint_blobs", "checkpoints")
WITHOUT_PARENT = ("writes", "checkpoint_writes")


def spare_steps(settings: Settings, store: Engine, cycles: Sequence[str]) -> Amount:
    """Return the number and size of the checkpoints of these cycles that can be deleted."""
    with _tables(settings, store) as (connection, tables):
        if "checkpoints" not in tables:
            return Amount(0, 0)
        table = tables["checkpoints"]
        payload = cast(table.c.checkpoint, Text) if connection.dialect.name == "postgresql" else table.c.checkpoint
        size = func.coalesce(func.sum(func.length(payload)), 0)
        rows = [connection.execute(select(func.count(), size).where(_earlier(table, cycle))).one() for cycle in cycles]
    return Amount(sum(row[0] for row in rows), sum(row[1] for row in rows))


def forget_steps(settings: Settings, store: Engine, cycles: Sequence[str]) -> Amount:
    """Delete the checkpoints that ``spare_steps`` counts; returns their number and size."""
    amount = spare_steps(settings, store, cycles)
    if amount.rows == 0:
        return amount
    for cycle in cycles:
        with _tables(settings, store) as (connection, tables):
            for name in WITHOUT_PARENT:
                if name in tables:
                    connection.execute(delete(tables[name]).where(tables[name].c.thread_id == cycle))
            if "checkpoint_blobs" in tables:
                blobs = tables["checkpoint_blobs"]
                connection.execute(delete(blobs).where(blobs.c.thread_id == cycle, blobs.c.checkpoint_ns != ""))
            connection.execute(delete(tables["checkpoints"]).where(_earlier(tables["checkpoints"], cycle)))
            connection.commit()
    return amount


def _earlier(table: Table, cycle: str) -> ColumnElement[bool]:
    """Return the SQL condition for all checkpoints of a cycle except the newest of its root graph.

    The namespace of the root graph is empty, and checkpoint ids sort by time.
    """
    other = table.alias("newest")
    latest = select(func.max(other.c.checkpoint_id)).where(other.c.thread_id == cycle, other.c.checkpoint_ns == "")
    return and_(
        table.c.thread_id == cycle, or_(table.c.checkpoint_ns != "", table.c.checkpoint_id != latest.scalar_subquery())
    )


def _columns(tables: Mapping[str, Table]) -> list[str]:
    return [column.name for column in tables["checkpoints"].c] if "checkpoints" in tables else []


@contextmanager
def _tables(settings: Settings, store: Engine) -> Iterator[tuple[Connection, dict[str, Table]]]:
    """Yield a connection to the database of the checkpoints, and LangGraph's tables in it; {} for an unknown layout."""
    file = settings.data_dir / CHECKPOINTS
    own_engine = store.dialect.name == "sqlite"
    if own_engine and not file.exists():
        with store.connect() as connection:
            yield connection, {}
        return
    engine = connect(sqlite_url(file)) if own_engine else store
    try:
        with engine.connect() as connection:
            existing = set(inspect(connection).get_table_names()) & set(KEPT_BY_LANGGRAPH)
            metadata = MetaData()
            tables = {name: Table(name, metadata, autoload_with=connection) for name in sorted(existing)}
            has_columns = {"thread_id", "checkpoint_ns", "checkpoint_id", "checkpoint"} <= {*_columns(tables)}
            yield connection, tables if has_columns else {}
    except DBAPIError as error:
        raise unavailable_error(engine.url, error) from error
    finally:
        if own_engine:
            engine.dispose()


BATCH = 200  # rows deleted in one transaction
NAME_LIMIT = 20  # names reported of each kind


@dataclass(frozen=True)
class Pruned:
    """What was deleted, or in a dry run would be, of one kind; ``size`` in bytes; ``names`` are the first of them."""

    kind: str
    count: int
    size: int
    names: list[str] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class _Work:
    settings: Settings
    store: Engine
    now: datetime
    dry_run: bool

    def ended_cycles(self, days: int) -> list[str]:
        """Return the cycles that ended more than ``days`` ago and are not among the newest; none if ``days`` is 0."""
        cutoff = self.cutoff(days)
        if cutoff is None:
            return []
        with read_session(self.store) as session:
            return retention.ended_cycles(session, cutoff, keep_newest=self.settings.retention.keep_cycles)

    def cutoff(self, days: int) -> datetime | None:
        """Return the moment ``days`` ago; None if ``days`` is 0, which keeps everything."""
        return self.now - timedelta(days=days) if days else None


def prune(settings: Settings, store: Engine, *, now: datetime, owner: str, dry_run: bool = False) -> list[Pruned]:
    """Delete what the settings no longer keep, or with ``dry_run`` only count it; returns one entry for each kind."""
    work, limits = _Work(settings, store, now, dry_run), settings.retention
    steps = work.ended_cycles(limits.checkpoints_days)
    return [
        _of_cycles(work, "token ids", limits.turns_days, retention.TURNS),
        _of_cycles(work, "trajectories", limits.trajectories_days, retention.TRAJECTORIES),
        _of_cycles(work, "model replies", limits.trajectories_days, retention.REPLIES),
        _by_age(work, "events", limits.events_days, retention.EVENTS),
        _by_age(work, "attempts", limits.events_days, retention.ATTEMPTS),
        _by_age(work, "notices", limits.events_days, retention.NOTICES),
        _by_age(work, "reported", limits.conversations_days, retention.REPORTED_TRAJECTORIES),
        _by_age(work, "exchanges", limits.conversations_days, retention.EXCHANGES),
        _by_age(work, "decisions", limits.conversations_days, retention.DECISIONS),
        _by_age(work, "feedback", limits.conversations_days, retention.FEEDBACK),
        _entry("graph steps", (spare_steps if dry_run else forget_steps)(settings, store, steps), steps),
        _folders(work, "training checkpoints", _checkpoints(work)),
        _folders(work, "run folders", _runs(work)),
        _logs(work),
        _containers(dry_run, owner),
    ]


def _of_cycles(work: _Work, kind: str, days: int, rows: Prunable[str]) -> Pruned:
    """Delete rows of the cycles that ended more than ``days`` ago."""
    amounts: dict[str, Amount] = {}
    for cycle in work.ended_cycles(days):
        with read_session(work.store) as session:
            amount = rows.measure(session, cycle)
        if amount.rows:
            amounts[cycle] = amount if work.dry_run else _delete_in_batches(work, rows, cycle)
    total = Amount(sum(amount.rows for amount in amounts.values()), sum(amount.size for amount in amounts.values()))
    return _entry(kind, total, list(amounts))


def _by_age(work: _Work, kind: str, days: int, rows: Prunable[datetime]) -> Pruned:
    """Delete rows older than ``days``: events of the service, conversations of the router."""
    cutoff = work.cutoff(days)
    if cutoff is None:
        return Pruned(kind, 0, 0)
    if work.dry_run:
        with read_session(work.store) as session:
            return _entry(kind, rows.measure(session, cutoff))
    return _entry(kind, _delete_in_batches(work, rows, cutoff))


def _delete_in_batches(work: _Work, rows: Prunable[Scope], scope: Scope) -> Amount:
    """Delete all rows of a scope, each batch in its own transaction."""
    count = size = 0
    while True:
        with write_session(work.store) as session:
            amount = rows.delete(session, scope, BATCH)
        count, size = count + amount.rows, size + amount.size
        if amount.rows < BATCH:
            return Amount(count, size)


def _checkpoints(work: _Work) -> Iterator[Path]:
    """Yield the training checkpoints that no run resumes from: the adapter is published, or the cycle has ended."""
    cutoff = work.cutoff(work.settings.retention.checkpoints_days)
    runs = work.settings.data_dir / "runs"
    for cycle in work.ended_cycles(work.settings.retention.checkpoints_days):
        yield from sorted((runs / cycle / "training").glob("*/checkpoints"))
    if cutoff is None:
        return
    with read_session(work.store) as session:
        for adapter in list_adapters(session):
            run = get_training_run(session, adapter.training_run_id)
            if run.state is RunState.FINISHED and run.finished_at is not None and run.finished_at < cutoff:
                name = f"{run.capability}-{run.environment_hash[:12]}"
                yield runs / run.cycle_id / "training" / name / "checkpoints"


def _runs(work: _Work) -> Iterator[Path]:
    """Yield the folders of ended cycles, except those whose adapter is live: they hold the router's classifier."""
    with read_session(work.store) as session:
        serving = [*live_adapters(session), *(trial.promotion for trial in trials(session))]
        live = {get_adapter(session, promotion.adapter).cycle_id for promotion in serving}
    for cycle in work.ended_cycles(work.settings.retention.runs_days):
        if cycle not in live:
            yield work.settings.data_dir / "runs" / cycle


def _folders(work: _Work, kind: str, folders: Iterable[Path]) -> Pruned:
    size, names = 0, []
    for folder in dict.fromkeys(folders):
        if folder.is_dir():
            size += size_of(folder)
            names.append(str(folder.relative_to(work.settings.data_dir)))
            if not work.dry_run:
                remove_folder(folder)
    return Pruned(kind, len(names), size, names[:NAME_LIMIT])


def _logs(work: _Work) -> Pruned:
    cutoff = work.cutoff(work.settings.retention.logs_days)
    size, names = 0, []
    logs = work.settings.data_dir / "logs"
    for file in sorted(logs.rglob("*")):
        if cutoff is None or not file.is_file() or file.stat().st_mtime >= cutoff.timestamp():
            continue
        size += file.stat().st_size
        names.append(str(file.relative_to(logs)))
        if not work.dry_run:
            file.unlink(missing_ok=True)
            _drop_empty(file.parent, logs)
    return Pruned("logs", len(names), size, names[:NAME_LIMIT])


def _drop_empty(folder: Path, logs: Path) -> None:
    """Remove the folder of a cycle's logs once its last log is removed."""
    if folder != logs:
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()


def _containers(dry_run: bool, owner: str) -> Pruned:
    try:
        names = (find_orphans if dry_run else reap_orphans)(owner)
    except EngineDown as error:
        return Pruned("containers", 0, 0, note=str(error))
    return Pruned("containers", len(names), 0, names[:NAME_LIMIT])


def remove_folder(folder: Path) -> None:
    """Rename a folder to ``.NAME.partial`` and delete it then.

    What a kill in between leaves is removed by ``traced.maintenance.orphans``.
    """
    doomed = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed, onerror=ignore_missing)  # ``traced.maintenance.orphans`` may delete it too


def ignore_missing(_call: object, _path: object, raised: "tuple[type[BaseException], BaseException, object]") -> None:
    """Error handler for ``shutil.rmtree``: ignore files that another process has removed, raise other errors."""
    if not isinstance(raised[1], FileNotFoundError):
        raise raised[1]


def size_of(folder: Path) -> int:
    """Return the bytes of the files below ``folder``."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def _entry(kind: str, amount: Amount, names: Sequence[str] = ()) -> Pruned:
    return Pruned(kind, amount.rows, amount.size, list(names)[:NAME_LIMIT] if amount.rows else [])
