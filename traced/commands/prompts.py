"""The verb optimize-prompt, and a prompt patch as lines of text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from traced.commands.options import AsJson, DataDir, Given, Model, Seed, Threads, read_settings
from traced.commands.output import console, print_json
from traced.errors import TracedError

if TYPE_CHECKING:
    from store.records import PromptPatch
    from traced.stages.context import Context

ALLOW = " (prompting.max_tokens, max_cost and max_minutes allow more)"
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


def told(patch: "PromptPatch") -> dict[str, Any]:
    """A prompt patch as JSON."""
    named = {"cycle": patch.cycle_id, "capability": patch.capability, "patch": patch.id, "text": patch.text}
    return {**named, **patch.figures, "at": patch.at}


def patch_lines(patch: "PromptPatch") -> Iterator[str]:
    """What a prompt patch is worth, its text, and what to do with it."""
    from store.plain import block

    figures = patch.figures
    yield f"{patch.capability}: {figures['enough']}"
    yield from _evolution(figures["evolution"], figures["spent"])
    gates = figures["gates"]
    yield from _gate("prompt", gates["prompt"], "base", "prompt")
    if "adapter" in gates:
        yield from _gate("adapter", gates["adapter"], "base", "adapter")
    if "comparison" in gates:
        yield from _gate("both", gates["comparison"], "adapter", "prompt")
    yield f"patch        {patch.id[:12]} of cycle {patch.cycle_id}; traced show patch {patch.id[:12]} prints it again:"
    yield ""
    yield block(patch.text)
    yield ""
    yield _next(patch)


def _evolution(told: dict[str, Any], spent: dict[str, Any]) -> Iterator[str]:
    yield (
        f"evolved      {told['rollouts']} of {told['budget']} rollouts; reward on {told['seeds']} seeds "
        f"{told['first']:.2f} to {told['validation']:.2f}; {told['proposed']} texts proposed, {told['kept']} better "
        f"than the one before; ended because {ENDS.get(told['stopped_by']) or told['stopped_by'] + ALLOW}"
    )
    tokens = spent["prompt_tokens"] + spent["completion_tokens"]
    yield (
        f"spent        {spent['calls']} replies of the language model, {tokens} tokens, cost {spent['cost']:g}, "
        f"{spent['seconds']:.0f} s of waiting"
    )


def _gate(name: str, gate: dict[str, Any], before: str, after: str) -> Iterator[str]:
    from store.types import PairedDifference
    from traced.commands.chain import comparison_line

    yield f"{name:12} {gate['adapter']}: {gate['answer']} after {gate['rounds']} rounds"
    for one in gate["comparisons"]:
        yield f"             {comparison_line(PairedDifference(**one), before, after)}"


def _next(patch: "PromptPatch") -> str:
    """What to do now."""
    from traced.prompting.enough import Enough

    enough, gates = patch.figures["enough"], patch.figures["gates"]
    if enough == Enough.PROMPT:
        return "To use it, put the text at the end of your agent's system prompt; the base model follows it unchanged."
    if enough == Enough.ADAPTER:
        return f"Next: traced explain {gates['adapter']['adapter']}, then traced approve {gates['adapter']['adapter']}"
    if "adapter" not in gates:
        return f"Next: traced train {patch.capability}; the same command compares the adapter then"
    if enough == Enough.INCONCLUSIVE:
        return "More episodes decide: raise gate.seeds or gate.max_rounds for the next cycle"
    return "Next: traced status"


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
