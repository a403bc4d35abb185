"""Attributes each failure to agent, simulator, infrastructure or task, and labels conversations in independent runs.

Only failures of the agent are mined. Without a usable attribution a failure counts as the agent's, so text in a
conversation cannot remove the conversation from the evidence by confusing the model.

One answer labels a row: all capabilities of one conversation, in an order that differs between runs. The question
contains neither the outcome nor the conversation's id. PRESENT and LACKING cite a shown message. A row without a usable
answer is asked for again with another variant, at most twice; if that helps, the whole run is repeated with that
variant, so that its rows share one sampling. Conversations without a usable row are left out of all runs. ``OutOfForm``
(or the server's ``ModelRefused``) is raised if they are more than a tenth, or if none of the first ten can be labelled.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from agents.analyst.llm.discovery import MAX_TEXT
from agents.analyst.llm.prompting import (
    MIN_CONVERSATION_TOKENS,
    Form,
    Prompter,
    gather_or_cancel,
    instructions,
    root_cause,
)
from agents.analyst.llm.rendering import (
    RenderedConversation,
    one_line,
    render_conversation,
    render_policy_and_tools,
    token_estimate,
)
from agents.errors import ModelError, OutOfForm
from agents.llm.question import delimited
from store.types import Capability, Label, Trajectory, Verdict

# Limit for one conversation.
MAX_CONVERSATION_TOKENS = 12_000
# Limit in characters.
MAX_FAULT_REASON = 500
# Tokens of the marks around a conversation and of the few words beside them.
MARK_TOKENS = 100

FaultName = Literal["agent", "simulator", "infrastructure", "task"]
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
# A conversation with its policy and tools, and its citable messages.
ConversationText = tuple[str, RenderedConversation]


class Blame(Form):
    """Whose fault one failure is."""

    why: str
    fault: FaultName
    message: str


@dataclass(frozen=True)
class Fault:
    """Who caused a failure; ``message_index`` is None if the model gave no usable answer."""

    trajectory_id: str
    fault: FaultName
    message_index: int | None
    reason: str


async def faults(prompter: Prompter, failures: Sequence[Trajectory]) -> list[Fault]:
    """Return the attribution of each failure, in order."""
    return await prompter.run_all("faults", [partial(_fault, prompter, failure) for failure in failures])


async def _fault(prompter: Prompter, failure: Trajectory) -> Fault:
    conversation_text, rendering = render_question_context(prompter, failure, "blame")

    def find_objection(answer: Blame) -> str | None:
        if rendering.message_index(answer.message) is None:
            return f"there is no message {answer.message[:40]!r} in what you were shown; cite one by its id, such as m4"
        return None

    try:
        answer = await prompter.ask(
            prompter.question("blame", f"{conversation_text}\nWhose fault is it?"), Blame, find_objection
        )
    except OutOfForm as error:
        return Fault(failure.id, "agent", None, one_line(f"nobody said: {error.message}", MAX_FAULT_REASON))
    return Fault(
        failure.id, answer.fault, rendering.message_index(answer.message), one_line(answer.why, MAX_FAULT_REASON)
    )


def render_question_context(
    prompter: Prompter, trajectory: Trajectory, kind: str, *other_texts: str
) -> tuple[str, RenderedConversation]:
    """Render one conversation with its policy and tools, as large as a question of this kind allows.

    ``other_texts`` are the further texts of the question.
    """
    budget = prompter.token_budget(instructions(kind), *other_texts)
    context = render_policy_and_tools(
        [trajectory], max(min(budget // 3, budget - MIN_CONVERSATION_TOKENS - MARK_TOKENS), 0)
    )
    rendering = render_conversation(
        trajectory,
        min(MAX_CONVERSATION_TOKENS, prompter.token_budget(instructions(kind), context, *other_texts) - MARK_TOKENS),
    )
    return f"{context}\n{delimited('conversation', rendering.text)}", rendering


class Cell(Form):
    """One capability in one conversation."""

    capability: str
    why: str
    verdict: Literal["NA", "PRESENT", "LACKING"]
    message: str


class Row(Form):
    """All capabilities in one conversation."""

    cells: list[Cell]


@dataclass
class UnlabelledConversations:
    """The failed questions of each conversation over all runs, and the conversations left out because of them."""

    conversations: int
    failed_questions: Counter[str] = field(default_factory=Counter)
    answered_keys: set[str] = field(default_factory=set)
    errors: dict[str, OutOfForm] = field(default_factory=dict)
    # Conversation -> reason.
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, error: OutOfForm) -> None:
        """Record a failed question; after more than ``MAX_REPETITIONS`` without an answer, leave the conversation out.

        Raises:
            ModelError: the first conversations all failed, or too many are left out.
        """
        self.failed_questions[key] += 1
        self.errors[key] = error
        if not self.answered_keys and len(self.failed_questions) >= min(MAX_FIRST_FAILURES, self.conversations):
            raise self._failure(f"none of the first {len(self.failed_questions)} conversations could be labelled", key)
        if self.failed_questions[key] > MAX_REPETITIONS and key not in self.answered_keys:
            self.leave_out(key)

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
    """The labels of all runs, the number of repeated runs, and the conversations left out with the reason."""

    labels: list[Label]
    repeated_runs: int = 0
    left_out: dict[str, str] = field(default_factory=dict)


async def label_all(
    prompter: Prompter, capabilities: Sequence[Capability], trajectories: Sequence[Trajectory], *, runs: int, seed: int
) -> LabellingResult:
    """Label all trajectories in all runs.

    Raises:
        ModelError: see the module.
    """
    if not capabilities or not trajectories:
        return LabellingResult([])
    capability_text = _capability_list(prompter, capabilities)
    conversations = {
        trajectory.id: await asyncio.to_thread(render_question_context, prompter, trajectory, "label", capability_text)
        for trajectory in trajectories
    }
    labeller = _Labeller(prompter, capabilities, conversations, seed, UnlabelledConversations(len(conversations)))
    rows_done: dict[int, int] = {}

    def report_progress(run: int, rows: int) -> None:
        rows_done[run] = rows
        rows_total, total = sum(rows_done.values()), len(conversations) * runs
        prompter.report_progress(f"labels: {rows_total} of {total}", rows_total, total)

    results = await gather_or_cancel(labeller.run(run, partial(report_progress, run)) for run in range(runs))
    left_out = labeller.unlabelled.left_out
    labels = [label for run_labels, _ in results for label in run_labels if label.trajectory_id not in left_out]
    return LabellingResult(labels, sum(repeated for _, repeated in results), dict(sorted(left_out.items())))


@dataclass(frozen=True)
class _Labeller:
    """Labels conversations; the state is shared by all runs."""

    prompter: Prompter
    capabilities: Sequence[Capability]
    conversations: Mapping[str, ConversationText]
    seed: int
    unlabelled: UnlabelledConversations

    async def run(self, run: int, report_progress: Callable[[int], None]) -> tuple[list[Label], int]:
        """Return a run's labels and the number of its repetitions."""
        rows = await self._rows((run, 0), self.conversations, report_progress)
        repeated = 0
        for repetition in range(1, MAX_REPETITIONS + 1):
            missing = self.conversations.keys() - rows.keys() - self.unlabelled.left_out.keys()
            if repaired := await self._rows((run, repetition), missing, report_progress):
                unchanged = self.conversations.keys() - missing
                rows |= repaired | await self._rows((run, repetition), unchanged, report_progress)
                repeated += 1
        for key in self.conversations.keys() - rows.keys() - self.unlabelled.left_out.keys():
            self.unlabelled.leave_out(key)
        return [label for key in self.conversations for label in rows.get(key, [])], repeated

    async def _rows(
        self, attempt: tuple[int, int], selected_keys: Collection[str], report_progress: Callable[[int], None]
    ) -> dict[str, list[Label]]:
        """Return the usable rows of an attempt (run, repetition), by conversation."""
        rng = random.Random(f"label:{self.seed}:{attempt[0]}:{attempt[1]}")
        order = rng.sample(self.capabilities, len(self.capabilities))
        keys = [key for key in rng.sample(list(self.conversations), len(self.conversations)) if key in selected_keys]
        skipped = len(self.conversations) - len(keys)
        prompter = replace(self.prompter, report_progress=lambda _, done, _total: report_progress(skipped + done))
        rows = await prompter.run_all("labels", [partial(self._row, order, key, attempt) for key in keys])
        return {key: row for key, row in zip(keys, rows, strict=True) if row}

    async def _row(self, order: Sequence[Capability], key: str, attempt: tuple[int, int]) -> list[Label]:
        """Return one conversation's labels in an attempt (run, repetition); empty without a usable answer."""
        (run, repetition), (conversation_text, rendering) = attempt, self.conversations[key]
        names = [capability.name for capability in order]
        if key in self.unlabelled.left_out:
            return []

        def find_objection(answer: Row) -> str | None:
            return "; ".join(_objections(answer, names, rendering)[:MAX_OBJECTIONS]) or None

        capability_text = _capability_list(self.prompter, order)
        text = (
            f"{conversation_text}\n{capability_text}\n"
            f"How does each of the {len(names)} capabilities stand in this conversation?"
        )
        try:
            question = self.prompter.question("label", text, run + VARIANT_STEP * repetition, TEMPERATURE)
            answer = await self.prompter.ask(question, Row, find_objection)
        except OutOfForm as error:
            self.unlabelled.add(key, error)
            return []
        self.unlabelled.answered_keys.add(key)
        return [
            Label(key, cell.capability, run, Verdict(cell.verdict.lower()), _cited_message(cell, rendering))
            for cell in answer.cells
        ]


