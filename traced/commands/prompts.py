"""The verbs optimize-prompt, prompts and show patch, and a prompt patch as lines of text."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from traced.commands.options import AsJson, DataDir, Given, Model, Seed, Threads, read_settings
from traced.commands.output import console, print_json
from traced.errors import TracedError

if TYPE_CHECKING:
    from store.records import PromptPatch
    from store.types import GateResult
    from traced.prompting.decisions import PromptDecision
    from traced.stages.context import Context

ALLOW = " (prompting.max_tokens, max_cost and max_minutes allow more)"
SIDES = {
    "prompt": ("prompt", "base", "prompt"),
    "adapter": ("adapter", "base", "adapter"),
    "comparison": ("both", "adapter", "prompt"),
}  # of a gate: its heading, who was there before, who came after
PAIRED = "in pairs, each side on the same seeds, which nothing was evolved or trained on"
ENDS = {"rollouts": "no step more fits the rollouts", "perfect": "nothing was left to better"}


def optimize_prompt(
    capability: Annotated[str, typer.Argument(help="Of the current cycle, with an admitted environment.")],
    *,
    data_dir: DataDir = None,
    given: Given = None,
    model: Model = None,
    seed: Seed = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Evolve a prompt for a capability, and say which is enough: the prompt or the adapter. Carries on when stopped."""
    settings = read_settings(data_dir, given, model__spec=model, seed=seed, engine__threads=threads)

    async def work(context: "Context") -> "PromptPatch":
        from traced.stages.optimize_prompt import optimize_prompt as station

        return await station(context, capability, _environment(context, capability))

    from traced.commands.current import on_cycle

    patch = on_cycle(settings, work)
    if as_json:
        print_json(told(patch))
        return
    for line in patch_lines(patch):
        console.print(line, highlight=False, markup=False)


