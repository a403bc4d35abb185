"""The texts and rows of the panels of the capabilities screen, from the data of the control API."""

from collections.abc import Sequence

from rich.text import Text

from traced.client.capabilities import (
    AdapterMark,
    CapabilityHistory,
    CapabilityInCycle,
    CapabilityView,
    CitedMessage,
    FindingView,
    Standing,
)
from tui.text import bar, cell, sanitize_block, sanitize_line
from tui.widgets.label_grid import GROUPS
from tui.widgets.tables import Row

STANDINGS: dict[Standing, tuple[str, str]] = {
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
ROOMY = 110  # columns from which figures have bars and adapters words
OTHERS = 60  # columns that a list takes beside its names where it is not roomy
TAIL = 18  # characters of a long cycle's id, from its end


def stands(standing: Standing) -> Text:
    """A sign and the word."""
    sign, style = STANDINGS[standing]
    return cell(f"{sign} {standing}", style)


def gap(value: float | None) -> str:
    """The contrastive gap with its sign."""
    return "    –" if value is None else f"{value:+.2f}"


def share(value: float | None) -> str:
    """A share in percent."""
    return "   –" if value is None else f"{100 * value:3.0f} %"


def tail(cycle_id: str) -> str:
    """A cycle's id as far as it tells cycles apart: their beginnings are alike."""
    return cycle_id if len(cycle_id) <= TAIL else "…" + cycle_id[-TAIL:]


def by_gap(listed: Sequence[CapabilityView]) -> list[CapabilityView]:
    """Those of the newest cycle first; of a cycle what it retained, and the widest gaps."""
    cycles = {one.newest.cycle_id: place for place, one in reversed(list(enumerate(listed)))}

    def place(one: CapabilityView) -> tuple[int, bool, float, str]:
        newest = one.newest
        gap = newest.delta if newest.delta is not None else -2
        return cycles[newest.cycle_id], not newest.retained, -gap, one.name

    return sorted(listed, key=place)


def listed(one: CapabilityView, width: int) -> Row:
    """A capability's row on a screen of ``width`` columns."""
    newest, roomy = one.newest, width >= ROOMY
    delta, coverage = gap(newest.delta), share(newest.coverage)
    if roomy:
        delta, coverage = f"{delta} {bar(newest.delta, 10)}", f"{coverage} {bar(newest.coverage, 10)}"
    alpha = "–" if newest.agreement is None else f"{newest.agreement:.2f}"
    name = cell(one.name, "bold", limit=60)
    name.truncate(max(width - OTHERS, 12) if not roomy else 40, overflow="ellipsis")
    cells = [
        name,
        cell(delta),
        cell(coverage),
        cell(f"{newest.runs_agreeing}/{newest.runs}" if newest.runs else "–"),
        cell(alpha),
        stands(one.standing),
        cell("  ".join(_adapter(mark, words=roomy) for mark in reversed(one.adapters)) or "–"),
    ]
    return Row(one.name, cells)


def _adapter(mark: AdapterMark, *, words: bool) -> str:
    told = f"{STANDINGS[mark.standing][0]} v{mark.version}"
    told += f" {mark.standing}" if words else ""
    return told if mark.share is None else f"{told} {100 * mark.share:g} %"


def passed(one: FindingView, *, chosen: bool) -> Row:
    """A cycle's row in the history."""
    cells = [
        cell(f"{'▸' if chosen else ' '} {tail(one.cycle_id)}", "bold" if chosen else ""),
        cell(f"{gap(one.delta)} {bar(one.delta, 6)}"),
        cell(f"{share(one.coverage)} {bar(one.coverage, 6)}"),
        cell(f"{one.runs_agreeing}/{one.runs}" if one.runs else "–"),
        stands(one.standing),
    ]
    return Row(one.cycle_id, cells)


def texts(one: CapabilityInCycle, over: CapabilityHistory) -> Text:
    """What the capability is, what the chosen cycle found, and the adapters."""
    told, found = Text(), one.finding
    now = next((each.standing for each in over.findings if each.cycle_id == found.cycle_id), found.standing)
    told.append(sanitize_line(one.title, 100), "bold")
    told.append(f"  {sanitize_line(one.name, 60)}\n", "dim")
    told.append(f"{sanitize_block(one.description, 2000)}\n")
    told.append(f"{sanitize_line(found.cycle_id, 60)} · {found.at:%Y-%m-%d %H:%M} · ", "dim").append_text(stands(now))
    if found.delta is None or found.er_minus is None or found.er_plus is None:
        told.append("\nΔ –: never needed in failures, or never in successes" if found.runs else "\nnot contrasted yet")
    else:
        told.append(f"\nΔ {found.delta:+.3f}")
        told.append(f" = {found.er_minus:.3f} in failures − {found.er_plus:.3f} in successes", "dim")
    if found.runs:
        passing = f"{found.runs_agreeing} of {found.runs} runs pass"
        told.append(f"\ncoverage {share(found.coverage).strip()} · {passing}")
        told.append("" if found.agreement is None else f" · agreement α {found.agreement:.2f}")
    for mark in reversed(over.adapters):
        sign, style = STANDINGS[mark.standing]
        part = "" if mark.share is None else f" {100 * mark.share:g} %"
        told.append(f"\n{sign} {sanitize_line(mark.name, 60)} {mark.standing}{part}", style)
        told.append(f" of {tail(sanitize_line(mark.cycle_id, 60))}", "dim")
    for head, text in (("Needed when", one.when_needed), ("Exercised", one.exercised), ("Lacking", one.lacking)):
        told.append(f"\n{head}: ", "bold").append(sanitize_block(text, 2000))
    return told


def cited(one: CitedMessage) -> Row:
    """A cited message's row."""
    votes = [f"✗{len(one.lacking)}"] if one.lacking else []
    votes += [f"■{len(one.present)}"] if one.present else []
    cells = [
        cell(" ".join(votes), "bold red" if one.lacking else "green"),
        cell(GROUPS.get(one.outcome, "?")[0]),
        cell(one.trajectory, limit=24),
        cell(one.index),
        cell(one.role or "–", limit=10),
        cell(one.text, limit=120),
    ]
    return Row(f"{one.index} {one.trajectory}", cells)
