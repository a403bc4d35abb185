"""Recorded trajectories from elsewhere, on their way into the store: `traced import`.

Invariants: an import is stored batch by batch, so that memory stays the same whatever the file's size; one that is
killed goes on behind its last batch, and stored twice is stored once, so at no point is anything half-written (what it
then counts as known may be its own). An outcome that a later file brings replaces the rules' and the judge's, no
person's. Bad records are kept aside with their reasons (``importers.ledger``); a strict import stores nothing if there
is one, for which some formats are read twice. A cycle of imported trajectories is named by them and by the analysis'
settings, so importing the same again changes nothing.
How it fails: ``traced.ingest.importers.formats`` errors name file, record and line; what was stored before stays. Not
covered: what to make of it (``traced.pipeline.analyze``); a file that changes while it is read.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlmodel import Session

from store.database import read_session, write_session
from store.records import Cycle, CycleState, Event
from store.repositories.cycles import save_cycle
from store.repositories.events import save_event
from store.repositories.serving import save_feedback, router_trajectories
from store.repositories.trajectories import (
    TrajectoryFilter,
    get_trajectory,
    is_stored,
    iterate_ids,
    update_outcome,
    save_trajectories,
)
from store.types import Outcome, Trajectory
from traced.config.settings import Settings
from traced.ingest.import_ledger import Counts, Ledger
from traced.ingest.importers.errors import NoTrajectories, UnknownFormat
from traced.ingest.importers.formats import FORMATS, detect_format, format_of
from traced.ingest.importers.json_file import read_head
from traced.ingest.importers.reader import ImportJob, ResumePoint, Step
from traced.ingest.redaction import Redactor
from traced.scoring.evidence import (
    JUDGE,
    RULES,
    Labels,
    OutcomeSource,
    effective_outcome,
    feedback_on,
    latest_verdict,
    verdict,
)
from traced.scoring.rescoring import apply_rules
from traced.scoring.rule_file import read_rules
from traced.scoring.rules import Decision

IMPORTED = "imported"
BATCH = 500  # trajectories in one transaction
BATCH_BYTES = 8 << 20
SUPERSEDED_BY_SOURCE = Decision(Outcome.UNKNOWN, reason="its source judged it later")
MAX_LEADING_BAD_RECORDS = 100  # bad records before the first good one: the file is of another format


@dataclass(frozen=True)
class ImportRequest:
    """What to import and how; ``kind`` None tells the format by the file's beginning."""

    path: Path
    kind: str | None = None
    agent: str = "recorded"
    score: str | None = None
    strict: bool = False
    from_start: bool = False


@dataclass(frozen=True)
class ImportResult:
    """What one file gave: trajectories by outcome, how many were new, and the records that were left out.

    ``skipped`` holds the first messages only; ``bad_file`` has every bad record, None where there was none.
    """

    cycle: str
    source: str
    outcomes: dict[str, int]
    added: int
    known: int
    replaced: int
    passed: int
    bad: int
    bad_file: Path | None
    resumed: bool
    skipped: list[str] = field(default_factory=list)
    judged: int = 0  # by the rules, of those that came without an outcome


def import_file(
    store: Engine,
    settings: Settings,
    request: ImportRequest,
    *,
    at: datetime,
    on_batch: Callable[[Counts], None] = lambda counts: None,
) -> ImportResult:
    """Store the trajectories of a file, or go on where an import of it was stopped; raises ImportFailed."""
    path = request.path.absolute()
    format_name = request.kind or format_of(path)
    serving = settings.serving
    redaction = [serving.redact, serving.redact_fields]
    options = {
        "format": format_name,
        "agent": request.agent,
        "score": request.score,
        "redact": redaction,
        "store": _store_key(store),
    }
    judging = read_rules(Path(settings.outcomes.rules)) if settings.outcomes.rules else None
    read_head(path)  # what cannot be read is told before anything is made
    with Ledger(settings.data_dir, path, options) as ledger:
        if request.from_start or (ledger.last_id and not _trajectory_exists(store, ledger.last_id)):
            ledger.forget()
        resumed = ledger.resume_point is not None
        job = ImportJob(
            path=path,
            agent=request.agent,
            scratch=ledger.scratch,
            redactor=Redactor(*redaction),
            labels=Labels(serving.success_labels, serving.failure_labels),
            score=request.score,
            strict=request.strict,
            redacts_fields=bool(serving.redact_fields),
        )
        try:
            for batch, place in _batches(
                FORMATS[format_name](job, ledger.resume_point), ledger, format_name, strict=request.strict
            ):
                with write_session(store) as db_session:
                    _store_batch(db_session, ledger, batch, job.labels, at)
                if place is not None:
                    ledger.commit(place)
                on_batch(ledger.counts)
        except UnknownFormat:
            ledger.finish()
            raise
        ledger.finish()
        counts = ledger.counts
        _require_trajectories(counts, path, format_name, ledger)
    with write_session(store) as db_session:
        cycle = cycle_of_imports(db_session, settings, format_name, request.agent, at)
        if counts.added or counts.replaced:
            detail = {"trajectories": counts.added, "judged anew": counts.replaced, "left out": counts.bad}
            save_event(db_session, Event(at, "import", format_name, cycle.id, detail))
    bad_file = ledger.bad_file if counts.bad else None
    totals = (counts.added, counts.known, counts.replaced, counts.passed, counts.bad)
    judged_count = 0
    if judging is not None:
        judged_count = sum(
            apply_rules(store, judging, format_name, job.labels, again=False, limit=None, at=at).judged.values()
        )
    return ImportResult(cycle.id, format_name, counts.outcomes, *totals, bad_file, resumed, counts.told, judged_count)


