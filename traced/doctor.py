"""Ordered checks of the machine; every failed one names the next command.

Invariants: a check changes nothing that lasts; a check that cannot be made is a failed one, never a silent pass. The
order is that of dependence: what an earlier finding explains is found later too, so read from the top.

Not covered: whether a vLLM server answers, and the quality of a model.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from traced.config import Settings
from traced.errors import TracedError

PYTHON = (3, 11)
PACKAGES = ("traced", "agents", "sandbox", "store")
FREE_BYTES = 2 * 1024**3


@dataclass(frozen=True)
class Finding:
    """What one check saw; ``fix`` is the next command, empty when ``ok``; ``warning`` is what could be better."""

    name: str
    ok: bool
    seen: str
    fix: str = ""
    warning: str = ""


def examine(settings: Settings) -> Iterator[Finding]:
    """All findings, in order, as they are made."""
    for check in CHECKS:
        try:
            yield check(settings)
        except ImportError as error:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            yield Finding(name, False, f"cannot be imported: {error}", "make venv")


def check_python(settings: Settings) -> Finding:
    """The interpreter's version."""
    seen = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info >= PYTHON:
        return Finding("python", True, seen)
    return Finding("python", False, seen, f"make venv PYTHON=python{PYTHON[0]}.{PYTHON[1]}")


def check_packages(settings: Settings) -> Finding:
    """Whether ``agents``, ``sandbox`` and ``store`` are ours and not another distribution's."""
    home = Path(__file__).resolve().parent.parent
    clashes = [clash for name in PACKAGES if (clash := _shadow(name, home))]
    if not clashes:
        return Finding("packages", True, f"{', '.join(PACKAGES)} from {home}")
    return Finding("packages", False, "; ".join(clashes), "make venv (traced wants a virtual environment of its own)")


def check_torch(settings: Settings) -> Finding:
    """PyTorch and the libraries that train and serve."""
    import torch

    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "peft", "trl")]
    device = f"{torch.cuda.device_count()} GPU" if torch.cuda.is_available() else f"CPU, {settings.threads} threads"
    return Finding("torch", True, ", ".join([f"torch {torch.__version__}", *versions, device]))


def check_docker(settings: Settings) -> Finding:
    """A Docker engine that answers; untrusted environments run nowhere else."""
    from sandbox.docker_engine import connect, weaknesses
    from sandbox.errors import EngineDown

    try:
        client = connect()
        try:
            seen, weak = f"engine {client.version()['Version']}", weaknesses(client)
        finally:
            client.close()
    except EngineDown as error:
        return Finding("docker", False, str(error), error.remedy)
    return Finding("docker", True, seen, warning="; ".join(weak))


def check_image(settings: Settings) -> Finding:
    """The sandbox image."""
    from sandbox.errors import EngineDown, ImageMissing
    from sandbox.image import ensure_image

    try:
        image = ensure_image()
    except EngineDown as error:
        return Finding("sandbox image", False, "not looked for: the Docker engine cannot be used", error.remedy)
    except ImageMissing as error:
        return Finding("sandbox image", False, str(error), "traced sandbox image")
    return Finding("sandbox image", True, f"{image.tag}, {image.size_mb} MB, from {image.origin}")


def check_data_directory(settings: Settings) -> Finding:
    """A writable data directory with room in it."""
    directory = settings.data_dir
    place = next(parent for parent in (directory, *directory.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(b"traced")
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return Finding(
            "data directory", False, f"{place} is not writable: {error.strerror}", "traced doctor --data-dir PATH"
        )
    free = shutil.disk_usage(place).free
    seen = f"{directory}{'' if directory.exists() else ' (not made yet)'}, {free / 1024**3:.1f} GiB free"
    if free < FREE_BYTES:
        return Finding("data directory", False, seen, f"free at least {FREE_BYTES // 1024**3} GiB, or --data-dir PATH")
    return Finding("data directory", True, seen)


def check_store(settings: Settings) -> Finding:
    """A store that opens, at this traced's schema; where there is none, the first verb that writes makes it."""
    from store.database import connect, shown
    from store.errors import StoreError
    from store.head import HEAD, mismatch
    from store.schema import revision

    if not settings.store.url and not (settings.data_dir / "traced.db").exists():
        return Finding("store", True, "not made yet; the first verb that writes makes it")
    try:
        engine = connect(settings.store_url)
        found = revision(engine)
        engine.dispose()
    except StoreError as error:
        return Finding("store", False, str(error).splitlines()[0], "traced doctor --set store.url=URL")
    if found not in {None, HEAD}:
        fix = "traced db upgrade" if str(found) < HEAD else "upgrade traced"
        return Finding("store", False, str(mismatch(shown(engine.url), str(found))), fix)
    return Finding("store", True, f"schema {found!r}, newest {HEAD!r}")


def check_model(settings: Settings) -> Finding:
    """The base model's files."""
    from traced.models import resolve_model

    try:
        files = resolve_model(settings.model.spec, settings.data_dir)
    except TracedError as error:
        return Finding("model", False, error.message, error.hint or "traced doctor --model bundled")
    return Finding("model", True, f"{files.name} at {files.path}")


def check_language_model(settings: Settings) -> Finding:
    """A language model that can be asked, where the settings want one."""
    from traced.llm.connect import endpoint
    from traced.llm.needed import check_model, wanting

    try:
        check_model(settings)
    except TracedError as error:
        return Finding("language model", False, error.message, error.hint)
    if not wanting(settings):
        return Finding("language model", True, "none is needed")
    described = endpoint(settings.llm)
    return Finding("language model", True, f"{described.name}; traced llm check tries it")


CHECKS: tuple[Callable[[Settings], Finding], ...] = (
    check_python,
    check_packages,
    check_torch,
    check_docker,
    check_image,
    check_data_directory,
    check_store,
    check_model,
    check_language_model,
)


def _shadow(name: str, home: Path) -> str:
    """Why the import name is not ours, or ""."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return f"{name} cannot be imported"
    if Path(spec.origin).resolve().is_relative_to(home / name):
        return ""
    owners = importlib.metadata.packages_distributions().get(name, ["an unknown distribution"])
    others = [owner for owner in owners if owner != "traced"]
    return f"{name} comes from {spec.origin} ({', '.join(others) or 'not installed by pip'})"
