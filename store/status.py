"""Where everything stands, in a few queries: newest cycles, adapter versions, what is live, waits, held up or parked.

Invariants: one consistent snapshot; it says what the repositories say (a test holds them together); it reads few rows
however many trajectories there are, and it speaks to the driver itself, in SQL that both share, because
importing the tables takes longer than the whole answer may (``traced status``, 300 ms).
Fails: ``StoreUnavailable``, and ``StoreVersionError`` for another schema. Not covered: an empty database, which is
``StoreUnavailable`` as well; writing.

The router's part of ``store.status``: what it answered lately, what failed, what waits, what people thought.

Invariants: at most the newest ``MOST`` exchanges of the last day are read, by an index, however many there are
(``partial`` says that there may be more), and the newest ``MOST_FEEDBACK`` pieces of feedback; the rest are counts over
indices. A conversation counts for every model that answered in it. SQL that SQLite and PostgreSQL share, in which a
moment is text in UTC.
"""

import json
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from store.errors import StoreUnavailable
from store.schema_version import HEAD, mismatch, patience

OK, PASSING_SCORE = 200, 0.5
MOST, MOST_FEEDBACK = 10_000, 1_000
REASONS = 5

# an exchange is settled after it was made, so those of the last day are unsettled or were settled within it
EXCHANGES = """
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
UNSETTLED = "SELECT count(*) FROM exchanges WHERE settled_at IS NULL"
# one count for each target and outcome: so, and only so, SQLite counts in the index of what no cycle recorded
OUTCOMES = """
SELECT o.outcome, (
    SELECT count(*) FROM trajectories t WHERE t.cycle_id IS NULL AND t.source = s.name AND t.outcome = o.outcome
)
FROM (SELECT target AS name FROM cycles UNION SELECT name FROM targets) s,
    (SELECT 'success' AS outcome UNION ALL SELECT 'failure' UNION ALL SELECT 'unknown') o
"""
FEEDBACK = """
SELECT score, label FROM (SELECT score, label, at FROM feedback ORDER BY seq DESC LIMIT {most}) f WHERE at > '{day}'
"""


@dataclass(frozen=True)
class RouterStanding:
    """The router's traffic.

    ``hour`` and ``day`` are conversations by the model that answered, ``failures`` requests of the day by status,
    ``by_default`` the day's conversations that were left to the base model, by reason, the commonest first.
    ``unsettled`` exchanges are no trajectories yet; ``outcomes`` are of all that production has reported of a target.
    ``feedback`` is the day's, by what it says.
    """

    hour: dict[str, int] = field(default_factory=dict)
    day: dict[str, int] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)
    by_default: dict[str, int] = field(default_factory=dict)
    unsettled: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    feedback: dict[str, int] = field(default_factory=dict)
    partial: bool = False

    @property
    def used(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.day or self.unsettled or self.outcomes or self.feedback)


def router_standing(connection: Any, now: datetime) -> RouterStanding:
    """Read it over a driver's connection (``sqlite3``, ``psycopg``)."""
    day, hour = _text(now - timedelta(days=1)), _text(now - timedelta(hours=1))
    rows = connection.execute(EXCHANGES.format(day=day, hour=hour, most=MOST)).fetchall()
    [(unsettled,)] = connection.execute(UNSETTLED).fetchall()
    outcomes: Counter[str] = Counter()
    for outcome, count in connection.execute(OUTCOMES).fetchall():
        outcomes[outcome] += count
    told = connection.execute(FEEDBACK.format(day=day, most=MOST_FEEDBACK)).fetchall()
    failures: Counter[int] = Counter()
    for _, _, status, requests, _, _ in rows:
        failures[status] += requests if status != OK else 0
    reasons = Counter({row[0]: row[5] for row in rows if row[5]}.values())
    return RouterStanding(
        hour=_conversations([row for row in rows if row[4]]),
        day=_conversations(rows),
        failures={status: count for status, count in sorted(failures.items()) if count},
        by_default=dict(sorted(reasons.items(), key=lambda one: (-one[1], one[0]))[:REASONS]),
        unsettled=unsettled,
        outcomes={outcome: count for outcome, count in sorted(outcomes.items()) if count},
        feedback=dict(sorted(Counter(_said(score, label) for score, label in told).items())),
        partial=sum(row[3] for row in rows) >= MOST,
    )


