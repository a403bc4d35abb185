"""Read the status of the whole store for ``traced status``, in one snapshot with a few SQL queries.

This module uses the database driver directly, because importing the tables takes longer than the whole command is
allowed to take (300 ms). SQLite and PostgreSQL share the SQL, and a test compares the results with those of the
repositories. At most the newest ``MAX_FEEDBACK`` entries of feedback are counted, and at most ``MAX_EXCHANGES``
exchanges each of the settled and the unsettled ones; of a canary the newest conversations (``store.trial_status``).
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from store.errors import StoreUnavailable
from store.schema_version import HEAD, connect_options, version_error
from store.stage_failures import unresolved_failures
from store.text import signature
from store.trial_status import PASSING_SCORE, CanaryStatus, canary_statuses
from store.types import awaits_decision

OK = 200
MAX_EXCHANGES, MAX_FEEDBACK = 10_000, 100_000
MAX_REASONS = 5
# Settling comes after the exchange, so each exchange of the last day is unsettled or was settled in the last day.
EXCHANGES_SQL = """
SELECT r.conversation_id, r.model, r.status, r.requests, r.in_hour, c.why FROM (
    SELECT conversation_id, model, status, count(*) AS requests,
        max(CASE WHEN at > '{hour}' THEN 1 ELSE 0 END) AS in_hour
    FROM (
        SELECT * FROM (
            SELECT conversation_id, model, status, at FROM exchanges
            WHERE settled_at IS NULL AND at > '{day}' ORDER BY at DESC LIMIT {most}
        ) waiting
        UNION ALL
        SELECT * FROM (
            SELECT conversation_id, model, status, at FROM exchanges
            WHERE settled_at > '{day}' AND at > '{day}' ORDER BY settled_at DESC LIMIT {most}
        ) settled
    ) recent GROUP BY conversation_id, model, status
) r LEFT JOIN conversations c ON c.id = r.conversation_id AND c.why <> '' AND c.at > '{day}'
"""
UNSETTLED_SQL = "SELECT count(*) FROM exchanges WHERE settled_at IS NULL"
# The cycle of an import has its number of trajectories in its configuration; imports are no production.
# SQLite uses the partial indexes on trajectories without a cycle only if each target and outcome is counted separately.
OUTCOMES_SQL = """
WITH RECURSIVE sources(name) AS (
    SELECT min(source) FROM trajectories WHERE cycle_id IS NULL
    UNION ALL
    SELECT (SELECT min(t.source) FROM trajectories t WHERE t.cycle_id IS NULL AND t.source > s.name)
    FROM sources s WHERE s.name IS NOT NULL
)
SELECT s.name, o.outcome, (
    SELECT count(*) FROM trajectories t WHERE t.cycle_id IS NULL AND t.source = s.name AND t.outcome = o.outcome
)
FROM sources s,
    (SELECT 'success' AS outcome UNION ALL SELECT 'failure' UNION ALL SELECT 'unknown') o
WHERE s.name IS NOT NULL AND (
    s.name NOT IN (SELECT target FROM cycles WHERE CAST(config AS TEXT) LIKE '%"imported"%')
    OR s.name IN (SELECT target FROM cycles WHERE CAST(config AS TEXT) NOT LIKE '%"imported"%')
    OR s.name IN (SELECT name FROM targets)
)
ORDER BY s.name
"""
# Only the primary key is in the order of time.
FEEDBACK_SQL = """
SELECT kind, label, count(*) FROM (
    SELECT CASE WHEN score >= {passing} THEN 'passing' WHEN score IS NOT NULL THEN 'failing' ELSE 'label' END AS kind,
        CASE WHEN score IS NULL THEN label ELSE '' END AS label
    FROM (SELECT score, label, at FROM feedback ORDER BY seq DESC LIMIT {most}) newest WHERE at > '{day}'
) f GROUP BY kind, label
"""
MAX_CYCLES = 10
# Equals traced.pipeline.report.SESSION: the event in which a process records what it used is no stage.
SESSION = "session"
LIVE, SHADOW = "live", "shadow"
ENDINGS = {"rolled_back": "rolled back", "superseded": "superseded"}
VERSION_SQL = "SELECT version_num FROM alembic_version"
CYCLES_SQL = f"""
SELECT c.id, c.target, c.model, c.state, e.stage, e.state, c.summary
FROM (
    SELECT id, target, model, state, summary, created_at FROM cycles
    ORDER BY created_at DESC, id DESC LIMIT {MAX_CYCLES}
) c
LEFT JOIN stage_events e ON e.seq = (
    SELECT max(seq) FROM stage_events WHERE cycle_id = c.id AND stage <> '{SESSION}'
)
ORDER BY c.created_at DESC, c.id DESC
"""
FAILURES_SQL = f"""
SELECT e.cycle_id, e.stage, e.state, e.capability, CASE WHEN e.state = 'failed' THEN e.detail END
FROM stage_events e
JOIN (SELECT id FROM cycles ORDER BY created_at DESC, id DESC LIMIT {MAX_CYCLES}) c ON c.id = e.cycle_id
WHERE e.state IN ('failed', 'finished') ORDER BY e.seq
"""
ADAPTERS_SQL = """
SELECT a.name, g.answer, d.decision, p.state, p.share, a.quarantined_at, a.quarantine_reason, c.model,
    p.seq
