"""Read a file or a folder for admission: find its single-file environment, or report why admission cannot run it.

For an exported package, or a folder in which exactly one file defines the whole contract, admission judges that file.
Other packages of verifiers and OpenEnv cannot be run: they have dependencies (the sandbox's image has only the standard
library, and no network); verifiers loads tasks from data rows instead of generating them from seeds; neither project
has solutions as messages; and OpenEnv environments define their own types of actions. ``unplayable_report`` leaves out
every check with a reason, so such a package is neither admitted nor refused. What it declares is found by names in its
syntax. This information may be wrong, because a package can mislead the search.

Invariants: no code in the folder is executed, links are not followed, and more than ``MAX_FILES`` Python files are
refused. Errors: ``NotRecognised``. Not covered: a running OpenEnv server.
"""

import ast
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.admission.checks import CHECK_NAMES
from sandbox.admission.static_analysis import MAX_BYTES, inspect_source
from sandbox.errors import clipped
from store.types import AdmissionReport, Check
from traced.interop import NotExportable, NotRecognised
from traced.interop.export import RECORD_FILE, require_exportable

CONTRACT = {"reset", "step", "done", "score", "oracle"}
NO_DEPENDENCIES = (
    "its dependencies ({}) are not in the sandbox's image, which has the standard library alone and no network"
)
MAX_FILES = 500
SKIPPED_FOLDERS = {"build", "dist", "node_modules", "outputs", "venv", "__pycache__"}
SEED, SOLUTION, ACTIONS = "seed", "solution", "actions"
# What each admission check needs of an environment in addition to its dependencies.
REQUIREMENTS = {
    "determinism": (SEED, SOLUTION),
    "oracle": (SOLUTION,),
    "diversity": (SEED, SOLUTION),
    "floor": (SEED, ACTIONS),
    "exploits": (SEED, ACTIONS),
    "slips": (SEED, SOLUTION, ACTIONS),
    "interface": (ACTIONS,),
    "leak": (SOLUTION,),
    "latency": (SOLUTION,),
    "spread": (SEED, ACTIONS),
}

# Matches the findings of the static analysis that every package of the other projects has.
_EXPECTED_FINDING = re.compile(r": imports |defines no class Environment$")

# Path inside the folder -> text.
Sources = dict[str, str]


@dataclass(frozen=True)
class Declaration:
    """What the files of a package declare.

    ``environments`` are the names of classes, or "load_environment". ``imports`` are the modules beyond the standard
    library and the package itself. ``lacks`` has the reason for each of seed, solution and actions that the package
    does not provide.
    """

    kind: str
    interface: str
    environments: list[str] = field(default_factory=list)
    rewards: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    lacks: Mapping[str, str] = field(default_factory=dict)

    def as_evidence(self) -> dict[str, Any]:
        """Return the declaration as the evidence of an admission check, with at most 20 names of each type."""
        return {
            "kind": self.kind,
            "interface": self.interface,
            "environments": self.environments[:20],
            "rewards": self.rewards[:20],
            "tools": self.tools[:20],
            "imports": self.imports[:20],
        }

    def reason_left_out(self, check: str) -> str:
        """Return why an admission check was left out."""
        if check == "source":
            return f"not checked: admission cannot run a package of {self.kind}"
        reasons = [NO_DEPENDENCIES.format(", ".join(self.imports[:6]) or self.kind)]
        reasons += [self.lacks[need] for need in REQUIREMENTS.get(check, ()) if need in self.lacks]
        return "; ".join(reasons)


@dataclass(frozen=True)
class RecognisedEnvironment:
    """A single-file environment that admission can judge.

    ``kind`` is "file", "verifiers" or "openenv". ``exported_hash`` is the environment's hash at its export, "" if it
    was not exported. ``changed`` names the other files of the package that have changed since the export.
    """

    path: Path
    source_code: str
    kind: str
    exported_hash: str = ""
    changed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ForeignPackage:
    """A package of another project that admission cannot run."""

    path: Path
    declaration: Declaration
    sources: Sources


def recognise_file(path: Path, text: str) -> RecognisedEnvironment | ForeignPackage:
    """Return the environment in a single Python file, or the package of another project that it is."""
    sources = {path.name: text}
    kind = foreign_kind(sources)
    if kind and not defines_contract(text):
        return ForeignPackage(path, read_declaration(kind, sources), sources)
    return RecognisedEnvironment(path, text, "file")


