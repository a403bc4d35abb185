"""A cycle's stages in order: one line per stage, with several capabilities side by side.

A stage outside the known order is shown before the report. No stage of a halted cycle is shown as running. The time
left is estimated from the newest progress event, and rounded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from traced.client.models import AdapterView, CostView, CycleView, EventView, LiveStepView, StageView
from tui.text import sanitize_line

ORDER = ("collect", "analyze", "synthesize", "admit", "train", "gate", "approve", "evaluate", "report")
# A stage that some cycles have, and the reason with which it ends if no adapter is needed.
PROMPT, PROMPT_SUFFICES = "optimize-prompt", "a prompt is enough"
CLOSED = "closed: "  # begins the reason with which a capability ends that a new base model has by itself
# Stages that are shown on another stage's line.
PARTS = {
    "play predecessor": "collect",
    "attribute": "analyze",
    "hand over": "evaluate",
    "promote": "evaluate",
    "route": "evaluate",
    "fit router": "evaluate",
    "compose": "evaluate",
    PROMPT: "prompt",
}
# Stages that a reader does not need.
HIDDEN_STAGES = ("session", "incumbent", "predecessor")
NAME, TIME, MIN_COLUMN = 12, 6, 14  # widths: a stage's name, its end time, the minimum of a capability's column
RUNNING, DONE, FAILED, STOPPED, PENDING, ASKS = "▶", "✓", "✗", "‖", "·", "!"
STYLES = {
    RUNNING: "bold cyan",
    DONE: "green",
    FAILED: "bold red",
    STOPPED: "yellow",
    PENDING: "dim",
    ASKS: "bold yellow",
}
# The first of these marks that any part has is the stage's mark.
WORST = (ASKS, RUNNING, STOPPED, FAILED, DONE)


@dataclass(frozen=True)
class Part:
    """The state of one capability at a stage, or of one step of the stage; ``name`` is "" for the stage as a whole."""

    name: str
    mark: str
    text: str
    at: datetime | None = None


def pipeline(
    cycle: CycleView,
    adapters: Sequence[AdapterView],
    progress: Mapping[str, EventView],
    waits: Mapping[str, EventView],
    width: int,
) -> Text:
    """Return the stages as text, at most ``width`` cells wide.

    ``progress`` and ``waits`` map "STAGE CAPABILITY" to the newest event on how far it is, or on what it waits for.
    """
    parts: dict[str, list[Part]] = {name: [] for name in _before_the_end(cycle, waits)}
    for stage in cycle.stages:
        if stage.stage not in HIDDEN_STAGES:
            name, part = _place(stage)
            parts.setdefault(name, []).append(_part(cycle, stage, part, progress))
    for key, event in waits.items():
        _wait(parts, key, event)
    parts["approve"] += [
        _decision(adapter) for adapter in adapters if adapter.cycle_id == cycle.id and adapter.gate == "pass"
    ]
    parts[ORDER[-1]] = parts.pop(ORDER[-1], [])
    names = list(dict.fromkeys(stage.capability for stage in cycle.stages if stage.capability))
    parts_width = width - NAME - TIME - 3
    column_width = parts_width // len(names) if len(names) > 1 else 0
    columns = names if column_width >= MIN_COLUMN else []
    text = Text(no_wrap=True, overflow="ellipsis")
    if columns:
        text.append(
            " " * (NAME + 3)
            + "".join(_fixed(sanitize_line(name, 60), column_width - 1) + " " for name in columns)
            + "\n",
            "dim",
        )
    for name, stage_parts in parts.items():
        _stage(text, name, stage_parts, columns, parts_width)
    if cycle.costs:
        text.append(" " * 2).append(_fixed("model", NAME + 1), "bold").append(f"{_costs_text(cycle.costs)}\n")
    for title, line in _step_lines(cycle.step) if cycle.step else ():
        text.append(" " * 2).append(_fixed(title, NAME + 1), "bold").append(f"{sanitize_line(line, 400)}\n")
    text.right_crop(1)
    return text


def _wait(parts: dict[str, list[Part]], key: str, event: EventView) -> None:
    """Show what a stage waits for, unless the stage has ended or has begun after the event."""
    stage, _, name = key.partition(" ")
    stage = PARTS.get(stage, stage)
    current = next((part for part in parts.get(stage, []) if part.name == name), None)
    if stage not in parts or (current is not None and current.mark != RUNNING):
        return
    if current is not None and current.at is not None and current.at > event.at:
        return
    waiting = Part(name, STOPPED, f"waits for {sanitize_line(event.detail.get('for', '?'), 120)}", event.at)
    parts[stage] = [part for part in parts[stage] if part is not current] + [waiting]


def _before_the_end(cycle: CycleView, waits: Mapping[str, EventView]) -> list[str]:
    """Return the names of all lines but the last; if a prompt was tried, its line is before the training."""
    names = list(ORDER[:-1])
    stages = [stage.stage for stage in cycle.stages] + [key.partition(" ")[0] for key in waits]
    if PROMPT in stages:
        names.insert(names.index("train"), PARTS[PROMPT])
    return names


def _place(stage: StageView) -> tuple[str, str]:
    """Return the name of the line that shows the stage, and the name of the stage's part there."""
    first, _, rest = stage.stage.partition(" ")
    if stage.stage == PROMPT:
        return PARTS[PROMPT], stage.capability or ""
    if stage.stage in PARTS:
        return PARTS[stage.stage], stage.stage
    # For example "evaluate base".
    if first in ORDER and rest:
        return first, rest
    return stage.stage, stage.capability or ""


