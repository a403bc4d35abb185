"""Mines which reads belong before which writes, from recorded conversations and the policy.

A link says: before a write with ``write_parameter = v``, the read tool must have been called with
``read_parameter = v`` or must have returned v. A link is kept if nearly all writes of successful conversations obey it,
or if a fair share of them does and, in addition, disobedience goes with failure or the policy demands the read. The
content of the read is not checked.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agents.analyst.intents import Intents, refusals
from agents.analyst.language import SENTENCE_END, related, stem, stems, words
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

    write_tool: str
    write_parameter: str
    read_tool: str
    read_parameter: str


def share(flags: Iterable[bool]) -> float:
    """Return the fraction of true flags, 0 without flags."""
    values = list(flags)
    return sum(values) / len(values) if values else 0.0


def satisfied(link: Link, calls: Sequence[Call], write: Call) -> bool:
    """Return whether a successful read of the object of ``write`` came before the write."""
    value = dict(leaves(write.arguments or {})).get(link.write_parameter)
    return any(
        call.index < write.index
        and call.name == link.read_tool
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
    """Return the links that the sample supports, sorted."""
    attempts = [
        (view, call, outcome is Outcome.SUCCESS)
        for view, outcome in zip(views, outcomes, strict=True)
        # Only first attempts, because a read after an error is no precondition. A refusal after a read counts as
        # obedience, because where the rules forbid the write a conversation succeeds by refusing.
        for call in [*_first_attempts(view, kinds), *_refused_writes(view, kinds, declared, intents)]
    ]
    candidate_counts = Counter(link for view, call, _ in attempts for link in set(_candidates(view, call, kinds)))
    prompts = {view.transcript.system for view in views[:20]}
    links = []
    for link, count in candidate_counts.items():
        # What the policy demands needs less evidence, because an agent that lacks the capability rarely does it.
        min_count = _MIN_DEMANDED if demanded(link, prompts, kinds) else _MIN_COUNT
        if count >= min_count and _is_supported(
            link, [attempt for attempt in attempts if attempt[1].name == link.write_tool], prompts, kinds
        ):
            links.append(link)
    return sorted(links, key=lambda link: (link.write_tool, link.write_parameter, link.read_tool, link.read_parameter))


def _is_supported(
    link: Link, attempts: Sequence[tuple[View, Call, bool]], prompts: set[str], names: Collection[str]
) -> bool:
    obedience = [(satisfied(link, view.transcript.calls, call), success) for view, call, success in attempts]
    support = share([is_obeyed for is_obeyed, success in obedience if success])
    if support >= _NEARLY_ALL:
        return True
    # A date is not an object: only the policy can make it a precondition.
    if all(is_date(value) for _, call, _ in attempts for value in _argument_values(call, link.write_parameter)):
        return support >= _FAIR_SHARE and demanded(link, prompts, names)
    failures_with_read = [not success for is_obeyed, success in obedience if is_obeyed]
    failures_without_read = [not success for is_obeyed, success in obedience if not is_obeyed]
    harmful = (
        min(len(failures_with_read), len(failures_without_read)) >= _MIN_COUNT
        and share(failures_without_read) - share(failures_with_read) >= _MIN_HARM
    )
    return support >= _FAIR_SHARE and (harmful or demanded(link, prompts, names))


def demanded(link: Link, prompts: set[str], names: Collection[str]) -> bool:
    """Return whether a sentence of the policy asks for the read before the write, in words specific to the read."""
    shared = Counter(word for name in names for word in set(words(name)))
    nouns = words(link.read_tool)[1:]
    read_words = {stem(word) for word in nouns if shared[word] == 1} or {stem(word) for word in nouns}
    write_words = {stem(word) for word in words(link.write_tool)}
    for prompt in prompts:
        for sentence in SENTENCE_END.split(prompt):
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


def _argument_values(write: Call, parameter: str) -> list[object]:
    return [value for path, value in leaves(write.arguments or {}) if path == parameter]


def _first_attempts(view: View, kinds: Mapping[str, ToolKind]) -> Iterator[Call]:
    attempted: set[str] = set()
    for call in view.transcript.calls:
        if kinds.get(call.name) is ToolKind.WRITE and call.name not in attempted and call.arguments:
            attempted.add(call.name)
            if call.succeeded:
                yield call


def _refused_writes(
    view: View, kinds: Mapping[str, ToolKind], declared: Mapping[str, Tool], intents: Intents
) -> Iterator[Call]:
    """Yield the writes that the agent refused after reads, as calls with those read arguments that they accept."""
    for request in intents.requests(view):
        index = min(refusals(view, request), default=None)
        if not request.tool or index is None:
            continue
        accepted = _parameters(declared[request.tool])
        arguments: dict[str, object] = {}
        for call in view.transcript.calls:
            if call.index < index and call.succeeded and kinds.get(call.name) is ToolKind.READ:
                arguments |= {name: value for name, value in (call.arguments or {}).items() if name in accepted}
        if arguments and (not request.objects or request.objects & set(map(str, arguments.values()))):
            yield Call(index, request.tool, arguments, "", None)


def _parameters(function: Tool) -> set[str]:
    return set((function.get("parameters") or {}).get("properties") or {})


def _candidates(view: View, write: Call, kinds: Mapping[str, ToolKind]) -> Iterator[Link]:
    identifiers = [(path, value) for path, value in leaves(write.arguments or {}) if _identifying(value)]
    for call in view.transcript.calls:
        if call.index >= write.index or kinds.get(call.name) is not ToolKind.READ:
            continue
        for read_path, read_value in leaves(call.arguments or {}):
            for path, value in identifiers:
                if value == read_value:
                    yield Link(write.name, path, call.name, read_path)


def _identifying(value: object) -> bool:
    return isinstance(value, str) and any(c.isdigit() for c in value)


def _concerns_value(call: Call, link: Link, value: object) -> bool:
    if dict(leaves(call.arguments or {})).get(link.read_parameter) == value:
        return True
    return call.result is not None and any(leaf == value for _, leaf in leaves(call.result.value))
