"""How a target's process is started, and what the target says of itself.

A description is asked of the process once and kept in ``DIR/targets/descriptions`` under a digest of everything that
starts it (settings, interpreter, file); a change of the target's package is noticed at its next start only
(``traced.targets.process`` compares).
"""

import ast
import hashlib
import json
import os
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox.user import description_value
from traced.config.settings import factory_file
from traced.core.errors import ConfigError
from traced.core.files import publish_file
from traced.targets.description import Description, read_description
from traced.targets.process import Launch, MainProcess

if TYPE_CHECKING:
    from traced.config.settings import TargetSection

DESCRIPTIONS = Path("targets") / "descriptions"
DEFAULT_STEP_S = 30.0


def launch(section: "TargetSection", data_dir: Path) -> Launch:
    """Return how a target's process is started; raises ``ConfigError`` if its interpreter or file is missing."""
    python = os.path.expanduser(section.python) or sys.executable
    interpreter = shutil.which(python)
    if interpreter is None:
        raise ConfigError(
            f"the interpreter of the target {section.name} is missing or cannot be executed: {section.python}",
            hint="target.python = the Python of the environment that the target is installed in",
        )
    factory, file = section.factory, factory_file(section.factory)
    if file is not None:
        if not file.is_file():
            raise _missing_file(section.name, file)
        factory = absolute(section.factory)
    elif not re.fullmatch(r"\w+(\.\w+)*:\w+", factory):
        raise ConfigError(
            f"the factory of the target {section.name} is {factory!r}; it must be FILE.py, FILE.py:function or "
            "module:function",
            hint=f"traced target add {section.name} FILE.py",
        )
    return Launch(
        factory=factory,
        log=data_dir / "logs" / f"target-{re.sub(r'[^A-Za-z0-9.-]', '_', section.name)}.log",
        python=os.path.abspath(interpreter),
        options=options_of(section),
        paths=() if file is not None else (str(Path.cwd()),),
        start_s=section.start_s,
        step_s=section.step_s or DEFAULT_STEP_S,
        name=section.name,
    )


def absolute(factory: str) -> str:
    """Return a factory with the absolute path of its file, if it has one."""
    file = factory_file(factory)
    return factory if file is None else f"{file.absolute()}{factory[factory.rindex('.py') + len('.py') :]}"


def options_of(section: "TargetSection") -> dict[str, Any]:
    """Return the arguments of the factory; a value that is no JSON is a text. Raises ``ConfigError``."""
    options: dict[str, Any] = {}
    for pair in section.options:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"target.options has {pair!r}, which is not KEY=VALUE", hint='target.options = ["a=1"]')
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def process_description(name: str, start_options: Launch, data_dir: Path, *, refresh: bool = False) -> Description:
    """Return what a target says of itself, from the file unless ``refresh``.

    Raises:
        ConfigError: It describes itself wrongly.
        TargetFault: It cannot be loaded.
    """
    cache = data_dir / DESCRIPTIONS / f"{_digest(start_options)}.json"
    if not refresh:
        with suppress(OSError, ValueError, ConfigError):
            return read_description(name, json.loads(cache.read_text(encoding="utf-8")))
    main = MainProcess.start_blocking(start_options)
    main.close()
    description = read_description(name, main.description)
    publish_file(cache, json.dumps(main.description))
    return description


def file_description(name: str, file: Path) -> Description:
    """Read the ``description`` of class ``Environment`` in a file without running it, and whether it has an oracle.

    Raises ``ConfigError``.
    """
    if not file.is_file():
        raise _missing_file(name, file)
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except SyntaxError as error:
        raise ConfigError(
            f"the file of the target {name} is no Python: {error.msg} in line {error.lineno} of {file}",
            hint="correct the file",
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"the file of the target {name} cannot be read: {error}", hint="target.factory") from error
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Environment":
            functions = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            return read_description(name, {"gold": "oracle" in functions, **_own_description(name, node)})
    raise ConfigError(f"{file} has no class Environment, so it is no target", hint="docs/targets.md")


def _missing_file(name: str, file: Path) -> ConfigError:
    return ConfigError(
        f"the file of the target {name} is missing: {file}",
        hint=f"put the file back, or: traced target add {name} FILE.py",
    )


def _own_description(name: str, node: ast.ClassDef) -> dict[str, Any]:
    value = description_value(node)
    if value is None:
        return {}
    try:
        return dict(ast.literal_eval(value))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the description of the target {name} must be a literal: {error}",
            hint='description = {"determinism": "deterministic"}',
        ) from error


def _digest(start_options: Launch) -> str:
    values = asdict(start_options)
    for key in ("log", "start_s", "step_s"):
        del values[key]
    file = factory_file(start_options.factory)
    values["source"] = hashlib.sha256(file.read_bytes()).hexdigest() if file is not None else ""
    values["python"] = [start_options.python, os.stat(start_options.python).st_mtime_ns]
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]
