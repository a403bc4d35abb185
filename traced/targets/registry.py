"""The targets by name, and the target of the settings.

A name stands for a target that comes with traced (``traced.targets.bundled``), for a table that ``traced target add``
has written (``DIR/targets/NAME.toml``), or for a package's entry point of the group ``traced.targets``, whose value is
``module:function``. With ``target.kind`` the settings themselves say what it is.

How it fails: ``ConfigError`` for settings that name no target; ``TargetFault`` if it cannot be loaded.
"""

import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from pydantic import ValidationError

from sandbox.client import SandboxSource
from sandbox.episodes import EpisodeSource
from sandbox.policy import SandboxLimits
from sandbox.user import User
from traced.config.settings import TARGET_NAME_LENGTH, TARGETS, factory_file, target_table
from traced.core.errors import ConfigError
from traced.core.ownership import sandbox_owner
from traced.targets.bundled import BUNDLED, OPENENV, VERIFIERS
from traced.targets.conversation_target import CONVERSATIONS_ONLY
from traced.targets.description import MODEL_USER, Description, Division, divide
from traced.targets.loading import DEFAULT_STEP_S, file_description, launch, process_description
from traced.targets.play import SilentUser
from traced.targets.process import ProcessSource

if TYPE_CHECKING:
    from traced.config.settings import Settings, TargetSection

GROUP = "traced.targets"  # of entry points
UNCONFINED = "target.trusted = true (--trusted), for a process of this machine"


@dataclass(frozen=True)
class Target:
    """A target: its splits, what it says of itself, and its episodes."""

    name: str
    division: Division
    description: Description
    open_source: Callable[[User | None], AbstractAsyncContextManager[EpisodeSource]]
    step_s: float = DEFAULT_STEP_S  # limit of a reset, step or score
    is_recorded: bool = False  # it has recorded conversations only, and no episodes

    @property
    def splits(self) -> Mapping[str, range]:
        """Return the seeds of each split; raises ``ConfigError`` for a recorded target."""
        if self.is_recorded:
            raise _without_episodes(self.name)
        return self.division.splits

    def source(self, user: User | None = None) -> AbstractAsyncContextManager[EpisodeSource]:
        """Return the source of its episodes; ``user`` speaks to the agent if the target's user is a model."""
        return self.open_source(user)

    def checked_source(self) -> AbstractAsyncContextManager[EpisodeSource]:
        """Return the source of episodes that need no model: a silent user takes the place of one that is a model."""
        return self.open_source(SilentUser() if self.description.user == MODEL_USER else None)


def target(settings: "Settings", *, refresh: bool = False) -> Target:
    """Return the target of the settings; blocks and raises as ``find_target``."""
    limits = SandboxLimits(**settings.sandbox.model_dump())
    return find_target(
        settings.target, settings.data_dir, limits, partial(sandbox_owner, settings.data_dir), refresh=refresh
    )


def check_playable(checked_target: Target) -> None:
    """Raise ``ConfigError`` if no episode of the target can be played."""
    if checked_target.is_recorded:
        raise _without_episodes(checked_target.name)


def find_target(
    section: "TargetSection", data_dir: Path, limits: SandboxLimits, owner: Callable[[], str], *, refresh: bool = False
) -> Target:
    """Return the target of a table of settings.

    Blocks while a target of another interpreter is started to describe itself, which happens once.

    Args:
        limits: Of the container of a file that is not trusted; ``owner`` returns its label.
        refresh: Whether the target describes itself again.

    Raises:
        ConfigError: The table names no target, or it describes itself wrongly.
        TargetFault: It cannot be loaded.
    """
    known_description = None
    if not section.kind:
        known_description = _known_description(section, data_dir)
        section = table_of(section, data_dir)
    elif section.name in BUNDLED:
        # Its episodes and cycles would mix with those of the other.
        raise ConfigError(
            f"target.name is {section.name!r}, which is a target of traced; a target of your own has another name",
            hint='target.name = "NAME"',
        )
    if section.kind == CONVERSATIONS_ONLY:
        return Target(section.name, Division({}), Description(), _no_source(section.name), is_recorded=True)
    if not section.factory:
        raise ConfigError("target.factory is empty", hint='target.factory = "FILE.py" or "module:function"')
    if section.kind == "openenv":
        section = _of_server(section)
    elif section.kind == "verifiers":
        options = (f"environment={json.dumps(section.factory)}", *section.options)
        section = section.model_copy(update={"kind": "python", "factory": VERIFIERS, "options": options})
    if section.kind == "file" and not section.trusted:
        return _sandboxed(section, limits, owner)
    start_options = launch(section, data_dir)
    description = known_description or process_description(section.name, start_options, data_dir, refresh=refresh)
    step_s = section.step_s or description.step_s or DEFAULT_STEP_S
    start_options = replace(start_options, step_s=step_s)
    division = divide(section.name, description, section.split_seed)
    return Target(
        section.name,
        division,
        description,
        lambda user: ProcessSource(section.name, start_options, division.tasks, user, description),
        step_s=step_s,
    )


