"""The Python file in a model's answer: out of its fence, without the words around it.

Invariants: never raises and runs nothing of what it reads; of several fenced files that define ``Environment`` the
last one that parses and has the most of the contract counts, so that a sketch before the file does not; where no file
is found, what was said comes back as it is, so that it is kept and refused as what it is. The same answer always
gives the same text: valid Unicode, lines that end in a newline. Not covered: a file in pieces over several fences.
"""

import ast
import re
import warnings
from collections.abc import Iterator

from store.text import replace_surrogates

MAX_PARSED = 512 * 1024  # characters that are parsed here at all
MAX_CUTS = 6  # lines of prose after a bare file that are tried as its end
MAX_NESTED_FENCES = 8  # fences that are tried as the beginning of a file that has fences in it
CONTRACT = ("reset", "step", "done", "score", "oracle")
_CLASS = re.compile(r"^class Environment\b", re.MULTILINE)
_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[^`]*$")
_METHOD = re.compile(rf"^[ \t]+def ({'|'.join(CONTRACT)})\b", re.MULTILINE)
_BEGINNING = re.compile(r"^(?:\"\"\"|'''|#|import |from \w|class |def |@|[A-Z_]+ *[:=])")


def extract_file(answer: str) -> str:
    """The file, or all that was said where there is none."""
    text = replace_surrogates(answer).replace("\r\n", "\n").replace("\0", "\ufffd").removeprefix("\ufeff")
    reply = text.rpartition("</think>")[2]
    reply = reply if reply.strip() else text
    candidates = [block for block in _fenced(reply) if holds_environment(block)]
    if not candidates and holds_environment(reply):
        candidates = [_without_prose(reply)]
    source = max(enumerate(candidates), key=_preference, default=(0, reply))[1]
    return f"{source.strip()}\n"


def holds_environment(text: str) -> bool:
    """Whether it defines a class ``Environment`` at its top level, as far as can be seen without parsing it."""
    return _CLASS.search(text) is not None


def _preference(numbered: tuple[int, str]) -> tuple[bool, int, int]:
    """What makes one file more likely the answer than another: it parses, it has the contract, it comes last."""
    number, text = numbered
    return _error_line(text) is None, len(set(_METHOD.findall(text))), number


def _fenced(text: str) -> Iterator[str]:
    """The fenced blocks, and the text from each of the first fences to the last: the file may have fences in it."""
    lines = text.split("\n")
    position = fence_count = 0
    while position < len(lines):
        opening = _FENCE.match(lines[position])
        position += 1
        if opening is None:
            continue
        start, fence_count = position, fence_count + 1
        while position < len(lines) and not _closes(lines[position], opening[2]):
            position += 1
        yield _dedented(lines[start:position], opening[1])
        if fence_count <= MAX_NESTED_FENCES:
            last = next(
                (n for n in reversed(range(position + 1, len(lines))) if _closes(lines[n], opening[2])), position
            )
            if last > position:
                yield _dedented(lines[start:last], opening[1])
        position += 1


def _closes(line: str, fence: str) -> bool:
    stripped = line.strip()
    return len(stripped) >= len(fence) and not stripped.strip(fence[0])


def _dedented(lines: list[str], indent: str) -> str:
    return "\n".join(line.removeprefix(indent) for line in lines)


def _without_prose(text: str) -> str:
    """A file without a fence: from its first line of Python on, up to where prose after it keeps it from parsing."""
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
    """The line on which it does not parse, 0 where none can be named, None where it parses."""
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
