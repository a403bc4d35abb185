"""The structure of the source tree: packages, import cycles, names, modules, comments, functions.

    python -m benchmarks.structure [--root DIR] [--baseline DIR] [--tests] [--json]

Reads the five packages of the checkout at ``--root`` (this one by default) without importing them; ``--baseline``
prints the figures of a second checkout beside the first. Deterministic, a few seconds.

An import cycle is a strongly connected group among the children of one package, at every depth; imports inside
functions and under TYPE_CHECKING count. Names and the words banned in them: ``scripts/banned_names.py``; its list is
calibrated on popular projects. Shares of banned names there: inspect_ai 0.3.285 0.8 %, verifiers 0.4.0 0.9 %,
procrastinate 3.10.0 0.4 %, posting 2.11.1 0.5 %, httpx 0.28.1 0.4 %; this project before its clean-up 18.0 %.
A module counts when it has a statement or a docstring. Lines are source, comment and blank lines (``wc -l``); a
function's length includes its signature and docstring, not its decorators. Aims are in ``AT_MOST`` and ``AT_LEAST``.

``--tests`` also runs ``make test`` at the root and takes its wall-clock time; without it that figure is null and does
not count. Exit code 1 when an aim is missed. Not covered: what the tests cover, names in tests and benchmarks.
"""

import argparse
import ast
import io
import json
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from scripts.banned_names import PACKAGES, names_in, python_files

ROOT = Path(__file__).parents[1]
LINES_BEFORE = 68_331  # commit c0710fc, before the clean-up
AT_MOST: Mapping[str, float] = {
    "children_of_traced": 26,
    "import_cycles": 0,
    "banned_names_share": 0.02,
    "modules_per_1000_lines": 6,
    "any_uses": 600,
    "function_imports": 40,
    "modules_over_600_lines": 0,
    "lines": LINES_BEFORE - 5_000,
    "test_seconds": 300,
}
AT_LEAST: Mapping[str, float] = {"comments_per_1000_lines": 10}
# Figures of the table in their order, with the format of each.
FORMATS: Mapping[str, str] = {
    "children_of_traced": ",d",
    "import_cycles": ",d",
    "names": ",d",
    "banned_names": ",d",
    "banned_names_share": ".1%",
    "lines": ",d",
    "modules": ",d",
    "modules_per_1000_lines": ".1f",
    "modules_over_600_lines": ",d",
    "modules_under_40_lines": ",d",
    "any_uses": ",d",
    "function_imports": ",d",
    "comments_per_1000_lines": ".1f",
    "function_lines_median": ".0f",
    "function_lines_p95": ".0f",
    "test_seconds": ".0f",
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Import:
    """One import of a module of ours by another."""

    importer: str
    imported: str
    line: int
    in_function: bool


@dataclass(frozen=True)
class Cycle:
    """Children of a package that import one another, and the imports between them."""

    package: str
    children: list[str]
    imports: list[str]


@dataclass
class Tree:
    """The parsed modules of a checkout by dotted name; a package's name stands for its ``__init__``."""

    root: Path
    paths: dict[str, Path] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    modules: dict[str, ast.Module] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path) -> "Tree":
        """Parse every Python file of the five packages."""
        tree = cls(root)
        for path in python_files(folder for package in PACKAGES if (folder := root / package).is_dir()):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            tree.paths[name] = path
            tree.sources[name] = path.read_text()
            tree.modules[name] = ast.parse(tree.sources[name], str(path))
        if not tree.modules:
            raise SystemExit(f"{root} has none of the packages {', '.join(PACKAGES)}: give the root of a checkout")
        return tree


def measure(root: Path) -> dict[str, Any]:
    """All figures of a checkout but the time of its tests."""
    tree = Tree.read(root)
    # An empty __init__ is no module of its own.
    lengths = {name: source.count("\n") for name, source in tree.sources.items() if tree.modules[name].body}
    lines = sum(source.count("\n") for source in tree.sources.values())
    imports = [item for name in tree.modules for item in imports_of(tree, name)]
    cycles = import_cycles(imports)
    names = [name for path in tree.paths.values() for name in names_in(path)]
    words = Counter(name.banned_word for name in names if name.banned_word)
    nodes = [node for module in tree.modules.values() for node in ast.walk(module)]
    sizes = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes if isinstance(node, FUNCTIONS)]
    return {
        "children_of_traced": len(_children(tree, "traced")),
        "import_cycles": len(cycles),
        "names": len(names),
        "banned_names": words.total(),
        "banned_names_share": words.total() / max(len(names), 1),
        "lines": lines,
        "modules": len(lengths),
        "modules_per_1000_lines": _per_1000(len(lengths), lines),
        "modules_over_600_lines": sum(length > 600 for length in lengths.values()),
        "modules_under_40_lines": sum(length < 40 for length in lengths.values()),
        "any_uses": sum(map(_is_any, nodes)),
        "function_imports": len({(item.importer, item.line) for item in imports if item.in_function}),
        "comments_per_1000_lines": _per_1000(sum(map(own_line_comments, tree.sources.values())), lines),
        "function_lines_median": median(sizes or [0]),
        "function_lines_p95": quantiles(sizes, n=20)[-1] if len(sizes) > 1 else sum(sizes),
        "test_seconds": None,
        "cycles": [vars(cycle) for cycle in cycles],
        "banned_words": dict(words.most_common(40)),
        "long_modules": sorted(name for name, length in lengths.items() if length > 600),
    }


def _per_1000(count: int, lines: int) -> float:
    return 1000 * count / max(lines, 1)


def _children(tree: Tree, package: str) -> set[str]:
    """Sub-packages and modules of a package beside ``__init__`` and ``__main__``."""
    names = (name.removeprefix(f"{package}.") for name in tree.modules if name.startswith(f"{package}."))
    return {name.split(".")[0] for name in names} - {"__main__"}


