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

from agents.analyst.llm.discovery import TEXT
from agents.analyst.llm.prompting import LEAST, Asking, Form, all_of, instructions, reason
from agents.analyst.llm.rendering import Shown, one_line, shown, surroundings, tokens
from agents.errors import ModelError, OutOfForm
from agents.llm.question import marked
from store.types import Capability, Label, Trajectory, Verdict

EACH = 12_000  # tokens of one conversation, at most
FAULT_REASON = 500  # characters
MARKS = 100  # tokens, with the few words beside them

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
    return await asking.each("faults", [partial(_fault, asking, one) for one in failures])


async def _fault(asking: Asking, failure: Trajectory) -> Fault:
    about, read = conversation(asking, failure, "blame")

    def wrong(answer: Blame) -> str | None:
        if read.cited(answer.message) is None:
            return f"there is no message {answer.message[:40]!r} in what you were shown; cite one by its id, such as m4"
        return None

    try:
        answer = await asking.ask(asking.question("blame", f"{about}\nWhose fault is it?"), Blame, wrong)
    except OutOfForm as error:
        return Fault(failure.id, "agent", None, one_line(f"nobody said: {error.message}", FAULT_REASON))
    return Fault(failure.id, answer.fault, read.cited(answer.message), one_line(answer.why, FAULT_REASON))


