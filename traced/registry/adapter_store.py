"""Adapter versions in an object store (S3, GCS, Azure; by fsspec), for routers that share no folder with the cycles.

    URL/adapters/NAME/DIGEST/...          the files of a version as ``traced.registry.publication`` wrote them
    URL/adapters/NAME/DIGEST/manifest.json    written last: without it the version is not uploaded

DIGEST is that of the files' names and SHA-256, so two versions of one name never share a folder, and repeating an
upload that was interrupted writes the same bytes to the same places.

Invariants: a version is uploaded before it takes traffic (``upload_before_traffic``); a download appears under its
name only if every file has the SHA-256 that the database has for it. Nothing in the object store is ever deleted.

Not covered: downloads from file systems that block a thread (``file://``, ``sftp://``) have no time limit, because a
thread cannot be ended; those from S3, GCS and Azure have one that grows with the file (``LIMIT_S``).

Errors: AdapterStoreError, whatever the library behind the URL raises; PromotionError for local files that changed.
"""

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from store.database import read_session
from store.records import AdapterVersion, PromotionState
from store.repositories.adapters import get_adapter
from store.repositories.gates import latest_answers
from store.repositories.promotions import ON_TRIAL, newest_promotions
from store.types import GateAnswer
from traced.core.errors import PromotionError, TracedError
from traced.core.files import publish_folder
from traced.registry.integrity import changed_files, check_files
from traced.registry.publication import MANIFEST, is_published_in

ADAPTERS = "adapters"
# What takes traffic, and what a rollback may put live again.
IN_SERVICE = (PromotionState.LIVE, PromotionState.SUPERSEDED, *ON_TRIAL)
# Hexadecimal digits of the digest in names of folders.
DIGITS = 16
# A request may take this long, and a file longer by its size at this rate (gcsfs itself would wait for ever). The limit
# is not one on progress: s3fs downloads 50 MiB parts in batches, and reports and writes only whole batches.
LIMIT_S = 300.0
MIN_BYTES_PER_S = 100_000
log = logging.getLogger(__name__)


class AdapterStoreError(PromotionError):
    """The object store does not answer, refuses, or has other files than those of the version."""


class NotUploaded(AdapterStoreError):
    """The object store has no manifest of the version."""


class StoredFilesChanged(AdapterStoreError):
    """The files in the object store are not those that were published."""


def is_url(root: str) -> bool:
    """Return whether ``serving.adapters_root`` names an object store, and not a folder."""
    return "://" in root


def folder_name(version: AdapterVersion) -> str:
    """Return a name that no other content has: the version's name and the digest of its files."""
    return f"{version.name}-{_digest(version)}"


@dataclass(frozen=True)
class AdapterStore:
    """The object store at a URL of fsspec, such as ``s3://bucket/traced``."""

    url: str

    @property
    def display_url(self) -> str:
        """Return the URL without a password."""
        return re.sub(r"//[^/@]*@", "//***@", self.url) if re.search(r"//[^/@]*:[^/@]*@", self.url) else self.url

    def check_installed(self) -> None:
        """Raise ``AdapterStoreError`` if the library for the URL is missing or unknown; connects to nothing."""
        from fsspec import get_filesystem_class

        with self._boundary():
            get_filesystem_class(self.url.partition("://")[0].rpartition("::")[2])

    def upload(self, version: AdapterVersion) -> None:
        """Copy the files of a version from its folder to the object store, unless they are there.

        Raises:
            AdapterStoreError: The object store does not answer or refuses; the version then has no manifest there.
            AdapterChanged: The files in the folder are not those that were published.
            PromotionError: The folder cannot be read.
        """
        source = Path(version.path)
        check_files(version)
        with self._folder_of(version) as (file_system, folder):
            if _is_complete(file_system, folder, source, version):
                return
            log.info("%s is uploaded to %s", version.name, self.display_url)
            for name in [*version.files, MANIFEST]:
                file_system.put_file(str(source / name), f"{folder}/{name}")
            if not _is_complete(file_system, folder, source, version):
                raise AdapterStoreError(f"{self.display_url} does not have all of {version.name} after its upload")

    def download(self, version: AdapterVersion, target: Path) -> None:
        """Create the folder ``target`` with the files of a version, by one rename after all have been checked.

        Raises:
            NotUploaded: The version has no manifest there.
            StoredFilesChanged: A file is missing there, or differs from the database.
            AdapterStoreError: The object store does not answer, or a file has not arrived in time.
            DiskError: The disk is full.
        """

        def fill(staging: Path) -> None:
            with suppress(FileNotFoundError):
                for name in [*version.files, MANIFEST]:
                    (staging / name).parent.mkdir(parents=True, exist_ok=True)
                    _get_file(file_system, f"{folder}/{name}", staging / name)
            if changed_files(staging, version.files):
                raise StoredFilesChanged(
                    f"the files of {version.name} at {self.display_url} are not those that were published",
                    hint=f"delete {ADAPTERS}/{version.name}/{_digest(version)} there and restart the service that has "
                    "the adapter's files: it uploads them again",
                )

        with self._folder_of(version) as (file_system, folder):
            if _size(file_system, f"{folder}/{MANIFEST}") is None:
                raise NotUploaded(
                    f"{version.name} is not uploaded to {self.display_url} yet",
                    hint="serving.adapters_root of the service that has the adapter's files: the same URL; it uploads "
                    "them when it starts",
                )
            publish_folder(target, fill)

    def probe(self) -> None:
        """Write, read and delete a small file; raises ``AdapterStoreError``."""
        content = secrets.token_hex(8).encode()
        with self._connected() as (file_system, root):
            path = f"{root}/.probe-{content.decode()}"
            file_system.pipe_file(path, content)
            try:
                if file_system.cat_file(path) != content:
                    raise AdapterStoreError(f"{self.display_url} returns other bytes than were written")
            finally:
                file_system.rm_file(path)

    @contextmanager
    def _folder_of(self, version: AdapterVersion) -> Iterator[tuple[Any, str]]:
        with self._connected() as (file_system, root):
            yield file_system, f"{root}/{ADAPTERS}/{version.name}/{_digest(version)}"

    @contextmanager
    def _connected(self) -> Iterator[tuple[Any, str]]:
        # Imported late: most commands and most routers use no object store.
        from fsspec.core import url_to_fs

        # Only a local folder needs folders; an object store would create a bucket for a name that is mistyped.
        options = {"auto_mkdir": True} if self.url.startswith(("file://", "local://")) else {}
        with self._boundary():
            file_system, root = url_to_fs(self.url, **options)
            # Listings that fsspec keeps would hide what another process has uploaded.
            file_system.invalidate_cache()
            yield file_system, root.rstrip("/")

    @contextmanager
    def _boundary(self) -> Iterator[None]:
        try:
            yield
        except TracedError:
            raise
        except ImportError as error:
            raise AdapterStoreError(
                f"serving.adapters_root is {self.display_url}, and its library is missing: {error}",
                hint=f"pip install {_package(self.url)}",
            ) from error
        except Exception as error:
            # Every library behind fsspec has errors of its own (botocore, google.auth, azure.core, aiohttp, OSError).
            raise AdapterStoreError(
                f"the object store {self.display_url} failed: {type(error).__name__}: {error}", hint="traced doctor"
            ) from error


