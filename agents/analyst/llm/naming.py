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


async def merged(asking: Asking, found: Sequence[Found]) -> list[Found]:
    """The candidates without duplicates, at most 10 of them, the most telling first."""
    apart = _by_name(found)
    if len(apart) < 2:
        return apart
    room = asking.room(instructions("merge"))
    if sum(tokens(_told(one.capability)) for one in apart) > room and len(apart) > 3:
        half = len(apart) // 2
        first, second = await merged(asking, apart[:half]), await merged(asking, apart[half:])
        if len(first) + len(second) == len(apart):  # it would not end
            return apart[:MAX_CANDIDATES]
        return await merged(asking, [*first, *second])
    by_name = {one.capability.name: one for one in apart}

    def wrong(answer: Groups) -> str | None:
        return _not_once((name for group in answer.groups for name in (group.keep, *group.same)), list(by_name))

    text = f"{_listed('capabilities', [one.capability for one in apart])}\nWhich of them are the same?"
    try:
        answer = await asking.ask(asking.question("merge", text), Groups, wrong)
    except OutOfForm:
        return sorted(apart, key=lambda one: -len(one.cited))[:MAX_CANDIDATES]
    return [_together([by_name[name] for name in (group.keep, *group.same)]) for group in answer.groups][
        :MAX_CANDIDATES
    ]


async def matched(asking: Asking, found: Sequence[Found], known: Sequence[Capability]) -> list[Found]:
    """The candidates, those that are known under their known names and texts."""
    named = [_named(one, _of_that_name(one.capability.name, known)) for one in found]
    names = {old.name for old in known}
    new = [one.capability for one in named if one.capability.name not in names]
    taken = {one.capability.name for one in named} & names
    free = _fitting(asking, [old for old in known if old.name not in taken], new)
    if not new or not free:
        return _by_name(named)
    fresh, old_ones = {one.name for one in new}, {one.name: one for one in free}

    def wrong(answer: Matches) -> str | None:
        unknown = [match.known for match in answer.matches if match.known not in ("", *old_ones)]
        told = f"{unknown[0][:40]!r} is none of the known ones" if unknown else None
        return _not_once((match.new for match in answer.matches), sorted(fresh)) or told

    text = f"{_listed('known', free)}\n{_listed('new', new)}\nWhich known one is each new one?"
    try:
        answer = await asking.ask(asking.question("match", text), Matches, wrong)
    except OutOfForm:
        return _by_name(named)
    of = {match.new: old_ones[match.known] for match in answer.matches if match.known}
    return _by_name(_named(one, of.get(one.capability.name)) for one in named)


def _by_name(found: Iterable[Found]) -> list[Found]:
    """Those whose names are nearly the same as one, the first."""
    apart: list[Found] = []
    for one in found:
        at = next((n for n, old in enumerate(apart) if near(old.capability.name, one.capability.name)), None)
        if at is None:
            apart.append(one)
        else:
            apart[at] = apart[at].beside(one)
    return apart


def _together(found: Sequence[Found]) -> Found:
    first = found[0]
    for other in found[1:]:
        first = first.beside(other)
    return first


def _of_that_name(name: str, known: Sequence[Capability]) -> Capability | None:
    exact = (old for old in known if old.name == name)
    return next(exact, None) or next((old for old in known if near(name, old.name)), None)


def _named(found: Found, known: Capability | None) -> Found:
    return found if known is None else Found(known, found.cited)


def _not_once(given: Iterable[str], wanted: Sequence[str]) -> str | None:
    """What is wrong with names that should be exactly the wanted ones, each once."""
    names = list(given)
    told = [f"{name[:40]!r} is not in the list" for name in names if name not in wanted][:3]
    told += [f"{name!r} stands there {names.count(name)} times" for name in wanted if names.count(name) != 1][:5]
    return "; ".join(told) or None


def _fitting(asking: Asking, known: Sequence[Capability], new: Sequence[Capability]) -> list[Capability]:
    """As many of the known ones as fit beside the new ones, the first first."""
    room = asking.room(instructions("match")) - sum(tokens(_told(one)) for one in new)
    kept = []
    for one in known:
        room -= tokens(_told(one))
        if room > 0:
            kept.append(one)
    return kept


def _listed(name: str, capabilities: Iterable[Capability]) -> str:
    return marked(name, "\n".join(map(_told, capabilities)))


def _told(one: Capability) -> str:
    return f"- {one.name}: {one.description} Needed: {one.when_needed} Lacking: {one.lacking}"
