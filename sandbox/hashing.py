"""Compute content hashes of an environment's source and of the files in the sandbox image."""

import hashlib
from pathlib import Path

PACKAGE = Path(__file__).parent
# The files of this package that are copied into the image.
IMAGE_FILES = ("__init__.py", "contract.py", "effects.py", "goal_user.py", "worker.py")


def environment_hash(source_code: str) -> str:
    """Return the SHA-256 (hex) of the source's UTF-8 bytes."""
    return hashlib.sha256(source_code.encode()).hexdigest()


def contract_hash() -> str:
    """Return the SHA-256 (hex) over the names, lengths and contents of ``IMAGE_FILES``."""
    # An image built from other bytes has another tag, so a stale image is never used.
    digest = hashlib.sha256()
    for name in IMAGE_FILES:
        content = (PACKAGE / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def image_tag() -> str:
    """Return the tag of the image that this version of the package needs."""
    return f"traced-sandbox:{contract_hash()[:16]}"
