"""Synthesize: write a candidate environment for a capability from the cycle's trajectories and labels.

Invariants: the synthesizers see trajectories under ids that depend on their order alone, so the same recordings give
the builtin one the same source in any cycle; an attempt's seed is the settings' seed plus its number, and an attempt
that is stored is not made again. Only the cycle's episodes, whose outcomes the target has verified, are lifted or
shown to a model (``stages.candidates``): of production the builtin one is told how failures that lacked the capability
opened, which weighs the kinds of request and is written nowhere. How it fails: ``CapabilityError`` when no environment
can be written, as where production alone has shown how the capability is exercised, or a model's budget is spent.

Environments that a language model writes: asked for, read, and mended with the report that refused them.

Attempt k is place k % (candidates + repairs) of start k // (candidates + repairs). The candidates of a start are asked
for at once and judged one after the other until one is admitted; then the best of them (most checks passed, the first
of several) is mended, each repair beginning with the file before it and the report on it. An answer without a file (a
refusal, one that was cut off, mere prose) is kept and refused like any other, and the next repair begins with the last
file that there is. So is what a server says that does not take a repair (it is too long, or filtered): a fresh start
is shorter.

Invariants: nothing that a model wrote runs here: it is parsed (``sandbox.admission.static_analysis``), and what that
refuses has its report at once, without a container. Every attempt has a file of its own (its first line names it), so
every answer, its report and what it mends are in the store; requests are built from what is stored alone, so that after
a stop the same requests find their replies. Prompts hold what agents saw in the cycle's own episodes, and nothing else
of those. How it fails: ``CapabilityError`` where starts or budget are used up; what keeps the model from answering at
all (``ModelError``) is raised as it is, and the cycle stops where it can be carried on.
"""

import asyncio
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from agents.errors import BudgetSpent, ModelDenied, ModelError, ModelRefused, OutOfForm, SynthesisError
from agents.llm.budget import Budget
from agents.llm.model import Model
from agents.llm.question import Purpose, Question, Said, Spent
from agents.synthesizer.builtin import majority
from agents.synthesizer.builtin import synthesize as write_environment
from agents.synthesizer.llm.answer import file_in, holds_environment
from agents.synthesizer.llm.prompt import Refused, Rules, asking, mending
from sandbox.admission import refusals
from sandbox.admission.report import asked, in_words
from sandbox.admission.static_analysis import MAX_BYTES, inspect_source
from sandbox.hashing import environment_hash
from store.records import EnvironmentRecord
from store.repositories.capabilities import get_capability, list_labels
from store.repositories.environments import list_environments, save_admission, save_environment
from store.text import line
from store.types import AdmissionReport, Check, Label, Outcome, Trajectory, Verdict, opening_messages
from traced.config.cycle_sections import SynthesisSection
from traced.core.errors import CapabilityError
from traced.inference.routing_prompt import opening_text
from traced.llm.connection import StoreLedger
from traced.llm.connection import model as connected
from traced.pipeline.admit import stored_report, thresholds
from traced.pipeline.collect import analyzed, collected
from traced.pipeline.context import Context, Shown

BUILTIN = "builtin"


async def synthesize(context: Context, capability: str, attempt: int) -> str:
    """The hash of the environment of this attempt (from 0)."""
    title = f"Write an environment for {capability}"
    with context.stage("synthesize", title, capability) as shown:
        found = stored_attempt(context, capability, attempt)
        if found is None and context.settings.synthesis.synthesizer == BUILTIN:
            found = await _write(context, capability, attempt)
        elif found is None:
            found = await write(context, capability, attempt, shown)
        report = stored_report(context, found.hash)  # reading it may have been enough
        refused = f", refused by {', '.join(refusals(report))}" if report and not report.admitted else ""
        shown.found = {"environment": found.hash, "attempt": attempt, "synthesizer": found.synthesizer}
        shown.figure = f"env:{found.hash[:12]}{refused}"
    return found.hash


def written(context: Context, capability: str, synthesizer: str | None = None) -> list[EnvironmentRecord]:
    """What this cycle wrote for the capability (with one synthesizer), oldest first."""
    with context.reading() as session:
        made = list_environments(session, context.cycle_id)
    own = [one for one in made if one.capability == capability and synthesizer in (None, one.synthesizer)]
    return sorted(own, key=lambda one: one.seed) if synthesizer else own


def stored_attempt(context: Context, capability: str, attempt: int) -> EnvironmentRecord | None:
    """What this cycle's synthesizer wrote for the capability at this attempt, None if it has not."""
    made = written(context, capability, context.settings.synthesis.synthesizer)
    return next((one for one in made if one.seed == context.settings.seed + attempt), None)


