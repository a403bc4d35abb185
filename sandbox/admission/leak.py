"""Check that nothing reveals the oracle's solution, and that the oracle uses no value that an agent could not know.

A leak in the prompt is a call's arguments as JSON, the oracle's text, its whole sequence of tools, or a sentence with a
tool and all its arguments. Tool descriptions that differ by seed can leak in the same ways; text that most seeds share
cannot. A reply leaks a later call if it contains the call's name and arguments, or if several replies repeat the
arguments and no reply contains others of the same kind. Hidden codes fail the check as well
(``hidden_information.py``); values that an agent may have to work out are only counted.

Not covered: a choice among read values by hidden chance (the base model's rewards show it: all are 0), and tool
descriptions that give the solution in plain words.
"""

import asyncio
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sandbox.admission.context import EXAMPLES, CheckContext, Verdict, example
from sandbox.admission.hidden_information import HiddenValues, find_hidden_values
from sandbox.admission.policies import READ_PREFIXES, arguments_of
from sandbox.contract import Message, Tool
from sandbox.errors import clipped
from sandbox.wire import OraclePlay, OracleTurn

TEXT_KEYS = ("title", "description", "default", "const", "example", "examples", "pattern")
# An environment chooses its schemas, prompts and replies; this and the next bounds limit the cost of reading them.
MAX_SCHEMA_DEPTH = 12
# Tool sentences of one seed.
MAX_SENTENCES = 300
# Words of one text that are examined as codes.
MAX_CODES = 400
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_CODE = re.compile(r"[\w-]+")
_DIGIT = re.compile(r"\d")
_DATE = re.compile(r"\d{4}-\d\d?(-\d\d?)?")
# Shorter texts may occur anywhere by chance.
MIN_LEAK_CHARACTERS = 12
# JSON objects parsed in one text, and in all replies of an episode.
MAX_TEXT_OBJECTS = 200
MAX_EPISODE_OBJECTS = 5000


@dataclass(frozen=True)
class ToolText:
    """A sentence about a tool or one of its arguments (``argument`` is "" for the tool), with the codes in it."""

    tool: str
    argument: str
    text: str
    codes: tuple[str, ...]


def seed_specific_texts(plays: Sequence[OraclePlay]) -> list[list[ToolText]]:
    """Return, for each episode, the sentences about tools that fewer than half of the episodes contain."""
    sentences_by_play = [
        list(dict.fromkeys(sentence for tool in play.task.tools for sentence in _tool_sentences(tool)))
        for play in plays
    ]
    counts = Counter(sentence for sentences in sentences_by_play for sentence in sentences)
    specific = (
        (sentence for sentence in sentences if 2 * counts[sentence] < len(plays)) for sentences in sentences_by_play
    )
    return [
        [ToolText(*sentence, tuple(codes_in(sentence[2]))) for sentence in itertools.islice(sentences, MAX_SENTENCES)]
        for sentences in specific
    ]


def _tool_sentences(tool: Tool) -> Iterator[tuple[str, str, str]]:
    function = tool["function"]
    yield from _sentences(str(function["name"]), "", function.get("description"))
    yield from _schema_sentences(str(function["name"]), "", function["parameters"], MAX_SCHEMA_DEPTH)


def _schema_sentences(tool: str, argument: str, schema: object, depth: int) -> Iterator[tuple[str, str, str]]:
    if not isinstance(schema, dict) or not depth:
        return
    for key, value in schema.items():
        if key in TEXT_KEYS or (key == "enum" and isinstance(value, list) and len(value) == 1):
            yield from _sentences(tool, argument, value)
        elif key == "properties" and isinstance(value, dict):
            for name, inner in value.items():
                yield from _schema_sentences(tool, str(name), inner, depth - 1)
        elif isinstance(value, dict):
            yield from _schema_sentences(tool, argument, value, depth - 1)


def _sentences(tool: str, argument: str, value: object) -> Iterator[tuple[str, str, str]]:
    for item in value if isinstance(value, list) else [value]:
        text = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
        yield from ((tool, argument, part) for part in _SENTENCE_END.split(text) if part)


def description_leaks(
    name: str, arguments: dict[str, object], tool_texts: Sequence[ToolText], prompt: str, oracle_codes: frozenset[str]
) -> Iterator[str]:
    """Yield a finding for each tool sentence that reveals this call, unless the call only reads.

    Args:
        oracle_codes: all codes that the oracle uses in the episode.
    """
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    codes = {key: value for key, value in values.items() if _is_code(value) and value not in prompt}
    if not codes or name.lower().startswith(READ_PREFIXES):
        return
    for tool_text in tool_texts:
        holds_call = all(
            value in (tool_text.codes if key in codes else tool_text.text) for key, value in values.items()
        )
        holds_own_code = tool_text.tool == name and codes.get(tool_text.argument) in tool_text.codes
        if (holds_call or holds_own_code) and not _is_choice(tool_text.codes, oracle_codes):
            yield f"the description of {tool_text.tool} says: {tool_text.text}"


