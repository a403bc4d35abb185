"""Turn the commands off that a restored ``traced.toml`` names, until a person has read them.

A backup may come from anywhere, and the service would run what its settings name at the next start. The lines are kept
as comments. Not covered: settings that name addresses (webhooks, engines, the store): they run nothing here.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traced.config.service_sections import REMOVED

# Settings that name a program or code, or flags by which vLLM imports modules, also under earlier names; and those that
# this version refuses.
DISABLED_KEYS = (
    "notify.commands",
    "engine.vllm_python",
    "engine.vllm_args",
    "serving.vllm_python",
    "serving.vllm_args",
    "target.python",
    "target.factory",
    "target.trusted",
    *REMOVED,
)
NOTE = (
    "# Off since a restore, because it names a command or was removed from traced. To turn a command on, check it and "
    "remove '# ' from these lines:"
)
COMMENT = "# "


@dataclass(frozen=True)
class _Statement:
    """A statement of TOML (a table header, or a key with its value) and the dotted keys that it sets."""

    lines: Sequence[str]
    keys: Sequence[str] = ()

    @property
    def names_command(self) -> bool:
        return any(f"{key}.".startswith(f"{command}.") for key in self.keys for command in DISABLED_KEYS)


def disable_commands(file: Path) -> list[str]:
    """Comment out all settings in ``file`` that name a command, and return their lines; there may be no file."""
    if not file.exists():
        return []
    text, disabled = without_commands(file.read_text(encoding="utf-8"))
    if disabled:
        file.write_text(text, encoding="utf-8")
    return disabled


def disable_targets(folder: Path) -> list[str]:
    """Comment out the tables of added targets, each of which names code; returns their lines with the file's name."""
    disabled = []
    for file in sorted(folder.glob("*.toml")):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        settings = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        file.write_text("\n".join([NOTE, *(COMMENT + line for line in lines)]) + "\n", encoding="utf-8")
        disabled += [f"{folder.name}/{file.name}: {line}" for line in settings]
    return disabled


def without_commands(text: str) -> tuple[str, list[str]]:
    """Return a settings file in which nothing names a command, and the lines that are comments now.

    If a file with commands is no valid TOML, all its lines become comments.
    """
    lines: list[str] = []
    disabled: list[str] = []
    was_command = False
    for statement in _statements(text):
        if statement.names_command:
            lines += [*([] if was_command else [NOTE]), *(COMMENT + line for line in statement.lines)]
            disabled += [line.removesuffix("\r") for line in statement.lines]
        else:
            lines += statement.lines
        was_command = statement.names_command
    result = "\n".join(lines)
    if _has_commands(result, if_invalid=bool(disabled)):
        # The file is written in a way that the statements do not show.
        disabled = text.splitlines()
        result = "\n".join([NOTE, *(COMMENT + line for line in disabled)]) + "\n"
    return result, disabled


def _statements(text: str) -> Iterator[_Statement]:
    """Yield the statements of a settings file in order, each with the comments and empty lines before it."""
    table: list[str] = []
    lines: list[str] = []
    for line in text.split("\n"):
        lines.append(line)
        try:
            values = tomllib.loads("\n".join(lines) + "\n")
        except tomllib.TOMLDecodeError:
            # The value continues on the next line.
            continue
        if line.lstrip().startswith("[") and len(lines) == 1:
            table = _path(values)
            yield _Statement(lines, [".".join(table)])
        else:
            yield _Statement(lines, [".".join([*table, *path]) for path in _paths(values)])
        lines = []
    if lines:
        # No valid TOML: it may be anything.
        yield _Statement(lines, DISABLED_KEYS)


def _path(values: Mapping[str, Any]) -> list[str]:
    """Return the path of the only table, for [a.b] and [[a.b]]."""
    path: list[str] = []
    inner: Any = values
    while isinstance(inner, dict) and inner:
        [(key, inner)] = inner.items()
        path.append(key)
        inner = inner[0] if isinstance(inner, list) else inner
    return path


def _paths(values: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the path of every value that is no table and not empty."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from ([key, *path] for path in _paths(value))
        elif value not in ("", []):
            yield [key]


def _has_commands(text: str, *, if_invalid: bool) -> bool:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return if_invalid
    return _Statement([], [".".join(path) for path in _paths(values)]).names_command
