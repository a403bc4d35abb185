"""The commands explain, prompts and show patch: the evidence behind an adapter and behind a prompt patch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from store.records import PromptPatch
from store.repositories.capabilities import list_labels
from store.repositories.evidence import evidence_chain
from store.repositories.llm_replies import list_patches
from store.repositories.promotions import canary_shares
from store.text import sanitize_block, sanitize_line
from store.types import GateResult
from traced.cli.evidence_text import chain_lines, comparison_line, wrapped
from traced.cli.options import Adapter, AsJson, DataDir, Overrides, read_settings
from traced.cli.output import console, print_json, write_new_file
from traced.cli.store_session import store_reader
from traced.evaluation.examples import lacking_examples
from traced.evaluation.world_agreement import world_of_admission
from traced.gateway.canaries import strata
from traced.prompt_optimization.patches import SHORT_ID_DIGITS, Remedy, find_patch, gates, remedy_text
from traced.registry.canary import judge
from traced.registry.decisions import PromptDecision, prompt_decisions
from traced.scoring.evidence import Labels, count_outcome_sources

ALLOW = " (to raise it: prompting.max_tokens, max_cost, max_minutes)"
SIDES = {
    "prompt": ("prompt", "base", "prompt"),
    "adapter": ("adapter", "base", "adapter"),
    "comparison": ("both", "adapter", "prompt"),
}  # gate: its heading, its first and its second side
PAIRED = "both sides on the same seeds, none of which were used for training or optimization"
ENDS = {"rollouts": "the rollout budget is used up", "perfect": "the maximum reward is reached"}


def explain(adapter: Adapter, data_dir: DataDir = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the evidence behind an adapter, from the trajectories to its traffic."""
    settings = read_settings(data_dir, overrides)
    labels = Labels(settings.serving.success_labels, settings.serving.failure_labels)
    with store_reader(settings) as session:
        chain = evidence_chain(session, adapter)
        sources = count_outcome_sources(session, [row.id for row in chain.trajectories], labels)
        examples = lacking_examples(session, list_labels(session, chain.cycle.id, capability=chain.capability.name))
        world = world_of_admission(session, chain.admissions)
        patches = list_patches(session, cycle_id=chain.cycle.id, capability=chain.capability.name)
        decisions = prompt_decisions(session)
        canary = (
            judge(strata(session, adapter, labels), settings.promotion).why if canary_shares(session, adapter) else ""
        )
    if as_json:
        report = vars(chain) | {"judged_by": sources.counts, "feedback_by": sources.authors, "examples": examples}
        report |= {"world": world, "canary": canary, "prompt_patches": patches}
        report["prompt_decisions"] = [decisions[row.id] for row in patches if row.id in decisions]
        print_json(report)
        return
    lines = list(chain_lines(chain, sources, examples, world))
    for row in patches[-1:]:
        decision = f"; {decisions[row.id]}" if row.id in decisions else ""
        lines.append(f"prompt       {remedy_text(row)}: traced show patch {row.id[:SHORT_ID_DIGITS]}{decision}")
    if canary:
        lines.append(f"canary       {canary}")
    for line in lines:
        console.print(wrapped(line, console.width) if console.is_terminal else line, highlight=False, markup=False)


