"""Puts the target's policies, tools and world above a file that a model wrote, and takes them away again.

The names are defined only if the file uses them and does not define them itself. A model sees its file without the
block, and line numbers of reports as those of its file. The world stands in a function, so that its names and those of
the file do not meet. Not covered: a file that does not parse gets no block, because it is refused anyway.
"""

import ast
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agents.synthesizer.builtin import WorldData
from agents.transcript import tool_function
from agents.world.functions import indented, runtime_source
from store.types import Tool

POLICIES, TOOLS, WORLD_CLASS = "TARGET_POLICIES", "TARGET_TOOLS", "TargetWorld"
START, END = "# --- the target ---", "# --- end of the target ---"
# Characters of a line of compressed data.
_LINE = 110
_BLOCK = re.compile(rf"^{START}\n.*?^{END}\n\n\n", re.MULTILINE | re.DOTALL)
_LINE_NUMBER = re.compile(r"\bline (\d+)")
# The class between a model's file and the runtime of a world.
_WORLD_CLASS = '''

class TargetWorld(World):
    """The target's world; see ``World``."""

    def __init__(self):
        super().__init__(_DATA_AND_FUNCTIONS)

    def reply(self, tool, arguments):
        """Return the answer and whether it is an error; None: not recorded, and then the call changes nothing.

        A call that does not fit the schema of its tool is answered by its recorded error alone.
        """
        if not isinstance(arguments, dict):
            return None
        required, names = _ARGUMENTS.get(tool, ([], None))
        if not set(required) <= set(arguments) or (names is not None and not set(arguments) <= set(names)):
            # The target refused it for its arguments, whatever was written before.
            entries = _DATA["calls"].get(tool, {}).get(canonical_json(arguments), [])
            return (entries[0][1], True) if entries and all(failed for *_, failed in entries) else None
        count = len(self.writes)
        reply = super().reply(tool, arguments)
        if reply is None:
            del self.writes[count:]
        return reply

    def records(self, tool):
        """Return (arguments, answer) of each recorded call that succeeds before any write, in a fixed order."""
        pairs = []
        for arguments, entries in sorted(_DATA["calls"].get(tool, {}).items()):
            answers = [text for history, text, failed in entries if not history and not failed]
            if answers:
                pairs.append((json.loads(arguments), answers[0]))
        return pairs

    def before_writes(self, tool, arguments):
        """Return the recorded answer to a call before any write, None if there is none."""
        entries = _DATA["calls"].get(tool, {}).get(canonical_json(arguments), [])
        return next((text for history, text, failed in entries if not history and not failed), None)


return TargetWorld
'''


@dataclass(frozen=True)
class Target:
    """What the files of a target share: its system prompts, its tools, and its world if one is usable."""

    policies: Sequence[str]
    tools: Sequence[Tool]
    world: WorldData | None = None


def block_bytes(target: Target) -> int:
    """Return the most bytes that ``with_target`` adds to a file."""
    return len(with_target(f"({POLICIES}, {TOOLS}, {WORLD_CLASS})", target).encode())


def with_target(source: str, target: Target) -> str:
    """Return a file with those of the target's names above it that it uses."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    used_names = {node.id for node in names if isinstance(node.ctx, ast.Load)} - _bound_names(tree)
    parts = []
    if POLICIES in used_names:
        parts.append(f"{POLICIES} = _json.loads(r'''\n{_raw(target.policies)}\n''')")
    if TOOLS in used_names:
        parts.append(f"{TOOLS} = _json.loads(r'''\n{_raw(target.tools)}\n''')")
    if target.world is not None and WORLD_CLASS in used_names:
        parts.append(_world_section(target.world, target.tools))
    if not parts:
        return source
    lines = source.split("\n")
    start = _first_line(tree)
    block = "\n".join([START, "import json as _json", "", *parts, END, "\n\n"])
    return "\n".join(lines[:start]) + ("\n" if start else "") + block + "\n".join(lines[start:])


def without_target(source: str) -> str:
    """Return a file as its model wrote it."""
    return _BLOCK.sub("", source, count=1)


def report_of_file(report: str, source: str) -> str:
    """Return a report on ``source`` with the line numbers of the file that its model wrote."""
    match = _BLOCK.search(source)
    if match is None:
        return report
    first, count = source[: match.start()].count("\n"), match[0].count("\n")
    return _LINE_NUMBER.sub(
        lambda number: f"line {int(number[1]) - count}" if int(number[1]) > first + count else number[0], report
    )


def stands_on_world(source: str) -> bool:
    """Return whether the target's world is above a file."""
    match = _BLOCK.search(source)
    return match is not None and f"{WORLD_CLASS} = _world()" in match[0]


def _bound_names(tree: ast.Module) -> set[str]:
    """Return the names that a file defines at its top level."""
    bound: set[str] = set()
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                bound.add(name)
            case ast.Assign(targets=targets):
                bound.update(target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                bound.add(name)
    return bound


def _first_line(tree: ast.Module) -> int:
    """Return the number of lines that have to stay first: the docstring and imports from ``__future__``."""
    end = 0
    for position, node in enumerate(tree.body):
        match node:
            case ast.Expr(value=ast.Constant(value=str())) if position == 0:
                end = node.end_lineno or 0
            case ast.ImportFrom(module="__future__"):
                end = node.end_lineno or 0
            case _:
                break
    return end


def _arguments(tools: Iterable[Tool]) -> dict[str, list[list[str] | None]]:
    """Return for each tool its required arguments and all of them; None if its schema does not list them."""
    schemas = {str(tool_function(tool).get("name", "")): tool_function(tool).get("parameters") for tool in tools}
    return {
        name: [
            [str(argument) for argument in required] if isinstance(required := schema.get("required"), list) else [],
            list(map(str, schema["properties"])) if isinstance(schema.get("properties"), dict) else None,
        ]
        for name, schema in schemas.items()
        if isinstance(schema, dict)
    }


def _world_section(world: WorldData, tools: Iterable[Tool]) -> str:
    encoded = world.encoded()
    lines = [encoded[start : start + _LINE] for start in range(0, len(encoded), _LINE)]
    text = "\n".join(f"    {json.dumps(line)}" for line in lines)
    body = (
        f"{runtime_source()}\nimport base64\nimport zlib\n\n"
        f"_DATA = json.loads(zlib.decompress(base64.b85decode(\n{text}\n)))\n"
        f"_ARGUMENTS = json.loads({json.dumps(json.dumps(_arguments(tools)))})\n\n\n{world.functions_source}"
        f"{_WORLD_CLASS.replace('_DATA_AND_FUNCTIONS', f'_DATA{world.arguments}')}"
    )
    return (
        f"WORLD = {json.dumps(world.digest)}\nWORLD_OMITS = {json.dumps(world.omitted)}\n\n\n"
        f"def _world():\n{indented(body)}\n\n"
        f"{WORLD_CLASS} = _world()"
    )


def _raw(values: Iterable[object]) -> str:
    """Return JSON, one value per line, that may stand between three single quotes."""
    return ("[\n" + ",\n".join(json.dumps(value) for value in values) + "\n]").replace("'", "\\u0027")
