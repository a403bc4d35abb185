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

from store.database import reading, session
from store.records import Cycle, CycleState, Event
from store.repositories.cycles import save_cycle
from store.repositories.events import save_event
from store.repositories.serving import save_feedback, talked_of
from store.repositories.trajectories import (
    TrajectoryFilter,
    get_trajectory,
    is_stored,
    iterate_ids,
    rejudge_trajectory,
    save_trajectories,
)
from store.types import Outcome, Trajectory
from traced.config.settings import Settings
from traced.ingest.import_ledger import Counts, Ledger
from traced.ingest.importers.errors import NothingFound, UnknownFormat
from traced.ingest.importers.formats import FORMATS, format_of, told_by
from traced.ingest.importers.json_file import beginning
from traced.ingest.importers.reader import Reading, Resume, Step
from traced.ingest.redaction import Redactor
from traced.scoring.evidence import JUDGE, RULES, By, Labels, last_of, said_of, standing_of, verdict
from traced.scoring.rescoring import apply
from traced.scoring.rule_file import read_rules
from traced.scoring.rules import Decision

IMPORTED = "imported"
BATCH = 500  # trajectories in one transaction
BATCH_BYTES = 8 << 20
SOURCE_JUDGES = Decision(Outcome.UNKNOWN, reason="its source judged it later")
GIVE_UP = 100  # bad records before the first good one: the file is of another format


@dataclass(frozen=True)
class Wanted:
    """What to import and how; ``kind`` None tells the format by the file's beginning."""

    path: Path
    kind: str | None = None
    agent: str = "recorded"
    score: str | None = None
    strict: bool = False
    from_start: bool = False


@dataclass(frozen=True)
class Imported:
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
    wanted: Wanted,
    *,
    at: datetime,
    on_batch: Callable[[Counts], None] = lambda counts: None,
) -> Imported:
    """Store the trajectories of a file, or go on where an import of it was stopped; raises ImportFailed."""
    path = wanted.path.absolute()
    kind = wanted.kind or format_of(path)
    chosen = settings.serving
    rules = [chosen.redact, chosen.redact_fields]
    options = {"format": kind, "agent": wanted.agent, "score": wanted.score, "redact": rules, "store": _named(store)}
    judging = read_rules(Path(settings.outcomes.rules)) if settings.outcomes.rules else None
    beginning(path)  # what cannot be read is told before anything is made
    with Ledger(settings.data_dir, path, options) as ledger:
        if wanted.from_start or (ledger.last and not _is_there(store, ledger.last)):
            ledger.forget()
        resumed = ledger.place is not None
        rule = Reading(
            path=path,
            agent=wanted.agent,
            scratch=ledger.scratch,
            redactor=Redactor(*rules),
            labels=Labels(chosen.success_labels, chosen.failure_labels),
            score=wanted.score,
            strict=wanted.strict,
            by_field=bool(chosen.redact_fields),
        )
        try:
            for batch, place in _batches(FORMATS[kind](rule, ledger.place), ledger, kind, strict=wanted.strict):
                with session(store) as opened:
                    _store(opened, ledger, batch, rule.labels, at)
                if place is not None:
                    ledger.commit(place)
                on_batch(ledger.counts)
        except UnknownFormat:
            ledger.finish()
            raise
        ledger.finish()
        counts = ledger.counts
        _refuse_nothing(counts, path, kind, ledger)
    with session(store) as opened:
        cycle = cycle_of_imports(opened, settings, kind, wanted.agent, at)
        if counts.added or counts.replaced:
            detail = {"trajectories": counts.added, "judged anew": counts.replaced, "left out": counts.bad}
            save_event(opened, Event(at, "import", kind, cycle.id, detail))
    aside = ledger.bad_file if counts.bad else None
    told = (counts.added, counts.known, counts.replaced, counts.passed, counts.bad)
    judged = 0
    if judging is not None:
        judged = sum(apply(store, judging, kind, rule.labels, again=False, limit=None, at=at).judged.values())
    return Imported(cycle.id, kind, counts.outcomes, *told, aside, resumed, counts.told, judged)


