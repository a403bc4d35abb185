"""Write and read the file of a backup: a tar archive in zstandard that ends with the SHA-256 of every member.

Invariants: the file is readable by its owner alone (0600), complete and synced to disk before
``traced.maintenance.backup`` renames it to its final name. The manifest is the last member, so an archive that was cut
off has none. Members are regular files with relative paths; anything else is refused on reading.

Errors: ``BackupDamaged`` names the member and what is wrong with it. Not covered: encryption; a backup contains
whatever secrets the data directory's own files contain.
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
PERMISSIONS = 0o700  # permission bits of a member that are restored: those of the owner


@dataclass(frozen=True)
class Manifest:
    """The description of a backup, stored in it; ``members`` maps each member's name to its SHA-256 (hex)."""

    traced: str  # version
    made_at: str  # ISO 8601, UTC
    data_dir: str
    database: str  # "sqlite" or "postgresql"
    schema: str  # the store's migration (its revision id)
    namespace: str  # PostgreSQL's schema that holds the tables, "" for SQLite
    members: dict[str, str]
    format: int = FORMAT


class Writer:
    """Adds members to an archive and keeps their checksums."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive
        self.members: dict[str, str] = {}

    def add(self, name: str, path: Path) -> None:
        """Add the file at ``path``, with the size that it has when it is opened."""
        with path.open("rb") as file:
            member = self._archive.gettarinfo(arcname=name, fileobj=file)
            hashing = _Hashing(file)
            self._archive.addfile(member, hashing)
        self.members[name] = hashing.digest.hexdigest()

    def close_with(self, manifest: Manifest) -> None:
        """Write the manifest, which is the last member of the archive."""
        text = (json.dumps(asdict(manifest), indent=1, sort_keys=True) + "\n").encode()
        member = tarfile.TarInfo(MANIFEST)
        member.size, member.mode = len(text), 0o600
        self._archive.addfile(member, io.BytesIO(text))


@contextmanager
def writing(path: Path) -> Iterator[Writer]:
    """Create an archive at ``path``, which must not exist, and yield its writer; sync the file to disk at the end."""
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
    """Read a whole backup and compare every member with the manifest; raises ``BackupDamaged``."""
    return _read(path, lambda archive, member: _sha256(_content(archive, member)))


def extract(path: Path, folder: Path) -> Manifest:
    """Extract the members into ``folder`` (empty) and verify the files written there; raises ``BackupDamaged``."""

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
        while stream.read(CHUNK):  # reads the padding at the end, so that zstandard verifies its own checksum
            pass


def _refuse_odd(path: Path, member: tarfile.TarInfo) -> None:
    """Raise unless the member is a regular file below the target folder; ``filter="data"`` checks this again."""
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
    """A file that computes the SHA-256 of what is read from it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """Read up to ``size`` bytes."""
        chunk = self._file.read(size)
        self.digest.update(chunk)
        return chunk
