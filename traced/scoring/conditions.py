"""Conditions of rules: what is looked at in a conversation, and what has to hold of it.

    call = {tool = "cancel_*", arguments = TESTS, result = TESTS, which = "any" | "first" | "last" | "every"}
    answer, user = TEST of the last text of the agent, of the user; a text is a regular expression
    turns, ended = TEST of the number of the agent's messages, of the cause of the end
    all = [CONDITION, ...]    any = [CONDITION, ...]    not = CONDITION

    TEST: {path = "$.a.b", matches | eq | ne | lt | le | gt | ge | in | exists = ...}; TESTS: one or a list of them

Invariants: everything in a table has to hold; a test holds where one of the values that its path leads to passes all of
it, so of a value that is not there only ``exists = false`` holds. Values of different kinds are not equal and in no
order; true is no number. ``matches`` looks anywhere in a text; what is no text is looked at as its JSON.
Not covered: regular expressions that take for ever (whoever writes the file is trusted).

What rules and judges may see of a trajectory: what anybody who was there could see, and nothing else.

Invariants: neither outcome, reward, ``parts`` nor ``detail`` are read; calls come with their results as
``agents.transcript`` pairs them.

Paths into JSON values: a small part of RFC 9535 (JSONPath).

    $.order.id    $['order']["a.b"]    $.items[0]    $.items[-1]    $.items[*].price    $.items.*    $

Invariants: a path gives values in the order of the document; where nothing is there it gives none, and never raises.
How it fails: ``ValueError`` for a text that is no such path, with the place. Not covered: slices, filters, ``..``,
several indices in one pair of brackets.

What every table of a rule file is made of: unknown keys are refused with those that are allowed.
"""

import fnmatch
import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from agents.transcript import Call, transcript
from store.types import EndCause, Trajectory


@dataclass(frozen=True)
class Conversation:
    """One conversation; ``answer`` and ``user`` are the last texts of either side, None where there is none."""

    id: str
    calls: list[Call]
    answer: str | None
    user: str | None
    turns: int  # messages of the assistant
    ended: EndCause


def conversation_of(trajectory: Trajectory) -> Conversation:
    """The public side of a trajectory; raises ``agents.errors.TranscriptError`` for messages without a role."""
    read = transcript(trajectory)
    return Conversation(
        id=trajectory.task_id,
        calls=read.calls,
        answer=read.agent[-1].text if read.agent else None,
        user=read.user[-1].text if read.user else None,
        turns=sum(message.get("role") == "assistant" for message in trajectory.messages),
        ended=trajectory.end_cause,
    )


Step = str | int | None  # a key, an index, or every one
Path = tuple[Step, ...]

