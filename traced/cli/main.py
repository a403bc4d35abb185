"""The ``traced`` command: one verb per step of the cycle.

Invariants: stdout belongs to output, progress and errors go to stderr; with ``--json`` the last line of stdout is one
JSON object. A verb's module is imported when that verb is called; ``traced --help`` prints the table below and imports
none of them. A module of light verbs imports nothing at its top that only heavy verbs need.
How it fails: ``traced.cli.output`` turns every exception into a message and an exit code, in one place.
"""

from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand
from typer.main import get_group

from traced.cli.output import Verbs, stop_on_signals


class Verb(NamedTuple):
    """Where a verb or a group of verbs is defined, and its line in ``traced --help``."""

    module: str  # of traced.cli
    attribute: str
    help: str  # the first paragraph of the verb's docstring or of the group's help


VERBS = {
    "init": Verb("setup", "init", "Make the data directory with a commented traced.toml (an existing one is kept)."),
    "up": Verb(
        "servers",
        "up",
        "Run as a service: carry cycles on, wait for a person where one is needed, until told to stop.",
    ),
    "serve": Verb(
        "servers",
        "serve",
        "Run the router that agents point at: an OpenAI-compatible endpoint over the base model and the live adapters.",
    ),
    "pause": Verb("daemon", "pause", "Stop the cycle at its next safe point, and begin none until resumed."),
    "resume": Verb("daemon", "resume", "Go on after a pause."),
    "doctor": Verb(
        "setup", "doctor", "Check this machine in order, and name the next command for everything that is missing."
    ),
    "demo": Verb("demo", "demo", "Run one full cycle, or carry on the one that was stopped, and show what it won."),
    "collect": Verb("stages", "collect", "Record episodes of the base model on the target's train split."),
    "import": Verb(
        "interchange", "import_", "Take in recorded trajectories; what only a grader could know is left behind."
    ),
    "analyze": Verb(
        "analysis", "analyze", "Find the capabilities that failures lack, in what was collected or imported last."
    ),
    "synthesize": Verb(
        "stages",
        "synthesize",
        "Write an environment for each retained capability; what reading it refuses is written anew at once.",
    ),
    "admit": Verb(
        "admission",
        "admit",
        "Check each written environment in a container; or any single-file environment, with no store, cycle or model.",
    ),
    "export": Verb(
        "interchange",
        "export",
        "Write an environment as a package that verifiers or OpenEnv can load; none of it needs traced.",
    ),
    "optimize-prompt": Verb(
        "stages",
        "optimize_prompt",
        "Evolve a prompt for a capability, and say which is enough: the prompt or the adapter. "
        "Carries on when stopped.",
    ),
    "prompts": Verb(
        "evidence",
        "prompts",
        "List the prompt patches, newest first: what each does for its capability, and whether it is enough.",
    ),
    "train": Verb(
        "stages", "train", "Train an adapter in each admitted environment; carries on from the last checkpoint."
    ),
    "evaluate": Verb("stages", "evaluate", "Gate each trained adapter against the base model on the same seeds."),
    "approve": Verb(
        "decisions",
        "approve",
        "Approve an adapter that passed its gate and put it live, at once or step by step; or a prompt that is enough.",
    ),
    "reject": Verb("decisions", "reject", "Decide against an adapter, which takes no traffic, or against a prompt."),
    "rollback": Verb("decisions", "rollback", "Undo the last promotion, or that of one adapter."),
    "release": Verb("decisions", "release", "Let an input that failed too often be tried again."),
    "status": Verb(
        "status",
        "status",
        "Show the cycles, what waits for a decision or is parked, what is live, and what the router does.",
    ),
    "tui": Verb(
        "daemon",
        "tui",
        "Watch cycles, read the evidence and decide, in a terminal; opening and closing it changes nothing.",
    ),
    "explain": Verb("evidence", "explain", "Print the whole chain of evidence behind an adapter."),
    "backup": Verb(
        "maintenance",
        "backup",
        "Back up store, checkpoints, adapters, environments, runs and settings into one verified file.",
    ),
    "restore": Verb("maintenance", "restore", "Bring a backup back as the data directory, in one step."),
    "prune": Verb(
        "maintenance",
        "prune",
        "Delete what the settings' \\[retention] lets go; what evidence refers to always stays.",
    ),
    "devices": Verb(
        "resources", "devices", "Show each device: its load, whether it is idle or why not, and who holds it."
    ),
    "keys": Verb("keys", "keys", "Who may ask the router. While there is no key, all on this machine may."),
    "cycle": Verb("daemon", "cycle", "Ask the running service for a cycle, or to end one."),
    "outcomes": Verb("outcomes", "outcomes", "How conversations went that nobody scored: rules and a judge."),
    "llm": Verb("resources", "llm", "The language model of analyst and synthesizer: \\[llm] in the settings."),
    "show": Verb("show", "show", "Show one thing in full."),
    "db": Verb("maintenance", "db", "The schema of the store's database."),
    "sandbox": Verb("setup", "sandbox", "The container image that synthetic environments run in."),
    "service": Verb("daemon", "service", "Run the daemon under systemd."),
}


def load(name: str) -> Any:
    """The command behind a verb's name, with its options; imports the verb's module."""
    verb = VERBS[name]
    definition = getattr(import_module(f"traced.cli.{verb.module}"), verb.attribute)
    parent = typer.Typer()
    if isinstance(definition, typer.Typer):
        parent.add_typer(definition, name=name)
    else:
        parent.command(name)(definition)
    return get_group(parent).commands[name]


class LazyVerbs(Verbs):
    """The verbs of the table, each imported when the command line calls it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # Stand-ins with a name and a help line. They are all that the list of verbs, the suggestions for a misspelt
        # one and the completion of its name need.
        self.commands = {name: TyperCommand(name, help=verb.help) for name, verb in VERBS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Replace the stand-in of the verb that is called (or whose options are to be completed) by the verb."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load(name), rest


app = typer.Typer(
    name="traced",
    cls=LazyVerbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Find what an agent cannot do, train one adapter for each lack, and route to those that a person approved.",
)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (or TRACED_DEBUG=1).")] = False,
) -> None:
    """Options before the verb."""


def main() -> None:
    """Run the command line; exits."""
    stop_on_signals()
    app()
