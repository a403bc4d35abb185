"""Turns a recorded conversation into a template: system prompt, opening, steps, and reported facts.

``steps`` are the recorded agent messages with the target's answers, without dead ends: a repeated read, or a failed
call on an identifier that was not mentioned before. Only the conversation and the corpus are read. Of a message with
text and tool calls only the calls are kept.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NotRequired, TypedDict

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

_MAX_FACTS = 6

Template = dict[str, Any]


class RecordedCall(TypedDict):
    """A tool call with its answer; ``kind`` is "read", "write" or "error", ``style`` is as from ``corpus.style_of``."""

    tool: str
    args: dict[str, Any]
    result: Any
    style: str
    kind: str


class Step(TypedDict):
    """The calls of an agent message, or its text ``say`` with the user's ``reply``, if there was one."""

    calls: list[RecordedCall]
    say: NotRequired[str]
    reply: NotRequired[str]


@dataclass(frozen=True)
class NoTemplate:
    """The reason why a conversation does not give a template."""

    reason: str


def extract_template(transcript: Transcript, corpus: Corpus) -> Template | NoTemplate:
    """Return the template of a successful conversation, to be completed by ``generalization.generalise``."""
    first = min((message.index for message in transcript.agent), default=transcript.length)
    first = min([first, *(call.index for call in transcript.calls)])
    opening_texts = [message.text for message in transcript.user if message.index < first]
    if not opening_texts:
        return NoTemplate("no opening message")
    # Some agents have no system prompt; in a trace of one that has, it was lost.
    if not transcript.system and any(other.system for other in corpus.transcripts):
        return NoTemplate("no system prompt")
    if any(call.result is None or call.arguments is None for call in transcript.calls):
        return NoTemplate("a call is malformed or was never answered")
    steps = _steps(transcript, corpus)
    if not steps:
        return NoTemplate("the agent neither said nor did anything")
    if _uses_unrevealed_code([transcript.system, *opening_texts], steps, corpus):
        return NoTemplate("the agent used a code that nobody had told")
    template: Template = {
        "from": [transcript.trajectory_id],
        "system": transcript.system,
        "opening": opening_texts,
        "steps": steps,
        "refusal": not any(call["kind"] == "write" for call in calls_of(steps)) and _refuses(steps),
        "extra": [],
    }
    template["told"] = _reported_facts(template)
    writes = [call for call in calls_of(steps) if call["kind"] == "write"]
    template["handoff"] = bool(writes) and all(_only_prose(call, corpus) for call in writes)
    has_reads = any(call["kind"] == "read" for call in calls_of(steps))
    if not (template["told"] if not writes else has_reads or not template["handoff"]):
        return NoTemplate("nothing that can be checked shows that the work was done")
    return template


def _only_prose(call: RecordedCall, corpus: Corpus) -> bool:
    """Return whether all arguments of a write are the agent's own prose, such as the summary of a hand-over."""
    return set(call["args"]) <= set(corpus.free_text.get(call["tool"], []))


def calls_of(steps: list[Step]) -> Iterator[RecordedCall]:
    """Yield every call of a template's steps, in order."""
    for step in steps:
        yield from step["calls"]


def texts_of(template: Template) -> list[str]:
    """Return the texts of a template except the records: system prompt, opening, and texts of agent and user."""
    texts = [step[key] for step in template["steps"] for key in ("say", "reply") if key in step]
    return [template["system"], *template["opening"], *texts]


def user_text(template: Template) -> str:
    """Return everything that the user says in a template."""
    return "\n".join([*template["opening"], *(step["reply"] for step in template["steps"] if "reply" in step)])


def _steps(transcript: Transcript, corpus: Corpus) -> list[Step]:
    steps: list[Step] = []
    reads_made: set[str] = set()
    replies = {agent_texts.index: agent_texts.text for agent_texts in transcript.user}
    by_index: dict[int, list[Call]] = {}
    for call in transcript.calls:
        by_index.setdefault(call.index, []).append(call)
    agent_texts = {message.index: message.text for message in transcript.agent if message.index not in by_index}
    for index in sorted({*by_index, *agent_texts}):
        if index in by_index:
            calls = [
                _call(call, corpus) for call in by_index[index] if not _dead_end(call, transcript, corpus, reads_made)
            ]
            earlier_text = _text_before(index, transcript)
            steps += [{"calls": group} for group in _in_sequence(calls, earlier_text)]
        else:
            step: Step = {"calls": [], "say": agent_texts[index]}
            user_replies = [
                replies[place]
                for place in sorted(replies)
                if place > index and not _between(place, index, by_index, agent_texts)
            ]
            if user_replies:
                step["reply"] = "\n".join(user_replies)
            steps.append(step)
    return steps


def _between(reply: int, index: int, *indexed: Mapping[int, object]) -> bool:
    return any(index < other < reply for mapping in indexed for other in mapping)


