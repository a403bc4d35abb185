"""The hash chain of the audit log: each entry's hash covers its content and the hash of the entry before it.

Whoever changes, removes or inserts an entry has to change the hashes of all later ones, and then the hash of the newest
entry (the head) differs from one that was exported before. Not covered: an entry that is removed from the end, unless
an exported head is compared.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from datetime import UTC

from store.records import AuditEntry


@dataclass(frozen=True)
class AuditHead:
    """The number and the hash of the newest entry of an audit log, written as "17:9f86..."; "0:" for an empty log."""

    seq: int = 0
    hash: str = ""

    def __str__(self) -> str:
        return f"{self.seq}:{self.hash}"


def parse_head(text: str) -> AuditHead:
    """Return the head that ``str`` has written; raises ``ValueError``."""
    match = re.fullmatch(r"0:|([1-9][0-9]{0,18}):([0-9a-f]{64})", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a head of an audit log, which is a number and a hash: 17:9f86...")
    return AuditHead(int(match[1]), match[2]) if match[1] else AuditHead()


def entry_hash(previous: str, entry: AuditEntry) -> str:
    """Return the SHA-256 (hex) of an entry as it is stored; ``previous`` is the hash of the entry before, or ""."""
    at = entry.at.astimezone(UTC).isoformat()
    content = [previous, at, entry.who, entry.role, entry.action, entry.subject, entry.reason, entry.detail]
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
