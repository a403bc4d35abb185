"""The runtime of a world: answers tool calls from the record of a target's conversations, and from nothing else.

A world is data (``reconstruction.py``) and this runtime. A read is answered by the recorded answer to the same call
after the same writes; else from the recorded answer before any write, changed as those writes change such records. A
write is answered by the recorded answer to the same call, by an error whose condition was learned, or by the record
that results. What the record does not determine is answered by ``NOT_RECORDED``; what such a write may have changed
is not answered either.

Invariants: the same calls since ``restart`` give the same answers, and ``call`` never raises. Standard library only:
this file is written verbatim into every world. Not covered: effects of time, and writes of other clients.
"""

import ast
import hashlib
import json
import operator
import re
from collections.abc import Iterator
from typing import Any

Data = dict[str, Any]
Rule = list[Any]
Path = list[Any]

# The text of an answer and whether it is an error; None: not recorded.
Reply = tuple[str, bool] | None
DEFAULT_STYLE = [", ", ": ", True]
MAX_DEPTH = 3
NOT_RECORDED = "[not recorded]"
UNKNOWN = object()
# Effects of a write on the answers of a read tool: none of its fields changes, the write's answer is the new record, or
# the rule of each field.
UNCHANGED, REPLACED_RECORD = "unchanged", "replaced"
_OPERATORS: dict[Any, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_PLACEHOLDER = re.compile(r"\{\{(.*?)\}\}")


def canonical_json(value: Any) -> str:
    """Return JSON that is equal for equal values: sorted keys, 35.0 as 35, texts without outer blanks."""
    return json.dumps(_normalized(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _normalized(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _normalized(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_normalized(part) for part in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value.strip() if isinstance(value, str) else value


def call_key(tool: str, arguments: Data) -> str:
    """Return a short digest of a call."""
    return hashlib.sha256(f"{tool} {canonical_json(arguments)}".encode(errors="surrogatepass")).hexdigest()[:12]


def history_key(writes: list[str]) -> str:
    """Return a short digest of the keys of the writes so far, in any order; "" for none."""
    return hashlib.sha256(" ".join(sorted(writes)).encode()).hexdigest()[:12] if writes else ""


def scalars(value: Any) -> set[str]:
    """Return every text and number of nested data as text, keys of objects included."""
    if isinstance(value, dict):
        return {str(key) for key in value}.union(*(scalars(part) for part in value.values()))
    if isinstance(value, list):
        return set().union(*(scalars(part) for part in value))
    return set() if value is None or isinstance(value, bool) else {str(_normalized(value))}


def argument_values(arguments: Data) -> set[str]:
    """Return the texts and numbers of a call's arguments, without their names."""
    return set().union(*(scalars(part) for part in arguments.values()))


def is_linked(arguments: Data, write_values: set[str]) -> bool:
    """Return whether a write names everything that a read asks for, so that it may change the read's answer."""
    values = argument_values(arguments)
    return bool(values) and values <= write_values


def at_path(value: Any, path: Path) -> Any:
    """Return the part of nested data at a path of keys and positions, ``UNKNOWN`` if there is none."""
    for step in path:
        if (isinstance(value, dict) and step in value) or (
            isinstance(value, list) and isinstance(step, int) and -len(value) <= step < len(value)
        ):
            value = value[step]
        else:
            return UNKNOWN
    return value


def parts(value: Any, prefix: Path) -> Iterator[Path]:
    """Yield the paths of the parts of nested data, at most three levels deep; of a list the first and last entry."""
    if prefix:
        yield prefix
    if len(prefix) >= MAX_DEPTH:
        return
    if isinstance(value, dict):
        for key in value:
            yield from parts(value[key], [*prefix, key])
    elif isinstance(value, list) and value:
        yield from parts(value[0], [*prefix, 0])
        if len(value) > 1:
            yield from parts(value[-1], [*prefix, -1])


def is_number(value: Any) -> bool:
    """Return whether this is a number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def rule_value(rule: Rule, old: Any, arguments: Data, answer: Any) -> Any:
    """Return a field's value after a write by its rule, ``UNKNOWN`` if the rule does not determine it.

    Args:
        rule: ["same"], ["constant", value], ["argument", path], ["answer", path], ["append", source, path],
            ["extend", source, path], ["remove", source, path], ["add", path], ["subtract", path] or ["reverse"], which
            appends a list's own entries with negated numbers unless they are there; a source is "argument" or "answer".
        old: The field's value before the write, ``UNKNOWN`` if the record had no such field.
    """
    kind = rule[0]
    if kind == "same":
        return old
    if kind == "constant":
        return rule[1]
    if kind in ("argument", "answer"):
        return at_path(arguments if kind == "argument" else answer, rule[1])
    if kind in ("add", "subtract"):
        amount = at_path(arguments, rule[1])
        if not (is_number(old) and is_number(amount)):
            return UNKNOWN
        return old + amount if kind == "add" else old - amount
    if kind == "reverse":
        if not isinstance(old, list) or (old and all(entry in old for entry in _negated(old))):
            return UNKNOWN
        return [*old, *_negated(old)]
    part = at_path(arguments if rule[1] == "argument" else answer, rule[2])
    if part is UNKNOWN or not isinstance(old, list):
        return UNKNOWN
    if kind == "append":
        return [*old, part]
    if kind == "extend":
        return [*old, *part] if isinstance(part, list) else UNKNOWN
    return [entry for entry in old if entry != part] if part in old else UNKNOWN


def _negated(value: Any) -> Any:
    """Return nested data with negated numbers, as a booking is reversed by."""
    if isinstance(value, dict):
        return {key: _negated(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_negated(part) for part in value]
    return -value if is_number(value) else value


def changed_record(rules: list[Any], record: Any, arguments: Data, answer: Any) -> Any:
    """Return a record after a write by the rules of its fields, ``UNKNOWN`` if a field is not determined.

    Args:
        rules: [path, rule] of each field that some write changed; the other fields stay.
    """
    changed = json.loads(json.dumps(record))
    for path, rule in rules:
        parent = at_path(changed, path[:-1])
        if not isinstance(parent, dict) or rule is None:
            return UNKNOWN
        value = rule_value(rule, at_path(record, path), arguments, answer)
        if value is UNKNOWN:
            return UNKNOWN
        parent[path[-1]] = value
    return changed


def skeletons(value: Any) -> list[str]:
    """Return the patterns of an argument that an error may depend on: itself, its digits masked, its punctuation."""
    text = str(_normalized(value))
    return [f"={text}", "#" + re.sub(r"\d+", "0", text), "." + re.sub(r"\w+", "w", text)]


def fill(template: str, arguments: Data) -> str | None:
    """Return a template with its argument paths replaced; None if the call lacks such an argument.

    Braces around anything but a path are text.
    """
    values = {
        match: at_path(arguments, json.loads(match)) for match in _PLACEHOLDER.findall(template) if _is_path(match)
    }
    if any(value is UNKNOWN for value in values.values()):
        return None
    return _PLACEHOLDER.sub(lambda match: str(values[match[1]]) if match[1] in values else match[0], template)


def _is_path(text: str) -> bool:
    try:
        return isinstance(json.loads(text), list)
    except ValueError:
        return False


def as_text(value: Any, style: list[Any]) -> str:
    """Return a value as its tool writes it; ``style``: the separators, and whether other letters than ASCII escape."""
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(style[0], style[1]), ensure_ascii=bool(style[2]))


def computed(form: str, arguments: Data) -> str | None:
    """Return the value of the only argument, an arithmetic expression, as text; None if it is none.

    Args:
        form: "float": always with a decimal point; "number": without one if it is whole. Both have two decimals.
    """
    if len(arguments) != 1:
        return None
    try:
        value = _arithmetic(ast.parse(str(*arguments.values()).strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None
    value = round(float(value), 2)
    return str(int(value)) if form == "number" and value.is_integer() else str(value)


def _arithmetic(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _arithmetic(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return float(_OPERATORS[type(node.op)](_arithmetic(node.left), _arithmetic(node.right)))
    raise ValueError("no arithmetic expression")


class World:
    """The state of a target since ``restart``, by the data of its reconstruction."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.restart()

    def restart(self) -> None:
        """Forget every write."""
        self.writes: list[Data] = []

    def call(self, tool: str, arguments: Data) -> str:
        """Return the tool's answer, ``NOT_RECORDED`` if the record does not determine it."""
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
        entries = self.data["calls"][tool].get(canonical_json(arguments), [])
        relevant = self.relevant(tool, arguments)
        if any(write["answer"] is UNKNOWN for write in relevant):
            return None
        history = history_key([write["key"] for write in relevant])
        for entry_history, text, failed in entries:
            if entry_history == history:
                return str(text), bool(failed)
        value = self._value(tool, arguments, relevant)
        if value is not UNKNOWN:
            return self._as_text(tool, value), False
        return None if relevant else self._inferred(tool, arguments)

    def _as_text(self, tool: str, value: Any) -> str:
        return as_text(value, self.data["styles"].get(tool, DEFAULT_STYLE))

    def _value(self, tool: str, arguments: Data, relevant: list[Data]) -> Any:
        """Return a read's answer as data, after the writes since the start."""
        entries = self.data["calls"][tool].get(canonical_json(arguments), [])
        base = next((text for history, text, _ in entries if not history), None)
        value = self._derived(tool, arguments) if base is None else parsed(base)
        return self._changed(tool, value, relevant)

    def _changed(self, tool: str, value: Any, writes: list[Data]) -> Any:
        """Return a read's answer as data after writes that may have changed it, ``UNKNOWN`` if not determined."""
        for write in writes:
            effect = self.data["effects"].get(write["tool"], {}).get(tool)
            if write["answer"] is UNKNOWN:
                return UNKNOWN
            if effect == REPLACED_RECORD:
                value = write["answer"] if isinstance(write["answer"], dict) else UNKNOWN
            elif isinstance(effect, list) and isinstance(value, dict):
                value = changed_record(effect, value, write["arguments"], write["answer"])
            else:
                return UNKNOWN
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
        value = self._changed(tool, parsed(text), writes)
        return None if value is UNKNOWN else self._as_text(tool, value)

    def relevant(self, tool: str, arguments: Data) -> list[Data]:
        """Return the writes so far that may have changed a read's answer."""
        writes = []
        for write in self.writes:
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
                self.append(tool, arguments, parsed(text))
            return str(text), bool(failed)
        error = self._error(tool, arguments)
        if error is not None:
            return error, True
        answer = self._answer(tool, arguments) if self.data["writes"][tool]["is_safe"] else UNKNOWN
        self.append(tool, arguments, answer)
        return None if answer is UNKNOWN else (self._as_text(tool, answer), False)

    def record(self, tool: str, arguments: Data, text: str) -> None:
        """Add a write that succeeded with this answer."""
        self.append(tool, arguments, parsed(text))

    def append(self, tool: str, arguments: Data, answer: Any) -> None:
        """Add a write to the state; ``answer`` is ``UNKNOWN`` if it may have failed."""
        values = argument_values(arguments) | (set() if answer is UNKNOWN else scalars(answer))
        key = call_key(tool, arguments)
        self.writes.append({"tool": tool, "key": key, "arguments": arguments, "answer": answer, "values": values})

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
        relevant = self.relevant(link["tool"], read_arguments)
        if any(write["answer"] is UNKNOWN for write in relevant):
            return UNKNOWN
        return self._value(link["tool"], read_arguments, relevant)


def _link_arguments(link: Data, arguments: Data) -> Data | None:
    """Return the arguments of the read of what a write names, None if the write lacks one of them."""
    read_arguments = {name: at_path(arguments, path) for name, path in link["paths"].items()}
    return None if any(value is UNKNOWN for value in read_arguments.values()) else read_arguments


def parsed(text: str) -> Any:
    """Return the JSON value of a text, or the text if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def is_alike(field: Any, argument: Any) -> bool:
    """Return whether a field has the value of an argument, whatever the case."""
    if field is UNKNOWN or isinstance(field, dict | list):
        return False
    return str(_normalized(field)).casefold() == str(_normalized(argument)).casefold()
