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
CALLS = frozenset({"open", "input", "print"})
NAMES = frozenset({"eval", "exec", "compile", "breakpoint", "__import__", "globals", "__builtins__", "__loader__"})
REACHING = frozenset({"getattr", "vars", "dir", "setattr", "delattr"})  # into a module, by name
HOSTS = frozenset({"sys", "os", "builtins"})  # as other modules import them
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
    imported = {name for node in ast.walk(tree) for name in _imported(node)}
    refused += [
        f"line {getattr(node, 'lineno', 0)}: {what}" for node in ast.walk(tree) for what in _reaching(node, imported)
    ]
    if any(_imports_datetime(node) for node in ast.walk(tree)):
        refused += [
            f"line {line}: reads the clock: {name}()"
            for line, name in dict.fromkeys(found for node in ast.walk(tree) for found in _clocks(node, imported))
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
        case ast.Name(id=name, ctx=ast.Load()) if name in NAMES:
            return [f"uses {name}"]
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


def _clocks(node: ast.AST, imported: set[str]) -> list[tuple[int, str]]:
    match node:
        case ast.Call(func=ast.Attribute(attr=name)) if name in CLOCKS:
            return [(node.lineno, name)]
        case ast.Attribute(attr=name) if name in CLOCKS and _root(node) in imported:
            return [(node.lineno, name)]
    return []


def _imported(node: ast.AST) -> list[str]:
    """The names that an import binds."""
    match node:
        case ast.Import(names=names):
            return [alias.asname or alias.name.partition(".")[0] for alias in names]
        case ast.ImportFrom(names=names):
            return [alias.asname or alias.name for alias in names]
    return []


def _root(node: ast.AST) -> str:
    """The name that a chain of attributes begins with; empty for anything else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _reaching(node: ast.AST, imported: set[str]) -> list[str]:
    """Ways through an allowed module to what it keeps to itself: its private names, the host, a name made up."""
    match node:
        case ast.Attribute(attr=name) if _root(node) in imported and _is_private(name):
            return [f"reaches {_root(node)}'s {name}"]
        case ast.Call(func=ast.Name(id=name), args=[first, *rest]) if name in REACHING and _root(first) in imported:
            match rest:
                case [ast.Constant(value=str(told)), *_] if not _is_private(told) and told not in CLOCKS | CHANCE:
                    return []
            return [f"reaches into {_root(first)} with {name}"]
    return []


def _is_private(name: str) -> bool:
    return name in HOSTS or (name.startswith("_") and name not in {"__name__", "__doc__"})


def _allowed(module: str) -> bool:
    return module in MODULES or (module.partition(".")[0] in MODULES and not module.startswith("sandbox"))
