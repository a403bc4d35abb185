"""Conditions of rules on a conversation.

    call = {tool = "cancel_*", arguments = TESTS, result = TESTS, which = "any" | "first" | "last" | "every"}
    answer, user = TEST of the last text of the agent, of the user; a text is a regular expression
    turns, ended = TEST of the number of the agent's messages, of the cause of the end
    all = [CONDITION, ...]    any = [CONDITION, ...]    not = CONDITION

    TEST: {path = "$.a.b", matches | eq | ne | lt | le | gt | ge | in | exists = ...}; TESTS: one or a list of them
    path: $.order.id    $['order']["a.b"]    $.items[0]    $.items[-1]    $.items[*].price    $.items.*    $

Everything in a table has to hold; a test holds if one of the values at its path passes all of it, so only
``exists = false`` holds of a missing value. Values of different types are neither equal nor ordered. ``matches``
searches anywhere in a text, other values are searched as JSON. Rules see what a participant saw: no outcome, no reward.
Paths are a small part of RFC 9535 (JSONPath). Not covered: slices, filters, ``..``, and regular expressions that never
end (the author of a rule file is trusted).

python-jsonpath (2) is not used: it accepts paths outside this part, which the report of a rule file must refuse.
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

# The type of the validation error for a key that a table does not have.
UNKNOWN_KEY = "unknown_key"
# Stands for a missing value, because None is a value of JSON.
MISSING: Any = object()
END_CAUSES = [cause.value for cause in EndCause]
ORDER_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}

# A key, an index, or None for all children.
PathStep = str | int | None
Path = tuple[PathStep, ...]

_STEP = re.compile(
    r"""\.(?P<key>[^\W\d][\w-]*) | \[(?P<index>-?\d+)\] | (?P<every>\.\*|\[\*\])
      | \['(?P<single>(?:[^'\\]|\\.)*)'\] | \["(?P<double>(?:[^"\\]|\\.)*)"\]""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


@dataclass(frozen=True)
class Conversation:
    """The parts of a conversation that rules see.

    ``answer`` and ``user`` are the last texts of either side, ``turns`` counts the agent's messages.
    """

    id: str
    calls: list[Call]
    answer: str | None
    user: str | None
    turns: int
    end_cause: EndCause


def conversation_of(trajectory: Trajectory) -> Conversation:
    """Return the conversation of a trajectory; raises ``agents.errors.TranscriptError`` for messages without a role."""
    parsed = transcript(trajectory)
    return Conversation(
        id=trajectory.task_id,
        calls=parsed.calls,
        answer=parsed.agent[-1].text if parsed.agent else None,
        user=parsed.user[-1].text if parsed.user else None,
        turns=sum(message.get("role") == "assistant" for message in trajectory.messages),
        end_cause=trajectory.end_cause,
    )


def parse_path(text: str) -> Path:
    """Parse a path; raises ``ValueError`` with the position of the mistake."""
    if not text.startswith("$"):
        raise ValueError(f'{text!r} is not a path: a path begins with "$", e.g. "$.order.status"')
    steps: list[PathStep] = []
    offset = 1
    while offset < len(text):
        match = _STEP.match(text, offset)
        if match is None:
            raise ValueError(
                f'{text!r} is not a path (character {offset + 1}); a step is .key, ["any key"], [0], [-1] or [*]'
            )
        steps.append(_step(match))
        offset = match.end()
    return tuple(steps)


def values_at(path: Path, value: object) -> Iterator[Any]:
    """Yield the values at a path, in the order of the document; none if nothing matches."""
    if not path:
        yield value
        return
    step, rest = path[0], path[1:]
    for child in _children(step, value):
        yield from values_at(rest, child)


def _step(match: re.Match[str]) -> PathStep:
    if match["every"]:
        return None
    if match["index"]:
        return int(match["index"])
    if match["key"]:
        return match["key"]
    return _ESCAPED.sub(r"\1", match["single"] if match["single"] is not None else match["double"])


def _children(step: PathStep, value: object) -> Iterator[Any]:
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