def recognise_folder(folder: Path) -> RecognisedEnvironment | ForeignPackage:
    """Return the single environment in a folder, or the package of another project that it is; raises NotRecognised."""
    record = _record(folder)
    if record is not None:
        return _exported(folder, record)
    sources = _read(folder)
    kind = foreign_kind(sources, is_openenv=(folder / "openenv.yaml").is_file())
    candidates = [name for name, text in sources.items() if defines_contract(text) and _stands_alone(text)]
    if len(candidates) == 1:
        return RecognisedEnvironment(folder / candidates[0], sources[candidates[0]], kind or "file")
    if candidates:
        raise NotRecognised(
            f"{folder} holds {len(candidates)} environments: {', '.join(candidates)}", hint="name one of these files"
        )
    if kind is None:
        raise NotRecognised(
            f"{folder} holds no environment: no openenv.yaml, nothing that imports verifiers.v1 or defines "
            "load_environment, and no file with a whole class Environment",
            hint="name the file of the environment, or the folder of the package",
        )
    return ForeignPackage(folder, read_declaration(kind, sources), sources)


def unplayable_report(foreign: ForeignPackage) -> AdmissionReport:
    """Return the admission report on a package that cannot be run, in which every check is left out with a reason."""
    findings = [
        f"{name} {line}"
        for name, text in foreign.sources.items()
        for line in inspect_source(text)[1]["refused"]
        if not _EXPECTED_FINDING.search(line)
    ]
    declared = {**foreign.declaration.as_evidence(), "files": len(foreign.sources)}
    declared["noted"] = [clipped(line, 200) for line in findings[:20]]
    reasons = {name: {"left_out": foreign.declaration.reason_left_out(name)} for name in CHECK_NAMES}
    checks = [
        Check(name, False, {**evidence, **(declared if name == "source" else {})}, 0.0)
        for name, evidence in reasons.items()
    ]
    digest = hashlib.sha256(json.dumps(sorted(foreign.sources.items())).encode()).hexdigest()
    return AdmissionReport(digest, False, checks)


def foreign_kind(sources: Mapping[str, str], *, is_openenv: bool = False) -> str | None:
    """Return the project for which sources are written, judged by their imports; None if it is neither.

    ``is_openenv`` tells whether the folder has an openenv.yaml.
    """
    modules = {module.partition(".")[0] for text in sources.values() for module in _modules(_parsed(text))}
    if is_openenv or modules & {"openenv", "openenv_core"}:
        return "openenv"
    return "verifiers" if "verifiers" in modules else None


def defines_contract(text: str) -> bool:
    """Return whether a file defines a class Environment with every member of the contract, including inherited ones."""
    classes = {node.name: node for node in _parsed(text).body if isinstance(node, ast.ClassDef)}
    members: set[str] = set()
    pending, visited = ["Environment"], set[str]()
    while pending:
        name = pending.pop()
        if name in classes and name not in visited:
            visited.add(name)
            members |= _members(classes[name])
            pending += [_last_name(base) for base in classes[name].bases]
    # The contract's own class Environment is a Protocol and not an environment.
    is_protocol = "Environment" in classes and any(
        _last_name(base) == "Protocol" for base in classes["Environment"].bases
    )
    return "Environment" in classes and members >= CONTRACT and not is_protocol


def read_declaration(kind: str, sources: Mapping[str, str]) -> Declaration:
    """Return what the files of a package declare, read from their syntax without executing them."""
    trees = [_parsed(text) for text in sources.values()]
    own_modules = {part for name in sources for part in name.removesuffix(".py").split("/")}
    top_level = {module.partition(".")[0] for tree in trees for module in _modules(tree)}
    imports = sorted(top_level - sys.stdlib_module_names - own_modules - {""})
    nodes = [node for tree in trees for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    tools = [*_decorated(nodes, "tool"), *_names_in_list(nodes, "tools")]
    if kind == "openenv":
        environments = [cls for cls in classes if _derives(cls, "Environment") and "step" in _members(cls)]
        rubrics = [cls.name for cls in classes if _derives(cls, "Rubric")]
        names = [cls.name for cls in environments]
        return Declaration(
            kind, "reset, step and state", names, rubrics, tools, imports, _openenv_lacks(environments, classes)
        )
    tasksets = [cls.name for cls in classes if _derives(cls, "Taskset")]
    loaders = [node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "load_environment"]
    rewards = [*_decorated(nodes, "reward"), *_names_in_list(nodes, "funcs")]
    interface = "verifiers.v1: tasksets" if tasksets else "verifiers 0.1: load_environment"
    has_validation = any(_derives(cls, "Task") and "validate" in _members(cls) for cls in classes)
    lacks = {
        SEED: "its tasks are loaded from data and cannot be generated from a seed",
        SOLUTION: "its reference solution is a check (Task.validate, run by vf-validate), not messages"
        if has_validation
        else "it has no solution",
        ACTIONS: "its episodes need a model behind a URL and cannot be played message by message",
    }
    return Declaration(kind, interface, [*tasksets, *loaders], rewards, tools, imports, lacks)


def _openenv_lacks(environments: list[ast.ClassDef], classes: list[ast.ClassDef]) -> dict[str, str]:
    fields = [
        node.target.id
        for cls in classes
        if _derives(cls, "Action")
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    lacks = {
        SOLUTION: "it has no solution as messages: OpenEnv's oracle is a script or a state of its server",
        ACTIONS: f"it uses its own actions ({', '.join(fields[:6]) or 'unknown'}), not assistant messages",
    }
    resets = [
        node
        for cls in environments
        for node in cls.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "reset"
    ]
    if not any("seed" in {arg.arg for arg in [*node.args.args, *node.args.kwonlyargs]} for node in resets):
        lacks[SEED] = "its reset takes no seed"
    return lacks


def _parsed(text: str) -> ast.Module:
    """Return the syntax tree, an empty one for invalid Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _modules(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of absolute imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module


def _members(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's methods, and the names that its body or a method assigns."""
    names = {child.name for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)}
    for child in ast.walk(node):
        match child:
            case ast.Assign(targets=targets):
                names |= {name for target in targets for name in _names(target)}
            case ast.AnnAssign(target=target):
                names |= set(_names(target))
    return names


def _names(target: ast.expr) -> Iterator[str]:
    match target:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            yield name
        case ast.Tuple(elts=parts):
            for part in parts:
                yield from _names(part)


def _derives(node: ast.ClassDef, base: str) -> bool:
    """Return whether the name of a base class ends with ``base``; MCPEnvironment counts as an Environment."""
    return any(_last_name(base_node).endswith(base) for base_node in node.bases)


def _last_name(node: ast.expr) -> str:
    """Return the last name of an expression.

    This is Environment for interfaces.Environment[A, O, S], and reward for vf.reward(weight=1).
    """
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=inner) | ast.Call(func=inner):
            return _last_name(inner)
    return ""


