"""Composes two templates of single requests into one, joined with a phrase of the target's users.

Both requests come from successful conversations under the same policy text. Identifiers in the second greeting become
those of the first. Other identifiers of the second template are renamed if the first contains them, and its dates are
shifted to the day of the first. Templates with contradicting records are not composed, nor are requests for which the
user gives facts only when asked.
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
from agents.synthesizer.scenario_extraction import Step, Template, calls_of


def joiners(openings: Sequence[str], greetings: set[str]) -> list[str]:
    """Return the phrases ("Also, ") that come before a second request, before words with which many requests begin."""
    parts = [[s for s in sentences(text) if masked(s) not in greetings] for text in openings]
    starters = Counter(" ".join(part_list[0].lower().split()[:2]) for part_list in parts if part_list)
    common = [start for start, count in starters.items() if count >= max(2, 0.01 * len(openings))]
    counts: Counter[str] = Counter()
    for later in (sentence for part_list in parts for sentence in part_list[1:]):
        cuts = [later.lower().find(start) for start in common]
        offset = min((position for position in cuts if position > 0), default=0)
        if 0 < offset <= 40:
            counts[later[:offset]] += 1
    return sorted(phrase for phrase, count in counts.items() if count >= 3)


def greetings_of(openings: Sequence[str]) -> set[str]:
    """Return the masked first sentences that recur in at least three openings, whatever the request after them."""
    firsts = Counter(masked(parts[0]) for text in openings if len(parts := sentences(text)) > 1)
    return {text for text, count in firsts.items() if count >= 3}


def is_compound(opening_text: str, phrases: Sequence[str]) -> bool:
    """Return whether a sentence of the opening begins with a joining phrase."""
    return any(re.search(rf"(?<=[.?!] ){re.escape(phrase)}", opening_text) for phrase in phrases)


@dataclass(frozen=True)
class SpeechStyle:
    """The users' masked greetings and joining phrases, and the words of the agent's farewells."""

    greetings: set[str]
    phrases: list[str]
    farewells: list[list[str]]


def speech_style(openings: Sequence[str], farewells: list[list[str]]) -> SpeechStyle:
    """Return the greetings and joining phrases of opening messages, with the given farewells."""
    greetings = greetings_of(openings)
    return SpeechStyle(greetings, joiners(openings, greetings), farewells)


def compose(first: Template, second: Template, style: SpeechStyle, rng: random.Random) -> Template | None:
    """Return the compound of two single-request templates, None if they cannot be composed (see the module)."""
    second = _same_day(first, second)
    first_greeting, _ = _split(first, style.greetings)
    second_greeting, request = _split(second, style.greetings)
    if (
        first["system"] != second["system"]
        or not first_greeting
        or not request
        or not (_withholds_nothing(first) and _withholds_nothing(second))
    ):
        return None
    mapping = dict(zip(IDENTIFIER.findall(second_greeting), IDENTIFIER.findall(first_greeting), strict=False))
    taken_identifiers = {*identifiers(first), *mapping.values()}
    for old in identifiers(second):
        if old not in mapping:
            mapping[old] = fresh_identifier(old, taken_identifiers, rng) if old in taken_identifiers else old
            taken_identifiers.add(mapping[old])
    renamed_second: Template = {key: renamed(second[key], mapping) for key in ("steps", "told")}
    if _conflict(first, renamed_second):
        return None
    request = renamed(request, mapping)
    opening_text = f"{first['opening'][0]} {rng.choice(style.phrases)}{request[:1].lower()}{request[1:]}"
    return {
        **first,
        "from": [*first["from"], *second["from"]],
        "opening": [opening_text],
        "steps": _join_steps(first["steps"], renamed_second["steps"], style.farewells),
        "told": list(dict.fromkeys([*first["told"], *renamed_second["told"]])),
        "refusal": first["refusal"] or second["refusal"],
    }


def _same_day(first: Template, second: Template) -> Template:
    """Return ``second`` with its dates shifted so that the first date in its system prompt is that of ``first``."""
    days = [date.fromisoformat(match.group()) for t in (first, second) if (match := DATE.search(t["system"]))]
    if len(days) < 2 or days[0] == days[1]:
        return second
    delta = days[0] - days[1]
    shifted: Template = _shift_dates(second, delta)
    return shifted


def _shift_dates(value: Any, delta: timedelta) -> Any:
    if isinstance(value, str):
        return DATE.sub(lambda match: (date.fromisoformat(match.group()) + delta).isoformat(), value)
    if isinstance(value, dict):
        return {_shift_dates(key, delta): _shift_dates(part, delta) for key, part in value.items()}
    return [_shift_dates(part, delta) for part in value] if isinstance(value, list) else value


def _split(template: Template, greetings: set[str]) -> tuple[str, str]:
    """Return greeting and request of a one-message opening; both empty if they cannot be separated."""
    parts = sentences(template["opening"][0])
    if len(template["opening"]) != 1 or len(parts) < 2 or masked(parts[0]) not in greetings:
        return "", ""
    return parts[0], " ".join(parts[1:])


def _withholds_nothing(template: Template) -> bool:
    """Return whether the agent begins with a call and has the last word, so the user gave all facts in the opening."""
    last = template["steps"][-1]
    return bool(template["steps"][0]["calls"]) and "say" in last and "reply" not in last


def _conflict(first: Template, second: Template) -> bool:
    """Return whether both templates have the same call, and it has different answers or is not a read."""
    answers = {
        json.dumps([call["tool"], call["args"]], sort_keys=True): call["result"] for call in calls_of(first["steps"])
    }
    for call in calls_of(second["steps"]):
        key = json.dumps([call["tool"], call["args"]], sort_keys=True)
        if key in answers and (answers[key] != call["result"] or call["kind"] != "read"):
            return True
    return False


def _join_steps(first: list[Step], second: list[Step], farewells: list[list[str]]) -> list[Step]:
    """Return the steps of both, with one final text that joins both final texts."""
    parts = sentences(first[-1]["say"])
    if parts and parts[-1].endswith("?") and sorted(question_words(parts[-1])) in farewells:
        # The second request already answers the closing question ("Anything else?") of the first.
        parts = parts[:-1]
    last: Step = {**second[-1], "say": " ".join([*parts, second[-1]["say"]])}
    return [*first[:-1], *second[:-1], last]