def prompts(
    capability: Annotated[str | None, typer.Argument(help="Default: all.", show_default=False)] = None,
    *,
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """List the prompt patches, newest first: what each does for its capability, and whether it is enough."""
    from rich.table import Column, Table
    from rich.text import Text

    from store.plain import line
    from store.repositories.thinking import list_patches
    from traced.commands.stored import looking
    from traced.prompting.decisions import decisions
    from traced.prompting.patches import SHORT, enough

    with looking(read_settings(data_dir, given)) as opened:
        found, decided = list_patches(opened, capability=capability)[::-1], decisions(opened)
    if as_json:
        print_json({"prompts": [told(one, decided.get(one.id)) for one in found]})
        return
    if not found:
        console.print(f"No prompt patches. Next: traced optimize-prompt {capability or 'CAPABILITY'}", highlight=False)
        return
    patch_id = Column("patch", no_wrap=True, min_width=SHORT)  # what one copies
    table = Table(patch_id, "cycle", "capability", "says", "in its environment", "made", "decision")
    for one in found:
        said = f"{decided[one.id].decision.value} by {decided[one.id].who}" if one.id in decided else ""
        made = f"{one.at:%Y-%m-%d %H:%M}"
        table.add_row(one.id[:SHORT], one.cycle_id, one.capability, enough(one), _won(one), made, Text(line(said)))
    console.print(table)
    console.print("To read one and take it: traced show patch PATCH --into FILE", highlight=False)


def patch(
    digits: Annotated[str, typer.Argument(metavar="ID", help="Of a prompt patch; its first digits are enough.")],
    *,
    into: Annotated[
        Path | None, typer.Option("--into", metavar="FILE", help="Write its text there.", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Show a prompt patch, what the gates say of it, and how to use it; --into takes its text."""
    from traced.commands.stored import looking
    from traced.prompting.decisions import decisions
    from traced.prompting.patches import named

    with looking(read_settings(data_dir, given)) as opened:
        found = named(opened, digits)
        decided = decisions(opened).get(found.id)
    if into is not None:
        _write(found.text, into)
    if as_json:
        print_json(told(found, decided) | ({"file": into.absolute()} if into is not None else {}))
        return
    for line in patch_lines(found, decided):
        console.print(line, highlight=False, markup=False)
    if into is not None:
        console.print(f"Wrote its text into {into}", highlight=False, markup=False)


def told(patch: "PromptPatch", decided: "PromptDecision | None" = None) -> dict[str, Any]:
    """A prompt patch as JSON."""
    named = {"cycle": patch.cycle_id, "capability": patch.capability, "patch": patch.id, "text": patch.text}
    return {**named, **patch.figures, "at": patch.at, "decision": decided}


def patch_lines(patch: "PromptPatch", decided: "PromptDecision | None" = None) -> Iterator[str]:
    """What a prompt patch is worth, its text, what was decided, and what to do with it."""
    from store.plain import block
    from traced.prompting.patches import SHORT, enough, gates

    yield f"{patch.capability}: {enough(patch)}"
    if "evolution" in patch.figures:
        yield from _evolution(patch.figures["evolution"], patch.figures["spent"])
    compared = gates(patch)
    if compared:
        yield f"compared     {PAIRED}"
    for name, result in compared.items():
        yield from _gate(result, *SIDES[name])
    short = patch.id[:SHORT]
    yield f"patch        {short} of cycle {patch.cycle_id}; traced show patch {short} --into FILE takes its text:"
    yield ""
    yield block(patch.text)
    yield ""
    if decided is not None:
        yield f"decision     {decided}"
    yield _next(patch, decided is None)


def _evolution(told: dict[str, Any], spent: dict[str, Any]) -> Iterator[str]:
    ended = ENDS.get(told["stopped_by"]) or told["stopped_by"] + ALLOW
    yield (
        f"evolved      {told['rollouts']} of {told['budget']} rollouts, as many as the adapter's training; "
        f"reward on {told['seeds']} seeds "
        f"{told['first']:.2f} to {told['validation']:.2f}; texts proposed: {told['proposed']}, better "
        f"than the one before: {told['kept']}; ended because {ended}"
    )
    tokens = spent["prompt_tokens"] + spent["completion_tokens"]
    yield (
        f"spent        {spent['calls']} replies of the language model, {tokens} tokens, cost {spent['cost']:g}, "
        f"{spent['seconds']:.0f} s of waiting"
    )


def _gate(gate: "GateResult", name: str, before: str, after: str) -> Iterator[str]:
    from traced.commands.chain import comparison_line

    yield f"{name:12} {gate.adapter}: {gate.answer} after {gate.rounds} rounds"
    for one in gate.comparisons:
        yield f"             {comparison_line(one, before, after)}"


def _won(patch: "PromptPatch") -> str:
    """What it does for the base model in the capability's environment."""
    from traced.prompting.patches import gates

    for one in gates(patch)["prompt"].comparisons if patch.figures.get("gates") else []:
        if one.name == "environment":
            return f"{100 * one.base:.0f} % to {100 * one.adapter:.0f} % on {one.seeds} seeds"
    return ""


def _next(patch: "PromptPatch", undecided: bool) -> str:
    """What to do now."""
    from traced.prompting.enough import Enough
    from traced.prompting.patches import SHORT, enough, gates

    says, compared = enough(patch), gates(patch)
    if says == Enough.PROMPT:
        use = "To use it, put the text at the end of your agent's system prompt; the base model follows it unchanged."
        return f"{use} Then: traced approve {patch.id[:SHORT]}, for the record" if undecided else use
    if says == Enough.ADAPTER:
        adapter = compared["adapter"].adapter
        return f"Next: traced explain {adapter}, then traced approve {adapter}"
    if "adapter" not in compared:
        return f"Next: traced train {patch.capability}; the same command compares the adapter then"
    if says == Enough.INCONCLUSIVE:
        return "More episodes decide: raise gate.seeds or gate.max_rounds for the next cycle"
    return "Next: traced status"


def _write(text: str, into: Path) -> None:
    """A new file with the text and a line's end; what is there already is left alone."""
    try:
        with into.open("x", encoding="utf-8") as file:
            file.write(f"{text}\n")
    except FileExistsError:
        raise TracedError(f"{into} is there already", hint="--into with another name") from None
    except OSError as error:
        raise TracedError(f"{into} cannot be written: {error.strerror}", hint="--into with another name") from None


def _environment(context: "Context", capability: str) -> str:
    """The newest admitted environment of a capability."""
    from traced.commands.current import admitted_environments, applicable, environments

    retained = applicable(context, "retained")
    if not retained:
        raise TracedError(f"cycle {context.cycle_id} has no retained capability", hint="traced analyze")
    if capability not in retained:
        raise TracedError(
            f"{capability!r} is no retained capability of cycle {context.cycle_id}",
            hint=f"one of: {', '.join(retained)}",
        )
    admitted = admitted_environments(context, capability)
    if not admitted:
        written = environments(context, capability)
        raise TracedError(
            f"no environment of {capability} is admitted, so there is nothing to evolve a prompt on",
            hint=f"traced admit {capability}" if written else f"traced synthesize {capability}",
        )
    return admitted[-1]
