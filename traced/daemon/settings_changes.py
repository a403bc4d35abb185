"""Which changed settings take effect without a restart, and the audit of changes by reload and restart.

    LIVE    at once
    FIXED   after a restart
    others  with the next cycle; a running cycle keeps its settings

Invariants: ``DIR/settings-in-force.json`` (mode 0600) holds the current settings without secrets and is written after
the audit entry. How it fails: if that file cannot be read or written, this is logged, and at most one superfluous audit
entry is written.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import sqlalchemy

from store.database import write_session
from traced.config.section import Section
from traced.config.settings import EXCLUDED_SECTIONS, Settings, valid_keys
from traced.core.errors import DiskError
from traced.core.files import publish_file
from traced.core.ownership import this_user
from traced.core.redaction import redacted
from traced.registry import decisions
from traced.registry.decision_rules import Action

LIVE = ("log", "notify", "devices", "retention", "triggers", "promotion", "prompting")
FIXED = ("target", *EXCLUDED_SECTIONS)  # need a restart
# Addresses and arguments of hooks may hold secrets: only their names are logged and audited.
HOOKS = ("notify.webhooks", "notify.commands")


@dataclass(frozen=True)
class Change:
    """Result of a reload: the new settings, ``changed`` as {key: [from, to]}, and the keys that need a restart."""

    settings: Settings
    changed: dict[str, list[Any]] = field(default_factory=dict)
    needs_restart: list[str] = field(default_factory=list)


def change(running: Settings, updated: Settings) -> Change:
    """Merge the changes that take effect without a restart from ``updated`` into ``running``, and list all changes."""
    differing = [key for key in valid_keys() if _value(running, key) != _value(updated, key)]
    applied = [key for key in differing if takes_effect(key)]
    changed = {
        key: [_redacted_value(key, _value(running, key)), _redacted_value(key, _value(updated, key))] for key in applied
    }
    return Change(_merge(running, updated, applied), changed, [key for key in differing if key not in applied])


def public_values(settings: Settings) -> dict[str, Any]:
    """Return every setting by dotted key, as a JSON value without secrets."""
    return {key: _redacted_value(key, _value(settings, key)) for key in valid_keys()}


def takes_effect(key: str) -> bool:
    """Whether a change of this dotted key takes effect without a restart."""
    section = key.partition(".")[0]
    return section in LIVE or section not in FIXED


def _merge(running: Settings, updated: Settings, keys: list[str]) -> Settings:
    update: dict[str, Any] = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        if not section:
            update[name] = _value(updated, key)
            continue
        section_values: Section = update.get(section, getattr(running, section))
        update[section] = section_values.model_copy(update={name: _value(updated, key)})
    return running.model_copy(update=update)


def _value(settings: Settings, key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _redacted_value(key: str, value: Any) -> Any:
    if key in HOOKS:
        return [hook.name for hook in value]
    masked: Mapping[str, Any] = redacted({key: value})
    return masked[key]


FILE = "settings-in-force.json"

log = logging.getLogger(__name__)


def note_restart(settings: Settings, store: sqlalchemy.Engine, *, at: datetime) -> dict[str, list[Any]]:
    """Audit the settings changed since the last run, and return them as {key: [from, to]}, empty at the first run."""
    previous, current = _read_saved(settings), public_values(settings)
    changed = {
        key: [previous.get(key), current[key]]
        for key in current
        if previous is not None and previous.get(key) != current[key]
    }
    if changed:
        with write_session(store) as session:
            action = Action(this_user(), "local", at, "the service was started with other settings")
            decisions.record(session, action, "restart", "settings", changed=changed)
        log.info("started with other settings", extra={"changed": changed})
    keep(settings)
    return changed


def keep(settings: Settings) -> None:
    """Save the current settings, with which ``note_restart`` compares those of the next start."""
    path = settings.data_dir / FILE
    try:
        publish_file(path, json.dumps(public_values(settings), indent=1, sort_keys=True) + "\n")
        path.chmod(0o600)
    except (OSError, DiskError) as error:
        log.warning("the current settings could not be written to %s: %s", path, error)


def _read_saved(settings: Settings) -> dict[str, Any] | None:
    path = settings.data_dir / FILE
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s cannot be read, so changes of the settings since the last start are unknown: %s", path, error)
        return None
