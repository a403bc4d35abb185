"""Reconstructs a world from a target's conversations: what its tools answered, and how writes change that.

Only messages are read. The world is a single file of the standard library that implements the environment contract: it
answers tool calls from a fresh state after each reset. The same conversations give the same bytes.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from agents.tool_schemas import merged_tools
from agents.transcript import Transcript
from agents.world.calls import AnsweredCall, Conversation, conversations
from agents.world.errors import ConditionedCall, error_rules
from agents.world.functions import FUNCTIONS, functions_source, runtime_source
from agents.world.runtime import UNCHANGED, World
from agents.world.templates import common_template
from agents.world.tool_roles import write_tools
from agents.world.transitions import Observations, effect_of, field_rules, observe
from agents.world.values import (
    UNKNOWN,
    as_text,
    at_path,
    canonical_json,
    computed,
    history_key,
    is_alike,
    parsed,
    parts,
)

# A write without a record of the same call is predicted if at most this share of its calls failed for no known reason.
MAX_UNEXPLAINED = 0.1
# Different calls that a constant or a template has to cover.
MINIMUM_CALLS = 3
# Records of other tools that have to equal the tool's own before more are taken from there.
MINIMUM_EQUAL = 2
# Share of the reads of several tasks that have to get equal answers.
MINIMUM_STABLE = 0.9
_PROSE_WORDS = 4
# From this share of a write's calls on, values that a read has as an argument link the two tools.
LINKED_SHARE = 0.5
_STYLES = [[", ", ": ", True], [",", ":", False], [", ", ": ", False], [",", ":", True]]

Data = dict[str, Any]


def world_data(transcripts: Sequence[Transcript], tasks: Sequence[str], unstable: Collection[str] = ()) -> Data:
    """Return the data of a world (``runtime.World``) from conversations, each with the name of its task.

    Args:
        unstable: Reads that are no look-ups, beside those that these conversations show to be none.
    """
    recorded_conversations = conversations(transcripts, tasks)
    calls: dict[str, list[AnsweredCall]] = defaultdict(list)
    for conversation in recorded_conversations:
        for call in conversation.calls:
            calls[call.tool].append(call)
    writes = write_tools(recorded_conversations)
    reads = set(calls) - writes
    observations = observe(recorded_conversations, writes)
    wide: dict[str, list[str]] = defaultdict(list)
    for write_tool, read_tool in sorted(observations.wide):
        wide[write_tool].append(read_tool)
    data: Data = {
        "tools": merged_tools(transcripts),
        "writes": {tool: {} for tool in sorted(writes)},
        "effects": _effects(writes, reads, observations),
        "wide": dict(wide),
        "styles": {tool: style for tool in sorted(calls) if (style := _style(calls[tool]))},
    }
    data["links"] = _links(writes, reads, calls)
    data["unstable"] = sorted(unstable)
    data["calls"] = _histories(recorded_conversations, data)
    data["derived"], data["indexes"] = _derived(data, reads), _indexes(data, reads)
    data["errors"], unexplained = {}, {}
    for tool, tool_calls in sorted(_conditioned(recorded_conversations, data).items()):
        rules, unexplained[tool] = error_rules(tool_calls)
        if rules:
            data["errors"][tool] = rules
    for tool in sorted(writes):
        data["writes"][tool] = {
            "is_safe": unexplained[tool] <= MAX_UNEXPLAINED,
            "template": _template([call for call in calls[tool] if not call.failed]),
            "record": _record(tool, observations, calls),
        }
    data["constants"] = {
        tool: texts.pop()
        for tool in sorted(reads)
        if _is_prose(calls[tool]) and len(texts := {call.text for call in calls[tool]}) == 1
    }
    data["computed"] = {tool: form for tool in sorted(reads) if (form := _computed(calls[tool]))}
    return data


def _effects(writes: set[str], reads: set[str], observations: Observations) -> Data:
    effects: Data = {}
    for write in sorted(writes):
        pairs = {tool: effect_of((write, tool), observations) for tool in sorted(reads)}
        effects[write] = {tool: effect for tool, effect in pairs.items() if effect is not None}
    return effects


def _histories(recorded_conversations: Sequence[Conversation], data: Data) -> Data:
    """Return tool -> arguments -> [history, answer, failed] of every recorded call.

    The history of a call is that of the writes that may have changed its answer. Where tasks disagree about an answer,
    that of most of them counts, and none if there is no majority. A read whose tasks mostly disagree is no look-up: it
    depends on the time or on the session, and has no answers.
    """
    tasks: dict[tuple[str, str, str], dict[tuple[str, bool], set[str]]] = defaultdict(lambda: defaultdict(set))
    for conversation in recorded_conversations:
        world = World(data)
        for call in conversation.calls:
            is_write = call.tool in data["writes"]
            relevant = (world.relevant_to_write if is_write else world.relevant)(call.tool, call.arguments)
            history = history_key([write["key"] for write in relevant])
            tasks[call.tool, call.key, history][call.text, call.failed].add(conversation.task)
            if is_write and not call.failed:
                world.append(call.tool, call.arguments, call.value)
    data["unstable"] = sorted({*data["unstable"], *_unstable(tasks, data)})
    calls: Data = {}
    for (tool, key, history), answers in sorted(tasks.items()):
        tool_calls = calls.setdefault(tool, {})
        (text, failed), supporters = max(answers.items(), key=lambda item: (len(item[1]), item[0]))
        if tool not in data["unstable"] and 2 * len(supporters) > sum(map(len, answers.values())):
            tool_calls.setdefault(key, []).append([history, text, failed])
    return calls


def _unstable(tasks: dict[tuple[str, str, str], dict[tuple[str, bool], set[str]]], data: Data) -> set[str]:
    """Return the reads to which several tasks got different answers, in too large a share of equal calls."""
    counts: dict[str, Counter[bool]] = defaultdict(Counter)
    for (tool, _, history), answers in tasks.items():
        if not history and tool not in data["writes"] and len(set().union(*answers.values())) > 1:
            counts[tool][len(answers) == 1] += 1
    return {tool for tool, count in counts.items() if count[True] < MINIMUM_STABLE * count.total()}


def _conditioned(recorded_conversations: Sequence[Conversation], data: Data) -> dict[str, list[ConditionedCall]]:
    """Return the calls of every tool, each with its conditions in the state that the world has then."""
    calls: dict[str, list[ConditionedCall]] = defaultdict(list)
    for conversation in recorded_conversations:
        world = World(data)
        for call in conversation.calls:
            calls[call.tool].append(ConditionedCall(call, world.conditions(call.tool, call.arguments)))
            if call.tool in data["writes"] and not call.failed:
                world.append(call.tool, call.arguments, call.value)
    return calls


def _links(writes: set[str], reads: set[str], calls: dict[str, list[AnsweredCall]]) -> Data:
    """Return for each write the reads whose arguments it names, with the paths of them among its own arguments."""
    links: Data = {}
    for write in sorted(writes):
        for read_tool in sorted(reads):
            names = {name for call in calls[read_tool] for name in call.arguments}
            paths = {name: _link_path(name, calls[write], calls[read_tool]) for name in sorted(names)}
            if paths and all(paths.values()):
                links.setdefault(write, []).append({"tool": read_tool, "paths": paths})
    return links


def _link_path(name: str, writes: Sequence[AnsweredCall], reads: Sequence[AnsweredCall]) -> list[Any] | None:
    """Return the path in a write's arguments whose values are mostly those that reads have as ``name``."""
    values = {canonical_json(call.arguments[name]) for call in reads if name in call.arguments}
    counts: Counter[str] = Counter()
    for call in writes:
        paths = parts(call.arguments, [])
        counts.update(canonical_json(path) for path in paths if _key_or_none(at_path(call.arguments, path)) in values)
    path, count = max(counts.items(), key=lambda item: (item[1], item[0]), default=("", 0))
    return json.loads(path) if count > LINKED_SHARE * len(writes) else None


