"""Values of calls and answers: texts, paths, and the changes of records by rules.

Standard library only: this file is written verbatim into every world, before ``runtime.py``.
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

MAX_DEPTH = 3
UNKNOWN = object()
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


def copy_of(value: Any) -> Any:
    """Return a copy of data; ``UNKNOWN`` is itself. Raises TypeError or ValueError for what JSON cannot hold."""
    return value if value is UNKNOWN else json.loads(json.dumps(value))


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
