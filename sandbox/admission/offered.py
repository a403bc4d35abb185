"""What the tools' own texts tell of a seed: a description, a default or an example that holds the answer.

A tool is described for all seeds alike; what is said on fewer than half of them (``Offered``) may be the answer to this
one. It is given away where such a sentence holds the arguments of a call of the oracle, a code among them that the
prompt does not name, or where an argument's own default, constant, example or description holds its code. Texts that
offer as many other codes of the same form are a choice and tell nothing; so does an enumeration of more than one value.
What a reading call takes may stand there.
Pure. Not covered: an answer in plain words, but as JSON or in a sentence that names the tool.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sandbox.admission.policies import READS
from sandbox.contract import Tool
from sandbox.wire import OraclePlay

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