def _conversations(rows: list[Any]) -> dict[str, int]:
    pairs = {(model, conversation) for conversation, model, *_ in rows}
    return dict(sorted(Counter(model for model, _ in pairs).items()))


def _said(score: float | None, label: str) -> str:
    if score is not None:
        return f"score {PASSING_SCORE} or more" if score >= PASSING_SCORE else f"score below {PASSING_SCORE}"
    return f"label {label[:40]}" if label else "comment"


def _text(moment: datetime) -> str:
    """As SQLite keeps it; PostgreSQL is told the zone by the session's, which ``store.status`` sets."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")


CYCLES_SHOWN = 10
LIVE, PASS = "live", "pass"

VERSION = "SELECT version_num FROM alembic_version"
CYCLES = f"""
SELECT c.id, c.target, c.model, c.state, e.stage, e.state
FROM (SELECT id, target, model, state, created_at FROM cycles ORDER BY created_at DESC, id DESC LIMIT {CYCLES_SHOWN}) c
LEFT JOIN stage_events e ON e.seq = (SELECT max(seq) FROM stage_events WHERE cycle_id = c.id)
ORDER BY c.created_at DESC, c.id DESC
"""
ADAPTERS = """
SELECT a.name, g.answer, d.decision, p.state, p.share
FROM adapters a
LEFT JOIN gate_results g ON g.seq = (SELECT max(seq) FROM gate_results WHERE adapter = a.name)
LEFT JOIN approvals d ON d.seq = (SELECT max(seq) FROM approvals WHERE adapter = a.name)
LEFT JOIN promotions p ON p.seq = (SELECT max(seq) FROM promotions WHERE adapter = a.name)
ORDER BY a.capability, a.version
"""
PARKED = """
SELECT p.id, p.cycle_id, p.stage, p.capability, p.reason, (
    SELECT count(*) FROM attempts a
    WHERE a.stage = p.stage AND a.capability = p.capability AND a.input_hash = p.input_hash
)
FROM parked p WHERE p.released_at IS NULL ORDER BY p.seq DESC
"""
HELD_UP = """
SELECT a.cycle_id, a.stage, a.capability, a.evidence
FROM attempts a JOIN cycles c ON c.id = a.cycle_id
WHERE c.state IN ('running', 'interrupted') AND a.state = 'blocked' AND a.seq = (
    SELECT max(seq) FROM attempts b
    WHERE b.cycle_id = a.cycle_id AND b.stage = a.stage AND b.capability = a.capability
)
ORDER BY a.seq
"""
COSTS = f"""
SELECT r.cycle_id, r.stage, count(*), sum(r.prompt_tokens), sum(r.completion_tokens), sum(r.cost), sum(r.seconds),
    sum(CASE WHEN r.estimated THEN 1 ELSE 0 END)