def prompts(
    capability: Annotated[str | None, typer.Argument(help="Capability (default: all).", show_default=False)] = None,
    *,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """List the prompt patches, newest first: the gain of each, and whether it makes an adapter unnecessary."""
    with store_reader(read_settings(data_dir, overrides)) as session:
        patches, decisions = list_patches(session, capability=capability)[::-1], prompt_decisions(session)
    if as_json:
        print_json({"prompts": [patch_as_json(row, decisions.get(row.id)) for row in patches]})
        return
    if not patches:
        console.print(f"No prompt patches. Next: traced optimize-prompt {capability or 'CAPABILITY'}", highlight=False)
        return
    patch_id = Column("patch", no_wrap=True, min_width=SHORT_ID_DIGITS)  # never cut, because users copy it
    table = Table(patch_id, "cycle", "capability", "result", "success in its environment", "created", "decision")
    for row in patches:
        decision = f"{decisions[row.id].decision.value} by {decisions[row.id].who}" if row.id in decisions else ""
        time, decision_cell = f"{row.at:%Y-%m-%d %H:%M}", Text(sanitize_line(decision))
        table.add_row(
            row.id[:SHORT_ID_DIGITS], row.cycle_id, row.capability, remedy_text(row), _rates(row), time, decision_cell
        )
    console.print(table)
    console.print("To write the text of a patch to a file: traced show patch PATCH --into FILE", highlight=False)


def patch(
    digits: Annotated[str, typer.Argument(metavar="ID", help="Id of a prompt patch, or its first digits.")],
    *,
    into: Annotated[
        Path | None, typer.Option("--into", metavar="FILE", help="Write its text to this file.", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show a prompt patch, its gate results and how to use it; --into writes its text to a file."""
    with store_reader(read_settings(data_dir, overrides)) as session:
        row = find_patch(session, digits)
        decision = prompt_decisions(session).get(row.id)
    if into is not None:
        write_new_file(into, f"{row.text}\n")
    if as_json:
        print_json(patch_as_json(row, decision) | ({"file": into.absolute()} if into is not None else {}))
        return
    for text in patch_lines(row, decision):
        console.print(text, highlight=False, markup=False)
    if into is not None:
        console.print(f"Wrote the text to {into}", highlight=False, markup=False)


def patch_as_json(patch: PromptPatch, decision: PromptDecision | None = None) -> dict[str, Any]:
    """Return a prompt patch and the decision on it as a JSON object."""
    row = {"cycle": patch.cycle_id, "capability": patch.capability, "patch": patch.id, "text": patch.text}
    return {**row, **patch.figures, "at": patch.at, "decision": decision}


def patch_lines(patch: PromptPatch, decision: PromptDecision | None = None) -> Iterator[str]:
    """Yield the results of a prompt patch, its text, the decision on it, and the next step."""
    yield f"{patch.capability}: {remedy_text(patch)}"
    if "evolution" in patch.figures:
        yield from _evolution(patch.figures["evolution"], patch.figures["spent"])
    results = gates(patch)
    if results:
        yield f"compared     {PAIRED}"
    for name, result in results.items():
        yield from _patch_gate(result, *SIDES[name])
    short_id = patch.id[:SHORT_ID_DIGITS]
    yield f"patch        {short_id} of cycle {patch.cycle_id}"
    yield f"             text, which traced show patch {short_id} --into FILE writes to a file:"
    yield ""
    yield sanitize_block(patch.text)
    yield ""
    if decision is not None:
        yield f"decision     {decision}"
    yield _next_step(patch, decision is None)


def _evolution(figures: dict[str, Any], usage: dict[str, Any]) -> Iterator[str]:
    cause = ENDS.get(figures["stopped_by"]) or figures["stopped_by"] + ALLOW
    yield (
        f"optimized    {figures['rollouts']} of {figures['budget']} rollouts (the number of the adapter's training); "
        f"reward on {figures['seeds']} seeds "
        f"{figures['first']:.2f} to {figures['validation']:.2f}; proposed texts: {figures['proposed']}, "
        f"improvements: {figures['kept']}; stopped: {cause}"
    )
    tokens = usage["prompt_tokens"] + usage["completion_tokens"]
    yield (
        f"spent        {usage['calls']} replies of the language model, {tokens} tokens, cost {usage['cost']:g}, "
        f"{usage['seconds']:.0f} s of response time"
    )


def _patch_gate(gate: GateResult, name: str, first: str, second: str) -> Iterator[str]:
    yield f"{name:12} {gate.adapter}: {gate.answer} after {gate.rounds} rounds"
    for comparison in gate.comparisons:
        yield f"             {comparison_line(comparison, first, second)}"


def _rates(patch: PromptPatch) -> str:
    """Format the success rates in the capability's environment, without and with the prompt."""
    for comparison in gates(patch)["prompt"].comparisons if patch.figures.get("gates") else []:
        if comparison.name == "environment":
            rates = f"{100 * comparison.base:.0f} % to {100 * comparison.adapter:.0f} %"
            return f"{rates} on {comparison.seeds} seeds"
    return ""


def _next_step(patch: PromptPatch, undecided: bool) -> str:
    verdict, results = remedy_text(patch), gates(patch)
    if verdict == Remedy.PROMPT:
        use = "To use it, append the text to your agent's system prompt; the base model needs no change."
        return f"{use} Then record that: traced approve {patch.id[:SHORT_ID_DIGITS]}" if undecided else use
    if verdict == Remedy.ADAPTER:
        adapter = results["adapter"].adapter
        return f"Next: traced explain {adapter}, then traced approve {adapter}"
    if "adapter" not in results:
        return f"Next: traced train {patch.capability}; then repeat this command to compare prompt and adapter"
    if verdict == Remedy.INCONCLUSIVE:
        return "Inconclusive: raise gate.seeds or gate.max_rounds, so that the next cycle compares more episodes"
    return "Next: traced status"
