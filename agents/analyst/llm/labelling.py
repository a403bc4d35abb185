"""Labels: for each conversation the whole row over all capabilities from one answer, in several independent runs.

Every run shows the capabilities in an order of its own and is sampled on its own. The question tells neither the
outcome nor the conversation's id, so that a label says what is in the conversation.

Invariants: the labels of a run are complete, each (trajectory, capability) exactly once; PRESENT and LACKING cite a
message that was shown, NA none; a label whose citation does not exist is void and goes back with what else is wrong. A
row that stays unusable is asked for as a repetition of the run would, at most twice: where that helps, the run is made
again as a whole (a row that is unusable only then stays as it was). A conversation of which a run has no usable row, or
on which three questions in whatever runs had none, is left out of all runs and asked about no more, so that no single
one can stop an analysis. How it fails: ``OutOfForm`` that names such a conversation, as soon as more than a tenth of
them would be left out, or none of the first ten had a usable row.

Whose fault a failure is: the agent's, the user simulator's, the infrastructure's, or an ambiguous task's.

Only the agent's failures are mined. Where the model gives no usable answer the failure counts as the agent's, as it
would without the question: nothing that was said in a conversation can take it out of the evidence by confusing the
model, and what is kept has to pass labels of its own in most of the runs. How many those are is told.

Invariants: one question for each failure, one answer for each failure; an answer cites a message that was shown.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from agents.analyst.llm.discovery import MAX_TEXT
from agents.analyst.llm.prompting import MIN_CONVERSATION_TOKENS, Asking, Form, all_of, instructions, reason
from agents.analyst.llm.rendering import Shown, one_line, shown, surroundings, tokens
from agents.errors import ModelError, OutOfForm
from agents.llm.question import marked
from store.types import Capability, Label, Trajectory, Verdict

MAX_CONVERSATION_TOKENS = 12_000  # tokens of one conversation, at most
MAX_FAULT_REASON = 500  # characters
MARK_TOKENS = 100  # tokens, with the few words beside them

FaultName = Literal["agent", "simulator", "infrastructure", "task"]


class Blame(Form):
    """Whose fault one failure is."""

    why: str
    fault: FaultName
    message: str


@dataclass(frozen=True)
class Fault:
    """Whose fault a failure is; ``message_index`` is None where the model gave no usable answer."""

    trajectory_id: str
    fault: FaultName
    message_index: int | None
    reason: str


async def faults(asking: Asking, failures: Sequence[Trajectory]) -> list[Fault]:
    """One for each failure, in order."""
    return await asking.each("faults", [partial(_fault, asking, failure) for failure in failures])


async def _fault(asking: Asking, failure: Trajectory) -> Fault:
    conversation_text, rendering = conversation(asking, failure, "blame")

    def wrong(answer: Blame) -> str | None:
        if rendering.cited(answer.message) is None:
            return f"there is no message {answer.message[:40]!r} in what you were shown; cite one by its id, such as m4"
        return None

    try:
        answer = await asking.ask(asking.question("blame", f"{conversation_text}\nWhose fault is it?"), Blame, wrong)
    except OutOfForm as error:
        return Fault(failure.id, "agent", None, one_line(f"nobody said: {error.message}", MAX_FAULT_REASON))
    return Fault(failure.id, answer.fault, rendering.cited(answer.message), one_line(answer.why, MAX_FAULT_REASON))


def conversation(asking: Asking, trajectory: Trajectory, kind: str, *other_texts: str) -> tuple[str, Shown]:
    """One conversation with what surrounds it, as large as a question of this kind has room for beside other texts."""
    budget = asking.room(instructions(kind), *other_texts)
    context = surroundings([trajectory], max(min(budget // 3, budget - MIN_CONVERSATION_TOKENS - MARK_TOKENS), 0))
    rendering = shown(
        trajectory, min(MAX_CONVERSATION_TOKENS, asking.room(instructions(kind), context, *other_texts) - MARK_TOKENS)
    )
    return f"{context}\n{marked('conversation', rendering.text)}", rendering


MAX_REPETITIONS = 2
VARIANT_STEP = 1000  # variants of a run's repetitions: run, run + 1000, run + 2000
TEMPERATURE = 1.0  # as the model itself is: at 0 the runs would be one run
MAX_OBJECTIONS = 8
LEFT_OUT_DIVISOR = 10  # of so many conversations one may be left out
MAX_FIRST_FAILURES = 10  # first conversations without any usable row that end it
MAX_LABEL_REASON = 300  # characters
MIN_TEXT = 40  # characters that a capability's text keeps

ConversationText = tuple[str, Shown]  # a conversation with what surrounds it, and what can be cited of it


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
class Void:
    """Questions of all runs that had no usable row, by conversation, and which conversations are left out for that."""

    conversations: int
    in_vain: Counter[str] = field(default_factory=Counter)
    answered: set[str] = field(default_factory=set)
    why: dict[str, OutOfForm] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # with the reason

    def add(self, key: str, error: OutOfForm) -> None:
        """One more; raises where that was one too many."""
        self.in_vain[key] += 1
        self.why[key] = error
        if not self.answered and len(self.in_vain) >= min(MAX_FIRST_FAILURES, self.conversations):
            raise self._failure(f"none of the first {len(self.in_vain)} conversations could be labelled", key)
        if self.in_vain[key] > MAX_REPETITIONS and key not in self.answered:
            self.leave_out(key)

    def leave_out(self, key: str) -> None:
        """Ask no more about a conversation; raises where more than a tenth are left out."""
        self.left_out[key] = one_line(self.why[key].message, MAX_LABEL_REASON)
        if len(self.left_out) * LEFT_OUT_DIVISOR > self.conversations:
            proportion = f"{len(self.left_out)} of {self.conversations} conversations"
            raise self._failure(
                f"{proportion} could not be labelled, which is more than one in {LEFT_OUT_DIVISOR}", key
            )

    def _failure(self, summary: str, key: str) -> ModelError:
        error = reason(self.why[key])
        return type(error)(f"{summary}; the last of them, trajectory {key}: {error.message}", hint=error.hint)


@dataclass(frozen=True)
class Labelled:
    """The labels of all runs, how many runs had to be made again, and what was left out with the reason."""

    labels: list[Label]
    again: int = 0
    left_out: dict[str, str] = field(default_factory=dict)


async def labelled(
    asking: Asking, capabilities: Sequence[Capability], trajectories: Sequence[Trajectory], *, runs: int, seed: int
) -> Labelled:
    """The labels of all runs."""
    if not capabilities or not trajectories:
        return Labelled([])
    capability_text = _capability_list(asking, capabilities)
    conversations = {
        trajectory.id: await asyncio.to_thread(conversation, asking, trajectory, "label", capability_text)
        for trajectory in trajectories
    }
    labeller = _Labelling(asking, capabilities, conversations, seed, Void(len(conversations)))
    rows_done: dict[int, int] = {}

    def tell(run: int, rows: int) -> None:
        rows_done[run] = rows
        rows_total, total = sum(rows_done.values()), len(conversations) * runs
        asking.tell(f"labels: {rows_total} of {total}", rows_total, total)

    results = await all_of(labeller.run(run, partial(tell, run)) for run in range(runs))
    left_out = labeller.void.left_out
    labels = [label for run_labels, _ in results for label in run_labels if label.trajectory_id not in left_out]
    return Labelled(labels, sum(repeated for _, repeated in results), dict(sorted(left_out.items())))


@dataclass(frozen=True)
class _Labelling:
    """What all runs have in common."""

    asking: Asking
    capabilities: Sequence[Capability]
    texts_read: Mapping[str, ConversationText]
    seed: int
    void: Void

    async def run(self, run: int, tell: Callable[[int], None]) -> tuple[list[Label], int]:
        """A run's labels, and how often it was made again."""
        rows = await self._rows((run, 0), self.texts_read, tell)
        repeated = 0
        for repetition in range(1, MAX_REPETITIONS + 1):
            missing = self.texts_read.keys() - rows.keys() - self.void.left_out.keys()
            if repaired := await self._rows((run, repetition), missing, tell):
                unchanged = self.texts_read.keys() - missing
                rows |= repaired | await self._rows((run, repetition), unchanged, tell)
                repeated += 1
        for key in self.texts_read.keys() - rows.keys() - self.void.left_out.keys():
            self.void.leave_out(key)
        return [label for key in self.texts_read for label in rows.get(key, [])], repeated

    async def _rows(
        self, attempt: tuple[int, int], wanted_keys: Collection[str], tell: Callable[[int], None]
    ) -> dict[str, list[Label]]:
        """The usable ones among the wanted rows of a run's repetition."""
        rng = random.Random(f"label:{self.seed}:{attempt[0]}:{attempt[1]}")
        order = rng.sample(self.capabilities, len(self.capabilities))
        keys = [key for key in rng.sample(list(self.texts_read), len(self.texts_read)) if key in wanted_keys]
        skipped = len(self.texts_read) - len(keys)
        asking = replace(self.asking, tell=lambda _, done, attempt: tell(skipped + done))
        rows = await asking.each("labels", [partial(self._row, order, key, attempt) for key in keys])
        return {key: row for key, row in zip(keys, rows, strict=True) if row}

    async def _row(self, order: Sequence[Capability], key: str, attempt: tuple[int, int]) -> list[Label]:
        """One conversation's labels in a run's repetition; none where the model gave no usable row."""
        (run, repetition), (conversation_text, rendering) = attempt, self.texts_read[key]
        names = [capability.name for capability in order]
        if key in self.void.left_out:
            return []

        def wrong(answer: Row) -> str | None:
            return "; ".join(_objections(answer, names, rendering)[:MAX_OBJECTIONS]) or None

        capability_text = _capability_list(self.asking, order)
        text = f"{conversation_text}\n{capability_text}\nHow does each of the {len(names)} capabilities stand in this conversation?"
        try:
            question = self.asking.question("label", text, run + VARIANT_STEP * repetition, TEMPERATURE)
            answer = await self.asking.ask(question, Row, wrong)
        except OutOfForm as error:
            self.void.add(key, error)
            return []
        self.void.answered.add(key)
        return [
            Label(key, cell.capability, run, Verdict(cell.verdict.lower()), _cited_message(cell, rendering))
            for cell in answer.cells
        ]


def _objections(answer: Row, names: Sequence[str], rendering: Shown) -> list[str]:
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


def _cited_message(cell: Cell, rendering: Shown) -> int | None:
    return None if cell.verdict == "NA" else rendering.cited(cell.message)


def _capability_list(asking: Asking, capabilities: Sequence[Capability]) -> str:
    """What they mean, in at most a third of the room; where it is narrow each text is cut alike, in whatever order."""
    budget, limit = asking.room(instructions("label")) // 3, MAX_TEXT
    while (
        tokens(text := "\n".join(_capability_line(capability, limit) for capability in capabilities)) > budget
        and limit > MIN_TEXT
    ):
        limit = max(limit * 3 // 4, MIN_TEXT)
    return marked("capabilities", text)


def _capability_line(capability: Capability, limit: int) -> str:
    needed, exercised, lacking = (
        one_line(text, limit) for text in (capability.when_needed, capability.exercised, capability.lacking)
    )
    return f"- {capability.name}: needed: {needed} exercised: {exercised} lacking: {lacking}"
