"""The commands ``traced target list | add | check | play``: the worlds that an agent can be improved on.

Invariants: the table of ``add`` (mode 0600, by rename) is written after the target described itself; a file for the
sandbox is parsed here and run in the sandbox alone. Exit code 1 if a check fails.
"""

import asyncio
import json
import re
import shlex
import sys
import threading
import tomllib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from agents.llm.question import InMemoryLedger
from sandbox.client import ORACLE_TURNS
from sandbox.contract import Message, Score, Task
from sandbox.episodes import EpisodeSource
from sandbox.errors import EngineDown, EnvironmentFault, ImageMissing, SandboxError
from sandbox.user import User
from store.text import sanitize_block, sanitize_line
from traced.cli.options import AsJson, DataDir, Overrides, parse_pair, read_settings
from traced.cli.output import console, print_json
from traced.config.settings import Settings, factory_file, target_table
from traced.core.errors import ConfigError, TracedError
from traced.core.files import make_folder, publish_file
from traced.rollouts.model_user import model_user
from traced.targets.bundled import BUNDLED
from traced.targets.conformance import TASKS, CheckResult
from traced.targets.conformance import check as conformance
from traced.targets.description import MODEL_USER
from traced.targets.errors import TargetFault
from traced.targets.loading import absolute
from traced.targets.play import SilentUser, gold_play
from traced.targets.registry import Target, check_playable, target_names, with_target
from traced.targets.registry import target as target_of

MARKS = {True: "[green]ok  [/]", False: "[red]FAIL[/]", None: "[dim]--  [/]"}
WIDTH = 12
QUIT = "/quit"
TEXT_LIMIT = 2000
MAX_TASKS = 3  # ids in a message

Name = Annotated[
    str | None, typer.Argument(help="Name of the target; default: that of the settings.", show_default=False)
]
TaskId = Annotated[str | None, typer.Option("--task", help="Play the task with this id.", show_default=False)]

target = typer.Typer(no_args_is_help=True, help="Targets: the worlds in which agents are played and judged.")


@target.callback()
def target_options() -> None:
    """Targets: the worlds in which agents are played and judged."""


