"""Write an environment as a package of verifiers or OpenEnv.

The package holds the source byte for byte and a copy of the contract. The other files are rendered from ``templates``
and import only the other project and the standard library. ``traced.json`` names the origin and the SHA-256 of every
other file, by which ``recognition`` detects later changes.

Invariants: no code of the environment runs; the folder appears by one rename or not at all; nothing is overwritten.
Errors: ``NotExportable`` for a source that could not run as a package; ``TargetUnavailable``.
"""

import ast
import functools
import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from sandbox.hashing import PACKAGE as SANDBOX
from sandbox.user import model_user_line
from traced.interop import NotExportable, TargetUnavailable
from traced.interop.origin import Origin

FORMAT = 1
RECORD_FILE = "traced.json"
ENVIRONMENT, CONTRACT = "environment.py", "contract.py"
# The version of every exported package; the hash in the package's name identifies the content.
VERSION = "0.1.0"
CONTRACT_MODULE = "sandbox.contract"


@dataclass(frozen=True)
class Kind:
    """A kind of package: the layout of its files.

    Args:
        inner: The folder of environment.py; "" means a folder named like the package.
        templates: The template of each other file by path, in which ``{inner}`` stands for that folder.
    """

    inner: str
    templates: dict[str, str]


KINDS = {
    "verifiers": Kind(
        "",
        {
            "pyproject.toml": "verifiers/pyproject.toml",
            "README.md": "verifiers/README.md",
            "{inner}/__init__.py": "verifiers/init.py",
            "{inner}/taskset.py": "verifiers/taskset.py",
            "{inner}/harness.py": "verifiers/harness.py",
            "{inner}/episode.py": "common/episode.py",
        },
    ),
    "openenv": Kind(
        "server",
        {
            "pyproject.toml": "openenv/pyproject.toml",
            "README.md": "openenv/README.md",
            "openenv.yaml": "openenv/openenv.yaml",
            ".dockerignore": "openenv/dockerignore",
            "__init__.py": "openenv/init.py",
            "models.py": "openenv/models.py",
            "client.py": "openenv/client.py",
            "oracle.py": "openenv/oracle.py",
            "validation/runtime.json": "openenv/runtime.json",
            "{inner}/__init__.py": "openenv/server_init.py",
            "{inner}/app.py": "openenv/app.py",
            "{inner}/adapter.py": "openenv/adapter.py",
            "{inner}/Dockerfile": "openenv/Dockerfile",
            "{inner}/episode.py": "common/episode.py",
        },
    ),
}


@dataclass(frozen=True)
class Exported:
    """A written package.

    ``warning`` says why the environment should not be used for training yet; "" if it may be used.
    """

    folder: Path
    package: str
    kind: str
    hash: str
    admitted: bool | None
    warning: str


