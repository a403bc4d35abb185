"""Attributes each failure to agent, simulator, infrastructure or task, and names the steps that went wrong.

The model sees a failure beside a success of the same task, if there is one, and says which sentence of the policy a
step broke. A quotation counts only if it occurs in the policy. What a success did although the policy seems to forbid
it is an accepted practice; labels are judged by it, too. Only failures of the agent are mined; without a usable
answer a failure counts as the agent's, so text in a conversation cannot remove it from the evidence by confusing the
model.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from agents.analyst.llm.packs import Pack, single_pack
from agents.analyst.llm.prompting import Form, Prompter, root_cause
from agents.analyst.llm.rendering import one_line
from agents.errors import OutOfForm
from store.types import Outcome

# Limits in characters.
MAX_REASON, MAX_STEP_TEXT, MAX_PRACTICE = 500, 300, 240
MAX_STEPS = 4
MAX_OBJECTIONS = 8
FaultName = Literal["agent", "simulator", "infrastructure", "task"]


class StepAnswer(Form):
    """A step that went wrong, as a model describes it."""

    message: str
    wrong: str
    right: str
    policy: str


class CritiqueAnswer(Form):
    """The steps of one failure that went wrong, and whose fault it is."""

    conversation: str
    steps: list[StepAnswer]
    why: str
    fault: FaultName
    message: str


class AcceptedAnswer(Form):
    """What a solved conversation did although the policy seems to forbid it."""

    conversation: str
    message: str
    practice: str


class Critiques(Form):
    """One for each failure of a pack, and the practices that its successes show to be accepted."""

    critiques: list[CritiqueAnswer]
    accepted: list[AcceptedAnswer]


@dataclass(frozen=True)
class Step:
    """A message of a failure that went wrong; ``policy`` is the sentence that it broke, empty if none was named."""

    trajectory_id: str
    message_index: int
    wrong: str
    right: str
    policy: str

    @property
    def reason(self) -> str:
        """What was wrong and what would have been right."""
        return f"{self.wrong} Instead: {self.right}"


@dataclass(frozen=True)
class Fault:
    """Who caused a failure; ``message_index`` is None if the model gave no usable answer."""

    trajectory_id: str
    fault: FaultName
    message_index: int | None
    reason: str


@dataclass(frozen=True)
class Critique:
    """The attribution of one failure, and its steps if it is the agent's; ``error`` if there was no usable answer."""

    fault: Fault
    steps: tuple[Step, ...] = ()
    error: OutOfForm | None = None


@dataclass(frozen=True)
class Practice:
    """What a success did, at a message, although the policy seems to forbid it: its outcome shows that it is right."""

    trajectory_id: str
    message_index: int
    text: str


@dataclass(frozen=True)
class CritiqueResult:
    """The critiques of some failures, and the practices that successes of the same tasks show to be accepted."""

    critiques: list[Critique]
    practices: list[Practice]


async def critiques(prompter: Prompter, packs: Sequence[Pack]) -> CritiqueResult:
    """Return a critique of each failure that a pack judges, in the order of the packs, and the accepted practices.

    Raises:
        ModelError: no failure has a usable answer.
    """
    jobs = [partial(_of_pack, prompter, pack, pack.failed_subjects) for pack in packs]
    results = await prompter.run_all("critiques", jobs)
    in_order = [critique for result in results for critique in result.critiques]
    errors = [critique.error for critique in in_order if critique.error is not None]
    if errors and len(errors) == len(in_order):
        raise root_cause(errors[0])
    return CritiqueResult(in_order, [practice for result in results for practice in result.practices])