def codes_in(text: str) -> list[str]:
    """Return the words of a text that may be codes: more than two digits, and no date."""
    candidates = (match[0].strip("-") for match in itertools.islice(_CODE.finditer(text), MAX_CODES))
    return [word for word in candidates if _is_code(word)]


def _is_code(word: str) -> bool:
    return bool(_CODE.fullmatch(word)) and len(_DIGIT.findall(word)) > 2 and not _DATE.fullmatch(word)


def _is_choice(codes: Sequence[str], oracle_codes: frozenset[str]) -> bool:
    """Whether a text offers at least as many unused as used codes of the same form: such a list reveals nothing."""
    forms = {_code_form(code) for code in codes if code in oracle_codes}
    unused_codes = [code for code in codes if code not in oracle_codes and _code_form(code) in forms]
    return len(unused_codes) >= sum(code in oracle_codes for code in codes)


def _code_form(word: str) -> str:
    return re.sub(r"[^\W\d_]", "a", re.sub(r"\d", "9", word))


async def leak(context: CheckContext) -> Verdict:
    """Check that nothing reveals the oracle's calls too early, and that the oracle uses no code that is hidden."""
    limits = context.thresholds
    plays = await context.oracle_plays(limits.seeds)
    episodes = list(zip(context.panel(len(plays)), plays, strict=True))
    leaking: list[tuple[int, OraclePlay, str]] = []
    unseen: list[tuple[int, OraclePlay, str]] = []
    worked_out: list[tuple[int, OraclePlay, str]] = []
    for (seed, play), tool_texts in zip(episodes, await asyncio.to_thread(seed_specific_texts, plays), strict=True):
        # In a thread, because it may take long and the event loop serves other checks.
        leak_texts, hidden = await asyncio.to_thread(_inspect_play, play, tool_texts)
        leaking += ((seed, play, text) for text in leak_texts)
        unseen += ((seed, play, text) for text in hidden.codes[:1])
        worked_out += ((seed, play, text) for text in hidden.worked_out[:1])
    leak_share, unseen_share = len(leaking) / len(plays), len(unseen) / len(plays)
    evidence: dict[str, object] = {"share": round(leak_share, 3), "allowed": limits.leak_share}
    evidence |= {"unseen": round(unseen_share, 3), "unseen_allowed": limits.unseen_share, "seeds": len(plays)}
    evidence["worked_out"] = round(len(worked_out) / len(plays), 3)
    if worked_out:
        evidence["first_worked_out"] = {"seed": worked_out[0][0], "text": clipped(worked_out[0][2], 200)}
    examples: list[dict[str, object]] = []
    for key, description, findings, exceeds in (
        ("first", "the episode gives away what the oracle does", leaking, leak_share > limits.leak_share),
        ("first_unseen", "the oracle uses what no agent could know yet", unseen, unseen_share > limits.unseen_share),
    ):
        if findings:
            evidence[key] = {"seed": findings[0][0], "text": clipped(findings[0][2], 200)}
        if exceeds:
            examples += [
                example(seed, f"{description}: {text}", play.task, context.chat(play))
                for seed, play, text in findings[:2]
            ]
    if examples:
        evidence["examples"] = examples[:EXAMPLES]
    return not examples, evidence


def _inspect_play(play: OraclePlay, tool_texts: Sequence[ToolText]) -> tuple[list[str], HiddenValues]:
    return leaks(play, tool_texts)[:1], find_hidden_values(play)


def leaks(play: OraclePlay, tool_texts: Sequence[ToolText] = ()) -> list[str]:
    """Return the parts of the oracle's play that an agent can read too early; short texts do not count.

    Args:
        tool_texts: this episode's entry of ``seed_specific_texts``.
    """
    prompt = "\n".join([play.task.system, *(str(message.get("content") or "") for message in play.task.messages)])
    return [*_prompt_leaks(play, prompt, tool_texts), *_sequence_leaks(play, prompt), *_answer_leaks(play)]


