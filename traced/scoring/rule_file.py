"""The rule file, read and checked: every mistake with its line, its rule, and what is allowed there.

Invariants: a file is used whole or not at all; ``hash`` tells one version from another.
How it fails: ``RuleFileError``.

At which line each value of a TOML document stands; the standard library's reader does not tell.

Invariants: only for texts that ``tomllib`` reads, so that nothing has to be checked here; a path is what leads to a
value in what ``tomllib`` gives: keys and, in arrays, indices. Lines count from 1. Not covered: columns.
"""

import hashlib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from traced.scoring.conditions import UNKNOWN_KEY
from traced.scoring.databases import Databases
from traced.scoring.errors import RuleFileError
from traced.scoring.rules import Rules, RuleTables

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


SHOWN = 20
HINT = "traced outcomes check FILE"


def read_rules(path: Path) -> Rules:
    """The rules of a file; raises ``RuleFileError``."""
    try:
        told = path.read_bytes()
    except OSError as error:
        raise RuleFileError(f"{path} cannot be read: {error.strerror}", hint="outcomes.rules names the file") from None
    try:
        text = told.decode()
        raw = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RuleFileError(f"{path} is no TOML: {error}", hint=HINT) from None
    try:
        read = RuleTables.model_validate(raw)
        mistakes = list(_mistakes_between(read))
    except ValidationError as error:
        mistakes = [(_place(one), _said(one)) for one in error.errors()]
    if mistakes:
        raise RuleFileError(_told(path, raw, lines_of(text), mistakes), hint=HINT)
    return Rules(read.rule, Databases(read.databases, path.absolute().parent), hashlib.sha256(told).hexdigest())


@dataclass
class FollowedRules:
    """The rules of a file as it is by now: a file that changes is read again, one that is bad leaves the last good one.

    ``trouble`` says what keeps it from being used, "" where nothing does.
    """

    path: Path
    trouble: str = ""
    _rules: Rules | None = None
    _seen: tuple[int, int] | None = field(default=None)

    def now(self) -> Rules | None:
        """The rules; None where the file was never good."""
        try:
            stat = self.path.stat()
            seen = (stat.st_mtime_ns, stat.st_size)
        except OSError:
            seen = None
        if seen is None or seen != self._seen:
            self._seen = seen
            try:
                self._rules, self.trouble = read_rules(self.path), ""
            except RuleFileError as error:
                self.trouble = str(error)
        return self._rules


def _mistakes_between(read: RuleTables) -> Iterator[tuple[Where, str]]:
    """What no table can see alone."""
    names: dict[str, int] = {}
    for number, rule in enumerate(read.rule):
        first = names.setdefault(rule.name, number)
        if first != number:
            yield ("rule", number, "name"), f"rule {first + 1} has this name as well; verdicts are told by it"
        if rule.check is not None and rule.check.database not in read.databases:
            known = ", ".join(read.databases) or "none"
            said = f"no database {rule.check.database!r}; described under [databases.NAME] are: {known}"
            yield ("rule", number, "check", "database"), said


def _place(error: Any) -> Where:
    key = (error["ctx"]["key"],) if error["type"] == UNKNOWN_KEY else ()
    return (*error["loc"], *key)


def _said(error: Any) -> str:
    said = str(error["msg"]).removeprefix("Value error, ")
    return f"{said[:1].lower()}{said[1:]}"


def _told(path: Path, raw: Any, lines: dict[Where, int], mistakes: list[tuple[Where, str]]) -> str:
    found = sorted((_line(lines, where), where, said) for where, said in mistakes)
    told = [f"{path}, line {line}{_rule(raw, where)}: {_key(where)}{said}" for line, where, said in found[:SHOWN]]
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return "\n".join([*told, *more])


def _line(lines: dict[Where, int], where: Where) -> int:
    """The line of the value, or of the nearest one around it."""
    return next((lines[where[:end]] for end in range(len(where), 0, -1) if where[:end] in lines), 1)


def _rule(raw: Any, where: Where) -> str:
    if where[:1] != ("rule",) or len(where) < 2 or not isinstance(where[1], int):
        return ""
    rule = raw["rule"][where[1]] if isinstance(raw.get("rule"), list) else {}
    name = rule.get("name") if isinstance(rule, dict) else None
    return f", rule {where[1] + 1}" + (f" {name!r}" if isinstance(name, str) else "")


def _key(where: Where) -> str:
    inside = where[2:] if where[:1] == ("rule",) else where
    shown = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in inside).lstrip(".")
    return f"{shown}: " if shown else ""