async def _of_pack(prompter: Prompter, pack: Pack, names: Sequence[str]) -> CritiqueResult:
    try:
        answers = await _ask(prompter, pack, names)
    except OutOfForm as error:
        # One conversation may have spoiled the answer for the others.
        if len(pack.conversations) > 1 and len(pack.subjects) > 1:
            results = [await _of_pack(prompter, single_pack(prompter, pack, name), ["t1"]) for name in names]
            return CritiqueResult(
                [critique for result in results for critique in result.critiques],
                [practice for result in results for practice in result.practices],
            )
        reason = one_line(f"no answer: {error.message}", MAX_REASON)
        faults = [Fault(pack.conversations[name].id, "agent", None, reason) for name in names]
        return CritiqueResult([Critique(fault, error=error) for fault in faults], [])
    by_name = {answer.conversation.strip(): answer for answer in answers.critiques}
    practices = [
        Practice(pack.conversations[name].id, index, text)
        for answer in answers.accepted
        if (name := answer.conversation.strip()) in _solved_names(pack)
        and (index := pack.message_index(name, answer.message)) is not None
        and (text := one_line(answer.practice, MAX_PRACTICE))
    ]
    return CritiqueResult([_critique(pack, name, by_name[name]) for name in names], practices)


async def _ask(prompter: Prompter, pack: Pack, names: Sequence[str]) -> Critiques:
    def find_objection(answer: Critiques) -> str | None:
        return "; ".join(list(_objections(answer, pack, names))[:MAX_OBJECTIONS]) or None

    def find_flaw(answer: Critiques) -> str | None:
        return "; ".join(list(_wrong_quotations(answer, pack))[:MAX_OBJECTIONS]) or None

    successes = _solved_names(pack)
    context = (
        f"{_join(successes)} solved the same task." if successes else "There is no solved conversation of this task."
    )
    text = f"Not solved: {_join(names)}. {context} What went wrong in {_join(names)}?"
    return await prompter.ask(prompter.question("critique", text, data=pack.text), Critiques, find_objection, find_flaw)


def _solved_names(pack: Pack) -> list[str]:
    """Return the short ids of the solved conversations, which are of the failures' task: other packs have none."""
    return pack.with_outcome(Outcome.SUCCESS)


def _join(names: Sequence[str]) -> str:
    return ", ".join(names)


def _objections(answer: Critiques, pack: Pack, names: Sequence[str]) -> Iterator[str]:
    counts = Counter(critique.conversation.strip() for critique in answer.critiques)
    yield from (f"{name} has {counts[name]} critiques, not one" for name in names if counts[name] != 1)
    yield from (f"{name[:20]!r} is not one of {_join(names)}" for name in counts if name not in names)
    for accepted in answer.accepted:
        name = accepted.conversation.strip()
        if name not in _solved_names(pack):
            yield f"accepted: {name[:20]!r} is no solved conversation of the task"
        elif pack.message_index(name, accepted.message) is None:
            yield f"accepted: there is no message {accepted.message[:20]!r} in {name}; cite one by its id, such as m4"
    for critique in answer.critiques:
        name = critique.conversation.strip()
        if name not in names:
            continue
        if critique.fault == "agent" and not critique.steps:
            yield f"{name}: the fault is the agent's, but no step is named"
        if len(critique.steps) > MAX_STEPS:
            yield f"{name}: {len(critique.steps)} steps are too many, {MAX_STEPS} is the most"
        yield from (f"{name}: a step has no text" for step in critique.steps if not step.wrong.strip())
        for citation in (critique.message, *(step.message for step in critique.steps)):
            if pack.message_index(name, citation) is None:
                yield f"there is no message {citation[:20]!r} in {name}; cite one by its id, such as m4"


def _wrong_quotations(answer: Critiques, pack: Pack) -> Iterator[str]:
    for critique in answer.critiques:
        for step in critique.steps:
            if step.policy.strip() and not pack.quotation(critique.conversation.strip(), step.policy):
                yield f"the policy has no sentence {step.policy[:80]!r}; copy it letter by letter, or leave it empty"


def _critique(pack: Pack, name: str, answer: CritiqueAnswer) -> Critique:
    trajectory_id = pack.conversations[name].id
    fault = Fault(
        trajectory_id, answer.fault, pack.message_index(name, answer.message), one_line(answer.why, MAX_REASON)
    )
    steps = [
        Step(
            trajectory_id,
            index,
            one_line(step.wrong, MAX_STEP_TEXT),
            one_line(step.right, MAX_STEP_TEXT),
            one_line(pack.quotation(name, step.policy), MAX_STEP_TEXT),
        )
        for step in answer.steps
        if (index := pack.message_index(name, step.message)) is not None
    ]
    return Critique(fault, tuple(steps) if answer.fault == "agent" else ())