def _prompt_leaks(play: OraclePlay, prompt: str, tool_texts: Sequence[ToolText]) -> Iterator[str]:
    all_text = "\n".join([prompt, *(tool_text.text for tool_text in tool_texts)])
    objects = list(_objects(all_text))
    sentences = _SENTENCE_END.split(all_text)
    # Sentences by the tool that they mention, so that the prompt is searched once per tool and not once per call.
    naming_sentences: dict[str, list[str]] = {}
    oracle_codes = frozenset(
        code for turn in play.turns for call in _calls(turn) for code in codes_in(call["function"]["arguments"])
    )
    for turn in play.turns:
        for call in _calls(turn):
            name, text = call["function"]["name"], call["function"]["arguments"]
            arguments = arguments_of(call["function"])
            if len(text) >= MIN_LEAK_CHARACTERS and (text in all_text or (arguments and arguments in objects)):
                yield text
            elif arguments:
                if name not in naming_sentences:
                    naming_sentences[name] = [part for part in sentences if _name_pattern(name).search(part)]
                yield from _call_in_words(arguments, naming_sentences[name])
                yield from description_leaks(name, arguments, tool_texts, prompt, oracle_codes)
        words = str(turn.message.get("content") or "")
        if len(words) >= MIN_LEAK_CHARACTERS and words in prompt:
            yield words


def _calls(turn: OracleTurn) -> list[Message]:
    return turn.message.get("tool_calls") or []


def _name_pattern(name: str) -> re.Pattern[str]:
    """Return the pattern that finds mentions of a tool; a plain word counts only if it is written as a call."""
    return re.compile(rf"\b{re.escape(name)}\s*\(" if _is_plain(name) else rf"\b{re.escape(name)}\b")


def _call_in_words(arguments: dict[str, object], sentences: list[str]) -> list[str]:
    """Return the first sentence that contains the values of all arguments, if any."""
    values = [value if isinstance(value, str) else json.dumps(value) for value in arguments.values()]
    if sum(map(len, values)) < 3:
        return []
    return [sentence for sentence in sentences if all(value in sentence for value in values)][:1]


def _is_plain(name: str) -> bool:
    return name.isalpha() and name.islower()


def _sequence_leaks(play: OraclePlay, prompt: str) -> Iterator[str]:
    """Yield a finding if the prompt names the oracle's tools in order: as its only tools, or three or more in a row."""
    oracle_calls = [call["function"]["name"] for turn in play.turns for call in _calls(turn)]
    names = {tool["function"]["name"] for tool in play.task.tools} | set(oracle_calls)
    words = (word.rstrip(".-") for word in re.findall(r"[\w.-]+", prompt))
    mentioned = [word for word in words if word in names and not _is_plain(word)]
    windows = (mentioned[index : index + len(oracle_calls)] for index in range(len(mentioned) - len(oracle_calls) + 1))
    if len(set(oracle_calls)) >= 2 and (
        mentioned == oracle_calls or (len(oracle_calls) >= 3 and oracle_calls in windows)
    ):
        yield f"the prompt names the tools in the oracle's order: {', '.join(oracle_calls)}"


def _answer_leaks(play: OraclePlay) -> Iterator[str]:
    """Yield each call that earlier replies reveal and that the oracle has not made before."""
    answers: list[tuple[str, list[object]]] = []
    previous_calls: set[tuple[str, str]] = set()
    objects_left = MAX_EPISODE_OBJECTS
    for turn in play.turns:
        for call in _calls(turn):
            name, text = call["function"]["name"], call["function"]["arguments"]
            arguments = arguments_of(call["function"])
            new = (name, text) not in previous_calls and len(text) >= MIN_LEAK_CHARACTERS
            if new and arguments and _answers_hold_call(answers, name, arguments):
                yield f"{name} {text}"
            previous_calls.add((name, text))
        texts = (str(reply.get("content")).replace('\\"', '"') for reply in turn.replies)
        for text in texts:
            objects = list(itertools.islice(_objects(text), objects_left))
            objects_left -= len(objects)
            answers.append((text, objects))


def _answers_hold_call(answers: list[tuple[str, list[object]]], name: str, arguments: dict[str, object]) -> bool:
    matching_texts = [text for text, objects in answers if arguments in objects]
    similar_objects = [
        item for _, objects in answers for item in objects if isinstance(item, dict) and item.keys() == arguments.keys()
    ]
    # Arguments that recur in replies, with no similar object to choose from, are dictated to the agent. A record that
    # the agent looks up does not recur.
    is_repeated = (
        len(set(matching_texts)) > 1 and len(arguments) > 1 and all(item == arguments for item in similar_objects)
    )
    return is_repeated or any(name in answer for answer in matching_texts)


def _objects(text: str) -> Iterator[object]:
    """Yield the JSON objects that begin anywhere in a text."""
    decoder = json.JSONDecoder()
    for count, match in enumerate(re.finditer(r"\{", text)):
        if count >= MAX_TEXT_OBJECTS:
            return
        try:
            yield decoder.raw_decode(text, match.start())[0]
        except (ValueError, RecursionError):
            continue