@target.command("list")
def list_(data_dir: DataDir = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """List the targets that target.name may name: bundled, added, and those of installed packages."""
    settings = read_settings(data_dir, overrides)
    names = target_names(settings.data_dir)
    if settings.target.kind:
        names[settings.target.name] = f"of the settings, kind {settings.target.kind}: {settings.target.factory}"
    if as_json:
        print_json({"targets": names, "target": settings.target.name})
        return
    width = max(map(len, names))
    for name, title in names.items():
        mark = "*" if name == settings.target.name else " "
        console.print(f"{mark} {name:{width}}  {title}", highlight=False, markup=False, soft_wrap=True)


@target.command()
def add(
    name: Annotated[str, typer.Argument(help="Name for the target.", show_default=False)],
    factory: Annotated[
        str,
        typer.Argument(
            help="FILE.py with a class Environment, module:function, the URL of a server of OpenEnv, or, with"
            " --kind verifiers, the id of an installed environment.",
            show_default=False,
        ),
    ],
    *,
    kind: Annotated[
        str, typer.Option("--kind", help="As target.kind; default: by the form of FACTORY.", show_default=False)
    ] = "",
    python: Annotated[
        str, typer.Option("--python", help="Interpreter that the target is installed in.", show_default=False)
    ] = "",
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="Argument of the factory, repeatable."),
    ] = None,
    trusted: Annotated[
        bool, typer.Option("--trusted", help="Run FILE.py in a process of this machine, not in the sandbox.")
    ] = False,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Add a target of your own under a name, after loading it once; an existing one of the name is replaced."""
    if name in BUNDLED:
        raise ConfigError(f"{name} is a target of traced; choose another name", hint=f"traced target add my-{name} ...")
    is_class = kind in ("", "file") and factory_file(factory) is not None and factory.endswith(".py")
    if is_class and (python or option) and not trusted:
        raise ConfigError(
            f"with --python or --option, {factory} runs in a process of this machine and not in the sandbox",
            hint="--trusted, if you trust it",
        )
    is_url = factory.startswith(("http://", "https://"))
    kind = kind or ("openenv" if is_url else "file" if is_class and not python and not option else "python")
    table: dict[str, Any] = {"kind": kind, "factory": absolute(factory) if kind in ("file", "python") else factory}
    if python:
        table["python"] = str(Path(python).expanduser().absolute()) if "/" in python else python
    if option:
        table["options"] = option
    if trusted:
        table["trusted"] = True
    table |= _limits(overrides)
    settings = read_settings(data_dir, overrides)
    reason = ""  # why the file was not run
    try:
        loaded = target_of(with_target(settings, name, **table), refresh=True)
        check_playable(loaded)
        if kind == "file" and not trusted:
            make_folder(settings.data_dir)
            reason = asyncio.run(_begin_task(loaded))
    except TracedError as error:
        if not error.hint or error.hint.startswith("traced target check"):
            error.hint = f"correct {factory_file(factory) or factory} and add it again"
        raise
    path = target_table(settings.data_dir, name)
    former = _former(path)
    publish_file(path, "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in table.items()))
    if as_json:
        print_json({"name": name, "file": path, **table, "loaded": not reason, "replaced": former})
        return
    if former is not None:
        console.print(f"Replaced {name} (was {former})", highlight=False, markup=False, soft_wrap=True)
    console.print(f"Added {name} ({_splits(loaded)}): {path}", highlight=False, markup=False, soft_wrap=True)
    if reason:
        console.print(f"Not loaded yet: {reason}", highlight=False, markup=False, soft_wrap=True)
    action = "Then load and check it" if reason else "Next"
    console.print(f"{action}: traced target check {name}", highlight=False, markup=False)


async def _begin_task(loaded: Target) -> str:
    """Load a file in the sandbox and begin its first task; return why no container can run, "" if one did.

    Raises:
        TargetFault: The file cannot be loaded, or its task cannot begin.
    """
    try:
        async with loaded.checked_source() as source:
            episode = source.episode()
            try:
                await episode.reset(loaded.splits["train"].start)
            finally:
                await episode.close()
    except (EngineDown, ImageMissing) as error:
        return str(error)
    except SandboxError as error:
        trace = error.traceback if isinstance(error, EnvironmentFault) else ""
        text = f"the target {loaded.name} cannot be loaded in the sandbox: {error.message}\n{trace}"
        raise TargetFault(text.rstrip()) from error
    return ""


def _former(path: Path) -> str | None:
    """Return kind and factory of the table that a target's file has, None without a file."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return "unreadable"
    return f"{table.get('kind', 'off')} {table.get('factory', '')}".rstrip()