def _part(cycle: CycleView, stage: StageView, name: str, progress: Mapping[str, EventView]) -> Part:
    if stage.stage == PROMPT and str(stage.detail.get("reason")).startswith(PROMPT_SUFFICES):
        return Part(name, DONE, PROMPT_SUFFICES, stage.at)
    if str(stage.detail.get("reason")).startswith(CLOSED):
        return Part(name, DONE, sanitize_line(stage.detail["reason"], 120), stage.at)
    if stage.state == "failed":
        return Part(name, FAILED, sanitize_line(stage.detail.get("reason") or "failed", 120), stage.at)
    if stage.state != "started":
        return Part(name, DONE, _figure(stage), stage.at)
    if cycle.state != "running":
        return Part(name, STOPPED, cycle.state, stage.at)
    now = progress.get(f"{stage.stage} {stage.capability or ''}".strip()) or progress.get(stage.stage.partition(" ")[0])
    is_same_phase = now is not None and now.detail.get("phase") in (
        stage.stage,
        f"{stage.stage} {stage.capability}",
        "iteration",
    )
    return Part(
        name, RUNNING, how_far(now) if now is not None and is_same_phase else f"since {stage.at:%H:%M}", stage.at
    )


def _decision(adapter: AdapterView) -> Part:
    if adapter.decision == "none":
        return Part(adapter.name, ASKS, "decision pending")
    if adapter.decision != "approved":
        return Part(adapter.name, FAILED, sanitize_line(adapter.decision, 20))
    share = f" {100 * adapter.share:.0f} %" if adapter.share is not None else ""
    return Part(adapter.name, DONE, "live" if adapter.live else f"{adapter.trial}{share}" or "approved")


def _figure(stage: StageView) -> str:
    """Return a finished stage's result as text, from its closing event."""
    detail = stage.detail
    if stage.stage == "collect" and isinstance(detail.get("success"), int | float):
        share, episodes = f"{100 * detail['success']:.0f} %", sanitize_line(detail.get("episodes", "?"), 12)
        failures = (
            f", {sanitize_line(detail['infrastructure'], 12)} failed by infrastructure"
            if detail.get("infrastructure")
            else ""
        )
        return f"{share} of {episodes} episodes succeed{failures}"
    if stage.stage == "admit" and detail.get("refused_by"):
        return sanitize_line(f"refused by {', '.join(map(str, detail['refused_by']))}", 60)
    if stage.stage == "gate" and detail.get("answer"):
        return sanitize_line(detail["answer"], 20)
    if stage.stage == "train" and detail.get("adapter"):
        return sanitize_line(detail["adapter"], 60).removeprefix(stage.capability or "")
    if stage.stage == "hand over" and detail.get("answer"):
        return sanitize_line(detail["answer"], 20)
    if stage.stage == "promote" and detail.get("live") is not None:
        return sanitize_line(f"live: {', '.join(map(str, detail['live'])) or 'none'}", 80)
    return ""


def _step_lines(step: LiveStepView) -> Iterator[tuple[str, str]]:
    """Yield what a cycle did to the live system as lines with their titles."""
    parts = []
    if step.initial_success is not None and step.success is None:
        parts.append(f"{100 * step.initial_success:.1f} %{_interval(step.initial_ci)} before this cycle")
    if step.success is not None:
        parts.append(f"{100 * step.success:.1f} %{_interval(step.success_ci)} on the test tasks")
    if step.gain is not None:
        parts.append(f"{100 * step.gain:+.1f}{_interval(step.ci)} by this cycle")
    if step.new:
        parts.append(f"new: {', '.join(step.new)}")
    if parts:
        yield "live", "; ".join(parts)
    if step.closed:
        yield "closed", ", ".join(step.closed)
    if step.left_aside:
        yield "left aside", ", ".join(step.left_aside)
    if step.handover:
        yield "handover", step.handover


def _interval(bounds: tuple[float, float] | None) -> str:
    return f" [{100 * bounds[0]:.1f}, {100 * bounds[1]:.1f}]" if bounds else ""


