"""The runtime of a world: answers tool calls from the record of a target's conversations, and from nothing else.

A world is data (``reconstruction.py``) and this runtime. A read is answered by the recorded answer to the same call
after the same writes; else from the recorded answer before any write, changed as those writes change such records. A
write is answered by the recorded answer to the same call, by an error whose condition was learned, or by the record
that results. Functions that a model wrote may answer the calls of some tools for which this gives no answer
(``functions.py``). What the record does not determine is answered by ``NOT_RECORDED``; what such a write may have
changed is not answered either.

Invariants: the same calls since ``restart`` give the same answers, and ``call`` never raises. Standard library only:
this file is written verbatim into every world. Not covered: effects of time, and writes of other clients.
"""

import json
from collections.abc import Callable
from typing import Any

from agents.world.values import (
    UNKNOWN,
    Data,
    argument_values,
    as_text,
    at_path,
    call_key,
    canonical_json,
    changed_record,
    computed,
    copy_of,
    fill,
    history_key,
    is_alike,
    is_linked,
    parsed,
    parts,
    scalars,
    skeletons,
)

# The text of an answer and whether it is an error; None: not recorded.
Reply = tuple[str, bool] | None
# Of a read after a write of a tool with a function: (tool, arguments as canonical JSON or None for all, answer).
Change = tuple[str, str | None, Any]
# Functions of tools, by name, each of a call's arguments and a view of the world.
Functions = dict[str, Callable[[Data, "View"], Any]]
DEFAULT_STYLE = [", ", ": ", True]
# Functions that run at once, each asked for by another one.
MAX_CALLS = 8
NOT_RECORDED = "[not recorded]"
# Effects of a write on the answers of a read tool: none of its fields changes, the write's answer is the new record, or
# the rule of each field.
UNCHANGED, REPLACED_RECORD = "unchanged", "replaced"


class NotRecorded(Exception):
    """A function raises this where the answer does not follow from what the world knows."""


class ToolError(Exception):
    """A function raises this where the tool refuses the call; ``answer`` is its error, as text or data."""

    def __init__(self, answer: Any) -> None:
        super().__init__(answer)
        self.answer = answer


class View:
    """What the function of a tool sees of the world during one call, and what its call changes."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.changes: list[Change] = []

    def get(self, tool: str, arguments: Data) -> Any:
        """Return what a read answers now, as data; raise ``NotRecorded`` if that is not known.

        An answer that is an error is raised as ``ToolError``.
        """
        reply = None if tool in self._world.data["writes"] else self._world.reply(tool, arguments)
        if reply is None:
            raise NotRecorded(tool)
        if reply[1]:
            raise ToolError(parsed(reply[0]))
        return parsed(reply[0])

    def records(self, tool: str) -> list[tuple[Data, Any]]:
        """Return (arguments, answer) of each read of a tool whose answer is recorded or was seen, as it is now."""
        return self._world.current_records(tool)

    def writes(self, *tools: str) -> list[tuple[str, Data, Any]]:
        """Return (tool, arguments, answer) of the successful writes so far, of these tools if any are named.

        ``NotRecorded`` is raised if the result of one of them is not known.
        """
        writes = [write for write in self._world.writes if not tools or write["tool"] in tools]
        if any(write["answer"] is UNKNOWN for write in writes):
            raise NotRecorded("a write")
        return [(write["tool"], copy_of(write["arguments"]), copy_of(write["answer"])) for write in writes]

    def change(self, tool: str, arguments: Data, answer: Any) -> None:
        """Let a read answer this after the write."""
        self.changes.append((tool, canonical_json(arguments), copy_of(answer)))

    def forget(self, tool: str, arguments: Data | None = None) -> None:
        """Let a read's answer be unknown after the write; of all calls of the tool if no arguments are given."""
        self.changes.append((tool, None if arguments is None else canonical_json(arguments), UNKNOWN))


