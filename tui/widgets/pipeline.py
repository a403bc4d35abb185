"""A cycle's stages in their order: one line each, with several capabilities side by side.

A stage outside the known order is shown before the report. Nothing in a halted cycle is shown as running. The time left
is the estimate of the newest progress event, rounded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from traced.client.models import AdapterView, CostView, CycleView, EventView, StageView
from tui.text import sanitize_line

ORDER = ("collect", "analyze", "synthesize", "admit", "train", "gate", "approve", "evaluate", "report")
PROMPT, ENOUGH = "optimize-prompt", "a prompt is enough"  # a stage of some cycles; what ends a capability there well
PARTS = {"promote": "evaluate", "route": "evaluate", "fit router": "evaluate", PROMPT: "prompt"}  # shown as another's
UNTOLD = ("session",)  # of no interest
NAME, TIME, LEAST = 12, 6, 14  # widths: of a stage's name, of its end, the least of a capability's column
RUNNING, DONE, FAILED, STOPPED, COMING, ASKS = "▶", "✓", "✗", "‖", "·", "!"
STYLES = {
    RUNNING: "bold cyan",
    DONE: "green",
    FAILED: "bold red",
    STOPPED: "yellow",
    COMING: "dim",
    ASKS: "bold yellow",
}
WORST = (ASKS, RUNNING, STOPPED, FAILED, DONE)  # which mark of its parts a stage has


@dataclass(frozen=True)
class Part:
    """A capability at a stage, or a step of it; ``name`` is "" for the stage as a whole."""

    name: str
    mark: str
    told: str
    at: datetime | None = None


def pipeline(
    cycle: CycleView,
    adapters: Sequence[AdapterView],
    progress: Mapping[str, EventView],
    waits: Mapping[str, EventView],
    width: int,
) -> Text:
    """The whole of it, at most ``width`` cells wide; ``progress`` and what it ``waits`` for by stage and capability."""
    parts: dict[str, list[Part]] = {name: [] for name in _before_the_end(cycle, waits)}
    for stage in cycle.stages:
        if stage.stage not in UNTOLD:
            name, part = _place(stage)
            parts.setdefault(name, []).append(_part(cycle, stage, part, progress))
    for key, why in waits.items():
        _wait(parts, key, why)
    parts["approve"] += [_decision(one) for one in adapters if one.cycle_id == cycle.id and one.gate == "pass"]
    parts[ORDER[-1]] = parts.pop(ORDER[-1], [])
    names = list(dict.fromkeys(stage.capability for stage in cycle.stages if stage.capability))
    room = width - NAME - TIME - 3
    each = room // len(names) if len(names) > 1 else 0
    columns = names if each >= LEAST else []
    told = Text(no_wrap=True, overflow="ellipsis")
    if columns:
        told.append(
            " " * (NAME + 3) + "".join(_fixed(sanitize_line(name, 60), each - 1) + " " for name in columns) + "\n",
            "dim",
        )
    for name, found in parts.items():
        _stage(told, name, found, columns, room)
    if cycle.costs:
        told.append(" " * 2).append(_fixed("model", NAME + 1), "bold").append(f"{_paid(cycle.costs)}\n")
    told.right_crop(1)
    return told


def _wait(parts: dict[str, list[Part]], key: str, told: EventView) -> None:
    """What a stage waits for, until it begins or goes on."""
    stage, _, name = key.partition(" ")
    stage = PARTS.get(stage, stage)
    there = next((part for part in parts.get(stage, []) if part.name == name), None)
    if stage not in parts or (there is not None and there.mark != RUNNING):
        return
    if there is not None and there.at is not None and there.at > told.at:
        return
    waiting = Part(name, STOPPED, f"waits for {sanitize_line(told.detail.get('for', '?'), 120)}", told.at)
    parts[stage] = [part for part in parts[stage] if part is not there] + [waiting]


def _before_the_end(cycle: CycleView, waits: Mapping[str, EventView]) -> list[str]:
    """The lines but the last; prompts have one before the training, where any was tried."""
    names = list(ORDER[:-1])
    tried = [stage.stage for stage in cycle.stages] + [key.partition(" ")[0] for key in waits]
    if PROMPT in tried:
        names.insert(names.index("train"), PARTS[PROMPT])
    return names


def _place(stage: StageView) -> tuple[str, str]:
    """The stage's line, and its name there."""
    first, _, rest = stage.stage.partition(" ")
    if stage.stage == PROMPT:
        return PARTS[PROMPT], stage.capability or ""
    if stage.stage in PARTS:
        return PARTS[stage.stage], stage.stage
    if first in ORDER and rest:  # "evaluate base"
        return first, rest
    return stage.stage, stage.capability or ""