FROM adapters a JOIN cycles c ON c.id = a.cycle_id
LEFT JOIN gate_results g ON g.seq = (SELECT max(seq) FROM gate_results WHERE adapter = a.name)
LEFT JOIN approvals d ON d.seq = (SELECT max(seq) FROM approvals WHERE adapter = a.name)
LEFT JOIN promotions p ON p.seq = (SELECT max(seq) FROM promotions WHERE adapter = a.name)
ORDER BY a.capability, a.version
"""
QUARANTINED_SQL = """
SELECT p.id, p.cycle_id, p.stage, p.capability, p.reason, (
    SELECT count(*) FROM attempts a
    WHERE a.stage = p.stage AND a.capability = p.capability AND a.input_hash = p.input_hash
)
FROM parked p WHERE p.released_at IS NULL ORDER BY p.seq DESC
"""
BLOCKED_SQL = """
SELECT a.cycle_id, a.stage, a.capability, a.evidence
FROM attempts a JOIN cycles c ON c.id = a.cycle_id
WHERE c.state IN ('running', 'interrupted') AND a.state = 'blocked' AND a.seq = (
    SELECT max(seq) FROM attempts b
    WHERE b.cycle_id = a.cycle_id AND b.stage = a.stage AND b.capability = a.capability
)
ORDER BY a.seq
"""
RUNNING_SQL = """
SELECT a.cycle_id, a.stage, a.capability, a.evidence, a.started_at, a.heartbeat_at
FROM attempts a JOIN cycles c ON c.id = a.cycle_id
WHERE c.state = 'running' AND a.state = 'running' ORDER BY a.seq
"""
COSTS_SQL = f"""
SELECT r.cycle_id, r.stage, count(*), sum(r.prompt_tokens), sum(r.completion_tokens), sum(r.cost), sum(r.seconds),
    sum(CASE WHEN r.estimated THEN 1 ELSE 0 END)
