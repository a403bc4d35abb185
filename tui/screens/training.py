"""The Training screen: all runs, the curves of the selected run as they grow, and some of its newest rollouts.

The iterations of a run are requested once, and after training progress only those after the last one. Any other event
that may have changed them (a restart from a checkpoint repeats an iteration) leads to a request for all of them. Not
covered: stored trajectories, and the gate's result for the adapter.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import ClassVar, Literal

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid
from textual.widgets import DataTable, Static

from traced.client import Client, ClientError
from traced.client.models import CycleView, Done, EventView, Status
from traced.client.trainings import IterationView, SampleView, TrainingView
from tui.screens.conversation import RolloutShown
from tui.screens.live_screen import Live
from tui.text import cell, sanitize_line
from tui.widgets.dialogs import ActQuestion
from tui.widgets.plots import Curve, format_number
from tui.widgets.tables import KeyedTable, OpenableTable, Row

MARKS = {"running": "▶", "finished": "✓", "failed": "✗", "interrupted": "‖"}
STYLES = {"running": "bold cyan", "finished": "green", "failed": "bold red", "interrupted": "yellow"}
PLACES = {"best": "▲", "median": "●", "worst": "▼"}
# Further runs are requested as the cursor reaches the last one, up to a bound.
PAGE, MAX_RUNS = 100, 1000
FINAL_STATES = ("finished", "failed", "cancelled")  # states of a cycle that has ended
CURVES = {  # figure -> name, lower end of the range, step to which it is rounded
    "reward": ("reward", None, 0.1),
    "success": ("success rate", None, 0.1),
    "mixed_groups": ("mixed groups", None, 0.1),
    "kl_from_base": ("KL from base", 0.0, 0.0),
    "entropy": ("entropy, nats", None, 0.0),
    "tokens_per_second": ("tokens/s", 0.0, 0.0),
}


@dataclass
class TrainingData:
    """The daemon's response; ``iterations`` and ``samples`` are those of the run ``run_id``."""

    status: Status
    runs: list[TrainingView]
    run_id: str | None
    iterations: list[IterationView]
    samples: list[SampleView]


