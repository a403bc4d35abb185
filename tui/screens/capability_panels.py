"""The texts and rows of the panels of the capabilities screen, from the data of the control API."""

from collections.abc import Sequence

from rich.text import Text

from traced.client.capabilities import (
    AdapterMark,
    CapabilityHistory,
    CapabilityInCycle,
    CapabilityStatus,
    CapabilityView,
    CitedMessage,
    FindingView,
)
from tui.text import bar, cell, sanitize_block, sanitize_line
from tui.widgets.label_grid import GROUPS
from tui.widgets.tables import Row

STATE_SIGNS: dict[CapabilityStatus, tuple[str, str]] = {
    "found": ("·", "dim"),
    "retained": ("◇", ""),
    "environment": ("◇", ""),
    "admitted": ("✓", ""),
    "refused": ("✗", "red"),
    "training": ("▶", "bold cyan"),
    "training failed": ("✗", "red"),
    "to gate": ("…", ""),
    "gate failed": ("✗", "red"),
    "inconclusive": ("?", "yellow"),
    "waiting": ("!", "bold yellow"),
    "approved": ("✓", "green"),
    "rejected": ("✗", "dim"),
    "canary": ("◐", "cyan"),
    "shadow": ("◌", "cyan"),
    "live": ("●", "green"),
    "rolled back": ("↶", "yellow"),
    "superseded": ("↷", "dim"),
}
# From this width on figures have bars, and adapters have their state in words.
ROOMY = 110
# Columns that a narrow list needs beside the names.
FIXED_COLUMNS = 60
# Cycle ids begin alike, so their ends are shown.
TAIL = 18


def state_cell(state: CapabilityStatus) -> Text:
    """Return a table cell with the symbol and the name of a state."""
    sign, style = STATE_SIGNS[state]
    return cell(f"{sign} {state}", style)


def gap(value: float | None) -> str:
    """Format the contrastive gap with its sign."""
    return "    –" if value is None else f"{value:+.2f}"


def share(value: float | None) -> str:
    """Format a share in percent."""
    return "   –" if value is None else f"{100 * value:3.0f} %"


def tail(cycle_id: str) -> str:
    """Return the end of a cycle's id, because the beginnings are alike."""
    return cycle_id if len(cycle_id) <= TAIL else "…" + cycle_id[-TAIL:]


def by_gap(capabilities: Sequence[CapabilityView]) -> list[CapabilityView]:
    """Sort by newest cycle (in the given order), then retained capabilities first, then the widest gap first."""
    cycles = {capability.newest.cycle_id: place for place, capability in reversed(list(enumerate(capabilities)))}

    def place(capability: CapabilityView) -> tuple[int, bool, float, str]:
        finding = capability.newest
        gap = finding.delta if finding.delta is not None else -2
        return cycles[finding.cycle_id], not finding.retained, -gap, capability.name

    return sorted(capabilities, key=place)


def capability_row(capability: CapabilityView, width: int) -> Row:
    """Return a capability's row on a screen of ``width`` columns."""
    finding, roomy = capability.newest, width >= ROOMY
    delta, coverage = gap(finding.delta), share(finding.coverage)
    if roomy:
        delta, coverage = f"{delta} {bar(finding.delta, 10)}", f"{coverage} {bar(finding.coverage, 10)}"
    alpha = "–" if finding.agreement is None else f"{finding.agreement:.2f}"
    name = cell(capability.name, "bold", limit=60)
    name.truncate(max(width - FIXED_COLUMNS, 12) if not roomy else 40, overflow="ellipsis")
    cells = [
        name,
        cell(delta),
        cell(coverage),
        cell(f"{finding.runs_agreeing}/{finding.runs}" if finding.runs else "–"),
        cell(alpha),
        state_cell(capability.standing),
        cell("  ".join(_adapter(mark, words=roomy) for mark in reversed(capability.adapters)) or "–"),
    ]
    return Row(capability.name, cells)


