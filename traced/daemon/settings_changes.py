"""Reading the settings again while the service runs: what takes effect, and what waits for a restart.

    LIVE      at once: log, notices, idleness and hours, retention, triggers, promotion, prompting, the tokens' files
    a cycle's with the next cycle: one that has begun keeps the settings that it began with
    the rest  not before a restart; the old value stays in force and the log says so

Invariants: a section that is in neither list waits for a restart, so that a new one is never half in force. What is
told of a change holds no secret: hooks are told by their names alone, texts pass the log's redaction.
How it fails: whatever reading raises, before anything is changed.

The settings that were in force last, so that what a restart changes is in the audit as what a reload changes is.

Invariants: kept as a reload would tell them (``reload.told``: no secrets) in ``DIR/settings-in-force.json``, readable
by its owner alone, and written after the audit entry, so that no change goes without one.
How it fails: a file that cannot be read or written is logged and costs at most an entry too many.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import sqlalchemy

from store.database import session
from traced.config.section import Section
from traced.config.settings import APART, Settings, valid_keys
from traced.core.errors import DiskError
from traced.core.files import publish_file
from traced.core.ownership import this_user
from traced.core.redaction import redacted
from traced.registry import decisions
from traced.registry.decisions import Act

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


FILE = "settings-in-force.json"

log = logging.getLogger(__name__)


def note_restart(settings: Settings, store: sqlalchemy.Engine, *, at: datetime) -> dict[str, list[Any]]:
    """Audit what differs from the last time the service ran; {key: [from, to]}, which is empty the first time."""
    before, now = _kept(settings), told(settings)
    changed = {key: [before.get(key), now[key]] for key in now if before is not None and before.get(key) != now[key]}
    if changed:
        with session(store) as opened:
            act = Act(this_user(), "local", at, "the service was started with other settings")
            decisions.note(opened, act, "restart", "settings", changed=changed)
        log.info("started with other settings", extra={"changed": changed})
    keep(settings)
    return changed


def keep(settings: Settings) -> None:
    """Remember these as the ones in force."""
    path = settings.data_dir / FILE
    try:
        publish_file(path, json.dumps(told(settings), indent=1, sort_keys=True) + "\n")
        path.chmod(0o600)
    except (OSError, DiskError) as error:
        log.warning("the settings in force could not be noted in %s: %s", path, error)


def _kept(settings: Settings) -> dict[str, Any] | None:
    path = settings.data_dir / FILE
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s cannot be read, so it is not known what has changed: %s", path, error)
        return None
