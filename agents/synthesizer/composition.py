"""Makes compound templates of two single requests, joined as users of the target join them.

Invariants: both requests come from successful conversations under the same policy text, are given by the same customer
(the identifiers of the greeting are made one), and hold no contradicting records; identifiers of the second are renamed
away from the first and its dates are moved to the first's day. Not covered: requests whose facts the user withholds.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from agents.synthesizer.corpus import DATE, IDENTIFIER, masked, sentences
from agents.synthesizer.generalization import fresh_identifier, identifiers, renamed
from agents.synthesizer.runtime import question_words
from agents.synthesizer.scenario_extraction import Template, calls_of


def joiners(openings: Sequence[str], greetings: set[str]) -> list[str]:
    """Phrases put before a second request ("Also, "), found where a sentence goes on as single requests begin."""
    parts = [[s for s in sentences(text) if masked(s) not in greetings] for text in openings]
    starters = Counter(" ".join(p[0].lower().split()[:2]) for p in parts if p)
    common = [start for start, count in starters.items() if count >= max(2, 0.01 * len(openings))]
    found: Counter[str] = Counter()
    for later in (sentence for p in parts for sentence in p[1:]):
        cuts = [later.lower().find(start) for start in common]
        cut = min((at for at in cuts if at > 0), default=0)
        if 0 < cut <= 40:
            found[later[:cut]] += 1
    return sorted(phrase for phrase, count in found.items() if count >= 3)


def greetings_of(openings: Sequence[str]) -> set[str]:
    """Masked first sentences that recur, whatever is asked afterwards."""
    firsts = Counter(masked(parts[0]) for text in openings if len(parts := sentences(text)) > 1)
    return {text for text, count in firsts.items() if count >= 3}


def is_compound(opening: str, found: Sequence[str]) -> bool:
    """True when the opening holds a joining phrase."""
    return any(re.search(rf"(?<=[.?!] ){re.escape(phrase)}", opening) for phrase in found)


@dataclass(frozen=True)
class Manner:
    """How users of a target speak: masked greetings, joining phrases; and the words of the agent's farewells."""

    greetings: set[str]
    phrases: list[str]
    farewells: list[list[str]]


def manner_of(openings: Sequence[str], farewells: list[list[str]]) -> Manner:
    """Mine greetings and joining phrases from opening messages."""
    greetings = greetings_of(openings)
    return Manner(greetings, joiners(openings, greetings), farewells)


def compose(one: Template, two: Template, manner: Manner, rng: random.Random) -> Template | None:
    """The compound of two single-request templates, or None where they do not fit together."""
    two = _same_day(one, two)
    greeting_one, _ = _split(one, manner.greetings)
    greeting_two, request = _split(two, manner.greetings)
    if one["system"] != two["system"] or not greeting_one or not request or not (_plain(one) and _plain(two)):
        return None
    mapping = dict(zip(IDENTIFIER.findall(greeting_two), IDENTIFIER.findall(greeting_one), strict=False))
    taken = {*identifiers(one), *mapping.values()}
    for old in identifiers(two):
        if old not in mapping:
            mapping[old] = fresh_identifier(old, taken, rng) if old in taken else old
            taken.add(mapping[old])
    other: Template = {key: renamed(two[key], mapping) for key in ("steps", "told")}
    if _conflict(one, other):
        return None
    request = renamed(request, mapping)
    opening = f"{one['opening'][0]} {rng.choice(manner.phrases)}{request[:1].lower()}{request[1:]}"
    return {
        **one,
        "from": [*one["from"], *two["from"]],
        "opening": [opening],
        "steps": _joined(one["steps"], other["steps"], manner.farewells),
        "told": list(dict.fromkeys([*one["told"], *other["told"]])),
        "refusal": one["refusal"] or two["refusal"],
    }


def _same_day(one: Template, two: Template) -> Template:
    """``two`` with its dates moved so that its prompt's first date is that of ``one``."""
    days = [date.fromisoformat(found.group()) for t in (one, two) if (found := DATE.search(t["system"]))]
    if len(days) < 2 or days[0] == days[1]:
        return two
    delta = days[0] - days[1]
    moved: Template = _moved(two, delta)
    return moved


def _moved(value: Any, delta: timedelta) -> Any:
    if isinstance(value, str):
        return DATE.sub(lambda match: (date.fromisoformat(match.group()) + delta).isoformat(), value)
    if isinstance(value, dict):
        return {_moved(key, delta): _moved(part, delta) for key, part in value.items()}
    return [_moved(part, delta) for part in value] if isinstance(value, list) else value


def _split(template: Template, greetings: set[str]) -> tuple[str, str]:
    """Greeting and request of an opening of one message; both empty where they cannot be told apart."""
    parts = sentences(template["opening"][0])
    if len(template["opening"]) != 1 or len(parts) < 2 or masked(parts[0]) not in greetings:
        return "", ""
    return parts[0], " ".join(parts[1:])


def _plain(template: Template) -> bool:
    """The user withholds nothing: the agent begins with a call, and has the last word."""
    last = template["steps"][-1]
    return bool(template["steps"][0]["calls"]) and "say" in last and "reply" not in last


def _conflict(one: Template, two: Template) -> bool:
    """The same call has two answers."""
    answers = {json.dumps([c["tool"], c["args"]], sort_keys=True): c["result"] for c in calls_of(one["steps"])}
    for call in calls_of(two["steps"]):
        key = json.dumps([call["tool"], call["args"]], sort_keys=True)
        if key in answers and (answers[key] != call["result"] or call["kind"] != "read"):
            return True
    return False


def _joined(one: list[dict[str, Any]], two: list[dict[str, Any]], farewells: list[list[str]]) -> list[dict[str, Any]]:
    """The steps of both, with one last text that sums up both."""
    parts = sentences(one[-1]["say"])
    if parts and parts[-1].endswith("?") and sorted(question_words(parts[-1])) in farewells:
        parts = parts[:-1]
    last = {**two[-1], "say": " ".join([*parts, two[-1]["say"]])}
    return [*one[:-1], *two[:-1], last]
