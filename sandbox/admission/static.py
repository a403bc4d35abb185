"""Reading the source without running it: size, imports, and names that reach for the clock, the host or chance.

This is no barrier (the container is); it finds what running cannot show, such as a date that only changes tomorrow,
and says the line. Environments are small programs over records, so a short list of modules suffices.
"""

import ast
from typing import Any

MAX_BYTES = 256 * 1024
MODULES = frozenset(
    {"__future__", "abc", "bisect", "calendar", "collections", "copy", "dataclasses", "datetime", "decimal", "enum"}
    | {"fractions", "functools", "hashlib", "heapq", "itertools", "json", "math", "operator", "random", "re"}
    | {"sandbox.contract", "statistics", "string", "textwrap", "types", "typing", "zlib"}
)
CALLS = frozenset({"eval", "exec", "compile", "open", "input", "breakpoint", "__import__", "globals", "print"})
CLOCKS = frozenset({"now", "utcnow", "today"})  # of datetime and date, where datetime is imported
CHANCE = frozenset({"SystemRandom", "urandom"})
DUNDERS = frozenset({"__subclasses__", "__globals__", "__builtins__", "__code__", "__loader__", "__mro__"})


def inspect_source(source: str) -> tuple[bool, dict[str, Any]]:
    """(passed, evidence): the evidence lists "line N: what" for everything refused."""
    size = len(source.encode())
    if size > MAX_BYTES:
        return False, {"bytes": size, "refused": [f"{size} bytes, more than {MAX_BYTES}"]}
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return False, {"bytes": size, "refused": [f"line {getattr(error, 'lineno', 0)}: does not parse: {error}"]}
    refused = [f"line {getattr(node, 'lineno', 0)}: {what}" for node in ast.walk(tree) for what in _refusals(node)]
    if any(_imports_datetime(node) for node in ast.walk(tree)):
        refused += [
            f"line {line}: reads the clock: {name}()" for node in ast.walk(tree) for line, name in _clocks(node)
        ]
    if not any(isinstance(node, ast.ClassDef) and node.name == "Environment" for node in tree.body):
        refused.append("line 0: defines no class Environment")
    return not refused, {"bytes": size, "refused": refused[:20]}


def _refusals(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [f"imports {alias.name}" for alias in names if not _allowed(alias.name)]
        case ast.ImportFrom(module=module, level=level):
            return [] if level == 0 and _allowed(module or "") else [f"imports from {'.' * level}{module or ''}"]
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            return [f"calls {name}"]
        case ast.Attribute(attr=name) if name in CHANCE | DUNDERS:
            return [f"uses {name}"]
        case ast.Call(func=ast.Attribute(value=ast.Name(id="random"), attr="Random"), args=[]):
            return ["seeds random.Random from nothing"]
    return []


def _imports_datetime(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(alias.name == "datetime" for alias in names)
        case ast.ImportFrom(module="datetime"):
            return True
    return False


def _clocks(node: ast.AST) -> list[tuple[int, str]]:
    match node:
        case ast.Call(func=ast.Attribute(attr=name)) if name in CLOCKS:
            return [(node.lineno, name)]
    return []


def _allowed(module: str) -> bool:
    return module in MODULES or (module.partition(".")[0] in MODULES and not module.startswith("sandbox"))
