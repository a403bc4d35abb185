"""Command that reconstructs the world of a recorded target and proves it by replay: world."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from store.text import sanitize_line
from traced.cli.current_cycle import on_cycle
from traced.cli.options import AsJson, DataDir, Model, Overrides, Seed, read_settings
from traced.cli.output import console, print_json, write_new_file
from traced.core.errors import TracedError
from traced.evaluation.world_agreement import WorldFigures, agreement_json, agreement_lines
from traced.pipeline.context import Context
from traced.pipeline.world import TargetWorld, make_world, prove_world
from traced.targets.conversation_target import conversation_target

LINE = 400  # characters: the name of a tool, and six shares


def world(
    *,
    output: Annotated[
        Path | None, typer.Option("--into", metavar="FILE.py", help="Write the world to this file.", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    model: Model = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Reconstruct what a recorded target's tools answer, and replay recorded calls in it, in a container.

    The world is made of the conversations that are not held out. `traced synthesize` makes it too, and `traced admit`
    replays the calls.
    """
    settings = read_settings(data_dir, overrides, model__spec=model, seed=seed)
    if not conversation_target(settings).is_recorded:
        raise TracedError(
            f"{settings.target.name} is no target of recorded conversations, so it needs no reconstruction",
            hint='set target.kind = "recorded"',
        )

    async def work(context: Context) -> tuple[TargetWorld, WorldFigures]:
        return await make_world(context), await prove_world(context)

    target_world, figures = on_cycle(settings, work, create=True)
    if output is not None:
        write_new_file(output, target_world.source_code)
    if as_json:
        print_json(
            {
                "target": settings.target.name,
                "world": figures.digest,
                "conversations": target_world.conversations,
                "agreement": agreement_json(figures.agreement),
                "omitted": [asdict(item) for item in figures.omitted],
                **({"functions": asdict(figures.functions)} if figures.functions else {}),
            }
        )
        return
    console.print(
        f"world:{figures.digest[:12]} of {settings.target.name}, made of {figures.conversations} conversations",
        highlight=False,
    )
    for split, rows in figures.agreement.items():
        if rows:
            console.print(f"\nCalls of {split} conversations, shares with their 95 % intervals:", highlight=False)
        for line in agreement_lines(rows, figures.function_proofs):
            console.print(f"  {sanitize_line(line, LINE)}", highlight=False, markup=False, soft_wrap=True)
    _print_functions(figures)
    if figures.omitted:
        console.print("\nTools that the world omits, because its answers were wrong:", highlight=False)
    for item in figures.omitted:
        console.print(f"  {sanitize_line(item.text)}", highlight=False, markup=False, soft_wrap=True)


def _print_functions(figures: WorldFigures) -> None:
    """Print what a model wrote for the world, if one was asked."""
    functions = figures.functions
    if functions is None:
        return
    console.print("\nFunctions that the model wrote, on calls that it had not seen, in context:", highlight=False)
    if functions.reason:
        console.print(f"  none is used: {sanitize_line(functions.reason)}", highlight=False, markup=False)
    for proof in functions.proofs:
        console.print(f"  {sanitize_line(proof.text, LINE)}", highlight=False, markup=False, soft_wrap=True)
