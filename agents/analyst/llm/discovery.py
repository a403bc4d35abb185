"""Names candidate capabilities from a sample of conversations, in parts if the sample does not fit the context.

The sample pairs a failure and a success of the same task where possible, then failures and successes of different
tasks. It depends only on the trajectories, their order and the seed. Task ids are never shown.

A part gives at most 10 candidates. Each has all its texts, bounded and on one line, and cites a shown message. If an
answer cites a message that was not shown, it goes back to the model; in the last answer such citations are dropped.
Parts without a usable answer are counted; if all parts fail, ``OutOfForm`` or the server's ``ModelRefused`` is raised.
"""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from agents.analyst.llm.prompting import Form, Prompter, instructions, root_cause
from agents.analyst.llm.rendering import (
    RenderedConversation,
    as_name,
    is_name,
    one_line,
    render_conversation,
    render_policy_and_tools,
    token_estimate,
)
from agents.errors import OutOfForm
from agents.llm.question import delimited
from store.types import Capability, Outcome, Trajectory

# A failure and a success, or one of them alone.
Group = tuple[Trajectory, ...]
# Conversations in the sample.
SAMPLE_SIZE = 60
# Limit for one conversation.
MAX_CONVERSATION_TOKENS = 4000
MAX_CANDIDATES = 10
# Limits in characters.
MAX_TITLE, MAX_DESCRIPTION, MAX_TEXT = 80, 240, 600
# Objections that one request for a correction holds.
MAX_OBJECTIONS = 8
# Tokens of the heading and marks of a conversation.
HEADING_TOKENS = 40
# Trajectory id and message index.
Place = tuple[str, int]
ConversationIndex = Mapping[str, tuple[str, RenderedConversation]]


def sample_groups(trajectories: Sequence[Trajectory], size: int, seed: int) -> list[Group]:
    """Return at most ``size`` trajectories in groups: pairs of the same task, other pairs, then single ones."""
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
            # Skipping to a smaller group would unbalance successes and failures.
            break
        sample.append(group)
        remaining -= len(group)
    return sample


def same_task(group: Group) -> bool:
    """Return whether a group has several conversations and all are about the same task."""
    return (
        len(group) > 1
        and len({(trajectory.source, trajectory.task_id) for trajectory in group}) == 1
        and bool(group[0].task_id)
    )


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
class CitedCapability:
    """A candidate capability and the messages that support it."""

    capability: Capability
    citations: tuple[Place, ...]

    def with_citations_of(self, other: "CitedCapability") -> "CitedCapability":
        """Return this candidate with the citations of both."""
        return replace(self, citations=tuple(dict.fromkeys([*self.citations, *other.citations])))


@dataclass(frozen=True)
class DiscoveryResult:
    """The candidates of all parts, and counts.

    ``candidate_count`` includes dropped candidates. ``conversation_count`` is the number of conversations read,
    ``part_count`` the number of parts, ``unusable_count`` the number of parts without a usable answer.
    """

    candidates: list[CitedCapability]
    candidate_count: int
    conversation_count: int
    part_count: int
    unusable_count: int


async def discover(prompter: Prompter, trajectories: Sequence[Trajectory], evidence: str, seed: int) -> DiscoveryResult:
    """Return candidates from a sample; a capability may occur more than once.

    ``evidence`` is text on the statistics of the builtin analyst, empty for none.
    """
    groups = sample_groups(trajectories, SAMPLE_SIZE, seed)
    fixed_texts = [instructions("discover"), delimited("statistics", evidence) if evidence else ""]
    context = render_policy_and_tools(list(chain(*groups)), prompter.token_budget(*fixed_texts) // 4)
    budget = prompter.token_budget(*fixed_texts, context)
    rendered = {
        trajectory.id: render_conversation(trajectory, min(MAX_CONVERSATION_TOKENS, budget // 2 - HEADING_TOKENS))
        for trajectory in chain(*groups)
    }
    sizes = [
        sum(token_estimate(rendered[trajectory.id].text) + HEADING_TOKENS for trajectory in group) for group in groups
    ]
    parts = [[groups[position] for position in part] for part in batches(sizes, budget)]
    preamble = f"{context}\n{fixed_texts[1]}"
    answers = await prompter.run_all(
        "discovery", [partial(_discover_part, prompter, part, rendered, preamble) for part in parts]
    )
    failed = [answer for answer in answers if isinstance(answer, OutOfForm)]
    if answers and len(failed) == len(answers):
        raise root_cause(failed[0])
    usable = [answer for answer in answers if not isinstance(answer, OutOfForm)]
    candidates = [candidate for answer in usable for candidate in _valid_candidates(*answer)]
    candidate_count = sum(len(answer.candidates) for answer, _ in usable)
    return DiscoveryResult(candidates, candidate_count, len(rendered), len(parts), len(failed))


async def _discover_part(
    prompter: Prompter, groups: Sequence[Group], rendered: Mapping[str, RenderedConversation], preamble: str
) -> "tuple[Candidates, ConversationIndex] | OutOfForm":
    """Return a model's candidates for some groups and the index of the short ids used there, or the error."""
    ids = {f"t{number}": trajectory for number, trajectory in enumerate(chain(*groups), 1)}
    names = {trajectory.id: name for name, trajectory in ids.items()}
    index = {name: (trajectory.id, rendered[trajectory.id]) for name, trajectory in ids.items()}
    conversations = [
        _with_heading(trajectory, group, names, rendered[trajectory.id]) for group in groups for trajectory in group
    ]
    answers: list[Candidates] = []

    def find_objection(answer: Candidates) -> str | None:
        answers.append(answer)
        return "; ".join(list(_objections(answer, index))[:MAX_OBJECTIONS]) or None

    text = "\n\n".join([preamble, *conversations, "Which capabilities do the failures lack?"])
    try:
        answer = await prompter.ask(prompter.question("discover", text), Candidates, find_objection)
    except OutOfForm as error:
        # Without any answer that fits the schema, the error is the part's result.
        if not answers:
            return error
        answer = answers[-1]
    return answer, index


def _with_heading(
    trajectory: Trajectory, group: Group, names: Mapping[str, str], rendering: RenderedConversation
) -> str:
    outcome = "success" if trajectory.outcome is Outcome.SUCCESS else "failure"
    siblings = [names[other.id] for other in group if other is not trajectory] if same_task(group) else []
    relation = f", the same task as {siblings[0]}" if siblings else ""
    return f"Conversation {names[trajectory.id]}, a {outcome}{relation}:\n{delimited('conversation', rendering.text)}"


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
            f"{candidate.name[:40]}: there is no message {citation.message[:20]!r} "
            f"in a conversation {citation.conversation[:20]!r}"
            for citation in candidate.cited
            if _citation(citation, index) is None
        ]
    return objections


def _valid_candidates(answer: Candidates, index: ConversationIndex) -> list[CitedCapability]:
    """Return the candidates that are usable despite objections, at most ``MAX_CANDIDATES``."""
    capabilities: dict[str, CitedCapability] = {}
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
        capabilities[name] = CitedCapability(Capability(name, **fields), tuple(dict.fromkeys(citations)))
    return list(capabilities.values())[:MAX_CANDIDATES]


def _citation(reference: Cited, places: ConversationIndex) -> Place | None:
    trajectory_id, rendering = places.get(reference.conversation.strip(), ("", None))
    message_index = None if rendering is None else rendering.message_index(reference.message)
    return None if message_index is None else (trajectory_id, message_index)


def _texts(candidate: Candidate) -> dict[str, str]:
    return {part: getattr(candidate, part) for part in ("title", "description", "when_needed", "exercised", "lacking")}
