"""The verbs optimize-prompt, prompts and show patch, and a prompt patch as lines of text.

The chain of evidence behind an adapter, as lines of text in the order of the data's way.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sandbox.admission.report import advice
from store.records import AdmissionRecord, Finding, GateRecord
from store.repositories.evidence import EvidenceChain, LabelCounts
from store.repositories.traffic import Served
from store.text import line
from store.types import PairedDifference, Verdict
from traced.cli.options import AsJson, DataDir, Given, Model, Seed, Threads, read_settings
from traced.cli.output import bounded, console, print_json
from traced.core.errors import TracedError

if TYPE_CHECKING:
    from store.records import PromptPatch
    from store.types import GateResult
    from traced.pipeline.context import Context
    from traced.registry.decisions import PromptDecision


SHOWN = 5
ADVICE = 300  # characters of what to change about a failed check; --json has the evidence


def chain_lines(chain: EvidenceChain, judged_by: Mapping[str, int]) -> Iterator[str]:
    """One station after the other, from the trajectories to the traffic; links that are not stored are named last."""
    yield f"{chain.adapter.name}, of {chain.adapter.created_at:%Y-%m-%d %H:%M} UTC, in {chain.adapter.path}"
    cycle = chain.cycle
    yield f"cycle        {cycle.id}: target {cycle.target}, model {cycle.model}, seed {cycle.seed}, {cycle.state}"
    yield from _trajectories(chain)
    judges = ", ".join(f"{count} {by}" for by, count in sorted(judged_by.items()))
    yield f"judged by    {judges or 'nobody'}"
    yield f"capability   {chain.capability.name}: {chain.capability.description}"
    yield from _said(chain)
    if chain.finding:
        yield _finding(chain.finding)
    made = chain.environment
    yield f"environment  {made.hash[:16]}, written by the {made.synthesizer} synthesizer with seed {made.seed}"
    for admission in chain.admissions:
        yield from _admission(admission)
    yield from _training(chain)
    for gate in chain.gates:
        yield from _gate(gate)
    for decision in chain.approvals:
        yield f"decision     {decision.decision} {_signed(decision.who, decision.at, decision.reason)}"
    for entry in chain.promotions:
        share = f" {100 * entry.share:g} %" if entry.share is not None else ""
        yield f"promotion    {entry.state}{share} {_signed(entry.who, entry.at, entry.reason)}"
    yield f"tests        {_of(chain.traffic.conversations, chain.traffic.routed, 'routed test')}"
    yield from _served(chain.served)
    if chain.missing:
        yield f"not stored   {', '.join(chain.missing)}"


def _trajectories(chain: EvidenceChain) -> Iterator[str]:
    outcomes = Counter(str(evidence.outcome) for evidence in chain.trajectories)
    counted = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    mined = sum(evidence.production for evidence in chain.trajectories)
    origin = f"; {len(chain.trajectories) - mined} from the environment, {mined} from production" if mined else ""
    yield f"trajectories {len(chain.trajectories)} analysed: {counted}{origin}"
    lacking = [e for e in chain.trajectories if Verdict.LACKING in e.verdicts.values()]
    for evidence in lacking[:SHOWN]:
        cited = f", messages {', '.join(map(str, evidence.cited))}" if evidence.cited else ""
        yield f"             lacking in {evidence.id[:16]} ({evidence.source} task {evidence.task_id}{cited})"
    if len(lacking) > SHOWN:
        yield f"             and in {len(lacking) - SHOWN} more (--json lists all)"
    yield f"labels       {_label_text(chain.labels)}"


def _label_text(labels: list[LabelCounts]) -> str:
    if not labels:
        return "none"
    runs = len({count.run for count in labels})
    totals: Counter[Verdict] = Counter()
    for count in labels:
        totals[count.verdict] += count.trajectories
    return f"{runs} runs: " + ", ".join(f"{total} {verdict}" for verdict, total in sorted(totals.items()))


def _finding(finding: Finding) -> str:
    gap = bounded(finding.delta, finding.delta_low, finding.delta_high, "+")
    coverage = bounded(finding.coverage, finding.coverage_low, finding.coverage_high)
    kept = "retained" if finding.retained else "not retained"
    alpha = f", alpha {finding.agreement:.2f}" if finding.agreement is not None else ""
    agreeing = f"{finding.runs_agreeing} of {finding.runs} runs agree{alpha}"
    return f"contrast     gap {gap}, coverage {coverage}, {agreeing}: {kept}"


def _said(chain: EvidenceChain) -> Iterator[str]:
    """What an analyst that cites and blames has said."""
    if chain.faults:
        told = ", ".join(f"{count} {fault}" for fault, count in sorted(chain.faults.items()))
        yield f"faults       {told}; only the agent's are mined"
    if chain.citations:
        shown = [f"message {one.message_index} of {one.trajectory_id}" for one in chain.citations[:SHOWN]]
        more = f" and {len(chain.citations) - SHOWN} more" if len(chain.citations) > SHOWN else ""
        yield f"rests on     {', '.join(shown)}{more}"


def _admission(admission: AdmissionRecord) -> Iterator[str]:
    checks = admission.report.checks
    verdict = "admitted" if admission.report.admitted else "refused"
    yield f"admission    {verdict}, {sum(check.passed for check in checks)} of {len(checks)} checks passed"
    for check in checks:
        if not check.passed:
            yield f"             failed: {line(check.name)}: {line(advice(check)[0], ADVICE)}"


def _training(chain: EvidenceChain) -> Iterator[str]:
    run = chain.training
    yield f"training     {run.id}: {run.state}, seed {run.seed}, {run.rollouts} rollouts"
    if chain.iterations:
        first, last = chain.iterations[0].values, chain.iterations[-1].values
        moved = [f"{name} {first[name]:.3g} to {last[name]:.3g}" for name in sorted(first) if name in last]
        yield f"             {len(chain.iterations)} iterations: {', '.join(moved)}"


def _gate(gate: GateRecord) -> Iterator[str]:
    yield f"gate         {gate.result.answer} after {gate.result.rounds} rounds"
    for comparison in gate.result.comparisons:
        yield f"             {comparison_line(comparison)}"


def comparison_line(comparison: PairedDifference, before: str = "base", after: str = "adapter") -> str:
    """One paired comparison in words: rates and bounds in per cent and points."""
    return (
        f"{comparison.name}: {before} {100 * comparison.base:.1f} %, {after} {100 * comparison.adapter:.1f} %, "
        f"{100 * comparison.difference:+.1f} points [{100 * comparison.low:+.1f}, {100 * comparison.high:+.1f}] at "
        f"{100 * comparison.level:.1f} % on {comparison.seeds} seeds, required above {100 * comparison.required:+.1f}: "
        f"{comparison.answer}"
    )


def _served(served: Served) -> Iterator[str]:
    since = f", the last one {served.last:%Y-%m-%d %H:%M} UTC" if served.last else ""
    yield f"traffic      {_of(served.conversations, served.decided, 'decided')}{since}"
    if served.outcomes:
        told = ", ".join(f"{count} {outcome}" for outcome, count in served.outcomes.items())
        yield f"             trajectories by feedback: {told}"


def _of(part: int, whole: int, what: str) -> str:
    return f"{part} of {whole} {what} conversations" + (f", {100 * part / whole:.1f} %" if whole else "")


def _signed(who: str, at: datetime, reason: str) -> str:
    return f"by {line(who)}, {at:%Y-%m-%d %H:%M} UTC{', because ' + line(reason) if reason else ''}"


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
        from traced.pipeline.optimize_prompt import optimize_prompt as station

        return await station(context, capability, _environment(context, capability))

    from traced.cli.current_cycle import on_cycle

    patch = on_cycle(settings, work)
    if as_json:
        print_json(told(patch))
        return
    for text in patch_lines(patch):
        console.print(text, highlight=False, markup=False)


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

    from store.repositories.llm_replies import list_patches
    from store.text import line
    from traced.cli.store_session import looking
    from traced.prompt_optimization.patches import SHORT, enough
    from traced.registry.decisions import prompt_decisions

    with looking(read_settings(data_dir, given)) as opened:
        found, decided = list_patches(opened, capability=capability)[::-1], prompt_decisions(opened)
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
    from traced.cli.store_session import looking
    from traced.prompt_optimization.patches import named
    from traced.registry.decisions import prompt_decisions

    with looking(read_settings(data_dir, given)) as opened:
        found = named(opened, digits)
        decided = prompt_decisions(opened).get(found.id)
    if into is not None:
        _write(found.text, into)
    if as_json:
        print_json(told(found, decided) | ({"file": into.absolute()} if into is not None else {}))
        return
    for text in patch_lines(found, decided):
        console.print(text, highlight=False, markup=False)
    if into is not None:
        console.print(f"Wrote its text into {into}", highlight=False, markup=False)


def told(patch: "PromptPatch", decided: "PromptDecision | None" = None) -> dict[str, Any]:
    """A prompt patch as JSON."""
    named = {"cycle": patch.cycle_id, "capability": patch.capability, "patch": patch.id, "text": patch.text}
    return {**named, **patch.figures, "at": patch.at, "decision": decided}


def patch_lines(patch: "PromptPatch", decided: "PromptDecision | None" = None) -> Iterator[str]:
    """What a prompt patch is worth, its text, what was decided, and what to do with it."""
    from store.text import block
    from traced.prompt_optimization.patches import SHORT, enough, gates

    yield f"{patch.capability}: {enough(patch)}"
    if "evolution" in patch.figures:
        yield from _evolution(patch.figures["evolution"], patch.figures["spent"])
    compared = gates(patch)
    if compared:
        yield f"compared     {PAIRED}"
    for name, result in compared.items():
        yield from _patch_gate(result, *SIDES[name])
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


def _patch_gate(gate: "GateResult", name: str, before: str, after: str) -> Iterator[str]:

    yield f"{name:12} {gate.adapter}: {gate.answer} after {gate.rounds} rounds"
    for one in gate.comparisons:
        yield f"             {comparison_line(one, before, after)}"


def _won(patch: "PromptPatch") -> str:
    """What it does for the base model in the capability's environment."""
    from traced.prompt_optimization.patches import gates

    for one in gates(patch)["prompt"].comparisons if patch.figures.get("gates") else []:
        if one.name == "environment":
            return f"{100 * one.base:.0f} % to {100 * one.adapter:.0f} % on {one.seeds} seeds"
    return ""


def _next(patch: "PromptPatch", undecided: bool) -> str:
    """What to do now."""
    from traced.prompt_optimization.patches import SHORT, Enough, enough, gates

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
    from traced.cli.current_cycle import admitted_environments, applicable, environments

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