class World:
    """The state of a target since ``restart``, by the data of its reconstruction and the functions of some tools.

    Args:
        functions: Returns the functions, anew for each restart, so that none keeps a state. Those of the tools in the
            data's ``functions`` are used.
    """

    def __init__(self, data: Data, functions: Callable[[], Functions] = dict) -> None:
        self.data = data
        self._make_functions = functions
        self.restart()

    def restart(self) -> None:
        """Forget every write."""
        self.writes: list[Data] = []
        # (tool, arguments) -> the number of writes before the answer was seen, and the answer.
        self.observed_answers: dict[tuple[str, str], tuple[int, Any]] = {}
        self.faults: list[str] = []
        self._depth = self._last_position = 0
        functions = self._make_functions()
        function_tools = self.data.get("functions", [])
        self._functions = {tool: function for tool, function in functions.items() if tool in function_tools}

    def call(self, tool: str, arguments: Data) -> str:
        """Return the tool's answer, ``NOT_RECORDED`` if the record does not determine it."""
        self._last_position = len(self.writes)
        reply = self.reply(tool, arguments)
        return NOT_RECORDED if reply is None else reply[0]

    def reply(self, tool: str, arguments: Data) -> Reply:
        """Return the tool's answer and whether it is an error, None if the record does not determine it."""
        if tool not in self.data["calls"]:
            return None
        if tool in self.data["writes"]:
            return self._write(tool, arguments)
        return self._read(tool, arguments)

    def _read(self, tool: str, arguments: Data) -> Reply:
        reply = self._recorded_read(tool, arguments)
        if reply is None:
            result = self._run(tool, arguments)
            reply = result and result[0]
        return reply

    def _recorded_read(self, tool: str, arguments: Data) -> Reply:
        """Return a read's answer without the function of its tool."""
        key = canonical_json(arguments)
        relevant = self._since_seen(tool, arguments)
        if any(write["answer"] is UNKNOWN for write in relevant):
            return None
        history = history_key([write["key"] for write in relevant])
        for entry_history, text, failed in self.data["calls"][tool].get(key, []):
            if entry_history == history and (tool, key) not in self.observed_answers:
                return str(text), bool(failed)
        value = self._value(tool, arguments, relevant)
        if value is not UNKNOWN:
            return self._as_text(tool, value), False
        return None if relevant else self._inferred(tool, arguments)

    def _since_seen(self, tool: str, arguments: Data) -> list[Data]:
        """Return the writes that may have changed a read's answer since it was seen, or since the start."""
        position, _ = self.observed_answers.get((tool, canonical_json(arguments)), (0, None))
        return self.relevant(tool, arguments, position)

    def _run(self, tool: str, arguments: Data) -> tuple[tuple[str, bool], list[Change]] | None:
        """Return the reply of a tool's function and the changes that it declares, None if it gives none."""
        function = self._functions.get(tool)
        if function is None or self._depth >= MAX_CALLS:
            return None
        view = View(self)
        self._depth += 1
        try:
            return (self._as_text(tool, function(copy_of(arguments), view)), False), view.changes
        except NotRecorded:
            return None
        except ToolError as error:
            return (self._as_text(tool, error.answer), True), []
        except Exception as error:
            # Whatever a written function raises is a fault of the function: it gives no answer.
            self.faults.append(f"{tool}: {type(error).__name__}: {error}"[:300])
            return None
        finally:
            self._depth -= 1

    def current_records(self, tool: str) -> list[tuple[Data, Any]]:
        """Return (arguments, answer as data) of each read of a tool that is recorded or was seen, as it is now."""
        keys = [*self.data["calls"].get(tool, {}), *(key for name, key in self.observed_answers if name == tool)]
        pairs = []
        for key in sorted(set(keys)):
            arguments = json.loads(key)
            reply = None if tool in self.data["writes"] else self._recorded_read(tool, arguments)
            if reply is not None and not reply[1]:
                pairs.append((arguments, parsed(reply[0])))
        return pairs

    def observe(self, tool: str, arguments: Data, text: str, failed: bool) -> None:
        """Take the true answer to the last call in the place of the world's."""
        if tool not in self.data["writes"]:
            if not failed:
                self.observed_answers[tool, canonical_json(arguments)] = len(self.writes), parsed(text)
            return
        del self.writes[self._last_position :]
        if not failed:
            self.record(tool, arguments, text)

    def _as_text(self, tool: str, value: Any) -> str:
        return as_text(value, self.data["styles"].get(tool, DEFAULT_STYLE))

    def _value(self, tool: str, arguments: Data, relevant: list[Data]) -> Any:
        """Return a read's answer as data, after the writes since the start."""
        key = canonical_json(arguments)
        if (tool, key) in self.observed_answers:
            return self._changed(tool, key, copy_of(self.observed_answers[tool, key][1]), relevant)
        base = next((text for history, text, _ in self.data["calls"][tool].get(key, []) if not history), None)
        value = self._derived(tool, arguments) if base is None else parsed(base)
        return self._changed(tool, key, value, relevant)

    def _changed(self, tool: str, key: str, value: Any, writes: list[Data]) -> Any:
        """Return a read's answer as data after writes that may have changed it, ``UNKNOWN`` if not determined."""
        for write in writes:
            effect = self.data["effects"].get(write["tool"], {}).get(tool)
            if write["answer"] is UNKNOWN:
                return UNKNOWN
            if write["changes"] is not None:
                value = copy_of(_change_of(write, tool, key)[-1])
            elif effect == REPLACED_RECORD:
                value = write["answer"] if isinstance(write["answer"], dict) else UNKNOWN
            elif isinstance(effect, list) and isinstance(value, dict):
                value = changed_record(effect, value, write["arguments"], write["answer"])
            else:
                value = UNKNOWN
        return value

    def after_writes(self, tool: str, arguments: Data, text: str, earlier: list[tuple[str, Data]]) -> str | None:
        """Return what a read answers now, None if the record does not determine it.

        Args:
            text: What it answered after the writes ``earlier``, each a tool and its arguments.
        """
        earlier_keys = [call_key(write_tool, write_arguments) for write_tool, write_arguments in earlier]
        writes = []
        for write in self.relevant(tool, arguments):
            if write["key"] in earlier_keys:
                earlier_keys.remove(write["key"])
            else:
                writes.append(write)
        if not writes:
            return text
        value = self._changed(tool, canonical_json(arguments), parsed(text), writes)
        return None if value is UNKNOWN else self._as_text(tool, value)

    def relevant(self, tool: str, arguments: Data, position: int = 0) -> list[Data]:
        """Return the writes so far that may have changed a read's answer, from a position on."""
        writes = []
        key = canonical_json(arguments)
        for write in self.writes[position:]:
            if write["changes"] is not None:
                writes += [write] if _change_of(write, tool, key) else []
                continue
            effect = self.data["effects"].get(write["tool"], {}).get(tool)
            is_wide = tool in self.data["wide"].get(write["tool"], [])
            if effect != UNCHANGED and (is_wide or is_linked(arguments, write["values"])):
                writes.append(write)
        return writes

    def relevant_to_write(self, tool: str, arguments: Data) -> list[Data]:
        """Return the writes so far that may have changed a write's answer: those of the records that it names."""
        links = self.data["links"].get(tool)
        if not links:
            return self.writes
        relevant: dict[str, Data] = {}
        for link in links:
            read_arguments = _link_arguments(link, arguments)
            for write in self.writes if read_arguments is None else self.relevant(link["tool"], read_arguments):
                relevant.setdefault(write["key"], write)
        return list(relevant.values())

    def _derived(self, tool: str, arguments: Data) -> Any:
        """Return the answer to a read that was never made, from records in the answers of other tools."""
        index = self.data["indexes"].get(tool)
        if index is not None:
            return self._indexed(index, arguments)
        return self.data["derived"].get(tool, {}).get(canonical_json(arguments), UNKNOWN)

    def _indexed(self, index: Data, arguments: Data) -> Any:
        """Return the key of the only record whose fields have the values of the arguments."""
        if set(arguments) != set(index["paths"]):
            return UNKNOWN
        keys = []
        for key, entries in self.data["calls"][index["tool"]].items():
            record = next((parsed(text) for history, text, failed in entries if not history and not failed), UNKNOWN)
            fields = {name: at_path(record, path) for name, path in index["paths"].items()}
            if all(is_alike(fields[name], arguments[name]) for name in fields):
                keys.append(next(iter(json.loads(key).values())))
        return keys[0] if len(keys) == 1 else UNKNOWN

    def _write(self, tool: str, arguments: Data) -> Reply:
        entries = self.data["calls"][tool].get(canonical_json(arguments), [])
        relevant = self.relevant_to_write(tool, arguments)
        history = history_key([write["key"] for write in relevant])
        exact = [(text, failed) for entry_history, text, failed in entries if entry_history == history]
        if any(write["answer"] is UNKNOWN for write in relevant):
            exact = []
        elif not exact and len(entries) > 1 and len({text for _, text, _ in entries}) == 1:
            # The same answer after different writes does not depend on them.
            exact = [(text, failed) for _, text, failed in entries]
        if exact:
            text, failed = exact[0]
            if not failed:
                self.record(tool, arguments, str(text))
            return str(text), bool(failed)
        result = self._run(tool, arguments)
        if result is not None:
            reply, changes = result
            if not reply[1]:
                self.append(tool, arguments, parsed(reply[0]), changes)
            return reply
        error = self._error(tool, arguments)
        if error is not None:
            return error, True
        answer = self._answer(tool, arguments) if self.data["writes"][tool]["is_safe"] else UNKNOWN
        self.append(tool, arguments, answer)
        return None if answer is UNKNOWN else (self._as_text(tool, answer), False)

    def record(self, tool: str, arguments: Data, text: str) -> None:
        """Add a write that succeeded with this answer."""
        result = self._run(tool, arguments)
        # The changes of a function that would have answered otherwise are no evidence.
        is_alike = result is not None and canonical_json(parsed(result[0][0])) == canonical_json(parsed(text))
        self.append(tool, arguments, parsed(text), result[1] if result is not None and is_alike else None)

    def append(self, tool: str, arguments: Data, answer: Any, changes: list[Change] | None = None) -> None:
        """Add a write to the state.

        Args:
            answer: ``UNKNOWN`` if it may have failed.
            changes: All that it changes, None to have that by the learned effects.
        """
        values = argument_values(arguments) | (set() if answer is UNKNOWN else scalars(answer))
        key = call_key(tool, arguments)
        self.writes.append(
            {"tool": tool, "key": key, "arguments": arguments, "answer": answer, "values": values, "changes": changes}
        )

    def _answer(self, tool: str, arguments: Data) -> Any:
        """Return a write's answer as data: its template, or the record that it changes.

        ``UNKNOWN`` if it names a record that is not determined: the target may not have it.
        """
        records = [self._linked_record(link, arguments) for link in self.data["links"].get(tool, [])]
        if not all(isinstance(record, dict | list) for record in records):
            return UNKNOWN
        write = self.data["writes"][tool]
        text = None if write["template"] is None else fill(write["template"], arguments)
        if text is not None:
            return text
        if write["record"] is None:
            return UNKNOWN
        record = self._linked_record(write["record"], arguments)
        if not isinstance(record, dict):
            return UNKNOWN
        return changed_record(write["record"]["rules"], record, arguments, None)

    def _inferred(self, tool: str, arguments: Data) -> Reply:
        """Return the answer to a read without a record: an error of a learned condition, a constant, or a result."""
        error = self._error(tool, arguments)
        if error is not None:
            return error, True
        form = self.data["computed"].get(tool)
        text = self.data["constants"].get(tool) if form is None else computed(form, arguments)
        return None if text is None else (text, False)

    def _error(self, tool: str, arguments: Data) -> str | None:
        rules = self.data["errors"].get(tool)
        if rules:
            conditions = self.conditions(tool, arguments)
            for rule in rules:
                if rule["condition"] in conditions:
                    return fill(rule["template"], arguments)
        return None

    def conditions(self, tool: str, arguments: Data) -> set[str]:
        """Return what an error of this call may depend on: patterns of its arguments, and fields of what it names."""
        conditions: set[str] = set()
        for path in parts(arguments, []):
            value = at_path(arguments, path)
            if value is not None and not isinstance(value, dict | list):
                conditions.update(canonical_json(["argument", path, pattern]) for pattern in skeletons(value))
        for link in self.data["links"].get(tool, []):
            record = self._linked_record(link, arguments)
            for path in parts(record, []) if isinstance(record, dict) else ():
                value = at_path(record, path)
                if not isinstance(value, dict | list):
                    conditions.add(canonical_json([link["tool"], link["paths"], path, value]))
        return conditions

    def _linked_record(self, link: Data, arguments: Data) -> Any:
        """Return the record that a write names, as a read would answer now, ``UNKNOWN`` if that is not determined."""
        read_arguments = _link_arguments(link, arguments)
        if read_arguments is None:
            return UNKNOWN
        relevant = self._since_seen(link["tool"], read_arguments)
        if any(write["answer"] is UNKNOWN for write in relevant):
            return UNKNOWN
        return self._value(link["tool"], read_arguments, relevant)


def _link_arguments(link: Data, arguments: Data) -> Data | None:
    """Return the arguments of the read of what a write names, None if the write lacks one of them."""
    read_arguments = {name: at_path(arguments, path) for name, path in link["paths"].items()}
    return None if any(value is UNKNOWN for value in read_arguments.values()) else read_arguments


def _change_of(write: Data, tool: str, key: str) -> Any:
    """Return the last declared change of a read by a write, () if there is none."""
    changes = [entry for entry in write["changes"] if entry[0] == tool and entry[1] in (None, key)]
    return changes[-1] if changes else ()
