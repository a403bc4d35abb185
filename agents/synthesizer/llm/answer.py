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

LARGEST = 512 * 1024  # characters that are parsed here at all
CUTS = 6  # lines of prose after a bare file that are tried as its end
WIDE = 8  # fences that are tried as the beginning of a file that has fences in it
CONTRACT = ("reset", "step", "done", "score", "oracle")
_CLASS = re.compile(r"^class Environment\b", re.MULTILINE)
_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[^`]*$")
_METHOD = re.compile(rf"^[ \t]+def ({'|'.join(CONTRACT)})\b", re.MULTILINE)
_BEGINNING = re.compile(r"^(?:\"\"\"|'''|#|import |from \w|class |def |@|[A-Z_]+ *[:=])")


def file_in(answer: str) -> str:
    """The file, or all that was said where there is none."""
    text = replace_surrogates(answer).replace("\r\n", "\n").replace("\0", "\ufffd").removeprefix("\ufeff")
    said = text.rpartition("</think>")[2]
    said = said if said.strip() else text
    fenced = [block for block in _fenced(said) if holds_environment(block)]
    if not fenced and holds_environment(said):
        fenced = [_bare(said)]
    found = max(enumerate(fenced), key=_standing, default=(0, said))[1]
    return f"{found.strip()}\n"


def holds_environment(text: str) -> bool:
    """Whether it defines a class ``Environment`` at its top level, as far as can be seen without parsing it."""
    return _CLASS.search(text) is not None


def _standing(numbered: tuple[int, str]) -> tuple[bool, int, int]:
    """What makes one file more likely the answer than another: it parses, it has the contract, it comes last."""
    number, text = numbered
    return _error_line(text) is None, len(set(_METHOD.findall(text))), number


def _fenced(text: str) -> Iterator[str]:
    """The fenced blocks, and the text from each of the first fences to the last: the file may have fences in it."""
    lines = text.split("\n")
    at = found = 0
    while at < len(lines):
        opening = _FENCE.match(lines[at])
        at += 1
        if opening is None:
            continue
        begin, found = at, found + 1
        while at < len(lines) and not _closes(lines[at], opening[2]):
            at += 1
        yield _dedented(lines[begin:at], opening[1])
        if found <= WIDE:
            last = next((n for n in reversed(range(at + 1, len(lines))) if _closes(lines[n], opening[2])), at)
            if last > at:
                yield _dedented(lines[begin:last], opening[1])
        at += 1


def _closes(line: str, fence: str) -> bool:
    told = line.strip()
    return len(told) >= len(fence) and not told.strip(fence[0])


def _dedented(lines: list[str], indent: str) -> str:
    return "\n".join(line.removeprefix(indent) for line in lines)


def _bare(text: str) -> str:
    """A file without a fence: from its first line of Python on, up to where prose after it keeps it from parsing."""
    lines = text.split("\n")
    first = next(n for n, line in enumerate(lines) if line.startswith("class Environment"))
    begin = next((n for n in range(first + 1) if _BEGINNING.match(lines[n])), first)
    kept = lines[begin:]
    for _ in range(CUTS):
        wrong = _error_line("\n".join(kept))
        if wrong is None:
            return "\n".join(kept)
        if not first - begin < wrong - 1 < len(kept):
            break
        kept = kept[: wrong - 1]
    return "\n".join(lines[begin:])


def _error_line(text: str) -> int | None:
    """The line on which it does not parse, 0 where none can be named, None where it parses."""
    if len(text) > LARGEST:
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
