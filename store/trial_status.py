"""Read the progress of canaries for ``traced status``, with plain SQL as in ``store.status``.

An outcome is the newest score of a person, else that of the settled conversation, as in ``traced.gateway.canaries``.
Not covered: labels of people that revise a score, or that come before the conversation is settled.
"""

from dataclasses import dataclass
from typing import Any

MAX_CONVERSATIONS = 10_000  # of each canary's newest share
PASSING_SCORE = 0.5
TRIALS_SQL = """
SELECT p.seq, p.adapter, p.share FROM promotions p
WHERE p.state = 'canary' AND p.seq = (SELECT max(seq) FROM promotions WHERE adapter = p.adapter)
ORDER BY p.adapter
"""
CONVERSATIONS_SQL = """
SELECT c.model,
    (SELECT f.score FROM feedback f WHERE f.conversation_id = c.id AND f.score IS NOT NULL ORDER BY f.seq DESC LIMIT 1),
    (SELECT t.outcome FROM exchanges e JOIN trajectories t ON t.id = e.trajectory_id
     WHERE e.conversation_id = c.id AND e.shadow_of IS NULL ORDER BY e.at DESC LIMIT 1)
FROM (SELECT id, model FROM conversations WHERE trial = {trial} ORDER BY at DESC LIMIT {most}) c
WHERE NOT EXISTS (
    SELECT 1 FROM exchanges e
    WHERE e.conversation_id = c.id AND e.model <> c.model AND e.shadow_of IS NULL AND e.status = 200
)
"""


MORE_SQL = "SELECT count(*) FROM (SELECT 1 FROM conversations WHERE trial = {trial} LIMIT {most} + 1) c"


@dataclass(frozen=True)
class Arm:
    """The judged conversations of one side of a canary, and how many of them succeeded."""

    conversations: int
    successes: int


@dataclass(frozen=True)
class CanaryStatus:
    """A canary and its control at the newest share, which is in [0, 1].

    ``partial`` is true if the share has conversations that are older than those that were read.
    """

    adapter: str
    share: float
    canary: Arm
    control: Arm
    partial: bool = False


def canary_statuses(connection: Any) -> list[CanaryStatus]:
    """Read the canaries over a connection of sqlite3 or psycopg, by the name of the version."""
    statuses = []
    for trial, adapter, share in connection.execute(TRIALS_SQL).fetchall():
        bounds = {"trial": int(trial), "most": MAX_CONVERSATIONS}
        rows = connection.execute(CONVERSATIONS_SQL.format(**bounds)).fetchall()
        [(count,)] = connection.execute(MORE_SQL.format(**bounds)).fetchall()
        arms: dict[bool, list[bool]] = {True: [], False: []}
        for model, score, outcome in rows:
            if score is not None:
                arms[model == adapter].append(score >= PASSING_SCORE)
            elif outcome in ("success", "failure"):
                arms[model == adapter].append(outcome == "success")
        canary, control = (Arm(len(arm), sum(arm)) for arm in arms.values())
        statuses.append(CanaryStatus(adapter, share, canary, control, partial=count > MAX_CONVERSATIONS))
    return statuses
