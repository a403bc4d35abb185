"""The evidence chain of an adapter as lines of text, in the order in which the data were created.

Every line begins with the name of its stage, or with as many spaces. ``--json`` has everything that is shortened here.
"""

import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from store.records import AdmissionRecord, Finding, GateRecord, IterationMetrics
from store.repositories.adapters import START_VERSION
from store.repositories.evidence import EvidenceChain, LabelCounts
from store.repositories.traffic import ModelTraffic
from store.text import sanitize_line
from store.types import PairedDifference, Verdict
from traced.cli.output import bounded
from traced.evaluation.examples import Example
from traced.evaluation.figures import TARGET_NOT_TESTED, gate_remark
from traced.evaluation.world_agreement import CONTEXT_CALLS, HELD_OUT_CALLS, LEFT_OUT_CALLS, WorldFigures, brief_lines
from traced.scoring.evidence import OutcomeSource, OutcomeSources

LIST_LIMIT = 5  # maximum number of printed citations and names
ADVICE = 300  # maximum characters of the advice on a failed check
DETAIL = 1000  # of how a training ended
QUOTE = 160  # of a quoted message
INDENT = " " * 13
SOURCE_TEXTS = {
    OutcomeSource.PEOPLE: "{count} by feedback",
    OutcomeSource.RULES: "{count} by rules",
    OutcomeSource.JUDGE: "{count} by the judge",
    OutcomeSource.SOURCE: "{count} came with the trajectory",
    OutcomeSource.NOBODY: "{count} undecided",
}
# Subject -> figure, its name, its format.
TRAINING_FIGURES = {
    "rollouts": (("reward", "reward", ".2f"), ("success", "success", ".0%"), ("mixed_groups", "mixed groups", ".0%")),
    "validation": (("validation_reward", "reward", ".2f"), ("validation_success", "success", ".0%")),
    "length": (
        ("mean_turns", "turns", ".1f"),
        ("mean_length", "tokens", ".0f"),
        ("ended_by_turns", "ended by max_turns", ".0%"),
        ("ended_by_length", "by max_tokens", ".0%"),
    ),
    "policy": (
        ("entropy", "entropy", ".3g"),
        ("kl_from_base", "KL from base", ".2g"),
        ("clip_fraction", "clipped", ".1%"),
    ),
    "update": (("grad_norm", "gradient norm", ".2g"), ("loss", "loss", ".2g")),
    "engine": (("drift_p99", "drift p99", ".1g"), ("tokens_per_second", "tokens/s", ".0f")),
    "seconds": (("rollout_seconds", "rollouts", ".1f"), ("update_seconds", "update", ".1f")),
}
TRAINING_LOSSES = {
    "lost_groups": "groups lost",
    "retried": "rollouts retried",
    "gradient_dropped": "gradients dropped",
}


def wrapped(line: str, width: int) -> str:
    """Break a line at words; what follows is indented more than its beginning, or as the text of a stage."""
    depth = len(line) - len(line.lstrip())
    indent = " " * (depth + 2) if depth >= len(INDENT) else INDENT
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def chain_lines(
    chain: EvidenceChain, sources: OutcomeSources, examples: Sequence[Example] = (), world: WorldFigures | None = None
) -> Iterator[str]:
    """Yield the evidence by stage, from the trajectories to the traffic, then the links that are not stored.

    Args:
        sources: Who decided the outcomes of the trajectories.
        examples: Failures in which the capability was lacking.
        world: The world on which the environment stands.
    """
    yield f"{chain.adapter.name}, created {chain.adapter.created_at:%Y-%m-%d %H:%M} UTC in {chain.adapter.path}"
    cycle = chain.cycle
    yield f"cycle        {cycle.id}: target {cycle.target}, model {cycle.model}, seed {cycle.seed}, {cycle.state}"
    if chain.members:
        texts = [f"{name} (gate: {answer})" if answer else name for name, answer in chain.members.items()]
        yield f"members      {', '.join(texts)}; traced explain NAME shows the evidence behind each"
    else:
        yield from _trajectories(chain)
        yield f"outcomes     {outcomes_text(sources)}"
    yield f"capability   {chain.capability.name}: {chain.capability.description}"
    yield f"{INDENT}lacking: {chain.capability.lacking}"
    if chain.finding:
        yield _finding(chain.finding)
    if chain.attribution:
        kinds = ", ".join(f"{count} {kind}" for kind, count in chain.attribution.items())
        yield f"attribution  failures of the live system that lacked it: {kinds}"
    yield from _example_lines(chain, examples)
    yield from _citation_lines(chain)
    environment = chain.origin or chain.environment
    author = f"the {environment.synthesizer} synthesizer with seed {environment.seed}"
    origin = f" in {environment.cycle_id}, calibrated again with this base model" if chain.origin else ""
    yield f"environment  {environment.hash[:16]}, written by {author}{origin}"
    yield from _world_lines(chain, world)
    for admission in chain.admissions:
        yield from _admission(admission)
    yield from _training(chain)
    for gate in chain.gates:
        yield from _gate(gate, chain.live_before)
    yield from _lengths(chain)
    if chain.handover:
        yield f"handover     {chain.handover}"
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
        if 0 < mined_count < len(chain.trajectories)
        else ""
    )
    yield f"trajectories {len(chain.trajectories)} analysed: {counts_text}{origin}"
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
    basis = f" ({finding.basis})" if finding.basis else ""
    return f"contrast     gap {gap}{basis}, coverage {coverage}, {agreeing}: {verdict}"


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


