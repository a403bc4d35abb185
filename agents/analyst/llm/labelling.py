"""Labels: for each conversation the whole row over all capabilities from one answer, in several independent runs.

Every run shows the capabilities in an order of its own and is sampled on its own. The question tells neither the
outcome nor the conversation's id, so that a label says what is in the conversation.

Invariants: the labels of a run are complete, each (trajectory, capability) exactly once; PRESENT and LACKING cite a
message that was shown, NA none; a label whose citation does not exist is void and goes back with what else is wrong. A
run in which a row stays unusable is made again as a whole, at most twice; a conversation whose row stays unusable then,
too, is left out of all runs, so that no single one can stop an analysis. How it fails: ``OutOfForm`` that names such a
conversation, as soon as more than a tenth of them would be left out.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from agents.analyst.llm.asking import Asking, Form, all_of
from agents.analyst.llm.blame import conversation
from agents.analyst.llm.rendering import Shown
from agents.errors import OutOfForm
from agents.llm.untrusted import marked
from store.types import Capability, Label, Trajectory, Verdict

REPEATS = 2
APART = 1000  # variants of a run's repetitions: run, run + 1000, run + 2000
TEMPERATURE = 1.0  # as the model itself is: at 0 the runs would be one run
COMPLAINTS = 8
LEFT_OUT = 10  # of so many conversations one may be left out

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
class Unusable:
    """Conversations on which a run's last repetition had no usable row, with what the model did."""

    allowed: int
    errors: dict[str, OutOfForm] = field(default_factory=dict)

    def add(self, key: str, error: OutOfForm) -> None:
        """One more; raises it where that is one too many."""
        self.errors[key] = error
        if len(self.errors) > self.allowed:
            raise error


@dataclass(frozen=True)
class Labelled:
    """The labels of all runs, how many runs had to be made again, and the ids of what was left out."""

    labels: list[Label]
    again: int = 0
    left_out: list[str] = field(default_factory=list)


async def labelled(
    asking: Asking, capabilities: Sequence[Capability], trajectories: Sequence[Trajectory], *, runs: int, seed: int
) -> Labelled:
    """The labels of all runs."""
    if not capabilities or not trajectories:
        return Labelled([])
    listed = _listed(capabilities)
    read = {one.id: await asyncio.to_thread(conversation, asking, one, "label", listed) for one in trajectories}
    made = _Labelling(capabilities, read, seed, Unusable(len(read) // LEFT_OUT))
    done: dict[int, int] = {}

    def of_run(run: int) -> Asking:
        def tell(_: str, rows: int, of: int) -> None:
            done[run] = rows
            in_all = sum(done.values())
            asking.tell(f"labels: {in_all} of {of * runs}", in_all, of * runs)

        return replace(asking, tell=tell)

    of_runs = await all_of(made.run(of_run(run), run) for run in range(runs))
    left_out = made.unusable.errors
    labels = [label for of, _ in of_runs for label in of if label.trajectory_id not in left_out]
    return Labelled(labels, sum(again for _, again in of_runs), sorted(left_out))


@dataclass(frozen=True)
class _Labelling:
    """What all runs have in common."""

    capabilities: Sequence[Capability]
    read: Mapping[str, Read]
    seed: int
    unusable: Unusable

    async def run(self, asking: Asking, run: int) -> tuple[list[Label], int]:
        """A run's labels, and how often it was made again."""
        again = 0
        while True:
            rng = random.Random(f"label:{self.seed}:{run}:{again}")
            order = rng.sample(self.capabilities, len(self.capabilities))
            keys = rng.sample(list(self.read), len(self.read))
            try:
                made = await asking.each(
                    "labels", [partial(self._row, asking, order, key, (run, again)) for key in keys]
                )
            except OutOfForm:
                if again == REPEATS:
                    raise
                again += 1
            else:
                rows = dict(zip(keys, made, strict=True))
                return [label for key in self.read for label in rows[key]], again

    async def _row(self, asking: Asking, order: Sequence[Capability], key: str, of: tuple[int, int]) -> list[Label]:
        """One conversation's labels in a run; none where it may be left out of a last repetition."""
        (run, again), (about, read) = of, self.read[key]
        names = [one.name for one in order]

        def wrong(answer: Row) -> str | None:
            return "; ".join(_complaints(answer, names, read)[:COMPLAINTS]) or None

        text = f"{about}\n{_listed(order)}\nHow does each of the {len(names)} capabilities stand in this conversation?"
        try:
            asked = asking.question("label", text, run + APART * again, TEMPERATURE)
            answer = await asking.model.ask(asked, Row, wrong)
        except OutOfForm as error:
            told = OutOfForm(
                f"trajectory {key} could not be labelled in run {run + 1}: {error.message}",
                hint="another llm.model; what this one has answered is kept",
            )
            if again < REPEATS:
                raise told from error
            self.unusable.add(key, told)
            return []
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


def _listed(capabilities: Sequence[Capability]) -> str:
    return marked("capabilities", "\n".join(map(_told, capabilities)))


def _told(one: Capability) -> str:
    return f"- {one.name}: needed: {one.when_needed} exercised: {one.exercised} lacking: {one.lacking}"
