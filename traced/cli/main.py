"""The ``traced`` command line: one subcommand (verb) per step of the cycle.

Invariants: results go to stdout, progress and errors to stderr; with ``--json`` the last line of stdout is one JSON
object. The module of a verb is imported when that verb is called; ``traced --help`` prints the table below and imports
none of them. At its top, a module of light verbs imports nothing that only heavy verbs need.
How it fails: ``traced.cli.output`` alone turns exceptions into a message and an exit code.
"""

from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand
from typer.main import get_group

from traced.cli.output import Verbs, stop_on_signals
from traced.core.permissions import private_umask


class Verb(NamedTuple):
    """Where a verb or a group of verbs is defined, and its line in ``traced --help``."""

    module: str  # name inside traced.cli
    attribute: str
    help: str  # the first paragraph of the verb's docstring or of the group's help


VERBS = {
    "init": Verb("setup", "init", "Create the data directory with a commented traced.toml; an existing file is kept."),
    "up": Verb(
        "servers",
        "up",
        "Run the service until it is stopped: it runs cycles and waits for decisions of a person.",
    ),
    "serve": Verb(
        "servers",
        "serve",
        "Run the router, an OpenAI-compatible endpoint that serves the base model and the live adapters to agents.",
    ),
    "pause": Verb(
        "daemon", "pause", "Pause the current cycle at its next safe point; no cycle starts until traced resume."
    ),
    "resume": Verb("daemon", "resume", "Resume a paused cycle and allow new cycles."),
    "doctor": Verb("setup", "doctor", "Check this machine and print a command for each thing that is missing."),
    "demo": Verb(
        "demo", "demo", "Run full cycles, or resume a stopped one, and print the success rates before and after."
    ),
    "requalify": Verb(
        "requalify",
        "requalify",
        "Prepare a new base model: calibrate the live adapters' environments, train again, compare with what is live.",
    ),
    "collect": Verb("stages", "collect", "Record episodes of the live system on the target's train split."),
    "import": Verb(
        "interchange",
        "import_",
        "Import recorded trajectories. Hidden instructions, expected actions and grading criteria are not imported.",
    ),
    "analyze": Verb(
        "analysis",
        "analyze",
        "Find the capabilities that the agent lacked in failed trajectories of the newest collection or import.",
    ),
    "attribute": Verb(
        "attribution",
        "attribute",
        "Play failed tasks again with each live adapter, and decide which retained capabilities are trained.",
    ),
    "world": Verb(
        "world",
        "world",
        "Reconstruct what a recorded target's tools answer, and replay recorded calls in it, in a container.",
    ),
    "synthesize": Verb(
        "stages",
        "synthesize",
        "Write an environment for each retained capability; one that fails the static checks is rewritten at once.",
    ),
    "admit": Verb(
        "admission",
        "admit",
        "Check the environments of the cycle in a container, or a single environment file without a store or model.",
    ),
    "export": Verb(
        "interchange",
        "export",
        "Export an environment as a package for verifiers or OpenEnv that does not depend on traced.",
    ),
    "optimize-prompt": Verb(
        "stages",
        "optimize_prompt",
        "Optimize a prompt for a capability and compare it with the adapter. A stopped run is resumed.",
    ),
    "prompts": Verb(
        "evidence",
        "prompts",
        "List the prompt patches, newest first: the gain of each, and whether it makes an adapter unnecessary.",
    ),
    "train": Verb(
        "stages",
        "train",
        "Train an adapter in each admitted environment; a stopped run resumes from its last checkpoint.",
    ),
    "evaluate": Verb(
        "stages", "evaluate", "Run the gate of each trained adapter: compare it with the base model on the same seeds."
    ),
    "compose": Verb(
        "composition",
        "compose",
        "Compare the ways in which the adapters that passed their gate can answer together, and store the best one.",
    ),
    "approve": Verb(
        "decisions",
        "approve",
        "Approve an adapter that passed its gate, which then takes traffic; or record the approval of a prompt.",
    ),
    "reject": Verb("decisions", "reject", "Reject an adapter, which then takes no traffic, or a prompt."),
    "rollback": Verb("decisions", "rollback", "Undo the last promotion, or the promotion of the named adapter."),
    "release": Verb("decisions", "release", "Release a quarantined input: the service retries it."),
    "status": Verb(
        "status",
        "status",
        "Show cycles, pending decisions, quarantined inputs, live adapters and the traffic of the router.",
    ),
    "tui": Verb(
        "daemon",
        "tui",
        "Open the terminal interface: watch cycles, read the evidence, approve or reject adapters.",
    ),
    "explain": Verb(
        "evidence", "explain", "Print the evidence behind an adapter, from the trajectories to its traffic."
    ),
    "audit": Verb(
        "audit",
        "audit",
        "List the audit log; print its head, to keep it elsewhere; or check that nobody has changed the log.",
    ),
    "verify": Verb(
        "verify",
        "verify",
        "Check adapters, environments and the audit log against the hashes in the store; exit code 1 if any differs.",
    ),
    "backup": Verb(
        "maintenance",
        "backup",
        "Write store, checkpoints, adapters, environments, runs and settings into one verified backup file.",
    ),
    "restore": Verb("maintenance", "restore", "Restore the data directory from a backup, in one atomic step."),
    "prune": Verb(
        "maintenance",
        "prune",
        "Delete data older than the limits of \\[retention] in the settings; evidence is never deleted.",
    ),
    "target": Verb("targets", "target", "Targets: the worlds in which agents are played and judged."),
    "devices": Verb(
        "resources", "devices", "List the devices: load, whether idle (or why not), and the holder of the lease."
    ),
    "keys": Verb(
        "keys", "keys", "API keys of the router. Without any key the router accepts all requests from this machine."
    ),
    "tokens": Verb(
        "tokens",
        "tokens",
        "Tokens of the control API on TCP (api.port), one per person. The Unix socket needs none.",
    ),
    "engines": Verb(
        "engines",
        "engines",
        "Engines that all routers of the store use in addition to engine.urls, without a restart.",
    ),
    "records": Verb("records", "records", "Records of the router that could not be kept, for example on a full disk."),
    "cycle": Verb("daemon", "cycle", "Request a cycle from the running service, or cancel one."),
    "outcomes": Verb(
        "outcomes", "outcomes", "Outcomes of conversations without a score, by rules, a judge model or a person."
    ),
    "llm": Verb("resources", "llm", "The language model that analyst and synthesizer use, \\[llm] in the settings."),
    "show": Verb("show", "show", "Show one environment, prompt patch or conversation in full."),
    "db": Verb("maintenance", "db", "The schema of the store's database."),
    "sandbox": Verb("setup", "sandbox", "The container image that synthetic environments run in."),
    "service": Verb("daemon", "service", "Run the service under systemd."),
}


def load(name: str) -> Any:
    """Import the module of a verb, and return its command with its options."""
    verb = VERBS[name]
    definition = getattr(import_module(f"traced.cli.{verb.module}"), verb.attribute)
    parent = typer.Typer()
    if isinstance(definition, typer.Typer):
        parent.add_typer(definition, name=name)
    else:
        parent.command(name)(definition)
    return get_group(parent).commands[name]


class LazyVerbs(Verbs):
    """The verbs of the table; each is imported when the command line calls it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # Placeholders with a name and a help line, which suffice for the list of verbs, suggestions for a misspelt verb
        # and the completion of its name.
        self.commands = {name: TyperCommand(name, help=verb.help) for name, verb in VERBS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Replace the placeholder of the verb that is called (or whose options are completed) by the verb."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load(name), rest


app = typer.Typer(
    name="traced",
    cls=LazyVerbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Find the capabilities that an agent lacks, train an adapter for each, and route to the approved adapters.",
)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (or TRACED_DEBUG=1).")] = False,
) -> None:
    """Options before the verb."""


def main() -> None:
    """Run the command line and exit."""
    private_umask()
    stop_on_signals()
    app()
