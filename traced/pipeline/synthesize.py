"""The synthesis stage: write candidate environments for a capability, by the builtin synthesizer or a language model.

Attempt k of a model is place k % (candidates + repairs) of start k // (candidates + repairs). The candidates of a start
are requested together and judged one by one; then the best of them is repaired, each repair starting from the previous
file and its admission report.

Invariants: an attempt is written once, and its seed is the settings' seed plus its number. No code that a model wrote
runs in this stage: it is parsed, and refused at once if parsing suffices. Every answer, its report and the file it
repairs are stored, so an interrupted stage asks the same questions and finds their replies. Only the cycle's own
episodes are shown to a model; production contributes counts of request kinds to the builtin synthesizer.
"""

import asyncio
import dataclasses
import re
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass
from functools import partial

from agents.analyst.builtin import CANDIDATES, label_runs
from agents.errors import BudgetSpent, ModelDenied, ModelError, ModelRefused, OutOfForm, SynthesisError
from agents.llm.budget import Budget
from agents.llm.endpoint import prompt_tokens
from agents.llm.model import Model
from agents.llm.question import ChatMessage, Purpose, Question, Usage
from agents.synthesizer.builtin import MINIMUM_TEMPLATES, WorldData, majority
from agents.synthesizer.builtin import synthesize as write_environment
from agents.synthesizer.llm.answer import extract_file, holds_environment
from agents.synthesizer.llm.prompt import (
    RefusedFile,
    Rules,
    example_pair,
    frequent_policies,
    repair_messages,
    request_messages,
    target_tools,
)
from agents.synthesizer.llm.target_block import (
    Target,
    block_bytes,
    report_of_file,
    stands_on_world,
    with_target,
    without_target,
)
from sandbox.admission import refusals
from sandbox.admission.report import as_text, requirements
from sandbox.admission.static_analysis import MAX_BYTES, inspect_source
from sandbox.admission.world import omitted_tools, world_of
from sandbox.hashing import environment_hash
from store.records import EnvironmentRecord
from store.repositories.capabilities import get_capability, list_findings, list_labels
from store.repositories.environments import list_environments, save_admission, save_environment
from store.repositories.evidence import INCUMBENT
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.text import sanitize_line
from store.types import AdmissionReport, Check, Label, Outcome, Trajectory, Verdict, opening_messages
from traced.config.cycle_sections import SynthesisSection
from traced.core.errors import CapabilityError
from traced.inference.routing_prompt import opening_text
from traced.llm.connection import StoreLedger
from traced.llm.connection import model as connected
from traced.pipeline.admit import episode_limits, stored_report, thresholds, usable_world
from traced.pipeline.attribution import replay_model
from traced.pipeline.collect import collected, more_conversations
from traced.pipeline.context import Context, RunningStage
from traced.pipeline.episodes import BASE
from traced.pipeline.incumbent import incumbent_of
from traced.pipeline.inheritance import inherited_version, take_over_environment
from traced.pipeline.routers import analyzed
from traced.pipeline.world import find_world

BUILTIN, LLM = "builtin", "llm"
# Above 0, because several candidates must differ, and a repair must differ from one that failed before.
TEMPERATURE = 0.7
# Tokens of a report on a refused file, and of the marks around the conversations.
REPORT_TOKENS = 5_000
UNLIMITED = 10**9
TITLE_BYTES = 1_024  # reserved for a file's first line
REFUSAL = 1_000  # characters kept of an answer without a file
_TITLE = re.compile(r"\A(?:# Written by [^\n]*\n)+")


async def synthesize(context: Context, capability: str, attempt: int) -> str:
    """Return the hash of the environment of this attempt (from 0).

    Raises:
        CapabilityError: No environment can be written, or starts or budget are used up.
    """
    title = f"Write an environment for {capability}"
    with context.stage("synthesize", title, capability) as stage:
        record = await _environment(context, capability, attempt, stage)
        # Present if parsing alone was enough to refuse the file.
        report = stored_report(context, record.hash)
        refusal_text = f", refused by {', '.join(refusals(report))}" if report and not report.admitted else ""
        stage.detail |= {"environment": record.hash, "attempt": attempt, "synthesizer": record.synthesizer}
        stage.figure = f"env:{record.hash[:12]}{_world_text(context, record)}{refusal_text}"
    return record.hash


