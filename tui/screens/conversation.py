"""Conversations to read: a stored one, two episodes of a gate side by side, a sample rollout of a training.

A stored conversation can have another trial of its task beside it. Invariants: new labels or outcomes change neither
what is folded nor the place of reading. When it is opened for a capability, only the citations of that capability are
marked, and the first of them is chosen at first.
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
from tui.widgets.navigation import READING

OTHERWISE = {"success": "failure", "failure": "success"}  # the outcome that a trial beside it has
DETAIL = 400  # characters of an episode's detail


@dataclass
class Found:
    """What the daemon said."""

    one: FullTrajectory
    beside: FullTrajectory | None


class Conversation(Live):
    """A stored conversation, pushed over the screen that it was opened from."""

    AUTO_FOCUS = "Talk"
    DEFAULT_CSS = "Conversation #beside { border-left: vkey $panel-lighten-2; display: none; }"
    TITLE_TEXT = "Conversation"
    CONCERNS = ("stage finished", "cycle", "import", "outcomes")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "beside", "Side by side", tooltip="A trial of the task that ended otherwise beside it, or away"),
        Binding("o", "another", "Other trial", tooltip="Another trial of the task beside it"),
        Binding("e,x", "export", "Export", tooltip="Write it to a file"),
        Binding("escape,q", "back", "Back", key_display="Esc"),
    ]

    def __init__(self, trajectory_id: str, *, capability: str | None = None, message: int | None = None) -> None:
        super().__init__()
        self.trajectory_id = trajectory_id
        self.capability = capability
        self._message = message  # where reading begins
        self.beside: str | None = None
        self._one: FullTrajectory | None = None

    def contents(self) -> ComposeResult:
        """One side, and room for another."""
        with Horizontal():
            yield Side(id="one")
            yield Side(id="beside")

    def on_mount(self) -> None:
        """Reading begins at the message that was asked for."""
        self.query_one("#one Talk", Talk).begin_at = self._message

    def news(self, events: list[EventView]) -> None:
        """What was said of conversations concerns this too."""
        if any(map(tells_of_conversations, events)):
            self.changed()
        super().news(events)

    async def load(self, client: Client) -> Found:
        """What is shown."""
        one = await client.trajectories.get(self.trajectory_id)
        return Found(one, await client.trajectories.get(self.beside) if self.beside else None)

    def show(self, found: Found) -> None:
        """Both sides."""
        self._one = found.one
        self._tell(self.query_one("#one", Side), found.one)
        there = found.beside is not None and found.beside.id == self.beside
        side = self.query_one("#beside", Side)
        if found.beside is not None and there:
            self._tell(side, found.beside)
        side.display = there

    def _tell(self, side: Side, one: FullTrajectory) -> None:
        side.tell(_about(one, self.capability), blocks(one.messages, citations(one.labels, self.capability)))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Another trial is offered beside a trial, a file where the terminal is the user's own."""
        if action == "another":
            return self.beside is not None
        return not self.app.is_web if action == "export" else True

    def action_back(self) -> None:
        """To where it was opened."""
        self.dismiss()

    def action_beside(self) -> None:
        """A trial that ended otherwise beside it, or none."""
        if self.beside is not None:
            self._put_beside(None)
            self.query_one("#one Talk", Talk).focus()
        else:
            self._find(otherwise=True)

    def action_another(self) -> None:
        """The next trial of the task beside it, however it ended."""
        self._find(otherwise=False)

    def action_export(self) -> None:
        """Write it to a file."""
        export(self.app, [self.trajectory_id])

    @work(exclusive=True, group="trials")
    async def _find(self, *, otherwise: bool) -> None:
        one = self._one
        if one is None:
            return
        try:
            trials = await self.app.client.trajectories.trials(one.id)
        except ClientError as error:
            self.app.notify(sanitize_line(error.message, 400), severity="error", markup=False)
            return
        fitting = _nearest(one, trials)
        wanted = [trial for trial in fitting if trial.outcome == OTHERWISE.get(one.outcome)] if otherwise else fitting
        if wanted:
            ids = [trial.id for trial in wanted]
            place = ids.index(self.beside) + 1 if self.beside in ids else 0
            self._put_beside(ids[place % len(ids)])
            return
        if not trials:
            told = "This is the only trial of its task."
        elif one.outcome not in OTHERWISE:
            told = f"Nobody has judged this one; beside it is one of the {len(trials)} other trials, o shows the next."
            self._put_beside(fitting[0].id)
        else:
            told = f"None of the {len(trials)} other trials is a {OTHERWISE[one.outcome]}."
        self.app.notify(told, timeout=5, markup=False)

    def _put_beside(self, trajectory_id: str | None) -> None:
        self.beside = trajectory_id
        self.refresh_bindings()
        self.query_one("#beside", Side).display = trajectory_id is not None
        self.query_one("#beside Talk", Talk).tell([])
        self.changed()


