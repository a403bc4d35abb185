"""Versions of one conversation: a later import may bring it with more messages, redacted, or corrected.

Where the source names a conversation by an id, one of its versions counts: a longer one that continues the others, else
those of the newest import. Of a file with several versions that do not continue each other, such as the branches of a
conversation, all stay. An earlier version is deleted. If evidence of a cycle refers to it, it stays under the split
``SUPERSEDED``, which no later analysis selects. The version that counts keeps the split of the conversation and, if it
came without an outcome, people's feedback.

``ImportedIds`` keeps on disk which trajectories an import has brought, so that memory does not grow with the file.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sqlalchemy import Engine
from sqlmodel import Session

from store.database import read_session, write_session
from store.repositories.imported import ImportedRow, imported_of_tasks
from store.repositories.serving import save_feedback
from store.repositories.trajectories import delete_reported, get_trajectories, update_splits
from store.types import Outcome, Trajectory
from traced.ingest.conversations import continues
from traced.ingest.importers.reader import CONTENT_DIGITS, NamedBy
from traced.ingest.importers.scratch import ScratchFile
from traced.scoring.evidence import Labels, feedback_on, is_reserved_author, rescore
from traced.targets.conversation_target import EXCLUDED, HELD_OUT, SUPERSEDED, TRAIN

SPLITS = ("", TRAIN, HELD_OUT, EXCLUDED, SUPERSEDED)
# Conversations per transaction, so that other writers do not wait long.
PAGE = 50


class ConversationKey(NamedTuple):
    """The name of an imported conversation of a source and agent; ``prefix`` begins the ids of its trajectories."""

    task_id: str
    trial: int
    prefix: str


@dataclass(frozen=True)
class ImportedTrajectory:
    """A trajectory of a file, and what names its conversation."""

    trajectory: Trajectory
    named_by: NamedBy

    @property
    def key(self) -> ConversationKey | None:
        """Return the name of its conversation, None if the source does not name it."""
        if self.named_by is NamedBy.NOTHING:
            return None
        prefix = self.trajectory.id[:-CONTENT_DIGITS] if self.named_by is NamedBy.ID else ""
        return ConversationKey(self.trajectory.task_id, self.trajectory.trial, prefix)


@dataclass
class SupersededCounts:
    """Numbers of superseded trajectories: deleted ones, and ``in_use`` ones to which evidence of a cycle refers."""

    deleted: int = 0
    in_use: int = 0


class ImportedIds(ScratchFile):
    """The ids of the trajectories that an import has brought, by conversation, in a file."""

    SCHEMA = (
        "CREATE TABLE IF NOT EXISTS ids"
        " (task TEXT, trial INTEGER, prefix TEXT, id TEXT, PRIMARY KEY (task, trial, prefix, id))"
    )

    def add(self, batch: Iterable[ImportedTrajectory]) -> None:
        """Add the trajectories whose conversations are named, and commit."""
        rows = [(*row.key, row.trajectory.id) for row in batch if row.key is not None]
        self._database.executemany("INSERT OR IGNORE INTO ids VALUES (?, ?, ?, ?)", rows)
        self.commit()

    def pages(self) -> Iterator[list[ConversationKey]]:
        """Yield the names of all conversations, a page at a time."""
        cursor = self._database.execute("SELECT DISTINCT task, trial, prefix FROM ids")
        while rows := cursor.fetchmany(PAGE):
            yield [ConversationKey(*row) for row in rows]

    def of(self, key: ConversationKey) -> set[str]:
        """Return the ids of a conversation's trajectories."""
        query = "SELECT id FROM ids WHERE task = ? AND trial = ? AND prefix = ?"
        return {key for (key,) in self._database.execute(query, key)}

    def clear(self) -> None:
        """Remove all ids."""
        self._database.execute("DELETE FROM ids")
        self.commit()


