"""The small plots and the short number format beside them."""

import pytest

from tui.widgets.plots import braille, format_number


def dots(rows: list[str]) -> list[str]:
    """Return the braille plot with one character per dot."""
    bits = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
    return [
        "".join("x" if ord(sign) - 0x2800 & bit else "." for sign in row for bit in level)
        for row in rows
        for level in bits
    ]


def test_a_line_goes_from_the_low_left_to_the_high_right() -> None:
    assert dots(braille([(1, 0.0), (2, 1.0)], 2, 1, 0.0, 1.0)) == ["...x", "..x.", ".x..", "x..."]


def test_a_missing_value_is_a_gap() -> None:
    points = [(0, 0.0), (1, 0.0), (2, None), (3, 0.0)]
    assert dots(braille(points, 2, 1, 0.0, 1.0)) == ["....", "....", "....", "xx.x"]


def test_iterations_that_were_skipped_keep_their_room() -> None:
    assert dots(braille([(0, 1.0), (7, 1.0)], 4, 1, 0.0, 1.0))[0] == "xxxxxxxx"
    assert dots(braille([(0, 1.0), (1, None), (7, 1.0)], 4, 1, 0.0, 1.0))[0] == "x......x"


def test_one_value_is_one_dot() -> None:
    assert sum(row.count("x") for row in dots(braille([(5, 0.5)], 3, 2, 0.0, 1.0))) == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"), (0.66, "0.66"), (0.045, "0.045"), (0.0004, "4e-4"), (-0.0004, "-4e-4"), (-0.01, "-0.01"),
        (0.0996, "0.10"), (9.999, "10.00"), (12.34, "12.3"), (875.4, "875"), (1020.0, "1020"), (99_999.0, "99999"),
        (123_456.0, "1e5"), (-12.3, "-12.3"),
    ],
)  # fmt: skip
def test_numbers_take_five_characters_at_most(value: float, expected: str) -> None:
    assert format_number(value) == expected
    assert len(expected) <= 5
