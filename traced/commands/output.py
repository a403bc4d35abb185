"""What a verb says, and where: results on stdout, progress and errors on stderr.

With ``--json`` stdout ends with exactly one JSON object on one line; NaN and infinities become null, because JSON has
neither.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

console = Console(soft_wrap=True)
progress = Console(stderr=True)


def print_json(value: Any) -> None:
    """Print ``value`` (mappings, sequences, dataclasses, times, paths) as one line of JSON on stdout."""
    sys.stdout.write(json.dumps(plain(value), allow_nan=False) + "\n")
    sys.stdout.flush()


def plain(value: Any) -> Any:
    """``value`` in terms of JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, Path) else value


def bounded(value: float | None, low: float | None, high: float | None, sign: str = "") -> str:
    """A figure with its interval, where it has one."""
    if value is None:
        return "undefined"
    return f"{value:{sign}.2f}" + (
        f" [{low:{sign}.2f}, {high:{sign}.2f}]" if low is not None and high is not None else ""
    )
