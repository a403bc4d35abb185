"""Writes the single file of an environment: its data as JSON, then the runtime's own source.

Invariants: the same data gives the same bytes; the file imports the standard library and ``sandbox.contract`` only, and
defines ``Environment``. Template lines are one each, so that a person can read and compare them.
"""

import inspect
import json
import re
from typing import Any

from agents.synthesizer import renaming, runtime

_LOCAL_IMPORT = re.compile(r"^from agents\.synthesizer\.\w+ import [^\n]*\n", re.MULTILINE)


def environment_source(data: dict[str, Any]) -> str:
    """The file's text; ``data`` holds JSON values only."""
    about = (
        f"Synthetic environment for the capability {data['capability']}: {len(data['templates'])} scenario templates."
    )
    return (
        f'"""{about}\n\nWritten by the builtin synthesizer from recorded conversations; the data comes first, then the'
        ' runtime that\nevery such environment shares.\n"""\n\nimport json\n\n'
        f"DATA = json.loads(r'''\n{_json(data)}\n''')\n\n\n"
        f"# --- renaming ---\n{_LOCAL_IMPORT.sub('', inspect.getsource(renaming))}\n\n"
        f"# --- runtime ---\n{_LOCAL_IMPORT.sub('', inspect.getsource(runtime))}\n\n"
        "class Environment(TemplateEnvironment):\n"
        '    """This file\'s environment: the shared runtime over this file\'s data."""\n\n'
        "    def __init__(self) -> None:\n        super().__init__(DATA)\n"
    )


def _json(data: dict[str, Any]) -> str:
    """JSON, one line per field and per entry of a list field; quotes that would end the literal are escaped."""
    rows = []
    for key, value in data.items():
        if isinstance(value, list) and value:
            lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in value)
            rows.append(f"{json.dumps(key)}: [\n{lines}\n]")
        else:
            rows.append(f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}")
    return ("{\n" + ",\n".join(rows) + "\n}").replace("'", "\\u0027")
