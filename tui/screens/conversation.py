"""Screens with conversations: a stored one, two episodes of a gate side by side, a sample rollout of a training.

A stored conversation can have another trial of its task beside it. Invariants: new labels or outcomes change neither
what is folded nor the scroll position. When a conversation is opened for a capability, only the citations of that
capability are marked, and the first of them is selected at first.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal
from textual.screen import ModalScreen
from textual.widgets import Footer

from traced.client import Client, ClientError
from traced.client.approvals import Episode
from traced.client.models import EventView
from traced.client.trainings import SampleView
from traced.client.trajectories import CapabilityLabels, FullTrajectory, TrajectorySummary
from tui.connection import tells_of_conversations
from tui.screens.live_screen import WIDTHS, Live
from tui.text import OUTCOMES, VERDICTS, sanitize_line
from tui.widgets.blocks import blocks, citations
from tui.widgets.conversation import Side, Talk
from tui.widgets.dialogs import export
from tui.widgets.navigation import READER_BINDINGS

OTHERWISE = {"success": "failure", "failure": "success"}  # outcome -> outcome of the trial to show beside it
DETAIL = 400  # maximum characters of an episode's detail


@dataclass
class ConversationData:
    """The daemon's response: the trajectory, and another trial of its task."""

    trajectory: FullTrajectory
    other: FullTrajectory | None


