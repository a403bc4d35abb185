"""Tell the tool sets of a target's conversations apart, and select the latest one that has enough of them.

A tool is its name and its parameters; descriptions and marks do not count. A conversation is compatible with a tool set
if

- the tools that both have have the same parameters: the same JSON schema without its texts, or, where one of the two
  was inferred from calls, no parameter that the declared one lacks;
- every tool of the conversation is in the set: tools may have been added since, but none was removed or renamed. An
  inferred set lacks the tools that were never called, so it may lack others as well, if both have a tool in common.

A conversation without a list of tools is compatible with a set that has every tool that it calls; one that calls none
does not count when a set is selected. The latest set is that of the conversation that began last; without times, the
most frequent one.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from agents.transcript import tool_function
from store.repositories.trajectories import JudgedRow
from store.types import INFERRED, JsonObject, Outcome, Tool, Trajectory
from traced.ingest.importers.tau_bench import ToolInference

# The least numbers of successes and failures of which a perfect contrast is significant: Fisher's exact test gives
# p = 0.029 for 4 against 4 and p = 0.1 for 3 against 3.
MIN_OUTCOMES = 4
SHARE_OF_LARGEST = 0.1
MAX_SETS = 20  # most frequent, and latest, lists of tools that are tried
# Keys of a JSON schema that change its text only.
TEXT_KEYS = ("description", "title", "examples", "$comment")
NO_CALLS: Mapping[str, frozenset[str]] = {}
EARLIEST = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Schema:
    """The parameters of a tool: their canonical JSON and their names."""

    text: str
    names: frozenset[str]
    is_inferred: bool

    def agrees(self, other: "Schema") -> bool:
        """Return whether both may be the schema of one tool."""
        if self.is_inferred and other.is_inferred:
            return True
        if self.is_inferred or other.is_inferred:
            inferred, declared = (self, other) if self.is_inferred else (other, self)
            return inferred.names <= declared.names
        return self.text == other.text


Toolset = Mapping[str, Schema]


@dataclass(frozen=True)
class OtherToolset:
    """Conversations that were left out because of their tools; ``tools`` are those that differ from the used set."""

    tools: tuple[str, ...]
    conversations: int
    newest_at: datetime | None

    def as_json(self) -> JsonObject:
        """Return it for the detail of a stage event."""
        newest_at = self.newest_at.isoformat() if self.newest_at is not None else None
        return {"tools": list(self.tools), "conversations": self.conversations, "newest_at": newest_at}


@dataclass(frozen=True)
class Selection:
    """The conversations of the selected tool set with their outcomes, and those of other sets.

    ``of_toolset`` are the outcomes without those of conversations that have no tools and call none.
    """

    ids: list[str]
    outcomes: Counter[Outcome]
    of_toolset: Counter[Outcome]
    other_toolsets: list[OtherToolset] = field(default_factory=list)

    @property
    def is_enough(self) -> bool:
        """Whether a contrast of the successes and the failures can show something."""
        return suffice(self.outcomes)


def suffice(outcomes: Mapping[Outcome, int]) -> bool:
    """Return whether there are ``MIN_OUTCOMES`` successes and as many failures."""
    return min(outcomes.get(Outcome.SUCCESS, 0), outcomes.get(Outcome.FAILURE, 0)) >= MIN_OUTCOMES


def toolset_of(tools: Iterable[Tool]) -> Toolset:
    """Return the names and parameters of a list of tools."""
    schemas = {}
    for tool in tools:
        function = tool_function(tool)
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        names = frozenset(properties) if isinstance(properties, dict) else frozenset()
        text = json.dumps(_without_texts(parameters or {}), sort_keys=True)
        schemas[str(function.get("name", ""))] = Schema(text, names, bool(tool.get(INFERRED)))
    return schemas


def called_tools(trajectory: Trajectory) -> frozenset[str]:
    """Return the names of the tools that a conversation calls."""
    calls = (call for message in trajectory.messages for call in message.get("tool_calls") or [])
    return frozenset(str(tool_function(call).get("name", "")) for call in calls if isinstance(call, dict))


def fits(tools: Toolset, latest: Toolset) -> bool:
    """Return whether conversations with these tools can be analysed as some with the latest ones."""
    shared = tools.keys() & latest.keys()
    if not all(tools[name].agrees(latest[name]) for name in shared):
        return False
    is_inferred = any(schema.is_inferred for schema in latest.values())
    return tools.keys() <= latest.keys() or (is_inferred and bool(shared))


def select_toolset(
    conversations: Sequence[JudgedRow],
    lists: Mapping[str, Sequence[Tool]],
    calls: Mapping[str, frozenset[str]] = NO_CALLS,
) -> Selection:
    """Select the conversations of the latest tool set with enough successes and failures.

    If none has enough, the selection is that of the set with most. A set with a small part of the conversations of the
    largest one (``SHARE_OF_LARGEST``) has to wait for more, however new it is.

    Args:
        conversations: All that a cycle may use.
        lists: The lists of tools by hash.
        calls: The names of the tools that conversations without a list call, by the id of the conversation.
    """
    toolsets = {key: toolset_of(lists[key]) for key in {row.toolset_hash for row in conversations}}
    times: defaultdict[str, list[datetime]] = defaultdict(list)
    for row in conversations:
        times[row.toolset_hash].append(row.started_at or EARLIEST)
    heads = [key for key, tools in toolsets.items() if tools]
    heads.sort(key=lambda key: (max(times[key]), len(times[key]), key), reverse=True)
    if not heads:
        outcomes = Counter(row.outcome for row in conversations)
        return Selection([row.id for row in conversations], outcomes, outcomes)
    # Many sets differ by customer or state: the most frequent lists are candidates, and the latest ones.
    frequent = sorted(heads, key=lambda key: (-len(times[key]), key))[:MAX_SETS]
    candidates = [head for place, head in enumerate(heads) if place < MAX_SETS or head in frequent]
    selections = [_selection(conversations, toolsets, calls, toolsets[head]) for head in candidates]
    largest = max(selections, key=lambda selection: selection.of_toolset.total())
    threshold = SHARE_OF_LARGEST * largest.of_toolset.total()
    latest = (s for s in selections if suffice(s.of_toolset) and s.of_toolset.total() >= threshold)
    return next(latest, largest)


def with_declared_tools(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return conversations of one tool set, those with inferred tools or none with the latest declared ones.

    Where no conversation has a list of tools, all get one that is inferred from the calls, and is marked so.
    """
    declared = [row for row in trajectories if row.tools and not _is_inferred(row.tools)]
    if not any(row.tools for row in trajectories):
        inference = ToolInference()
        for row in trajectories:
            inference.observe(row.messages)
        tools = inference.tools()
        return [replace(row, tools=tools) for row in trajectories]
    if not declared:
        return list(trajectories)
    latest = max(declared, key=lambda row: (row.started_at or EARLIEST, row.id)).tools
    return [row if row.tools and not _is_inferred(row.tools) else replace(row, tools=latest) for row in trajectories]