def _is_any(node: ast.AST) -> bool:
    """Whether the node is ``Any`` or ``typing.Any``, an import of it excluded."""
    match node:
        case ast.Name(id="Any") | ast.Attribute(value=ast.Name(id="typing"), attr="Any"):
            return True
    return False


def own_line_comments(source: str) -> int:
    """Comments that have a line of their own."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type == tokenize.COMMENT and token.line.lstrip().startswith("#") for token in tokens)


def imports_of(tree: Tree, name: str) -> list[Import]:
    """Imports of our own modules anywhere in a module."""
    imports: list[Import] = []
    nodes: list[tuple[ast.AST, bool]] = [(tree.modules[name], False)]
    while nodes:
        node, in_function = nodes.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            targets = {module for target in _targets(tree, name, node) if (module := _known_module(tree, target))}
            imports += [Import(name, target, node.lineno, in_function) for target in sorted(targets)]
        inside = in_function or isinstance(node, FUNCTIONS)
        nodes.extend((child, inside) for child in ast.iter_child_nodes(node))
    return imports


def _targets(tree: Tree, name: str, node: ast.Import | ast.ImportFrom) -> list[str]:
    """The dotted names that an import statement mentions, absolute."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        is_package = tree.paths[name].stem == "__init__"
        parts = name.split(".")
        package = parts[: len(parts) - node.level + is_package]
        base = ".".join([*package, *([node.module] if node.module else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def _known_module(tree: Tree, target: str) -> str:
    """The longest prefix that is a module of the tree, empty for none: ``package.module.function`` is two modules."""
    while target and target not in tree.modules:
        target = target.rpartition(".")[0]
    return target


def import_cycles(imports: Iterable[Import]) -> list[Cycle]:
    """Strongly connected groups among the children of each package."""
    edges: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    sites: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for item in imports:
        importer, imported = item.importer.split("."), item.imported.split(".")
        depth = next((i for i, (a, b) in enumerate(zip(importer, imported, strict=False)) if a != b), 0)
        if depth:
            package, source, target = ".".join(importer[:depth]), importer[depth], imported[depth]
            edges[package][source].add(target)
            sites[package, source, target].add(f"{item.importer} -> {item.imported}")
    cycles = []
    for package, graph in sorted(edges.items()):
        for group in strong_groups(graph):
            pairs = [(package, source, target) for source in group for target in group]
            cycles.append(Cycle(package, group, sorted(set().union(*(sites.get(pair, set()) for pair in pairs)))))
    return cycles


def strong_groups(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected groups of two or more nodes, by mutual reachability: the graphs are small."""
    reach = {node: _reachable(graph, node) for node in graph}
    groups = {tuple(sorted(other for other in reach[node] if node in reach.get(other, ()))) for node in graph}
    return sorted(list(group) for group in groups if len(group) > 1)


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """The nodes on a path from ``start``, itself only on a cycle."""
    nodes: set[str] = set()
    queue = list(graph.get(start, ()))
    while queue:
        node = queue.pop()
        if node not in nodes:
            nodes.add(node)
            queue.extend(graph.get(node, ()))
    return nodes


def seconds_of_tests(root: Path) -> float:
    """Wall-clock seconds of ``make test``; a failed run has no time."""
    start = perf_counter()
    # The figures go to standard output, the tests' report does not.
    status = subprocess.run(["make", "test"], cwd=root, stdout=sys.stderr).returncode
    if status:
        raise SystemExit(f"make test failed in {root} (exit code {status}): there is no time to report")
    return perf_counter() - start


def reached_aims(figures: Mapping[str, Any]) -> dict[str, bool]:
    """Which aims are met; figures that were not measured are left out."""
    results = {name: figures[name] <= aim for name, aim in AT_MOST.items() if figures[name] is not None}
    return results | {name: figures[name] >= aim for name, aim in AT_LEAST.items()}


def table(figures: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> str:
    """The figures with their aims, a line each, then the cycles and the most frequent banned words."""
    results = reached_aims(figures)
    header = ["", "baseline", "now", "aim", ""]
    rows = [header if baseline else [*header[:1], *header[2:]]]
    for name, form in FORMATS.items():
        sign, aim = ("<=", AT_MOST[name]) if name in AT_MOST else (">=", AT_LEAST.get(name))
        values = [baseline[name], figures[name]] if baseline else [figures[name]]
        result = {True: "met", False: "missed", None: ""}[results.get(name)]
        cells = ["-" if value is None else format(value, form) for value in values]
        rows.append([name.replace("_", " "), *cells, "" if aim is None else f"{sign} {aim:{form}}", result])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    lines += [f"cycle in {cycle['package']}: {', '.join(cycle['children'])}" for cycle in figures["cycles"]]
    words = ", ".join(f"{word} {count}" for word, count in list(figures["banned_words"].items())[:20])
    return "\n".join([*lines, f"banned words: {words or 'none'}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structure", description="Structure of the source tree.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to measure")
    parser.add_argument("--baseline", type=Path, help="a second checkout, printed beside the first")
    parser.add_argument("--tests", action="store_true", help="run make test at the root and take its time")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    figures = measure(options.root)
    baseline = measure(options.baseline) if options.baseline else None
    if options.tests:
        figures["test_seconds"] = seconds_of_tests(options.root)
    print(table(figures, baseline))
    results = reached_aims(figures)
    meets = all(results.values())
    if options.json:
        aims = {"at_most": AT_MOST, "at_least": AT_LEAST}
        print(json.dumps({**figures, "baseline": baseline, "aims": aims, "reached": results, "meets": meets}))
    return 0 if meets else 1


if __name__ == "__main__":
    sys.exit(main())