@target.command()
def check(
    name: Name = None,
    *,
    tasks: Annotated[int, typer.Option("--tasks", min=1, help="Number of tasks per check.")] = TASKS,
    seed: Annotated[int, typer.Option("--seed", help="Seed that selects them.")] = 0,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check a target against the environment contract and its own description. Nothing is stored."""
    subject = _target(read_settings(data_dir, overrides), name, _limits(overrides), refresh=True)
    results = asyncio.run(_check(subject, tasks, seed, as_json))
    failed = [result for result in results if result.ok is False]
    if as_json:
        print_json({"target": subject.name, "ok": not failed, "checks": results})
    else:
        count = sum(result.ok is not None for result in results)
        names = ", ".join(result.name for result in failed)
        summary = f"{len(failed)} of {count} checks failed: {names}" if failed else f"{count} checks passed"
        console.print(summary, highlight=False, markup=False)
    raise typer.Exit(1 if failed else 0)


async def _check(subject: Target, tasks: int, seed: int, is_quiet: bool) -> list[CheckResult]:
    results = []
    async for result in conformance(subject, tasks, seed):
        results.append(result)
        if not is_quiet:
            console.print(f"{MARKS[result.ok]} {result.name:{WIDTH}}", end="", highlight=False)
            observed = result.observed if result.ok is not None else "does not apply"
            console.print(
                f"{sanitize_block(observed, TEXT_LIMIT)}  ", end="", highlight=False, markup=False, soft_wrap=True
            )
            console.print(f"[dim]{result.seconds:.1f} s[/]", highlight=False)
    return results


@target.command()
def play(
    name: Name = None,
    *,
    seed: Annotated[int | None, typer.Option("--seed", help="Play the task of this seed.", show_default=False)] = None,
    task: TaskId = None,
    gold: Annotated[bool, typer.Option("--gold", help="Let the target's gold policy play.")] = False,
    data_dir: DataDir = None,
    overrides: Overrides = None,
) -> None:
    """Play one task by hand, or watch the target's gold policy: what the agent sees, its messages, and the score."""
    settings = read_settings(data_dir, overrides)
    subject = _target(settings, name, _limits(overrides))
    number = _seed(subject, seed, task)
    asyncio.run(_play(subject, settings, number, gold))


def _seed(subject: Target, seed: int | None, task: str | None) -> int:
    tasks = subject.division.tasks
    if task is not None:
        if tasks is None or task not in tasks:
            ids = "seeds: use --seed" if tasks is None else _first(tasks)
            raise ConfigError(f"{subject.name} has no task {task!r}; its tasks are {ids}", hint=_some_task(tasks))
        return tasks.index(task)
    number = subject.splits["train"].start if seed is None else seed
    if not any(number in split for split in subject.splits.values()):
        if tasks is not None:
            raise ConfigError(
                f"{subject.name} has no task {number}, as it has a list of {len(tasks)}: {_first(tasks)}",
                hint=_some_task(tasks),
            )
        ranges = ", ".join(f"{name} {split.start}-{split.stop - 1}" for name, split in subject.splits.items())
        raise ConfigError(f"{subject.name} has no task {number}; its seeds are {ranges}", hint=_some_task(None))
    return number


def _first(tasks: Sequence[str]) -> str:
    return ", ".join(tasks[:MAX_TASKS]) + (", ..." if len(tasks) > MAX_TASKS else "")


def _some_task(tasks: Sequence[str] | None) -> str:
    """Return the option that plays one of the tasks."""
    return "--seed 3" if tasks is None else f"--task {shlex.quote(tasks[0])}"


async def _play(subject: Target, settings: Settings, seed: int, gold: bool) -> None:
    if gold and not subject.description.gold:
        raise ConfigError(f"{subject.name} has no gold policy", hint=f"traced target play {subject.name}, by hand")
    async with _user(subject, settings, gold) as user, subject.source(user) as source:
        turns = max(subject.description.max_turns or 0, ORACLE_TURNS)
        await (_watch(source, seed, turns) if gold else _play_by_hand(source, seed))


async def _watch(source: EpisodeSource, seed: int, turns: int) -> None:
    play = await gold_play(source, seed, turns)
    _show_task(play.task)
    for turn in play.turns:
        for message in (turn.message, *turn.replies):
            _show(message)
    _show_score(play.score, play.done)


async def _play_by_hand(source: EpisodeSource, seed: int) -> None:
    episode = source.episode()
    try:
        start = await episode.reset(seed)
        _show_task(start)
        done, number = False, 0
        while not done and (message := await _message(start.tools, number)) is not None:
            step = await episode.step(message)
            for reply in step.messages:
                _show(reply)
            done, number = step.done, number + 1
        _show_score(await episode.score(), done)
    finally:
        await episode.close()


def _show_task(start: Task) -> None:
    _show({"role": "system", "content": start.system})
    for tool in start.tools:
        _say("tool", json.dumps(tool["function"]), "dim")
    for message in start.messages:
        _show(message)


def _show_score(score: Score, done: bool) -> None:
    parts = "".join(f", {name} {value:g}" for name, value in score.parts.items())
    verdict = "success" if score.success else "failure"
    _say("score", f"{verdict}, reward {score.reward:g}{parts}{'' if done else '; the episode has not ended'}", "bold")


async def _message(tools: list[dict[str, Any]], number: int) -> Message | None:
    """Return what ``_ask`` reads; Ctrl-C ends the wait, which a thread of the event loop's pool would outlive."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Message | None] = loop.create_future()

    def resolve(message: Message | None) -> None:
        if not answer.done():
            answer.set_result(message)

    def read() -> None:
        message = _ask(tools, number)
        # After Ctrl-C the loop is closed.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(resolve, message)

    threading.Thread(target=read, name="reads a message", daemon=True).start()
    return await answer


def _ask(tools: list[dict[str, Any]], number: int) -> Message | None:
    """Read one message from the terminal: a tool's name and its arguments as JSON, or a text; None at the end.

    A call of a tool that does not exist is not sent: it would be a text for the user.
    """
    names = [tool["function"]["name"] for tool in tools]
    while True:
        console.print(f"[bold]you[/] [dim](TOOL {{JSON}}, a text, or {QUIT})[/]: ", end="", highlight=False)
        line = sys.stdin.readline()
        if not line:
            console.print()
        text = line.strip()
        if not line or text == QUIT:
            return None
        name, _, arguments = text.partition(" ")
        if name in names:
            break
        if not names or not _is_call(name, arguments):
            return {"role": "assistant", "content": text}
        _say("note", f"There is no tool {name!r}, and nothing was sent. The tools are: {', '.join(names)}", "dim")
    function = {"name": name, "arguments": arguments.strip() or "{}"}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
    }


def _is_call(name: str, arguments: str) -> bool:
    """Whether a line is meant as a call: a word and a JSON object."""
    try:
        return re.fullmatch(r"[\w.:/-]+", name) is not None and isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


def _show(message: Message) -> None:
    calls = message.get("tool_calls") or []
    if message.get("content") or not calls:
        _say(message["role"], str(message.get("content") or ""))
    for call in calls:
        _say(message["role"], f"{call['function']['name']} {call['function']['arguments']}")


def _say(speaker: str, text: str, style: str = "") -> None:
    console.print(Text.assemble((f"{sanitize_line(speaker):10}", "bold"), (sanitize_block(text, 20_000), style)))


def _target(settings: Settings, name: str | None, limits: Mapping[str, Any], *, refresh: bool = False) -> Target:
    if name is not None and name != settings.target.name:
        settings = with_target(settings, name, **limits)
    return target_of(settings, refresh=refresh)


def _limits(pairs: list[str] | None) -> dict[str, Any]:
    """Return the limits of a target's process that ``--set`` names, by key."""
    values = dict(parse_pair(pair) for pair in pairs or [])
    return {key: values[f"target.{key}"] for key in ("start_s", "step_s") if f"target.{key}" in values}


@asynccontextmanager
async def _user(subject: Target, settings: Settings, gold: bool) -> AsyncIterator[User | None]:
    """Open the model of ``[target.user]`` if the target asks for a user and a person plays; nothing is stored."""
    section = settings.target.user
    if subject.description.user != MODEL_USER:
        yield None
    elif gold or not section.model:
        _say("note", "No model is asked: a user that says its goal or nothing takes its place.", "dim")
        yield SilentUser()
    else:
        async with model_user(section, settings.data_dir, InMemoryLedger(), cycle_id="") as user:
            yield user


def _splits(subject: Target) -> str:
    kind = "seeds" if subject.division.tasks is None else "tasks"
    return f"{kind}: " + ", ".join(f"{name} {len(split):,}" for name, split in subject.splits.items())
