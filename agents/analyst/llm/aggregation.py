"""Names candidate capabilities from the steps that went wrong in failures, bottom up.

Steps of failures in one order are put together by a model, in parts if they do not fit the context. The catalogue of
the builtin analyst is shown as one more voice; its names and texts are never put in place of the model's.

A part gives at most 10 candidates. Each has all its texts, bounded and on one line, and rests on steps that exist; an
answer that names others goes back to the model, and in the last answer they are dropped. Parts without a usable answer
are counted; if all parts fail, ``OutOfForm`` or the server's ``ModelRefused`` is raised.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from agents.analyst.llm.critique import Step
from agents.analyst.llm.prompting import Form, Prompter, instructions, root_cause
from agents.analyst.llm.rendering import as_name, is_name, one_line, token_estimate
from agents.errors import OutOfForm
from agents.llm.question import delimited
from store.types import Capability

MAX_CANDIDATES = 10
# Limits in characters.
MAX_TITLE, MAX_DESCRIPTION, MAX_TEXT = 80, 240, 600
# Objections that one request for a correction holds.
MAX_OBJECTIONS = 8


class Candidate(Form):
    """A capability as a model names it."""

    name: str
    title: str
    description: str
    when_needed: str
    exercised: str
    lacking: str
    steps: list[str]


class Candidates(Form):
    """What a model makes of one part of the steps."""

    candidates: list[Candidate]


@dataclass(frozen=True)
class CitedCapability:
    """A candidate capability and the steps that support it."""

    capability: Capability
    steps: tuple[Step, ...]

    def with_steps_of(self, other: "CitedCapability") -> "CitedCapability":
        """Return this candidate with the steps of both."""
        return replace(self, steps=tuple(dict.fromkeys([*self.steps, *other.steps])))


@dataclass(frozen=True)
class AggregationResult:
    """The candidates of all parts, and counts; ``candidate_count`` includes dropped candidates."""

    candidates: list[CitedCapability]
    candidate_count: int
    part_count: int
    unusable_count: int


async def aggregate(prompter: Prompter, steps: Sequence[Step], catalogue: str) -> AggregationResult:
    """Return candidates made of the steps; a capability may occur more than once.

    Args:
        catalogue: the builtin analyst's capabilities with its counts, empty for none.
    """
    if not steps:
        return AggregationResult([], 0, 0, 0)
    voice = delimited("catalogue", catalogue) if catalogue else ""
    budget = prompter.token_budget(instructions("aggregate"), voice) - MARK_TOKENS
    failures = {key: number for number, key in enumerate(dict.fromkeys(step.trajectory_id for step in steps), 1)}
    lines = [_line(number, failures[step.trajectory_id], step) for number, step in enumerate(steps, 1)]
    parts = batches([token_estimate(line) + 1 for line in lines], budget)
    by_id = {f"s{number}": step for number, step in enumerate(steps, 1)}
    texts = ["\n".join(lines[position] for position in part) for part in parts]
    answers = await prompter.run_all(
        "capabilities", [partial(_of_part, prompter, text, by_id, voice) for text in texts]
    )
    failed = [answer for answer in answers if isinstance(answer, OutOfForm)]
    if len(failed) == len(answers):
        raise root_cause(failed[0])
    usable = [answer for answer in answers if not isinstance(answer, OutOfForm)]
    candidates = [candidate for answer in usable for candidate in _valid_candidates(answer, by_id)]
    return AggregationResult(candidates, sum(len(answer.candidates) for answer in usable), len(parts), len(failed))


# Tokens of the marks around the steps.
MARK_TOKENS = 100


def batches(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items of these sizes, in order and greedily, into lists of at most ``capacity``; return their positions.

    An item larger than ``capacity`` gets a list without other items.
    """
    groups: list[list[int]] = []
    remaining = 0
    for position, size in enumerate(sizes):
        if not groups or size > remaining:
            groups.append([])
            remaining = capacity
        groups[-1].append(position)
        remaining -= size
    return groups


def _line(number: int, failure: int, step: Step) -> str:
    policy = f' Policy: "{step.policy}"' if step.policy else ""
    return f"- s{number} (failure {failure}): {step.reason}{policy}"


async def _of_part(prompter: Prompter, text: str, steps: Mapping[str, Step], voice: str) -> "Candidates | OutOfForm":
    """Return a model's candidates for some steps, or the error."""
    answers: list[Candidates] = []

    def find_objection(answer: Candidates) -> str | None:
        answers.append(answer)
        return "; ".join(_objections(answer, steps)[:MAX_OBJECTIONS]) or None

    data = "\n\n".join(part for part in (delimited("steps", text), voice) if part)
    question = prompter.question("aggregate", "Which capabilities did the agent lack in these steps?", data=data)
    try:
        return await prompter.ask(question, Candidates, find_objection)
    except OutOfForm as error:
        # Without any answer that fits the schema, the error is the part's result.
        return answers[-1] if answers else error


def _objections(answer: Candidates, steps: Mapping[str, Step]) -> list[str]:
    objections = []
    if len(answer.candidates) > MAX_CANDIDATES:
        objections.append(f"{len(answer.candidates)} candidates are too many, {MAX_CANDIDATES} is the most")
    names = [candidate.name for candidate in answer.candidates]
    objections += [f"the name {name[:40]!r} is given twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    for candidate in answer.candidates:
        name = candidate.name[:40]
        if not is_name(candidate.name):
            objections.append(f"{name!r} is no name of two to five lower-case words joined by hyphens")
        objections += [f"{name}: {part} is empty" for part, text in _texts(candidate).items() if not text.strip()]
        if len(candidate.description) > MAX_DESCRIPTION:
            objections.append(f"{name}: the description is longer than 200 characters")
        if not candidate.steps:
            objections.append(f"{name} rests on no step")
        objections += [f"{name}: there is no step {key[:20]!r}" for key in candidate.steps if key.strip() not in steps]
    return objections


def _valid_candidates(answer: Candidates, steps: Mapping[str, Step]) -> list[CitedCapability]:
    """Return the candidates that are usable despite objections, at most ``MAX_CANDIDATES``."""
    capabilities: dict[str, CitedCapability] = {}
    for candidate in answer.candidates:
        name = candidate.name if is_name(candidate.name) else as_name(candidate.name)
        support = [steps[key.strip()] for key in candidate.steps if key.strip() in steps]
        texts = _texts(candidate)
        if (
            not name
            or not support
            or name in capabilities
            or not all(one_line(text, MAX_TEXT) for text in texts.values())
        ):
            continue
        bounds = {"title": MAX_TITLE, "description": MAX_DESCRIPTION}
        fields = {part: one_line(text, bounds.get(part, MAX_TEXT)) for part, text in texts.items()}
        capabilities[name] = CitedCapability(Capability(name, **fields), tuple(dict.fromkeys(support)))
    return list(capabilities.values())[:MAX_CANDIDATES]


def _texts(candidate: Candidate) -> dict[str, str]:
    return {part: getattr(candidate, part) for part in ("title", "description", "when_needed", "exercised", "lacking")}
