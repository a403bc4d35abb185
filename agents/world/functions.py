"""The source of a world's runtime, and of a module of tool functions that a model wrote.

A module stands in a function of the file, so that its names and those of the file do not meet and each restart of the
world makes its functions anew. Nothing is executed here; what a module may contain is checked by ``sandbox.admission``.
"""

import ast
import inspect
import re
from collections.abc import Sequence

from agents.world import runtime, values
from store.text import replace_surrogates

FUNCTIONS = "written_functions"
# What a module binds: tool -> function, and the tools of these that write.
TABLE, WRITES = "TOOLS", "WRITES"
_FENCE = re.compile(r"^```(?:python|py)?[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_LOCAL_IMPORT = re.compile(r"^from agents\.world\.\w+ import (?:\([^)]*\)|[^\n]*)\n", re.MULTILINE)
_TABLE = re.compile(rf"^{TABLE}\b", re.MULTILINE)


def extract_module(answer: str) -> str:
    """Return the module in a model's answer: the last fenced block that binds ``TOOLS``, else the whole answer."""
    text = replace_surrogates(answer).replace("\r\n", "\n").replace("\0", "\ufffd").rpartition("</think>")[2]
    blocks = [block for block in _FENCE.findall(text) if _TABLE.search(block)]
    return f"{(blocks[-1] if blocks else text).strip()}\n"


def runtime_source() -> str:
    """Return the runtime of a world as it is written into files; it imports the standard library only."""
    return f"{inspect.getsource(values)}\n\n{_LOCAL_IMPORT.sub('', inspect.getsource(runtime))}"


def functions_source(module: str) -> str:
    """Return the function ``written_functions`` of a file, which runs a module and returns its functions by tool.

    Raises:
        SyntaxError: The module does not parse.
    """
    return f"def {FUNCTIONS}():\n{indented(module).rstrip()}\n    return dict({TABLE})\n"


def indented(source: str) -> str:
    """Return a source as the body of a function; lines within a text that spans several stay as they are.

    Raises:
        SyntaxError: The source does not parse.
    """
    texts = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
        for line in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
    }
    return "\n".join(
        f"    {line}" if line and number not in texts else line
        for number, line in enumerate(source.split("\n"), start=1)
    )


def declared_writes(module: str) -> set[str]:
    """Return the tools that a module's ``WRITES`` names; none if it is no literal collection of texts."""
    node = _value(module, WRITES)
    names = node.elts if isinstance(node, ast.Set | ast.List | ast.Tuple) else []
    return _texts(names)


def declared_tools(module: str) -> set[str]:
    """Return the keys of a module's ``TOOLS`` that are texts; none if it is no dictionary display."""
    node = _value(module, TABLE)
    return _texts(node.keys) if isinstance(node, ast.Dict) else set()


def _texts(nodes: Sequence[ast.expr | None]) -> set[str]:
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _value(module: str, name: str) -> ast.expr | None:
    """Return the expression that a name of the module was bound to last."""
    try:
        body = ast.parse(module).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    values = [
        node.value
        for node in body
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    ]
    return values[-1] if values else None