def _part(cycle: CycleView, stage: StageView, name: str, progress: Mapping[str, EventView]) -> Part:
    if stage.stage == PROMPT and str(stage.detail.get("reason")).startswith(ENOUGH):
        return Part(name, DONE, ENOUGH, stage.at)
    if stage.state == "failed":
        return Part(name, FAILED, sanitize_line(stage.detail.get("reason") or "failed", 120), stage.at)
    if stage.state != "started":
        return Part(name, DONE, _figure(stage), stage.at)
    if cycle.state != "running":
        return Part(name, STOPPED, cycle.state, stage.at)
    now = progress.get(f"{stage.stage} {stage.capability or ''}".strip()) or progress.get(stage.stage.partition(" ")[0])
    same = now is not None and now.detail.get("phase") in (
        stage.stage,
        f"{stage.stage} {stage.capability}",
        "iteration",
    )
    return Part(name, RUNNING, how_far(now) if now is not None and same else f"since {stage.at:%H:%M}", stage.at)


def _decision(adapter: AdapterView) -> Part:
    if adapter.decision == "none":
        return Part(adapter.name, ASKS, "waits for you")
    if adapter.decision != "approved":
        return Part(adapter.name, FAILED, sanitize_line(adapter.decision, 20))
    share = f" {100 * adapter.share:.0f} %" if adapter.share is not None else ""
    return Part(adapter.name, DONE, "live" if adapter.live else f"{adapter.trial}{share}" or "approved")


def _figure(stage: StageView) -> str:
    """What a stage has found, from its closing event."""
    detail = stage.detail
    if stage.stage == "collect" and isinstance(detail.get("success"), int | float):
        share, episodes = f"{100 * detail['success']:.0f} %", sanitize_line(detail.get("episodes", "?"), 12)
        broken = f", {sanitize_line(detail['infrastructure'], 12)} broke" if detail.get("infrastructure") else ""
        return f"{share} of {episodes} episodes succeed{broken}"
    if stage.stage == "admit" and detail.get("refused_by"):
        return sanitize_line(f"refused by {', '.join(map(str, detail['refused_by']))}", 60)
    if stage.stage == "gate" and detail.get("answer"):
        return sanitize_line(detail["answer"], 20)
    if stage.stage == "train" and detail.get("adapter"):
        return sanitize_line(detail["adapter"], 60).removeprefix(stage.capability or "")
    if stage.stage == "promote" and detail.get("live") is not None:
        return sanitize_line(f"live: {', '.join(map(str, detail['live'])) or 'none'}", 80)
    return ""


def _paid(costs: Sequence[CostView]) -> str:
    """What a cycle's stages have asked of language models, all together, and each stage's share of it."""
    calls, cost = sum(one.calls for one in costs), sum(one.cost for one in costs)
    about = "~" if any(one.estimated for one in costs) else ""
    tokens = sum(one.prompt_tokens + one.completion_tokens for one in costs)
    money = f", cost {about}{cost:.4g}" if cost else ""
    of_each = ", ".join(f"{sanitize_line(one.stage, 20)} {f'{one.cost:.4g}' if cost else one.calls}" for one in costs)
    return f"{calls} calls, {about}{tokens:,} tokens{money} ({of_each})"


