"""Import trajectories from files into the store: `traced import`.

An import is stored batch by batch, so memory does not grow with the file, and a killed import resumes after its last
batch. A trajectory that is imported twice is stored once, and of a conversation that its source names one version
counts (``traced.ingest.versions``). Bad records are written to a file with their reasons; a strict import stores
nothing if there is a bad record. Errors name file, record and line; batches that were stored before an error stay. Not
covered: a file that changes while it is read.
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

from store.content import digest
from store.database import read_session, write_session
from store.records import Cycle, CycleState, Event
from store.repositories.cycles import save_cycle
from store.repositories.events import save_event
from store.repositories.serving import router_trajectories, save_feedback
from store.repositories.trajectories import (
    TrajectoryFilter,
    count_reported,
    get_trajectory,
    is_stored,
    iterate_ids,
    save_trajectories,
    update_context,
    update_outcome,
)
from store.types import Outcome, Trajectory
from traced.config.settings import Settings
from traced.ingest.agent_context import AgentContext, read_agent_context
from traced.ingest.customers import customer_hash
from traced.ingest.import_ledger import FOLDER, Counts, Ledger
from traced.ingest.importers.errors import NoTrajectories, UnknownFormat
from traced.ingest.importers.formats import FORMATS, detect_format, format_of
from traced.ingest.importers.json_file import read_head
from traced.ingest.importers.reader import CONTENT_DIGITS, ImportJob, NamedBy, ResumePoint, Step
from traced.ingest.redaction import Redactor
from traced.ingest.unredacted import RedactionCheck
from traced.ingest.versions import ImportedIds, ImportedTrajectory, SupersededCounts, supersede, without_shorter
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
from traced.targets.conversation_target import ConversationTarget, conversation_targets

IMPORTED = "imported"
# How imported conversations get a target of their own, from which environments and adapters can be made.
OWN_TARGET = (
    "traced init --agent NAME, then import the files again (with a further target: traced import --target NAME)"
)
# A transaction is committed at this number of trajectories or of bytes.
BATCH = 500
BATCH_BYTES = 8 << 20
SUPERSEDED_BY_SOURCE = Decision(Outcome.UNKNOWN, reason="its source judged it later")
# This number of bad records before the first good one means that the file has another format.
MAX_LEADING_BAD_RECORDS = 100


@dataclass(frozen=True)
class ImportRequest:
    """What to import and how.

    Args:
        path: The file.
        kind: The name of its format; None to detect it.
        agent: The name of the recorded agent.
        score: The name of the only score that decides the outcome; None for all scores.
        strict: Whether one bad record stops the import before anything is stored.
        from_start: Whether to discard the progress of an unfinished import of the file.
        tools: A file with the tool definitions of the agent, ``system`` with its system prompt and ``policy`` with its
            policy, for what the traces lack (``traced.ingest.agent_context``).
        target: The name of the target that the conversations belong to; "" for that of the settings.
    """

    path: Path
    kind: str | None = None
    agent: str = "recorded"
    score: str | None = None
    strict: bool = False
    from_start: bool = False
    tools: Path | None = None
    system: Path | None = None
    policy: Path | None = None
    target: str = ""


@dataclass(frozen=True)
class ImportResult:
    """What an import stored and left out; it is printed as JSON.

    ``cycle`` is the cycle of all imports from this source and agent; None for a recorded target. ``added``, ``known``
    (stored before) and ``replaced`` (stored before, with another outcome now) count trajectories; ``judged`` counts
    those that got their outcome from the rules. ``passed`` counts valid records without a model call, ``bad`` the
    invalid ones; ``skipped`` has the messages of the first bad records. ``completed`` counts the known ones that got
    other tools or prompts, ``in_use`` those that did not because a cycle has used them. ``unread`` counts those that
    state an outcome in a form that was not understood, and ``unread_values`` has the first few such fields and values
    with their counts. ``has_outcomes`` says whether any stored trajectory of the source is a success or a failure.
    ``shorter`` counts those that were not stored because a longer version of their conversation continues them.
    ``superseded`` counts stored ones that were deleted because the import brought another version of their
    conversation, ``superseded_in_use`` those that stay for the evidence of a cycle, and that no later analysis uses.
    ``unredacted`` counts stored conversations that were imported before the settings of redaction.
    """

    cycle: str | None
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
    judged: int = 0
    completed: int = 0
    in_use: int = 0
    unread: int = 0
    unread_values: dict[str, int] = field(default_factory=dict)
    has_outcomes: bool = True
    shorter: int = 0
    superseded: int = 0
    superseded_in_use: int = 0
    unredacted: int = 0


def import_file(
    store: Engine,
    settings: Settings,
    request: ImportRequest,
    *,
    at: datetime,
    on_batch: Callable[[Counts], None] = lambda counts: None,
) -> ImportResult:
    """Store the trajectories of a file, or resume an unfinished import of it.

    Args:
        at: The time of the import.
        on_batch: Called with the counts so far after each stored batch.

    Raises:
        ImportFailed: The file cannot be imported; see ``traced.ingest.importers.errors``.
    """
    path = request.path.absolute()
    format_name = request.kind or format_of(path)
    serving = settings.serving
    redaction = [serving.redact, serving.redact_fields]
    target = conversation_targets(settings).configured(request.target)
    owner = target if target.is_recorded else None
    customers = customer_hash(store)
    redactor = Redactor(serving.redact, serving.redact_fields, customers.redaction_key())
    agent = read_agent_context(redactor, tools=request.tools, system=request.system, policy=request.policy)
    options = {
        "format": format_name,
        "agent": request.agent,
        "score": request.score,
        "redact": redaction,
        "store": _store_key(store),
        **({"target": owner.name} if owner else {}),
        **({"context": agent.digest} if agent.digest else {}),
    }
    rules = read_rules(Path(settings.outcomes.rules)) if settings.outcomes.rules else None
    # An unreadable file raises an error here, before the ledger creates files.
    read_head(path)
    source = owner.name if owner else format_name
    with Ledger(settings.data_dir, path, options) as ledger:
        # If the store was replaced since then, the trajectories that the ledger counts as stored are missing.
        if request.from_start or (ledger.last_id and not _trajectory_exists(store, ledger.last_id)):
            ledger.forget()
        resumed = ledger.resume_point is not None
        job = ImportJob(
            path=path,
            agent=request.agent,
            scratch=ledger.scratch,
            redactor=redactor,
            labels=Labels(serving.success_labels, serving.failure_labels),
            score=request.score,
            strict=request.strict,
            redacts_fields=bool(serving.redact_fields),
            target=target,
            customers=customers,
        )
        try:
            superseded = _store_file(
                store, job, ledger, format_name, source=source, agent=agent, owner=owner, at=at, on_batch=on_batch
            )
        except UnknownFormat:
            ledger.finish()
            raise
        ledger.finish()
        counts = ledger.counts
        _require_trajectories(counts, path, format_name, ledger)
    with write_session(store) as session:
        # A recorded target has cycles of its own; ``traced analyze`` begins one.
        cycle = None if owner else cycle_of_imports(session, settings, format_name, request.agent, at)
        cycle_id = cycle.id if cycle else None
        if counts.added or counts.replaced:
            detail = {"trajectories": counts.added, "judged anew": counts.replaced, "left out": counts.bad}
            superseded_count = superseded.deleted + superseded.in_use
            detail |= {"superseded": superseded_count} if superseded_count else {}
            save_event(session, Event(at, "import", source, cycle_id, detail))
    bad_file = ledger.bad_file if counts.bad else None
    totals = (counts.added, counts.known, counts.replaced, counts.passed, counts.bad)
    judged_count = 0
    if rules is not None:
        report = apply_rules(store, rules, source, job.labels, include_judged=False, limit=None, at=at)
        judged_count = sum(report.judged.values())
    check = RedactionCheck(settings.data_dir / FOLDER, _store_key(store), redactor, redaction)
    unredacted = check.count(store, source, request.agent)
    with read_session(store) as session:
        has_outcomes = any(count for outcome, count in count_reported(session, source).items() if outcome.is_judged)
    return ImportResult(
        cycle_id,
        source,
        counts.outcomes,
        *totals,
        bad_file,
        resumed,
        counts.told,
        judged=judged_count,
        completed=counts.completed,
        in_use=counts.in_use,
        unread=counts.unread,
        unread_values=counts.unread_values,
        has_outcomes=has_outcomes,
        unredacted=unredacted,
        shorter=counts.shorter,
        superseded=superseded.deleted,
        superseded_in_use=superseded.in_use,
    )


def _store_file(
    store: Engine,
    job: ImportJob,
    ledger: Ledger,
    format_name: str,
    *,
    source: str,
    agent: AgentContext,
    owner: ConversationTarget | None,
    at: datetime,
    on_batch: Callable[[Counts], None],
) -> SupersededCounts:
    with ImportedIds(ledger.ids_file) as ids:
        steps = FORMATS[format_name](job, ledger.resume_point)
        for batch, resume_point in _batches(steps, ledger, format_name, strict=job.strict):
            own_batch = [_of_agent(row, agent, owner) for row in batch]
            with write_session(store) as session:
                current = without_shorter(session, source, job.agent, own_batch)
                trajectories = [row.trajectory for row in current]
                _store_batch(session, ledger, trajectories, job.labels, at, has_context=bool(agent.digest))
            ids.add(current)
            ledger.counts.shorter += len(own_batch) - len(current)
            # The ledger is written after the store's commit. If the process is killed in between, the batch is
            # stored again, which changes nothing.
            if resume_point is not None:
                ledger.commit(resume_point)
            on_batch(ledger.counts)
        return supersede(store, source, job.agent, ids, job.labels)


def _of_agent(row: ImportedTrajectory, agent: AgentContext, owner: ConversationTarget | None) -> ImportedTrajectory:
    """Return an imported trajectory with what it lacks, as one of a recorded target if there is an owner."""
    trajectory = agent.added_to(row.trajectory)
    if owner is not None:
        # Several targets may import the same file.
        key = digest(trajectory.id)
        if row.named_by is NamedBy.ID:
            key = digest(trajectory.id[:-CONTENT_DIGITS])[:CONTENT_DIGITS] + key[:CONTENT_DIGITS]
        trajectory = replace(trajectory, id=f"{owner.name}-{key[:32]}", source=owner.name)
    return replace(row, trajectory=trajectory)


def cycle_of_imports(session: Session, settings: Settings, source: str, agent: str, at: datetime) -> Cycle:
    """Store and return the cycle of all trajectories imported from ``source`` and ``agent`` under these settings.

    The cycle's id depends on the trajectories and the settings, so importing the same again gives the same cycle.
    """
    # The JSON of [ids, config, seed] is hashed piece by piece, because a list of all ids may not fit into memory.
    hasher, count = hashlib.sha256(b"[["), 0
    criteria = TrajectoryFilter(source=source, model=agent, split="")  # without superseded ones
    for count, trajectory_id in enumerate(iterate_ids(session, criteria), 1):
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
) -> Iterator[tuple[list[ImportedTrajectory], ResumePoint | None]]:
    """Yield the trajectories to store in one transaction with the resume point after them, None for the last batch."""
    batch: list[ImportedTrajectory] = []
    size = 0
    for step in steps:
        if step.bad is not None:
            if strict:
                ledger.forget()
                raise step.bad
            ledger.leave_out(step.bad)
            _reject_wrong_format(ledger, format_name, step)
        for text in step.unread:
            ledger.count_unread(text)
        ledger.counts.good += step.good
        ledger.counts.passed += step.passed
        batch += [ImportedTrajectory(trajectory, step.named_by) for trajectory in step.trajectories]
        size += step.size
        if step.resume_point is not None and (len(batch) >= BATCH or size >= BATCH_BYTES):
            yield batch, step.resume_point
            batch, size = [], 0
    yield batch, None


def _store_batch(
    session: Session, ledger: Ledger, batch: list[Trajectory], labels: Labels, at: datetime, *, has_context: bool
) -> None:
    counts = ledger.counts
    if not batch:
        return
    result = save_trajectories(session, batch)
    replaced_count = len(result.overwritten) + _apply_source_outcomes(session, batch, labels, at)
    if has_context:
        # Stored without it, or with an earlier one; what a cycle has used stays as it was.
        by_id = {trajectory.id: trajectory for trajectory in batch}
        unjudged = [key for key in result.overwritten if not by_id[key].outcome.is_judged]
        updated = [key for key in result.rejected if update_context(session, by_id[key])]
        counts.completed += len(updated) + len(unjudged)
        counts.in_use += len(result.rejected) - len(updated)
        replaced_count -= len(unjudged)
    counts.added += result.added
    counts.replaced += replaced_count
    counts.known += len(batch) - result.added - replaced_count
    for trajectory in batch:
        counts.outcomes[trajectory.outcome] = counts.outcomes.get(trajectory.outcome, 0) + 1
    ledger.last_id = batch[-1].id


def _apply_source_outcomes(session: Session, imported: list[Trajectory], labels: Labels, at: datetime) -> int:
    """Replace outcomes of the rules and the judge by those that the source states later; return how many changed."""
    by_id = {trajectory.id: trajectory for trajectory in imported if trajectory.outcome is not Outcome.UNKNOWN}
    changed = 0
    for trajectory_id in sorted(router_trajectories(session, list(by_id))):
        trajectory, current = by_id[trajectory_id], get_trajectory(session, trajectory_id)
        if effective_outcome(session, current, labels).source not in (OutcomeSource.RULES, OutcomeSource.JUDGE):
            continue
        # The store refuses the update if evidence of a cycle refers to the trajectory.
        if not update_outcome(session, replace(current, outcome=trajectory.outcome, reward=trajectory.reward)):
            continue
        changed += (current.outcome, current.reward) != (trajectory.outcome, trajectory.reward)
        # An "unknown" verdict revokes the earlier one, so that the outcome counts as the source's from now on.
        feedback = feedback_on(session, trajectory_id)
        for previous in (latest_verdict(RULES, feedback), latest_verdict(JUDGE, feedback)):
            if previous is not None:
                save_feedback(session, verdict(trajectory_id, previous.who, SUPERSEDED_BY_SOURCE, at))
    return changed


def _reject_wrong_format(ledger: Ledger, format_name: str, step: Step) -> None:
    """Raise UnknownFormat if the file seems to have another format, instead of recording each record as bad."""
    counts = ledger.counts
    if step.bad is None or counts.bad < MAX_LEADING_BAD_RECORDS or counts.good or counts.passed:
        return
    path = step.bad.path
    detected = detect_format(read_head(path))
    suggestion = detected if detected not in (None, format_name) else "|".join(FORMATS)
    raise UnknownFormat(
        f"{path}: none of the first {counts.bad} records is of the format {format_name}; the first: {counts.told[0]}",
        hint=f"traced import {path} --format {suggestion}",
    )


def _require_trajectories(counts: Counts, path: Path, format_name: str, ledger: Ledger) -> None:
    if counts.outcomes or counts.shorter:
        return
    hint = f"--format {'|'.join(FORMATS)}"
    if counts.bad:
        cause = f"all {counts.bad} records are bad; the first: {counts.told[0]}"
        raise NoTrajectories(
            f"{path}: no trajectory of the format {format_name}; {cause}",
            hint=f"{hint}, or see {ledger.bad_file}",
        )
    cause = f"{counts.passed} records hold no model call" if counts.passed else "the file holds no records"
    raise NoTrajectories(f"{path}: no trajectory of the format {format_name}; {cause}", hint=hint)


def _trajectory_exists(store: Engine, trajectory_id: str) -> bool:
    with read_session(store) as session:
        return is_stored(session, trajectory_id)


def _store_key(store: Engine) -> str:
    return hashlib.sha256(store.url.render_as_string(hide_password=True).encode()).hexdigest()[:12]