async def _write(context: Context, capability: str, attempt: int) -> EnvironmentRecord:
    seed = context.settings.seed + attempt
    with context.reading() as session:
        meant = get_capability(session, context.cycle_id, capability)
        labels = list_labels(session, context.cycle_id)  # of all: a success that lacked something else is no example
        everything = analyzed(session, context.cycle_id)
    episodes = collected(context)
    own = {episode.id for episode in episodes}
    asked = lacking_openings([one for one in everything if one.id not in own], labels, capability)
    trajectories, labels = by_order(episodes, [label for label in labels if label.trajectory_id in own])
    try:
        source = await asyncio.to_thread(write_environment, meant, trajectories, labels, seed=seed, asked=asked)
    except SynthesisError as error:
        raise CapabilityError(str(error)) from error
    record = EnvironmentRecord(
        environment_hash(source), source, context.cycle_id, capability, seed, BUILTIN, context.now()
    )
    with context.writing() as session:
        save_environment(session, record)
    return record


def lacking_openings(trajectories: Sequence[Trajectory], labels: Sequence[Label], capability: str) -> list[str]:
    """What the user said first in those of the failures that lacked the capability, by most of the runs."""
    verdicts = majority(labels, capability)
    return [
        opening_text(opening_messages(one.messages))
        for one in trajectories
        if one.outcome is Outcome.FAILURE and verdicts.get(one.id) is Verdict.LACKING
    ]


def by_order(trajectories: Sequence[Trajectory], labels: Sequence[Label]) -> tuple[list[Trajectory], list[Label]]:
    """The same trajectories and labels under ids that number the trajectories."""
    names = {trajectory.id: f"{place:06d}" for place, trajectory in enumerate(trajectories)}
    return (
        [dataclasses.replace(trajectory, id=names[trajectory.id]) for trajectory in trajectories],
        [dataclasses.replace(label, trajectory_id=names[label.trajectory_id]) for label in labels],
    )


LLM = "llm"
TEMPERATURE = 0.7  # several candidates are to differ, and so is a repair that was tried in vain
REFUSAL = 1_000  # characters of what it said instead of a file
_TITLE = re.compile(r"\A(?:# Written by [^\n]*\n)+")


@dataclass(frozen=True)
class Judged:
    """An attempt of this start and the report on it."""

    record: EnvironmentRecord
    report: AdmissionReport | None

    @property
    def passed(self) -> int:
        """How many checks it passed."""
        return sum(check.passed for check in self.report.checks) if self.report else 0

    @property
    def refused(self) -> Refused:
        """As it goes back to the model."""
        told = in_words(self.report) if self.report else "It was not judged."
        return Refused(self.record.source_code, told)

    @property
    def refused_by(self) -> str:
        """The names of the checks that it failed."""
        names = [check.name for check in self.report.checks if not check.passed] if self.report else []
        return ", ".join(names) or "nothing yet"


@dataclass(frozen=True)
class Commission:
    """Who is asked, for which capability, and the dialogue that asks for a first file."""

    context: Context
    model: Model
    purpose: Purpose
    said: tuple[Said, ...]


async def write(context: Context, capability: str, attempt: int, shown: Shown) -> EnvironmentRecord:
    """The environment of this attempt, and with a start's first candidate the others of that start."""
    limits = context.settings.synthesis
    if attempt >= limits.most:
        raise CapabilityError(
            f"{capability}: a model began {limits.starts} times and mended each {limits.repairs} times, in vain",
            hint="raise synthesis.starts, then: traced synthesize",
        )
    place = attempt % limits.a_start
    first = attempt - place
    said = await asyncio.to_thread(_first_dialogue, context, capability)
    purpose = Purpose(context.cycle_id, "synthesize", capability)
    ledger = StoreLedger(context.store, context.now)
    budget = Budget(limits.max_tokens, limits.max_cost, 60 * limits.max_minutes)
    try:
        async with connected(context.settings, ledger, budget) as model:
            commission = Commission(context, model, purpose, said)
            if place < limits.candidates:
                return await _at_once(commission, range(attempt, first + limits.candidates), shown)
            chain = _chain(context, capability, first, attempt)
            return await _one(commission, attempt, _mending(said, chain), _base(chain).record)
    except BudgetSpent as error:
        raise CapabilityError(error.message, hint=f"raise {_used_up(limits, ledger.spent(purpose))}") from error


def _used_up(limits: SynthesisSection, spent: Spent) -> str:
    """The settings whose bound is reached."""
    bounds = {
        "synthesis.max_tokens": Budget(tokens=limits.max_tokens),
        "synthesis.max_cost": Budget(cost=limits.max_cost),
        "synthesis.max_minutes": Budget(seconds=60 * limits.max_minutes),
    }
    return ", ".join(name for name, bound in bounds.items() if bound.used_up(spent))