FROM (SELECT id, created_at FROM cycles ORDER BY created_at DESC, id DESC LIMIT {MAX_CYCLES}) c
JOIN model_replies r ON r.cycle_id = c.id
GROUP BY r.cycle_id, r.stage, c.created_at ORDER BY c.created_at DESC, r.cycle_id DESC, r.stage
"""
PATCHES_SQL = f"""
SELECT p.id, p.cycle_id, p.capability, p.figures, d.action, d.who, d.detail
FROM (SELECT id, created_at FROM cycles ORDER BY created_at DESC, id DESC LIMIT {MAX_CYCLES}) c
JOIN prompt_patches p ON p.cycle_id = c.id
LEFT JOIN audit d ON d.seq = (
    SELECT max(seq) FROM audit WHERE subject = p.id AND action IN ('approve-prompt', 'reject-prompt')
)
ORDER BY p.at DESC, p.id DESC
"""
DECISION_OF_ACTION = {"approve-prompt": "approved", "reject-prompt": "rejected"}
CANNOT_BEGIN_SQL = "SELECT name, cannot_begin FROM targets WHERE cannot_begin <> '' ORDER BY name"
REQUESTED_SQL = "SELECT name, asked_for FROM targets WHERE asked_for <> '' ORDER BY name"
STARTED_SQL = "SELECT name FROM targets WHERE last_started_at IS NOT NULL ORDER BY name"
PAUSED_SQL = "SELECT name, paused_by FROM targets WHERE paused_at IS NOT NULL ORDER BY name"
# Episodes of a collection have a choice too.
TRAFFIC_SQL = """
SELECT r.model, count(*) FROM routing_choices r JOIN trajectories t ON t.id = r.trajectory_id
WHERE t.split = 'test' GROUP BY r.model
"""
COMPOSITIONS_SQL = """
SELECT y.model, p.document FROM compositions p JOIN cycles y ON y.id = p.cycle_id ORDER BY p.at DESC, p.cycle_id
"""
FITTING_SQL = "SELECT cycle_id FROM adapters GROUP BY cycle_id ORDER BY max(created_at) DESC, cycle_id"


@dataclass(frozen=True)
class RouterStatus:
    """The traffic of the router in the last hour and day, and the outcomes of reported trajectories.

    ``hour`` and ``day`` count conversations by model; a conversation counts for every model that handled a request of
    it. ``failures`` counts the failed requests of the day by HTTP status, ``by_default`` the conversations of the day
    that fell back to the base model by reason (the ``MAX_REASONS`` most frequent). ``unsettled`` counts all unsettled
    exchanges. ``outcomes`` counts the trajectories of targets that no cycle recorded (success, failure, unknown), and
    ``by_target`` those of each target; ``feedback`` counts that of the day by kind. ``partial`` is true if there may be
    more exchanges than were read, ``is_feedback_partial`` if there may be more feedback.
    """

    hour: dict[str, int] = field(default_factory=dict)
    day: dict[str, int] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)
    by_default: dict[str, int] = field(default_factory=dict)
    unsettled: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    by_target: dict[str, dict[str, int]] = field(default_factory=dict)
    feedback: dict[str, int] = field(default_factory=dict)
    partial: bool = False
    is_feedback_partial: bool = False

    @property
    def used(self) -> bool:
        """Whether the router has any traffic, reported trajectories or feedback."""
        return bool(self.day or self.unsettled or self.outcomes or self.feedback)


@dataclass(frozen=True)
class CycleStatus:
    """A cycle.

    Attributes:
        last_stage: The stage and state of its newest stage event; "" without one.
        verdict: Its result; "" without one.
        step: What it did to the live system, as its report has it; empty without a report.
    """

    id: str
    target: str
    model: str
    state: str
    last_stage: str
    verdict: str = ""
    step: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StageCostStatus:
    """The cost of a stage's calls to the language model.

    ``estimated`` counts the replies whose token counts are estimates.
    """

    cycle: str
    stage: str
    calls: int
    prompt_tokens: int
    completion_tokens: int
    cost: float
    seconds: float
    estimated: int


@dataclass(frozen=True)
class PatchStatus:
    """The newest prompt patch of a capability; ``enough`` is its result in words, ``decision`` a person's decision."""

    id: str
    cycle: str
    capability: str
    enough: str
    decision: str = "none"
    who: str = ""


@dataclass(frozen=True)
class AdapterStatus:
    """An adapter version, with its newest gate answer and decision ("none" without one).

    ``conversations`` counts the test conversations that were routed to it. ``changed`` says which of its files are not
    what was published, if it is in quarantine; ``live`` and ``trial`` are those of the promotion log all the same.
    """

    name: str
    gate: str
    decision: str
    live: bool
    conversations: int
    trial: str = ""  # "canary 25 %" or "shadow" while it is on trial
    ended_by: str = ""  # "rolled back" or "superseded" if it took traffic before
    changed: str = ""
    model: str = ""  # the base model
    entry: int = 0  # the number of its newest entry in the promotion log

    @property
    def traffic(self) -> str:
        """How the version serves traffic: "quarantined", "live", the trial, why it no longer does, or "no"."""
        return "quarantined" if self.changed else "live" if self.live else self.trial or self.ended_by or "no"


@dataclass(frozen=True)
class QuarantineStatus:
    """A quarantined input; ``tried`` counts the attempts at it in all cycles."""

    id: str
    cycle: str
    stage: str
    capability: str
    reason: str
    tried: int


@dataclass(frozen=True)
class StageFailure:
    """A stage that has failed and has not succeeded since; ``capability`` is "" for a stage of the whole cycle."""

    cycle: str
    stage: str
    capability: str
    reason: str