FROM (SELECT id, created_at FROM cycles ORDER BY created_at DESC, id DESC LIMIT {CYCLES_SHOWN}) c
JOIN model_replies r ON r.cycle_id = c.id
GROUP BY r.cycle_id, r.stage, c.created_at ORDER BY c.created_at DESC, r.cycle_id DESC, r.stage
"""
PATCHES = f"""
SELECT p.id, p.cycle_id, p.capability, p.figures, d.action, d.who
FROM (SELECT id, created_at FROM cycles ORDER BY created_at DESC, id DESC LIMIT {CYCLES_SHOWN}) c
JOIN prompt_patches p ON p.cycle_id = c.id
LEFT JOIN audit d ON d.seq = (
    SELECT max(seq) FROM audit WHERE subject = p.id AND action IN ('approve-prompt', 'reject-prompt')
)
ORDER BY p.at DESC, p.id DESC
"""
DECIDED = {"approve-prompt": "approved", "reject-prompt": "rejected"}
CANNOT_BEGIN = "SELECT name, cannot_begin FROM targets WHERE cannot_begin <> '' ORDER BY name"
ASKED_FOR = "SELECT name, asked_for FROM targets WHERE asked_for <> '' ORDER BY name"
PAUSED = "SELECT name, paused_by FROM targets WHERE paused_at IS NOT NULL ORDER BY name"
TRAFFIC = "SELECT model, count(*) FROM routing_choices GROUP BY model"
FITTING = "SELECT cycle_id FROM adapters GROUP BY cycle_id ORDER BY max(created_at) DESC, cycle_id"


@dataclass(frozen=True)
class CycleStanding:
    """A cycle and the last thing that happened to one of its stages ("" when nothing has)."""

    id: str
    target: str
    model: str
    state: str
    last_stage: str


@dataclass(frozen=True)
class CostStanding:
    """What a stage of a cycle asked of language models; ``estimated`` replies came without token counts."""

    cycle: str
    stage: str
    calls: int
    prompt_tokens: int
    completion_tokens: int
    cost: float
    seconds: float
    estimated: int


@dataclass(frozen=True)
class PatchStanding:
    """The newest prompt patch of a capability, which is enough, in words, and what was decided ("none"), by whom."""

    id: str
    cycle: str
    capability: str
    enough: str
    decision: str = "none"
    who: str = ""


@dataclass(frozen=True)
class AdapterStanding:
    """An adapter version: newest gate's answer and newest decision ("none" without one), and its test conversations."""

    name: str
    gate: str
    decision: str
    live: bool
    conversations: int
    trial: str = ""  # "canary 25 %" or "shadow", while it is on trial

    @property
    def traffic(self) -> str:
        """What it takes, in a word."""
        return "live" if self.live else self.trial or "no"


@dataclass(frozen=True)
class ParkedStanding:
    """An input that is left aside until a person releases it; ``tried`` counts all attempts at it."""

    id: str
    cycle: str
    stage: str
    capability: str
    reason: str
    tried: int


@dataclass(frozen=True)
class HeldUp:
    """A stage whose last attempt could not do its work for a reason outside of it (Docker down, disk full)."""

    cycle: str
    stage: str
    capability: str
    reason: str


@dataclass(frozen=True)
class Standing:
    """The newest cycles, newest first, all adapter versions by capability and number, parked inputs, newest first.

    ``paused`` is {target: who paused it}, ``asked_for`` {target: why a cycle was asked for that has not begun},
    ``cannot_begin`` {target: why one that is due cannot}. ``fitting``: the cycles that have made adapter versions, the
    newest first, as ``repositories.adapters.fitting_cycles`` gives them. ``costs``: of these cycles' stages that asked
    language models; ``patches``: the prompts that were tried in them.
    """

    cycles: list[CycleStanding]
    adapters: list[AdapterStanding]
    parked: list[ParkedStanding]
    held_up: list[HeldUp] = field(default_factory=list)
    paused: dict[str, str] = field(default_factory=dict)
    asked_for: dict[str, str] = field(default_factory=dict)
    cannot_begin: dict[str, str] = field(default_factory=dict)
    fitting: list[str] = field(default_factory=list)
    router: RouterStanding = field(default_factory=RouterStanding)
    costs: list[CostStanding] = field(default_factory=list)
    patches: list[PatchStanding] = field(default_factory=list)

    @property
    def live(self) -> list[str]:
        """The adapter versions that take traffic, by capability."""
        return [adapter.name for adapter in self.adapters if adapter.live]

    @property
    def waiting(self) -> list[str]:
        """Those whose newest gate passed and about which nobody has decided."""
        return [a.name for a in self.adapters if a.gate == PASS and a.decision == "none"]


