"""Reading the source without running it: size, imports, and names that reach for the clock, the host or chance.

This is no barrier (the container is); it finds what running cannot show, such as a date that only changes tomorrow or
a fault of one call in a thousand, and says the line. Environments are small programs over records, so a short list of
modules suffices; it stands in ``sandbox/contract.py`` for whoever writes one. Of ``random`` only ``Random`` with a seed
is let through, of ``io`` only what is in memory. Not covered: most names that are put together while the program runs,
and a name of a module that the program gives to something else as well.
"""

import ast
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

MAX_BYTES = 256 * 1024
MODULES = frozenset(
    {"__future__", "abc", "ast", "base64", "bisect", "calendar", "collections", "contextlib", "copy", "csv"}
    | {"dataclasses", "datetime", "decimal", "difflib", "enum", "fnmatch", "fractions", "functools", "hashlib", "heapq"}
    | {"html", "io", "itertools", "json", "math", "numbers", "operator", "random", "re", "sandbox.contract"}
    | {"statistics", "string", "textwrap", "types", "typing", "unicodedata", "zlib"}
)
ONLY = {"io": frozenset({"StringIO", "BytesIO"}), "random": frozenset({"Random"})}  # of these modules no other names
NOT = {"contextlib": frozenset({"redirect_stdout", "redirect_stderr", "chdir"})}  # of these modules all others
CALLS = frozenset({"open", "input", "print"})
NAMES = frozenset({"eval", "exec", "compile", "breakpoint", "__import__", "globals", "__builtins__", "__loader__"})
REACHING = frozenset({"getattr", "vars", "dir", "setattr", "delattr"})  # into a module, by name
NAMING = frozenset({"operator.attrgetter", "operator.methodcaller"})  # the same, for later
HOSTS = frozenset({"sys", "os", "builtins"})  # as other modules import them
CLOCKS = frozenset({"now", "utcnow", "today"})  # of datetime and date
CHANCE = frozenset({"SystemRandom", "urandom"})
DUNDERS = frozenset({"__subclasses__", "__globals__", "__builtins__", "__code__", "__loader__", "__mro__"})
UNSEEDED = "seeds random.Random from nothing"

Bound = dict[str, str]  # a name that an import binds -> what it is: "random", "random.Random"


def inspect_source(source: str) -> tuple[bool, dict[str, Any]]:
    """(passed, evidence): the evidence lists "line N: what" for everything refused."""
    size = len(source.encode())
    if size > MAX_BYTES:
        return False, {"bytes": size, "refused": [f"{size} bytes, more than {MAX_BYTES}"]}
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return False, {"bytes": size, "refused": [f"line {getattr(error, 'lineno', 0)}: does not parse: {error}"]}
    nodes = list(ast.walk(tree))
    bound = {name: what for node in nodes for name, what in _bound(node)}
    found: list[tuple[int, str]] = []
    for node in nodes:
        line = getattr(node, "lineno", 0)
        found += ((line, what) for what in (*_refusals(node), *_reaching(node, bound), *_chance(node, bound)))
        found += ((line, f"reads the clock: {name}()") for name in _clocks(node, bound))
    found += ((line, UNSEEDED) for line in _unseeded(nodes, bound))
    refused = [f"line {line}: {what}" for line, what in dict.fromkeys(found)]
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
    return []


def _allowed(module: str) -> bool:
    return module in MODULES or (module.partition(".")[0] in MODULES and not module.startswith("sandbox"))


def _bound(node: ast.AST) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Import(names=names):
            yield from ((one.asname or one.name.partition(".")[0], one.name if one.asname else "") for one in names)
        case ast.ImportFrom(module=str(module), names=names, level=0):
            yield from ((alias.asname or alias.name, f"{module}.{alias.name}") for alias in names)


def _path(node: ast.AST, bound: Bound) -> str:
    """What a chain of attributes names, from the module on: "random.Random" of r.Random; empty for anything else."""
    chain: list[str] = []
    while isinstance(node, ast.Attribute):
        chain.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in bound:
        return ""
    return ".".join([bound[node.id] or node.id, *chain])