def export(origin: Origin, kind: str, target: Path | None = None) -> Exported:
    """Write an environment as a package of ``kind``, a key of ``KINDS``.

    Args:
        origin: The environment.
        kind: "verifiers" or "openenv".
        target: A new or empty folder; by default a new folder named after package and kind.

    Raises:
        NotExportable: The source could not run as a package.
        TargetUnavailable: The folder is not empty or cannot be written.
    """
    require_exportable(origin.source_code)
    package = package_name(origin)
    folder = (target or Path(f"{package}-{kind}")).absolute()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise TargetUnavailable(
            f"{folder} exists already", hint="choose another folder with --into, or move this one away"
        )
    # The staging folder is in the target's parent folder, so that the rename does not cross file systems.
    staging = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        for name, content in package_files(origin, kind).items():
            path = staging / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        os.replace(staging, folder)
    except OSError as error:
        raise TargetUnavailable(
            f"{folder} cannot be written: {error}", hint="choose another folder with --into"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Exported(folder, package, kind, origin.hash, origin.is_admitted, origin.warning)


def package_files(origin: Origin, kind: str) -> dict[str, bytes]:
    """Return the files of a package by path; the same origin gives the same bytes."""
    package = package_name(origin)
    inner = KINDS[kind].inner or package
    values = {
        "origin": origin,
        "package": package,
        "distribution": package.replace("_", "-"),
        "title": f"{re.sub(r'[^A-Za-z0-9._-]+', ' ', origin.name).strip() or 'environment'} ({origin.hash[:12]})",
        "description": _one_line(origin.description) or f"Synthetic environment {package}, exported by traced",
        "source_path": f"{inner}/{ENVIRONMENT}",
        "version": VERSION,
        "traced_version": version("traced"),
    }
    files = {
        path.format(inner=inner): _templates().get_template(f"{name}.jinja").render(values).encode()
        for path, name in KINDS[kind].templates.items()
    }
    files[f"{inner}/{ENVIRONMENT}"] = origin.source_code.encode()
    files[f"{inner}/{CONTRACT}"] = (SANDBOX / CONTRACT).read_bytes()
    record = {
        "format": FORMAT,
        "kind": kind,
        "environment": origin.hash,
        "source": f"{inner}/{ENVIRONMENT}",
        "capability": origin.capability,
        "cycle": origin.cycle,
        "admitted": origin.is_admitted,
        "verdict": origin.verdict,
        "traced": version("traced"),
        "files": {path: hashlib.sha256(content).hexdigest() for path, content in sorted(files.items())},
    }
    files[RECORD_FILE] = (json.dumps(record, indent=2) + "\n").encode()
    return files


def package_name(origin: Origin) -> str:
    """Return the import name of an environment's package, ``traced_NAME_HASH8`` with eight digits of its hash."""
    slug = re.sub(r"[^a-z0-9]+", "_", origin.name.lower()).strip("_")[:40].strip("_")
    return "_".join(filter(None, ["traced", slug, origin.hash[:8]]))


def require_exportable(source_code: str) -> None:
    """Raise NotExportable for a source that could not run as a package; this does not replace admission."""
    try:
        tree = ast.parse(source_code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        raise NotExportable(f"line {line} is not valid Python: {error}", hint="name a Python file") from error
    if not any(isinstance(node, ast.ClassDef) and node.name == "Environment" for node in tree.body):
        raise NotExportable(
            "the file defines no class Environment", hint="see sandbox/contract.py for what an environment defines"
        )
    if model_user_line(tree):
        raise NotExportable(
            f"line {model_user_line(tree)} asks for a user that is a model, which a package does not have",
            hint="let step() speak the user's part",
        )
    # The package replaces the import of the contract at the top of the file only.
    late = {id(node) for outer in ast.walk(tree) if _is_function(outer) for node in ast.walk(outer)}
    for node in ast.walk(tree):
        for module in imported_modules(node):
            if module == CONTRACT_MODULE and id(node) not in late:
                continue
            if module.partition(".")[0] not in sys.stdlib_module_names:
                position = " inside a function" if module == CONTRACT_MODULE else ""
                raise NotExportable(
                    f"line {getattr(node, 'lineno', 0)} imports {module}{position}",
                    hint="an environment may import only the standard library, and sandbox.contract at its top",
                )


def imported_modules(node: ast.AST) -> list[str]:
    """Return the modules that an import statement names, relative ones with leading dots; empty for other nodes."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, level=level):
            return ["." * level + (module or "")]
    return []


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


@functools.cache
def _templates() -> Environment:
    # Text written by people or models enters a file only through these filters or as a sanitised title.
    environment = Environment(
        loader=PackageLoader("traced.interop"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {"quoted": _quoted, "cell": _cell}
    return environment


def _quoted(text: str) -> str:
    """Return the text as a string literal that is valid in Python and in TOML."""
    return json.dumps(_one_line(text), ensure_ascii=False)


def _cell(text: str) -> str:
    """Return the text escaped for a cell of a Markdown table."""
    return re.sub(r"([|<>\\`*_\[\]])", r"\\\1", _one_line(text))


def _one_line(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
