"""Training: all runs, the curves of the chosen one as they grow, and some of its newest rollouts.

A run's iterations are requested once; while it is running, only those after the last. Any other event that may have
changed them (a restart from a checkpoint repeats an iteration) has all of them requested again. Not covered: stored
trajectories, and the gate's result for the adapter.
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
from tui.widgets.plots import Curve, short
from tui.widgets.tables import KeyedTable, Opening, Row

MARKS = {"running": "▶", "finished": "✓", "failed": "✗", "interrupted": "‖"}
STYLES = {"running": "bold cyan", "finished": "green", "failed": "bold red", "interrupted": "yellow"}
PLACES = {"best": "▲", "median": "●", "worst": "▼"}
PAGE, MOST = 100, 1000  # runs that are requested at first, and at most as the cursor comes to the last one
OVER = ("finished", "failed", "cancelled")  # states of a cycle that has ended
CURVES = {  # figure -> name, where the plot begins, what its range is rounded to
    "reward": ("reward", None, 0.1),
    "success": ("success rate", None, 0.1),
    "mixed_groups": ("mixed groups", None, 0.1),
    "kl_from_base": ("KL from base", 0.0, 0.0),
    "entropy": ("entropy, nats", None, 0.0),
    "tokens_per_second": ("tokens/s", 0.0, 0.0),
}


@dataclass
class Found:
    """What the daemon said; ``iterations`` and ``samples`` are those of the run ``of``."""

    status: Status
    runs: list[TrainingView]
    of: str | None
    iterations: list[IterationView]
    samples: list[SampleView]


class Training(Live):
    """The screen of training runs, and of the one under the cursor."""

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
        Binding("x", "stop", "Stop", tooltip="Stop the training of the chosen run; its cycle goes on"),
        Binding("c", "cancel", "Cancel cycle", tooltip="Cancel the cycle of the chosen run"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._wanted = PAGE
        self._anew = True
        self._found: Found | None = None

    def contents(self) -> ComposeResult:
        """Runs, curves, rollouts."""
        yield Opening("state", "capability", "iteration", "reward", "tokens/s", "time", "cycle", id="runs")
        yield Static("", classes="title", id="run", markup=False)
        with Grid(id="curves"):
            for figure, (name, low, step) in CURVES.items():
                yield Curve(name, low=low, step=step, id=figure)
        yield Static("", classes="title", id="samples-title", markup=False)
        yield Opening("rollout", "reward", "outcome", "turns", "last said", id="samples")

    def on_mount(self) -> None:
        """Nothing is known yet."""
        self._bare(True)

    def changed(self) -> None:
        """Anything may be out of date, the iterations that are known among it."""
        self._anew = True
        super().changed()

    def news(self, events: list[EventView]) -> None:
        """Progress of a training adds iterations; whatever else concerns it may change all of them."""
        if any(event.kind.startswith(self.CONCERNS) for event in events):
            self.changed()
        elif any(event.kind == "progress" and event.subject.startswith("train ") for event in events):
            super().changed()

    async def load(self, client: Client) -> Found:
        """The runs, and of the chosen one the iterations that are not known and its rollouts."""
        anew, self._anew = self._anew, False
        try:
            status = await client.status()
            runs = await client.trainings.newest(self._wanted)
            at = self.query_one("#runs", KeyedTable).selected
            of = at if any(run.id == at for run in runs) else next((run.id for run in runs), None)
            if of is None:
                return Found(status, runs, None, [], [])
            before = self._found
            known = before.iterations if before is not None and before.of == of and not anew else []
            behind = await client.trainings.iterations(of, known[-1].iteration if known else -1)
            return Found(status, runs, of, [*known, *behind], await client.trainings.samples(of))
        except ClientError:
            self._anew = True
            raise

    def show(self, found: Found) -> None:
        """All of it."""
        self._found = found
        self.query_one("#runs", KeyedTable).put([run_row(run) for run in found.runs])
        self._bare(not found.runs)
        if not found.runs:
            self.note("No adapter has been trained yet: a cycle trains one for each capability that it finds lacking.")
        self._show_run(found)
        self.refresh_bindings()
        if self.query_one("#runs", KeyedTable).selected not in (found.of, None):
            self._chosen_anew()  # the cursor has moved meanwhile

    def _show_run(self, found: Found) -> None:
        run = self._chosen()
        if run is None:
            return
        self.query_one("#run", Static).update(heading(run))
        waits = "not yet" if run.state == "running" else "not recorded"
        for figure in CURVES:
            points = [(one.iteration, one.figures.get(figure)) for one in found.iterations]
            self.query_one(f"#{figure}", Curve).put(points, "not recorded" if found.iterations else waits)
        title, table = self.query_one("#samples-title", Static), self.query_one("#samples", KeyedTable)
        table.put([sample_row(sample) for sample in found.samples])
        table.display = bool(found.samples)
        if found.samples:
            title.update(samples_heading(found.samples[0]))
        else:
            none = "come with its first iteration" if run.state == "running" else "are not kept on this machine"
            title.update(f"Rollouts to read {none}")

    def _bare(self, bare: bool) -> None:
        for name in ("#run", "#curves", "#samples-title", "#samples"):
            self.query_one(name).set_class(bare, "bare")

    def _chosen(self) -> TrainingView | None:
        """The chosen run."""
        found = self._found
        return next((run for run in found.runs if run.id == found.of), None) if found else None

    def _cycle(self) -> CycleView | None:
        """The chosen run's cycle, while it can be cancelled."""
        run, found = self._chosen(), self._found
        if run is None or found is None:
            return None
        known = (cycle for cycle in found.status.cycles if cycle.id == run.cycle_id and cycle.state not in OVER)
        return next(known, None)

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Another run is chosen; the last one has older ones asked for."""
        found, at = self._found, event.cursor_row
        if event.data_table.id != "runs" or found is None or not found.runs:
            return
        if at == len(found.runs) - 1 and len(found.runs) == self._wanted < MOST:
            self._wanted += PAGE
            super().changed()
        if event.row_key.value != found.of and any(run.id == event.row_key.value for run in found.runs):
            self._chosen_anew()

    def _chosen_anew(self) -> None:
        found, at = self._found, self.query_one("#runs", KeyedTable).selected
        assert found is not None
        self._found = Found(found.status, found.runs, at, [], [])
        run = self._chosen()
        if run is not None:
            self.query_one("#run", Static).update(heading(run))
        self.refresh_bindings()
        self._anew = True
        super().changed()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Read a rollout; from a run on to its rollouts."""
        if event.data_table.id == "samples":
            self.action_read()
        elif self._found is not None and self._found.samples:
            self.query_one("#samples").focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What can be done now; nothing is offered to who only reads."""
        found = self._found
        if action == "read":
            return bool(found and found.samples)
        if action not in ("pause", "resume", "stop", "cancel"):
            return True
        if found is None or self.app.read_only:
            return False
        run, paused = self._chosen(), found.status.target.paused_at is not None
        offered = {
            "pause": not paused,
            "resume": paused,
            "stop": run is not None and run.at_work,
            "cancel": self._cycle() is not None,
        }
        return offered[action]

    def action_read(self) -> None:
        """The rollout under the cursor as a conversation."""
        if self._found is None or not self._found.samples:
            return
        at = self.query_one("#samples", KeyedTable).cursor_row
        self.app.push_screen(RolloutShown(self._found.samples, min(at, len(self._found.samples) - 1)))

    def action_pause(self) -> None:
        """Ask, then pause the service."""
        self._ask_and_do("pause")

    def action_resume(self) -> None:
        """Ask, then go on."""
        self._ask_and_do("resume")

    def action_stop(self) -> None:
        """Ask, then stop the chosen run."""
        self._ask_and_do("stop")

    def action_cancel(self) -> None:
        """Ask, then cancel the chosen run's cycle."""
        self._ask_and_do("cancel")

    def _ask_and_do(self, act: Literal["pause", "resume", "stop", "cancel"]) -> None:
        found, run, client = self._found, self._chosen(), self.app.client
        if found is None:
            return
        target, doing = (
            sanitize_line(found.status.target.name, 60),
            sanitize_line(", ".join(found.status.doing) or "nothing", 300),
        )
        cycle, capability = (sanitize_line(run.cycle_id, 60), sanitize_line(run.capability, 60)) if run else ("", "")
        title, what = {
            "pause": (
                f"Pause {target}",
                f"What is at work ({doing}) stops at its next safe point, an iteration of training away at most, and "
                f"no cycle of {target} goes on until it is resumed. Nothing that was trained is lost.",
            ),
            "resume": (f"Resume {target}", f"An unfinished cycle of {target} is carried on where it was."),
            "stop": (
                f"Stop training {capability}",
                f"The training of {capability} in {cycle} ends at its next safe point. {cycle} goes on without this "
                "capability: no adapter comes of it, and the run cannot be taken up again.",
            ),
            "cancel": (
                f"Cancel {cycle}",
                f"Ends {cycle} for good, with everything in it that is unfinished, the training of {capability} and "
                f"any other. At work now: {doing}.",
            ),
        }[act]
        how: dict[str, Callable[[str], Awaitable[Done]]] = {"pause": client.pause, "resume": client.resume}
        if run is not None:
            how |= {"stop": partial(client.trainings.stop, run.id), "cancel": partial(client.cancel, run.cycle_id)}
        if act in how:
            self.app.push_screen(ActQuestion(title, Text(what), how[act]))


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
            cell(f"{PLACES.get(sample.place, '·')} {sanitize_line(sample.place, 20)}"),
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
    told.append(f" · one group, seed {sample.seed} · {sanitize_line(_start(asked, 150))}", "not bold")
    return told


def heading(run: TrainingView) -> Text:
    """What is to be said of one run in a line."""
    told = Text(no_wrap=True, overflow="ellipsis", end="")
    told.append(sanitize_line(run.capability, 60), "bold")
    told.append(f" · {sanitize_line(run.cycle_id, 60)} · iteration {_how_far(run)}")
    if run.adapter:
        told.append(f" · gave {sanitize_line(run.adapter, 80)}")
    if run.detail:
        told.append(f" · {sanitize_line(run.detail, 300)}", "bold")
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
