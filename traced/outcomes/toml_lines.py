"""At which line each value of a TOML document stands; the standard library's reader does not tell.

Invariants: only for texts that ``tomllib`` reads, so that nothing has to be checked here; a path is what leads to a
value in what ``tomllib`` gives: keys and, in arrays, indices. Lines count from 1. Not covered: columns.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass

Where = tuple[str | int, ...]

_TOKEN = re.compile(
    r'''(?P<space>[ \t\r]+|\#[^\n]*) | (?P<line>\n)
      | (?P<string>"""(?:[^\\]|\\.)*?"{3,5} | \'\'\'.*?'{3,5} | "(?:[^"\\\n]|\\.)*" | '[^'\n]*')
      | (?P<mark>[\[\]{},=.]) | (?P<bare>[^\s\#\[\]{},=."\']+)''',
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int


def lines_of(text: str) -> dict[Where, int]:
    """The line of every value, and of every table's header."""
    return _Reader(text).read()


class _Reader:
    def __init__(self, text: str) -> None:
        self._tokens = [token for token in _tokens(text) if token.kind != "space"]
        self._at = 0
        self._found: dict[Where, int] = {}
        self._tables: dict[Where, int] = {}  # how many an array of tables has so far

    def read(self) -> dict[Where, int]:
        base: Where = ()
        while self._at < len(self._tokens):
            token = self._next()
            if token.text == "[" and token.kind == "mark":
                base = self._header(token.line)
            elif token.kind != "line":
                self._at -= 1
                self._pair(base)
        return self._found

    def _header(self, line: int) -> Where:
        several = self._take("[")
        keys = self._keys("]")
        if several:
            self._take("]")
        where: Where = ()
        for number, key in enumerate(keys):
            where = (*where, key)
            self._found.setdefault(where, line)
            if number == len(keys) - 1 and several:
                self._tables[where] = self._tables.get(where, 0) + 1
            if where in self._tables:
                where = (*where, self._tables[where] - 1)
                self._found.setdefault(where, line)
        return where

    def _pair(self, base: Where) -> None:
        line = self._tokens[self._at].line
        for key in self._keys("="):
            base = (*base, key)
            self._found.setdefault(base, line)
        self._value(base)

    def _keys(self, end: str) -> list[str]:
        keys: list[str] = []
        while (token := self._next()).text != end or token.kind != "mark":
            if token.kind == "string":
                keys.append(tomllib.loads(f"key = {token.text}")["key"])
            elif token.kind == "bare":
                keys.append(token.text)
        return keys

    def _value(self, where: Where) -> None:
        token = self._next()
        if token.kind != "mark":
            while self._at < len(self._tokens) and self._tokens[self._at].kind == "bare":
                self._at += 1  # a date and its time
            self._rest_of_number()
        elif token.text == "[":
            self._items(where)
        else:
            self._table(where)

    def _rest_of_number(self) -> None:
        while self._at < len(self._tokens) and self._tokens[self._at].text == ".":
            self._at += 2

    def _items(self, where: Where) -> None:
        number = 0
        while not self._close("]"):
            self._found[(*where, number)] = self._tokens[self._at].line
            self._value((*where, number))
            number += 1

    def _table(self, where: Where) -> None:
        while not self._close("}"):
            self._pair(where)

    def _close(self, mark: str) -> bool:
        """Go over line breaks and commas; whether the bracket closes here."""
        while self._tokens[self._at].kind == "line" or self._tokens[self._at].text == ",":
            self._at += 1
        return self._take(mark)

    def _take(self, mark: str) -> bool:
        token = self._tokens[self._at] if self._at < len(self._tokens) else None
        if token is None or token.kind != "mark" or token.text != mark:
            return False
        self._at += 1
        return True

    def _next(self) -> _Token:
        token = self._tokens[self._at]
        self._at += 1
        return token


def _tokens(text: str) -> Iterator[_Token]:
    line = 1
    for found in _TOKEN.finditer(text):
        yield _Token(str(found.lastgroup), found.group(), line)
        line += found.group().count("\n")
