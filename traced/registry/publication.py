"""Publish an adapter as an immutable directory ``<adapters>/<capability>@vN`` in PEFT layout, with a manifest.

Invariants: a version appears by one rename, complete and synced to disk, or not at all; it is never written again (its
files are read-only) and its number is never given twice; ``manifest.json`` holds the SHA-256 of every other file.
Publishing the same files of the same origin again returns the existing version, so an interrupted cycle may repeat it.

Errors: PromotionError if the source is no adapter, or if the disk refuses (the message says why). What a killed process
left behind is named ``.staging-*`` and is removed by the next publication. Not covered: who may use the version
(``traced.registry.decisions``), and whether its files are still those of the publication
(``traced.registry.integrity``): the manifest proves nothing, because whoever replaces a file can replace it too.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from traced.core.errors import PromotionError
from traced.core.files import flush

MANIFEST = "manifest.json"
REQUIRED = ("adapter_config.json", "adapter_model.safetensors")
NAME = re.compile(r"(?P<capability>[a-z0-9]+(?:-[a-z0-9]+)*)@v(?P<version>[1-9][0-9]*)")


@dataclass(frozen=True)
class Published:
    """One adapter version on disk; ``files`` maps relative paths to SHA-256 in hex."""

    name: str
    capability: str
    version: int
    path: Path
    files: dict[str, str]
    origin: str


def publish(source: Path, adapters: Path, capability: str, *, origin: str) -> Published:
    """Copy the adapter in ``source`` to the next free version of ``capability`` under ``adapters``.

    ``origin`` is the id of the training run that made it. Raises PromotionError; nothing half-written stays.
    """
    if not NAME.fullmatch(f"{capability}@v1"):
        raise PromotionError(f"{capability!r} is not a capability name; a name is in kebab-case")
    files = _adapter_files(source)
    try:
        adapters.mkdir(parents=True, exist_ok=True)
        with _locked(adapters):
            existing = versions(adapters, capability)
            for version in existing:
                if (version.origin, version.files) == (origin, files):
                    return version
            number = max((version.version for version in existing), default=0) + 1
            name = f"{capability}@v{number}"
            published = Published(name, capability, number, adapters / name, files, origin)
            _write(source, published)
            return published
    except OSError as error:
        raise PromotionError(_refusal(error, adapters), hint=_next_step(error)) from error


def versions(adapters: Path, capability: str | None = None) -> list[Published]:
    """Return the published versions of one capability, or of all, sorted by capability and number."""
    names = [NAME.fullmatch(path.name) for path in adapters.iterdir()] if adapters.is_dir() else []
    manifests = [read_manifest(adapters / m[0]) for m in names if m and capability in (None, m["capability"])]
    return sorted(manifests, key=lambda published: (published.capability, published.version))


def read_manifest(path: Path) -> Published:
    """Return the manifest of the version in directory ``path``; raises PromotionError if it cannot be read."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        return Published(
            manifest["name"], manifest["capability"], manifest["version"], path, manifest["files"], manifest["origin"]
        )
    except (OSError, ValueError, KeyError) as error:
        raise PromotionError(f"{path / MANIFEST} cannot be read: {error!r}", hint="traced doctor") from error


def is_published_in(path: Path, files: dict[str, str]) -> bool:
    """Return whether ``path`` has the manifest of a version with these ``files``; the files themselves are not read."""
    try:
        return read_manifest(path).files == files
    except PromotionError:
        return False


def _adapter_files(source: Path) -> dict[str, str]:
    missing = [name for name in REQUIRED if not (source / name).is_file()]
    if missing:
        raise PromotionError(f"{source} contains no complete adapter: {missing[0]} is missing", hint="traced train")
    return _hashes(source)


def _hashes(directory: Path) -> dict[str, str]:
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(directory)): _sha256(path) for path in paths}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(source: Path, version: Published) -> None:
    staging = version.path.with_name(f".staging-{version.name}")
    manifest = {key: value for key, value in asdict(version).items() if key != "path"}
    try:
        for file in version.files:
            _copy(source / file, staging / file)
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        _seal(staging / MANIFEST)
        flush(staging)
        os.rename(staging, version.path)
        flush(version.path.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _copy(source: Path, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, destination)
    _seal(destination)


def _seal(path: Path) -> None:
    flush(path)
    path.chmod(0o400)


@contextmanager
def _locked(adapters: Path) -> Iterator[None]:
    """Hold the lock of publications, and remove the staging folders that killed ones left behind."""
    with (adapters / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in adapters.glob(".staging-*"):
            shutil.rmtree(leftover)
        yield


def _refusal(error: OSError, adapters: Path) -> str:
    return f"the adapter could not be written under {adapters}: {error.strerror or error}"


def _next_step(error: OSError) -> str:
    return "free some space and run the same command again" if error.errno == errno.ENOSPC else "traced doctor"
