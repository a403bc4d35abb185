"""Modules of tool functions that are refused before they run."""

import pytest

from sandbox.admission.static_analysis import inspect_module

SOUND = '''"""Functions."""
import math
from collections import Counter

LIMIT: int = 3


class Rate:
    pass


def area(arguments, world):
    return math.pi * arguments["r"] ** 2


TOOLS = {"area": area}
WRITES = set()
'''


def test_a_sound_module_passes() -> None:
    assert inspect_module(SOUND, 32_000) == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("def broken(:", "does not parse"),
        ("import os", "imports os"),
        ("from __future__ import annotations", "imports from __future__"),
        ("from sandbox.contract import Task", "imports from sandbox.contract"),
        ("print('loaded')", "calls print"),
        ("for _ in range(3): pass", "is no import, function, class or assignment"),
        ("while True: pass", "is no import, function, class or assignment"),
        ("return {}", "is no import, function, class or assignment"),
        ("open('x')", "calls open"),
        ("x = eval('1')", "uses eval"),
        ("import random\nrng = random.Random()", "seeds random.Random from nothing"),
        ("import datetime\ndef f(a, w): return datetime.datetime.now()", "reads the clock"),
        ("def f(a, w):\n    global LIMIT\n    LIMIT = 2", "has a state"),
        ("TOOLS = dict()", "binds no dictionary of functions to TOOLS"),
    ],
)
def test_a_module_with_a_forbidden_line_is_refused_with_its_reason(line: str, reason: str) -> None:
    (refusal, *_) = inspect_module(f"{SOUND}{line}\n", 32_000)
    assert reason in refusal


def test_a_module_without_a_table_or_too_large_is_refused() -> None:
    assert "TOOLS" in inspect_module("x = 1\n", 100)[0]
    assert inspect_module(SOUND, 100) == [f"{len(SOUND)} bytes, more than 100"]
