"""One name for one capability: duplicates among candidates are merged, and known capabilities keep their names.

Names that are the same, or nearly, are the same capability; beyond that a model is asked. A known one, of an earlier
cycle or of the builtin catalogue, keeps its name and its texts, so that what is found again is not found anew.

Invariants: at most 10 candidates are left; every candidate's citations go to the one that it is merged into; no name
is there twice. Where the model gives no usable answer the names decide alone: a duplicate costs labels, and nothing
else.
"""

from collections.abc import Iterable, Sequence

from agents.analyst.llm.discovery import MAX_CANDIDATES, Found
from agents.analyst.llm.prompting import Asking, Form, instructions
from agents.analyst.llm.rendering import near, tokens
from agents.errors import OutOfForm
from agents.llm.question import marked
from store.types import Capability


class Group(Form):
    """Capabilities that mean the same."""

    keep: str
    same: list[str]


class Groups(Form):
    """Every name exactly once, the most telling first."""

    groups: list[Group]


class Match(Form):
    """Which known capability a new one is; "" for none."""

    new: str
    known: str


class Matches(Form):
    """One for every new capability."""

    matches: list[Match]


async def merged(asking: Asking, candidates: Sequence[Found]) -> list[Found]:
    """The candidates without duplicates, at most 10 of them, the most telling first."""
    distinct = _without_duplicates(candidates)
    if len(distinct) < 2:
        return distinct
    budget = asking.room(instructions("merge"))
    if sum(tokens(_capability_line(candidate.capability)) for candidate in distinct) > budget and len(distinct) > 3:
        half = len(distinct) // 2
        first, second = await merged(asking, distinct[:half]), await merged(asking, distinct[half:])
        if len(first) + len(second) == len(distinct):  # it would not end
            return distinct[:MAX_CANDIDATES]
        return await merged(asking, [*first, *second])
    by_name = {candidate.capability.name: candidate for candidate in distinct}

    def wrong(answer: Groups) -> str | None:
        return _name_objection((name for group in answer.groups for name in (group.keep, *group.same)), list(by_name))

    text = (
        f"{_marked_list('capabilities', [candidate.capability for candidate in distinct])}\nWhich of them are the same?"
    )
    try:
        answer = await asking.ask(asking.question("merge", text), Groups, wrong)
    except OutOfForm:
        return sorted(distinct, key=lambda candidate: -len(candidate.cited))[:MAX_CANDIDATES]
    return [_union([by_name[name] for name in (group.keep, *group.same)]) for group in answer.groups][:MAX_CANDIDATES]


async def matched(asking: Asking, candidates: Sequence[Found], known: Sequence[Capability]) -> list[Found]:
    """The candidates, those that are known under their known names and texts."""
    renamed = [_renamed(candidate, _known_match(candidate.capability.name, known)) for candidate in candidates]
    names = {capability.name for capability in known}
    new = [candidate.capability for candidate in renamed if candidate.capability.name not in names]
    matched_names = {candidate.capability.name for candidate in renamed} & names
    unmatched = _fitting_known(
        asking, [capability for capability in known if capability.name not in matched_names], new
    )
    if not new or not unmatched:
        return _without_duplicates(renamed)
    new_names, known_by_name = (
        {candidate.name for candidate in new},
        {candidate.name: candidate for candidate in unmatched},
    )

    def wrong(answer: Matches) -> str | None:
        unknown_names = [match.known for match in answer.matches if match.known not in ("", *known_by_name)]
        objection = f"{unknown_names[0][:40]!r} is none of the known ones" if unknown_names else None
        return _name_objection((match.new for match in answer.matches), sorted(new_names)) or objection

    text = f"{_marked_list('known', unmatched)}\n{_marked_list('new', new)}\nWhich known one is each new one?"
    try:
        answer = await asking.ask(asking.question("match", text), Matches, wrong)
    except OutOfForm:
        return _without_duplicates(renamed)
    match_of = {match.new: known_by_name[match.known] for match in answer.matches if match.known}
    return _without_duplicates(_renamed(candidate, match_of.get(candidate.capability.name)) for candidate in renamed)


def _without_duplicates(candidates: Iterable[Found]) -> list[Found]:
    """Those whose names are nearly the same as one, the first."""
    distinct: list[Found] = []
    for candidate in candidates:
        duplicate_of = next(
            (
                position
                for position, earlier in enumerate(distinct)
                if near(earlier.capability.name, candidate.capability.name)
            ),
            None,
        )
        if duplicate_of is None:
            distinct.append(candidate)
        else:
            distinct[duplicate_of] = distinct[duplicate_of].beside(candidate)
    return distinct


def _union(candidates: Sequence[Found]) -> Found:
    combined = candidates[0]
    for other in candidates[1:]:
        combined = combined.beside(other)
    return combined


def _known_match(name: str, known: Sequence[Capability]) -> Capability | None:
    exact = (capability for capability in known if capability.name == name)
    return next(exact, None) or next((capability for capability in known if near(name, capability.name)), None)


def _renamed(candidate: Found, known: Capability | None) -> Found:
    return candidate if known is None else Found(known, candidate.cited)


def _name_objection(answered_names: Iterable[str], expected: Sequence[str]) -> str | None:
    """What is wrong with names that should be exactly the wanted ones, each once."""
    names = list(answered_names)
    objections = [f"{name[:40]!r} is not in the list" for name in names if name not in expected][:3]
    objections += [f"{name!r} stands there {names.count(name)} times" for name in expected if names.count(name) != 1][
        :5
    ]
    return "; ".join(objections) or None


def _fitting_known(asking: Asking, known: Sequence[Capability], new: Sequence[Capability]) -> list[Capability]:
    """As many of the known ones as fit beside the new ones, the first first."""
    budget = asking.room(instructions("match")) - sum(tokens(_capability_line(capability)) for capability in new)
    fitting = []
    for capability in known:
        budget -= tokens(_capability_line(capability))
        if budget > 0:
            fitting.append(capability)
    return fitting


def _marked_list(name: str, capabilities: Iterable[Capability]) -> str:
    return marked(name, "\n".join(map(_capability_line, capabilities)))


def _capability_line(capability: Capability) -> str:
    return (
        f"- {capability.name}: {capability.description} Needed: {capability.when_needed} Lacking: {capability.lacking}"
    )
