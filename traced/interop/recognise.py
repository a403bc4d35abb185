"""What admission can do with a file or a folder: judge its single-file environment, or only say what it cannot.

A package that traced exported, or any folder in which exactly one file defines a class ``Environment`` with the whole
contract, comes down to that file: admission judges it like every other. What else verifiers and OpenEnv can express,
admission cannot play: their environments bring dependencies (the sandbox's image has the standard library alone, and
no network to fetch more), those of verifiers begin from rows of a dataset instead of a seed, neither tells a solution
as messages, and OpenEnv's actions may be anything. Such a package is read, never imported; ``unproved`` makes the
report of it: no check is made or passed, each is left out for its reason (``left_out``), and "source" tells what was
read. So it is not judged: neither admitted nor refused. Its imports are its own project's, and nothing against it.

Invariants: nothing of the folder is executed, links are not followed, at most ``MOST_FILES`` files are read.
How it fails: ``NotRecognised``. Not covered: a server of OpenEnv that runs already, which could be asked for more.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.admission.admit import NAMES
from sandbox.admission.static import MAX_BYTES, inspect_source
from sandbox.errors import clipped
from store.types import AdmissionReport, Check
from traced.interop.declared import Declared, declared, defines_contract, foreign_kind
from traced.interop.errors import NotExportable, NotRecognised
from traced.interop.export import RECORD, refuse_foreign

MOST_FILES = 500
PASSED_OVER = {"build", "dist", "node_modules", "outputs", "venv", "__pycache__"}

_OF_ITS_KIND = re.compile(r": imports |defines no class Environment$")  # what no such package can do without

Sources = dict[str, str]  # path inside the folder -> text


@dataclass(frozen=True)
class Recognised:
    """A single-file environment: what ``sandbox.admission.admit`` takes."""

    path: Path
    source_code: str
    kind: str  # "file", "verifiers" or "openenv"
    recorded: str = ""  # the hash that it had when traced exported it
    changed: list[str] = field(default_factory=list)  # files beside it that are no longer what traced wrote


@dataclass(frozen=True)
class Foreign:
    """A package of another project, as far as reading goes."""

    path: Path
    declared: Declared
    sources: Sources


def recognise_file(path: Path, text: str) -> Recognised | Foreign:
    """What the Python file of this text is."""
    sources = {path.name: text}
    kind = foreign_kind(sources)
    if kind and not defines_contract(text):
        return Foreign(path, declared(kind, sources), sources)
    return Recognised(path, text, "file")


def recognise_folder(folder: Path) -> Recognised | Foreign:
    """What a package's folder is. Raises NotRecognised."""
    recorded = _record(folder)
    if recorded is not None:
        return _exported(folder, recorded)
    sources = _read(folder)
    kind = foreign_kind(sources, is_openenv=(folder / "openenv.yaml").is_file())
    whole = [name for name, text in sources.items() if defines_contract(text) and _stands_alone(text)]
    if len(whole) == 1:
        return Recognised(folder / whole[0], sources[whole[0]], kind or "file")
    if whole:
        raise NotRecognised(
            f"{folder} holds {len(whole)} environments: {', '.join(whole)}", hint="name one of the files"
        )
    if kind is None:
        raise NotRecognised(
            f"{folder} holds no environment: no openenv.yaml, nothing that imports verifiers.v1 or defines "
            "load_environment, and no file with a whole class Environment",
            hint="name the environment's file, or the package's own folder",
        )
    return Foreign(folder, declared(kind, sources), sources)


def unproved(foreign: Foreign) -> AdmissionReport:
    """The report on a package that cannot be played: not judged, each check with what it lacks."""
    noted = [
        f"{name} {line}"
        for name, text in foreign.sources.items()
        for line in inspect_source(text)[1]["refused"]
        if not _OF_ITS_KIND.search(line)
    ]
    read = {**foreign.declared.as_evidence(), "files": len(foreign.sources)}
    read["noted"] = [clipped(line, 200) for line in noted[:20]]
    lacks = {name: {"left_out": foreign.declared.why_not(name)} for name in NAMES}
    checks = [
        Check(name, False, {**evidence, **(read if name == "source" else {})}, 0.0) for name, evidence in lacks.items()
    ]
    digest = hashlib.sha256(json.dumps(sorted(foreign.sources.items())).encode()).hexdigest()
    return AdmissionReport(digest, False, checks)


def _exported(folder: Path, record: dict[str, Any]) -> Recognised:
    """What traced wrote, and which files around the environment were changed since: admission does not judge those."""
    files = {name: digest for name, digest in record["files"].items() if isinstance(name, str)}
    source = record["source"]
    text = _text(folder, source) if source in files else None
    if text is None:
        raise NotRecognised(
            f"{folder / RECORD} names {source!r}, which is not there, or longer than admission takes",
            hint="export it again",
        )
    changed = [name for name, digest in files.items() if name != source and _digest(folder, name) != digest]
    return Recognised(folder / source, text, str(record["kind"]), str(record["environment"]), changed)


def _record(folder: Path) -> dict[str, Any] | None:
    """``traced.json`` where it is one."""
    try:
        record = json.loads((folder / RECORD).read_bytes())
        fits = (
            record["format"] == 1
            and isinstance(record["files"], dict)
            and {"source", "kind", "environment"} <= {*record}
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return record if fits else None


def _read(folder: Path) -> Sources:
    """The folder's Python files; what is too long for admission, no UTF-8 or a link is left out."""
    sources: Sources = {}
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if name not in PASSED_OVER and not name.startswith(".") and "-info" not in name
        )
        for name in sorted(name for name in names if name.endswith(".py")):
            inside = (Path(place) / name).relative_to(folder).as_posix()
            text = _text(folder, inside)
            if text is not None:
                sources[inside] = text
            if len(sources) > MOST_FILES:
                raise NotRecognised(
                    f"{folder} holds more than {MOST_FILES} Python files", hint="the package's own folder"
                )
    return sources


def _text(folder: Path, name: str) -> str | None:
    content = _bytes(folder, name)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError:
        return None


def _digest(folder: Path, name: str) -> str:
    content = _bytes(folder, name)
    return "" if content is None else hashlib.sha256(content).hexdigest()


def _bytes(folder: Path, name: str) -> bytes | None:
    """The content of a plain file inside the folder, at most one byte more than admission takes."""
    path = folder / name
    try:
        if path.is_symlink() or not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
            return None
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError):
        return None
    return content if len(content) <= MAX_BYTES else None


def _stands_alone(text: str) -> bool:
    try:
        refuse_foreign(text)
    except NotExportable:
        return False
    return True
