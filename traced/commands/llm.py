"""Verbs of the language model that analyses and synthesises."""

from typing import TYPE_CHECKING

import typer

from traced.commands.options import AsJson, DataDir, Given, read_settings
from traced.commands.output import console, print_json

if TYPE_CHECKING:
    from traced.llm.check import Seen

MARKS = {True: "[green]ok[/]", False: "[bold red]no[/]", None: "[dim]--[/]"}
WIDTH = 14
TOLD = 600  # characters

llm = typer.Typer(no_args_is_help=True, help="The language model of analyst and synthesizer: \\[llm] in the settings.")


@llm.command("check")
def check(data_dir: DataDir = None, given: Given = None, as_json: AsJson = False) -> None:
    """Ask the language model a few things: is it there, how does it answer, how fast? Nothing is stored."""
    import asyncio

    from traced.llm import check as checking

    settings = read_settings(data_dir, given)
    found = asyncio.run(checking.check(settings.llm, lambda one: None if as_json else _print(one)))
    if as_json:
        figures = {key: value for key, value in vars(found).items() if key != "seen"}
        print_json({"ok": found.ok, **figures, "seen": found.seen})
    elif found.ok:
        console.print(f"{found.model} can be worked with.", highlight=False, markup=False)
    if not found.ok:
        raise typer.Exit(1)


def _print(one: "Seen") -> None:
    from rich.markup import escape
    from rich.text import Text

    from store.plain import line

    console.print(f"{MARKS[one.passed]}  {one.name:{WIDTH}}", end="", highlight=False)
    console.print(Text(line(one.told, TOLD)))
    if one.hint:
        console.print(f"{'':{WIDTH + 4}}[bold]Try:[/] {escape(one.hint)}", highlight=False)