class Table(BaseModel):
    """A table of a rule file; refuses unknown keys and names the allowed ones."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, value: object) -> object:
        if not isinstance(value, dict):
            raise PydanticCustomError("no_table", "expected a table with {allowed}", {"allowed": cls.allowed()})
        for key in value:
            if key not in cls._names():
                context = {"key": key, "allowed": cls.allowed()}
                raise PydanticCustomError(UNKNOWN_KEY, "unknown key; allowed are {allowed}", context)
        return value

    @classmethod
    def allowed(cls) -> str:
        """Return the keys of this table."""
        return ", ".join(cls._names())

    @classmethod
    def _names(cls) -> list[str]:
        return [field.alias or name for name, field in cls.model_fields.items()]


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return text


def _path(text: str) -> str:
    parse_path(text)
    return text


def _orderable(value: object) -> object:
    if not isinstance(value, str) and not _is_number(value):
        raise ValueError("only numbers and texts can be ordered")
    return value


Pattern = Annotated[str, AfterValidator(_pattern)]
PathText = Annotated[str, AfterValidator(_path)]
OrderedValue = Annotated[Any, AfterValidator(_orderable)]


class Test(Table):
    """A test of a value."""

    # Keeps pytest from collecting this class.
    __test__ = False

    path: PathText | None = None
    matches: Pattern | None = None
    eq: Any = None
    ne: Any = None
    lt: OrderedValue = None
    le: OrderedValue = None
    gt: OrderedValue = None
    ge: OrderedValue = None
    one_of: list[Any] | None = Field(default=None, alias="in")
    exists: bool | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> "Test":
        tests = self.model_fields_set - {"path"}
        if not tests:
            raise ValueError("a test needs one of matches, eq, ne, lt, le, gt, ge, in, exists")
        if self.exists is False and len(tests) > 1:
            raise ValueError(
                "exists = false cannot be combined with other tests, because a missing value has no content"
            )
        return self

    def holds(self, value: object, text: str | None = None) -> bool:
        """Return whether the test holds of ``value`` or ``MISSING``; ``text`` is the value as it was written."""
        # A pattern without a path searches the text as it was written, not JSON that was formatted again.
        values = [] if value is MISSING else list(values_at(parse_path(self.path or "$"), value))
        if self.exists is False:
            return not values
        return any(self._passes(candidate, text if self.path is None else None) for candidate in values)

    def _passes(self, value: object, text: str | None) -> bool:
        fields = self.model_fields_set
        return (
            (self.matches is None or re.search(self.matches, _as_text(value) if text is None else text) is not None)
            and ("eq" not in fields or json_equal(value, self.eq))
            and ("ne" not in fields or not json_equal(value, self.ne))
            and (self.one_of is None or any(json_equal(value, option) for option in self.one_of))
            and all(
                _in_order(ORDER_OPERATORS[name], value, getattr(self, name))
                for name in ORDER_OPERATORS
                if name in fields
            )
        )


def json_equal(left: object, right: object) -> bool:
    """Return whether JSON values are equal: numbers by value, and booleans are not numbers."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(json_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(json_equal(left[key], right[key]) for key in left)
    return type(left) is type(right) and left == right if not _is_number(left) else _is_number(right) and left == right


def _in_order(compare: Callable[[Any, Any], bool], value: object, bound: object) -> bool:
    comparable = (_is_number(value) and _is_number(bound)) or (isinstance(value, str) and isinstance(bound, str))
    return comparable and compare(value, bound)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _as_matches(value: object) -> object:
    return {"matches": value} if isinstance(value, str) else value


def _as_equal(value: object) -> object:
    return {"eq": value} if isinstance(value, str | int) else value


def _as_tool(value: object) -> object:
    return {"tool": value} if isinstance(value, str) else value


def _check_end_causes(test: Test) -> Test:
    values = [value for value in [test.eq, test.ne, *(test.one_of or [])] if value is not None]
    for value in values:
        if value not in END_CAUSES:
            raise ValueError(f"{value!r} is not an end of a conversation; allowed are {', '.join(END_CAUSES)}")
    return test


Tests = Annotated[list[Test], BeforeValidator(_as_list)]
TextTest = Annotated[Test, BeforeValidator(_as_matches)]
NumberTest = Annotated[Test, BeforeValidator(_as_equal)]
EndTest = Annotated[Test, AfterValidator(_check_end_causes), BeforeValidator(_as_equal)]


class CallTest(Table):
    """A test of the calls of a tool; ``tool`` is a name with the wildcards * and ?."""

    tool: str = Field(min_length=1)
    arguments: Tests = Field(default=[])
    result: Tests = Field(default=[])
    which: Literal["any", "first", "last", "every"] = "any"

    def holds(self, calls: Sequence[Call]) -> bool:
        """Return whether the test holds of the calls of a conversation."""
        matching = calls_of(self.tool, calls)
        if self.which in ("first", "last"):
            matching = matching[:1] if self.which == "first" else matching[-1:]
        passing = [call for call in matching if self._passes(call)]
        return bool(passing) and (self.which != "every" or len(passing) == len(matching))

    def _passes(self, call: Call) -> bool:
        # Arguments that are not valid JSON are tested as text.
        arguments: Any = call.raw if call.arguments is None else call.arguments
        result, text = (MISSING, None) if call.result is None else (call.result.value, call.result.text)
        return all(test.holds(arguments, call.raw) for test in self.arguments) and all(
            test.holds(result, text) for test in self.result
        )


def calls_of(tool: str, calls: Sequence[Call]) -> list[Call]:
    """Return the calls of the tools that match a name with the wildcards * and ?."""
    return [call for call in calls if fnmatch.fnmatchcase(call.name, tool)]


class Condition(Table):
    """A condition on a conversation: everything in it has to hold."""

    call: Annotated[CallTest, BeforeValidator(_as_tool)] | None = None
    answer: TextTest | None = None
    user: TextTest | None = None
    turns: NumberTest | None = None
    ended: EndTest | None = None
    all_of: list["Condition"] | None = Field(default=None, alias="all", min_length=1)
    any_of: list["Condition"] | None = Field(default=None, alias="any", min_length=1)
    negated: "Condition | None" = Field(default=None, alias="not")

    @model_validator(mode="after")
    def _not_empty(self) -> "Condition":
        if not self.model_fields_set:
            raise ValueError(f"an empty condition would match everything; it needs one of {self.allowed()}")
        return self

    def holds(self, conversation: Conversation) -> bool:
        """Return whether the condition holds of a conversation."""
        return (
            (self.call is None or self.call.holds(conversation.calls))
            and (
                self.answer is None
                or self.answer.holds(MISSING if conversation.answer is None else conversation.answer)
            )
            and (self.user is None or self.user.holds(MISSING if conversation.user is None else conversation.user))
            and (self.turns is None or self.turns.holds(conversation.turns))
            and (self.ended is None or self.ended.holds(conversation.end_cause.value))
            and all(condition.holds(conversation) for condition in self.all_of or [])
            and (self.any_of is None or any(condition.holds(conversation) for condition in self.any_of))
            and (self.negated is None or not self.negated.holds(conversation))
        )
