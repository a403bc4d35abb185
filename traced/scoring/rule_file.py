"""Read and check a rule file: every mistake is reported with its line, its rule and what is allowed there.

A file is used as a whole or not at all. Line numbers come from a small TOML tokenizer, because ``tomllib`` reports none
for values; it runs only on texts that ``tomllib`` has accepted, so it checks nothing. Not covered: columns.
"""

import hashlib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from traced.scoring.conditions import UNKNOWN_KEY
from traced.scoring.databases import Databases
from traced.scoring.errors import RuleFileError
from traced.scoring.rules import Rules, RuleTables

# Maximum number of mistakes in one error message.
MAX_REPORTED = 20
HINT = "traced outcomes check FILE"

# The keys and array indices that lead to a value.
TomlPath = tuple[str | int, ...]

_TOKEN = re.compile(
    r'''(?P<space>[ \t\r]+|\#[^\n]*) | (?P<line>\n)
      | (?P<string>"""(?:[^\\]|\\.)*?"{3,5} | \'\'\'.*?'{3,5} | "(?:[^"\\\n]|\\.)*" | '[^'\n]*')
      | (?P<mark>[\[\]{},=.]) | (?P<bare>[^\s\#\[\]{},=."\']+)''',
    re.VERBOSE | re.DOTALL,
)


@dataclass
class WatchedRules:
    """The rules of a file that is read again when it changes; while it has mistakes, its last valid rules are used.

    ``problem`` says why the file cannot be used, "" if it can.
    """

    path: Path
    problem: str = ""
    _rules: Rules | None = None
    _version: tuple[int, int] | None = field(default=None)

    def current(self) -> Rules | None:
        """Read the file if it has changed and return the last valid rules; None if there never were any."""
        try:
            stat = self.path.stat()
            version = (stat.st_mtime_ns, stat.st_size)
        except OSError:
            version = None
        # A missing file is read too: its error becomes ``problem``.
        if version is None or version != self._version:
            self._version = version
            try:
                self._rules, self.problem = read_rules(self.path), ""
            except RuleFileError as error:
                self.problem = str(error)
        return self._rules


