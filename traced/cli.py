"""The ``traced`` command: one verb per step of the cycle.

Invariants: stdout belongs to output, progress and errors go to stderr; with ``--json`` the last line of stdout is one
JSON object. Modules of verbs import nothing heavy until a verb runs, so that ``traced --help`` answers at once.
How it fails: ``traced.commands.boundary`` turns every exception into a message and an exit code, in one place.
"""

from typing import Annotated

import typer

from traced.commands import (
    daemon,
    decide,
    devices,
    export,
    importing,
    llm,
    outcomes,
    prompts,
    run,
    service,
    serving,
    setup,
    show,
    steps,
    tui,
    upkeep,
)
from traced.commands.boundary import Verbs, stop_on_signals

app = typer.Typer(
    name="traced",
    cls=Verbs,
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


app.command()(setup.init)
app.command()(daemon.up)
app.command()(serving.serve)
app.add_typer(serving.keys, name="keys")
app.add_typer(daemon.cycle, name="cycle")
app.command()(daemon.pause)
app.command()(daemon.resume)
app.command()(setup.doctor)
app.command()(run.demo)
app.command()(steps.collect)
app.command("import")(importing.import_)
app.add_typer(outcomes.outcomes, name="outcomes")
app.add_typer(llm.llm, name="llm")
app.command()(run.analyze)
app.command()(steps.synthesize)
app.command()(steps.admit)
app.command()(export.export)
app.command()(prompts.optimize_prompt)
app.command()(prompts.prompts)
app.command()(steps.train)
app.command()(steps.evaluate)
app.command()(decide.approve)
app.command()(decide.reject)
app.command()(decide.rollback)
app.command()(decide.release)
app.command()(show.status)
app.command()(tui.tui)
app.command()(show.explain)
app.add_typer(show.show, name="show")
app.command()(upkeep.backup)
app.command()(upkeep.restore)
app.command()(upkeep.prune)
app.add_typer(upkeep.db, name="db")
app.command()(devices.devices)
app.add_typer(setup.sandbox, name="sandbox")
app.add_typer(service.service, name="service")


def main() -> None:
    """Run the command line; exits."""
    stop_on_signals()
    app()