async def _environment(context: Context, capability: str, attempt: int, stage: RunningStage) -> EnvironmentRecord:
    if version := inherited_version(context, capability):
        # The environment of the predecessor has the place of the first attempt.
        if not attempt:
            return take_over_environment(context, version)
        attempt -= 1
    record = stored_attempt(context, capability, attempt)
    if record is not None:
        return record
    limit = context.settings.synthesis.max_environments
    if context.settings.model.predecessor and attempt >= limit:
        # The graph allows one more, for an environment that is taken over.
        raise CapabilityError(f"none of {limit} candidate environments was admitted")
    if context.settings.synthesis.synthesizer == BUILTIN:
        return await _write_builtin(context, capability, attempt)
    return await write(context, capability, attempt, stage)


def _world_text(context: Context, record: EnvironmentRecord) -> str:
    """Return on which world of a recorded target a builtin environment stands, if the target has one."""
    if record.synthesizer != BUILTIN or not context.target.is_recorded or find_world(context) is None:
        return ""
    digest = world_of(record.source_code)
    if digest is None:
        return f", without the world, which carries fewer than {MINIMUM_TEMPLATES} scenarios"
    omitted = ", ".join(sorted(omitted_tools(record.source_code)))
    return f" on world:{digest[:12]}{f' without {omitted}' if omitted else ''}"


def written_environments(context: Context, capability: str, synthesizer: str | None = None) -> list[EnvironmentRecord]:
    """Return the environments that this cycle wrote for the capability, oldest first."""
    with context.read_session() as session:
        records = list_environments(session, context.cycle_id)
    matching = [
        record for record in records if record.capability == capability and synthesizer in (None, record.synthesizer)
    ]
    return sorted(matching, key=lambda record: record.seed) if synthesizer else matching


def stored_attempt(context: Context, capability: str, attempt: int) -> EnvironmentRecord | None:
    """Return the stored environment of this attempt, or None."""
    records = written_environments(context, capability, context.settings.synthesis.synthesizer)
    return next((record for record in records if record.seed == context.settings.seed + attempt), None)


async def _write_builtin(context: Context, capability: str, attempt: int) -> EnvironmentRecord:
    seed = context.settings.seed + attempt
    with context.read_session() as session:
        capability_row = get_capability(session, context.cycle_id, capability)
        # All capabilities' labels: a success that lacked something else is not a good example.
        labels = list_labels(session, context.cycle_id)
        unretained = {row.capability for row in list_findings(session, context.cycle_id, retained=False)}
        unretained -= {capability}  # it may be one of the predecessor
        labelled_trajectories = analyzed(session, context.cycle_id)
    episodes = collected(context)
    episode_ids = {episode.id for episode in episodes}
    openings = lacking_openings(
        [trajectory for trajectory in labelled_trajectories if trajectory.id not in episode_ids], labels, capability
    )
    labels = [label for label in labels if label.trajectory_id in episode_ids]
    replays = solved_replays(context, capability, episodes, labels)
    labels += await asyncio.to_thread(
        labels_of_replays, replays, episodes, capability, {row.capability for row in labels}
    )
    trajectories, labels = by_order([*episodes, *replays], labels)
    target_world = await usable_world(context)
    try:
        # In a thread: the synthesizer computes for seconds.
        source = await asyncio.to_thread(
            write_environment,
            capability_row,
            trajectories,
            labels,
            seed=seed,
            extra_openings=openings,
            target_world=target_world,
            unretained=unretained,
        )
    except SynthesisError as error:
        raise CapabilityError(str(error), hint=more_conversations(context.target)) from error
    record = EnvironmentRecord(
        environment_hash(source), source, context.cycle_id, capability, seed, BUILTIN, context.now()
    )
    report = stored_report(context, record.hash)
    if report is not None and not report.admitted:
        # Another seed may select the same templates; its file has no report of its own.
        raise CapabilityError(
            f"{capability}: the builtin synthesizer can only repeat env:{record.hash[:12]}, which was refused by "
            f"{', '.join(refusals(report))}",
            hint=f"{more_conversations(context.target)}; or traced synthesize --synthesizer llm",
        )
    with context.write_session() as session:
        save_environment(session, record)
    return record


