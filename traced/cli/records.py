"""The command records acknowledge: losses of records that a person has seen."""

from datetime import UTC, datetime

import typer

from store.records import AuditEntry
from store.repositories.events import save_audit
from traced.cli.options import AsJson, DataDir, Overrides, Reason, read_settings
from traced.cli.output import console, print_json
from traced.cli.store_session import writing
from traced.core.ownership import this_user
from traced.ingest.losses import describe, read_losses, remove_losses

records = typer.Typer(
    no_args_is_help=True, help="Records of the router that could not be kept, for example on a full disk."
)


@records.callback()
def records_options() -> None:
    """Records of the router that could not be kept."""


@records.command("acknowledge")
def acknowledge(
    reason: Reason = "", data_dir: DataDir = None, overrides: Overrides = None, as_json: AsJson = False
) -> None:
    """Acknowledge the records lost until now, so that status, doctor and the router no longer report them."""
    settings = read_settings(data_dir, overrides)
    folder = settings.data_dir / "spool"
    losses = read_losses(folder)
    counts = {kind: loss.count for kind, loss in losses.items()}
    if losses:
        with writing(settings) as session:
            detail: dict[str, object] = {"losses": describe(losses)}
            entry = AuditEntry(datetime.now(UTC), this_user(), "local", "acknowledge losses", "records", reason, detail)
            save_audit(session, entry)
        remove_losses(folder, losses)
    if as_json:
        print_json({"acknowledged": counts})
    elif losses:
        console.print(f"Acknowledged: {describe(losses)}.", highlight=False, markup=False)
    else:
        console.print("There are no losses to acknowledge.", highlight=False)
