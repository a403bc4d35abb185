"""Whose fault a failure is: the agent's, the user simulator's, the infrastructure's, or an ambiguous task's.

Only the agent's failures are mined. Where the model gives no usable answer the failure counts as the agent's, as it
would without the question: nothing that was said in a conversation can take it out of the evidence by confusing the
model, and what is kept has to pass labels of its own in most of the runs. How many those are is told.

Invariants: one question for each failure, one answer for each failure; an answer cites a message that was shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from agents.analyst.llm.asking import LEAST, Asking, Form, instructions
from agents.analyst.llm.rendering import Shown, shown, surroundings
from agents.analyst.llm.texts import one_line
from agents.errors import OutOfForm
from agents.llm.untrusted import marked
from store.types import Trajectory

EACH = 12_000  # tokens of one conversation, at most
REASON = 500  # characters
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
        return Fault(failure.id, "agent", None, one_line(f"nobody said: {error.message}", REASON))
    return Fault(failure.id, answer.fault, read.cited(answer.message), one_line(answer.why, REASON))


def conversation(asking: Asking, trajectory: Trajectory, kind: str, *beside: str) -> tuple[str, Shown]:
    """One conversation with what surrounds it, as large as a question of this kind has room for beside other texts."""
    room = asking.room(instructions(kind), *beside)
    around = surroundings([trajectory], max(min(room // 3, room - LEAST - MARKS), 0))
    read = shown(trajectory, min(EACH, asking.room(instructions(kind), around, *beside) - MARKS))
    return f"{around}\n{marked('conversation', read.text)}", read
