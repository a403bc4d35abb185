"""The rule file, read and checked: every mistake with its line, its rule, and what is allowed there.

Invariants: a file is used whole or not at all; ``hash`` tells one version from another.
How it fails: ``RuleFileError``.
"""

import hashlib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from traced.outcomes.databases import Databases
from traced.outcomes.errors import RuleFileError
from traced.outcomes.rules import Rules, RuleTables
from traced.outcomes.tables import UNKNOWN_KEY
from traced.outcomes.toml_lines import Where, lines_of

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
