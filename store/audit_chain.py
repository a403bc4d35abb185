"""The hash chain of the audit log: each entry's hash covers its content and the hash of the entry before it.

Whoever changes, removes or inserts an entry has to change the hashes of all later ones, and then the hash of the newest
entry (the head) differs from one that was exported before. Not covered: an entry that is removed from the end, unless
an exported head is compared.
"""

import hashlib
import json
from datetime import UTC

from store.records import AuditEntry


def entry_hash(previous: str, entry: AuditEntry) -> str:
    """Return the SHA-256 (hex) of an entry as it is stored; ``previous`` is the hash of the entry before, or ""."""
    at = entry.at.astimezone(UTC).isoformat()
    content = [previous, at, entry.who, entry.role, entry.action, entry.subject, entry.reason, entry.detail]
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