class SideBySide(ModalScreen[None]):
    """Two episodes of the same task, the base's and the adapter's; one above the other where it is narrow."""

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
        *READING,
    ]

    def __init__(self, title: str, base: Episode, adapter: Episode) -> None:
        super().__init__()
        self._title, self._base, self._adapter = title, base, adapter

    def compose(self) -> ComposeResult:
        """A side each."""
        with Container():
            yield Side(self._about(self._base), blocks(self._base.messages), id="base")
            yield Side(self._about(self._adapter), blocks(self._adapter.messages), id="adapter")
        yield Footer(compact=True)

    def _about(self, one: Episode) -> Text:
        mark, colour = OUTCOMES.get(one.outcome, ("·", ""))
        told = Text(f"{mark} {sanitize_line(one.outcome, 20)}", f"bold {colour}")
        told.append(f"   {sanitize_line(one.model, 60)}\n", "bold")
        told.append(f"{self._title} · {sanitize_line(one.end_cause, 20)} · reward {one.reward:.2f}")
        if one.detail:
            told.append(f"\n{sanitize_line(one.detail, DETAIL)}", "red")
        return told


class RolloutShown(ModalScreen[None]):
    """One of a group's sample rollouts as a conversation; arrow keys go to the others."""

    AUTO_FOCUS = "Talk"
    DEFAULT_CSS = "RolloutShown > Side { background: $surface; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close", key_display="Esc"),
        Binding("right,n", "other(1)", "Next", key_display="→"),
        Binding("left,b", "other(-1)", "Previous", key_display="←"),
        *READING,
    ]

    def __init__(self, samples: Sequence[SampleView], place: int) -> None:
        super().__init__()
        self._samples, self._place = samples, place

    def compose(self) -> ComposeResult:
        """The conversation."""
        yield Side(self._about(), blocks(self._samples[self._place].messages))
        yield Footer(compact=True)

    async def action_other(self, by: int) -> None:
        """The next one, or the one before."""
        self._place = (self._place + by) % len(self._samples)
        await self.recompose()
        self.query_one(Talk).focus()

    def _about(self) -> Text:
        sample = self._samples[self._place]
        mark, colour = OUTCOMES["success" if sample.success else "failure"]
        told = Text(f"{mark} {'success' if sample.success else 'failure'}", f"bold {colour}")
        told.append(f", reward {sample.reward:.2f}")
        of = f"seed {sample.seed}: {sanitize_line(sample.place, 20)} of its group"
        told.append(f"   iteration {sample.iteration}, {of}", "bold")
        told.append(f"   {self._place + 1} of {len(self._samples)}", "dim")
        if sample.left_out:
            told.append(f"\n{sample.left_out} more messages were not kept", "yellow")
        return told


def _nearest(one: FullTrajectory, trials: list[TrajectorySummary]) -> list[TrajectorySummary]:
    """Those of the same cycle and model first."""
    return sorted(trials, key=lambda trial: (trial.cycle_id != one.cycle_id, trial.model != one.model))


def _about(found: FullTrajectory, capability: str | None) -> Text:
    mark, colour = OUTCOMES.get(found.outcome, ("·", ""))
    told = Text(f"{mark} {sanitize_line(found.outcome, 20)}", f"bold {colour}")
    if found.by == "source":
        told.append(" as its source says", "dim")
    else:
        who = f" ({sanitize_line(found.said.who, 60)})" if found.said and found.said.who else ""
        told.append(f" said by {sanitize_line(found.by, 20)}{who}", "dim")
    told.append(f"   {sanitize_line(found.id, 80)}\n", "bold")
    split = f"/{sanitize_line(found.split, 40)}" if found.split else ""
    of = f"task {sanitize_line(found.task_id, 60)}, trial {found.trial}"
    told.append(
        f"{sanitize_line(found.source, 60)}{split}, {of} · {sanitize_line(found.model, 60)}"
        f" · {sanitize_line(found.end_cause, 20)}"
    )
    parts = "".join(f", {sanitize_line(name, 30)} {_figure(value)}" for name, value in found.parts.items())
    told.append(f" · reward {found.reward:g}{f' ({parts[2:]})' if parts else ''}")
    if found.said and found.said.comment:
        told.append(f"\n“{sanitize_line(found.said.comment, 200)}”", "italic")
    if found.detail:
        told.append(f"\n{sanitize_line(found.detail, 200)}", "yellow")
    for cycle, some in groupby(found.labels, lambda labels: labels.cycle_id):
        told.append(f"\n{sanitize_line(cycle, 40)}: ", "dim")
        said = [_labels(labels) for labels in some if capability in (None, labels.capability)]
        told.append_text(Text(" · ", "dim").join(said))
    return told


def _labels(labels: CapabilityLabels) -> Text:
    """What most runs said first."""
    counts = Counter(run.verdict for run in labels.runs).most_common()
    mark, colour = VERDICTS.get(counts[0][0] if counts else "", ("·", ""))
    said = ", ".join(f"{sanitize_line(verdict, 20)} {count}/{len(labels.runs)}" for verdict, count in counts)
    return Text(f"{mark} {sanitize_line(labels.capability, 60)} {said}", colour)


def _figure(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"