def cycle_of_imports(session: Session, settings: Settings, source: str, agent: str, at: datetime) -> Cycle:
    """The cycle of everything imported from ``source`` and ``agent`` so far under these settings."""
    told, count = hashlib.sha256(b"[["), 0
    for count, one in enumerate(iterate_ids(session, TrajectoryFilter(source=source, model=agent)), 1):
        told.update(((", " if count > 1 else "") + json.dumps(one)).encode())
    config: dict[str, Any] = {IMPORTED: count, "analysis": settings.analysis.model_dump(mode="json")}
    if settings.analysis.analyst == "llm":
        config["llm"] = {"model": settings.llm.model, "base_url": settings.llm.base_url}
    told.update(f"], {json.dumps(config, sort_keys=True)}, {settings.seed}]".encode())
    cycle = Cycle(f"{source}-{told.hexdigest()[:12]}", source, agent, settings.seed, config, CycleState.RUNNING, at)
    save_cycle(session, cycle)
    return cycle


def _batches(
    steps: Iterator[Step], ledger: Ledger, kind: str, *, strict: bool
) -> Iterator[tuple[list[Trajectory], Resume | None]]:
    """Trajectories to store together, and where reading goes on after them; None for the last, as it ends there."""
    batch: list[Trajectory] = []
    size = 0
    for step in steps:
        if step.bad is not None:
            if strict:
                ledger.forget()
                raise step.bad
            ledger.leave_out(step.bad)
            _refuse_alien(ledger, kind, step)
        ledger.counts.good += step.good
        ledger.counts.passed += step.passed
        batch += step.trajectories
        size += step.size
        if step.place is not None and (len(batch) >= BATCH or size >= BATCH_BYTES):
            yield batch, step.place
            batch, size = [], 0
    yield batch, None


def _store(opened: Session, ledger: Ledger, batch: list[Trajectory], labels: Labels, at: datetime) -> None:
    counts = ledger.counts
    if not batch:
        return
    saved = save_trajectories(opened, batch)
    replaced = len(saved.replaced) + _let_source_judge(opened, batch, labels, at)
    counts.added += saved.added
    counts.replaced += replaced
    counts.known += len(batch) - saved.added - replaced
    for one in batch:
        counts.outcomes[one.outcome] = counts.outcomes.get(one.outcome, 0) + 1
    ledger.last = batch[-1].id


def _let_source_judge(session: Session, offered: list[Trajectory], labels: Labels, at: datetime) -> int:
    """Let outcomes that come later than the rules' or the judge's count instead; returns how many changed.

    Their verdicts are taken back, so that the outcome is the source's from then on.
    """
    told = {one.id: one for one in offered if one.outcome is not Outcome.UNKNOWN}
    changed = 0
    for key in sorted(talked_of(session, list(told))):
        stored = get_trajectory(session, key)
        if standing_of(session, stored, labels).by not in (By.RULES, By.JUDGE):
            continue
        if not rejudge_trajectory(session, replace(stored, outcome=told[key].outcome, reward=told[key].reward)):
            continue  # evidence of a cycle refers to it
        changed += (stored.outcome, stored.reward) != (told[key].outcome, told[key].reward)
        said = said_of(session, key)
        for former in (last_of(RULES, said), last_of(JUDGE, said)):
            if former is not None:
                save_feedback(session, verdict(key, former.who, SOURCE_JUDGES, at))
    return changed


def _refuse_alien(ledger: Ledger, kind: str, step: Step) -> None:
    """Stop early where a file is none of its format: there is no use in keeping all of it aside."""
    counts = ledger.counts
    if step.bad is None or counts.bad < GIVE_UP or counts.good or counts.passed:
        return
    path = step.bad.path
    better = told_by(beginning(path))
    others = better if better not in (None, kind) else "|".join(FORMATS)
    raise UnknownFormat(
        f"{path}: none of its first {counts.bad} records is of the format {kind}; the first: {counts.told[0]}",
        hint=f"traced import {path} --format {others}",
    )


def _refuse_nothing(counts: Counts, path: Path, kind: str, ledger: Ledger) -> None:
    if counts.outcomes:
        return
    named = f"--format {'|'.join(FORMATS)}"
    if counts.bad:
        cause = f"all of its {counts.bad} records that could be one are bad; the first: {counts.told[0]}"
        raise NothingFound(
            f"{path}: no trajectory of the format {kind} was found; {cause}", hint=f"{named}, or see {ledger.bad_file}"
        )
    passed = f"; {counts.passed} records hold no call of a model" if counts.passed else "; it holds no records"
    raise NothingFound(f"{path}: no trajectory of the format {kind} was found{passed}", hint=named)


def _is_there(store: Engine, trajectory_id: str) -> bool:
    with reading(store) as opened:
        return is_stored(opened, trajectory_id)


def _named(store: Engine) -> str:
    return hashlib.sha256(store.url.render_as_string(hide_password=True).encode()).hexdigest()[:12]