def _decorated(nodes: list[ast.AST], decorator: str) -> list[str]:
    """Return the names of the functions with a decorator, in order."""
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        node.name
        for node in functions
        if any(_last_name(decorator_node) == decorator for decorator_node in node.decorator_list)
    ]


def _names_in_list(nodes: list[ast.AST], argument: str) -> list[str]:
    """Return the names in the lists that are passed as ``argument``, as in Rubric(funcs=[right, short])."""
    values = [
        keyword.value
        for node in nodes
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == argument
    ]
    return [
        _last_name(element)
        for value in values
        if isinstance(value, ast.List)
        for element in value.elts
        if _last_name(element)
    ]


def _exported(folder: Path, record: dict[str, Any]) -> RecognisedEnvironment:
    """Return the environment of an exported package, with the other files that have changed since the export."""
    files = {name: digest for name, digest in record["files"].items() if isinstance(name, str)}
    source = record["source"]
    text = _text(folder, source) if source in files else None
    if text is None:
        raise NotRecognised(
            f"{folder / RECORD_FILE} names {source!r}, which is missing or too long for admission",
            hint="export it again",
        )
    changed = [name for name, digest in files.items() if name != source and _digest(folder, name) != digest]
    return RecognisedEnvironment(folder / source, text, str(record["kind"]), str(record["environment"]), changed)


def _record(folder: Path) -> dict[str, Any] | None:
    """Return the content of ``traced.json``, or None if it is missing or invalid."""
    try:
        record = json.loads((folder / RECORD_FILE).read_bytes())
        fits = (
            record["format"] == 1
            and isinstance(record["files"], dict)
            and {"source", "kind", "environment"} <= {*record}
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return record if fits else None


def _read(folder: Path) -> Sources:
    """Return the Python files of a folder, without links and files that are too long for admission or not UTF-8."""
    sources: Sources = {}
    for directory, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".") and "-info" not in name
        )
        for name in sorted(name for name in names if name.endswith(".py")):
            relative = (Path(directory) / name).relative_to(folder).as_posix()
            text = _text(folder, relative)
            if text is not None:
                sources[relative] = text
            if len(sources) > MAX_FILES:
                raise NotRecognised(
                    f"{folder} holds more than {MAX_FILES} Python files", hint="name the folder of the package"
                )
    return sources


def _text(folder: Path, name: str) -> str | None:
    content = _bytes(folder, name)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError:
        return None


def _digest(folder: Path, name: str) -> str:
    content = _bytes(folder, name)
    return "" if content is None else hashlib.sha256(content).hexdigest()


def _bytes(folder: Path, name: str) -> bytes | None:
    """Return the content of a regular file inside the folder, or None if it is missing or too long for admission."""
    path = folder / name
    try:
        if path.is_symlink() or not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
            return None
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError):
        return None
    return content if len(content) <= MAX_BYTES else None


def _stands_alone(text: str) -> bool:
    try:
        require_exportable(text)
    except NotExportable:
        return False
    return True