@dataclass(frozen=True)
class BlockedStage:
    """A stage whose newest attempt was blocked by an external cause (Docker down, disk full)."""

    cycle: str
    stage: str
    capability: str
    reason: str


@dataclass(frozen=True)
class RunningStage:
    """A stage at work: its phase, how much of it is done (``total`` 0: unknown), and its times in seconds.

    ``running_s`` is the time since its start, ``silent_s`` that since its last sign of life.
    """

    cycle: str
    stage: str
    capability: str
    phase: str
    done: int
    total: int
    running_s: float
    silent_s: float


@dataclass(frozen=True)
class StoreStatus:
    """The newest cycles, all adapter versions and quarantined inputs, and what blocks cycles or awaits a decision.

    ``blocked`` has the blocked stages of unfinished cycles, ``running`` the stages at work. ``paused`` maps each paused
    target to who paused it, ``requested`` maps a target to the cause of a pending request, ``cannot_begin`` to the
    reason why a due cycle cannot start. ``fitting`` has the cycles with adapter versions, newest first. ``costs`` and
    ``patches`` are those of the newest cycles. ``compositions`` are base models and JSON texts, newest
    first. ``canaries`` is the progress of each. ``failures`` are those of the newest cycles; ``started`` has the
    targets of which the service has begun a cycle.
    """

    cycles: list[CycleStatus]
    adapters: list[AdapterStatus]
    quarantined: list[QuarantineStatus]
    blocked: list[BlockedStage] = field(default_factory=list)
    paused: dict[str, str] = field(default_factory=dict)
    requested: dict[str, str] = field(default_factory=dict)
    cannot_begin: dict[str, str] = field(default_factory=dict)
    fitting: list[str] = field(default_factory=list)
    router: RouterStatus = field(default_factory=RouterStatus)
    costs: list[StageCostStatus] = field(default_factory=list)
    patches: list[PatchStatus] = field(default_factory=list)
    running: list[RunningStage] = field(default_factory=list)
    compositions: list[tuple[str, str]] = field(default_factory=list)
    canaries: list[CanaryStatus] = field(default_factory=list)
    failures: list[StageFailure] = field(default_factory=list)
    started: list[str] = field(default_factory=list)

    @property
    def live(self) -> list[str]:
        """The names of the live adapter versions that are not in quarantine, by capability."""
        return [adapter.name for adapter in self.adapters if adapter.live and not adapter.changed]

    def routed_live(self, model: str) -> list[str]:
        """Return the ``live`` versions that routers with this base model serve (``promotions.served_base``)."""
        base = self.served_base(model)
        return [adapter.name for adapter in self.adapters if adapter.name in self.live and adapter.model == base]

    def routed_compositions(self, model: str) -> list[str]:
        """Return the compositions of the base model that routers with this base model serve, newest first."""
        base = self.served_base(model)
        return [document for name, document in self.compositions if name == base]

    def served_base(self, model: str) -> str:
        """Return the base model that routers with this base model serve; "" if no version is in service."""
        in_service = [adapter for adapter in self.adapters if adapter.live or adapter.trial]
        models = [adapter.model for adapter in sorted(in_service, key=lambda adapter: adapter.entry)]
        return model if model in models else models[0] if models else ""

    @property
    def waiting(self) -> list[str]:
        """The names of the adapter versions whose gate passed and that await a decision."""
        return [a.name for a in self.adapters if awaits_decision(a.gate, decided=a.decision != "none")]