def _style(calls: Sequence[AnsweredCall]) -> list[Any] | None:
    """Return how a tool writes JSON, None if its texts cannot be reproduced."""
    values = [call for call in calls if isinstance(call.value, dict | list)]
    counts = [sum(as_text(call.value, style) == call.text for call in values) for style in _STYLES]
    best = max(range(len(_STYLES)), key=lambda position: counts[position])
    return _STYLES[best] if values and counts[best] else None


def _template(calls: Sequence[AnsweredCall]) -> str | None:
    if len({call.key for call in calls}) < MINIMUM_CALLS:
        return None
    return common_template(calls)


def _is_prose(calls: Sequence[AnsweredCall]) -> bool:
    """Return whether the tool takes texts only, mostly of several words: what it answers is about no record."""
    values = [value for call in calls for value in call.arguments.values()]
    if len({call.key for call in calls}) < MINIMUM_CALLS or not all(isinstance(value, str) for value in values):
        return False
    return 2 * sum(len(value.split()) >= _PROSE_WORDS for value in values) > len(values)


def _computed(calls: Sequence[AnsweredCall]) -> str | None:
    """Return the form in which a tool answers with the value of its argument, None if it does not."""
    results = [call for call in calls if not call.failed]
    if len({call.key for call in results}) < MINIMUM_CALLS:
        return None
    forms = ("float", "number")
    return next((f for f in forms if all(computed(f, call.arguments) == call.text for call in results)), None)