def lacking_openings(trajectories: Sequence[Trajectory], labels: Sequence[Label], capability: str) -> list[str]:
    """Return the first user messages of the failures that lacked the capability according to most of the runs."""
    verdicts = majority(labels, capability)
    return [
        opening_text(opening_messages(trajectory.messages))
        for trajectory in trajectories
        if trajectory.outcome is Outcome.FAILURE and verdicts.get(trajectory.id) is Verdict.LACKING
    ]


def solved_replays(
    context: Context, capability: str, episodes: Sequence[Trajectory], labels: Sequence[Label]
) -> list[Trajectory]:
    """Return the first solved replay of each task of a failure that lacked the capability.

    The attribution has played them (none for a recorded target). So the states in which the live system fails become
    scenarios. A replay of the live system comes first, one of the base model last.
    """
    verdicts = majority(labels, capability)
    tasks = {
        episode.task_id
        for episode in episodes
        if episode.outcome is Outcome.FAILURE and verdicts.get(episode.id) is Verdict.LACKING
    }
    incumbent = incumbent_of(context)
    if incumbent.is_base:
        return []
    replays: dict[str, Trajectory] = {}
    with context.read_session() as session:
        for model in (INCUMBENT, *incumbent.live, BASE):
            criteria = TrajectoryFilter(Outcome.SUCCESS, model=replay_model(model), cycle_id=context.cycle_id)
            for replay in list_trajectories(session, criteria):
                if replay.task_id in tasks:
                    replays.setdefault(replay.task_id, replay)
    return list(replays.values())


def labels_of_replays(
    replays: Sequence[Trajectory], episodes: Sequence[Trajectory], capability: str, names: Collection[str]
) -> list[Label]:
    """Return the builtin analyst's labels of replays for these capabilities, mined beside the cycle's episodes.

    A solved replay of a capability that it has no detector for counts as an example.
    """
    if not replays:
        return []
    known_capabilities = [candidate for candidate in CANDIDATES if candidate.name in {*names, capability}]
    ids = {replay.id for replay in replays}
    rows = label_runs([*episodes, *replays], known_capabilities, runs=[0], seed=0)
    labels = [row for row in rows if row.trajectory_id in ids]
    if capability not in {candidate.name for candidate in known_capabilities}:
        labels += [Label(replay.id, capability, 0, Verdict.PRESENT) for replay in replays]
    return labels


def by_order(trajectories: Sequence[Trajectory], labels: Sequence[Label]) -> tuple[list[Trajectory], list[Label]]:
    """Return the same trajectories and labels under ids that number the trajectories."""
    names = {trajectory.id: f"{place:06d}" for place, trajectory in enumerate(trajectories)}
    return (
        [dataclasses.replace(trajectory, id=names[trajectory.id]) for trajectory in trajectories],
        [dataclasses.replace(label, trajectory_id=names[label.trajectory_id]) for label in labels],
    )


@dataclass(frozen=True)
class JudgedAttempt:
    """An attempt of a start and its admission report."""

    record: EnvironmentRecord
    report: AdmissionReport | None

    @property
    def passed(self) -> int:
        """Return the number of checks it passed."""
        return sum(check.passed for check in self.report.checks) if self.report else 0

    @property
    def refusal(self) -> RefusedFile:
        """Return the attempt as it is shown to the model."""
        source = self.record.source_code
        text = report_of_file(as_text(self.report), source) if self.report else "No admission has checked it."
        return RefusedFile(without_target(source), text)

    @property
    def refused_by(self) -> str:
        """Return the names of the failed checks."""
        names = [check.name for check in self.report.checks if not check.passed] if self.report else []
        return ", ".join(names) or "nothing yet"


@dataclass(frozen=True)
class SynthesisRequest:
    """The model to ask, for which capability of the target, with the dialogue that asks for a first file."""

    context: Context
    model: Model
    purpose: Purpose
    dialogue: tuple[ChatMessage, ...]
    target: Target


@dataclass(frozen=True)
class FirstDialogue:
    """The dialogue that asks for a first file, what its file stands on, and the characters that are left out of it."""

    messages: tuple[ChatMessage, ...]
    target: Target
    omitted: int