def _dead_end(call: Call, transcript: Transcript, corpus: Corpus, reads_made: set[str]) -> bool:
    """Return whether a call repeats a read with no write since, or failed on an identifier that nobody had mentioned.

    ``reads_made`` is updated.
    """
    if call.result is not None and call.result.error:
        earlier_text = _text_before(call.index, transcript)
        return any(is_identifier(v) and not has_word(earlier_text, v) for v in (call.arguments or {}).values())
    if call.name in corpus.writes:
        reads_made.clear()
        return False
    key = call.name + json.dumps(call.arguments, sort_keys=True)
    is_repeated = key in reads_made
    reads_made.add(key)
    return is_repeated


def _text_before(index: int, transcript: Transcript) -> str:
    """Return what user, policy and tools have told before a message."""
    texts = [transcript.system, *(message.text for message in transcript.user_before(index))]
    return " ".join([*texts, *(answer.text for answer in transcript.observations_before(index))])


def _in_sequence(calls: list[RecordedCall], earlier_text: str) -> list[list[RecordedCall]]:
    """Return the calls of one message in groups, each of which can be made without the answers to its own calls.

    A recorded agent that makes calls at once sometimes knows a code that only the first one's answer shows.
    """
    groups: list[list[RecordedCall]] = []
    for call in calls:
        values = [str(value) for _, value in leaves(call["args"], ()) if _is_code(value)]
        unknown = [value for value in values if not has_word(earlier_text, value)]
        answers = " ".join(_result_text(other) for other in groups[-1]) if groups else ""
        if not groups or any(has_word(answers, value) for value in unknown):
            groups.append([])
        groups[-1].append(call)
    return groups


def _uses_unrevealed_code(texts: list[str], steps: list[Step], corpus: Corpus) -> bool:
    """Return whether a call has an identifier that no message, answer or tool description showed before.

    Such a success was luck, or the agent knew what no other one can know.
    """
    known_texts = [json.dumps(corpus.tools, ensure_ascii=False), *texts]
    for step in steps:
        for call in step["calls"]:
            identifiers = [value for _, value in leaves(call["args"], ()) if is_identifier(value)]
            if not all(any(has_word(text, value) for text in known_texts) for value in identifiers):
                return True
        known_texts += [step.get("reply", ""), *(_result_text(call) for call in step["calls"])]
    return False


def _result_text(call: RecordedCall) -> str:
    result = call["result"]
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _is_code(value: object) -> bool:
    """Return whether a value of an argument is a code or a number of several digits, no phrase."""
    text = str(value)
    is_scalar = isinstance(value, str | int) and not isinstance(value, bool)
    return is_scalar and len(text) > 2 and " " not in text and any(letter.isdigit() for letter in text)


def _call(call: Call, corpus: Corpus) -> RecordedCall:
    result = call.result
    assert result is not None
    style = style_of(result.text, result.value)
    kind = "error" if result.error else "write" if call.name in corpus.writes else "read"
    return {
        "tool": call.name,
        "args": call.arguments or {},
        "result": result.text if style == "text" else result.value,
        "style": style,
        "kind": kind,
    }


def _refuses(steps: list[Step]) -> bool:
    return any(REFUSAL.search(step["say"]) for step in steps if "say" in step)


def _reported_facts(template: Template) -> list[str]:
    """Return at most ``_MAX_FACTS`` facts that the agent reported, those in its last text alone if there are any.

    Facts are values of the records that the user does not mention, and amounts of the policy with their unit.
    """
    agent_text = "\n".join(step["say"] for step in template["steps"] if "say" in step)
    user_words = user_text(template)
    facts: list[str] = []
    for call in calls_of(template["steps"]):
        for path, value in leaves(call["result"], (call["tool"],)):
            if path[-1] == "error" or not (is_number(value) or (isinstance(value, str) and _tellable(value))):
                continue
            text = value if isinstance(value, str) else json.dumps(value)
            if has_word(agent_text, text) and not has_word(user_words, text):
                facts.append(text)
    facts += [phrase for phrase in _policy_amounts(template["system"]) if has_word(agent_text, phrase)]
    unique = list(dict.fromkeys(facts))
    last_text = template["steps"][-1].get("say", "")
    return [v for v in unique if has_word(last_text, v)][:_MAX_FACTS] or unique[:_MAX_FACTS]


def _tellable(value: str) -> bool:
    return is_identifier(value) or is_name(value) or DATE.fullmatch(value) is not None


def _policy_amounts(system: str) -> list[str]:
    """Return the numbers of the policy with the word that follows ("5 days")."""
    amounts = []
    for sentence in sentences(DATE.sub("", system)):
        words = sentence.rstrip(".").split()
        amounts += [f"{n} {unit}" for n, unit in pairwise(words) if NUMBER.fullmatch(n)]
    return amounts
