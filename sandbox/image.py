"""The sandbox image: a Python interpreter, the contract and the worker; no shell.

Two ways to the same tag ``traced-sandbox:<contract hash>``: from a registry's slim Python image (its shells and other
programs are deleted in the last layer), or from the running interpreter where no registry can be reached. An image
built for another contract or worker has another tag and is never used by mistake.

Fails with EngineDown or ImageMissing. Not covered: pushing, and removing images of earlier versions.
"""

import io
import json
import sys
from dataclasses import dataclass
from typing import Any

from docker.errors import APIError, BuildError, ImageNotFound

from sandbox.docker_engine import connect, engine_errors
from sandbox.errors import ImageMissing
from sandbox.hashing import IMAGE_FILES, PACKAGE, contract_hash, image_tag
from sandbox.host_files import APP, PREFIX, PRELOADED, pack_host, tar_bytes

REGISTRY_IMAGE = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"
ENTRYPOINT = ["python3", "-P", "-s", "-S", "-B", "-m", "sandbox.worker"]
_LABELS = {"traced.sandbox.image": "1", "traced.contract": contract_hash()[:16]}

# Run by the base image's own interpreter: it writes the byte code that every start needs, and keeps nothing that
# starts another program.
_STRIP = (
    f"import sys; sys.path.insert(0, '/{APP}'); import {', '.join(PRELOADED)}; "
    "import os, sys, glob; keep = os.path.realpath(sys.executable); "
    "[os.unlink(p) for d in ('/bin', '/usr/bin', '/sbin', '/usr/sbin', '/usr/local/bin') for p in glob.glob(d + '/*') "
    "if os.path.lexists(p) and os.path.realpath(p) != keep]"
)


@dataclass(frozen=True)
class Image:
    """What ``build`` or ``ensure_image`` found or made."""

    tag: str
    id: str
    size_mb: float
    origin: str  # "host", or the base image's name


def build(from_host: bool = False, *, base: str = REGISTRY_IMAGE) -> Image:
    """Build the image; raises EngineDown, or ImageMissing with the cause (say, no registry)."""
    client = connect()
    try:
        if from_host:
            _import_host(client)
        else:
            _build_from(client, base)
        return _described(client)
    finally:
        client.close()


def ensure_image(*, build_missing: bool = False) -> Image:
    """The image if it is there; else builds it (registry first, then the host's interpreter) when asked to, or raises
    ImageMissing."""
    client = connect()
    try:
        return _described(client)
    except ImageMissing:
        if not build_missing:
            raise
    finally:
        client.close()
    try:
        return build(from_host=False)
    except ImageMissing:
        return build(from_host=True)


def dockerfile(base: str) -> str:
    """The registry variant's Dockerfile; exec forms only, so that it works on a base without a shell."""
    variables = {"PYTHONPATH": f"/{APP}", "PYTHONDONTWRITEBYTECODE": "1"}
    lines = [
        f"FROM {base}",
        f"COPY {APP}/ /{APP}/",
        f"RUN {json.dumps(['python3', '-c', _STRIP])}",
        *(f"ENV {name}={value}" for name, value in variables.items()),
        *(f'LABEL "{name}"="{value}"' for name, value in {**_LABELS, "traced.origin": base}.items()),
        f"ENTRYPOINT {json.dumps(ENTRYPOINT)}",
        "CMD []",
    ]
    return "\n".join(lines) + "\n"


def _build_from(client: Any, base: str) -> None:
    files = {f"{APP}/sandbox/{name}": ((PACKAGE / name).read_bytes(), 0o644) for name in IMAGE_FILES}
    files["Dockerfile"] = (dockerfile(base).encode(), 0o644)
    context = io.BytesIO(tar_bytes(files, {}, []))
    with engine_errors(image_tag()):
        try:
            client.images.build(
                fileobj=context, custom_context=True, tag=image_tag(), network_mode="none", rm=True, forcerm=True
            )
        except (BuildError, APIError) as error:
            raise ImageMissing(image_tag(), f"building from {base} failed: {error}") from error


def _import_host(client: Any) -> None:
    repository, _, tag = image_tag().partition(":")
    variables = {
        "PATH": f"/{PREFIX}/bin",
        "LD_LIBRARY_PATH": f"/{PREFIX}/lib",
        "PYTHONPATH": f"/{APP}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    changes = [
        *(f"ENV {name}={value}" for name, value in variables.items()),
        *(f'LABEL "{name}"="{value}"' for name, value in {**_LABELS, "traced.origin": "host"}.items()),
        f"ENTRYPOINT {json.dumps(ENTRYPOINT)}",
    ]
    archive = pack_host()
    with engine_errors(image_tag()):
        answer = client.api.import_image_from_data(archive, repository=repository, tag=tag, changes=changes)
    if '"error"' in answer:
        raise ImageMissing(image_tag(), f"docker import failed: {answer.strip()[-300:]}")


def _described(client: Any) -> Image:
    tag = image_tag()
    try:
        with engine_errors(tag):
            image = client.images.get(tag)
    except ImageNotFound as error:
        raise ImageMissing(tag) from error
    origin = (image.labels or {}).get("traced.origin", "?")
    return Image(tag, str(image.id), round(image.attrs["Size"] / 1e6, 1), origin)
