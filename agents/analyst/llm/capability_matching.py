"""Merges duplicate candidates and matches candidates to known capabilities.

Equal or nearly equal names mean the same capability; for other names a model decides. A known capability is one that a
model named in an earlier cycle; it keeps its name and texts. The catalogue of the builtin analyst is not known in this
sense: its texts never replace those of the model. Merged candidates keep the steps of all.
Without a usable answer of the model only the names decide; undetected duplicates then cost extra labels and nothing
else.
"""

from collections.abc import Iterable, Sequence

from agents.analyst.llm.aggregation import MAX_CANDIDATES, CitedCapability
from agents.analyst.llm.prompting import Form, Prompter, instructions
from agents.analyst.llm.rendering import is_same_name, token_estimate
from agents.errors import OutOfForm
from agents.llm.question import delimited
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


async def merge_duplicates(
    prompter: Prompter, candidates: Sequence[CitedCapability], *, ask_model: bool
) -> list[CitedCapability]:
    """Return the candidates without duplicates, at most 10, in the model's order (the most telling first).

    Without a usable answer, those with the most steps come first.

    Args:
        ask_model: whether a model decides on other names; one answer that named all candidates has decided already.
    """
    distinct = _without_duplicates(candidates)
    if len(distinct) < 2 or not ask_model:
        return distinct[:MAX_CANDIDATES]
    budget = prompter.token_budget(instructions("merge"))
    if (
        sum(token_estimate(_capability_line(candidate.capability)) for candidate in distinct) > budget
        and len(distinct) > 3
    ):
        half = len(distinct) // 2
        first, second = (
            await merge_duplicates(prompter, distinct[:half], ask_model=True),
            await merge_duplicates(prompter, distinct[half:], ask_model=True),
        )
        # Nothing was merged, so another round would have the same result and recurse without end.
        if len(first) + len(second) == len(distinct):
            return distinct[:MAX_CANDIDATES]
        return await merge_duplicates(prompter, [*first, *second], ask_model=True)
    by_name = {candidate.capability.name: candidate for candidate in distinct}

    def find_objection(answer: Groups) -> str | None:
        return _name_objection((name for group in answer.groups for name in (group.keep, *group.same)), list(by_name))

    listing = _marked_list("capabilities", [candidate.capability for candidate in distinct])
    question = prompter.question("merge", "Which of them are the same?", data=listing)
    try:
        answer = await prompter.ask(question, Groups, find_objection)
    except OutOfForm:
        return sorted(distinct, key=lambda candidate: -len(candidate.steps))[:MAX_CANDIDATES]
    return [_union([by_name[name] for name in (group.keep, *group.same)]) for group in answer.groups][:MAX_CANDIDATES]


async def match_known(
    prompter: Prompter, candidates: Sequence[CitedCapability], known_capabilities: Sequence[Capability]
) -> list[CitedCapability]:
    """Return the candidates; those that match a known capability take over its name and texts."""
    renamed = [
        _renamed(candidate, _known_match(candidate.capability.name, known_capabilities)) for candidate in candidates
    ]
    names = {capability.name for capability in known_capabilities}
    new = [candidate.capability for candidate in renamed if candidate.capability.name not in names]
    matched_names = {candidate.capability.name for candidate in renamed} & names
    unmatched = _fitting_known(
        prompter, [capability for capability in known_capabilities if capability.name not in matched_names], new
    )
    if not new or not unmatched:
        return _without_duplicates(renamed)
    new_names, known_by_name = (
        {candidate.name for candidate in new},
        {candidate.name: candidate for candidate in unmatched},
    )

    def find_objection(answer: Matches) -> str | None:
        unknown_names = [match.known for match in answer.matches if match.known not in ("", *known_by_name)]
        objection = f"{unknown_names[0][:40]!r} is none of the known ones" if unknown_names else None
        return _name_objection((match.new for match in answer.matches), sorted(new_names)) or objection

    data = f"{_marked_list('known', unmatched)}\n{_marked_list('new', new)}"
    question = prompter.question("match", "Which known one is each new one?", data=data)
    try:
        answer = await prompter.ask(question, Matches, find_objection)
    except OutOfForm:
        return _without_duplicates(renamed)
    match_of = {match.new: known_by_name[match.known] for match in answer.matches if match.known}
    return _without_duplicates(_renamed(candidate, match_of.get(candidate.capability.name)) for candidate in renamed)


def _without_duplicates(candidates: Iterable[CitedCapability]) -> list[CitedCapability]:
    """Return the candidates; those with nearly the same name are united under the first of them."""
    distinct: list[CitedCapability] = []
    for candidate in candidates:
        duplicate_of = next(
            (
                position
                for position, earlier in enumerate(distinct)
                if is_same_name(earlier.capability.name, candidate.capability.name)
            ),
            None,
        )
        if duplicate_of is None:
            distinct.append(candidate)
        else:
            distinct[duplicate_of] = distinct[duplicate_of].with_steps_of(candidate)
    return distinct


def _union(candidates: Sequence[CitedCapability]) -> CitedCapability:
    combined = candidates[0]
    for other in candidates[1:]:
        combined = combined.with_steps_of(other)
    return combined


def _known_match(name: str, known_capabilities: Sequence[Capability]) -> Capability | None:
    exact = (capability for capability in known_capabilities if capability.name == name)
    return next(exact, None) or next(
        (capability for capability in known_capabilities if is_same_name(name, capability.name)), None
    )


def _renamed(candidate: CitedCapability, match: Capability | None) -> CitedCapability:
    return candidate if match is None else CitedCapability(match, candidate.steps)


def _name_objection(answered_names: Iterable[str], expected: Sequence[str]) -> str | None:
    """Return what is wrong with names that should be exactly the expected ones, each once; None if nothing is."""
    names = list(answered_names)
    objections = [f"{name[:40]!r} is not in the list" for name in names if name not in expected][:3]
    objections += [f"{name!r} stands there {names.count(name)} times" for name in expected if names.count(name) != 1][
        :5
    ]
    return "; ".join(objections) or None


def _fitting_known(
    prompter: Prompter, known_capabilities: Sequence[Capability], new: Sequence[Capability]
) -> list[Capability]:
    """Return as many of the known capabilities as fit into a question beside the new ones, in order."""
    budget = prompter.token_budget(instructions("match")) - sum(
        token_estimate(_capability_line(capability)) for capability in new
    )
    fitting = []
    for capability in known_capabilities:
        budget -= token_estimate(_capability_line(capability))
        if budget > 0:
            fitting.append(capability)
    return fitting


def _marked_list(name: str, capabilities: Iterable[Capability]) -> str:
    return delimited(name, "\n".join(map(_capability_line, capabilities)))


def _capability_line(capability: Capability) -> str:
    return (
        f"- {capability.name}: {capability.description} Needed: {capability.when_needed} Lacking: {capability.lacking}"
    )
