"""Build the sandbox image: a Python interpreter, the contract and the worker, without a shell.

Two builds produce the tag ``traced-sandbox:<contract hash>``. The registry build starts from a slim Python image and
deletes its other programs. The host build serves machines that cannot reach a registry: it packs the running
interpreter (binary, standard library and shared objects, below /opt/python) as a reproducible tar for
``docker import``. Raises EngineDown or ImageMissing. Not covered: pushing, removing old images, extension modules
outside the standard library, and engines of another architecture.
"""

import importlib.util
import io
import json
import marshal
import os
import re
import struct
import subprocess
import sys
import sysconfig
import tarfile
from dataclasses import dataclass
from pathlib import Path

from docker import DockerClient
from docker.errors import APIError, BuildError, ImageNotFound

from sandbox.docker_engine import connect, engine_errors
from sandbox.errors import ImageMissing
from sandbox.hashing import IMAGE_FILES, PACKAGE, contract_hash, image_tag

PREFIX = "opt/python"
APP = "app"
EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "site-packages", "idlelib", "ensurepip", "tkinter", "turtledemo", "lib2to3", "distutils", "venv"}
    | {"pydoc_data", "__pycache__"}
)
# Prefixes of file names: test, terminal, database and network modules.
EXCLUDED_MODULES = (
    *("_test", "_ctypes", "_tkinter", "_curses", "_xx", "xx"),
    *("nis.", "readline.", "_dbm", "_gdbm", "_ssl"),
)
# Modules that every environment loads: compiling them into the image saves 0.2 s of processor time per container.
PRELOADED = [
    *("sandbox.worker", "runpy", "locale", "encodings.utf_8", "encodings.latin_1", "calendar", "copy", "dataclasses"),
    *("datetime", "decimal", "fractions", "hashlib", "random", "statistics", "string", "textwrap", "typing"),
]
_PT_INTERP = 3
REGISTRY_IMAGE = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"
ENTRYPOINT = ["python3", "-P", "-s", "-S", "-B", "-m", "sandbox.worker"]
_LABELS = {"traced.sandbox.image": "1", "traced.contract": contract_hash()[:16]}
# Script of the registry build, run by the base image's interpreter. The imports write the byte code that every start
# needs; then all other programs are deleted.
_STRIP = (
    f"import sys; sys.path.insert(0, '/{APP}'); import {', '.join(PRELOADED)}; "
    "import os, sys, glob; keep = os.path.realpath(sys.executable); "
    "[os.unlink(p) for d in ('/bin', '/usr/bin', '/sbin', '/usr/sbin', '/usr/local/bin') for p in glob.glob(d + '/*') "
    "if os.path.lexists(p) and os.path.realpath(p) != keep]"
)


def pack_host() -> bytes:
    """Return the tar of the running interpreter, its standard library and shared objects, and the sandbox's files."""
    files = standard_library(Path(sysconfig.get_path("stdlib")))
    binary = Path(os.path.realpath(sys.executable))
    loader = interpreter_path(binary)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    files[f"{PREFIX}/bin/python{version}"] = (binary.read_bytes(), 0o755)
    files[loader.lstrip("/")] = (Path(loader).read_bytes(), 0o755)
    dynload = Path(sysconfig.get_path("stdlib"), "lib-dynload")
    extensions = [path for path in sorted(dynload.glob("*.so")) if not path.name.startswith(EXCLUDED_MODULES)]
    for name, path in _shared_objects(loader, [binary, *extensions]).items():
        files[f"{PREFIX}/lib/{name}"] = (Path(path).read_bytes(), 0o755)
    for name in IMAGE_FILES:
        content = (PACKAGE / name).read_bytes()
        files[f"{APP}/sandbox/{name}"] = (content, 0o644)
    files |= compiled(files, Path(sysconfig.get_path("stdlib")))
    links = {f"{PREFIX}/bin/python3": f"python{version}"}
    return tar_bytes(files, links, folders=["dev", "etc", "proc", "sys", "tmp"])


def standard_library(root: Path) -> dict[str, tuple[bytes, int]]:
    """Map archive names to (content, mode) for the sources and extension modules below ``root``."""
    version = root.name
    files = {}
    for folder, names, leaves in os.walk(root):
        names[:] = [name for name in names if name not in EXCLUDED_FOLDERS and not name.startswith("config-")]
        for leaf in leaves:
            path = Path(folder, leaf)
            if path.suffix in {".py", ".so"} and not path.name.startswith(EXCLUDED_MODULES):
                content = path.read_bytes()
                files[f"{PREFIX}/lib/{version}/{path.relative_to(root)}"] = (content, 0o644)
    return files


def compiled(files: dict[str, tuple[bytes, int]], root: Path) -> dict[str, tuple[bytes, int]]:
    """Map archive names to (byte code, mode) for the modules that importing ``PRELOADED`` loads.

    The byte code is never checked against its source (PEP 552).
    """
    listing = (
        "import sys; print('\\n'.join(m.__file__ or '' for m in [*sys.modules.values()] if hasattr(m, '__file__')))"
    )
    script = f"import {', '.join(PRELOADED)}; {listing}"
    command = [sys.executable, "-s", "-S", "-c", script]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent).stdout.splitlines()
    names = [
        f"{PREFIX}/lib/{root.name}/{Path(path).relative_to(root)}"
        for path in loaded
        if path.startswith(f"{root}{os.sep}")
    ]
    names += [f"{APP}/sandbox/{name}" for name in IMAGE_FILES]
    return {
        cache_name(name): (_byte_code(files[name][0], f"/{name}"), 0o644)
        for name in names
        if name in files and name.endswith(".py")
    }


