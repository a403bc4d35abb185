"""Whether the oracle's answer is given away, and whether it uses what nobody could know.

A leak in the prompt is: the oracle's arguments word for word (as JSON, however spaced), what it says, its whole
sequence of tools, or a sentence that names a tool and every argument of its call. The same, and a code with the rest of
its call, leak in what the tools' descriptions say on this seed and not on most others (``offered.py``). In an answer it
is the name and the arguments of a call still to come, or these arguments again and again and no others of their kind. A
user who names an order's id leaks nothing. A code is unseen when neither the prompt, the tools' schemas nor an answer
so far holds it and no simple step leads to it (``known.py``); numbers and words that an agent may work out are counted
and told, and refuse nothing (``untold.py``).
Not covered: a choice among what was read that follows a hidden coin - a decision of an enumeration, one of three
records - for no episode shows that no rule leads to it. The base model's rewards show it: they are all zero.

What the tools' own texts tell of a seed: a description, a default or an example that holds the answer.

A tool is described for all seeds alike; what is said on fewer than half of them (``Offered``) may be the answer to this
one. It is given away where such a sentence holds the arguments of a call of the oracle, a code among them that the
prompt does not name, or where an argument's own default, constant, example or description holds its code. Texts that
offer as many other codes of the same form are a choice and tell nothing; so does an enumeration of more than one value.
What a reading call takes may stand there.
Pure. Not covered: an answer in plain words, but as JSON or in a sentence that names the tool.
"""

import asyncio
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sandbox.admission.context import EXAMPLES, Bench, Verdict, example
from sandbox.admission.hidden_information import Untold, untold
from sandbox.admission.policies import READS
from sandbox.contract import Tool
from sandbox.errors import clipped
from sandbox.wire import OraclePlay, OracleTurn

TELLING = ("title", "description", "default", "const", "example", "examples", "pattern")
DEEP = 12  # levels of a schema
SENTENCES = 300  # of one seed that are looked at
CODES = 400  # looked at in one text
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_CODE = re.compile(r"[\w-]+")
_DIGIT = re.compile(r"\d")
_DATE = re.compile(r"\d{4}-\d\d?(-\d\d?)?")


@dataclass(frozen=True)
class Offered:
    """A sentence of a tool's, or of one of its arguments ("" for none), with the codes in it."""

    tool: str
    argument: str
    text: str
    codes: tuple[str, ...]


def offered(plays: Sequence[OraclePlay]) -> list[list[Offered]]:
    """Of each episode what its tools say that the tools of most others do not."""
    said = [list(dict.fromkeys(one for tool in play.task.tools for one in _said(tool))) for play in plays]
    counts = Counter(one for each in said for one in each)
    own = ((one for one in each if 2 * counts[one] < len(plays)) for each in said)
    return [[Offered(*one, tuple(codes_in(one[2]))) for one in itertools.islice(each, SENTENCES)] for each in own]


def _said(tool: Tool) -> Iterator[tuple[str, str, str]]:
    function = tool["function"]
    yield from _sentences(str(function["name"]), "", function.get("description"))
    yield from _of_schema(str(function["name"]), "", function["parameters"], DEEP)


def _of_schema(tool: str, argument: str, schema: Any, depth: int) -> Iterator[tuple[str, str, str]]:
    if not isinstance(schema, dict) or not depth:
        return
    for key, value in schema.items():
        if key in TELLING or (key == "enum" and isinstance(value, list) and len(value) == 1):
            yield from _sentences(tool, argument, value)
        elif key == "properties" and isinstance(value, dict):
            for name, inner in value.items():
                yield from _of_schema(tool, str(name), inner, depth - 1)
        elif isinstance(value, dict):
            yield from _of_schema(tool, argument, value, depth - 1)


def _sentences(tool: str, argument: str, value: Any) -> Iterator[tuple[str, str, str]]:
    for one in value if isinstance(value, list) else [value]:
        text = one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)
        yield from ((tool, argument, part) for part in _SENTENCE_END.split(text) if part)