async def _at_once(commission: Commission, numbers: range, shown: Shown) -> EnvironmentRecord:
    """The first of these candidates; those that are not written yet are written beside it, as far as they come.

    One that fails while the first does not has its turn again when its own attempt comes.
    """
    context, capability = commission.context, commission.purpose.capability
    missing = [number for number in numbers if stored_attempt(context, capability, number) is None]
    if len(missing) > 1:
        context.progress.start(shown.key, f"Write {len(missing)} environments for {capability}", len(missing))

    async def one(number: int) -> EnvironmentRecord:
        record = await _one(commission, number, commission.said, None)
        shown.advance()
        return record

    made = await asyncio.gather(*map(one, missing), return_exceptions=True)
    errors = [error for error in made if isinstance(error, BaseException)]
    unforeseen = [error for error in errors if not isinstance(error, ModelError)]
    if unforeseen:
        raise unforeseen[0]
    if isinstance(made[0], BaseException):
        raise made[0]
    return made[0]


async def _one(
    commission: Commission, attempt: int, said: tuple[Said, ...], mended: EnvironmentRecord | None
) -> EnvironmentRecord:
    """Ask for one file and keep it, with its report where reading it is enough to refuse it."""
    context, capability = commission.context, commission.purpose.capability
    tokens = context.settings.synthesis.file_tokens
    try:
        answer = await commission.model.write(Question(commission.purpose, said, attempt, TEMPERATURE, tokens))
    except ModelDenied:
        raise
    except (OutOfForm, ModelRefused) as error:
        if isinstance(error, ModelRefused) and mended is None:
            raise  # no shorter question is left
        answer = f"# {line(error.message.replace(commission.model.endpoint.name, 'the model'), REFUSAL)}"
    source = f"{_title(context, capability, attempt, mended)}\n{_TITLE.sub('', file_in(answer))}"
    seed, at = context.settings.seed + attempt, context.now()
    repairs = mended.hash if mended else None
    record = EnvironmentRecord(
        environment_hash(source), source, context.cycle_id, capability, seed, LLM, at, repairs=repairs
    )
    passed, evidence = await asyncio.to_thread(inspect_source, source)
    with context.writing() as session:
        save_environment(session, record)
        if not passed:
            report = AdmissionReport(record.hash, False, [Check("source", False, evidence, 0.0)])
            save_admission(session, report, cycle_id=context.cycle_id, at=at)
    return record


def _title(context: Context, capability: str, attempt: int, mended: EnvironmentRecord | None) -> str:
    """A file's first line: whose it is, and which attempt."""
    limits = context.settings.synthesis
    start, place = divmod(attempt, limits.a_start)
    what = f"repair {place - limits.candidates + 1}" if mended else f"candidate {place + 1}"
    of = f" of env:{mended.hash[:12]}" if mended else ""
    return f"# Written by {line(context.settings.llm.model)} for {line(capability)}: start {start + 1}, {what}{of}."


def _first_dialogue(context: Context, capability: str) -> tuple[Said, ...]:
    """The dialogue of a first file."""
    with context.reading() as session:
        meant = get_capability(session, context.cycle_id, capability)
        labels = list_labels(session, context.cycle_id)
    episodes = collected(context)
    own = {episode.id for episode in episodes}
    trajectories, labels = by_order(episodes, [label for label in labels if label.trajectory_id in own])
    rules = Rules(asked(thresholds(context.settings)), MAX_BYTES)
    return asking(meant, trajectories, labels, rules)


def _chain(context: Context, capability: str, first: int, attempt: int) -> list[Judged]:
    """What this start has come to: the best of its candidates, then its repairs up to this attempt, oldest first."""
    records = {one.seed - context.settings.seed: one for one in written(context, capability, LLM)}
    made = [records[number] for number in range(first, attempt) if number in records]
    judged = [Judged(one, stored_report(context, one.hash)) for one in made]
    candidates = context.settings.synthesis.candidates
    best = max(judged[:candidates], key=lambda one: one.passed)  # the first of several
    return [best, *judged[candidates:]]


def _base(chain: Sequence[Judged]) -> Judged:
    """The last file; an answer that held none where there is no file yet."""
    return next((one for one in reversed(chain) if holds_environment(one.record.source_code)), chain[-1])


def _mending(said: Sequence[Said], chain: Sequence[Judged]) -> tuple[Said, ...]:
    """The dialogue of a repair."""
    base, last = _base(chain), chain[-1]
    before = [one.refused_by for one in chain if one is not last]
    return mending(said, base.refused, None if base is last else last.refused, before)