class Conversation(Live):
    """A stored conversation, pushed over the screen that it was opened from."""

    AUTO_FOCUS = "Talk"
    DEFAULT_CSS = "Conversation #beside { border-left: vkey $panel-lighten-2; display: none; }"
    TITLE_TEXT = "Conversation"
    CONCERNS = ("stage finished", "cycle", "import", "outcomes")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "beside", "Side by side", tooltip="Show or hide a trial of the same task with the other outcome"),
        Binding("o", "another", "Other trial", tooltip="Show another trial of the same task"),
        Binding("e,x", "export", "Export", tooltip="Write it to a file"),
        Binding("escape,q", "back", "Back", key_display="Esc"),
    ]

    def __init__(self, trajectory_id: str, *, capability: str | None = None, message: int | None = None) -> None:
        super().__init__()
        self.trajectory_id = trajectory_id
        self.capability = capability
        self._message = message  # the index of the message to begin at
        self.other_id: str | None = None
        self._trajectory: FullTrajectory | None = None

    def contents(self) -> ComposeResult:
        """Yield the side of the conversation, and a hidden one for another trial."""
        with Horizontal():
            yield Side(id="one")
            yield Side(id="beside")

    def on_mount(self) -> None:
        """Begin at the requested message."""
        self.query_one("#one Talk", Talk).begin_at = self._message

    def news(self, events: list[EventView]) -> None:
        """Refresh after settled conversations and feedback too."""
        if any(map(tells_of_conversations, events)):
            self.changed()
        super().news(events)

    async def load(self, client: Client) -> ConversationData:
        """Request the trajectory, and the other trial if one is open."""
        trajectory = await client.trajectories.get(self.trajectory_id)
        return ConversationData(trajectory, await client.trajectories.get(self.other_id) if self.other_id else None)

    def show(self, data: ConversationData) -> None:
        """Show the conversation, and the other trial if there is one."""
        self._trajectory = data.trajectory
        self._put_side(self.query_one("#one", Side), data.trajectory)
        is_expected = data.other is not None and data.other.id == self.other_id
        side = self.query_one("#beside", Side)
        if data.other is not None and is_expected:
            self._put_side(side, data.other)
        side.display = is_expected

    def _put_side(self, side: Side, trajectory: FullTrajectory) -> None:
        side.tell(
            _facts(trajectory, self.capability),
            blocks(trajectory.messages, citations(trajectory.labels, self.capability)),
        )

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer another trial only beside a trial, and an export only outside a browser."""
        if action == "another":
            return self.other_id is not None
        return not self.app.is_web if action == "export" else True

    def action_back(self) -> None:
        """Return to the screen below."""
        self.dismiss()

    def action_beside(self) -> None:
        """Show a trial with the other outcome beside this one, or hide the trial that is shown."""
        if self.other_id is not None:
            self._put_beside(None)
            self.query_one("#one Talk", Talk).focus()
        else:
            self._open_trial(otherwise=True)

    def action_another(self) -> None:
        """Show the next trial of the task beside this one, whatever its outcome."""
        self._open_trial(otherwise=False)

    def action_export(self) -> None:
        """Export the conversation to a file."""
        export(self.app, [self.trajectory_id])

    @work(exclusive=True, group="trials")
    async def _open_trial(self, *, otherwise: bool) -> None:
        trajectory = self._trajectory
        if trajectory is None:
            return
        try:
            trials = await self.app.client.trajectories.trials(trajectory.id)
        except ClientError as error:
            self.app.notify(sanitize_line(error.message, 400), severity="error", markup=False)
            return
        fitting = _nearest(trajectory, trials)
        candidates = (
            [trial for trial in fitting if trial.outcome == OTHERWISE.get(trajectory.outcome)] if otherwise else fitting
        )
        if candidates:
            ids = [trial.id for trial in candidates]
            place = ids.index(self.other_id) + 1 if self.other_id in ids else 0
            self._put_beside(ids[place % len(ids)])
            return
        if not trials:
            message = "This is the only trial of its task."
        elif trajectory.outcome not in OTHERWISE:
            message = f"The outcome is unknown. Shown beside it: one of {len(trials)} other trials; o: next."
            self._put_beside(fitting[0].id)
        else:
            message = f"None of the {len(trials)} other trials is a {OTHERWISE[trajectory.outcome]}."
        self.app.notify(message, timeout=5, markup=False)

    def _put_beside(self, trajectory_id: str | None) -> None:
        self.other_id = trajectory_id
        self.refresh_bindings()
        self.query_one("#beside", Side).display = trajectory_id is not None
        self.query_one("#beside Talk", Talk).tell([])
        self.changed()


class SideBySide(ModalScreen[None]):
    """Two episodes of the same task, the base's and the adapter's; on a narrow screen one above the other."""

    AUTO_FOCUS = "Talk"
    DEFAULT_CSS = """
    SideBySide > Container { height: 1fr; background: $surface; }
    SideBySide.-wide > Container { layout: horizontal; }
    SideBySide.-wide #adapter { border-left: vkey $panel-lighten-2; }
    """
    HORIZONTAL_BREAKPOINTS = WIDTHS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close", key_display="Esc"),
        Binding("tab", "app.focus_next", "Other episode"),
        *READER_BINDINGS,
    ]

    def __init__(self, title: str, base: Episode, adapter: Episode) -> None:
        super().__init__()
        self._title, self._base, self._adapter = title, base, adapter

    def compose(self) -> ComposeResult:
        """Yield one side for each episode."""
        with Container():
            yield Side(self._facts(self._base), blocks(self._base.messages), id="base")
            yield Side(self._facts(self._adapter), blocks(self._adapter.messages), id="adapter")
        yield Footer(compact=True)

    def _facts(self, episode: Episode) -> Text:
        mark, colour = OUTCOMES.get(episode.outcome, ("·", ""))
        text = Text(f"{mark} {sanitize_line(episode.outcome, 20)}", f"bold {colour}")
        text.append(f"   {sanitize_line(episode.model, 60)}\n", "bold")
        text.append(f"{self._title} · {sanitize_line(episode.end_cause, 20)} · reward {episode.reward:.2f}")
        if episode.detail:
            text.append(f"\n{sanitize_line(episode.detail, DETAIL)}", "red")
        return text


class RolloutShown(ModalScreen[None]):
    """One of a group's sample rollouts as a conversation; arrow keys show the others."""

    AUTO_FOCUS = "Talk"
    DEFAULT_CSS = "RolloutShown > Side { background: $surface; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close", key_display="Esc"),
        Binding("right,n", "other(1)", "Next", key_display="→"),
        Binding("left,b", "other(-1)", "Previous", key_display="←"),
        *READER_BINDINGS,
    ]

    def __init__(self, samples: Sequence[SampleView], place: int) -> None:
        super().__init__()
        self._samples, self._place = samples, place

    def compose(self) -> ComposeResult:
        """Yield the conversation of the current rollout."""
        yield Side(self._facts(), blocks(self._samples[self._place].messages))
        yield Footer(compact=True)

    async def action_other(self, step: int) -> None:
        """Show the next or the previous rollout."""
        self._place = (self._place + step) % len(self._samples)
        await self.recompose()
        self.query_one(Talk).focus()

    def _facts(self) -> Text:
        sample = self._samples[self._place]
        mark, colour = OUTCOMES["success" if sample.success else "failure"]
        text = Text(f"{mark} {'success' if sample.success else 'failure'}", f"bold {colour}")
        text.append(f", reward {sample.reward:.2f}")
        group_place = f"seed {sample.seed}: {sanitize_line(sample.place, 20)} of its group"
        text.append(f"   iteration {sample.iteration}, {group_place}", "bold")
        text.append(f"   {self._place + 1} of {len(self._samples)}", "dim")
        if sample.left_out:
            text.append(f"\n{sample.left_out} more messages were not stored", "yellow")
        return text


