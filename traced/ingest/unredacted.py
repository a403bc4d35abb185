"""Find imported conversations whose text the settings would redact now: they were imported with other settings.

All conversations of a source and agent are read once for each change of ``serving.redact`` and
``serving.redact_fields``. ``DATA/imports/redaction.json`` says for which of them nothing was left to redact.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from store.content import digest
from store.database import read_session
from store.repositories.trajectories import TrajectoryFilter, iterate_trajectories
from store.types import EndCause
from traced.core.files import publish_file
from traced.ingest.redaction import Redactor

FILE = "redaction.json"


@dataclass(frozen=True)
class RedactionCheck:
    """The check of the conversations that were imported from a source and agent.

    Args:
        folder: The folder of the file that keeps results.
        store_key: What identifies the store.
        settings: The patterns and fields of ``redactor``.
    """

    folder: Path
    store_key: str
    redactor: Redactor
    settings: Any

    def count(self, store: Engine, source: str, agent: str) -> int:
        """Return the number of stored conversations that are not redacted by these settings; 0 without any."""
        key = digest([self.store_key, source, agent])[:32]
        state = self._read()
        settings = digest(self.settings) if self.redactor else ""
        if state.get(key, "") == settings:
            return 0
        count = 0
        if self.redactor:
            with read_session(store) as session:
                rows = iterate_trajectories(session, TrajectoryFilter(source=source, model=agent))
                count = sum(
                    row.end_cause is EndCause.IMPORTED and not self.redactor.is_redacted(row.messages) for row in rows
                )
        if count == 0:
            state = {name: value for name, value in {**state, key: settings}.items() if value}
            publish_file(self.folder / FILE, json.dumps(state))
        return count

    def _read(self) -> dict[str, str]:
        try:
            state = json.loads((self.folder / FILE).read_text())
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}
