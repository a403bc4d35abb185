"""Analyse an environment's source: its size, imports, and names that reach the clock, the host or randomness.

This is not a security barrier; the container is. The analysis finds what running cannot show, such as a date that
changes only tomorrow, and reports its line. The allowed modules are listed in ``sandbox/contract.py`` for authors. Not
covered: most names that are composed at run time, and aliases of a module's name.
"""

import ast
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from sandbox.user import MODEL, model_user_line

MAX_BYTES = 256 * 1024
MODULES = frozenset(
    {"__future__", "abc", "ast", "base64", "bisect", "calendar", "collections", "contextlib", "copy", "csv"}
    | {"dataclasses", "datetime", "decimal", "difflib", "enum", "fnmatch", "fractions", "functools", "hashlib", "heapq"}
    | {"html", "io", "itertools", "json", "math", "numbers", "operator", "random", "re", "sandbox.contract"}
    | {"statistics", "string", "textwrap", "types", "typing", "unicodedata", "zlib"}
)
# Only these names of these modules are allowed.
ALLOWED_NAMES = {
    "io": frozenset({"StringIO", "BytesIO"}),
    "random": frozenset({"Random"}),
}
# All names of these modules except these are allowed.
DENIED_NAMES = {"contextlib": frozenset({"redirect_stdout", "redirect_stderr", "chdir"})}
DENIED_CALLS = frozenset({"open", "input", "print"})
DENIED_BUILTINS = frozenset(
    {"eval", "exec", "compile", "breakpoint", "__import__", "globals", "__builtins__", "__loader__"}
)
# Functions that access a module's attributes by name.
REFLECTION_FUNCTIONS = frozenset({"getattr", "vars", "dir", "setattr", "delattr"})
# Operators that access attributes by name when they are called.
REFLECTION_OPERATORS = frozenset({"operator.attrgetter", "operator.methodcaller"})
# Allowed modules import these, so that they can be reached as attributes.
HOST_MODULES = frozenset({"sys", "os", "builtins"})
# Methods of datetime and date that read the clock.
CLOCK_METHODS = frozenset({"now", "utcnow", "today"})
ENTROPY_NAMES = frozenset({"SystemRandom", "urandom"})
DENIED_DUNDERS = frozenset({"__subclasses__", "__globals__", "__builtins__", "__code__", "__loader__", "__mro__"})
UNSEEDED = "seeds random.Random from nothing"
NO_USER_MODEL = "its user is a model, and target.user.model is empty"

# Maps a name that an import binds to the dotted path of its object ("random.Random"), or to "" if the name is that
# path.
Imports = dict[str, str]


def inspect_source(source: str, *, has_user_model: bool = True) -> tuple[bool, dict[str, Any]]:
    """Return (passed, evidence); the evidence lists "line N: reason" for the first 20 findings.

    Args:
        has_user_model: Whether an environment may ask for a user that is a model.
    """
    size = len(source.encode())
    tree, refusals = _inspect(source, MAX_BYTES)
    user_line = model_user_line(tree) if tree else 0
    if user_line and not has_user_model:
        refusals.append(f"line {user_line}: {NO_USER_MODEL}")
    if tree and not any(isinstance(node, ast.ClassDef) and node.name == "Environment" for node in tree.body):
        refusals.append("line 0: defines no class Environment")
    return not refusals, {"bytes": size, "refused": refusals[:20], **({"user": MODEL} if user_line else {})}


def inspect_module(source: str, largest: int) -> list[str]:
    """Return why a module of tool functions (``agents.world.functions``) is refused; nothing if it is not.

    Beside what environments may not use it has no statement that runs at its top but imports and assignments, and no
    state: no ``global``.

    Args:
        largest: The most bytes.
    """
    tree, refusals = _inspect(source, largest)
    if tree is None:
        return refusals
    for position, statement in enumerate(tree.body):
        is_docstring = position == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not isinstance(statement, _DEFINITIONS) and not is_docstring:
            refusals.append(f"line {statement.lineno}: is no import, function, class or assignment")
    for part in ast.walk(tree):
        match part:
            case ast.ImportFrom(module="__future__" | "sandbox.contract" as module):
                refusals.append(f"line {part.lineno}: imports from {module}")
            case ast.Global() | ast.Nonlocal():
                refusals.append(f"line {part.lineno}: has a state (global or nonlocal)")
    tables = [node for node in tree.body if isinstance(node, ast.Assign) and _binds(node, "TOOLS")]
    if not tables or not isinstance(tables[-1].value, ast.Dict):
        refusals.append("line 0: binds no dictionary of functions to TOOLS")
    return refusals[:20]


