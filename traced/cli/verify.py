"""The command ``traced verify``: check what the store names by its content, or end the quarantine of an adapter."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from store.text import sanitize_line
from traced.cli.options import AsJson, DataDir, Overrides, Reason, read_settings
from traced.cli.output import console, print_json
from traced.cli.store_session import opened_store
from traced.core.ownership import this_user


def verify(
    *,
    adapter: Annotated[
        str | None,
        typer.Option(
            "--release",
            metavar="ADAPTER",
            help="End the quarantine of an adapter version whose files are right again.",
            show_default=False,
        ),
    ] = None,
    reason: Reason = "",
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check adapters, environments and the audit log against the hashes in the store; exit code 1 if any differs."""
    # Imported late: with the registry ``traced --help`` would take twice the time.
    from traced.registry import verification
    from traced.registry.decision_rules import Action

    settings = read_settings(data_dir, overrides)
    root, hooks = settings.serving.adapters_root, settings.notify.names
    with opened_store(settings) as store:
        if adapter is not None:
            action = Action(this_user(), "local", datetime.now(UTC), reason)
            version = verification.release(store, root, action, adapter)
            if as_json:
                print_json({"released": version.name})
            else:
                console.print(f"{version.name} is released from quarantine", highlight=False, markup=False)
            return
        problems = [
            *verification.adapter_problems(store, root, hooks, lambda: datetime.now(UTC)),
            *verification.row_problems(store),
        ]
    if as_json:
        print_json({"problems": problems})
    elif problems:
        # No table of Rich, which would wrap the reasons: each problem has one line.
        width = max(len(problem.name) for problem in problems)
        for problem in problems:
            line = f"{problem.kind:<11}  {problem.name:<{width}}  {problem.text}"
            console.print(sanitize_line(line), highlight=False, markup=False, soft_wrap=True)
    else:
        console.print("Every adapter, every environment and the audit log are as they were stored.", highlight=False)
    raise typer.Exit(1 if problems else 0)
