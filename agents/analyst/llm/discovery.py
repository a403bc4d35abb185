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
    for one in shuffled:
        if one.task_id and one.outcome.judged:
            of_task[one.source, one.task_id].setdefault(one.outcome, one)
    pairs = [
        (sides[Outcome.FAILURE], sides[Outcome.SUCCESS])
        for sides in of_task.values()
        if {Outcome.FAILURE, Outcome.SUCCESS} <= set(sides)
    ]
    paired = {one.id for one in chain(*pairs)}
    alone = [one for one in shuffled if one.id not in paired]
    failures = [one for one in alone if one.outcome is Outcome.FAILURE]
    successes = [one for one in alone if one.outcome is Outcome.SUCCESS]
    beside: list[Group] = list(zip(failures, successes, strict=False))
    rest: list[Group] = [(one,) for one in [*failures[len(beside) :], *successes[len(beside) :]]]
    chosen: list[Group] = []
    left = size
    for group in [*pairs, *beside, *rest]:
        if len(group) > left:
            break  # a later one that fits would tip the sides
        chosen.append(group)
        left -= len(group)
    return chosen


def same_task(group: Group) -> bool:
    """Whether a group's conversations are about the same task."""
    return len(group) > 1 and len({(one.source, one.task_id) for one in group}) == 1 and bool(group[0].task_id)


def batches(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Places of things of these sizes, in order, in as few lists as fill ``room`` one after the other."""
    packed: list[list[int]] = []
    left = 0
    for place, size in enumerate(sizes):
        if not packed or size > left:
            packed.append([])
            left = room
        packed[-1].append(place)
        left -= size
    return packed


SAMPLE = 60  # conversations
EACH = 4000  # tokens of one conversation, at most
MAX_CANDIDATES = 10
TITLE, DESCRIPTION, TEXT = 80, 240, 600  # characters
COMPLAINTS = 8  # told at once
HEADING = 40  # tokens around a conversation

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
    read: int
    parts: int
    unusable: int


async def discover(asking: Asking, trajectories: Sequence[Trajectory], evidence: str, seed: int) -> Discovered:
    """Candidates from a sample; the same capability may come more than once."""
    groups = sampled(trajectories, SAMPLE, seed)
    fixed = [instructions("discover"), marked("statistics", evidence) if evidence else ""]
    around = surroundings(list(chain(*groups)), asking.room(*fixed) // 4)
    room = asking.room(*fixed, around)
    read = {one.id: shown(one, min(EACH, room // 2 - HEADING)) for one in chain(*groups)}
    sizes = [sum(tokens(read[one.id].text) + HEADING for one in group) for group in groups]
    parts = [[groups[place] for place in part] for part in batches(sizes, room)]
    beginning = f"{around}\n{fixed[1]}"
    answers = await asking.each("discovery", [partial(_part, asking, part, read, beginning) for part in parts])
    failed = [answer for answer in answers if isinstance(answer, OutOfForm)]
    if answers and len(failed) == len(answers):
        raise reason(failed[0])
    usable = [answer for answer in answers if not isinstance(answer, OutOfForm)]
    found = [one for answer in usable for one in _sound(*answer)]
    named = sum(len(answer.candidates) for answer, _ in usable)
    return Discovered(found, named, len(read), len(parts), len(failed))


async def _part(
    asking: Asking, groups: Sequence[Group], read: Mapping[str, Shown], beginning: str
) -> "tuple[Candidates, Places] | OutOfForm":
    """What a model names in some groups, and what the ids in it mean."""
    ids = {f"t{number}": one for number, one in enumerate(chain(*groups), 1)}
    called = {one.id: name for name, one in ids.items()}
    places = {name: (one.id, read[one.id]) for name, one in ids.items()}
    told = [_headed(one, group, called, read[one.id]) for group in groups for one in group]
    last: list[Candidates] = []

    def wrong(answer: Candidates) -> str | None:
        last.append(answer)
        return "; ".join(list(_complaints(answer, places))[:COMPLAINTS]) or None

    text = "\n\n".join([beginning, *told, "Which capabilities do the failures lack?"])
    try:
        answer = await asking.ask(asking.question("discover", text), Candidates, wrong)
    except OutOfForm as error:
        if not last:
            return error
        answer = last[-1]
    return answer, places


def _headed(one: Trajectory, group: Group, called: Mapping[str, str], read: Shown) -> str:
    outcome = "success" if one.outcome is Outcome.SUCCESS else "failure"
    others = [called[other.id] for other in group if other is not one] if same_task(group) else []
    told = f", the same task as {others[0]}" if others else ""
    return f"Conversation {called[one.id]}, a {outcome}{told}:\n{marked('conversation', read.text)}"


Places = Mapping[str, tuple[str, Shown]]


def _complaints(answer: Candidates, places: Places) -> "list[str]":
    told = []
    if len(answer.candidates) > MAX_CANDIDATES:
        told.append(f"{len(answer.candidates)} candidates are too many, {MAX_CANDIDATES} is the most")
    names = [one.name for one in answer.candidates]
    told += [f"the name {name[:40]!r} is given twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    for one in answer.candidates:
        if not is_name(one.name):
            told.append(f"{one.name[:40]!r} is no name of two to five lower-case words joined by hyphens")
        told += [f"{one.name[:40]}: {name} is empty" for name, text in _texts(one).items() if not text.strip()]
        if len(one.description) > DESCRIPTION:
            told.append(f"{one.name[:40]}: the description is longer than 200 characters")
        if not one.cited:
            told.append(f"{one.name[:40]} cites no message")
        told += [
            f"{one.name[:40]}: there is no message {cited.message[:20]!r} in a conversation {cited.conversation[:20]!r}"
            for cited in one.cited
            if _place(cited, places) is None
        ]
    return told


def _sound(answer: Candidates, places: Places) -> list[Found]:
    """What can be kept of an answer, objections or not."""
    found: dict[str, Found] = {}
    for one in answer.candidates:
        name = one.name if is_name(one.name) else as_name(one.name)
        cited = [place for each in one.cited if (place := _place(each, places)) is not None]
        texts = _texts(one)
        if not name or not cited or name in found or not all(one_line(text, TEXT) for text in texts.values()):
            continue
        bounds = {"title": TITLE, "description": DESCRIPTION}
        kept = {part: one_line(text, bounds.get(part, TEXT)) for part, text in texts.items()}
        found[name] = Found(Capability(name, **kept), tuple(dict.fromkeys(cited)))
    return list(found.values())[:MAX_CANDIDATES]


def _place(cited: Cited, places: Places) -> Place | None:
    key, read = places.get(cited.conversation.strip(), ("", None))
    index = None if read is None else read.cited(cited.message)
    return None if index is None else (key, index)


def _texts(one: Candidate) -> dict[str, str]:
    return {part: getattr(one, part) for part in ("title", "description", "when_needed", "exercised", "lacking")}
