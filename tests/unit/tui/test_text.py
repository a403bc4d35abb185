"""Sanitizing: any text becomes harmless terminal text of bounded length."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as some

from store.text import BLOCK, LINE, MAX_MARKS, sanitize_block, sanitize_line
from tui.text import cell

ANY_TEXT = some.text(some.characters(), max_size=400)  # includes lone surrogates
HARMFUL = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
MAX_EXPANSION = 10  # length of the longest replacement of one character: ‹U+10FFFF›
TAIL = 40  # the note on how much was cut off


def harmful(text: str, but: str = "") -> set[str]:
    return {sign for sign in text if unicodedata.category(sign) in HARMFUL and sign not in but}


@given(ANY_TEXT)
def test_a_line_holds_nothing_that_a_terminal_obeys(text: str) -> None:
    sanitized = sanitize_line(text)
    assert harmful(sanitized) == set()
    assert len(sanitized) <= MAX_EXPANSION * LINE + TAIL
    sanitized.encode("utf-8")


@given(ANY_TEXT)
def test_a_block_holds_lines_and_nothing_else_that_a_terminal_obeys(text: str) -> None:
    sanitized = sanitize_block(text, 100)
    assert harmful(sanitized, but="\n") == set()
    assert len(sanitized) <= MAX_EXPANSION * 100 + TAIL
    sanitized.encode("utf-8")


@given(ANY_TEXT)
def test_a_cell_is_never_read_as_markup(text: str) -> None:
    rendered = cell(text)
    assert rendered.plain == sanitize_line(text)
    assert rendered.spans == []


@given(some.text(some.characters(min_codepoint=0x20, max_codepoint=0x7E)))
def test_plain_text_stays_as_it_is(text: str) -> None:
    assert sanitize_line(text, 10_000) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred\x1b]0;title\x07", "␛[31mred␛]0;title␇"),
        ("abc\u202edef", "abc‹U+202E›def"),
        ("zero\u200bwidth", "zero‹U+200B›width"),
        ("half \ud800", "half \ufffd"),
        ("two\nlines\tand\rmore", "two⏎lines    and␍more"),
        ("\x9b2J", "‹U+009B›2J"),
        ("[bold]no[/]", "[bold]no[/]"),
        ("a" + "\u0301" * 50, "a" + "\u0301" * MAX_MARKS),
        ("a" + "\u20dd\u0489\u0e49" * 20, "a" + ("\u20dd\u0489\u0e49" * 20)[:MAX_MARKS]),
        ("\u0e17\u0e35\u0e48", "\u0e17\u0e35\u0e48"),
        ("\u3164\u2800", "‹U+3164›‹U+2800›"),
        ("\u0378\u0383\u03a2\u0530", "‹U+0378›‹U+0383›‹U+03A2›‹U+0530›"),
        ("wide \u3000 space", "wide   space"),
    ],
)
def test_known_tricks_are_shown_by_their_names(text: str, expected: str) -> None:
    assert sanitize_line(text) == expected


def test_what_is_left_out_is_counted() -> None:
    assert sanitize_line("x" * 1_000_000).endswith("… (+999,800 characters)")
    assert sanitize_block("y\n" * BLOCK).endswith("… 20,000 more characters are not shown")
