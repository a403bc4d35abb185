"""Packs: the conversations that one question reads, in a text that all questions about them begin with.

A pack holds conversations of one task, so that a failure stands beside a solved twin. Conversations whose task was
tried once share a pack with a few others of the same policy and tools, which would otherwise be most of the cost; a
text that misleads a model about a label can sway its answers on these and on no others. Their critiques have packs of
their own that hold failures only. The order of conversations is seeded and says nothing about the outcome. Policies and
tools come first, then the conversations, then the question: a server with a prefix cache reads them once.

What does not fit into the context is left out and counted (``Pack.omissions``), never silently.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agents.analyst.llm.prompting import MIN_CONVERSATION_TOKENS, Prompter
from agents.analyst.llm.rendering import (
    RenderedConversation,
    quotation,
    render_conversation,
    render_policy_and_tools,
    system_text,
    token_estimate,
)
from agents.llm.question import delimited
from store.types import Outcome, Trajectory

# Conversations that are judged together: more of them share a policy, and a model reads each less carefully.
MAX_PACK = 4
# Conversations of different tasks that are judged together; half of their cost is the policy if each stands alone.
MAX_STRANGERS = 3
# Tokens of the heading and the marks of a conversation.
HEADING_TOKENS = 40
UNLIMITED = 10**9


@dataclass(frozen=True)
class Pack:
    """Some conversations and their common text.

    Attributes:
        conversations: By short id ("t1"), in the order of the text.
        of_one_task: Whether a success among them solved the task of the failures.
        reference: The short id of a solved twin that another pack judges, empty if there is none.
        omissions: Bytes left out, by what they are of.
    """

    text: str
    conversations: Mapping[str, Trajectory]
    rendered: Mapping[str, RenderedConversation]
    of_one_task: bool = True
    reference: str = ""
    omissions: Mapping[str, int] = field(default_factory=dict)

    @property
    def subjects(self) -> list[str]:
        """The short ids of the conversations that this pack judges."""
        return [name for name in self.conversations if name != self.reference]

    @property
    def failed_subjects(self) -> list[str]:
        """The short ids of the failures that this pack judges."""
        return [name for name in self.with_outcome(Outcome.FAILURE) if name != self.reference]

    def with_outcome(self, outcome: Outcome) -> list[str]:
        """Return the short ids of the conversations with an outcome."""
        return [name for name, trajectory in self.conversations.items() if trajectory.outcome is outcome]

    def message_index(self, name: str, citation: str) -> int | None:
        """Return the message that a citation names in a conversation, None if it was not shown."""
        rendering = self.rendered.get(name)
        return None if rendering is None else rendering.message_index(citation)

    def quotation(self, name: str, text: str) -> str:
        """Return a quotation if it occurs in the policy of a conversation, else nothing."""
        trajectory = self.conversations.get(name)
        return "" if trajectory is None else quotation(text, system_text(trajectory))


@dataclass(frozen=True)
class Packs:
    """The packs of the labels, in which every trajectory is judged once, and those of the critiques: every failure."""

    labels: list[Pack]
    critiques: list[Pack]


def make_packs(prompter: Prompter, trajectories: Sequence[Trajectory], seed: int) -> Packs:
    """Return the packs of some trajectories, in a seeded order.

    Raises:
        AgentsError: the context is too small for any conversation.
    """
    rng = random.Random(f"packs:{seed}")
    by_task: dict[tuple[str, str], list[Trajectory]] = defaultdict(list)
    for number, trajectory in enumerate(trajectories):
        key = (trajectory.source, trajectory.task_id) if trajectory.task_id else ("", str(number))
        by_task[key].append(trajectory)
    labels: list[Pack] = []
    critiques: list[Pack] = []
    strangers: list[Trajectory] = []
    for group in rng.sample(list(by_task.values()), len(by_task)):
        if len(group) == 1:
            strangers += group
            continue
        for subjects in _chunks(rng.sample(group, len(group))):
            packs = _fitting_packs(prompter, subjects, _reference(subjects, group))
            labels += packs
            critiques += [pack for pack in packs if pack.failed_subjects]
    labels += _strangers_packs(prompter, strangers)
    failures = [trajectory for trajectory in strangers if trajectory.outcome is Outcome.FAILURE]
    if strangers:
        # The first packs of the labels are a sample of all; the packs of tasks are in a seeded order already.
        labels = rng.sample(labels, len(labels))
    return Packs(labels, critiques + _strangers_packs(prompter, failures))


def _strangers_packs(prompter: Prompter, trajectories: Sequence[Trajectory]) -> list[Pack]:
    """Return packs of conversations of different tasks with the same policy and tools."""
    by_context: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        by_context[render_policy_and_tools([trajectory], UNLIMITED).text].append(trajectory)
    return [
        pack
        for group in by_context.values()
        for start in range(0, len(group), MAX_STRANGERS)
        for pack in _fitting_packs(prompter, group[start : start + MAX_STRANGERS], None, of_one_task=False)
    ]


def _chunks(group: Sequence[Trajectory]) -> Iterator[list[Trajectory]]:
    """Yield the conversations of a task in parts of equal size, with the successes spread over them."""
    count = -(-len(group) // MAX_PACK)
    successes = [trajectory for trajectory in group if trajectory.outcome is Outcome.SUCCESS]
    failures = [trajectory for trajectory in group if trajectory.outcome is not Outcome.SUCCESS]
    dealt = [*successes, *failures]
    for position in range(count):
        ids = {trajectory.id for trajectory in dealt[position::count]}
        yield [trajectory for trajectory in group if trajectory.id in ids]


def _reference(subjects: Sequence[Trajectory], group: Sequence[Trajectory]) -> Trajectory | None:
    """Return a success of the task for failures that have none among them."""
    outcomes = {trajectory.outcome for trajectory in subjects}
    if Outcome.FAILURE not in outcomes or Outcome.SUCCESS in outcomes:
        return None
    return next((trajectory for trajectory in group if trajectory.outcome is Outcome.SUCCESS), None)


def _fitting_packs(
    prompter: Prompter, subjects: Sequence[Trajectory], reference: Trajectory | None, *, of_one_task: bool = True
) -> list[Pack]:
    """Return one pack, or several smaller ones if the conversations do not fit a question together."""
    everyone = [*subjects, *([reference] if reference else [])]
    budget = prompter.pack_budget()
    # Policy and tools may take what two conversations of the least size leave.
    minimum = min(len(everyone), 2) * (MIN_CONVERSATION_TOKENS + HEADING_TOKENS)
    context = render_policy_and_tools(everyone, max(budget - minimum, budget // 2))
    available = budget - token_estimate(context.text)
    renderings = [render_conversation(trajectory, UNLIMITED) for trajectory in everyone]
    sizes = [token_estimate(rendering.text) + HEADING_TOKENS for rendering in renderings]
    if sum(sizes) > available and len(subjects) > 1:
        half = len(subjects) // 2
        halves = (subjects[:half], subjects[half:])
        return [
            pack
            for part in halves
            for pack in _fitting_packs(
                prompter, part, _reference(part, everyone) if of_one_task else None, of_one_task=of_one_task
            )
        ]
    omissions = Counter({"policy": context.omitted_policy, "tools": context.omitted_tools})
    if sum(sizes) > available:
        # A failure keeps two thirds of the room; its twin gets what the failure leaves, or is left out.
        first = min(sizes[0], available * 2 // 3 if reference else available) - HEADING_TOKENS
        second = available - first - 2 * HEADING_TOKENS
        renderings = [render_conversation(subjects[0], first)]
        omissions["messages"] += renderings[0].omitted_bytes
        if reference and second >= MIN_CONVERSATION_TOKENS // 2:
            renderings.append(render_conversation(reference, second))
            omissions["messages"] += renderings[1].omitted_bytes
        elif reference:
            omissions["solved conversations"] += len(render_conversation(reference, UNLIMITED).text.encode())
            everyone, reference = everyone[:1], None
    names = [f"t{number}" for number in range(1, len(everyone) + 1)]
    rendered = dict(zip(names, renderings, strict=True))
    parts = [f"Conversation {name}:\n{delimited('conversation', text.text)}" for name, text in rendered.items()]
    return [
        Pack(
            "\n\n".join([context.text, *parts]).strip(),
            dict(zip(names, everyone, strict=True)),
            rendered,
            of_one_task,
            names[-1] if reference else "",
            {name: count for name, count in omissions.items() if count},
        )
    ]


def single_pack(prompter: Prompter, pack: Pack, name: str) -> Pack:
    """Return a pack that judges one conversation of ``pack``, a failure beside its solved twin."""
    subject = pack.conversations[name]
    group = list(pack.conversations.values()) if pack.of_one_task else []
    return _fitting_packs(prompter, [subject], _reference([subject], group), of_one_task=pack.of_one_task)[0]


def omission_figures(packs: Sequence[Pack]) -> dict[str, dict[str, int]]:
    """Return, by what was left out, the number of packs and of bytes; empty if everything was shown."""
    figures: dict[str, dict[str, int]] = {}
    for pack in packs:
        for name, count in pack.omissions.items():
            entry = figures.setdefault(name, {"questions": 0, "bytes": 0})
            entry["questions"] += 1
            entry["bytes"] += count
    return figures