_STEP = re.compile(
    r"""\.(?P<key>[^\W\d][\w-]*) | \[(?P<index>-?\d+)\] | (?P<every>\.\*|\[\*\])
      | \['(?P<single>(?:[^'\\]|\\.)*)'\] | \["(?P<double>(?:[^"\\]|\\.)*)"\]""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def parse_path(text: str) -> Path:
    """Read a path; raises ``ValueError``."""
    if not text.startswith("$"):
        raise ValueError(f'{text!r} is no path: it begins with "$", e.g. "$.order.status"')
    steps: list[Step] = []
    at = 1
    while at < len(text):
        found = _STEP.match(text, at)
        if found is None:
            raise ValueError(
                f'{text!r} is no path from character {at + 1} on: a step is .key, ["any key"], [0], [-1] or [*]'
            )
        steps.append(_step(found))
        at = found.end()
    return tuple(steps)


def values_at(path: Path, value: Any) -> Iterator[Any]:
    """The values that a path leads to."""
    if not path:
        yield value
        return
    step, rest = path[0], path[1:]
    for inner in _inner(step, value):
        yield from values_at(rest, inner)


def _step(found: re.Match[str]) -> Step:
    if found["every"]:
        return None
    if found["index"]:
        return int(found["index"])
    if found["key"]:
        return found["key"]
    return _ESCAPED.sub(r"\1", found["single"] if found["single"] is not None else found["double"])


def _inner(step: Step, value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        if step is None:
            yield from value.values()
        elif isinstance(step, str) and step in value:
            yield value[step]
    elif isinstance(value, list):
        if step is None:
            yield from value
        elif isinstance(step, int) and -len(value) <= step < len(value):
            yield value[step]


UNKNOWN_KEY = "unknown_key"


class Table(BaseModel):
    """One table; its values are not changed after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise PydanticCustomError("no_table", "a table is expected, with {allowed}", {"allowed": cls.allowed()})
        for key in value:
            if key not in cls._names():
                told = {"key": key, "allowed": cls.allowed()}
                raise PydanticCustomError(UNKNOWN_KEY, "unknown key; allowed are {allowed}", told)
        return value

    @classmethod
    def allowed(cls) -> str:
        """The keys of this table."""
        return ", ".join(cls._names())

    @classmethod
    def _names(cls) -> list[str]:
        return [field.alias or name for name, field in cls.model_fields.items()]


MISSING: Any = object()
ENDS = [cause.value for cause in EndCause]
ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from error
    return text


def _path(text: str) -> str:
    parse_path(text)
    return text


def _orderable(value: Any) -> Any:
    if not isinstance(value, str) and not _is_number(value):
        raise ValueError("only numbers and texts have an order")
    return value


Pattern = Annotated[str, AfterValidator(_pattern)]
PathText = Annotated[str, AfterValidator(_path)]
Ordered = Annotated[Any, AfterValidator(_orderable)]


class Test(Table):
    """What has to hold of a value."""

    __test__ = False  # it is none of pytest's

    path: PathText | None = None
    matches: Pattern | None = None
    eq: Any = None
    ne: Any = None
    lt: Ordered = None
    le: Ordered = None
    gt: Ordered = None
    ge: Ordered = None
    one_of: list[Any] | None = Field(default=None, alias="in")
    exists: bool | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "Test":
        said = self.model_fields_set - {"path"}
        if not said:
            raise ValueError("a test needs one of matches, eq, ne, lt, le, gt, ge, in, exists")
        if self.exists is False and len(said) > 1:
            raise ValueError("exists = false goes with no other test: nothing else holds of what is not there")
        return self

    def holds(self, value: Any, text: str | None = None) -> bool:
        """Whether it holds of ``value`` (``MISSING``: of nothing); ``text`` is how it was written."""
        found = [] if value is MISSING else list(values_at(parse_path(self.path or "$"), value))
        if self.exists is False:
            return not found
        return any(self._passes(one, text if self.path is None else None) for one in found)

    def _passes(self, value: Any, text: str | None) -> bool:
        given = self.model_fields_set
        return (
            (self.matches is None or re.search(self.matches, _as_text(value) if text is None else text) is not None)
            and ("eq" not in given or same(value, self.eq))
            and ("ne" not in given or not same(value, self.ne))
            and (self.one_of is None or any(same(value, one) for one in self.one_of))
            and all(_in_order(ORDER[name], value, getattr(self, name)) for name in ORDER if name in given)
        )


def same(one: Any, other: Any) -> bool:
    """JSON's equality: numbers by value, true and false are none."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other if not _is_number(one) else _is_number(other) and one == other


def _in_order(compare: Callable[[Any, Any], bool], value: Any, bound: Any) -> bool:
    both = (_is_number(value) and _is_number(bound)) or (isinstance(value, str) and isinstance(bound, str))
    return both and compare(value, bound)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _as_matches(value: Any) -> Any:
    return {"matches": value} if isinstance(value, str) else value


def _as_equal(value: Any) -> Any:
    return {"eq": value} if isinstance(value, str | int) else value


def _as_tool(value: Any) -> Any:
    return {"tool": value} if isinstance(value, str) else value


def _known_ends(test: Test) -> Test:
    named = [one for one in [test.eq, test.ne, *(test.one_of or [])] if one is not None]
    for one in named:
        if one not in ENDS:
            raise ValueError(f"{one!r} is no end of a conversation; allowed are {', '.join(ENDS)}")
    return test


Tests = Annotated[list[Test], BeforeValidator(_listed)]
TextTest = Annotated[Test, BeforeValidator(_as_matches)]
NumberTest = Annotated[Test, BeforeValidator(_as_equal)]
EndTest = Annotated[Test, AfterValidator(_known_ends), BeforeValidator(_as_equal)]


class CallTest(Table):
    """What has to hold of the calls of a tool; ``tool`` is a name, with * and ? for any characters."""

    tool: str = Field(min_length=1)
    arguments: Tests = Field(default=[])
    result: Tests = Field(default=[])
    which: Literal["any", "first", "last", "every"] = "any"

    def holds(self, calls: Sequence[Call]) -> bool:
        """Whether it holds of a conversation's calls."""
        named = calls_of(self.tool, calls)
        if self.which in ("first", "last"):
            named = named[:1] if self.which == "first" else named[-1:]
        passing = [call for call in named if self._passes(call)]
        return bool(passing) and (self.which != "every" or len(passing) == len(named))

    def _passes(self, call: Call) -> bool:
        arguments: Any = call.raw if call.arguments is None else call.arguments
        result, text = (MISSING, None) if call.result is None else (call.result.value, call.result.text)
        return all(test.holds(arguments, call.raw) for test in self.arguments) and all(
            test.holds(result, text) for test in self.result
        )


def calls_of(tool: str, calls: Sequence[Call]) -> list[Call]:
    """The calls of the tools that a name with * and ? means."""
    return [call for call in calls if fnmatch.fnmatchcase(call.name, tool)]


class Condition(Table):
    """Everything in it has to hold."""

    call: Annotated[CallTest, BeforeValidator(_as_tool)] | None = None
    answer: TextTest | None = None
    user: TextTest | None = None
    turns: NumberTest | None = None
    ended: EndTest | None = None
    all_of: list["Condition"] | None = Field(default=None, alias="all", min_length=1)
    any_of: list["Condition"] | None = Field(default=None, alias="any", min_length=1)
    negated: "Condition | None" = Field(default=None, alias="not")

    @model_validator(mode="after")
    def _says_something(self) -> "Condition":
        if not self.model_fields_set:
            raise ValueError(f"an empty condition always holds; it needs one of {self.allowed()}")
        return self

    def holds(self, seen: Conversation) -> bool:
        """Whether it holds of a conversation."""
        return (
            (self.call is None or self.call.holds(seen.calls))
            and (self.answer is None or self.answer.holds(MISSING if seen.answer is None else seen.answer))
            and (self.user is None or self.user.holds(MISSING if seen.user is None else seen.user))
            and (self.turns is None or self.turns.holds(seen.turns))
            and (self.ended is None or self.ended.holds(seen.ended.value))
            and all(one.holds(seen) for one in self.all_of or [])
            and (self.any_of is None or any(one.holds(seen) for one in self.any_of))
            and (self.negated is None or not self.negated.holds(seen))
        )