def _record(write: str, observations: Observations, calls: dict[str, list[AnsweredCall]]) -> Data | None:
    """Return the read whose record the write answers with, the paths of the read's arguments, and the fields' rules."""
    reads = [tool for write_tool, tool in observations.answers if write_tool == write]
    for tool in sorted(reads, key=lambda name: (-len(observations.answers[write, name]), name)):
        observed = observations.answers[write, tool]
        rules = field_rules(observed)
        names = {name for call in calls[tool] for name in call.arguments}
        keys = [{name: call.arguments.get(name) for name in names} for call in calls[tool]]
        paths = {name: path for name in sorted(names) if (path := _argument_path(name, observed, keys))}
        if rules is not None and set(paths) == names:
            return {"tool": tool, "paths": paths, "rules": rules}
    return None


def _argument_path(name: str, observed: Sequence[Any], keys: Sequence[Data]) -> list[Any] | None:
    """Return the path in the write's arguments of what the read calls ``name``: always a value the record has."""
    values = {canonical_json(key[name]) for key in keys}
    for path in parts(observed[0].write.arguments, []):
        if all(
            _key_or_none(at_path(observation.write.arguments, path)) in values & _leaf_keys(observation.new)
            for observation in observed
        ):
            return path
    return None


def _key_or_none(value: Any) -> str | None:
    return None if value is UNKNOWN else canonical_json(value)


def _leaf_keys(value: Any) -> set[str]:
    return {canonical_json(leaf) for leaf in _leaves(value)}


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for part in value.values():
            yield from _leaves(part)
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _base_records(data: Data, tool: str) -> dict[str, Any]:
    """Return the answers of a read before any write, by arguments; only those that succeeded."""
    records = {}
    for key, entries in data["calls"].get(tool, {}).items():
        for history, text, failed in entries:
            if not history and not failed:
                records[key] = parsed(text)
    return records


def _derived(data: Data, reads: set[str]) -> Data:
    """Return records of a look-up by one key that only answers of other tools show, where those equal its own."""
    derived: Data = {}
    for tool in sorted(reads):
        records = _base_records(data, tool)
        field = _key_field(records)
        if field is None:
            continue
        (name,) = json.loads(next(iter(records)))
        fields = set.intersection(*(set(record) for record in records.values()))
        for source in sorted(reads - {tool}):
            parts_by_key: dict[str, Any] = {}
            for answer in _base_records(data, source).values():
                for record in _objects(answer):
                    if fields <= set(record) and not isinstance(record[field], dict | list):
                        parts_by_key.setdefault(canonical_json({name: record[field]}), record)
            common = [key for key in parts_by_key if key in records]
            if len(common) >= MINIMUM_EQUAL and all(parts_by_key[key] == records[key] for key in common):
                derived.setdefault(tool, {}).update(
                    {key: record for key, record in parts_by_key.items() if key not in records}
                )
    return derived


def _key_field(records: dict[str, Any]) -> str | None:
    """Return the field of all records that equals the only argument of their look-up."""
    candidates: set[str] | None = None
    for key, record in records.items():
        values = list(json.loads(key).values())
        if len(values) != 1 or not isinstance(record, dict):
            return None
        fields = {
            field
            for field, value in record.items()
            if value is not None and canonical_json(value) == canonical_json(values[0])
        }
        candidates = fields if candidates is None else candidates & fields
    return min(candidates) if candidates else None


def _objects(value: Any) -> Iterator[Data]:
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(part)


def _indexes(data: Data, reads: set[str]) -> Data:
    """Return the reads that answer with the key of the record whose fields their arguments name."""
    indexes: Data = {}
    for tool in sorted(reads):
        answers = {key: value for key, value in _base_records(data, tool).items() if not isinstance(value, dict | list)}
        if len(answers) < MINIMUM_EQUAL or len(answers) < len(_base_records(data, tool)):
            continue
        for other in sorted(reads - {tool}):
            paths = _index_paths(answers, _base_records(data, other))
            if paths:
                indexes[tool] = {"tool": other, "paths": paths}
                break
    return indexes


def _index_paths(answers: dict[str, Any], records: dict[str, Any]) -> dict[str, list[Any]] | None:
    by_key = {canonical_json(value): record for key, record in records.items() for value in json.loads(key).values()}
    if any(len(json.loads(key)) != 1 for key in records):
        return None
    keys = {key: canonical_json(value) for key, value in answers.items()}
    pairs = [(json.loads(key), by_key[record_key]) for key, record_key in keys.items() if record_key in by_key]
    if len(pairs) < MINIMUM_EQUAL:
        return None
    paths: dict[str, list[Any]] = {}
    for name in pairs[0][0]:
        fitting = [
            path
            for path in parts(pairs[0][1], [])
            if all(is_alike(at_path(record, path), arguments.get(name)) for arguments, record in pairs)
        ]
        if not fitting:
            return None
        paths[name] = fitting[0]
    return paths


