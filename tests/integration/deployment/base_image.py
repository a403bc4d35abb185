"""A base image for the Dockerfile where no registry can be reached: this interpreter, pip, and a few of its packages.

Only what a daemon at rest imports comes along; `traced doctor` names the rest.
"""

import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

from sandbox import image
from sandbox.image import PREFIX, interpreter_path, standard_library, tar_bytes

PACKAGES = (
    *("pip", "setuptools", "_distutils_hack"),
    *("alembic", "mako", "markupsafe", "sqlalchemy", "sqlmodel", "tzlocal", "apscheduler"),
    *("annotated_doc", "annotated_types", "pydantic", "pydantic_core", "pydantic_settings", "typing_inspection"),
    *("click", "typer", "rich", "markdown_it", "mdurl", "pygments", "shellingham", "dotenv", "typing_extensions.py"),
    *("anyio", "fastapi", "h11", "httpx", "httpcore", "idna", "certifi", "sniffio", "starlette", "uvicorn"),
    *(
        "aiohappyeyeballs",
        "aiohttp",
        "aiosignal",
        "attr",
        "frozenlist",
        "multidict",
        "propcache",
        "yarl",
    ),
    *("charset_normalizer", "docker", "prometheus_client", "requests", "urllib3"),
    *("numpy", "numpy.libs", "opentelemetry", "orjson", "psutil", "structlog", "websockets", "zstandard"),
)
VARIABLES = {"PATH": f"/{PREFIX}/bin", "LD_LIBRARY_PATH": f"/{PREFIX}/lib"}


def import_base(client: Any, repository: str, tag: str) -> None:
    """Import the base image as ``repository:tag``."""
    changes = [f"ENV {name}={value}" for name, value in VARIABLES.items()]
    answer = client.api.import_image_from_data(_pack(), repository=repository, tag=tag, changes=changes)
    assert '"error"' not in answer, answer[-300:]


def _pack() -> bytes:
    stdlib = Path(sysconfig.get_path("stdlib"))
    binary = Path(sys.executable).resolve()
    loader = interpreter_path(binary)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    extensions = [
        path for path in (stdlib / "lib-dynload").glob("*.so") if not re.match("_test|_tkinter|xx", path.name)
    ]
    files = {**standard_library(stdlib), **_packages(version)}
    files |= {f"{PREFIX}/lib/{version}/lib-dynload/{path.name}": (path.read_bytes(), 0o755) for path in extensions}
    # distutils and ctypes, which the sandbox has no use for, are needed to build and to load
    files |= _tree(stdlib / "distutils", f"{PREFIX}/lib/{version}/distutils")
    files |= _tree(stdlib / "ctypes", f"{PREFIX}/lib/{version}/ctypes")
    objects = [
        Path(sysconfig.get_path("purelib"), name.split("site-packages/")[1]) for name in files if _is_compiled(name)
    ]
    for name, path in image._shared_objects(loader, [binary, *extensions, *objects]).items():
        files[f"{PREFIX}/lib/{name}"] = (Path(path).read_bytes(), 0o755)
    files[f"{PREFIX}/bin/{version}"] = (binary.read_bytes(), 0o755)
    files[loader.lstrip("/")] = (Path(loader).read_bytes(), 0o755)
    return tar_bytes(files, {f"{PREFIX}/bin/python3": version}, folders=["dev", "etc", "proc", "sys", "tmp"])


def _is_compiled(name: str) -> bool:
    return name.endswith(".so") and "site-packages/" in name


def _packages(version: str) -> dict[str, tuple[bytes, int]]:
    site = Path(sysconfig.get_path("purelib"))
    files: dict[str, tuple[bytes, int]] = {}
    metadata_folders = [path.name for name in PACKAGES for path in site.glob(f"{name}-*.dist-info")]
    for name in (*PACKAGES, *metadata_folders):
        files |= _tree(site / name, f"{PREFIX}/lib/{version}/site-packages/{name}")
    return files


def _tree(root: Path, inside: str) -> dict[str, tuple[bytes, int]]:
    if root.is_file():
        return {inside: (root.read_bytes(), 0o644)}
    paths = [path for path in sorted(root.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    return {f"{inside}/{path.relative_to(root)}": (path.read_bytes(), 0o644) for path in paths}
