"""Which reads belong before which writes: mined from what successful agents do and from the policy's sentences.

A link says: before writing with ``write_parameter = v``, read with ``read_parameter = v`` (or have a read whose answer
holds v). A link is kept when nearly all successful writes obey it, or when a fair share does and either disobeying
goes with failure or the policy demands it (a date is no object: there the policy has to demand it). What the policy
demands has to be seen only twice: an agent that lacks the capability shows it rarely. Only first attempts count, so
that a read made in answer to an error is no precondition. A write that was refused after a read of what it would have
changed obeys as well: where the rules forbid the write, that is how a success looks. Not covered: what the read said.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agents.analyst.intents import Intents, refusals
from agents.analyst.language import related, stem, stems, words
from agents.analyst.tools import ToolKind
from agents.analyst.values import is_date, leaves
from agents.analyst.view import View
from agents.transcript import Call
from store.types import Outcome, Tool

_NEARLY_ALL, _FAIR_SHARE, _MIN_HARM, _MIN_COUNT, _MIN_DEMANDED = 0.9, 0.1, 0.15, 5, 2
_DEMAND = re.compile(r"\b(before|first|must|only|verify|check|ensure|until|unless|make sure)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Link:
    """A read that belongs before a write on the same object."""

    write: str
    write_parameter: str
    texts_read: str
    read_parameter: str


def satisfied(link: Link, calls: Sequence[Call], write: Call) -> bool:
    """Whether a successful read on the object of ``write`` came before it."""
    value = dict(leaves(write.arguments or {})).get(link.write_parameter)
    return any(
        call.index < write.index
        and call.name == link.texts_read
        and call.succeeded
        and _concerns_value(call, link, value)
        for call in calls
    )


def mine_links(
    views: Sequence[View],
    outcomes: Sequence[Outcome],
    kinds: Mapping[str, ToolKind],
    declared: Mapping[str, Tool],
    intents: Intents,
) -> list[Link]:
    """The links that the sample supports, sorted."""
    attempts = [
        (view, call, outcome is Outcome.SUCCESS)
        for view, outcome in zip(views, outcomes, strict=True)
        for call in [*_first_attempts(view, kinds), *_refused_writes(view, kinds, declared, intents)]
    ]
    candidate_counts = Counter(link for view, call, _ in attempts for link in set(_candidates(view, call, kinds)))
    prompts = {view.spoken.system for view in views[:20]}
    links = []
    for link, count in candidate_counts.items():
        min_count = _MIN_DEMANDED if demanded(link, prompts, kinds) else _MIN_COUNT
        if count >= min_count and _is_supported(
            link, [attempt for attempt in attempts if attempt[1].name == link.write], prompts, kinds
        ):
            links.append(link)
    return sorted(links, key=lambda link: (link.write, link.write_parameter, link.texts_read, link.read_parameter))


def _is_supported(
    link: Link, attempts: Sequence[tuple[View, Call, bool]], prompts: set[str], names: Collection[str]
) -> bool:
    obedience = [(satisfied(link, view.spoken.calls, call), success) for view, call, success in attempts]
    support = _share([obeyed for obeyed, success in obedience if success])
    if support >= _NEARLY_ALL:
        return True
    if all(is_date(value) for _, call, _ in attempts for value in _argument_values(call, link.write_parameter)):
        return support >= _FAIR_SHARE and demanded(link, prompts, names)
    failures_with_read = [not success for obeyed, success in obedience if obeyed]
    failures_without_read = [not success for obeyed, success in obedience if not obeyed]
    harmful = (
        min(len(failures_with_read), len(failures_without_read)) >= _MIN_COUNT
        and _share(failures_without_read) - _share(failures_with_read) >= _MIN_HARM
    )
    return support >= _FAIR_SHARE and (harmful or demanded(link, prompts, names))


def demanded(link: Link, prompts: set[str], names: Collection[str]) -> bool:
    """Whether a sentence of the policy asks for the read before the write, in words that are the read's own."""
    shared = Counter(word for name in names for word in set(words(name)))
    nouns = words(link.texts_read)[1:]
    read_words = {stem(word) for word in nouns if shared[word] == 1} or {stem(word) for word in nouns}
    write_words = {stem(word) for word in words(link.write)}
    for prompt in prompts:
        for sentence in re.split(r"(?<=[.!?])\s+|\n+", prompt):
            sentence_stems = set(stems(sentence))
            if (
                _DEMAND.search(sentence)
                and _any_related(read_words, sentence_stems)
                and _any_related(write_words, sentence_stems)
            ):
                return True
    return False


def _any_related(expected: set[str], stems_present: set[str]) -> bool:
    return any(related(first, other) for first in expected for other in stems_present)


def _argument_values(write: Call, parameter: str) -> list[Any]:
    return [value for path, value in leaves(write.arguments or {}) if path == parameter]


def _first_attempts(view: View, kinds: Mapping[str, ToolKind]) -> Iterator[Call]:
    attempted: set[str] = set()
    for call in view.spoken.calls:
        if kinds.get(call.name) is ToolKind.WRITE and call.name not in attempted and call.arguments:
            attempted.add(call.name)
            if call.succeeded:
                yield call


def _refused_writes(
    view: View, kinds: Mapping[str, ToolKind], declared: Mapping[str, Tool], intents: Intents
) -> Iterator[Call]:
    """The writes that were refused after a read, as calls of what was read: parameters that both tools have."""
    for request in intents.requests(view):
        index = min(refusals(view, request), default=None)
        if request.tool is None or index is None:
            continue
        accepted = _parameters(declared[request.tool])
        arguments: dict[str, Any] = {}
        for call in view.spoken.calls:
            if call.index < index and call.succeeded and kinds.get(call.name) is ToolKind.READ:
                arguments |= {name: value for name, value in (call.arguments or {}).items() if name in accepted}
        if arguments and (not request.objects or request.objects & set(map(str, arguments.values()))):
            yield Call(index, request.tool, arguments, "", None)


def _parameters(function: Tool) -> set[str]:
    return set((function.get("parameters") or {}).get("properties") or {})


def _candidates(view: View, write: Call, kinds: Mapping[str, ToolKind]) -> Iterator[Link]:
    identifiers = [(path, value) for path, value in leaves(write.arguments or {}) if _identifying(value)]
    for call in view.spoken.calls:
        if call.index >= write.index or kinds.get(call.name) is not ToolKind.READ:
            continue
        for read_path, read_value in leaves(call.arguments or {}):
            for path, value in identifiers:
                if value == read_value:
                    yield Link(write.name, path, call.name, read_path)


def _identifying(value: Any) -> bool:
    return isinstance(value, str) and any(c.isdigit() for c in value)


def _concerns_value(call: Call, link: Link, value: Any) -> bool:
    if dict(leaves(call.arguments or {})).get(link.read_parameter) == value:
        return True
    return call.result is not None and any(leaf == value for _, leaf in leaves(call.result.value))


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0
