"""Rules: the first one that matches a conversation decides its outcome.

    [[rule]]
    name = "cancelled as asked"
    outcome = "success"                        # or "failure", or "unknown": no later rule is tried
    when = {call = {tool = "cancel_order", result = {path = "$.status", eq = "cancelled"}}}

    [rule.check]                               # besides or instead of ``when``
    database = "shop"
    query = "select status from orders where id = :order"
    with = {order = {tool = "cancel_order", argument = "$.order_id"}}
    expect = {eq = "cancelled"}

    [databases.shop]
    url_env = "SHOP_DATABASE_URL"

A rule does not match if the conversation lacks a value that its query needs. If a database does not answer, the outcome
is unknown with the reason, and no later rule is tried, because the rule that could not be checked might have matched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from sqlalchemy import text

from agents.errors import AgentsError
from store.types import Outcome, Trajectory
from traced.scoring.conditions import (
    MISSING,
    Condition,
    Conversation,
    PathText,
    Table,
    Test,
    calls_of,
    conversation_of,
    parse_path,
    values_at,
)
from traced.scoring.databases import Database, Databases, QueryFailed

# The least reward of a success.
SUCCESS_THRESHOLD = 0.5


class ParameterSource(Table):
    """The source of a query parameter: an argument or a result of a tool call, or the id of the conversation."""

    tool: str = ""
    argument: PathText | None = None
    result: PathText | None = None
    which: Literal["first", "last"] = "last"
    conversation: bool = False

    @model_validator(mode="after")
    def _has_one_source(self) -> "ParameterSource":
        sources = [self.conversation, self.argument is not None, self.result is not None]
        if sum(sources) != 1 or self.conversation == bool(self.tool):
            raise ValueError("expected {tool, argument}, {tool, result} or {conversation = true}")
        return self

    def value(self, conversation: Conversation) -> Any:
        """Return the first value in a conversation, ``MISSING`` if there is none."""
        if self.conversation:
            return conversation.id
        calls = calls_of(self.tool, conversation.calls)
        if self.which == "last":
            calls = calls[::-1]
        for call in calls:
            document: Any = call.arguments if self.argument is not None else call.result and call.result.value
            for candidate in values_at(parse_path(str(self.argument or self.result)), document):
                if isinstance(candidate, str | int | float):
                    return candidate
        return MISSING


class Check(Table):
    """A database query and the answer that it has to give."""

    database: str
    query: str
    parameters: dict[str, ParameterSource] = Field(default={}, alias="with")
    expect: Test

    @model_validator(mode="after")
    def _names_agree(self) -> "Check":
        used, declared = set(text(self.query).compile().params), set(self.parameters)
        if used != declared:
            used_names, declared_names = (", ".join(sorted(names)) or "none" for names in (used, declared))
            raise ValueError(f"the query uses the parameters {used_names}, but `with` defines {declared_names}")
        return self


class Rule(Table):
    """A rule; ``because`` is the reason that is stored with its outcomes."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    outcome: Literal["success", "failure", "unknown"]
    score: float | None = Field(default=None, ge=0, le=1, strict=False)
    because: str = ""
    when: Condition | None = None
    check: Check | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> "Rule":
        if self.when is None and self.check is None:
            raise ValueError("a rule needs `when` or `check`; without them it would match every conversation")
        if self.score is not None and self.outcome != ("success" if self.score >= SUCCESS_THRESHOLD else "failure"):
            raise ValueError(
                f"the score must be at least {SUCCESS_THRESHOLD} for success, lower for failure, absent for unknown"
            )
        return self

    @property
    def reward(self) -> float:
        """Return the reward of the outcome, in [0, 1]."""
        return self.score if self.score is not None else float(self.outcome == "success")


class RuleTables(Table):
    """All tables of a rule file."""

    rule: list[Rule] = Field(min_length=1)
    databases: dict[str, Database] = Field(default={})


@dataclass(frozen=True)
class Decision:
    """An outcome with its reward, the rule that matched ("" if none did) and the reason.

    ``failed`` says that the outcome is unknown only because a database or a judge did not answer.
    """

    outcome: Outcome
    reward: float = 0.0
    rule: str = ""
    reason: str = ""
    failed: bool = False


UNDECIDED = Decision(Outcome.UNKNOWN)


@dataclass
class Rules:
    """The rules of one file; ``hash`` is the SHA-256 of its bytes (hex)."""

    rules: Sequence[Rule]
    databases: Databases
    hash: str = ""

    def decide(self, trajectory: Trajectory) -> Decision:
        """Return the decision of the first matching rule; never raises because of the content of a conversation."""
        try:
            conversation = conversation_of(trajectory)
        except AgentsError as error:
            return Decision(Outcome.UNKNOWN, reason=f"the conversation cannot be read: {error}", failed=True)
        queries = _QueryCache(self.databases)
        for rule in self.rules:
            if rule.when is not None and not rule.when.holds(conversation):
                continue
            try:
                if rule.check is None or queries.agrees(rule.check, conversation):
                    return Decision(Outcome(rule.outcome), rule.reward, rule.name, rule.because)
            except QueryFailed as error:
                return Decision(Outcome.UNKNOWN, rule=rule.name, reason=f"could not be checked: {error}", failed=True)
        return UNDECIDED


@dataclass
class _QueryCache:
    """Runs the queries for one conversation; equal queries run once."""

    databases: Databases
    _results: dict[tuple[object, ...], object] = field(default_factory=dict)

    def agrees(self, check: Check, conversation: Conversation) -> bool:
        values = {name: origin.value(conversation) for name, origin in check.parameters.items()}
        if MISSING in values.values():
            return False
        return check.expect.holds(self._answer(check, values))

    def _answer(self, check: Check, values: Mapping[str, object]) -> object:
        key = (check.database, check.query, *sorted(values.items()))
        if key not in self._results:
            self._results[key] = self.databases.ask(check.database, check.query, values)
        return self._results[key]
