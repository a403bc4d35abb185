"""Gives acting and refusing the same openings, so that no opening tells the decision.

Few conversations give few openings, and by chance some of them come with refusals alone. A policy then reaches the
reward by the words of the user, without the record that decides. So the templates of one request that act and those
that refuse take turns with all of their openings. What is exchanged is everything before the first call: the opening,
and questions of the agent with the user's answers. The record, the decision and the last text stay.

Covered are requests with one read, and at most one write after it, whose openings contain the verb of the write tool.
Two requests are the same if users ask in the same words, apart from codes and words such as "please": any other word
could be what decides, what the write needs, or a thing that only one record has. Where policies differ, only questions
for arguments of the calls are exchanged. A conversation stays as it is in three cases. A date comes before the first
call: the day of the conversation belongs to it. Two codes of one kind come there besides that of the read ("from F12 to
F13"): nothing tells which is which. Or a fact that the agent has to report comes there.

Not covered: other languages than English exchange only openings with equal words. If the byte limit of the file cuts
one template of a pair, the other one stays.
"""

import random
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from agents.synthesizer.corpus import DATE, IDENTIFIER, has_word, is_identifier, leaves
from agents.synthesizer.generalization import fresh_identifier, identifiers, letters_of, renamed
from agents.synthesizer.scenario_extraction import RecordedCall, Step, Template, calls_of

# Key of a template with the number of its pair: an acting and a refusing template with the same opening.
PAIR = "pair"
# What a user says in any request, whatever it is about.
_PHRASE = re.compile(r"\b(can|could|will|would) you\b|\bgood (morning|afternoon|evening|day)\b")
_WORDS = """
    a an the of for to this that is it it's its here there customer client number
    i i'm i'd i've am me my we we're we'd us our you your would like want need wish help
    hi hello hey dear please kindly thank thanks
"""
_NEUTRAL_WORDS = frozenset(_WORDS.split())
# Codes begin with at most as many letters, unless they are in a record or an argument: "W100", but not "iPhone15".
_MAX_CODE_LETTERS = 3


@dataclass(frozen=True, eq=False)
class _Case:
    """A template, the number of its steps before the first call, and its calls."""

    template: Template
    position: int
    calls: list[RecordedCall]

    @property
    def head(self) -> list[Step]:
        """The steps before the first call."""
        return list(self.template["steps"][: self.position])

    @property
    def tail(self) -> list[Step]:
        """The steps from the first call on."""
        return list(self.template["steps"][self.position :])

    @property
    def text(self) -> str:
        """Everything that is spoken before the first call."""
        texts = [step[key] for step in self.head for key in ("say", "reply") if key in step]
        return "\n".join([*self.template["opening"], *texts])

    @property
    def request(self) -> tuple[str, ...]:
        """The different words of the user before the first call, without codes and neutral words."""
        replies = [step["reply"] for step in self.head if "reply" in step]
        codes = set(identifiers(self.template))
        text = IDENTIFIER.sub(
            lambda match: " " if match[0] in codes or len(letters_of(match[0])) <= _MAX_CODE_LETTERS else match[0],
            "\n".join([*self.template["opening"], *replies]).replace("’", "'"),
        )
        words = re.findall(r"\w(?:[\w'-]*\w)?", _PHRASE.sub(" ", text.lower()))
        return tuple(word for word in dict.fromkeys(words) if word not in _NEUTRAL_WORDS)


def share_openings(
    templates: Sequence[Template], rng: random.Random, omitted: Collection[str] = ()
) -> tuple[list[Template], list[Template]]:
    """Return the templates that stay as they are, and the pairs that take the place of the others.

    A pair is an acting and a refusing template with the same opening; both have its number as ``PAIR``.

    Args:
        omitted: Tools whose answers are recorded only; a template that calls one stays.
    """
    cases = [case for template in templates if (case := _case(template)) and _is_exchangeable(case, omitted)]
    actions: dict[tuple[str, str, tuple[str, ...]], list[_Case]] = defaultdict(list)
    for case in cases:
        if len(case.calls) == 2 and case.calls[1]["kind"] == "write" and _speaks_of(case, case.calls[1]["tool"]):
            actions[case.calls[0]["tool"], case.calls[1]["tool"], case.request].append(case)
    refusing = [case for case in cases if case.template["refusal"] and len(case.calls) == 1]
    pairs: list[Template] = []
    paired_templates: list[Template] = []
    for (read_tool, _, request), group in sorted(actions.items()):
        refusals = [case for case in refusing if case.calls[0]["tool"] == read_tool and case.request == request]
        refusing = [case for case in refusing if case not in refusals]
        if refusals:
            for pair in _pairs(group, refusals, rng):
                pairs += [{**template, PAIR: len(paired_templates)} for _, template in pair]
                paired_templates += [case.template for case, _ in pair]
    return [template for template in templates if not any(template is other for other in paired_templates)], pairs