def standing(url: str, now: datetime | None = None) -> Standing:
    """How the store at ``url`` (``sqlite:///FILE`` or ``postgresql://...``) stands; ``now``: for what is of late."""
    at = now or datetime.now(UTC)
    return _sqlite(url, at) if url.startswith("sqlite:") else _postgres(url, at)


def _sqlite(url: str, now: datetime) -> Standing:
    file = Path(url.removeprefix("sqlite:///")).absolute().as_uri() + "?mode=rw"  # a look makes no new file
    try:
        with closing(sqlite3.connect(file, uri=True, isolation_level=None, timeout=30)) as connection:
            connection.execute("BEGIN")
            return _read(connection, url, now)
    except sqlite3.Error as error:
        raise _failed(url, error) from error


def _postgres(url: str, now: datetime) -> Standing:
    try:
        import psycopg
    except ImportError as error:
        raise StoreUnavailable(f"no driver for PostgreSQL ({error}); `pip install traced[postgres]`") from error
    plain = "postgresql" + url[url.index(":") :]
    shown = _without_password(plain)
    try:
        with psycopg.connect(plain, **patience(plain)) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.execute("SET LOCAL TIME ZONE 'UTC'")
            return _read(connection, shown, now)
    except psycopg.Error as error:
        raise _failed(shown, error) from error


def _read(connection: Any, shown: str, now: datetime) -> Standing:
    [(found,)] = connection.execute(VERSION).fetchall()
    if found != HEAD:
        raise mismatch(shown, found)
    cycles = [_cycle(row) for row in connection.execute(CYCLES).fetchall()]
    adapters = connection.execute(ADAPTERS).fetchall()
    traffic = dict(connection.execute(TRAFFIC).fetchall())
    parked = [ParkedStanding(*row) for row in connection.execute(PARKED).fetchall()]
    held_up = [_held_up(row) for row in connection.execute(HELD_UP).fetchall()]
    paused = dict(connection.execute(PAUSED).fetchall())
    asked_for = dict(connection.execute(ASKED_FOR).fetchall())
    versions = [_adapter(row, traffic.get(row[0], 0)) for row in adapters]
    cannot_begin = dict(connection.execute(CANNOT_BEGIN).fetchall())
    fitting = [cycle_id for (cycle_id,) in connection.execute(FITTING).fetchall()]
    router = router_standing(connection, now)
    costs = [CostStanding(*row) for row in connection.execute(COSTS).fetchall()]
    patches = _patches(connection.execute(PATCHES).fetchall())
    return Standing(cycles, versions, parked, held_up, paused, asked_for, cannot_begin, fitting, router, costs, patches)


def _cycle(row: Any) -> CycleStanding:
    return CycleStanding(row[0], row[1], row[2], row[3], f"{row[4]} {row[5]}" if row[4] else "")


def _adapter(row: Any, conversations: int) -> AdapterStanding:
    state, share = row[3], row[4]
    trial = "shadow" if state == "shadow" else f"canary {100 * share:g} %" if state == "canary" else ""
    return AdapterStanding(row[0], row[1] or "none", row[2] or "none", state == LIVE, conversations, trial)


def _held_up(row: Any) -> HeldUp:
    return HeldUp(row[0], row[1], row[2], str(_json(row[3]).get("detail", "")))


def _patches(rows: list[Any]) -> list[PatchStanding]:
    newest: dict[str, PatchStanding] = {}
    for key, cycle, capability, figures, action, who in rows:
        says = str(_json(figures).get("enough", ""))
        told = PatchStanding(key, cycle, capability, says, DECIDED.get(action, "none"), who or "")
        newest.setdefault(capability, told)
    return list(newest.values())


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value  # SQLite keeps JSON as text


def _failed(shown: str, error: Exception) -> StoreUnavailable:
    return StoreUnavailable(
        f"the database {shown} failed: {error}; check that it is there, writable and has space, "
        "then run the same command again"
    )


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    account, at, place = rest.rpartition("@")
    user, colon, _ = account.partition(":")
    return f"{scheme}://{user}{':***' if colon else ''}{at}{place}"
