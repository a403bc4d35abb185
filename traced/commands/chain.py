"""The chain of evidence behind an adapter, as lines of text in the order of the data's way."""

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime

from sandbox.admission.report import advice
from store.plain import line
from store.records import AdmissionRecord, Finding, GateRecord
from store.repositories.evidence import EvidenceChain, LabelCounts
from store.repositories.traffic import Served
from store.types import PairedDifference, Verdict
from traced.commands.output import bounded

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