def conversation(asking: Asking, trajectory: Trajectory, kind: str, *beside: str) -> tuple[str, Shown]:
    """One conversation with what surrounds it, as large as a question of this kind has room for beside other texts."""
    room = asking.room(instructions(kind), *beside)
    around = surroundings([trajectory], max(min(room // 3, room - LEAST - MARKS), 0))
    read = shown(trajectory, min(EACH, asking.room(instructions(kind), around, *beside) - MARKS))
    return f"{around}\n{marked('conversation', read.text)}", read


REPEATS = 2
APART = 1000  # variants of a run's repetitions: run, run + 1000, run + 2000
TEMPERATURE = 1.0  # as the model itself is: at 0 the runs would be one run
COMPLAINTS = 8
LEFT_OUT = 10  # of so many conversations one may be left out
HOPELESS = 10  # first conversations without any usable row that end it
LABEL_REASON = 300  # characters
SHORTEST = 40  # characters that a capability's text keeps

Read = tuple[str, Shown]  # a conversation with what surrounds it, and what can be cited of it


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
        if not self.answered and len(self.in_vain) >= min(HOPELESS, self.conversations):
            raise self._given_up(f"none of the first {len(self.in_vain)} conversations could be labelled", key)
        if self.in_vain[key] > REPEATS and key not in self.answered:
            self.leave_out(key)

    def leave_out(self, key: str) -> None:
        """Ask no more about a conversation; raises where more than a tenth are left out."""
        self.left_out[key] = one_line(self.why[key].message, LABEL_REASON)
        if len(self.left_out) * LEFT_OUT > self.conversations:
            many = f"{len(self.left_out)} of {self.conversations} conversations"
            raise self._given_up(f"{many} could not be labelled, which is more than one in {LEFT_OUT}", key)

    def _given_up(self, what: str, key: str) -> ModelError:
        error = reason(self.why[key])
        return type(error)(f"{what}; the last of them, trajectory {key}: {error.message}", hint=error.hint)


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
    listed = _listed(asking, capabilities)
    read = {one.id: await asyncio.to_thread(conversation, asking, one, "label", listed) for one in trajectories}
    made = _Labelling(asking, capabilities, read, seed, Void(len(read)))
    done: dict[int, int] = {}

    def tell(run: int, rows: int) -> None:
        done[run] = rows
        in_all, of = sum(done.values()), len(read) * runs
        asking.tell(f"labels: {in_all} of {of}", in_all, of)

    of_runs = await all_of(made.run(run, partial(tell, run)) for run in range(runs))
    left_out = made.void.left_out
    labels = [label for of, _ in of_runs for label in of if label.trajectory_id not in left_out]
    return Labelled(labels, sum(again for _, again in of_runs), dict(sorted(left_out.items())))


@dataclass(frozen=True)
class _Labelling:
    """What all runs have in common."""

    asking: Asking
    capabilities: Sequence[Capability]
    read: Mapping[str, Read]
    seed: int
    void: Void

    async def run(self, run: int, tell: Callable[[int], None]) -> tuple[list[Label], int]:
        """A run's labels, and how often it was made again."""
        rows = await self._rows((run, 0), self.read, tell)
        again = 0
        for repetition in range(1, REPEATS + 1):
            missing = self.read.keys() - rows.keys() - self.void.left_out.keys()
            if mended := await self._rows((run, repetition), missing, tell):
                others = self.read.keys() - missing
                rows |= mended | await self._rows((run, repetition), others, tell)
                again += 1
        for key in self.read.keys() - rows.keys() - self.void.left_out.keys():
            self.void.leave_out(key)
        return [label for key in self.read for label in rows.get(key, [])], again

    async def _rows(
        self, of: tuple[int, int], wanted: Collection[str], tell: Callable[[int], None]
    ) -> dict[str, list[Label]]:
        """The usable ones among the wanted rows of a run's repetition."""
        rng = random.Random(f"label:{self.seed}:{of[0]}:{of[1]}")
        order = rng.sample(self.capabilities, len(self.capabilities))
        keys = [key for key in rng.sample(list(self.read), len(self.read)) if key in wanted]
        before = len(self.read) - len(keys)
        asking = replace(self.asking, tell=lambda _, done, of: tell(before + done))
        rows = await asking.each("labels", [partial(self._row, order, key, of) for key in keys])
        return {key: row for key, row in zip(keys, rows, strict=True) if row}

    async def _row(self, order: Sequence[Capability], key: str, of: tuple[int, int]) -> list[Label]:
        """One conversation's labels in a run's repetition; none where the model gave no usable row."""
        (run, repetition), (about, read) = of, self.read[key]
        names = [one.name for one in order]
        if key in self.void.left_out:
            return []

        def wrong(answer: Row) -> str | None:
            return "; ".join(_complaints(answer, names, read)[:COMPLAINTS]) or None

        listed = _listed(self.asking, order)
        text = f"{about}\n{listed}\nHow does each of the {len(names)} capabilities stand in this conversation?"
        try:
            asked = self.asking.question("label", text, run + APART * repetition, TEMPERATURE)
            answer = await self.asking.ask(asked, Row, wrong)
        except OutOfForm as error:
            self.void.add(key, error)
            return []
        self.void.answered.add(key)
        return [
            Label(key, cell.capability, run, Verdict(cell.verdict.lower()), _cited(cell, read)) for cell in answer.cells
        ]


def _complaints(answer: Row, names: Sequence[str], read: Shown) -> list[str]:
    given = [cell.capability for cell in answer.cells]
    told = [f"{name[:40]!r} is not in the list" for name in given if name not in names]
    told += [f"{name} has {given.count(name)} entries, not one" for name in names if given.count(name) != 1]
    return told + [
        f"{cell.capability[:40]} is {cell.verdict} and cites {cell.message[:20]!r}, which is no message that you were "
        "shown"
        for cell in answer.cells
        if cell.verdict != "NA" and _cited(cell, read) is None
    ]


def _cited(cell: Cell, read: Shown) -> int | None:
    return None if cell.verdict == "NA" else read.cited(cell.message)


def _listed(asking: Asking, capabilities: Sequence[Capability]) -> str:
    """What they mean, in at most a third of the room; where it is narrow each text is cut alike, in whatever order."""
    room, limit = asking.room(instructions("label")) // 3, TEXT
    while tokens(told := "\n".join(_told(one, limit) for one in capabilities)) > room and limit > SHORTEST:
        limit = max(limit * 3 // 4, SHORTEST)
    return marked("capabilities", told)


def _told(one: Capability, limit: int) -> str:
    needed, exercised, lacking = (one_line(text, limit) for text in (one.when_needed, one.exercised, one.lacking))
    return f"- {one.name}: needed: {needed} exercised: {exercised} lacking: {lacking}"