def _no_source(name: str) -> Callable[[User | None], AbstractAsyncContextManager[EpisodeSource]]:
    def refuse(_: User | None) -> NoReturn:
        raise _without_episodes(name)

    return refuse


def _without_episodes(name: str) -> ConfigError:
    return ConfigError(
        f'no episode of the target {name} can be played: it has recorded conversations only (target.kind = "recorded")',
        hint="traced analyze, synthesize, admit, train and evaluate use its conversations; the rest needs a target of "
        'target.kind = "file" or "python"',
    )


def _known_description(section: "TargetSection", data_dir: Path) -> Description | None:
    """Return what a target that comes with traced says of itself, if that needs no start."""
    bundled = BUNDLED.get(section.name)
    changed = section.model_dump(include={"factory", "python", "options"}, exclude_defaults=True)
    if bundled is None or changed or target_table(data_dir, section.name).exists():
        return None
    return bundled.description


def _of_server(section: "TargetSection") -> "TargetSection":
    """Return the section as one of the adapter of OpenEnv's servers; raises ``ConfigError``."""
    if not section.factory.startswith(("http://", "https://")):
        raise ConfigError(
            f"target.factory is {section.factory!r}; for OpenEnv it must be the URL of a running server",
            hint='target.factory = "http://127.0.0.1:8000"',
        )
    options = (f"url={json.dumps(section.factory)}", f"name={json.dumps(section.name)}", *section.options)
    return section.model_copy(update={"kind": "python", "factory": OPENENV, "options": options})


def _sandboxed(section: "TargetSection", limits: SandboxLimits, owner: Callable[[], str]) -> Target:
    file = factory_file(section.factory)
    if file is None or not section.factory.endswith(".py"):
        raise ConfigError(f"target.factory is {section.factory!r}; it must be FILE.py", hint='target.kind = "python"')
    if section.python or section.options:
        raise ConfigError(
            "target.python and target.options have no effect in the sandbox, whose Python has no packages",
            hint=UNCONFINED,
        )
    description = file_description(section.name, file)
    if description.tasks is not None:
        raise ConfigError(
            f"the target {section.name} has a list of tasks; a file in the sandbox has seeds only",
            hint=UNCONFINED,
        )
    source_code = file.read_text(encoding="utf-8")
    step_s = section.step_s or description.step_s or limits.call_seconds
    limits = replace(limits, call_seconds=step_s)
    return Target(
        section.name,
        divide(section.name, description, section.split_seed),
        description,
        lambda user: SandboxSource(source_code, limits=limits, name=section.name, owner=owner(), user=user),
        step_s=step_s,
    )


def target_names(data_dir: Path) -> dict[str, str]:
    """Return every name that ``target.name`` may have, with a line on what it is."""
    names = {}
    for name, bundled in BUNDLED.items():
        missing = "" if bundled.python.exists() else " (not installed: make targets)"
        names[name] = bundled.title + missing
    names |= {point.name: f"entry point {point.value}" for point in entry_points(group=GROUP)}
    names |= {file.stem: f"added: {file}" for file in sorted((data_dir / TARGETS).glob("*.toml"))}
    return names


def full_name(name: str, data_dir: Path) -> str:
    """Return the only target of the family ``name``, else ``name``: "textworld" is "textworld:quest"."""
    names = target_names(data_dir)
    members = [full for full in names if full.startswith(f"{name}:")]
    return members[0] if name not in names and len(members) == 1 else name