def _selection(
    conversations: Sequence[JudgedRow],
    toolsets: Mapping[str, Toolset],
    calls: Mapping[str, frozenset[str]],
    latest: Toolset,
) -> Selection:
    fitting = {key for key, tools in toolsets.items() if fits(tools, latest)}
    members: list[JudgedRow] = []
    times_by_tools: defaultdict[tuple[str, ...], list[datetime]] = defaultdict(list)
    for row in conversations:
        foreign_calls = calls.get(row.id, frozenset()) - latest.keys()
        if row.toolset_hash in fitting and not foreign_calls:
            members.append(row)
        else:
            tools = toolsets[row.toolset_hash]
            changed = {name for name in tools if name not in latest or not tools[name].agrees(latest[name])}
            times_by_tools[tuple(sorted(changed | foreign_calls))].append(row.started_at or EARLIEST)
    left_out = [
        OtherToolset(names, len(times), newest_at if (newest_at := max(times)) > EARLIEST else None)
        for names, times in sorted(times_by_tools.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    of_toolset = Counter(row.outcome for row in members if toolsets[row.toolset_hash] or calls.get(row.id))
    return Selection([row.id for row in members], Counter(row.outcome for row in members), of_toolset, left_out)


def _is_inferred(tools: Sequence[Tool]) -> bool:
    return any(tool.get(INFERRED) for tool in tools)


def _without_texts(schema: object, *, is_properties: bool = False) -> object:
    if isinstance(schema, list):
        return [_without_texts(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # A parameter may be called "description".
    items = schema if is_properties else {key: value for key, value in schema.items() if key not in TEXT_KEYS}
    return {
        key: _without_texts(value, is_properties=key == "properties" and not is_properties)
        for key, value in items.items()
    }
