"""Reading the settings again while the service runs: what takes effect, and what waits for a restart.

    LIVE      at once: log, notices, idleness and hours, retention, triggers, promotion, prompting, the tokens' files
    a cycle's with the next cycle: one that has begun keeps the settings that it began with
    the rest  not before a restart; the old value stays in force and the log says so

Invariants: a section that is in neither list waits for a restart, so that a new one is never half in force. What is
told of a change holds no secret: hooks are told by their names alone, texts pass the log's redaction.
How it fails: whatever reading raises, before anything is changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from traced.config import APART, Settings, valid_keys
from traced.host.redaction import redacted
from traced.section import Section

TOKENS = ("api.operator_token_file", "api.read_token_file")
LIVE = ("log", "notify", "devices", "retention", "triggers", "promotion", "prompting", *TOKENS)
FIXED = ("target", *APART)  # but for what is live
HOOKS = ("notify.webhooks", "notify.commands")  # their addresses and arguments are secrets themselves


@dataclass(frozen=True)
class Change:
    """The settings in force after a reload; ``changed`` is {key: [from, to]}, ``refused`` waits for a restart."""

    settings: Settings
    changed: dict[str, list[Any]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


def change(running: Settings, found: Settings) -> Change:
    """What ``found``, the settings as they are written now, changes of those that are in force."""
    differing = [key for key in valid_keys() if _value(running, key) != _value(found, key)]
    taken = [key for key in differing if takes_effect(key)]
    told = {key: [_told(key, _value(running, key)), _told(key, _value(found, key))] for key in taken}
    return Change(_with(running, found, taken), told, [key for key in differing if key not in taken])


def told(settings: Settings) -> dict[str, Any]:
    """Every setting as it is told: JSON values without secrets."""
    return {key: _told(key, _value(settings, key)) for key in valid_keys()}


def takes_effect(key: str) -> bool:
    """Whether a change of this dotted key needs no restart."""
    section = key.partition(".")[0]
    return key in LIVE or section in LIVE or section not in FIXED


def _with(running: Settings, found: Settings, keys: list[str]) -> Settings:
    update: dict[str, Any] = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        if not section:
            update[name] = _value(found, key)
            continue
        part: Section = update.get(section, getattr(running, section))
        update[section] = part.model_copy(update={name: _value(found, key)})
    return running.model_copy(update=update)


def _value(settings: Settings, key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _told(key: str, value: Any) -> Any:
    if key in HOOKS:
        return [hook.name for hook in value]
    told: Mapping[str, Any] = redacted({key: value})
    return told[key]