def given_away(
    name: str, arguments: dict[str, Any], said: Sequence[Offered], prompt: str, used: frozenset[str]
) -> Iterator[str]:
    """The sentences that hold this call, unless it only reads. ``used`` are the codes that the oracle uses anywhere."""
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    codes = {key: value for key, value in values.items() if _is_code(value) and value not in prompt}
    if not codes or name.lower().startswith(READS):
        return
    for one in said:
        all_told = all(value in (one.codes if key in codes else one.text) for key, value in values.items())
        own = one.tool == name and codes.get(one.argument) in one.codes
        if (all_told or own) and not _is_choice(one.codes, used):
            yield f"the description of {one.tool} says: {one.text}"


def codes_in(text: str) -> list[str]:
    """The words of a text that may be codes."""
    found = (match[0].strip("-") for match in itertools.islice(_CODE.finditer(text), CODES))
    return [word for word in found if _is_code(word)]


def _is_code(word: str) -> bool:
    return bool(_CODE.fullmatch(word)) and len(_DIGIT.findall(word)) > 2 and not _DATE.fullmatch(word)


def _is_choice(words: Sequence[str], used: frozenset[str]) -> bool:
    """Whether a text offers as many codes that the oracle does not use, of the forms of those it does."""
    forms = {_form(word) for word in words if word in used}
    others = [word for word in words if word not in used and _form(word) in forms]
    return len(others) >= len([word for word in words if word in used])


def _form(word: str) -> str:
    return re.sub(r"[^\W\d_]", "a", re.sub(r"\d", "9", word))


SHORT = 12  # characters; shorter texts may stand anywhere by chance
OBJECTS = 200  # JSON objects looked at in one text,
EPISODE_OBJECTS = 5000  # and in all answers of an episode


async def leak(bench: Bench) -> Verdict:
    """The prompt does not hold the oracle's answer, and the oracle knows no more than an agent."""
    limits = bench.thresholds
    plays = await bench.oracle_plays(limits.seeds)
    episodes = list(zip(bench.panel(len(plays)), plays, strict=True))
    told: list[tuple[int, OraclePlay, str]] = []
    guessed: list[tuple[int, OraclePlay, str]] = []
    worked: list[tuple[int, OraclePlay, str]] = []
    for (seed, one), said in zip(episodes, await asyncio.to_thread(offered, plays), strict=True):
        leaking, strange = await asyncio.to_thread(_first, one, said)  # may take long, and the loop serves others
        told += ((seed, one, text) for text in leaking)
        guessed += ((seed, one, text) for text in strange.codes[:1])
        worked += ((seed, one, text) for text in strange.worked_out[:1])
    share, unknown = len(told) / len(plays), len(guessed) / len(plays)
    evidence: dict[str, Any] = {"share": round(share, 3), "allowed": limits.leaking}
    evidence |= {"unseen": round(unknown, 3), "unseen_allowed": limits.unseen, "seeds": len(plays)}
    evidence["worked_out"] = round(len(worked) / len(plays), 3)
    if worked:
        evidence["first_worked_out"] = {"seed": worked[0][0], "text": clipped(worked[0][2], 200)}
    examples: list[dict[str, Any]] = []
    for key, what, found, too_many in (
        ("first", "the episode gives away what the oracle does", told, share > limits.leaking),
        ("first_unseen", "the oracle uses what no agent could know yet", guessed, unknown > limits.unseen),
    ):
        if found:
            evidence[key] = {"seed": found[0][0], "text": clipped(found[0][2], 200)}
        if too_many:
            examples += [example(seed, f"{what}: {text}", one.task, bench.chat(one)) for seed, one, text in found[:2]]
    if examples:
        evidence["examples"] = examples[:EXAMPLES]
    return not examples, evidence


def _first(one: OraclePlay, said: Sequence[Offered]) -> tuple[list[str], Untold]:
    return leaks(one, said)[:1], untold(one)


def leaks(one: OraclePlay, said: Sequence[Offered] = ()) -> list[str]:
    """What of the oracle's play stands where an agent reads it too early; short texts do not count.

    ``said`` is what the tools say on this seed alone (``offered``).
    """
    prompt = "\n".join([one.task.system, *(str(message.get("content") or "") for message in one.task.messages)])
    return [*_in_prompt(one, prompt, said), *_whole_sequence(one, prompt), *_in_answers(one)]