class Training(Live):
    """The screen of training runs, with the details of the run under the cursor."""

    TITLE_TEXT = "Training"
    CONCERNS = ("stage", "cycle", "pause", "resume", "cancel", "start", "stop training", "missed")
    DEFAULT_CSS = """
    Training .title { text-wrap: nowrap; text-overflow: ellipsis; }
    Training KeyedTable { scrollbar-size-horizontal: 0; }
    Training #runs { height: auto; min-height: 5; max-height: 25%; }
    Training #curves { grid-size: 3 2; grid-gutter: 0 1; height: 1fr; min-height: 10; padding: 0 1; }
    Training #samples { height: auto; max-height: 4; }
    Training .bare { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "read", "Read rollout", tooltip="Read the sample rollout under the cursor (also Enter on it)"),
        Binding("p", "pause", "Pause", tooltip="Pause the service at its next safe point"),
        Binding("p", "resume", "Resume", tooltip="Resume the service"),
        Binding("x", "stop", "Stop", tooltip="Stop the training of the selected run; the rest of its cycle continues"),
        Binding("c", "cancel", "Cancel cycle", tooltip="Cancel the cycle of the selected run"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._limit = PAGE
        self._reload_all = True
        self._data: TrainingData | None = None

    def contents(self) -> ComposeResult:
        """Yield the runs, the curves, and the rollouts."""
        yield OpenableTable("state", "capability", "iteration", "reward", "tokens/s", "time", "cycle", id="runs")
        yield Static("", classes="title", id="run", markup=False)
        with Grid(id="curves"):
            for figure, (name, low, step) in CURVES.items():
                yield Curve(name, low=low, step=step, id=figure)
        yield Static("", classes="title", id="samples-title", markup=False)
        yield OpenableTable("rollout", "reward", "outcome", "turns", "last message", id="samples")

    def on_mount(self) -> None:
        """Hide the details until the runs are loaded."""
        self._set_empty(True)

    def changed(self) -> None:
        """Mark everything as outdated, loaded iterations included."""
        self._reload_all = True
        super().changed()

    def news(self, events: list[EventView]) -> None:
        """Request new iterations after training progress, and all of them after other events of this screen."""
        if any(event.kind.startswith(self.CONCERNS) for event in events):
            self.changed()
        elif any(event.kind == "progress" and event.subject.startswith("train ") for event in events):
            super().changed()

    async def load(self, client: Client) -> TrainingData:
        """Request the runs, and the selected run's rollouts and new (or all) iterations."""
        reload_all, self._reload_all = self._reload_all, False
        try:
            status = await client.status()
            runs = await client.trainings.newest(self._limit)
            at = self.query_one("#runs", KeyedTable).selected
            run_id = at if any(run.id == at for run in runs) else next((run.id for run in runs), None)
            if run_id is None:
                return TrainingData(status, runs, None, [], [])
            previous = self._data
            iterations = (
                previous.iterations if previous is not None and previous.run_id == run_id and not reload_all else []
            )
            newer = await client.trainings.iterations(run_id, iterations[-1].iteration if iterations else -1)
            return TrainingData(status, runs, run_id, [*iterations, *newer], await client.trainings.samples(run_id))
        except ClientError:
            self._reload_all = True
            raise

    def show(self, data: TrainingData) -> None:
        """Show the runs, and the curves and rollouts of the selected one."""
        self._data = data
        self.query_one("#runs", KeyedTable).put([run_row(run) for run in data.runs])
        self._set_empty(not data.runs)
        if not data.runs:
            self.note("No trainings yet: a cycle trains one adapter per lacking capability.")
        self._show_run(data)
        self.refresh_bindings()
        if self.query_one("#runs", KeyedTable).selected not in (data.run_id, None):
            # The cursor may have moved while the data were requested.
            self._selection_changed()

    def _show_run(self, data: TrainingData) -> None:
        run = self._selected_run()
        if run is None:
            return
        self.query_one("#run", Static).update(heading(run))
        pending = "not yet" if run.state == "running" else "not recorded"
        for figure in CURVES:
            points = [(iteration.iteration, iteration.figures.get(figure)) for iteration in data.iterations]
            self.query_one(f"#{figure}", Curve).put(points, "not recorded" if data.iterations else pending)
        title, table = self.query_one("#samples-title", Static), self.query_one("#samples", KeyedTable)
        table.put([sample_row(sample) for sample in data.samples])
        table.display = bool(data.samples)
        if data.samples:
            title.update(samples_heading(data.samples[0]))
        else:
            reason = (
                "are available after the first iteration"
                if run.state == "running"
                else "are not stored on this machine"
            )
            title.update(f"Rollouts {reason}")

    def _set_empty(self, is_empty: bool) -> None:
        for name in ("#run", "#curves", "#samples-title", "#samples"):
            self.query_one(name).set_class(is_empty, "bare")

    def _selected_run(self) -> TrainingView | None:
        data = self._data
        return next((run for run in data.runs if run.id == data.run_id), None) if data else None

    def _cycle(self) -> CycleView | None:
        """Return the selected run's cycle while it can be cancelled."""
        run, data = self._selected_run(), self._data
        if run is None or data is None:
            return None
        cycles = (cycle for cycle in data.status.cycles if cycle.id == run.cycle_id and cycle.state not in FINAL_STATES)
        return next(cycles, None)

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Select the run; the last row loads older runs."""
        data, at = self._data, event.cursor_row
        if event.data_table.id != "runs" or data is None or not data.runs:
            return
        if at == len(data.runs) - 1 and len(data.runs) == self._limit < MAX_RUNS:
            self._limit += PAGE
            super().changed()
        if event.row_key.value != data.run_id and any(run.id == event.row_key.value for run in data.runs):
            self._selection_changed()

    def _selection_changed(self) -> None:
        data, at = self._data, self.query_one("#runs", KeyedTable).selected
        assert data is not None
        self._data = TrainingData(data.status, data.runs, at, [], [])
        run = self._selected_run()
        if run is not None:
            self.query_one("#run", Static).update(heading(run))
        self.refresh_bindings()
        self._reload_all = True
        super().changed()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open the selected rollout, or focus the rollouts of the selected run."""
        if event.data_table.id == "samples":
            self.action_read()
        elif self._data is not None and self._data.samples:
            self.query_one("#samples").focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer the actions that are possible now; none on a read-only connection."""
        data = self._data
        if action == "read":
            return bool(data and data.samples)
        if action not in ("pause", "resume", "stop", "cancel"):
            return True
        if data is None or self.app.read_only:
            return False
        run, paused = self._selected_run(), data.status.target.paused_at is not None
        available = {
            "pause": not paused,
            "resume": paused,
            "stop": run is not None and run.at_work,
            "cancel": self._cycle() is not None,
        }
        return available[action]

    def action_read(self) -> None:
        """Open the rollout under the cursor as a conversation."""
        if self._data is None or not self._data.samples:
            return
        at = self.query_one("#samples", KeyedTable).cursor_row
        self.app.push_screen(RolloutShown(self._data.samples, min(at, len(self._data.samples) - 1)))

    def action_pause(self) -> None:
        """Pause the service after a confirmation."""
        self._ask_and_do("pause")

    def action_resume(self) -> None:
        """Resume the service after a confirmation."""
        self._ask_and_do("resume")

    def action_stop(self) -> None:
        """Stop the selected run after a confirmation."""
        self._ask_and_do("stop")

    def action_cancel(self) -> None:
        """Cancel the selected run's cycle after a confirmation."""
        self._ask_and_do("cancel")

    def _ask_and_do(self, action: Literal["pause", "resume", "stop", "cancel"]) -> None:
        data, run, client = self._data, self._selected_run(), self.app.client
        if data is None:
            return
        target, running = (
            sanitize_line(data.status.target.name, 60),
            sanitize_line(", ".join(data.status.doing) or "nothing", 300),
        )
        cycle, capability = (sanitize_line(run.cycle_id, 60), sanitize_line(run.capability, 60)) if run else ("", "")
        title, effect = {
            "pause": (
                f"Pause {target}",
                f"Running work ({running}) stops at its next safe point, after at most one training iteration, and "
                f"no cycle of {target} runs until it is resumed. No training progress is lost.",
            ),
            "resume": (f"Resume {target}", f"An unfinished cycle of {target} continues from its last checkpoint."),
            "stop": (
                f"Stop training {capability}",
                f"The training of {capability} in {cycle} ends at its next safe point. {cycle} continues without this "
                "capability: the run produces no adapter and cannot be resumed.",
            ),
            "cancel": (
                f"Cancel {cycle}",
                f"{cycle} and its unfinished work, e.g. the training of {capability}, end and cannot be resumed. "
                f"Running now: {running}.",
            ),
        }[action]
        requests: dict[str, Callable[[str], Awaitable[Done]]] = {"pause": client.pause, "resume": client.resume}
        if run is not None:
            requests |= {"stop": partial(client.trainings.stop, run.id), "cancel": partial(client.cancel, run.cycle_id)}
        if action in requests:
            self.app.push_screen(ActQuestion(title, Text(effect), requests[action]))