def table_of(section: "TargetSection", data_dir: Path) -> "TargetSection":
    """Return the table that the name of ``section`` stands for; raises ``ConfigError``."""
    overrides = section.model_dump(exclude_defaults=True)
    file = target_table(data_dir, section.name)
    if file.exists():
        values = {**_read(file), **overrides}
        if "kind" not in values:
            raise ConfigError(
                f"the target {section.name} is off: {file} names no target.kind, as after a restore",
                hint=f"read it and remove '# ' from its lines, or traced target add {section.name} ...",
            )
        if values["kind"] == CONVERSATIONS_ONLY:
            raise ConfigError(
                f"{file} has target.kind = {CONVERSATIONS_ONLY!r}, which starts nothing and is no target to add",
                hint=f'[target] name = "{section.name}", kind = "{CONVERSATIONS_ONLY}" in traced.toml; delete the file',
            )
    elif section.name in BUNDLED:
        bundled = BUNDLED[section.name]
        if not section.python and not bundled.python.exists():
            raise ConfigError(
                f"the target {section.name} is not installed: {bundled.python} is missing",
                hint="make targets, or target.python = the interpreter that it is installed in",
            )
        options = [f"{key}={json.dumps(value)}" for key, value in bundled.options.items()]
        start = {"kind": "python", "factory": bundled.factory, "python": str(bundled.python)}
        # Of two values of an option the later one counts.
        values = {**start, **overrides, "options": [*options, *section.options]}
    else:
        points = [point for point in entry_points(group=GROUP) if point.name == section.name]
        if not points:
            _refuse_file(section.name)
            raise ConfigError(
                f"unknown target {section.name!r}; known: {', '.join(target_names(data_dir))}",
                hint="traced target add, or target.kind for a target of your own",
            )
        values = {"kind": "python", "factory": points[0].value, "python": sys.executable, **overrides}
    try:
        return type(section)(**values)
    except ValidationError as error:
        raise ConfigError(
            f"a value of the target {section.name} is invalid: {_complaint(error)}",
            hint=f"traced target add {section.name} ...",
        ) from error


def with_target(settings: "Settings", name: str, **table: Any) -> "Settings":
    """Return the settings with another target: that of the name, or the one that ``table`` describes.

    Raises:
        ConfigError: The name or a value of the table is none.
    """
    if not table and name == settings.target.name:
        return settings
    try:
        # The model of the user does not belong to the target.
        section = type(settings.target)(name=name, **{"user": settings.target.user, **table})
    except ValidationError as error:
        _refuse_file(name)
        hint = "traced target add --help" if table else "traced target list"
        raise ConfigError(f"{name[:TARGET_NAME_LENGTH]!r} is no target: {_complaint(error)}", hint=hint) from error
    return settings.model_copy(update={"target": section})


def _complaint(error: ValidationError) -> str:
    """Say in words what is wrong with the first invalid value of a target's table."""
    first = error.errors()[0]
    key, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    if key == "name":
        return message
    if key == "kind":
        from traced.config.settings import TargetSection

        kinds = filter(None, get_args(TargetSection.model_fields["kind"].annotation))
        return f"its kind is {first['input']!r}; the kinds are {', '.join(kinds)}"
    return f"target.{key} is {first['input']!r}: {message[:1].lower()}{message[1:]}"


def _refuse_file(name: str) -> None:
    """Raise ``ConfigError`` if ``name`` is that of a Python file, which was not added."""
    file = factory_file(name)
    # Unlike ``Path.is_file`` it accepts a name that is too long.
    if file is None or not os.path.isfile(file):
        return
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip("._-")[:TARGET_NAME_LENGTH] or "NAME"
    stem = f"my-{stem}" if stem in BUNDLED else stem
    raise ConfigError(
        f"{name} is a file and not the name of a target", hint=shlex.join(["traced", "target", "add", stem, name])
    )


def _read(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", hint="traced target add, which writes it anew") from error


def check_seeds(checked_target: Target, settings: "Settings") -> None:
    """Raise ``ConfigError`` if the settings need more seeds than a split has; a list of tasks is played in trials.

    A target whose user is a model needs one. A recorded target has neither.
    """
    if checked_target.is_recorded:
        return
    if checked_target.description.user == MODEL_USER and not settings.target.user.model:
        raise ConfigError(
            f"the user of the target {checked_target.name} is a model, and target.user.model is empty",
            hint='set target.user.model = "NAME" in traced.toml, target.user.base_url for your own server, '
            "then: traced llm check --user",
        )
    if checked_target.division.tasks is not None:
        return
    # Beyond its end a split would run into the next one, and train on test tasks.
    requirements = {
        "collect.episodes": ("train", settings.collect.episodes),
        "gate.seeds times gate.max_rounds": ("gate", settings.gate.seeds * settings.gate.max_rounds),
        "test.seeds": ("test", settings.test.seeds),
    }
    for key, (split, seeds) in requirements.items():
        available = len(checked_target.splits[split])
        if seeds > available:
            raise ConfigError(
                f"{key} is {seeds}, but the {split} split of {checked_target.name} has {available} seeds",
                hint=f"lower {key.partition(' ')[0]}",
            )