def _stage(told: Text, name: str, parts: Sequence[Part], columns: Sequence[str], room: int) -> None:
    """Add a stage's line, or lines."""
    marks = {part.mark for part in parts}
    mark = next((mark for mark in WORST if mark in marks), COMING)
    told.append(f"{mark} ", STYLES[mark])
    told.append(_fixed(sanitize_line(name, NAME), NAME + 1), STYLES[mark] if mark in (COMING, RUNNING) else "bold")
    named = {_capability(part): part for part in parts}
    if columns and parts and set(named) <= set(columns):
        lines = [_beneath(named, columns, room)]
    else:
        lines = _beside(parts, room)
    ended = [part.at for part in parts if part.at is not None]
    end = f"{max(ended):%H:%M}" if ended and mark not in (RUNNING, ASKS) else ""
    for place, row in enumerate(lines):
        if place:
            told.append(" " * (NAME + 3))
        row.append(" " * max(room - row.cell_len, 0))
        told.append_text(row).append(f"{end if not place else '':>{TIME}}\n", "dim")


def _beneath(named: Mapping[str, Part], columns: Sequence[str], room: int) -> Text:
    """Each capability in its column."""
    told, each = Text(), room // len(columns)
    for name in columns:
        if (part := named.get(name)) is None:
            told.append(" " * each)
        else:
            told.append(f"{part.mark} ", STYLES[part.mark])
            told.append(_fixed(part.told, each - 3) + " ", "red" if part.mark == FAILED else "")
    return told


def _beside(parts: Sequence[Part], room: int) -> list[Text]:
    """One behind the other, on as many lines as that takes."""
    lines = [Text()]
    for part in parts:
        text = f"{sanitize_line(part.name, 40)} {part.told}".strip()
        alone = len(parts) == 1
        if not alone and part.mark == DONE:
            text = sanitize_line(part.name, 40)
        length = min(cell_len(text) + 2 * (not alone), room)
        if lines[-1].cell_len and lines[-1].cell_len + 3 + length > room:
            lines.append(Text())
        elif lines[-1].cell_len:
            lines[-1].append("   ")
        if not alone:
            lines[-1].append(f"{part.mark} ", STYLES[part.mark])
        lines[-1].append(_fixed(text, length - 2 * (not alone)), "red" if part.mark == FAILED else "")
    return lines


def _capability(part: Part) -> str:
    """Of an adapter version its capability."""
    return part.name.partition("@")[0]


def how_far(told: EventView) -> str:
    """What a stage's newest progress says: how much is done, how long the rest takes at this pace, its figure."""
    done, total = _number(told.detail.get("done")), _number(told.detail.get("total"))
    figure = sanitize_line(told.detail.get("figure") or "", 60)
    if not total:
        return figure
    left = time_left(told.detail, told.at, done, total)
    return ", ".join(part for part in (f"{done}/{total}", left, figure) if part)


def time_left(detail: Mapping[str, Any], at: datetime, done: int, total: int) -> str:
    """ "" while nothing can be said: nothing done since it was first heard of, or everything."""
    new = done - _number(detail.get("done_then"))
    try:
        spent = at - datetime.fromisoformat(detail["since"])
    except (KeyError, TypeError, ValueError):
        return ""
    if new <= 0 or total <= done or spent <= timedelta():
        return ""
    return f"≈{duration(spent * ((total - done) / new))} left"


def duration(span: timedelta) -> str:
    """Rounded to what is of interest: "40 s", "12 min", "3.5 h", "2.1 d"."""
    seconds = span.total_seconds()
    for limit, unit, shown in ((90, 1, "{:.0f} s"), (5400, 60, "{:.0f} min"), (48 * 3600, 3600, "{:.1f} h")):
        if seconds < limit:
            return shown.format(seconds / unit)
    return f"{seconds / 86400:.1f} d"


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _fixed(text: str, width: int) -> str:
    """The text in exactly so many cells, an ellipsis where it is cut."""
    width = max(width, 0)
    return (
        set_cell_size(text, width)
        if cell_len(text) <= width
        else set_cell_size(text, max(width - 1, 0)) + "…" * (width > 0)
    )
