"""Naming candidate capabilities from a sample of conversations; map-reduce where the sample does not fit the context.

Invariants: at most 10 candidates; each has a name, all its texts, and at least one citation of a message that its
question showed; texts are bounded and on one line. Invented ids go back to the model with the complaint; what is still
invented in its last answer is dropped, and a candidate that is left without a citation with it. A part of the sample
that the model gives no usable answer on is counted and passed over; where that is all of it, ``OutOfForm``.

Which conversations a model reads to name capabilities: successes and failures in equal parts, same tasks together.

Invariants: deterministic in the trajectories, their order and the seed; of tasks that were both solved and failed one
success and one failure come first, side by side; then failures beside successes of other tasks; then what is left of
either. A task's id is only compared, never shown. Not covered: which conversations tell most.
"""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from agents.analyst.llm.prompting import Asking, Form, instructions, reason
from agents.analyst.llm.rendering import Shown, as_name, is_name, one_line, shown, surroundings, tokens
from agents.errors import OutOfForm
from agents.llm.question import marked
from store.types import Capability, Outcome, Trajectory

Group = tuple[Trajectory, ...]  # a failure and a success, or one of them alone


def sampled(trajectories: Sequence[Trajectory], size: int, seed: int) -> list[Group]:
    """At most ``size`` trajectories, in groups that belong together, those that tell most first."""
    rng = random.Random(f"discovery:{seed}")
    shuffled = rng.sample(trajectories, len(trajectories))
    of_task: dict[tuple[str, str], dict[Outcome, Trajectory]] = defaultdict(dict)
    for trajectory in shuffled:
        if trajectory.task_id and trajectory.outcome.is_judged:
            of_task[trajectory.source, trajectory.task_id].setdefault(trajectory.outcome, trajectory)
    pairs = [
        (sides[Outcome.FAILURE], sides[Outcome.SUCCESS])
        for sides in of_task.values()
        if {Outcome.FAILURE, Outcome.SUCCESS} <= set(sides)
    ]
    paired = {trajectory.id for trajectory in chain(*pairs)}
    unpaired = [trajectory for trajectory in shuffled if trajectory.id not in paired]
    failures = [trajectory for trajectory in unpaired if trajectory.outcome is Outcome.FAILURE]
    successes = [trajectory for trajectory in unpaired if trajectory.outcome is Outcome.SUCCESS]
    mixed_pairs: list[Group] = list(zip(failures, successes, strict=False))
    singles: list[Group] = [
        (trajectory,) for trajectory in [*failures[len(mixed_pairs) :], *successes[len(mixed_pairs) :]]
    ]
    sample: list[Group] = []
    remaining = size
    for group in [*pairs, *mixed_pairs, *singles]:
        if len(group) > remaining:
            break  # a later one that fits would tip the sides
        sample.append(group)
        remaining -= len(group)
    return sample


def same_task(group: Group) -> bool:
    """Whether a group's conversations are about the same task."""
    return (
        len(group) > 1
        and len({(trajectory.source, trajectory.task_id) for trajectory in group}) == 1
        and bool(group[0].task_id)
    )


