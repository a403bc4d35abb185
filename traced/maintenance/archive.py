"""A backup's file: a tar archive in zstandard, closed by a manifest with the SHA-256 of every member before it.

Invariants: the file is readable by its owner alone (0600) and appears under its name by one rename, complete and synced
to disk; the manifest is the last member, so an archive that was cut off has none; members are regular files with
relative paths, and nothing else is ever taken out of an archive.
Fails: ``BackupDamaged`` names the member and what is wrong with it. Not covered: encryption; a backup holds whatever
secrets the data directory's own files hold.
"""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import zstandard

from traced.maintenance.errors import BackupDamaged

MANIFEST = "manifest.json"
FORMAT = 1
CHUNK = 1 << 20
PERMISSIONS = 0o755  # of a member; anything beyond is not restored


@dataclass(frozen=True)
class Manifest:
    """What a backup says of itself; ``members`` maps each member's name to its SHA-256 (hex)."""

    traced: str  # version
    made_at: str  # ISO 8601, UTC
    data_dir: str
    database: str  # "sqlite" or "postgresql"
    schema: str  # the store's migration
    namespace: str  # PostgreSQL's schema that holds the tables, "" for SQLite
    members: dict[str, str]
    format: int = FORMAT


class Writer:
    """Adds members to an archive and keeps their checksums."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive
        self.members: dict[str, str] = {}

    def add(self, name: str, path: Path) -> None:
        """Add the file at ``path`` as it is when it is opened."""
        with path.open("rb") as file:
            member = self._archive.gettarinfo(arcname=name, fileobj=file)
            hashing = _Hashing(file)
            self._archive.addfile(member, hashing)
        self.members[name] = hashing.digest.hexdigest()

    def close_with(self, manifest: Manifest) -> None:
        """Add the manifest, which ends the archive."""
        text = (json.dumps(asdict(manifest), indent=1, sort_keys=True) + "\n").encode()
        member = tarfile.TarInfo(MANIFEST)
        member.size, member.mode = len(text), 0o600
        self._archive.addfile(member, io.BytesIO(text))


@contextmanager
def writing(path: Path) -> Iterator[Writer]:
    """A writer of a new archive at ``path``, which must not exist; synced to disk at the end."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as raw:
        compressor = zstandard.ZstdCompressor(write_checksum=True)
        with (
            compressor.stream_writer(raw, closefd=False) as compressed,
            tarfile.open(fileobj=compressed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
        ):
            yield Writer(archive)
        raw.flush()
        os.fsync(raw.fileno())


def verify(path: Path) -> Manifest:
    """Read a backup whole and hold every member against the manifest; raises ``BackupDamaged``."""
    return _read(path, lambda archive, member: _sha256(_content(archive, member)))


def extract(path: Path, folder: Path) -> Manifest:
    """Take the members out into ``folder`` (empty), checking what then lies there; raises ``BackupDamaged``."""

    def take(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
        archive.extract(member, folder, set_attrs=True, filter="data")
        target = folder / member.name
        target.chmod(member.mode & PERMISSIONS)
        with target.open("rb") as file:
            digest = _sha256(file)
            os.fsync(file.fileno())
        return digest

    return _read(path, take)


def _read(path: Path, read_member: Callable[[tarfile.TarFile, tarfile.TarInfo], str]) -> Manifest:
    digests: dict[str, str] = {}
    manifest = None
    try:
        with _open_archive(path) as archive:
            for member in archive:
                if manifest is not None or member.name in digests:
                    raise BackupDamaged(f"{path} contains the unexpected file {member.name!r}")
                if member.name == MANIFEST:
                    manifest = _manifest(_content(archive, member).read())
                else:
                    _refuse_odd(path, member)
                    digests[member.name] = read_member(archive, member)
    except (tarfile.TarError, zstandard.ZstdError, EOFError, ValueError, TypeError, KeyError) as error:
        raise BackupDamaged(f"{path} cannot be read as a backup: {error}", hint="use another backup file") from error
    return _check_members(path, manifest, digests)


def _check_members(path: Path, manifest: Manifest | None, digests: Mapping[str, str]) -> Manifest:
    if manifest is None:
        raise BackupDamaged(f"{path} has no manifest: the file is incomplete", hint="use another backup file")
    if manifest.members != digests:
        odd = sorted(dict(manifest.members.items() ^ digests.items()))
        raise BackupDamaged(
            f"{path} is damaged: {', '.join(odd)} differ from the manifest", hint="use another backup file"
        )
    return manifest


@contextmanager
def _open_archive(path: Path) -> Iterator[tarfile.TarFile]:
    try:
        raw = path.open("rb")
    except OSError as error:
        raise BackupDamaged(f"{path} cannot be opened: {error.strerror}", hint=f"ls {path.parent}") from error
    with (
        raw,
        zstandard.ZstdDecompressor().stream_reader(raw) as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        yield archive
        while stream.read(CHUNK):  # the padding at the end: the decompressor's own checksum covers it
            pass


def _refuse_odd(path: Path, member: tarfile.TarInfo) -> None:
    """Nothing but a regular file below the folder that is extracted to; ``filter="data"`` checks it once more."""
    parts = Path(member.name).parts
    if not member.isreg() or member.name.startswith("/") or ".." in parts or not parts:
        raise BackupDamaged(f"{path} is not a backup: it contains {member.name!r}")


def _manifest(text: bytes) -> Manifest:
    fields: dict[str, Any] = json.loads(text)
    if fields["format"] != FORMAT:
        raise BackupDamaged(
            f"the backup has format {fields['format']}, this version reads {FORMAT}", hint="upgrade traced"
        )
    return Manifest(**fields)


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = archive.extractfile(member)
    if content is None:
        raise tarfile.ReadError(f"{member.name!r} is not a regular file")
    return content


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


class _Hashing(io.RawIOBase):
    """A file that is hashed as it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        chunk = self._file.read(size)
        self.digest.update(chunk)
        return chunk
