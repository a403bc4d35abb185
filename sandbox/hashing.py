"""Names derived from content: of an environment, and of the image that can run it."""

import hashlib
from pathlib import Path

PACKAGE = Path(__file__).parent
IMAGE_FILES = ("__init__.py", "contract.py", "effects.py", "worker.py")  # what of this package is in the image


def environment_hash(source_code: str) -> str:
    """SHA-256 (hex) of the source's UTF-8 bytes."""
    return hashlib.sha256(source_code.encode()).hexdigest()


def contract_hash() -> str:
    """SHA-256 (hex) over the files that the image carries; an image built for other files is never used."""
    digest = hashlib.sha256()
    for name in IMAGE_FILES:
        content = (PACKAGE / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def image_tag() -> str:
    """The image that this version of the package needs."""
    return f"traced-sandbox:{contract_hash()[:16]}"
