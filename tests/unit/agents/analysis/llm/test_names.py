"""Which names are the same, which texts of a model are kept, and how items are packed into questions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.analyst.builtin import CANDIDATES
from agents.analyst.llm.aggregation import batches
from agents.analyst.llm.rendering import as_name, is_name, is_same_name, one_line


@given(st.lists(st.integers(1, 100), max_size=50), st.integers(100, 300))
def test_every_part_fits_and_nothing_is_lost(sizes: list[int], capacity: int) -> None:
    parts = batches(sizes, capacity)
    assert [place for part in parts for place in part] == list(range(len(sizes)))
    assert all(sum(sizes[place] for place in part) <= capacity for part in parts)
    assert all(parts)


@pytest.mark.parametrize(
    ("trajectory", "other", "shared"),
    [
        ("tool-calling-precision", "precise-tool-calls", True),
        ("look-before-change", "looking-before-changes", True),
        ("pre-condition-verification", "precondition-verification", True),
        ("verification-of-preconditions", "precondition-verification", True),
        ("date-reasoning", "data-reasoning", False),
        ("error-recovery", "error-prevention", False),
        ("moving-on", "moving-in", True),
    ],
)
def test_names_are_the_same_but_for_forms_and_order(trajectory: str, other: str, shared: bool) -> None:
    assert is_same_name(trajectory, other) is shared
    assert is_same_name(other, trajectory) is shared


def test_the_catalogues_names_are_names_and_none_is_near_another() -> None:
    names = [trajectory.name for trajectory in CANDIDATES]
    assert all(map(is_name, names))
    assert [(a, b) for a in names for b in names if a < b and is_same_name(a, b)] == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Look Before\nChange!", "look-before-change"),
        ("../../etc/passwd", "etc-passwd"),
        ("base", ""),
        ("grpo on target", ""),
        ("x@v1 y", "x-v1-y"),
        ("", ""),
        ("ein zwei drei vier fünf sechs", "ein-zwei-drei-vier-f"),
    ],
)
def test_an_invalid_name_is_converted_or_dropped(text: str, name: str) -> None:
    assert as_name(text) == name
    assert not is_name(text)


@given(st.text(), st.integers(5, 50))
def test_a_kept_text_is_one_printable_line(text: str, limit: int) -> None:
    line = one_line(text, limit)
    assert len(line) <= limit
    assert line.isprintable()
    line.encode()