_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


def _binds(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def _inspect(source: str, largest: int) -> tuple[ast.Module | None, list[str]]:
    """Return the tree of a source, None if it is too large or does not parse, and "line N: reason" of each finding."""
    size = len(source.encode())
    if size > largest:
        return None, [f"{size} bytes, more than {largest}"]
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return None, [f"line {getattr(error, 'lineno', 0)}: does not parse: {error}"]
    nodes = list(ast.walk(tree))
    imports = dict(imported for node in nodes for imported in _imported_names(node))
    findings: list[tuple[int, str]] = []
    for node in nodes:
        line = getattr(node, "lineno", 0)
        uses = (*_denied_uses(node), *_internal_uses(node, imports), *_unlisted_uses(node, imports))
        findings += ((line, use) for use in uses)
        findings += ((line, f"reads the clock: {name}()") for name in _clock_reads(node, imports))
    findings += ((line, UNSEEDED) for line in _unseeded_lines(nodes, imports))
    return tree, [f"line {line}: {reason}" for line, reason in dict.fromkeys(findings)]


def _denied_uses(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [f"imports {alias.name}" for alias in names if not _allowed(alias.name)]
        case ast.ImportFrom(module=module, level=level):
            return [] if level == 0 and _allowed(module or "") else [f"imports from {'.' * level}{module or ''}"]
        case ast.Call(func=ast.Name(id=name)) if name in DENIED_CALLS:
            return [f"calls {name}"]
        case ast.Name(id=name, ctx=ast.Load()) if name in DENIED_BUILTINS:
            return [f"uses {name}"]
        case ast.Attribute(attr=name) if name in ENTROPY_NAMES | DENIED_DUNDERS:
            return [f"uses {name}"]
    return []


def _allowed(module: str) -> bool:
    return module in MODULES or (module.partition(".")[0] in MODULES and not module.startswith("sandbox"))


def _imported_names(node: ast.AST) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Import(names=names):
            yield from (
                (alias.asname or alias.name.partition(".")[0], alias.name if alias.asname else "") for alias in names
            )
        case ast.ImportFrom(module=str(module), names=names, level=0):
            yield from ((alias.asname or alias.name, f"{module}.{alias.name}") for alias in names)


def _dotted_path(node: ast.AST, imports: Imports) -> str:
    """Return the dotted path of an attribute chain ("random.Random" for r.Random); empty if no import begins it."""
    chain: list[str] = []
    while isinstance(node, ast.Attribute):
        chain.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in imports:
        return ""
    return ".".join([imports[node.id] or node.id, *chain])


def _internal_uses(node: ast.AST, imports: Imports) -> Iterator[str]:
    """Yield uses of an allowed module's private names or imports, and of attribute names that are computed."""
    match node:
        case ast.Attribute(value=value, attr=name) if owner := _dotted_path(value, imports):
            if _is_internal(owner, name):
                yield f"reaches {owner}'s {name}"
        case ast.ImportFrom(module=str(module), names=names, level=0):
            yield from (f"reaches {module}'s {alias.name}" for alias in names if _is_internal(module, alias.name))
        case ast.Call(func=ast.Name(id=name), args=[first, *rest]) if name in REFLECTION_FUNCTIONS and (
            owner := _dotted_path(first, imports)
        ):
            match rest:
                case [ast.Constant(value=str(attribute)), *_] if not _is_denied(owner, attribute):
                    return
            yield f"reaches into {owner} with {name}"
        case ast.Call(func=func, args=names) if (owner := _dotted_path(func, imports)) in REFLECTION_OPERATORS:
            yield from (f"reaches by a name, with {owner}" for name in names if _is_suspicious(name))


def _is_suspicious(name: ast.expr) -> bool:
    """Whether an attribute name, given as an expression, is computed, private, or a source of randomness."""
    match name:
        case ast.Constant(value=str(text)):
            return any(_is_private(part) or part in ENTROPY_NAMES for part in text.split("."))
        case ast.BinOp() | ast.JoinedStr() | ast.Call():
            return True
    return False


def _is_denied(owner: str, name: str) -> bool:
    return name in CLOCK_METHODS | ENTROPY_NAMES or _is_internal(owner, name) or not _is_listed(owner, name)


def _is_listed(owner: str, name: str) -> bool:
    return name in ALLOWED_NAMES.get(owner, {name}) and name not in DENIED_NAMES.get(owner, ())


def _is_private(name: str) -> bool:
    return name in HOST_MODULES or (name.startswith("_") and name not in {"__name__", "__doc__"})


def _is_internal(owner: str, name: str) -> bool:
    """Whether ``owner.name`` is private, or a module that the module of ``owner`` imports for its own use."""
    if _is_private(name):
        return True
    root = owner.partition(".")[0]
    if root not in MODULES:
        return False
    value: object = importlib.import_module(root)
    for part in [*owner.split(".")[1:], name]:
        # Not getattr: a module's ``__getattr__`` may create the name or warn.
        value = getattr(value, "__dict__", {}).get(part)
    return isinstance(value, ModuleType) and not value.__name__.startswith(f"{root}.")


def _unlisted_uses(node: ast.AST, imports: Imports) -> Iterator[str]:
    """Yield uses of names that ``ALLOWED_NAMES`` or ``DENIED_NAMES`` exclude."""
    match node:
        case ast.Attribute(value=value, attr=name):
            owner, names = _dotted_path(value, imports), [name]
        case ast.ImportFrom(module=str(owner), names=aliases, level=0):
            names = [alias.name for alias in aliases]
        case _:
            return
    unlisted = (
        name for name in names if not (_is_listed(owner, name) or name in ENTROPY_NAMES or _is_internal(owner, name))
    )
    yield from (f"uses {owner}.{name}" for name in unlisted)


def _unseeded_lines(nodes: list[ast.AST], imports: Imports) -> Iterator[int]:
    """Yield lines that create or reseed a generator without a seed."""
    generators = _generator_names(nodes, imports)
    defines_seed = any(isinstance(node, ast.FunctionDef) and node.name == "seed" for node in nodes)
    for node in nodes:
        match node:
            case ast.Call(func=func, args=[] | [ast.Constant(value=None)], keywords=[]) if _makes_generator(
                func, generators, imports
            ) or (isinstance(func, ast.Attribute) and func.attr == "seed" and generators and not defines_seed):
                yield node.lineno
            case ast.keyword(arg="default_factory", value=value) if _makes_generator(value, generators, imports):
                yield node.lineno


def _generator_names(nodes: list[ast.AST], imports: Imports) -> set[str]:
    """Return the names that stand for random.Random: imported, assigned, or of a class derived from it."""
    generators = {name for name, origin in imports.items() if origin.startswith("random") or name == "random"}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if (
                _dotted_path(value, imports) == "random.Random"
            ):
                generators.add(name)
            case ast.ClassDef(name=name, bases=bases, body=body) if any(
                _dotted_path(base, imports) == "random.Random" for base in bases
            ) and not any(
                isinstance(statement, ast.FunctionDef) and statement.name in ("__init__", "__new__")
                for statement in body
            ):
                generators.add(name)
    return generators


def _makes_generator(node: ast.AST, generators: set[str], imports: Imports) -> bool:
    path = _dotted_path(node, imports)
    return path == "random.Random" or (not path and isinstance(node, ast.Name) and node.id in generators)


def _clock_reads(node: ast.AST, imports: Imports) -> list[str]:
    """Return the clock methods that a node uses: on any object once datetime is imported, and on imported names."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name)) if name in CLOCK_METHODS and _imports_datetime(imports):
            return [name]
        case ast.Attribute(attr=name) if name in CLOCK_METHODS and _dotted_path(node, imports):
            return [name]
        case ast.Call(func=func, args=names) if _dotted_path(
            func, imports
        ) in REFLECTION_OPERATORS and _imports_datetime(imports):
            literals = [name.value for name in names if isinstance(name, ast.Constant)]
            return [part for literal in literals for part in str(literal).split(".") if part in CLOCK_METHODS]
    return []


def _imports_datetime(imports: Imports) -> bool:
    return any(origin.startswith("datetime") or name == "datetime" for name, origin in imports.items())
