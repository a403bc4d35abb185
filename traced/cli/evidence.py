"""The commands explain, prompts and show patch: the evidence behind an adapter and behind a prompt patch.

The chain of evidence is printed as lines of text, in the order in which the data were created.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from store.records import AdmissionRecord, Finding, GateRecord, PromptPatch
from store.repositories.evidence import EvidenceChain, LabelCounts, evidence_chain
from store.repositories.llm_replies import list_patches
from store.repositories.promotions import canary_shares
from store.repositories.traffic import ModelTraffic
from store.text import sanitize_block, sanitize_line
from store.types import GateResult, PairedDifference, Verdict
from traced.cli.options import Adapter, AsJson, DataDir, Overrides, read_settings
from traced.cli.output import bounded, console, print_json, write_new_file
from traced.cli.store_session import store_reader
from traced.evaluation.figures import TARGET_NOT_TESTED, gate_remark
from traced.gateway.canaries import strata
from traced.prompt_optimization.patches import SHORT_ID_DIGITS, Remedy, find_patch, gates, remedy_text
from traced.registry.canary import judge
from traced.registry.decisions import PromptDecision, prompt_decisions
from traced.scoring.evidence import Labels, count_outcome_sources

LIST_LIMIT = 5  # maximum number of printed trajectories and citations
ADVICE = 300  # maximum characters of the advice on a failed check; --json has the evidence
DETAIL = 1000  # of how a training ended
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
        judges = count_outcome_sources(session, [row.id for row in chain.trajectories], labels)
        patches = list_patches(session, cycle_id=chain.cycle.id, capability=chain.capability.name)
        decisions = prompt_decisions(session)
        canary = (
            judge(strata(session, adapter, labels), settings.promotion).why if canary_shares(session, adapter) else ""
        )
    if as_json:
        report = vars(chain) | {"judged_by": judges, "canary": canary, "prompt_patches": patches}
        report["prompt_decisions"] = [decisions[row.id] for row in patches if row.id in decisions]
        print_json(report)
        return
    for text in chain_lines(chain, judges):
        console.print(text, highlight=False, markup=False)
    for row in patches[-1:]:
        decision = f"; {decisions[row.id]}" if row.id in decisions else ""
        text = f"{remedy_text(row)}: traced show patch {row.id[:SHORT_ID_DIGITS]}{decision}"
        console.print(f"prompt       {text}", highlight=False, markup=False)
    if canary:
        console.print(f"canary       {canary}", highlight=False, markup=False)


def chain_lines(chain: EvidenceChain, judged_by: Mapping[str, int]) -> Iterator[str]:
    """Yield the evidence by stage, from the trajectories to the traffic, then the links that are not stored."""
    yield f"{chain.adapter.name}, created {chain.adapter.created_at:%Y-%m-%d %H:%M} UTC in {chain.adapter.path}"
    cycle = chain.cycle
    yield f"cycle        {cycle.id}: target {cycle.target}, model {cycle.model}, seed {cycle.seed}, {cycle.state}"
    yield from _trajectories(chain)
    judges = ", ".join(f"{count} {answered_by}" for answered_by, count in sorted(judged_by.items()))
    yield f"judged by    {judges or 'none'}"
    yield f"capability   {chain.capability.name}: {chain.capability.description}"
    yield from _citation_lines(chain)
    if chain.finding:
        yield _finding(chain.finding)
    environment = chain.environment
    author = f"the {environment.synthesizer} synthesizer with seed {environment.seed}"
    yield f"environment  {environment.hash[:16]}, written by {author}"
    for admission in chain.admissions:
        yield from _admission(admission)
    yield from _training(chain)
    for gate in chain.gates:
        yield from _gate(gate)
    yield from _lengths(chain)
    for decision in chain.approvals:
        yield f"decision     {decision.decision} {_signature(decision.who, decision.at, decision.reason)}"
    for entry in chain.promotions:
        share = f" {100 * entry.share:g} %" if entry.share is not None else ""
        yield f"promotion    {entry.state}{share} {_signature(entry.who, entry.at, entry.reason)}"
    if chain.adapter.quarantined_at is not None:
        reason = sanitize_line(chain.adapter.quarantine_reason)
        yield f"quarantine   since {chain.adapter.quarantined_at:%Y-%m-%d %H:%M} UTC, no traffic: {reason}"
    yield f"tests        {_of(chain.traffic.conversations, chain.traffic.routed, 'routed test')}"
    yield from _traffic_lines(chain.served)
    if chain.missing:
        yield f"not stored   {', '.join(chain.missing)}"


def _trajectories(chain: EvidenceChain) -> Iterator[str]:
    outcomes = Counter(str(evidence.outcome) for evidence in chain.trajectories)
    counts_text = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    mined_count = sum(evidence.production for evidence in chain.trajectories)
    origin = (
        f"; {len(chain.trajectories) - mined_count} from the environment, {mined_count} from production"
        if mined_count
        else ""
    )
    yield f"trajectories {len(chain.trajectories)} analysed: {counts_text}{origin}"
    lacking_trajectories = [e for e in chain.trajectories if Verdict.LACKING in e.verdicts.values()]
    for evidence in lacking_trajectories[:LIST_LIMIT]:
        citation_text = f", messages {', '.join(map(str, evidence.cited))}" if evidence.cited else ""
        yield f"             lacking in {evidence.id[:16]} ({evidence.source} task {evidence.task_id}{citation_text})"
    if len(lacking_trajectories) > LIST_LIMIT:
        yield f"             lacking in {len(lacking_trajectories) - LIST_LIMIT} more (--json lists all)"
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
    verdict = "retained" if finding.retained else "not retained"
    alpha = f", alpha {finding.agreement:.2f}" if finding.agreement is not None else ""
    agreeing = f"{finding.runs_agreeing} of {finding.runs} runs agree{alpha}"
    return f"contrast     gap {gap}, coverage {coverage}, {agreeing}: {verdict}"


def _citation_lines(chain: EvidenceChain) -> Iterator[str]:
    """Yield the faults and the citations, if the analyst gives them."""
    if chain.faults:
        counts = ", ".join(f"{count} {fault}" for fault, count in sorted(chain.faults.items()))
        yield f"faults       {counts}; only faults of the agent are analysed"
    if chain.citations:
        places = [f"message {row.message_index} of {row.trajectory_id}" for row in chain.citations[:LIST_LIMIT]]
        remainder = f" and {len(chain.citations) - LIST_LIMIT} more" if len(chain.citations) > LIST_LIMIT else ""
        yield f"citations    {', '.join(places)}{remainder}"
        for row in chain.citations[:LIST_LIMIT]:
            if row.reason:
                policy = f'; the policy says "{sanitize_line(row.policy)}"' if row.policy else ""
                yield f"             message {row.message_index}: {sanitize_line(row.reason)}{policy}"


def _admission(admission: AdmissionRecord) -> Iterator[str]:
    # Imports the Docker SDK, which the commands for prompts do not need.
    from sandbox.admission.report import advice

    checks = admission.report.checks
    verdict = "admitted" if admission.report.admitted else "refused"
    yield f"admission    {verdict}, {sum(check.passed for check in checks)} of {len(checks)} checks passed"
    for check in checks:
        if not check.passed:
            yield f"             failed: {sanitize_line(check.name)}: {sanitize_line(advice(check)[0], ADVICE)}"


def _training(chain: EvidenceChain) -> Iterator[str]:
    run = chain.training
    yield f"training     {run.id}: {run.state}, seed {run.seed}, {run.rollouts} rollouts"
    if run.detail:
        yield f"             {sanitize_line(run.detail, DETAIL)}"
    if chain.iterations:
        first, last = chain.iterations[0].values, chain.iterations[-1].values
        changes = [f"{name} {first[name]:.3g} to {last[name]:.3g}" for name in sorted(first) if name in last]
        yield f"             {len(chain.iterations)} iterations: {', '.join(changes)}"


def _gate(gate: GateRecord) -> Iterator[str]:
    yield f"gate         {gate.result.answer} after {gate.result.rounds} rounds"
    for comparison in gate.result.comparisons:
        yield f"             {comparison_line(comparison)}"
    if not gate.result.has_target:
        yield f"             {TARGET_NOT_TESTED}"


def _lengths(chain: EvidenceChain) -> Iterator[str]:
    if chain.lengths:
        base, adapter = chain.lengths.base, chain.lengths.adapter
        change = 100 * (adapter / base - 1)
        yield (
            f"messages     base {base:.0f} tokens on average, adapter {adapter:.0f} ({change:+.0f} %), "
            "in the gate's episodes on the target"
        )


def comparison_line(comparison: PairedDifference, first: str = "base", second: str = "adapter") -> str:
    """Format a paired comparison: rates and bounds in per cent and percentage points."""
    remark = gate_remark(comparison)
    return (
        f"{comparison.name}: {first} {100 * comparison.base:.1f} %, {second} {100 * comparison.adapter:.1f} %, "
        f"{100 * comparison.difference:+.1f} points [{100 * comparison.low:+.1f}, {100 * comparison.high:+.1f}] at "
        f"{100 * comparison.level:.1f} % on {comparison.seeds} seeds, required above {100 * comparison.required:+.1f}: "
        f"{comparison.answer}{f'; {remark}' if remark else ''}"
    )


def _traffic_lines(traffic: ModelTraffic) -> Iterator[str]:
    last_request = f", the last one {traffic.last:%Y-%m-%d %H:%M} UTC" if traffic.last else ""
    yield f"traffic      {_of(traffic.conversations, traffic.decided, 'decided')}{last_request}"
    if traffic.outcomes:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in traffic.outcomes.items())
        yield f"             trajectories by feedback: {counts}"


def _of(part: int, total: int, noun: str) -> str:
    return f"{part} of {total} {noun} conversations" + (f", {100 * part / total:.1f} %" if total else "")


def _signature(actor: str, at: datetime, reason: str) -> str:
    return f"by {sanitize_line(actor)}, {at:%Y-%m-%d %H:%M} UTC{', because ' + sanitize_line(reason) if reason else ''}"


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
    """Format the base model's success rates in the capability's environment, without and with the prompt."""
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
