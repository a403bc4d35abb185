"""Lifts a recorded conversation into a template: what was asked, known, done and told, and what may be renamed.

Invariants: only the conversation itself and the corpus are read, never a reward or hidden information. A template's
``steps`` are the recorded agent messages with the target's answers, dead ends left out (a read made twice, a call that
failed on an identifier that nobody had mentioned). Fails by returning None with a reason: a conversation without an
opening, with an unanswered or malformed call, or with nothing to judge.

Not covered: agent messages that hold both a text and tool calls keep their calls only.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from agents.synthesizer.corpus import (
    DATE,
    NUMBER,
    Corpus,
    has_word,
    is_identifier,
    is_name,
    is_number,
    leaves,
    sentences,
    style_of,
)
from agents.synthesizer.runtime import REFUSAL
from agents.transcript import Call, Transcript

Template = dict[str, Any]
_MOST_TOLD = 6


@dataclass(frozen=True)
class Unliftable:
    """Why a conversation gives no template."""

    reason: str


def lift(transcript: Transcript, corpus: Corpus) -> Template | Unliftable:
    """The template of one successful conversation, without its renaming lists
    (``agents.synthesizer.generalization``)."""
    first = min((said.index for said in transcript.agent), default=transcript.length)
    first = min([first, *(call.index for call in transcript.calls)])
    opening = [said.text for said in transcript.user if said.index < first]
    if not opening or not transcript.system:
        return Unliftable("no system prompt or no opening message")
    if any(call.result is None or call.arguments is None for call in transcript.calls):
        return Unliftable("a call is malformed or was never answered")
    steps = _steps(transcript, corpus)
    if not steps:
        return Unliftable("the agent neither said nor did anything")
    template: Template = {
        "from": [transcript.trajectory_id],
        "system": transcript.system,
        "opening": opening,
        "steps": steps,
        "refusal": not any(call["kind"] == "write" for call in calls_of(steps)) and _refuses(steps),
        "extra": [],
    }
    template["told"] = _told(template)
    written = [call for call in calls_of(steps) if call["kind"] == "write"]
    template["handoff"] = bool(written) and all(_only_prose(call, corpus) for call in written)
    looked = any(call["kind"] == "read" for call in calls_of(steps))
    if not (template["told"] if not written else looked or not template["handoff"]):
        return Unliftable("nothing that can be checked shows that the work was done")
    return template


def _only_prose(call: dict[str, Any], corpus: Corpus) -> bool:
    """A write whose arguments are the agent's own words, such as handing over with a summary."""
    return set(call["args"]) <= set(corpus.free_text.get(call["tool"], []))


def calls_of(steps: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every call of a template's steps, in order."""
    for step in steps:
        yield from step["calls"]


def texts_of(template: Template) -> list[str]:
    """Every text of a template but the records: prompt, user, agent."""
    spoken = [step[key] for step in template["steps"] for key in ("say", "reply") if key in step]
    return [template["system"], *template["opening"], *spoken]


def user_text(template: Template) -> str:
    """Everything that the user says in a template."""
    return "\n".join([*template["opening"], *(step["reply"] for step in template["steps"] if "reply" in step)])


def _steps(transcript: Transcript, corpus: Corpus) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    seen: set[str] = set()
    replies = {said.index: said.text for said in transcript.user}
    by_index: dict[int, list[Call]] = {}
    for call in transcript.calls:
        by_index.setdefault(call.index, []).append(call)
    said = {s.index: s.text for s in transcript.agent if s.index not in by_index}
    for index in sorted({*by_index, *said}):
        if index in by_index:
            calls = [_call(c, corpus) for c in by_index[index] if not _dead_end(c, transcript, corpus, seen)]
            if calls:
                steps.append({"calls": calls})
        else:
            step = {"calls": [], "say": said[index]}
            following = [replies[i] for i in sorted(replies) if i > index and not _between(i, index, by_index, said)]
            if following:
                step["reply"] = "\n".join(following)
            steps.append(step)
    return steps


def _between(reply: int, index: int, *others: dict[int, Any]) -> bool:
    return any(index < other < reply for seen in others for other in seen)


def _dead_end(call: Call, transcript: Transcript, corpus: Corpus, seen: set[str]) -> bool:
    """A read made before with nothing written since, or a failure on an identifier that nobody had mentioned."""
    if call.result is not None and call.result.error:
        known = " ".join(s.text for s in transcript.user_before(call.index)) + transcript.system
        known += " ".join(o.text for o in transcript.observations_before(call.index))
        return any(is_identifier(v) and not has_word(known, v) for v in (call.arguments or {}).values())
    if call.name in corpus.writes:
        seen.clear()
        return False
    key = call.name + json.dumps(call.arguments, sort_keys=True)
    again = key in seen
    seen.add(key)
    return again


def _call(call: Call, corpus: Corpus) -> dict[str, Any]:
    result = call.result
    assert result is not None
    style = style_of(result.text, result.value)
    kind = "error" if result.error else "write" if call.name in corpus.writes else "read"
    return {
        "tool": call.name,
        "args": call.arguments,
        "result": result.text if style == "text" else result.value,
        "style": style,
        "kind": kind,
    }


def _refuses(steps: list[dict[str, Any]]) -> bool:
    return any(REFUSAL.search(step["say"]) for step in steps if "say" in step)


def _told(template: Template) -> list[str]:
    """Values that the agent told and the user had not: from the records, and amounts of the policy with their unit."""
    said = "\n".join(step["say"] for step in template["steps"] if "say" in step)
    heard = user_text(template)
    found: list[str] = []
    for call in calls_of(template["steps"]):
        for path, value in leaves(call["result"], (call["tool"],)):
            text = json.dumps(value) if is_number(value) else value
            short = is_number(value) or (isinstance(value, str) and _tellable(value))
            if short and path[-1] != "error" and has_word(said, text) and not has_word(heard, text):
                found.append(text)
    found += [phrase for phrase in _policy_amounts(template["system"]) if has_word(said, phrase)]
    unique = list(dict.fromkeys(found))
    last = template["steps"][-1].get("say", "")
    return [v for v in unique if has_word(last, v)][:_MOST_TOLD] or unique[:_MOST_TOLD]


def _tellable(value: str) -> bool:
    return is_identifier(value) or is_name(value) or DATE.fullmatch(value) is not None


def _policy_amounts(system: str) -> list[str]:
    """Numbers of the policy with the word that follows ("5 days")."""
    found = []
    for sentence in sentences(DATE.sub("", system)):
        words = sentence.rstrip(".").split()
        found += [f"{n} {unit}" for n, unit in pairwise(words) if NUMBER.fullmatch(n)]
    return found