def without_shorter(
    session: Session, source: str, agent: str, batch: Sequence[ImportedTrajectory]
) -> list[ImportedTrajectory]:
    """Return the trajectories of a batch without new ones that a longer version, stored or in the batch, continues."""
    in_batch: dict[ConversationKey, dict[str, Trajectory]] = {}
    for row in batch:
        if row.key is not None:
            in_batch.setdefault(row.key, {})[row.trajectory.id] = row.trajectory
    rows_by_key = _versions_in_store(session, source, agent, list(in_batch))
    stored_ids = {row.id for rows in rows_by_key.values() for row in rows}
    shorter: set[str] = set()
    for key, versions in in_batch.items():
        current = {row.id for row in rows_by_key.get(key, []) if row.split != SUPERSEDED}
        if len(versions.keys() | current) == 1:
            continue
        candidates = [*versions.values(), *get_trajectories(session, list(current - versions.keys()), tokens=False)]
        shorter |= {
            version.id
            for version in versions.values()
            if version.id not in stored_ids and any(continues(other.messages, version.messages) for other in candidates)
        }
    return [row for row in batch if row.trajectory.id not in shorter]


def supersede(store: Engine, source: str, agent: str, ids: ImportedIds, labels: Labels) -> SupersededCounts:
    """Let the versions that an import has brought take the place of earlier ones; return how many there were."""
    counts = SupersededCounts()
    for keys in ids.pages():
        with read_session(store) as session:
            conflicts = [key for key, rows in _versions(session, source, agent, keys, ids).items() if len(rows) > 1]
        if conflicts:
            with write_session(store) as session:
                for key, rows in _versions(session, source, agent, conflicts, ids).items():
                    _supersede(session, rows, ids.of(key), labels, counts)
    return counts


def _versions(
    session: Session, source: str, agent: str, keys: Sequence[ConversationKey], ids: ImportedIds
) -> dict[ConversationKey, list[ImportedRow]]:
    """Return the stored versions of conversations; of superseded ones only those that the import has brought."""
    return {
        key: [row for row in rows if row.split != SUPERSEDED or row.id in ids.of(key)]
        for key, rows in _versions_in_store(session, source, agent, keys).items()
    }


def _versions_in_store(
    session: Session, source: str, agent: str, keys: Sequence[ConversationKey]
) -> dict[ConversationKey, list[ImportedRow]]:
    tasks = list(dict.fromkeys(key.task_id for key in keys))
    by_trial: dict[tuple[str, int], list[ImportedRow]] = {}
    for row in imported_of_tasks(session, source, agent, SPLITS, tasks):
        by_trial.setdefault((row.task_id, row.trial), []).append(row)
    return {
        key: [row for row in by_trial.get((key.task_id, key.trial), []) if row.id.startswith(key.prefix)]
        for key in keys
    }


def _supersede(
    session: Session, rows: Sequence[ImportedRow], imported_ids: set[str], labels: Labels, counts: SupersededCounts
) -> None:
    trajectories = get_trajectories(session, [row.id for row in rows], tokens=False)
    # The longest first, so that every shorter version is continued by one that counts.
    current: list[Trajectory] = []
    successors: list[tuple[Trajectory, Trajectory]] = []
    for version in sorted(trajectories, key=lambda trajectory: (-len(trajectory.messages), trajectory.id)):
        longer = next((other for other in current if continues(other.messages, version.messages)), None)
        if longer is None:
            current.append(version)
        else:
            successors.append((version, longer))
    imported = [version for version in current if version.id in imported_ids]
    if imported:
        successors += [(version, imported[0]) for version in current if version.id not in imported_ids]
        current = imported
    successors = [(earlier, successor) for earlier, successor in successors if earlier.split != SUPERSEDED]
    # What was held out stays held out, whatever the settings are now.
    splits = [earlier.split for earlier, _ in sorted(successors, key=lambda pair: pair[0].id in imported_ids)]
    update_splits(session, {version.id: splits[0] for version in current if splits and version.split != splits[0]})
    for earlier, successor in successors:
        _replace(session, earlier, successor, labels, counts)


def _replace(
    session: Session, earlier: Trajectory, successor: Trajectory, labels: Labels, counts: SupersededCounts
) -> None:
    if successor.outcome is Outcome.UNKNOWN:
        for feedback in feedback_on(session, earlier.id):
            if not is_reserved_author(feedback.who):
                save_feedback(session, replace(feedback, conversation_id=successor.id))
        rescore(session, [successor.id], labels)
    if delete_reported(session, earlier.id):
        counts.deleted += 1
    else:
        update_splits(session, {earlier.id: SUPERSEDED})
        counts.in_use += 1