async def write(context: Context, capability: str, attempt: int, stage: RunningStage) -> EnvironmentRecord:
    """Return the environment of this attempt; a start's first candidate is written together with its others."""
    limits = context.settings.synthesis
    if attempt >= limits.max_environments:
        raise CapabilityError(
            f"{capability}: none of the model's environments was admitted "
            f"({limits.starts} starts, {limits.repairs} repairs each)",
            hint="raise synthesis.starts, then: traced synthesize",
        )
    place = attempt % limits.environments_per_start
    first = attempt - place
    purpose = Purpose(context.cycle_id, "synthesize", capability)
    ledger = StoreLedger(context.store, context.now)
    budget = Budget(limits.max_tokens, limits.max_cost, 60 * limits.max_minutes)
    try:
        async with connected(context.settings, ledger, budget) as model:
            context_tokens = model.endpoint.context_tokens
            target_world = await usable_world(context)
            if target_world is not None and not target_world.has_records:
                target_world = None  # a file could draw nothing from it
            first_dialogue = await asyncio.to_thread(_first_dialogue, context, capability, context_tokens, target_world)
            dialogue = first_dialogue.messages
            if first_dialogue.omitted:
                stage.detail |= {"characters not shown": first_dialogue.omitted, "context": context_tokens}
                context.progress.note(
                    f"The context of {context_tokens} tokens is too small: {first_dialogue.omitted} characters "
                    f"of the conversations that show {capability} are not in the prompt."
                )
            request = SynthesisRequest(context, model, purpose, dialogue, first_dialogue.target)
            if place < limits.candidates:
                return await _write_candidates(request, range(attempt, first + limits.candidates), stage)
            chain = _chain(context, capability, first, attempt)
            return await _write_attempt(request, attempt, _repair_dialogue(dialogue, chain), _last_file(chain).record)
    except BudgetSpent as error:
        raise CapabilityError(
            error.message, hint=f"raise {_exhausted_limits(limits, ledger.usage(purpose))}"
        ) from error


def _exhausted_limits(limits: SynthesisSection, cost: Usage) -> str:
    """Return the settings whose limit is reached."""
    bounds = {
        "synthesis.max_tokens": Budget(tokens=limits.max_tokens),
        "synthesis.max_cost": Budget(cost=limits.max_cost),
        "synthesis.max_minutes": Budget(seconds=60 * limits.max_minutes),
    }
    return ", ".join(name for name, bound in bounds.items() if bound.exhausted_limits(cost))


async def _write_candidates(request: SynthesisRequest, numbers: range, stage: RunningStage) -> EnvironmentRecord:
    """Return the first of these candidates; missing ones are written concurrently.

    A candidate that fails while the first one succeeds is written again at its own attempt.
    """
    context, capability = request.context, request.purpose.capability
    missing = [number for number in numbers if stored_attempt(context, capability, number) is None]
    if len(missing) > 1:
        context.progress.start(stage.key, f"Write {len(missing)} environments for {capability}", len(missing))

    async def write_candidate(number: int) -> EnvironmentRecord:
        record = await _write_attempt(request, number, request.dialogue, None)
        stage.advance()
        return record

    # All are awaited even if one fails: every paid reply is stored before an error is raised.
    results = await asyncio.gather(*map(write_candidate, missing), return_exceptions=True)
    errors = [error for error in results if isinstance(error, BaseException)]
    unforeseen = [error for error in errors if not isinstance(error, ModelError)]
    if unforeseen:
        raise unforeseen[0]
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


async def _write_attempt(
    request: SynthesisRequest, attempt: int, dialogue: tuple[ChatMessage, ...], base: EnvironmentRecord | None
) -> EnvironmentRecord:
    """Ask for one file and store it, with a report if parsing is enough to refuse it."""
    context, capability = request.context, request.purpose.capability
    tokens = context.settings.synthesis.file_tokens
    try:
        answer = await request.model.write(Question(request.purpose, dialogue, attempt, TEMPERATURE, tokens))
    except ModelDenied:
        raise
    except (OutOfForm, ModelRefused) as error:
        if isinstance(error, ModelRefused) and base is None:
            # A first question cannot be shortened; a repair can give way to a fresh start.
            raise
        answer = f"# {sanitize_line(error.message.replace(request.model.endpoint.name, 'the model'), REFUSAL)}"
    file = f"{_title(context, capability, attempt, base)}\n{_TITLE.sub('', extract_file(answer))}"
    source = with_target(file, request.target)
    seed, at = context.settings.seed + attempt, context.now()
    repairs = base.hash if base else None
    record = EnvironmentRecord(
        environment_hash(source), source, context.cycle_id, capability, seed, LLM, at, repairs=repairs
    )
    checks = await asyncio.to_thread(
        static_checks, source, request.target, has_user_model=bool(context.settings.target.user.model)
    )
    with context.write_session() as session:
        save_environment(session, record)
        if not all(check.passed for check in checks):
            report = AdmissionReport(record.hash, False, checks)
            save_admission(session, report, cycle_id=context.cycle_id, at=at)
    return record


