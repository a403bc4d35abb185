"""The settings that were in force last, so that what a restart changes is in the audit as what a reload changes is.

Invariants: kept as a reload would tell them (``reload.told``: no secrets) in ``DIR/settings-in-force.json``, readable
by its owner alone, and written after the audit entry, so that no change goes without one.
How it fails: a file that cannot be read or written is logged and costs at most an entry too many.
"""

import json
import logging
from datetime import datetime
from typing import Any

import sqlalchemy

from store.database import session
from traced import acts
from traced.acts import Act
from traced.config import Settings
from traced.host.holder import this_user
from traced.service.reload import told
from traced.errors import DiskError
from traced.training.publish import publish_file

FILE = "settings-in-force.json"

log = logging.getLogger(__name__)


def note_restart(settings: Settings, store: sqlalchemy.Engine, *, at: datetime) -> dict[str, list[Any]]:
    """Audit what differs from the last time the service ran; {key: [from, to]}, which is empty the first time."""
    before, now = _kept(settings), told(settings)
    changed = {key: [before.get(key), now[key]] for key in now if before is not None and before.get(key) != now[key]}
    if changed:
        with session(store) as opened:
            act = Act(this_user(), "local", at, "the service was started with other settings")
            acts.note(opened, act, "restart", "settings", changed=changed)
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