def without_tools(data: Data, tools: Collection[str]) -> Data:
    """Return a world that does not answer these tools, nor what rests on their records; its key ``omitted`` names them.

    The functions of these tools are not used either. A call of an omitted write may have changed something, as any
    write whose answer is not recorded.
    """
    omitted = {*tools, *data.get("omitted", [])}
    function_tools = [tool for tool in data.get("functions", []) if tool not in tools]
    reduced = {**data, "omitted": sorted(omitted), "functions": function_tools}
    for part in ("indexes", "errors", "constants", "computed"):
        reduced[part] = {tool: entry for tool, entry in data[part].items() if tool not in omitted}
    reduced["calls"] = {tool: {} if tool in omitted else entries for tool, entries in data["calls"].items()}
    # Records that only an omitted tool's answers show are no longer known.
    reduced["derived"] = _derived(reduced, set(data["calls"]) - set(data["writes"]))
    # A write that answers with an omitted read's record, or changes it, would otherwise determine that record.
    reduced["effects"] = {
        write: {tool: None if tool in omitted and effect != UNCHANGED else effect for tool, effect in effects.items()}
        for write, effects in data["effects"].items()
    }
    unknown = {"is_safe": False, "template": None, "record": None}
    reduced["writes"] = {tool: unknown if tool in omitted else entry for tool, entry in data["writes"].items()}
    return reduced


def with_functions(data: Data, tools: Collection[str], roles: Mapping[str, bool]) -> Data:
    """Return a world that also answers by the functions of these tools, which a model wrote; omitted ones as well.

    Args:
        roles: Tool -> whether it writes, in the place of what was inferred.
    """
    writes = {tool: entry for tool, entry in data["writes"].items() if roles.get(tool, True)}
    unknown = {"is_safe": False, "template": None, "record": None}
    writes |= {tool: unknown for tool, is_write in sorted(roles.items()) if is_write and tool not in writes}
    omitted = [tool for tool in data.get("omitted", []) if tool not in tools]
    return {**data, "writes": writes, "omitted": omitted, "functions": sorted(tools)}


def world_source(data: Data, module: str = "") -> str:
    """Return the text of ``world.py``: the data as JSON, the runtime, and an environment that answers calls.

    Args:
        module: The functions of the tools in the data's ``functions`` (``functions.py``).
    """
    rows = ",\n".join(f"{json.dumps(key)}: {_rows(value)}" for key, value in data.items())
    # Three single quotes would end the string literal that holds the JSON.
    text = ("{\n" + rows + "\n}").replace("'", "\\u0027")
    return (
        '"""A world: what a target\'s tools answered in its conversations.\n\nThe data comes'
        ' first, then the runtime that every world shares.\n"""\n\nimport json\n\n'
        f"DATA = json.loads(r'''\n{text}\n''')\n\n\n"
        f"# --- runtime ---\n{runtime_source()}\n\n"
        + (f"# --- functions that a model wrote ---\n{functions_source(module)}\n\n" if module else "")
        + f"# --- environment ---\n{_ENVIRONMENT.replace('FUNCTIONS', f', {FUNCTIONS}' if module else '')}"
    )


def read_data(source_code: str) -> Data:
    """Return the data of a world from its source, which ``world_source`` wrote, without running it."""
    text = source_code.partition("DATA = json.loads(r'''\n")[2].partition("\n''')\n")[0]
    data: Data = json.loads(text)
    return data


def _rows(value: Any) -> str:
    """Return JSON with a line for each entry, so that worlds can be read and compared."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(part)}" for key, part in value.items()) + "\n}"


_ENVIRONMENT = '''
from sandbox.contract import Message, Score, Task


class Environment:
    """Answers tool calls by the world; it has no user, and nothing to win."""

    def reset(self, seed: int) -> Task:
        """Begin from a fresh state; every seed is the same."""
        self.world = World(DATAFUNCTIONS)
        return Task("", [{"role": "user", "content": "."}], DATA["tools"])

    def step(self, message: Message) -> list[Message]:
        """Answer every tool call; a text is the true answer to the last one, and faults of functions are the reply."""
        if message.get("content"):
            self.world.observe(**json.loads(message["content"]))
            faults, self.world.faults = self.world.faults, []
            return [{"role": "user", "content": fault} for fault in faults]
        answers = []
        for call in message.get("tool_calls") or []:
            arguments = parsed(call["function"]["arguments"])
            text = self.world.call(call["function"]["name"], arguments if isinstance(arguments, dict) else {})
            answers.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return answers

    @property
    def done(self) -> bool:
        """Never."""
        return False

    def score(self) -> Score:
        """Return 0."""
        return Score(0.0, False, {})

    def oracle(self):
        """Yield nothing."""
        return iter(())
'''