def _case(template: Template) -> _Case | None:
    """Return the case of a template whose first calling step is one read; None for others."""
    position = next((number for number, step in enumerate(template["steps"]) if step["calls"]), None)
    if position is None or len(template["steps"][position]["calls"]) != 1:
        return None
    calls = list(calls_of(template["steps"]))
    return _Case(template, position, calls) if calls[0]["kind"] == "read" else None


def _speaks_of(case: _Case, write_tool: str) -> bool:
    return has_word(case.template["opening"][0], write_tool.split("_")[0])


def _is_exchangeable(case: _Case, omitted: Collection[str]) -> bool:
    """Return whether what is spoken before the first call can be spoken in another conversation.

    Not with a date, a fact that the agent has to report, or two codes of one kind besides that of the read; and not if
    the case calls an omitted tool.
    """
    letters = [
        letters_of(code)
        for code in set(IDENTIFIER.findall(case.text)) - {str(value) for _, value in leaves(case.calls[0]["args"], ())}
    ]
    return not (
        DATE.search(case.text)
        or any(has_word(case.text, fact) for fact in case.template["told"])
        or len(set(letters)) < len(letters)
        or any(call["tool"] in omitted for call in case.calls)
    )


def _policy(case: _Case) -> str:
    return DATE.sub("", case.template["system"])


def _obeys_policy(case: _Case) -> bool:
    """Return whether the agent says something before its first call whose reply has no argument of its calls."""
    values = [str(value) for call in case.calls for _, value in leaves(call["args"], ())]
    return not all(any(has_word(step.get("reply", ""), value) for value in values) for step in case.head)


def _pairs(
    actions: Sequence[_Case], refusals: Sequence[_Case], rng: random.Random
) -> Iterator[list[tuple[_Case, Template]]]:
    """Yield pairs of an acting and a refusing case, each with its template with the same opening.

    Each opening is in one pair, with the acting and the refusing case that can have it and were paired the longest
    time ago. An opening that no acting or no refusing case can have is left out.
    """
    openings, actions, refusals = [*actions, *refusals], list(actions), list(refusals)
    for cases in (openings, actions, refusals):
        rng.shuffle(cases)
    for donor in openings:
        pair = [item for cases in (actions, refusals) if (item := _first_fitting(cases, donor, rng))]
        if len(pair) == 2:
            for cases, (case, _) in zip((actions, refusals), pair, strict=True):
                cases.append(cases.pop(cases.index(case)))
            yield pair


def _first_fitting(cases: Sequence[_Case], donor: _Case, rng: random.Random) -> tuple[_Case, Template] | None:
    templates = ((case, _with_opening(case, donor, rng)) for case in cases)
    return next(((case, template) for case, template in templates if template), None)


def _with_opening(case: _Case, other: _Case, rng: random.Random) -> Template | None:
    """Return a case's template with what is spoken before the first call in another one.

    Its identifiers become those of the case: those of the read, and others by their letters. Words such as "mp3", which
    look like identifiers and are in no record, stay.

    None if the user no longer says what a call needs: an argument of the read, or one of the write that the record does
    not have. None if one of the policies may be the reason for a question before the first call, and the policies
    differ.
    """
    if case is other:
        return case.template
    if (_obeys_policy(case) or _obeys_policy(other)) and _policy(case) != _policy(other):
        return None
    own_read, other_read = case.calls[0], other.calls[0]
    mapping = {
        other_read["args"][key]: value
        for key, value in own_read["args"].items()
        if is_identifier(value) and is_identifier(other_read["args"].get(key))
    }
    own_identifiers = list(dict.fromkeys([*IDENTIFIER.findall(case.text), *identifiers(case.template)]))
    replaceable_identifiers = {*own_identifiers, *identifiers(other.template)}
    taken_identifiers = {*own_identifiers, *IDENTIFIER.findall(other.text)}
    for identifier in dict.fromkeys(IDENTIFIER.findall(other.text)):
        if identifier not in mapping:
            unused = [value for value in own_identifiers if value not in mapping.values()]
            similar = next((value for value in unused if letters_of(value) == letters_of(identifier)), "")
            if similar or identifier in replaceable_identifiers:
                mapping[identifier] = similar or fresh_identifier(identifier, taken_identifiers, rng)
    template: Template = {
        **case.template,
        "from": list(dict.fromkeys([*case.template["from"], *other.template["from"]])),
        "opening": renamed(other.template["opening"], mapping),
        "steps": [*renamed(other.head, mapping), *case.tail],
    }
    text = _Case(template, other.position, case.calls).text
    record = [value for _, value in leaves(own_read["result"], ())]
    arguments = [(call, value) for call in case.calls for _, value in leaves(call["args"], ())]
    needed_values = [str(value) for call, value in arguments if call is own_read or value not in record]
    return template if all(has_word(text, value) for value in needed_values if has_word(case.text, value)) else None
