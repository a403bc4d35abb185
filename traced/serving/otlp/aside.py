"""What the receiver could not use, kept with the reason: DIR/spool/damaged-otlp.jsonl.

    {"at": time, "why": reason, "key_id": sender, "told": the span, its log records}

Invariants: redacted like what is stored. Past ``MOST_BYTES`` it is only counted, which the log says once: a sender that
captures no content must not fill the disk. Fails: ``OSError``.
"""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from traced.serving.gateway.redaction import Redactor
from traced.serving.otlp.wire import Event, Span

FILE = "damaged-otlp.jsonl"
MOST_BYTES = 64 * 2**20
MOST_REASONS = 100
log = logging.getLogger(__name__)


@dataclass
class Aside:
    """Keeps what is rejected, and counts it by its reason."""

    folder: Path
    redactor: Redactor
    reasons: Counter[str] = field(default_factory=Counter)
    most_bytes: int = MOST_BYTES
    _full: bool = False

    def keep(self, at: datetime, why: str, key_id: str, span: Span | None, events: Sequence[Event]) -> None:
        """Keep a span and the log records that it came with."""
        path = self.folder / FILE
        self._count(why, path)
        told: dict[str, Any] = {"span": asdict(span) if span else None, "events": [asdict(event) for event in events]}
        if self.redactor:
            told = self.redactor.value(told)
        line = json.dumps({"at": at.isoformat(), "why": why, "key_id": key_id, "told": told}).encode() + b"\n"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("ab") as opened:
            if opened.tell() + len(line) <= self.most_bytes:
                opened.write(line)
            elif not self._full:
                self._full = True
                log.warning("%s is full: what else cannot be used is counted only; move the file away", path)

    def _count(self, why: str, path: Path) -> None:
        known = why in self.reasons or len(self.reasons) < MOST_REASONS
        if why not in self.reasons and known:
            log.warning("a span is of no use: %s (kept in %s; told once)", why, path)
        self.reasons[why if known else "other reasons"] += 1
