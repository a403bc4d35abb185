"""Training runs and their rollouts as lines of tables."""

from collections.abc import Mapping
from datetime import datetime

from rich.text import Text

from traced.client.trainings import SampleView, TrainingView
from tui.plain import cell, line
from tui.widgets.curve import short
from tui.widgets.keyed_table import Row

MARKS = {"running": "▶", "finished": "✓", "failed": "✗", "interrupted": "‖"}
STYLES = {"running": "bold cyan", "finished": "green", "failed": "bold red", "interrupted": "yellow"}
PLACES = {"best": "▲", "median": "●", "worst": "▼"}


def run_row(run: TrainingView) -> Row:
    """One run."""
    state = "waits" if run.state == "running" and not run.at_work else run.state
    first, last = _figure(run.first, "reward"), _figure(run.last, "reward")
    return Row(
        run.id,
        [
            cell(f"{'○' if state == 'waits' else MARKS.get(state, '·')} {state}", STYLES.get(run.state, "")),
            cell(run.capability, limit=32),
            cell(_how_far(run)),
            cell(f"{first} → {last}" if first else "", "bold" if run.at_work else ""),
            cell(_figure(run.last, "tokens_per_second")),
            cell(_time(run)),
            cell(run.cycle_id, limit=60),
        ],
    )


def sample_row(sample: SampleView) -> Row:
    """One rollout, and what was said last."""
    said = next((one.get("content") for one in reversed(sample.messages) if one.get("content")), "")
    ended, style = ("✓ success", "green") if sample.success else ("✗ failure", "red")
    return Row(
        sample.place,
        [
            cell(f"{PLACES.get(sample.place, '·')} {line(sample.place, 20)}"),
            cell(f"{sample.reward:.2f}"),
            cell(ended, style),
            cell(sample.turns),
            cell(_start(said, 150)),
        ],
    )


def samples_heading(sample: SampleView) -> Text:
    """What the rollouts of a group share."""
    asked = next((one.get("content") for one in sample.messages if one.get("role") == "user"), "")
    told = Text(f"Rollouts of iteration {sample.iteration}", "bold", no_wrap=True, overflow="ellipsis", end="")
    told.append(f" · one group, seed {sample.seed} · {line(_start(asked, 150))}", "not bold")
    return told


def heading(run: TrainingView) -> Text:
    """What is to be said of one run in a line."""
    told = Text(no_wrap=True, overflow="ellipsis", end="")
    told.append(line(run.capability, 60), "bold")
    told.append(f" · {line(run.cycle_id, 60)} · iteration {_how_far(run)}")
    if run.adapter:
        told.append(f" · gave {line(run.adapter, 80)}")
    if run.detail:
        told.append(f" · {line(run.detail, 300)}", "bold")
    elif run.state == "running" and not run.at_work:
        told.append(" · not at work here now")
    return told


def _how_far(run: TrainingView) -> str:
    return f"{run.done} of {run.iterations}" if run.iterations else str(run.done)


def _time(run: TrainingView) -> str:
    if run.left_s is not None:
        return f"≈ {duration(run.left_s)} left"
    if run.finished_at is not None:
        return f"took {duration((run.finished_at - run.started_at).total_seconds())}"
    return _since(run.started_at)


def _since(at: datetime) -> str:
    return f"since {at:%m-%d %H:%M}"


def duration(seconds: float) -> str:
    """Roughly, in one unit."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _figure(figures: Mapping[str, float | None], name: str) -> str:
    value = figures.get(name)
    return "" if value is None else short(value)


def _start(text: object, limit: int) -> str:
    told = " ".join(str(text or "")[: 4 * limit].split())
    return told if len(told) <= limit else f"{told[: limit - 1]}…"