def cycle_of_imports(session: Session, settings: Settings, source: str, agent: str, at: datetime) -> Cycle:
    """The cycle of everything imported from ``source`` and ``agent`` so far under these settings."""
    hasher, count = hashlib.sha256(b"[["), 0
    for count, trajectory_id in enumerate(iterate_ids(session, TrajectoryFilter(source=source, model=agent)), 1):
        hasher.update(((", " if count > 1 else "") + json.dumps(trajectory_id)).encode())
    config: dict[str, Any] = {IMPORTED: count, "analysis": settings.analysis.model_dump(mode="json")}
    if settings.analysis.analyst == "llm":
        config["llm"] = {"model": settings.llm.model, "base_url": settings.llm.base_url}
    hasher.update(f"], {json.dumps(config, sort_keys=True)}, {settings.seed}]".encode())
    cycle = Cycle(f"{source}-{hasher.hexdigest()[:12]}", source, agent, settings.seed, config, CycleState.RUNNING, at)
    save_cycle(session, cycle)
    return cycle


def _batches(
    steps: Iterator[Step], ledger: Ledger, format_name: str, *, strict: bool
) -> Iterator[tuple[list[Trajectory], ResumePoint | None]]:
    """Trajectories to store together, and where reading goes on after them; None for the last, as it ends there."""
    batch: list[Trajectory] = []
    size = 0
    for step in steps:
        if step.bad is not None:
            if strict:
                ledger.forget()
                raise step.bad
            ledger.leave_out(step.bad)
            _reject_wrong_format(ledger, format_name, step)
        ledger.counts.good += step.good
        ledger.counts.passed += step.passed
        batch += step.trajectories
        size += step.size
        if step.resume_point is not None and (len(batch) >= BATCH or size >= BATCH_BYTES):
            yield batch, step.resume_point
            batch, size = [], 0
    yield batch, None


def _store_batch(db_session: Session, ledger: Ledger, batch: list[Trajectory], labels: Labels, at: datetime) -> None:
    counts = ledger.counts
    if not batch:
        return
    result = save_trajectories(db_session, batch)
    replaced_count = len(result.replaced) + _apply_source_outcomes(db_session, batch, labels, at)
    counts.added += result.added
    counts.replaced += replaced_count
    counts.known += len(batch) - result.added - replaced_count
    for trajectory in batch:
        counts.outcomes[trajectory.outcome] = counts.outcomes.get(trajectory.outcome, 0) + 1
    ledger.last_id = batch[-1].id


def _apply_source_outcomes(session: Session, imported: list[Trajectory], labels: Labels, at: datetime) -> int:
    """Let outcomes that come later than the rules' or the judge's count instead; returns how many changed.

    Their verdicts are taken back, so that the outcome is the source's from then on.
    """
    judged_by_id = {trajectory.id: trajectory for trajectory in imported if trajectory.outcome is not Outcome.UNKNOWN}
    changed = 0
    for trajectory_id in sorted(router_trajectories(session, list(judged_by_id))):
        current = get_trajectory(session, trajectory_id)
        if effective_outcome(session, current, labels).source not in (OutcomeSource.RULES, OutcomeSource.JUDGE):
            continue
        if not update_outcome(
            session,
            replace(current, outcome=judged_by_id[trajectory_id].outcome, reward=judged_by_id[trajectory_id].reward),
        ):
            continue  # evidence of a cycle refers to it
        changed += (current.outcome, current.reward) != (
            judged_by_id[trajectory_id].outcome,
            judged_by_id[trajectory_id].reward,
        )
        feedback = feedback_on(session, trajectory_id)
        for previous in (latest_verdict(RULES, feedback), latest_verdict(JUDGE, feedback)):
            if previous is not None:
                save_feedback(session, verdict(trajectory_id, previous.who, SUPERSEDED_BY_SOURCE, at))
    return changed


def _reject_wrong_format(ledger: Ledger, format_name: str, step: Step) -> None:
    """Stop early where a file is none of its format: there is no use in keeping all of it aside."""
    counts = ledger.counts
    if step.bad is None or counts.bad < MAX_LEADING_BAD_RECORDS or counts.good or counts.passed:
        return
    path = step.bad.path
    detected = detect_format(read_head(path))
    suggestion = detected if detected not in (None, format_name) else "|".join(FORMATS)
    raise UnknownFormat(
        f"{path}: none of its first {counts.bad} records is of the format {format_name}; the first: {counts.told[0]}",
        hint=f"traced import {path} --format {suggestion}",
    )


def _require_trajectories(counts: Counts, path: Path, format_name: str, ledger: Ledger) -> None:
    if counts.outcomes:
        return
    hint = f"--format {'|'.join(FORMATS)}"
    if counts.bad:
        cause = f"all of its {counts.bad} records that could be one are bad; the first: {counts.told[0]}"
        raise NoTrajectories(
            f"{path}: no trajectory of the format {format_name} was found; {cause}",
            hint=f"{hint}, or see {ledger.bad_file}",
        )
    passed = f"; {counts.passed} records hold no call of a model" if counts.passed else "; it holds no records"
    raise NoTrajectories(f"{path}: no trajectory of the format {format_name} was found{passed}", hint=hint)


def _trajectory_exists(store: Engine, trajectory_id: str) -> bool:
    with read_session(store) as db_session:
        return is_stored(db_session, trajectory_id)


def _store_key(store: Engine) -> str:
    return hashlib.sha256(store.url.render_as_string(hide_password=True).encode()).hexdigest()[:12]