def batches(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Places of things of these sizes, in order, in as few lists as fill ``room`` one after the other."""
    groups: list[list[int]] = []
    remaining = 0
    for position, size in enumerate(sizes):
        if not groups or size > remaining:
            groups.append([])
            remaining = capacity
        groups[-1].append(position)
        remaining -= size
    return groups


SAMPLE_SIZE = 60  # conversations
MAX_CONVERSATION_TOKENS = 4000  # tokens of one conversation, at most
MAX_CANDIDATES = 10
MAX_TITLE, MAX_DESCRIPTION, MAX_TEXT = 80, 240, 600  # characters
MAX_OBJECTIONS = 8  # told at once
HEADING_TOKENS = 40  # tokens around a conversation

Place = tuple[str, int]  # trajectory and index of a message


class Cited(Form):
    """A message of a conversation, by their short ids."""

    conversation: str
    message: str


class Candidate(Form):
    """A capability as a model names it."""

    name: str
    title: str
    description: str
    when_needed: str
    exercised: str
    lacking: str
    cited: list[Cited]


class Candidates(Form):
    """What a model found in one part of the sample."""

    candidates: list[Candidate]


@dataclass(frozen=True)
class Found:
    """A candidate capability and the messages that it rests on."""

    capability: Capability
    cited: tuple[Place, ...]

    def beside(self, other: "Found") -> "Found":
        """Its own texts, with the citations of both."""
        return replace(self, cited=tuple(dict.fromkeys([*self.cited, *other.cited])))


@dataclass(frozen=True)
class Discovered:
    """Candidates of all parts as they came, how many were named (what is not kept included), how many conversations
    were read, in how many parts, and parts without an answer."""

    candidates: list[Found]
    named: int
    texts_read: int
    parts: int
    unusable: int


async def discover(asking: Asking, trajectories: Sequence[Trajectory], evidence: str, seed: int) -> Discovered:
    """Candidates from a sample; the same capability may come more than once."""
    groups = sampled(trajectories, SAMPLE_SIZE, seed)
    fixed_texts = [instructions("discover"), marked("statistics", evidence) if evidence else ""]
    context = surroundings(list(chain(*groups)), asking.room(*fixed_texts) // 4)
    budget = asking.room(*fixed_texts, context)
    rendered = {
        item.id: shown(item, min(MAX_CONVERSATION_TOKENS, budget // 2 - HEADING_TOKENS)) for item in chain(*groups)
    }
    sizes = [sum(tokens(rendered[item.id].text) + HEADING_TOKENS for item in group) for group in groups]
    parts = [[groups[position] for position in part] for part in batches(sizes, budget)]
    preamble = f"{context}\n{fixed_texts[1]}"
    answers = await asking.each(
        "discovery", [partial(_discover_part, asking, part, rendered, preamble) for part in parts]
    )
    failed = [answer for answer in answers if isinstance(answer, OutOfForm)]
    if answers and len(failed) == len(answers):
        raise reason(failed[0])
    usable = [answer for answer in answers if not isinstance(answer, OutOfForm)]
    candidates = [item for answer in usable for item in _valid_candidates(*answer)]
    candidate_count = sum(len(answer.candidates) for answer, _ in usable)
    return Discovered(candidates, candidate_count, len(rendered), len(parts), len(failed))


async def _discover_part(
    asking: Asking, groups: Sequence[Group], rendered: Mapping[str, Shown], preamble: str
) -> "tuple[Candidates, ConversationIndex] | OutOfForm":
    """What a model names in some groups, and what the ids in it mean."""
    ids = {f"t{number}": trajectory for number, trajectory in enumerate(chain(*groups), 1)}
    names = {trajectory.id: name for name, trajectory in ids.items()}
    index = {name: (trajectory.id, rendered[trajectory.id]) for name, trajectory in ids.items()}
    conversations = [
        _with_heading(trajectory, group, names, rendered[trajectory.id]) for group in groups for trajectory in group
    ]
    answers: list[Candidates] = []

    def wrong(answer: Candidates) -> str | None:
        answers.append(answer)
        return "; ".join(list(_objections(answer, index))[:MAX_OBJECTIONS]) or None

    text = "\n\n".join([preamble, *conversations, "Which capabilities do the failures lack?"])
    try:
        answer = await asking.ask(asking.question("discover", text), Candidates, wrong)
    except OutOfForm as error:
        if not answers:
            return error
        answer = answers[-1]
    return answer, index


def _with_heading(trajectory: Trajectory, group: Group, names: Mapping[str, str], rendering: Shown) -> str:
    outcome = "success" if trajectory.outcome is Outcome.SUCCESS else "failure"
    siblings = [names[other.id] for other in group if other is not trajectory] if same_task(group) else []
    relation = f", the same task as {siblings[0]}" if siblings else ""
    return f"Conversation {names[trajectory.id]}, a {outcome}{relation}:\n{marked('conversation', rendering.text)}"


ConversationIndex = Mapping[str, tuple[str, Shown]]


def _objections(answer: Candidates, index: ConversationIndex) -> "list[str]":
    objections = []
    if len(answer.candidates) > MAX_CANDIDATES:
        objections.append(f"{len(answer.candidates)} candidates are too many, {MAX_CANDIDATES} is the most")
    names = [candidate.name for candidate in answer.candidates]
    objections += [f"the name {name[:40]!r} is given twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    for candidate in answer.candidates:
        if not is_name(candidate.name):
            objections.append(f"{candidate.name[:40]!r} is no name of two to five lower-case words joined by hyphens")
        objections += [
            f"{candidate.name[:40]}: {name} is empty" for name, text in _texts(candidate).items() if not text.strip()
        ]
        if len(candidate.description) > MAX_DESCRIPTION:
            objections.append(f"{candidate.name[:40]}: the description is longer than 200 characters")
        if not candidate.cited:
            objections.append(f"{candidate.name[:40]} cites no message")
        objections += [
            f"{candidate.name[:40]}: there is no message {citation.message[:20]!r} in a conversation {citation.conversation[:20]!r}"
            for citation in candidate.cited
            if _citation(citation, index) is None
        ]
    return objections


def _valid_candidates(answer: Candidates, index: ConversationIndex) -> list[Found]:
    """What can be kept of an answer, objections or not."""
    capabilities: dict[str, Found] = {}
    for candidate in answer.candidates:
        name = candidate.name if is_name(candidate.name) else as_name(candidate.name)
        citations = [citation for reference in candidate.cited if (citation := _citation(reference, index)) is not None]
        texts = _texts(candidate)
        if (
            not name
            or not citations
            or name in capabilities
            or not all(one_line(text, MAX_TEXT) for text in texts.values())
        ):
            continue
        bounds = {"title": MAX_TITLE, "description": MAX_DESCRIPTION}
        fields = {part: one_line(text, bounds.get(part, MAX_TEXT)) for part, text in texts.items()}
        capabilities[name] = Found(Capability(name, **fields), tuple(dict.fromkeys(citations)))
    return list(capabilities.values())[:MAX_CANDIDATES]


def _citation(reference: Cited, places: ConversationIndex) -> Place | None:
    trajectory_id, rendering = places.get(reference.conversation.strip(), ("", None))
    message_index = None if rendering is None else rendering.cited(reference.message)
    return None if message_index is None else (trajectory_id, message_index)


def _texts(candidate: Candidate) -> dict[str, str]:
    return {part: getattr(candidate, part) for part in ("title", "description", "when_needed", "exercised", "lacking")}