def router_status(connection: Any, now: datetime) -> RouterStatus:
    """Read the router's status over a connection of sqlite3 or psycopg; the last day and hour end at ``now``."""
    day, hour = _sql_time(now - timedelta(days=1)), _sql_time(now - timedelta(hours=1))
    rows = connection.execute(EXCHANGES_SQL.format(day=day, hour=hour, most=MAX_EXCHANGES)).fetchall()
    [(unsettled_count,)] = connection.execute(UNSETTLED_SQL).fetchall()
    outcomes: Counter[str] = Counter()
    by_target: dict[str, Counter[str]] = {}
    for name, outcome, count in connection.execute(OUTCOMES_SQL).fetchall():
        outcomes[outcome] += count
        by_target.setdefault(name, Counter())[outcome] += count
    feedback: Counter[str] = Counter()
    feedback_sql = FEEDBACK_SQL.format(day=day, most=MAX_FEEDBACK, passing=PASSING_SCORE)
    for kind, label, count in connection.execute(feedback_sql).fetchall():
        feedback[_feedback_kind(kind, label)] += count
    failures: Counter[int] = Counter()
    for _, _, status, requests, _, _ in rows:
        failures[status] += requests if status != OK else 0
    reasons = Counter({row[0]: row[5] for row in rows if row[5]}.values())
    return RouterStatus(
        hour=_count_conversations([row for row in rows if row[4]]),
        day=_count_conversations(rows),
        failures={status: count for status, count in sorted(failures.items()) if count},
        by_default=dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))[:MAX_REASONS]),
        unsettled=unsettled_count,
        outcomes=_positive(outcomes),
        by_target={name: counts for name, counter in by_target.items() if (counts := _positive(counter))},
        feedback=_positive(feedback),
        partial=sum(row[3] for row in rows) >= MAX_EXCHANGES,
        is_feedback_partial=feedback.total() >= MAX_FEEDBACK,
    )


def store_status(url: str, now: datetime | None = None) -> StoreStatus:
    """Read the status of a store.

    Args:
        url: ``sqlite:///FILE`` or ``postgresql://...``.
        now: end of the last hour and day, by default the current time.

    Raises:
        StoreUnavailable: the store cannot be read, or has no schema.
        StoreVersionError: the schema of the store is not ``HEAD``.
    """
    at = now or datetime.now(UTC)
    return _read_sqlite(url, at) if url.startswith("sqlite:") else _read_postgres(url, at)


def _positive(counter: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in sorted(counter.items()) if count}


def _count_conversations(rows: list[Any]) -> dict[str, int]:
    pairs = {(model, conversation) for conversation, model, *_ in rows}
    return dict(sorted(Counter(model for model, _ in pairs).items()))


def _feedback_kind(kind: str, label: str) -> str:
    if kind == "label":
        return f"label {label[:40]}" if label else "comment"
    return f"score {PASSING_SCORE} or more" if kind == "passing" else f"score below {PASSING_SCORE}"