def outcomes_text(sources: OutcomeSources) -> str:
    """Say who decided the outcomes: feedback is counted, and people only as far as they are named."""
    parts = [
        text.format(count=sources.counts[source]) for source, text in SOURCE_TEXTS.items() if sources.counts[source]
    ]
    names: Counter[str] = Counter()
    for name, count in sources.authors.items():
        if name:
            names[sanitize_line(name, 40)] += count
    if names:
        names_text = [f"{count} of {name}" for name, count in names.most_common(LIST_LIMIT)]
        further = [f"{len(names) - LIST_LIMIT} more names"] if len(names) > LIST_LIMIT else []
        unnamed = [f"{sources.authors['']} without a name"] if sources.authors[""] else []
        parts[0] += f" ({', '.join([*names_text, *further, *unnamed])})"
    return ", ".join(parts) or "none"


def _example_lines(chain: EvidenceChain, examples: Sequence[Example]) -> Iterator[str]:
    ids = {e.id for e in chain.trajectories if Verdict.LACKING in e.verdicts.values()}
    if not ids:
        return
    yield f"lacking in   {len(ids)} trajectories" + (", for example:" if examples else "")
    for example in examples:
        yield f"{INDENT}{sanitize_line(example.trajectory_id, 80)}, message {example.message_index}"
        yield f"{INDENT}  user: {sanitize_line(example.request, QUOTE)}"
        yield f"{INDENT}  {sanitize_line(example.role, 20)}: {sanitize_line(example.text, QUOTE)}"
        if example.reason:
            yield f"{INDENT}  reason: {sanitize_line(example.reason)}"
        if example.policy:
            yield f'{INDENT}  the policy says "{sanitize_line(example.policy)}"'
    if examples:
        yield f"{INDENT}to read them: traced tui, screen 3, with the id as filter"


def _world_lines(chain: EvidenceChain, world: WorldFigures | None) -> Iterator[str]:
    if world is None:
        if any(not gate.result.has_target for gate in chain.gates):
            yield "world        none: the environment answers with records of its own"
        return
    yield f"world        {world.digest[:12]}, made of {world.conversations} conversations"
    omitted = {item.tool for item in world.omitted}
    for split in (HELD_OUT_CALLS, CONTEXT_CALLS, LEFT_OUT_CALLS):
        if rows := world.agreement.get(split):
            yield f"{INDENT}replayed calls of {split} conversations:"
            for line in brief_lines(rows, omitted, world.function_proofs):
                yield f"{INDENT}  {sanitize_line(line)}"
    if world.function_proofs:
        yield f"{INDENT}functions that a model wrote, in context:"
    for proof in world.function_proofs.values():
        yield f"{INDENT}  {sanitize_line(proof.text)}"
    if omitted:
        yield f"{INDENT}omitted tools, which the world does not answer because its answers were wrong:"
    for item in world.omitted:
        yield f"{INDENT}  {sanitize_line(item.text)}"


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
    start = run.config.get(START_VERSION, "")
    yield f"training     {run.id}: {run.state}, seed {run.seed}" + (f", began with {start}" if start else "")
    if chain.iterations or run.rollouts:
        iterations = f"{len(chain.iterations)} iterations, " if chain.iterations else ""
        yield f"{INDENT}{iterations}{run.rollouts} rollouts"
    if run.detail:
        yield f"{INDENT}{sanitize_line(run.detail, DETAIL)}"
    yield from iteration_lines(chain.iterations)


def iteration_lines(iterations: Sequence[IterationMetrics]) -> Iterator[str]:
    """Yield the figures of a training by subject, from its first to its last iteration; --json has all of them."""
    if not iterations:
        return
    rows = [row.values for row in iterations]
    for title, figures in TRAINING_FIGURES.items():
        changes = [text for key, name, style in figures if (text := _change(rows, key, name, style))]
        if changes:
            yield f"{INDENT}{title:<12}{', '.join(changes)}"
    losses = {name: sum(_finite(row.get(key)) for row in rows) for key, name in TRAINING_LOSSES.items()}
    if losses_text := [f"{count:.0f} {name}" for name, count in losses.items() if count]:
        yield f"{INDENT}{'losses':<12}{', '.join(losses_text)}"


def _change(rows: Sequence[Mapping[str, float | None]], key: str, name: str, style: str) -> str:
    """Return a figure's first and last value, once if both look alike; "" if it was not measured."""
    values = [value for row in rows if (value := row.get(key)) is not None and math.isfinite(value)]
    if not values:
        return ""
    first, last = (format(value, style) for value in (values[0], values[-1]))
    return f"{name} {first}" + (f" to {last}" if last != first else "")


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def _gate(gate: GateRecord, live_before: Sequence[str]) -> Iterator[str]:
    baseline = f" against the live system ({', '.join(live_before)})" if live_before else ""
    sides = ("without it", "with it") if live_before else ("base", "adapter")
    yield f"gate         {gate.result.answer} after {gate.result.rounds} rounds{baseline}"
    for comparison in gate.result.comparisons:
        yield f"             {comparison_line(comparison, *sides)}"
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