def _in_prompt(one: OraclePlay, prompt: str, said: Sequence[Offered]) -> Iterator[str]:
    whole = "\n".join([prompt, *(each.text for each in said)])
    objects = list(_objects(whole))
    sentences = _SENTENCE_END.split(whole)
    naming: dict[str, list[str]] = {}  # sentences that name a tool
    used = frozenset(
        code for turn in one.turns for call in _calls(turn) for code in codes_in(call["function"]["arguments"])
    )
    for turn in one.turns:
        for call in _calls(turn):
            name, text = call["function"]["name"], call["function"]["arguments"]
            arguments = _parsed(text)
            if len(text) >= SHORT and (text in whole or (arguments and arguments in objects)):
                yield text
            elif arguments:
                if name not in naming:
                    naming[name] = [part for part in sentences if _name_pattern(name).search(part)]
                yield from _call_in_words(arguments, naming[name])
                yield from given_away(name, arguments, said, prompt, used)
        words = str(turn.message.get("content") or "")
        if len(words) >= SHORT and words in prompt:
            yield words


def _calls(turn: OracleTurn) -> list[dict[str, Any]]:
    return turn.message.get("tool_calls") or []


def _name_pattern(name: str) -> re.Pattern[str]:
    """How a sentence names a tool; a plain word does so as a call alone."""
    return re.compile(rf"\b{re.escape(name)}\s*\(" if _is_plain(name) else rf"\b{re.escape(name)}\b")


def _call_in_words(arguments: dict[str, Any], naming: list[str]) -> list[str]:
    """The first of the sentences that hold the values of all arguments."""
    values = [value if isinstance(value, str) else json.dumps(value) for value in arguments.values()]
    if sum(map(len, values)) < 3:
        return []
    return [part for part in naming if all(value in part for value in values)][:1]


def _is_plain(name: str) -> bool:
    return name.isalpha() and name.islower()


def _whole_sequence(one: OraclePlay, prompt: str) -> Iterator[str]:
    """The prompt's tool names are the oracle's calls in order, or hold three or more of these in a row."""
    called = [call["function"]["name"] for turn in one.turns for call in _calls(turn)]
    names = {tool["function"]["name"] for tool in one.task.tools} | set(called)
    words = (word.rstrip(".-") for word in re.findall(r"[\w.-]+", prompt))
    named = [word for word in words if word in names and not _is_plain(word)]
    rows = (named[at : at + len(called)] for at in range(len(named) - len(called) + 1))
    if len(set(called)) >= 2 and (named == called or (len(called) >= 3 and called in rows)):
        yield f"the prompt names the tools in the oracle's order: {', '.join(called)}"


def _in_answers(one: OraclePlay) -> Iterator[str]:
    """What answers say of a call that the oracle makes later and has not made before.

    Either the call's name and its arguments stand there, or its arguments, two at least, in more than one answer, with
    no other object of the same keys to choose from: a record that is looked at tells no such thing again and again.
    """
    answers: list[tuple[str, list[Any]]] = []
    made: set[tuple[str, str]] = set()
    most = EPISODE_OBJECTS
    for turn in one.turns:
        for call in _calls(turn):
            name, text = call["function"]["name"], call["function"]["arguments"]
            arguments = _parsed(text)
            new = (name, text) not in made and len(text) >= SHORT
            if new and arguments and _told_by(answers, name, arguments):
                yield f"{name} {text}"
            made.add((name, text))
        texts = (str(reply.get("content")).replace('\\"', '"') for reply in turn.replies)
        for text in texts:
            objects = list(itertools.islice(_objects(text), most))
            most -= len(objects)
            answers.append((text, objects))


def _told_by(answers: list[tuple[str, list[Any]]], name: str, arguments: dict[str, Any]) -> bool:
    telling = [text for text, objects in answers if arguments in objects]
    alike = [
        one for _, objects in answers for one in objects if isinstance(one, dict) and one.keys() == arguments.keys()
    ]
    again = len(set(telling)) > 1 and len(arguments) > 1 and all(one == arguments for one in alike)
    return again or any(name in answer for answer in telling)


def _objects(text: str) -> Iterator[Any]:
    """The JSON objects that begin anywhere in a text."""
    decoder = json.JSONDecoder()
    for count, match in enumerate(re.finditer(r"\{", text)):
        if count >= OBJECTS:
            return
        try:
            yield decoder.raw_decode(text, match.start())[0]
        except (ValueError, RecursionError):
            continue


def _parsed(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
