"""Labels: for each conversation the whole row over all capabilities from one answer, in several independent runs.

Every run shows the capabilities in an order of its own and is sampled on its own. The question tells neither the
outcome nor the conversation's id, so that a label says what is in the conversation.

Invariants: the labels of a run are complete, each (trajectory, capability) exactly once; PRESENT and LACKING cite a
message that was shown, NA none; a label whose citation does not exist is void and goes back with what else is wrong. A
run in which a row stays unusable is made again as a whole, at most twice. How it fails: ``OutOfForm`` that names the
trajectory, when a run's last repetition fails, too.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
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


async def labelled(
    asking: Asking, capabilities: Sequence[Capability], trajectories: Sequence[Trajectory], *, runs: int, seed: int
) -> tuple[list[Label], int]:
    """The labels of all runs, and how many runs had to be made again."""
    if not capabilities or not trajectories:
        return [], 0
    listed = _listed(capabilities)
    read = {one.id: await asyncio.to_thread(conversation, asking, one, "label", listed) for one in trajectories}
    done: dict[int, int] = {}

    def of_run(run: int) -> Asking:
        def tell(what: str, rows: int, of: int) -> None:
            done[run] = rows
            asking.tell(what, sum(done.values()), of * runs)

        return replace(asking, tell=tell)

    made = await all_of(_run(of_run(run), capabilities, read, run, seed) for run in range(runs))
    return [label for labels, _ in made for label in labels], sum(again for _, again in made)


async def _run(
    asking: Asking, capabilities: Sequence[Capability], read: Mapping[str, Read], run: int, seed: int
) -> tuple[list[Label], int]:
    again = 0
    while True:
        order = random.Random(f"label:{seed}:{run}:{again}").sample(capabilities, len(capabilities))
        rows = [partial(_row, asking, order, one, run, run + APART * again) for one in read.items()]
        try:
            made = await asking.each("labels", rows)
        except OutOfForm:
            if again == REPEATS:
                raise
            again += 1
        else:
            return [label for row in made for label in row], again


async def _row(
    asking: Asking, capabilities: Sequence[Capability], of: tuple[str, Read], run: int, variant: int
) -> list[Label]:
    key, (about, read) = of
    names = [one.name for one in capabilities]

    def wrong(answer: Row) -> str | None:
        return "; ".join(_complaints(answer, names, read)[:COMPLAINTS]) or None

    text = (
        f"{about}\n{_listed(capabilities)}\nHow does each of the {len(names)} capabilities stand in this conversation?"
    )
    try:
        answer = await asking.model.ask(asking.question("label", text, variant, TEMPERATURE), Row, wrong)
    except OutOfForm as error:
        raise OutOfForm(
            f"trajectory {key} could not be labelled in run {run + 1}: {error.message}",
            hint="another llm.model, or leave this trajectory out",
        ) from error
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
