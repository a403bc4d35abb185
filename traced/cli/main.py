"""The ``traced`` command: one verb per step of the cycle.

Invariants: stdout belongs to output, progress and errors go to stderr; with ``--json`` the last line of stdout is one
JSON object. Modules of verbs import nothing heavy until a verb runs, so that ``traced --help`` answers at once.
How it fails: ``traced.cli.output`` turns every exception into a message and an exit code, in one place.
"""

from typing import Annotated

import typer

from traced.cli import (
    analysis,
    daemon,
    decisions,
    demo,
    evidence,
    interchange,
    keys,
    maintenance,
    outcomes,
    setup,
    stages,
    status,
)
from traced.cli import daemon as service
from traced.cli import daemon as tui
from traced.cli import setup as devices
from traced.cli import setup as llm
from traced.cli.output import Verbs, stop_on_signals

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
app.command()(keys.serve)
app.add_typer(keys.keys, name="keys")
app.add_typer(daemon.cycle, name="cycle")
app.command()(daemon.pause)
app.command()(daemon.resume)
app.command()(setup.doctor)
app.command()(demo.demo)
app.command()(stages.collect)
app.command("import")(interchange.import_)
app.add_typer(outcomes.outcomes, name="outcomes")
app.command()(analysis.analyze)
app.add_typer(llm.llm, name="llm")
app.command()(stages.synthesize)
app.command()(stages.admit)
app.command()(interchange.export)
app.command()(evidence.optimize_prompt)
app.command()(evidence.prompts)
app.command()(stages.train)
app.command()(stages.evaluate)
app.command()(decisions.approve)
app.command()(decisions.reject)
app.command()(decisions.rollback)
app.command()(decisions.release)
app.command()(status.status)
app.command()(tui.tui)
app.command()(status.explain)
app.add_typer(status.show, name="show")
app.command()(maintenance.backup)
app.command()(maintenance.restore)
app.command()(maintenance.prune)
app.add_typer(maintenance.db, name="db")
app.command()(devices.devices)
app.add_typer(setup.sandbox, name="sandbox")
app.add_typer(service.service, name="service")


def main() -> None:
    """Run the command line; exits."""
    stop_on_signals()
    app()
