"""What somebody does who can write in the adapters' folder: replace the weights, and the manifest with them."""

import hashlib
import json
from pathlib import Path

WEIGHTS = "adapter_model.safetensors"


def replace_weights(folder: Path, content: bytes = b"evil") -> bytes:
    """Replace the weights of a version and rewrite its manifest for them; returns the original weights."""
    weights, manifest_file = folder / WEIGHTS, folder / "manifest.json"
    original = weights.read_bytes()
    weights.chmod(0o644)
    weights.write_bytes(content)
    if manifest_file.exists():
        manifest_file.chmod(0o644)
        manifest = json.loads(manifest_file.read_text())
        manifest["files"][WEIGHTS] = hashlib.sha256(content).hexdigest()
        manifest_file.write_text(json.dumps(manifest))
    return original


def flip_byte(path: Path) -> None:
    """Change the last byte of a file."""
    content = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