def _sql_time(moment: datetime) -> str:
    """Return the time as text in UTC, as SQLite stores it; ``_read_postgres`` sets the session to UTC for it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")


def _read_sqlite(url: str, now: datetime) -> StoreStatus:
    # Mode rw does not create a missing file.
    file = Path(url.removeprefix("sqlite:///")).absolute().as_uri() + "?mode=rw"
    try:
        with closing(sqlite3.connect(file, uri=True, isolation_level=None, timeout=30)) as connection:
            connection.execute("BEGIN")
            return _read(connection, url, now)
    except sqlite3.Error as error:
        raise _unavailable(url, error) from error


def _read_postgres(url: str, now: datetime) -> StoreStatus:
    # Imported here: an optional extra, and slow to import.
    try:
        import psycopg
    except ImportError as error:
        raise StoreUnavailable(f"no driver for PostgreSQL ({error}); `pip install traced[postgres]`") from error
    driver_url = "postgresql" + url[url.index(":") :]
    safe_url = _without_password(driver_url)
    try:
        with psycopg.connect(driver_url, **connect_options(driver_url)) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.execute("SET LOCAL TIME ZONE 'UTC'")
            return _read(connection, safe_url, now)
    except psycopg.Error as error:
        raise _unavailable(safe_url, error) from error


def _read(connection: Any, safe_url: str, now: datetime) -> StoreStatus:
    [(version,)] = connection.execute(VERSION_SQL).fetchall()
    if version != HEAD:
        raise version_error(safe_url, version)
    cycles = [_cycle(row) for row in connection.execute(CYCLES_SQL).fetchall()]
    adapters = connection.execute(ADAPTERS_SQL).fetchall()
    traffic = dict(connection.execute(TRAFFIC_SQL).fetchall())
    quarantined = [QuarantineStatus(*row) for row in connection.execute(QUARANTINED_SQL).fetchall()]
    blocked = [_blocked_stage(row) for row in connection.execute(BLOCKED_SQL).fetchall()]
    paused = dict(connection.execute(PAUSED_SQL).fetchall())
    requested = dict(connection.execute(REQUESTED_SQL).fetchall())
    versions = [_adapter(row, traffic.get(row[0], 0)) for row in adapters]
    cannot_begin = dict(connection.execute(CANNOT_BEGIN_SQL).fetchall())
    fitting = [cycle_id for (cycle_id,) in connection.execute(FITTING_SQL).fetchall()]
    compositions = [(model, document) for model, document in connection.execute(COMPOSITIONS_SQL).fetchall()]
    router = router_status(connection, now)
    costs = [StageCostStatus(*row) for row in connection.execute(COSTS_SQL).fetchall()]
    patches = _patches(connection.execute(PATCHES_SQL).fetchall())
    running = [_running_stage(row, now) for row in connection.execute(RUNNING_SQL).fetchall()]
    return StoreStatus(
        cycles,
        versions,
        quarantined,
        blocked,
        paused,
        requested,
        cannot_begin,
        fitting,
        router,
        costs,
        patches,
        running,
        compositions,
        canary_statuses(connection),
        _failures(connection.execute(FAILURES_SQL).fetchall()),
        [name for (name,) in connection.execute(STARTED_SQL).fetchall()],
    )


def _cycle(row: Any) -> CycleStatus:
    last_stage, summary = f"{row[4]} {row[5]}" if row[4] else "", _parse_json(row[6])
    verdict, step = str(summary.get("verdict", "")), summary.get("step") or {}
    return CycleStatus(row[0], row[1], row[2], row[3], last_stage, verdict, step)


def _failures(rows: list[Any]) -> list[StageFailure]:
    by_cycle: dict[str, list[Any]] = {}
    for row in rows:
        by_cycle.setdefault(row[0], []).append(row)
    return [
        StageFailure(cycle, events[place][1], capability, str(_parse_json(events[place][4]).get("reason", "")))
        for cycle, events in by_cycle.items()
        for capability, place in unresolved_failures((row[1], row[2], row[3] or "") for row in events).items()
    ]


def _adapter(row: Any, conversations: int) -> AdapterStatus:
    state, share = row[3], row[4]
    trial = SHADOW if state == SHADOW else f"canary {100 * share:g} %" if state == "canary" else ""
    return AdapterStatus(
        name=row[0],
        gate=row[1] or "none",
        decision=row[2] or "none",
        live=state == LIVE,
        conversations=conversations,
        trial=trial,
        ended_by=ENDINGS.get(state, ""),
        changed=(row[6] or "its files changed") if row[5] else "",
        model=row[7],
        entry=row[8] or 0,
    )


def _running_stage(row: Any, now: datetime) -> RunningStage:
    progress = _parse_json(row[3]).get("progress") or {}
    running_s, silent_s = ((now - _parse_time(time)).total_seconds() for time in row[4:6])
    return RunningStage(
        cycle=row[0],
        stage=row[1],
        capability=row[2],
        phase=str(progress.get("phase", "")),
        done=int(progress.get("done", 0)),
        total=int(progress.get("total") or 0),
        running_s=running_s,
        silent_s=silent_s,
    )


def _blocked_stage(row: Any) -> BlockedStage:
    return BlockedStage(row[0], row[1], row[2], str(_parse_json(row[3]).get("detail", "")))


def _patches(rows: list[Any]) -> list[PatchStatus]:
    patches: dict[str, PatchStatus] = {}
    for key, cycle, capability, figures, action, actor, detail in rows:
        summary = str(_parse_json(figures).get("enough", ""))
        on_behalf_of = str(_parse_json(detail or {}).get("on_behalf_of", ""))
        who = signature(actor or "", on_behalf_of)
        patch = PatchStatus(key, cycle, capability, summary, DECISION_OF_ACTION.get(action, "none"), who)
        patches.setdefault(capability, patch)
    return list(patches.values())


def _parse_time(value: Any) -> datetime:
    # SQLite returns a time as text in UTC, psycopg as a time.
    time = datetime.fromisoformat(value) if isinstance(value, str) else value
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


def _parse_json(value: Any) -> Any:
    # SQLite returns JSON as text, psycopg as Python objects.
    return json.loads(value) if isinstance(value, str) else value


def _unavailable(safe_url: str, error: Exception) -> StoreUnavailable:
    return StoreUnavailable(
        f"the database {safe_url} failed: {error}; check that it exists, is writable and has space, "
        "then run the same command again"
    )


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    account, at, place = rest.rpartition("@")
    user, colon, _ = account.partition(":")
    return f"{scheme}://{user}{':***' if colon else ''}{at}{place}"