def cache_name(name: str) -> str:
    """Return the path where the import system looks for the byte code of ``name``."""
    return importlib.util.cache_from_source(name)


def _byte_code(source: bytes, filename: str) -> bytes:
    code = compile(source, filename, "exec", dont_inherit=True)
    header = importlib.util.MAGIC_NUMBER + (0b01).to_bytes(4, "little") + importlib.util.source_hash(source)
    # Version 2 of marshal stores no references, so equal sources give equal bytes.
    return header + marshal.dumps(code, 2)


def interpreter_path(binary: Path) -> str:
    """Return the path of the dynamic loader that an ELF binary requests (System V ABI, program header PT_INTERP).

    Raises ImageMissing if the binary is not 64-bit little-endian ELF, or is statically linked.
    """
    data = binary.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ImageMissing(image_tag(), f"{binary} is no 64-bit little-endian ELF binary, so it cannot be packed")
    table, size, count = (
        struct.unpack_from(fmt, data, position)[0] for fmt, position in (("<Q", 32), ("<H", 54), ("<H", 56))
    )
    for index in range(count):
        position = table + index * size
        if struct.unpack_from("<I", data, position)[0] == _PT_INTERP:
            offset, length = (
                struct.unpack_from("<Q", data, position + 8)[0],
                struct.unpack_from("<Q", data, position + 32)[0],
            )
            return data[offset : offset + length].rstrip(b"\0").decode()
    raise ImageMissing(image_tag(), f"{binary} is statically linked; use the registry image instead")


def _shared_objects(loader: str, objects: list[Path]) -> dict[str, str]:
    """Map the names of the libraries that ``objects`` need to host paths, as the loader resolves them (like ldd)."""
    libraries: dict[str, str] = {}
    for path in objects:
        listing = subprocess.run([loader, "--list", str(path)], capture_output=True, text=True, check=False)
        for name, target in re.findall(r"^\s*(\S+) => (.+?)(?: \(0x[0-9a-f]+\))?$", listing.stdout, re.MULTILINE):
            if target == "not found":
                raise ImageMissing(image_tag(), f"{path.name} needs {name}, which is not on this machine")
            if target.startswith("/"):
                libraries[os.path.basename(name)] = target
    return libraries


def tar_bytes(files: dict[str, tuple[bytes, int]], links: dict[str, str], folders: list[str]) -> bytes:
    """Return a reproducible USTAR archive: folders first, entries sorted, no times and no owners."""
    parents = {str(parent) for name in [*files, *links] for parent in Path(name).parents if str(parent) != "."}
    buffer = io.BytesIO()
    # Equal inputs must give equal bytes, or two builds of one version would differ.
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(parents | set(folders)):
            archive.addfile(_entry(name, tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755))
        for name, (content, mode) in sorted(files.items()):
            entry = _entry(name, tarfile.REGTYPE, mode)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        for name, target in sorted(links.items()):
            entry = _entry(name, tarfile.SYMTYPE, 0o777)
            entry.linkname = target
            archive.addfile(entry)
    return buffer.getvalue()


def _entry(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type = kind
    entry.mode = mode
    entry.mtime = 0
    return entry


@dataclass(frozen=True)
class Image:
    """A sandbox image that exists in the engine."""

    tag: str
    id: str
    size_mb: float
    # "host", or the base image's name.
    origin: str


def build(from_host: bool = False, *, base: str = REGISTRY_IMAGE) -> Image:
    """Build the image; raises EngineDown, or ImageMissing with the cause (such as an unreachable registry)."""
    client = connect()
    try:
        if from_host:
            _import_host(client)
        else:
            _build_from_registry(client, base)
        return _existing_image(client)
    finally:
        client.close()


def ensure_image(*, build_missing: bool = False) -> Image:
    """Return the existing image, or build it if ``build_missing``, from the registry first, then from the host.

    Raises ImageMissing if the image is absent and may not be built.
    """
    client = connect()
    try:
        return _existing_image(client)
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
    """Return the Dockerfile of the registry build."""
    variables = {"PYTHONPATH": f"/{APP}", "PYTHONDONTWRITEBYTECODE": "1"}
    # Exec forms only: they also work on a base image without a shell.
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


def _build_from_registry(client: DockerClient, base: str) -> None:
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


def _import_host(client: DockerClient) -> None:
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
        response = client.api.import_image_from_data(archive, repository=repository, tag=tag, changes=changes)
    if '"error"' in response:
        raise ImageMissing(image_tag(), f"docker import failed: {response.strip()[-300:]}")


def _existing_image(client: DockerClient) -> Image:
    tag = image_tag()
    try:
        with engine_errors(tag):
            image = client.images.get(tag)
    except ImageNotFound as error:
        raise ImageMissing(tag) from error
    origin = (image.labels or {}).get("traced.origin", "?")
    return Image(tag, str(image.id), round(image.attrs["Size"] / 1e6, 1), origin)