def file_bytes(target: Target) -> int:
    """Return the most bytes of a model's file: those of admission without the first line and what is put above it."""
    return MAX_BYTES - TITLE_BYTES - block_bytes(target)


def static_checks(source: str, target: Target, *, has_user_model: bool) -> list[Check]:
    """Return the checks of a model's file that need no container: its source, and whether it stands on the world."""
    passed, evidence = inspect_source(source, has_user_model=has_user_model)
    checks = [Check("source", passed, evidence, 0.0)]
    if passed and target.world is not None:
        stands = stands_on_world(source)
        digest = target.world.digest
        checks.append(Check("world", stands, {"world": digest if stands else None, "target_world": digest}, 0.0))
    return checks


def _title(context: Context, capability: str, attempt: int, base: EnvironmentRecord | None) -> str:
    """Return a file's first line: the model and the attempt."""
    limits = context.settings.synthesis
    start, place = divmod(attempt, limits.environments_per_start)
    position = f"repair {place - limits.candidates + 1}" if base else f"candidate {place + 1}"
    origin = f" of env:{base.hash[:12]}" if base else ""
    author = f"{sanitize_line(context.settings.llm.model)} for {sanitize_line(capability)}"
    return f"# Written by {author}: start {start + 1}, {position}{origin}."


def _first_dialogue(
    context: Context, capability: str, context_tokens: int, target_world: WorldData | None
) -> FirstDialogue:
    """Return the dialogue that requests a first file.

    Args:
        context_tokens: Of the model, for prompt and answer; 0 if unknown, and then nothing is left out.
    """
    with context.read_session() as session:
        capability_row = get_capability(session, context.cycle_id, capability)
        labels = list_labels(session, context.cycle_id)
    episodes = collected(context)
    episode_ids = {episode.id for episode in episodes}
    trajectories, labels = by_order(episodes, [label for label in labels if label.trajectory_id in episode_ids])
    limits = context.settings.synthesis
    target = Target(frequent_policies(trajectories), target_tools(trajectories), target_world)
    rules = Rules(
        requirements(thresholds(context.settings)),
        file_bytes(target),
        bool(context.settings.target.user.model),
        astuple(episode_limits(context.settings)),
        limits.file_tokens,
    )
    request = partial(request_messages, capability_row, trajectories, labels, rules, target_world=target_world)
    available = UNLIMITED
    if context_tokens:
        # A repair sends the dialogue, the refused file and the report on it, and gets another file.
        reserved = 2 * limits.file_tokens + REPORT_TOKENS
        available = context_tokens - prompt_tokens(request()) - reserved
    pair = example_pair(trajectories, labels, capability, max(available, 0))
    return FirstDialogue(request(pair=pair), target, pair.omitted)


def _chain(context: Context, capability: str, first: int, attempt: int) -> list[JudgedAttempt]:
    """Return the best candidate of this start, then its repairs before this attempt, oldest first."""
    records = {record.seed - context.settings.seed: record for record in written_environments(context, capability, LLM)}
    records_in_order = [records[number] for number in range(first, attempt) if number in records]
    attempts = [JudgedAttempt(record, stored_report(context, record.hash)) for record in records_in_order]
    candidates = context.settings.synthesis.candidates
    best = max(attempts[:candidates], key=lambda attempt: attempt.passed)  # the first of equals
    return [best, *attempts[candidates:]]


def _last_file(chain: Sequence[JudgedAttempt]) -> JudgedAttempt:
    """Return the last attempt that holds a file, else the last attempt."""
    return next((attempt for attempt in reversed(chain) if holds_environment(attempt.record.source_code)), chain[-1])


def _repair_dialogue(dialogue: Sequence[ChatMessage], chain: Sequence[JudgedAttempt]) -> tuple[ChatMessage, ...]:
    base, last = _last_file(chain), chain[-1]
    earlier_failures = [attempt.refused_by for attempt in chain if attempt is not last]
    return repair_messages(dialogue, base.refusal, None if base is last else last.refusal, earlier_failures)