def run_row(run: TrainingView) -> Row:
    """Return a training run's row."""
    state = "pending" if run.state == "running" and not run.at_work else run.state
    first, last = _figure(run.first, "reward"), _figure(run.last, "reward")
    return Row(
        run.id,
        [
            cell(f"{'○' if state == 'pending' else MARKS.get(state, '·')} {state}", STYLES.get(run.state, "")),
            cell(run.capability, limit=32),
            cell(_how_far(run)),
            cell(f"{first} → {last}" if first else "", "bold" if run.at_work else ""),
            cell(_figure(run.last, "tokens_per_second")),
            cell(_time(run)),
            cell(run.cycle_id, limit=60),
        ],
    )


def sample_row(sample: SampleView) -> Row:
    """Return the row of a rollout, with its last message."""
    last_text = next((message.get("content") for message in reversed(sample.messages) if message.get("content")), "")
    outcome, style = ("✓ success", "green") if sample.success else ("✗ failure", "red")
    return Row(
        sample.place,
        [
            cell(f"{PLACES.get(sample.place, '·')} {sanitize_line(sample.place, 20)}"),
            cell(f"{sample.reward:.2f}"),
            cell(outcome, style),
            cell(sample.turns),
            cell(_start(last_text, 150)),
        ],
    )


def samples_heading(sample: SampleView) -> Text:
    """Return a line with what the rollouts of a group share."""
    prompt = next((message.get("content") for message in sample.messages if message.get("role") == "user"), "")
    text = Text(f"Rollouts of iteration {sample.iteration}", "bold", no_wrap=True, overflow="ellipsis", end="")
    text.append(f" · one group, seed {sample.seed} · {sanitize_line(_start(prompt, 150))}", "not bold")
    return text


def heading(run: TrainingView) -> Text:
    """Return one line about a run."""
    text = Text(no_wrap=True, overflow="ellipsis", end="")
    text.append(sanitize_line(run.capability, 60), "bold")
    text.append(f" · {sanitize_line(run.cycle_id, 60)} · iteration {_how_far(run)}")
    if run.adapter:
        text.append(f" · produced {sanitize_line(run.adapter, 80)}")
    if run.detail:
        text.append(f" · {sanitize_line(run.detail, 300)}", "bold")
    elif run.state == "running" and not run.at_work:
        text.append(" · not running in this service")
    return text


def _how_far(run: TrainingView) -> str:
    return f"{run.done} of {run.iterations}" if run.iterations else str(run.done)


def _time(run: TrainingView) -> str:
    if run.left_s is not None:
        return f"≈ {duration(run.left_s)} left"
    if run.finished_at is not None:
        return f"took {duration((run.finished_at - run.started_at).total_seconds())}"
    return _start_time(run.started_at)


def _start_time(at: datetime) -> str:
    return f"since {at:%m-%d %H:%M}"


def duration(seconds: float) -> str:
    """Format a duration in one unit."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _figure(figures: Mapping[str, float | None], name: str) -> str:
    value = figures.get(name)
    return "" if value is None else format_number(value)


def _start(text: object, limit: int) -> str:
    line = " ".join(str(text or "")[: 4 * limit].split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