def _reaching(node: ast.AST, bound: Bound) -> Iterator[str]:
    """Ways through an allowed module to what it keeps to itself: its private names, the host, a name made up."""
    match node:
        case ast.Attribute(value=value, attr=name) if holder := _path(value, bound):
            if _keeps(holder, name):
                yield f"reaches {holder}'s {name}"
        case ast.ImportFrom(module=str(module), names=names, level=0):
            yield from (f"reaches {module}'s {alias.name}" for alias in names if _keeps(module, alias.name))
        case ast.Call(func=ast.Name(id=name), args=[first, *rest]) if name in REACHING and (
            holder := _path(first, bound)
        ):
            match rest:
                case [ast.Constant(value=str(told)), *_] if not _is_closed(holder, told):
                    return
            yield f"reaches into {holder} with {name}"
        case ast.Call(func=func, args=names) if (holder := _path(func, bound)) in NAMING:
            yield from (f"reaches by a name, with {holder}" for name in names if _is_odd(name))


def _is_odd(name: ast.expr) -> bool:
    """Whether a name that is told as text is put together on the spot, or private, or another module's."""
    match name:
        case ast.Constant(value=str(told)):
            return any(_is_private(part) or part in CHANCE for part in told.split("."))
        case ast.BinOp() | ast.JoinedStr() | ast.Call():
            return True
    return False


def _is_closed(holder: str, name: str) -> bool:
    return name in CLOCKS | CHANCE or _keeps(holder, name) or not _is_open(holder, name)


def _is_open(holder: str, name: str) -> bool:
    return name in ONLY.get(holder, {name}) and name not in NOT.get(holder, ())


def _is_private(name: str) -> bool:
    return name in HOSTS or (name.startswith("_") and name not in {"__name__", "__doc__"})


def _keeps(holder: str, name: str) -> bool:
    """Whether a name is private, or another module that this one has imported for itself."""
    if _is_private(name):
        return True
    root = holder.partition(".")[0]
    if root not in MODULES:
        return False
    held: Any = importlib.import_module(root)
    for part in [*holder.split(".")[1:], name]:
        held = getattr(held, "__dict__", {}).get(part)  # not getattr: nothing may be made up or warned of on the way
    return isinstance(held, ModuleType) and not held.__name__.startswith(f"{root}.")


def _chance(node: ast.AST, bound: Bound) -> Iterator[str]:
    """Names of a module of which few are let through."""
    match node:
        case ast.Attribute(value=value, attr=name):
            holder, names = _path(value, bound), [name]
        case ast.ImportFrom(module=str(holder), names=aliases, level=0):
            names = [alias.name for alias in aliases]
        case _:
            return
    told = (name for name in names if not (_is_open(holder, name) or name in CHANCE or _keeps(holder, name)))
    yield from (f"uses {holder}.{name}" for name in told)


def _unseeded(nodes: list[ast.AST], bound: Bound) -> Iterator[int]:
    """Lines that make a generator, or seed one again, from nothing."""
    makers = _makers(nodes, bound)
    seeds_itself = any(isinstance(node, ast.FunctionDef) and node.name == "seed" for node in nodes)
    for node in nodes:
        match node:
            case ast.Call(func=func, args=[] | [ast.Constant(value=None)], keywords=[]) if _is_maker(
                func, makers, bound
            ) or (isinstance(func, ast.Attribute) and func.attr == "seed" and makers and not seeds_itself):
                yield node.lineno
            case ast.keyword(arg="default_factory", value=value) if _is_maker(value, makers, bound):
                yield node.lineno


def _makers(nodes: list[ast.AST], bound: Bound) -> set[str]:
    """The names under which random.Random goes: as imported, as assigned, as a class made of it."""
    makers = {name for name, what in bound.items() if what.startswith("random") or name == "random"}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _path(value, bound) == "random.Random":
                makers.add(name)
            case ast.ClassDef(name=name, bases=bases, body=body) if any(
                _path(base, bound) == "random.Random" for base in bases
            ) and not any(isinstance(one, ast.FunctionDef) and one.name in ("__init__", "__new__") for one in body):
                makers.add(name)
    return makers


def _is_maker(node: ast.AST, makers: set[str], bound: Bound) -> bool:
    path = _path(node, bound)
    return path == "random.Random" or (not path and isinstance(node, ast.Name) and node.id in makers)


def _clocks(node: ast.AST, bound: Bound) -> list[str]:
    """Names of clocks: on anything where datetime is imported, and of whatever an import leads to."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name)) if name in CLOCKS and _dated(bound):
            return [name]
        case ast.Attribute(attr=name) if name in CLOCKS and _path(node, bound):
            return [name]
        case ast.Call(func=func, args=names) if _path(func, bound) in NAMING and _dated(bound):
            told = [name.value for name in names if isinstance(name, ast.Constant)]
            return [part for one in told for part in str(one).split(".") if part in CLOCKS]
    return []


def _dated(bound: Bound) -> bool:
    return any(what.startswith("datetime") or name == "datetime" for name, what in bound.items())