def local_folder(version: AdapterVersion, root: str) -> Path:
    """Return the folder of a version on this machine, whether it exists or not.

    Args:
        root: ``serving.adapters_root``. A folder may exist for the engines only.
    """
    mounted = Path(root) / ADAPTERS / version.name
    return mounted if root and not is_url(root) and mounted.is_dir() else Path(version.path)


def upload_before_traffic(root: str, store: Engine, adapters: Iterable[str]) -> None:
    """Upload the adapter versions whose gate passed, if ``root`` (``serving.adapters_root``) is a URL.

    Called before the transaction that lets them take traffic, because an upload may take minutes.

    Raises:
        NotFound: There is no such version.
        PromotionError: As ``AdapterStore.upload``.
    """
    if not is_url(root):
        return
    with read_session(store) as session:
        answers = latest_answers(session)
        versions = [get_adapter(session, name) for name in adapters]
    for version in versions:
        if answers.get(version.name) is GateAnswer.PASS:
            AdapterStore(root).upload(version)


def upload_in_service(root: str, store: Engine) -> None:
    """Upload the versions in service whose files are here: those approved before ``root`` was set to this URL.

    Versions in quarantine are left out. Raises ``PromotionError`` as ``AdapterStore.upload``.
    """
    if not is_url(root):
        return
    with read_session(store) as session:
        names = [e.promotion.adapter for e in newest_promotions(session) if e.promotion.state in IN_SERVICE]
        versions = [get_adapter(session, name) for name in names]
    for version in versions:
        if version.quarantined_at is None and is_published_in(Path(version.path), version.files):
            AdapterStore(root).upload(version)


def _digest(version: AdapterVersion) -> str:
    text = json.dumps(version.files, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _is_complete(file_system: Any, folder: str, source: Path, version: AdapterVersion) -> bool:
    """Return whether the folder has a manifest, and every file with the size of the one in ``source``."""
    file_system.invalidate_cache()
    names = [MANIFEST, *version.files]
    return all(_size(file_system, f"{folder}/{name}") == (source / name).stat().st_size for name in names)


def _size(file_system: Any, path: str) -> int | None:
    """Return the size of a file in bytes, None if there is none; an outage raises, unlike in ``exists`` of fsspec."""
    try:
        return int(_call(file_system, "info", path, limit_s=LIMIT_S)["size"])
    except FileNotFoundError:
        return None


def _get_file(file_system: Any, source: str, target: Path) -> None:
    size = _size(file_system, source)
    if size is None:
        raise FileNotFoundError(source)
    _call(file_system, "get_file", source, str(target), limit_s=LIMIT_S + size / MIN_BYTES_PER_S)


def _call(file_system: Any, method: str, path: str, *arguments: str, limit_s: float) -> Any:
    """Call a method with a time limit if it runs in fsspec's event loop, where it can be cancelled.

    Raises ``AdapterStoreError`` after ``limit_s``, else what the method raises.
    """
    from fsspec.asyn import AsyncFileSystem, sync

    # Wrappers such as ``dir::`` are of this class whatever they wrap.
    if not (isinstance(file_system, AsyncFileSystem) and file_system.async_impl):
        return getattr(file_system, method)(path, *arguments)
    try:
        return sync(file_system.loop, getattr(file_system, f"_{method}"), path, *arguments, timeout=limit_s)
    except TimeoutError as error:
        raise AdapterStoreError(f"{path} has not arrived in time (at most {limit_s:.0f} s)") from error


def _package(url: str) -> str:
    protocol = url.partition("://")[0].rpartition("::")[2]
    packages = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
    return packages.get(protocol, "the package that the message names")
