"""The verb that runs the whole cycle: demo."""

from typing import Annotated

import typer

from traced.commands.options import AsJson, DataDir, Given, Model, Seed, Threads, read_settings
from traced.commands.output import console, print_json, progress
from traced.errors import TracedError


def demo(
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Approve what passes its gate, and say so.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Add GRPO directly on the target with as many rollouts.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Decide nothing, and leave everything for traced up and traced tui to show.")
    ] = False,
    data_dir: DataDir = None,
    given: Given = None,
    model: Model = None,
    seed: Seed = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Run one full cycle, or carry on the one that was stopped, and show what it won."""
    from traced.demo import DemoOptions, run_demo
    from traced.figures import as_json as told
    from traced.report import summary_table

    if yes and keep:
        raise TracedError("--yes decides and --keep leaves the decision to you", hint="leave one of them out")
    settings = read_settings(data_dir, given, model__spec=model, seed=seed, engine__threads=threads)
    result = run_demo(DemoOptions(settings, progress, yes, compare, keep))
    if not as_json:
        console.print(summary_table(result.figures))
        for name in result.waiting:
            console.print(f"Waits for a decision: traced explain {name}, then traced approve {name}", highlight=False)
        if result.report:
            console.print(f"Report: {result.report}", highlight=False)
        else:
            console.print("The same command carries on after the decision.", highlight=False)
        if keep:
            where = f" --data-dir {data_dir}" if data_dir else ""
            look = f"traced up{where} in one terminal, traced tui{where} in another"
            console.print(f"To look at all of it: {look}. Nothing begins until traced resume.", highlight=False)
    if as_json:
        waiting = {"waiting": result.waiting} if result.waiting else {}
        print_json({**told(result.figures), **waiting})
