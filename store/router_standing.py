"""The router's part of ``store.standing``: what it answered lately, what failed, what waits, what people thought.

Invariants: at most the newest ``MOST`` exchanges of the last day are read, by an index, however many there are
(``partial`` says that there may be more), and the newest ``MOST_FEEDBACK`` pieces of feedback; the rest are counts over
indices. A conversation counts for every model that answered in it. SQL that SQLite and PostgreSQL share, in which a
moment is text in UTC.
"""

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

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
    """As SQLite keeps it; PostgreSQL is told the zone by the session's, which ``store.standing`` sets."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
