"""Labels conversations in independent runs, which stop early where they agree.

One answer labels the conversations of a pack: all capabilities, in an order that differs between runs. The question
contains neither the outcome nor the conversations' ids. PRESENT and LACKING cite a shown message. LACKING also says
what is wrong in the result because of it, and names the sentence of the policy that was broken, which counts only if it
occurs in the policy.

The runs of a pack follow one another. At first each pack is labelled twice, and in all runs if the two differ. Once
``SAMPLE`` conversations are labelled, and the runs agree on them (Krippendorff's alpha of at least ``AGREEING``), the
others are labelled once. The result holds the answers that were given and no copies of them: ``completed_runs`` makes
full tables.

A conversation without a usable row is asked for alone, with another variant, at most twice; without a row in run 0 it
is left out. ``OutOfForm`` (or the server's ``ModelRefused``) is raised if more than a tenth are left out, or if none of
the first ten can be labelled.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial

from agents.analyst.llm.aggregation import MAX_TEXT
from agents.analyst.llm.packs import Pack, single_pack
from agents.analyst.llm.prompting import Form, Prompter, instructions, root_cause
from agents.analyst.llm.rendering import one_line, token_estimate
from agents.contrast import agreement
from agents.errors import ModelError, OutOfForm
from agents.llm.question import delimited
from store.types import Capability, Label, Verdict

MAX_REPETITIONS = 2
# Variants of a run and its repetitions: run, run + 1000, run + 2000.
VARIANT_STEP = 1000
# Sampling temperature; at 0 all runs would give the same answers.
TEMPERATURE = 1.0
MAX_OBJECTIONS = 8
# One of this many conversations may be left out.
LEFT_OUT_DIVISOR = 10
# Labelling ends if so many conversations have no usable row before any conversation has one.
MAX_FIRST_FAILURES = 10
# Limit in characters.
MAX_LABEL_REASON = 300
# Characters below which no text of a capability is cut.
MIN_TEXT = 40
# Accepted practices get this part of a question.
PRACTICES_DIVISOR = 4
# Conversations that are labelled at least twice, and the agreement with which the others are labelled once.
SAMPLE = 30
AGREEING = Fraction(4, 5)


class NeededCell(Form):
    """A capability that a conversation needed and that was exercised, or whose omission changed nothing."""

    capability: str
    message: str


class LackingCell(NeededCell):
    """A capability that a conversation needed and lacked, and what is wrong in its result because of that."""

    why: str
    policy: str


class Row(Form):
    """All capabilities in one conversation; ``na`` names those that it did not need."""

    conversation: str
    lacking: list[LackingCell]
    present: list[NeededCell]
    na: list[str]

    @property
    def cells(self) -> list[NeededCell]:
        """The capabilities that the conversation needed."""
        return [*self.lacking, *self.present]


class Rows(Form):
    """The rows of a pack."""

    rows: list[Row]


@dataclass
class UnlabelledConversations:
    """The conversations whose questions failed, and those left out because of them."""

    conversations: int
    answered_keys: set[str] = field(default_factory=set)
    errors: dict[str, OutOfForm] = field(default_factory=dict)
    # Conversation -> reason.
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, error: OutOfForm) -> None:
        """Record a failed question about one conversation.

        Raises:
            ModelError: the first conversations all failed.
        """
        self.errors[key] = error
        if not self.answered_keys and len(self.errors) >= min(MAX_FIRST_FAILURES, self.conversations):
            raise self._failure(f"none of the first {len(self.errors)} conversations could be labelled", key)

    def leave_out(self, key: str) -> None:
        """Ask no more about a conversation; raises ``ModelError`` if more than a tenth are then left out."""
        self.left_out[key] = one_line(self.errors[key].message, MAX_LABEL_REASON)
        if len(self.left_out) * LEFT_OUT_DIVISOR > self.conversations:
            proportion = f"{len(self.left_out)} of {self.conversations} conversations"
            raise self._failure(
                f"{proportion} could not be labelled, which is more than one in {LEFT_OUT_DIVISOR}", key
            )

    def _failure(self, summary: str, key: str) -> ModelError:
        error = root_cause(self.errors[key])
        return type(error)(f"{summary}; the last of them, trajectory {key}: {error.message}", hint=error.hint)


@dataclass(frozen=True)
class LabellingResult:
    """The labels that were given, the conversations left out with the reason, and how many were labelled again."""

    labels: list[Label]
    left_out: dict[str, str] = field(default_factory=dict)
    repeated: int = 0
    sample_agreement: Fraction | None = None
    omitted_characters: int = 0
    omitted_practices: int = 0


def completed_runs(labels: Sequence[Label]) -> list[Label]:
    """Return the labels with every run complete: one that stopped early for a conversation repeats its earlier runs.

    Agreement has to be computed from the labels as they were given.
    """
    runs = range(max((label.run for label in labels), default=-1) + 1)
    by_cell: dict[tuple[str, str], list[Label]] = defaultdict(list)
    for label in sorted(labels, key=lambda label: label.run):
        by_cell[label.trajectory_id, label.capability].append(label)
    completed = []
    for answers in by_cell.values():
        by_run = {label.run: label for label in answers}
        completed += [by_run.get(run) or replace(answers[run % len(answers)], run=run) for run in runs]
    return completed


async def label_all(
    prompter: Prompter,
    capabilities: Sequence[Capability],
    packs: Sequence[Pack],
    *,
    runs: int,
    seed: int,
    excluded: Collection[str] = (),
    practices: Sequence[str] = (),
) -> LabellingResult:
    """Label the conversations that the packs judge, without the excluded ids, in at most ``runs`` runs.

    Args:
        practices: What the labels accept although the policy may seem to forbid it; what does not fit is omitted.

    Raises:
        ModelError: see the module.
    """
    questions = [(pack, names) for pack in packs if (names := _included(pack, excluded))]
    if not capabilities or not questions:
        return LabellingResult([])
    count = sum(len(names) for _, names in questions)
    labeller = _Labeller(prompter, capabilities, seed, UnlabelledConversations(count), practices)
    first, later = _sample(questions) if runs > 1 else ([], questions)
    labels = await labeller.label_packs(first, runs, 0, len(questions))
    sample_agreement = agreement(labels)
    agree = runs == 1 or sample_agreement is None or sample_agreement >= AGREEING
    labels += await labeller.label_packs(later, 1 if agree else runs, len(first), len(questions))
    left_out = labeller.unlabelled.left_out
    answers = [label for label in labels if label.trajectory_id not in left_out]
    repeated_ids = {label.trajectory_id for label in answers if label.run}
    return LabellingResult(
        answers,
        dict(sorted(left_out.items())),
        len(repeated_ids),
        sample_agreement,
        labeller.omitted_characters,
        labeller.omitted_practices,
    )


def _included(pack: Pack, excluded: Collection[str]) -> list[str]:
    return [name for name in pack.subjects if pack.conversations[name].id not in excluded]


PackQuestion = tuple[Pack, list[str]]


def _sample(questions: Sequence[PackQuestion]) -> tuple[list[PackQuestion], list[PackQuestion]]:
    """Return the first packs with ``SAMPLE`` conversations, and the others; the packs are in a seeded order."""
    conversations = position = 0
    while position < len(questions) and conversations < SAMPLE:
        conversations += len(questions[position][1])
        position += 1
    return list(questions[:position]), list(questions[position:])


class _Labeller:
    """Labels packs; the state is shared by all runs."""

    def __init__(
        self,
        prompter: Prompter,
        capabilities: Sequence[Capability],
        seed: int,
        unlabelled: UnlabelledConversations,
        practices: Sequence[str],
    ) -> None:
        self.prompter, self.capabilities, self.seed, self.unlabelled = prompter, capabilities, seed, unlabelled
        self.practices, self.omitted_practices = _practices_text(prompter, practices)
        self.text_limit, self.omitted_characters = _text_limit(prompter, capabilities, token_estimate(self.practices))

    async def label_packs(self, questions: Sequence[PackQuestion], runs: int, done: int, total: int) -> list[Label]:
        """Label some packs in at most ``runs`` runs; ``done`` of ``total`` packs were labelled before."""

        def report_progress(_: str, part: int, _total: int) -> None:
            self.prompter.report_progress(f"labels: {done + part} of {total}", done + part, total)

        prompter = replace(self.prompter, report_progress=report_progress)
        results = await prompter.run_all(
            "labels", [partial(self._runs, pack, names, runs) for pack, names in questions]
        )
        return [label for result in results for label in result]

    async def _runs(self, pack: Pack, names: Sequence[str], runs: int) -> list[Label]:
        """Return the labels of a pack: of run 0 and 1, and of all runs if these differ."""
        labels: list[Label] = []
        for run in range(runs):
            labels += await self._run(pack, names, run)
            verdicts: dict[tuple[str, str], set[Verdict]] = defaultdict(set)
            for label in labels:
                verdicts[label.trajectory_id, label.capability].add(label.verdict)
            if run and all(len(verdict) == 1 for verdict in verdicts.values()):
                break
        return labels

    async def _run(self, pack: Pack, names: Sequence[str], run: int) -> list[Label]:
        remaining = [name for name in names if pack.conversations[name].id not in self.unlabelled.left_out]
        try:
            return await self._ask(pack, remaining, run, 0) if remaining else []
        except OutOfForm as error:
            return [label for name in remaining for label in await self._single(pack, name, run, error)]

    async def _single(self, pack: Pack, name: str, run: int, error: OutOfForm) -> list[Label]:
        """Return the row of one conversation, asked for by itself; empty without a usable answer."""
        key = pack.conversations[name].id
        subject = pack if len(pack.conversations) == 1 else single_pack(self.prompter, pack, name)
        # A question about this conversation alone has failed already if the pack holds no other.
        for repetition in range(int(subject is pack), MAX_REPETITIONS + 1):
            try:
                return await self._ask(subject, [name if subject is pack else "t1"], run, repetition)
            except OutOfForm as failure:
                error = failure
        self.unlabelled.add(key, error)
        if run == 0:
            self.unlabelled.leave_out(key)
        return []

    async def _ask(self, pack: Pack, names: Sequence[str], run: int, repetition: int) -> list[Label]:
        rng = random.Random(f"label:{self.seed}:{run}:{repetition}")
        order = rng.sample(self.capabilities, len(self.capabilities))
        expected = [capability.name for capability in order]

        def find_objection(answer: Rows) -> str | None:
            return "; ".join(list(_objections(answer, pack, names, expected))[:MAX_OBJECTIONS]) or None

        def find_flaw(answer: Rows) -> str | None:
            return "; ".join(list(_wrong_quotations(answer, pack))[:MAX_OBJECTIONS]) or None

        listing = delimited("capabilities", "\n".join(_capability_line(item, self.text_limit) for item in order))
        ending = f"How does each of the {len(expected)} capabilities stand in {', '.join(names)}?"
        text = f"{listing}\n\n{self.practices}{ending}"
        variant = run + VARIANT_STEP * repetition
        question = self.prompter.question("label", text, variant, TEMPERATURE, data=pack.text)
        answer = await self.prompter.ask(question, Rows, find_objection, find_flaw)
        self.unlabelled.answered_keys |= {pack.conversations[name].id for name in names}
        rows = {row.conversation.strip(): row for row in answer.rows}
        return [label for name in names for label in _labels(pack, name, rows[name], run)]


def _labels(pack: Pack, name: str, row: Row, run: int) -> Iterator[Label]:
    key = pack.conversations[name].id
    for cell in row.lacking:
        index, policy = pack.message_index(name, cell.message), pack.quotation(name, cell.policy)
        texts = one_line(cell.why, MAX_LABEL_REASON), one_line(policy, MAX_LABEL_REASON)
        yield Label(key, cell.capability, run, Verdict.LACKING, index, *texts)
    for item in row.present:
        yield Label(key, item.capability, run, Verdict.PRESENT, pack.message_index(name, item.message))
    for capability in row.na:
        yield Label(key, capability, run, Verdict.NA)


def _objections(answer: Rows, pack: Pack, names: Sequence[str], expected: Sequence[str]) -> Iterator[str]:
    row_counts = Counter(row.conversation.strip() for row in answer.rows)
    yield from (f"{name} has {row_counts[name]} rows, not one" for name in names if row_counts[name] != 1)
    yield from (f"{name[:20]!r} is not one of {', '.join(names)}" for name in row_counts if name not in names)
    for row in answer.rows:
        name = row.conversation.strip()
        if name not in names:
            continue
        counts = Counter([*(cell.capability for cell in row.cells), *row.na])
        yield from (f"{name}: {entry[:40]!r} is not in the list" for entry in counts if entry not in expected)
        yield from (f"{name}: {entry} stands {counts[entry]} times" for entry in expected if counts[entry] != 1)
        for cell in row.cells:
            if pack.message_index(name, cell.message) is None:
                citation = f"{cell.capability[:40]} cites {cell.message[:20]!r}"
                yield f"{name}: {citation}, which is no message that you were shown"
        yield from (f"{name}: {cell.capability[:40]} has no reason" for cell in row.lacking if not cell.why.strip())


def _wrong_quotations(answer: Rows, pack: Pack) -> Iterator[str]:
    for row in answer.rows:
        for cell in row.lacking:
            if cell.policy.strip() and not pack.quotation(row.conversation.strip(), cell.policy):
                yield f"the policy has no sentence {cell.policy[:80]!r}; copy it letter by letter, or leave it empty"


def _practices_text(prompter: Prompter, practices: Sequence[str]) -> tuple[str, int]:
    """Return as many practices as a share of the question holds, between marks, and how many are left out."""
    lines: list[str] = []
    different_practices = list(dict.fromkeys(practices))
    for practice in different_practices:
        if token_estimate("\n".join([*lines, practice])) > prompter.question_tokens // PRACTICES_DIVISOR:
            break
        lines.append(f"- {practice}")
    text = f"Accepted practices:\n{delimited('practices', chr(10).join(lines))}\n\n" if lines else ""
    return text, len(different_practices) - len(lines)


def _text_limit(prompter: Prompter, capabilities: Sequence[Capability], used_tokens: int) -> tuple[int, int]:
    """Return the length to which each text of a capability is cut to fit a question, and the characters left out."""
    budget = prompter.question_tokens - token_estimate(instructions("label")) - used_tokens - 100
    limit = MAX_TEXT

    def listing() -> str:
        return "\n".join(_capability_line(capability, limit) for capability in capabilities)

    full_size = len(listing())
    while token_estimate(listing()) > budget and limit > MIN_TEXT:
        limit = max(limit * 3 // 4, MIN_TEXT)
    return limit, full_size - len(listing())


def _capability_line(capability: Capability, limit: int) -> str:
    texts = {"needed": capability.when_needed, "exercised": capability.exercised, "lacking": capability.lacking}
    fields = " ".join(f"{name}: {one_line(text, limit)}" for name, text in texts.items())
    return f"- {capability.name}: {fields}"