def read_rules(path: Path) -> Rules:
    """Read the rules of a file; raises ``RuleFileError``."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RuleFileError(f"{path} cannot be read: {error.strerror}", hint="check outcomes.rules") from None
    try:
        text = content.decode()
        raw = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RuleFileError(f"{path} is not valid TOML: {error}", hint=HINT) from None
    try:
        tables = RuleTables.model_validate(raw)
        mistakes = list(_cross_table_mistakes(tables))
    except ValidationError as error:
        mistakes = [(_place(details), _message(details)) for details in error.errors()]
    if mistakes:
        raise RuleFileError(_report(path, raw, lines_of(text), mistakes), hint=HINT)
    return Rules(tables.rule, Databases(tables.databases, path.absolute().parent), hashlib.sha256(content).hexdigest())


def lines_of(text: str) -> dict[TomlPath, int]:
    """Return the line of every value and table header of a valid TOML text, counted from 1."""
    return _Reader(text).read()


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int


class _Reader:
    def __init__(self, text: str) -> None:
        self._tokens = [token for token in _tokens(text) if token.kind != "space"]
        self._position = 0
        self._lines: dict[TomlPath, int] = {}
        # The number of elements of each array of tables so far.
        self._tables: dict[TomlPath, int] = {}

    def read(self) -> dict[TomlPath, int]:
        base: TomlPath = ()
        while self._position < len(self._tokens):
            token = self._next()
            if token.text == "[" and token.kind == "mark":
                base = self._header(token.line)
            elif token.kind != "line":
                self._position -= 1
                self._pair(base)
        return self._lines

    def _header(self, line: int) -> TomlPath:
        is_array = self._take("[")
        keys = self._keys("]")
        if is_array:
            self._take("]")
        path: TomlPath = ()
        for number, key in enumerate(keys):
            path = (*path, key)
            self._lines.setdefault(path, line)
            if number == len(keys) - 1 and is_array:
                self._tables[path] = self._tables.get(path, 0) + 1
            if path in self._tables:
                path = (*path, self._tables[path] - 1)
                self._lines.setdefault(path, line)
        return path

    def _pair(self, base: TomlPath) -> None:
        line = self._tokens[self._position].line
        for key in self._keys("="):
            base = (*base, key)
            self._lines.setdefault(base, line)
        self._value(base)

    def _keys(self, end: str) -> list[str]:
        keys: list[str] = []
        while (token := self._next()).text != end or token.kind != "mark":
            if token.kind == "string":
                keys.append(tomllib.loads(f"key = {token.text}")["key"])
            elif token.kind == "bare":
                keys.append(token.text)
        return keys

    def _value(self, path: TomlPath) -> None:
        token = self._next()
        if token.kind != "mark":
            while self._position < len(self._tokens) and self._tokens[self._position].kind == "bare":
                # A date and its time are two tokens.
                self._position += 1
            self._skip_fraction()
        elif token.text == "[":
            self._items(path)
        else:
            self._table(path)

    def _skip_fraction(self) -> None:
        while self._position < len(self._tokens) and self._tokens[self._position].text == ".":
            self._position += 2

    def _items(self, path: TomlPath) -> None:
        number = 0
        while not self._close("]"):
            self._lines[(*path, number)] = self._tokens[self._position].line
            self._value((*path, number))
            number += 1

    def _table(self, path: TomlPath) -> None:
        while not self._close("}"):
            self._pair(path)

    def _close(self, mark: str) -> bool:
        """Skip line breaks and commas; returns whether the bracket closes here."""
        while self._tokens[self._position].kind == "line" or self._tokens[self._position].text == ",":
            self._position += 1
        return self._take(mark)

    def _take(self, mark: str) -> bool:
        token = self._tokens[self._position] if self._position < len(self._tokens) else None
        if token is None or token.kind != "mark" or token.text != mark:
            return False
        self._position += 1
        return True

    def _next(self) -> _Token:
        token = self._tokens[self._position]
        self._position += 1
        return token


def _tokens(text: str) -> Iterator[_Token]:
    line = 1
    for match in _TOKEN.finditer(text):
        yield _Token(str(match.lastgroup), match.group(), line)
        line += match.group().count("\n")


def _cross_table_mistakes(tables: RuleTables) -> Iterator[tuple[TomlPath, str]]:
    names: dict[str, int] = {}
    for number, rule in enumerate(tables.rule):
        first = names.setdefault(rule.name, number)
        if first != number:
            yield (
                ("rule", number, "name"),
                f"rule {first + 1} has the same name; names must be unique because verdicts are stored by name",
            )
        if rule.check is not None and rule.check.database not in tables.databases:
            available = ", ".join(tables.databases) or "none"
            message = f"no database {rule.check.database!r}; the databases under [databases.NAME] are: {available}"
            yield ("rule", number, "check", "database"), message


def _place(error: ErrorDetails) -> TomlPath:
    key = (error["ctx"]["key"],) if error["type"] == UNKNOWN_KEY else ()
    return (*error["loc"], *key)


def _message(error: ErrorDetails) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{message[:1].lower()}{message[1:]}"


def _report(path: Path, raw: dict[str, Any], lines: dict[TomlPath, int], mistakes: list[tuple[TomlPath, str]]) -> str:
    located = sorted((_line(lines, place), place, message) for place, message in mistakes)
    reports = [
        f"{path}, line {line}{_rule_name(raw, place)}: {_key(place)}{message}"
        for line, place, message in located[:MAX_REPORTED]
    ]
    rest = [f"and {len(located) - MAX_REPORTED} more"] if len(located) > MAX_REPORTED else []
    return "\n".join([*reports, *rest])


def _line(lines: dict[TomlPath, int], place: TomlPath) -> int:
    """Return the line of a value, or of the nearest table or array around it."""
    return next((lines[place[:end]] for end in range(len(place), 0, -1) if place[:end] in lines), 1)


def _rule_name(raw: dict[str, Any], place: TomlPath) -> str:
    if place[:1] != ("rule",) or len(place) < 2 or not isinstance(place[1], int):
        return ""
    rule = raw["rule"][place[1]] if isinstance(raw.get("rule"), list) else {}
    name = rule.get("name") if isinstance(rule, dict) else None
    return f", rule {place[1] + 1}" + (f" {name!r}" if isinstance(name, str) else "")


def _key(place: TomlPath) -> str:
    inside = place[2:] if place[:1] == ("rule",) else place
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inside).lstrip(".")
    return f"{key}: " if key else ""
