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
"""

import asyncio
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from sandbox.admission.bench import Bench
from sandbox.admission.evidence import EXAMPLES, Verdict, example
from sandbox.admission.offered import Offered, codes_in, given_away, offered
from sandbox.admission.untold import Untold, untold
from sandbox.errors import clipped
from sandbox.wire import OraclePlay, OracleTurn

SHORT = 12  # characters; shorter texts may stand anywhere by chance
OBJECTS = 200  # JSON objects looked at in one text,
EPISODE_OBJECTS = 5000  # and in all answers of an episode
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")


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
                    naming[name] = [part for part in sentences if _form(name).search(part)]
                yield from _call_in_words(arguments, naming[name])
                yield from given_away(name, arguments, said, prompt, used)
        words = str(turn.message.get("content") or "")
        if len(words) >= SHORT and words in prompt:
            yield words


def _calls(turn: OracleTurn) -> list[dict[str, Any]]:
    return turn.message.get("tool_calls") or []


def _form(name: str) -> re.Pattern[str]:
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