def _objections(answer: Row, names: Sequence[str], rendering: RenderedConversation) -> list[str]:
    listed_names = [cell.capability for cell in answer.cells]
    objections = [f"{name[:40]!r} is not in the list" for name in listed_names if name not in names]
    objections += [
        f"{name} has {listed_names.count(name)} entries, not one" for name in names if listed_names.count(name) != 1
    ]
    return objections + [
        f"{cell.capability[:40]} is {cell.verdict} and cites {cell.message[:20]!r}, which is no message that you were "
        "shown"
        for cell in answer.cells
        if cell.verdict != "NA" and _cited_message(cell, rendering) is None
    ]


def _cited_message(cell: Cell, rendering: RenderedConversation) -> int | None:
    return None if cell.verdict == "NA" else rendering.message_index(cell.message)


def _capability_list(prompter: Prompter, capabilities: Sequence[Capability]) -> str:
    """Return the capabilities as text in at most a third of the budget; all texts are cut alike, in any order."""
    budget, limit = prompter.token_budget(instructions("label")) // 3, MAX_TEXT
    while (
        token_estimate(text := "\n".join(_capability_line(capability, limit) for capability in capabilities)) > budget
        and limit > MIN_TEXT
    ):
        limit = max(limit * 3 // 4, MIN_TEXT)
    return delimited("capabilities", text)


def _capability_line(capability: Capability, limit: int) -> str:
    texts = {"needed": capability.when_needed, "exercised": capability.exercised, "lacking": capability.lacking}
    fields = " ".join(f"{name}: {one_line(text, limit)}" for name, text in texts.items())
    return f"- {capability.name}: {fields}"
