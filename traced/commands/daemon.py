"""Verbs of the service: up, and what is asked of the one that runs: cycle start, cycle cancel, pause, resume."""

import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from traced.commands.options import AsJson, DataDir, Given, Model, Reason, Seed, Threads, read_settings
from traced.commands.output import console, print_json

if TYPE_CHECKING:
    from pathlib import Path

    from traced.client import Client
    from traced.client.models import Done

cycle = typer.Typer(no_args_is_help=True, help="Ask the running service for a cycle, or to end one.")


def up(
    *,
    data_dir: DataDir = None,
    given: Given = None,
    model: Model = None,
    seed: Seed = None,
    threads: Threads = None,
) -> None:
    """Run as a service: carry cycles on, wait for a person where one is needed, until told to stop."""
    from traced.config import for_children
    from traced.service.daemon import up as run

    named = {"engine.threads": threads, "model.spec": model}
    pairs = [*(given or []), *(f"{key}={value}" for key, value in named.items() if value is not None)]
    os.environ.update(for_children(pairs))
    run(lambda: read_settings(data_dir, given, model__spec=model, seed=seed, engine__threads=threads))


@cycle.command("start")
def start(reason: Reason = "", data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Ask for a cycle; it begins once no other is unfinished."""
    _ask(data_dir, as_json, lambda client: client.start_cycle(reason))


@cycle.command("cancel")
def cancel(
    cycle_id: Annotated[str, typer.Argument(metavar="CYCLE", help="The cycle's id.", show_default=False)],
    reason: Reason = "",
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """End an unfinished cycle for good."""
    _ask(data_dir, as_json, lambda client: client.cancel(cycle_id, reason))


def pause(reason: Reason = "", data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Stop the cycle at its next safe point, and begin none until resumed."""
    _ask(data_dir, as_json, lambda client: client.pause(reason))


def resume(reason: Reason = "", data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Go on after a pause."""
    _ask(data_dir, as_json, lambda client: client.resume(reason))


def _ask(data_dir: "Path | None", as_json: bool, act: "Callable[[Client], Awaitable[Done]]") -> None:
    """Ask the service of the data directory, and tell what it said."""
    import asyncio

    from traced.client import Client, default_socket
    from traced.location import data_directory

    async def ask() -> "Done":
        async with Client(default_socket(data_directory(data_dir))) as client:
            return await act(client)

    done = asyncio.run(ask())
    if as_json:
        print_json(done.model_dump())
    else:
        console.print(f"{done.said}. Next: traced status", highlight=False)