def _nearest(trajectory: FullTrajectory, trials: list[TrajectorySummary]) -> list[TrajectorySummary]:
    """Sort the trials: those of the same cycle first, then those of the same model."""
    return sorted(trials, key=lambda trial: (trial.cycle_id != trajectory.cycle_id, trial.model != trajectory.model))


def _facts(trajectory: FullTrajectory, capability: str | None) -> Text:
    mark, colour = OUTCOMES.get(trajectory.outcome, ("·", ""))
    text = Text(f"{mark} {sanitize_line(trajectory.outcome, 20)}", f"bold {colour}")
    if trajectory.by == "source":
        text.append(", outcome set by its source", "dim")
    elif trajectory.by == "nobody":
        text.append(", not judged yet", "dim")
    else:
        actor = f" ({sanitize_line(trajectory.said.who, 60)})" if trajectory.said and trajectory.said.who else ""
        text.append(f", outcome set by {sanitize_line(trajectory.by, 20)}{actor}", "dim")
    text.append(f"   {sanitize_line(trajectory.id, 80)}\n", "bold")
    split = f"/{sanitize_line(trajectory.split, 40)}" if trajectory.split else ""
    trial = f"task {sanitize_line(trajectory.task_id, 60)}, trial {trajectory.trial}"
    text.append(
        f"{sanitize_line(trajectory.source, 60)}{split}, {trial} · {sanitize_line(trajectory.model, 60)}"
        f" · {sanitize_line(trajectory.end_cause, 20)}"
    )
    if trajectory.started_at is not None:
        text.append(f" · began {trajectory.started_at:%Y-%m-%d %H:%M} UTC")
    if trajectory.customer:
        text.append(f" · {sanitize_line(trajectory.customer, 40)}")
    parts = "".join(f", {sanitize_line(name, 30)} {_figure(value)}" for name, value in trajectory.parts.items())
    text.append(f" · reward {trajectory.reward:g}{f' ({parts[2:]})' if parts else ''}")
    if trajectory.said and trajectory.said.comment:
        text.append(f"\n“{sanitize_line(trajectory.said.comment, 200)}”", "italic")
    if trajectory.detail:
        text.append(f"\n{sanitize_line(trajectory.detail, 200)}", "yellow")
    for cycle, some in groupby(trajectory.labels, lambda labels: labels.cycle_id):
        text.append(f"\n{sanitize_line(cycle, 40)}: ", "dim")
        summaries = [_labels(labels) for labels in some if capability in (None, labels.capability)]
        text.append_text(Text(" · ", "dim").join(summaries))
    return text


def _labels(labels: CapabilityLabels) -> Text:
    """Return a capability's verdicts with their counts, the most frequent one first."""
    counts = Counter(run.verdict for run in labels.runs).most_common()
    mark, colour = VERDICTS.get(counts[0][0] if counts else "", ("·", ""))
    verdicts = ", ".join(f"{sanitize_line(verdict, 20)} {count}/{len(labels.runs)}" for verdict, count in counts)
    return Text(f"{mark} {sanitize_line(labels.capability, 60)} {verdicts}", colour)


def _figure(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"
