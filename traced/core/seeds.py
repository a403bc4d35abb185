"""Seeds derived from identifiers: the same parts give the same seed in every process and on every platform."""

import hashlib
import json

SEED_LIMIT = 2**31


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**31) from an ordered list of integers and strings (SHA-256 of their JSON)."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") % SEED_LIMIT