def _adapter(mark: AdapterMark, *, words: bool) -> str:
    label = f"{STATE_SIGNS[mark.standing][0]} v{mark.version}"
    label += f" {mark.standing}" if words else ""
    return label if mark.share is None else f"{label} {100 * mark.share:g} %"


def finding_row(finding: FindingView, *, is_selected: bool) -> Row:
    """Return a cycle's row in the history."""
    cells = [
        cell(f"{'▸' if is_selected else ' '} {tail(finding.cycle_id)}", "bold" if is_selected else ""),
        cell(f"{gap(finding.delta)} {bar(finding.delta, 6)}"),
        cell(f"{share(finding.coverage)} {bar(finding.coverage, 6)}"),
        cell(f"{finding.runs_agreeing}/{finding.runs}" if finding.runs else "–"),
        state_cell(finding.standing),
    ]
    return Row(finding.cycle_id, cells)


def capability_text(capability: CapabilityInCycle, history: CapabilityHistory) -> Text:
    """Return the capability's texts, the finding of the selected cycle, and the adapters."""
    summary, finding = Text(), capability.finding
    now = next((entry.standing for entry in history.findings if entry.cycle_id == finding.cycle_id), finding.standing)
    summary.append(sanitize_line(capability.title, 100), "bold")
    summary.append(f"  {sanitize_line(capability.name, 60)}\n", "dim")
    summary.append(f"{sanitize_block(capability.description, 2000)}\n")
    summary.append(f"{sanitize_line(finding.cycle_id, 60)} · {finding.at:%Y-%m-%d %H:%M} · ", "dim").append_text(
        state_cell(now)
    )
    if finding.delta is None or finding.er_minus is None or finding.er_plus is None:
        summary.append(
            "\nΔ undefined: the capability was never needed in failures, or never in successes"
            if finding.runs
            else "\nnot contrasted yet"
        )
    else:
        summary.append(f"\nΔ {finding.delta:+.3f}")
        if finding.basis:
            summary.append(f" {sanitize_line(finding.basis, 60)}", "dim")
        rates = f"{finding.er_minus:.3f} in failures, {finding.er_plus:.3f} in successes"
        summary.append(f"; lacking where needed: {rates}", "dim")
    if finding.runs:
        passing = f"{finding.runs_agreeing} of {finding.runs} runs pass"
        summary.append(f"\ncoverage {share(finding.coverage).strip()} · {passing}")
        summary.append("" if finding.agreement is None else f" · agreement α {finding.agreement:.2f}")
    for mark in reversed(history.adapters):
        sign, style = STATE_SIGNS[mark.standing]
        part = "" if mark.share is None else f" {100 * mark.share:g} %"
        summary.append(f"\n{sign} {sanitize_line(mark.name, 60)} {mark.standing}{part}", style)
        summary.append(f" of {tail(sanitize_line(mark.cycle_id, 60))}", "dim")
    for head, text in (
        ("Needed when", capability.when_needed),
        ("Exercised", capability.exercised),
        ("Lacking", capability.lacking),
    ):
        summary.append(f"\n{head}: ", "bold").append(sanitize_block(text, 2000))
    return summary


def cited_row(message: CitedMessage) -> Row:
    """Return a cited message's row."""
    votes = [f"✗{len(message.lacking)}"] if message.lacking else []
    votes += [f"■{len(message.present)}"] if message.present else []
    cells = [
        cell(" ".join(votes), "bold red" if message.lacking else "green"),
        cell(GROUPS.get(message.outcome, "?")[0]),
        cell(message.trajectory, limit=24),
        cell(message.index),
        cell(message.role or "–", limit=10),
        cell(message.text, limit=120),
    ]
    return Row(f"{message.index} {message.trajectory}", cells)


def message_preview(message: CitedMessage) -> Text:
    """Return the reason of the labels that cite a message, if there is one, and the beginning of the message."""
    text = Text()
    if message.reason:
        text.append(f"{sanitize_line(message.reason, 300)}\n", "italic")
    if message.policy:
        text.append(f'policy: "{sanitize_line(message.policy, 300)}"\n', "italic")
    return text.append(sanitize_block(message.text, 600))