def _costs_text(costs: Sequence[CostView]) -> str:
    """Return the language model calls, tokens and cost of a cycle as text, in total and by stage."""
    calls, cost = sum(entry.calls for entry in costs), sum(entry.cost for entry in costs)
    approximately = "~" if any(entry.estimated for entry in costs) else ""
    tokens = sum(entry.prompt_tokens + entry.completion_tokens for entry in costs)
    money = f", cost {approximately}{cost:.4g}" if cost else ""
    of_each = ", ".join(
        f"{sanitize_line(entry.stage, 20)} {f'{entry.cost:.4g}' if cost else entry.calls}" for entry in costs
    )
    return f"{calls} calls, {approximately}{tokens:,} tokens{money} ({of_each})"


def _stage(text: Text, name: str, parts: Sequence[Part], columns: Sequence[str], width: int) -> None:
    """Append a stage's line or lines to the text."""
    marks = {part.mark for part in parts}
    mark = next((mark for mark in WORST if mark in marks), PENDING)
    text.append(f"{mark} ", STYLES[mark])
    text.append(_fixed(sanitize_line(name, NAME), NAME + 1), STYLES[mark] if mark in (PENDING, RUNNING) else "bold")
    parts_by_name = {_capability(part): part for part in parts}
    if columns and parts and set(parts_by_name) <= set(columns):
        lines = [_in_columns(parts_by_name, columns, width)]
    else:
        lines = _flowed(parts, width)
    end_times = [part.at for part in parts if part.at is not None]
    end = f"{max(end_times):%H:%M}" if end_times and mark not in (RUNNING, ASKS) else ""
    for place, row in enumerate(lines):
        if place:
            text.append(" " * (NAME + 3))
        row.append(" " * max(width - row.cell_len, 0))
        text.append_text(row).append(f"{end if not place else '':>{TIME}}\n", "dim")


def _in_columns(parts_by_name: Mapping[str, Part], columns: Sequence[str], width: int) -> Text:
    """Return a line with each capability in its column."""
    text, column_width = Text(), width // len(columns)
    for name in columns:
        if (part := parts_by_name.get(name)) is None:
            text.append(" " * column_width)
        else:
            text.append(f"{part.mark} ", STYLES[part.mark])
            text.append(_fixed(part.text, column_width - 3) + " ", "red" if part.mark == FAILED else "")
    return text


def _flowed(parts: Sequence[Part], width: int) -> list[Text]:
    """Return the parts one after the other, wrapped to as many lines as needed."""
    lines = [Text()]
    for part in parts:
        text = f"{sanitize_line(part.name, 40)} {part.text}".strip()
        is_single = len(parts) == 1
        if not is_single and part.mark == DONE:
            text = sanitize_line(part.name, 40)
        length = min(cell_len(text) + 2 * (not is_single), width)
        if lines[-1].cell_len and lines[-1].cell_len + 3 + length > width:
            lines.append(Text())
        elif lines[-1].cell_len:
            lines[-1].append("   ")
        if not is_single:
            lines[-1].append(f"{part.mark} ", STYLES[part.mark])
        lines[-1].append(_fixed(text, length - 2 * (not is_single)), "red" if part.mark == FAILED else "")
    return lines


def _capability(part: Part) -> str:
    """Return the part's capability: its name, or for an adapter version the beginning of its name."""
    return part.name.partition("@")[0]


def how_far(event: EventView) -> str:
    """Return a stage's newest progress as text: done and total, the estimated time left, and its figure."""
    done, total = _number(event.detail.get("done")), _number(event.detail.get("total"))
    figure = sanitize_line(event.detail.get("figure") or "", 60)
    if not total:
        return figure
    left = time_left(event.detail, event.at, done, total)
    return ", ".join(part for part in (f"{done}/{total}", left, figure) if part)


def time_left(detail: Mapping[str, Any], at: datetime, done: int, total: int) -> str:
    """Return the estimated time left as text.

    It is "" if the start (``since``) is unknown, if nothing was done since then (``done_then``), or if all is done.
    """
    new = done - _number(detail.get("done_then"))
    try:
        elapsed = at - datetime.fromisoformat(detail["since"])
    except (KeyError, TypeError, ValueError):
        return ""
    if new <= 0 or total <= done or elapsed <= timedelta():
        return ""
    return f"≈{duration(elapsed * ((total - done) / new))} left"


def duration(span: timedelta) -> str:
    """Format a duration in one unit, rounded, for example "40 s", "12 min", "3.5 h" or "2.1 d"."""
    seconds = span.total_seconds()
    for limit, unit, template in ((90, 1, "{:.0f} s"), (5400, 60, "{:.0f} min"), (48 * 3600, 3600, "{:.1f} h")):
        if seconds < limit:
            return template.format(seconds / unit)
    return f"{seconds / 86400:.1f} d"


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _fixed(text: str, width: int) -> str:
    """Return the text in exactly ``width`` cells, with an ellipsis if it is cut."""
    width = max(width, 0)
    return (
        set_cell_size(text, width)
        if cell_len(text) <= width
        else set_cell_size(text, max(width - 1, 0)) + "…" * (width > 0)
    )
