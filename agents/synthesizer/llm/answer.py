"""Extracts the Python file from a model's answer: without its code fence and the prose around it.

This module raises no exceptions and executes none of the text. Of several files that define ``Environment``, one that
parses is preferred, then one with more methods of the contract, then the last. Without such a file the whole answer
(after the model's reasoning) is returned, so that it is stored and refused. A file split over several fences is not
covered.
"""

import ast
import re
import warnings
from collections.abc import Iterator

from store.text import replace_surrogates

# Characters; longer texts are not parsed here.
MAX_PARSED = 512 * 1024
# Lines of prose after an unfenced file that are tried as its end.
MAX_CUTS = 6
# Fences tried as the beginning of a file that contains fences.
MAX_NESTED_FENCES = 8
CONTRACT = ("reset", "step", "done", "score", "oracle")
_CLASS = re.compile(r"^class Environment\b", re.MULTILINE)
_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[^`]*$")
_METHOD = re.compile(rf"^[ \t]+def ({'|'.join(CONTRACT)})\b", re.MULTILINE)
_BEGINNING = re.compile(r"^(?:\"\"\"|'''|#|import |from \w|class |def |@|[A-Z_]+ *[:=])")


def extract_file(answer: str) -> str:
    """Return the file in a model's answer, or the whole answer after the reasoning if there is none."""
    text = replace_surrogates(answer).replace("\r\n", "\n").replace("\0", "\ufffd").removeprefix("\ufeff")
    reply = text.rpartition("</think>")[2]
    reply = reply if reply.strip() else text
    candidates = [block for block in _fenced(reply) if holds_environment(block)]
    if not candidates and holds_environment(reply):
        candidates = [_without_prose(reply)]
    source = max(enumerate(candidates), key=_preference, default=(0, reply))[1]
    return f"{source.strip()}\n"


def holds_environment(text: str) -> bool:
    """Return whether a text defines a top-level class ``Environment``; the text is not parsed."""
    return _CLASS.search(text) is not None


def _preference(numbered: tuple[int, str]) -> tuple[bool, int, int]:
    """Return the sort key of a candidate: whether it parses, its number of contract methods, its position."""
    number, text = numbered
    return _error_line(text) is None, len(set(_METHOD.findall(text))), number


def _fenced(text: str) -> Iterator[str]:
    """Yield the fenced blocks, and the text from each of the first fences to the last, as a file may contain fences."""
    lines = text.split("\n")
    position = fence_count = 0
    while position < len(lines):
        fence = _FENCE.match(lines[position])
        position += 1
        if fence is None:
            continue
        start, fence_count = position, fence_count + 1
        while position < len(lines) and not _closes(lines[position], fence[2]):
            position += 1
        yield _dedented(lines[start:position], fence[1])
        if fence_count <= MAX_NESTED_FENCES:
            last = next((n for n in reversed(range(position + 1, len(lines))) if _closes(lines[n], fence[2])), position)
            if last > position:
                yield _dedented(lines[start:last], fence[1])
        position += 1


def _closes(line: str, fence: str) -> bool:
    stripped = line.strip()
    return len(stripped) >= len(fence) and not stripped.strip(fence[0])


def _dedented(lines: list[str], indent: str) -> str:
    return "\n".join(line.removeprefix(indent) for line in lines)


def _without_prose(text: str) -> str:
    """Return an unfenced file, from its first line of Python to the line where prose no longer parses."""
    lines = text.split("\n")
    first = next(n for n, line in enumerate(lines) if line.startswith("class Environment"))
    start = next((n for n in range(first + 1) if _BEGINNING.match(lines[n])), first)
    rest = lines[start:]
    for _ in range(MAX_CUTS):
        error_line = _error_line("\n".join(rest))
        if error_line is None:
            return "\n".join(rest)
        if not first - start < error_line - 1 < len(rest):
            break
        rest = rest[: error_line - 1]
    return "\n".join(lines[start:])


def _error_line(text: str) -> int | None:
    """Return the number of the line that does not parse, 0 if unknown, None if the text parses."""
    if len(text) > MAX_PARSED:
        return 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except SyntaxError as error:
        return error.lineno or 0
    except (ValueError, RecursionError, MemoryError):
        return 0
    return None
