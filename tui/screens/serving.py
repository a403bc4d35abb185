"""Serving: the models with their traffic, a canary's progress, the router's decisions and the conversations.

Invariants: decisions are added as they come and kept up to ``KEPT``. The next page starts after the last one shown, so
that none is missing in between. A rollback needs a reason and a confirmation, and a read-only connection does not
offer it. An open conversation is requested again with each event and keeps its place of scrolling. How it fails: the
text of a refusal stands in the conversation's place. Not covered: the messages of a conversation (its trajectories have
them).
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import DataTable, Footer, Static

from traced.client import Client, ClientError
from traced.client.models import HEALTH, EventView
from traced.client.serving import ConversationView, DecisionPage, DecisionView, Models, ModelView, RouterView
from tui.connection import ConnectedApp
from tui.screens.live_screen import Live
from tui.screens.serving_panels import (
    STANDING,
    bar,
    canary_told,
    decision_cells,
    legend,
    letters,
    likely,
    logprob,
    model_cells,
    router_told,
    standing,
    what_a_rollback_does,
)
from tui.text import sanitize_line
from tui.widgets.dialogs import ActQuestion
from tui.widgets.navigation import READING
from tui.widgets.tables import KeyedTable, Row

PAGE, KEPT = 50, 1000  # decisions of one request, and at most shown
WIDE = [(0, "-narrow"), (160, "-wide")]  # columns from which the parts stand side by side


@dataclass(frozen=True)
class Found:
    """What the daemon said; ``only`` is the model whose decisions these are, "" for all."""

    models: Models
    router: RouterView
    page: DecisionPage
    only: str


class Serving(Live):
    """The screen of models, canaries and decisions."""

    TITLE_TEXT = "Serving"
    CONCERNS = ("traffic", "canary", "approve", "rollback", "stage finished", "reload", "restart", "outcomes")
    HORIZONTAL_BREAKPOINTS = WIDE
    DEFAULT_CSS = """
    Serving #router { height: 2; padding: 0 1; }
    Serving #router, Serving #decisions-title { text-wrap: nowrap; text-overflow: ellipsis; }
    Serving KeyedTable { scrollbar-size-horizontal: 0; scrollbar-size-vertical: 1; }
    Serving #above { height: auto; max-height: 65%; }
    Serving #models { height: auto; max-height: 8; }
    Serving #chosen { height: auto; max-height: 9; padding: 0 1; }
    Serving #chosen > Static { height: auto; }
    Serving.-wide #above { layout: horizontal; }
    Serving.-wide #models { width: 1fr; max-height: 14; }
    Serving.-wide #chosen { width: 90; max-height: 14; }
    Serving #decisions { height: 1fr; min-height: 4; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "roll_back", "Roll back"),
        Binding("m", "only", "This model only"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._router_told: object = None
        self._models: dict[str, ModelView] = {}
        self._partial = False
        self._decisions: dict[str, DecisionView] = {}  # newest first
        self._next: str | None = None
        self._only = ""
        self._open: ServedConversation | None = None

    def contents(self) -> Iterable[Widget]:
        """The router, its models beside the chosen one, the decisions."""
        yield Static("", id="router")
        with Container(id="above"):
            columns = ("model", "state", "day %", "hour/day", "p50/p99 s", "fails", "liked", "succeeded")
            yield ModelTable(*columns, id="models")
            with VerticalScroll(id="chosen"):
                yield Static("", id="told")
        yield Static("Decisions", classes="title", id="decisions-title")
        yield DecisionTable("at", "model", "log-probs", "took", "trial", "conversation", id="decisions")

    async def load(self, client: Client) -> Found:
        """Everything at once; the newest page of the decisions."""
        only = self._only
        asked = (
            client.serving.models(),
            client.serving.router(),
            client.serving.decisions(limit=PAGE, model=only),
        )
        models, router, page = await asyncio.gather(*asked)
        return Found(models, router, page, only)

    def news(self, events: list[EventView]) -> None:
        """An open conversation follows as well; of health only the router's is shown here."""
        super().news(events)
        for event in events:
            if event.kind == HEALTH and event.detail.get("router") != self._router_told:
                self._router_told = event.detail.get("router")
                self.changed()
        if self._open is not None and self._open.is_current:
            self._open.ask()

    def show(self, found: Found) -> None:
        """All of it."""
        self._models = {model.name: model for model in found.models.models}
        self.query_one("#router", Static).update(router_told(found.router, found.models.by_default))
        self._partial = found.models.partial
        self.query_one("#models", ModelTable).put([Row(one.name, model_cells(one)) for one in found.models.models])
        self._show_chosen()
        if found.only == self._only:
            self._add_newest(found.page)
            self._show_decisions()

    def _add_newest(self, page: DecisionPage) -> None:
        newest = {decision.id: decision for decision in page.decisions}
        if self._decisions.keys() & newest.keys():
            self._decisions = newest | {key: one for key, one in self._decisions.items() if key not in newest}
        else:  # the first ones, or more than a page has come meanwhile
            self._decisions, self._next = newest, page.next
        if len(self._decisions) > KEPT:
            self._decisions = dict(list(self._decisions.items())[:KEPT])
        if len(self._decisions) >= KEPT:
            self._next = None

    def _show_decisions(self) -> None:
        shown = list(self._decisions.values())
        named = letters(shown)
        newest = max((decision.at for decision in shown), default=None)
        rows = [Row(one.id, decision_cells(one, named, newest)) for one in shown] if newest else []
        self.query_one("#decisions", DecisionTable).put(rows)
        told = Text("Decisions", no_wrap=True, overflow="ellipsis")
        if self._only:
            told.append(f" of {sanitize_line(self._only, 40)} only", "yellow")
        if not shown:
            told.append(": none yet; agents that ask for the model auto bring them", "dim")
        else:
            told.append(f" {len(shown):,}{' and older' if self._next else ''} ", "dim")
        told.append_text(legend(named))
        self.query_one("#decisions-title", Static).update(told)

    def _show_chosen(self) -> None:
        model = self._chosen()
        told = Text()
        if model is not None:
            told.append_text(standing(model, self._partial))
            if model.canary is not None:
                told.append("\n").append_text(canary_told(model.canary))
        told.rstrip()
        self.query_one("#told", Static).update(told)
        self.refresh_bindings()

    def _chosen(self) -> ModelView | None:
        return self._models.get(self.query_one("#models", ModelTable).selected or "")

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Show the model under the cursor; behind the last decision there may be more."""
        if event.data_table.id == "models":
            self._show_chosen()
        elif event.data_table.has_focus and event.cursor_row == event.data_table.row_count - 1:
            self._ask_older()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Enter."""
        if event.data_table.id == "models":
            self._show_only(event.row_key.value or "")
            self.query_one("#decisions").focus()
        elif event.row_key.value is not None:
            self._open = ServedConversation(event.row_key.value)
            self.app.push_screen(self._open, self._left)

    def _left(self, _: None) -> None:
        self._open = None

    def action_only(self) -> None:
        """The decisions of the model under the cursor, or of all again."""
        model = self._chosen()
        self._show_only("" if self._only or model is None else model.name)

    def _show_only(self, name: str) -> None:
        if name != self._only:
            self._only, self._decisions, self._next = name, {}, None
            self.changed()

    @work(exclusive=True, group="older")
    async def _ask_older(self) -> None:
        before, only = self._next, self._only
        if before is None:
            return
        try:
            page = await self.app.client.serving.decisions(limit=PAGE, before=before, model=only)
        except ClientError:
            return  # the link tells of it, and the next key asks again
        if (before, only) == (self._next, self._only):
            self._decisions |= {one.id: one for one in page.decisions if one.id not in self._decisions}
            self._next = page.next if len(self._decisions) < KEPT else None
            self._show_decisions()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer a rollback of what stands, to those who may."""
        if action == "roll_back":
            model = self._chosen() if self.known else None
            return model is not None and model.state in STANDING and not self.app.read_only
        return super().check_action(action, parameters)

    def action_roll_back(self) -> None:
        """Ask why, have it confirmed, do it."""
        model = self._chosen()
        if model is None:
            return
        act = f"Roll back {sanitize_line(model.name, 40)}"
        how = partial(self.app.client.roll_back, model.name)
        self.app.push_screen(ActQuestion(act, what_a_rollback_does(model), how))


class ModelTable(KeyedTable):
    """Enter goes to the decisions of the model."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Its decisions")]


class DecisionTable(KeyedTable):
    """Enter opens the conversation."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Conversation")]


class ServedConversation(ModalScreen[None]):
    """One conversation of the router: the decision on it, its exchanges, its feedback, its trajectories."""

    DEFAULT_CSS = """
    ServedConversation { align: center middle; }
    ServedConversation > VerticalScroll { width: 110; max-width: 96%; height: auto; max-height: 90%; padding: 0 1; }
    ServedConversation > VerticalScroll { border: round $accent; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close", key_display="Esc"),
        *READING,
    ]

    app: ConnectedApp

    def __init__(self, named: str) -> None:
        super().__init__()
        self._named = named

    def compose(self) -> ComposeResult:
        """A page that scrolls."""
        with VerticalScroll() as frame:
            frame.border_title = Text(f"Conversation {sanitize_line(self._named, 60)}")
            yield Static("Loading…", id="told", markup=False)
        yield Footer(compact=True)

    def on_mount(self) -> None:
        """Ask for it."""
        self.ask()

    @work(exclusive=True)
    async def ask(self) -> None:
        """Ask for it, again where it is shown already."""
        try:
            found = told(await self.app.client.serving.conversation(self._named))
        except ClientError as error:
            found = Text(f"It cannot be shown: {sanitize_line(error.message)}\n{sanitize_line(error.hint)}")
        self.query_one("#told", Static).update(found)


def told(found: ConversationView) -> Text:
    """All of it, in the order of happening."""
    text = Text()
    _decision(text, found.decision)
    _heading(text, f"Exchanges ({len(found.exchanges)})")
    for one in found.exchanges:
        failed = one.status != HTTPStatus.OK
        text.append(f"  {one.at:%m-%d %H:%M:%S}  ")
        text.append(f"{'✗' if failed else '✓'} {one.status}", "bold red" if failed else "green")
        text.append(f"  {one.seconds:6.2f} s  {one.prompt_tokens:>5} + {one.completion_tokens:<5} tokens  ")
        text.append(sanitize_line(one.model, 30)).append("  ◌ in the shadow" if one.shadow_of else "", "cyan")
        text.append(f"\n      {sanitize_line(one.detail, 160)}" if one.detail else "", "yellow").append("\n")
    _heading(text, f"Feedback ({len(found.feedback)})")
    for said in found.feedback:
        score = "" if said.score is None else f"score {said.score:g}  "
        label = f"label {sanitize_line(said.label, 40)}  " if said.label else ""
        text.append(f"  {said.at:%m-%d %H:%M:%S}  {score}{label}{sanitize_line(said.comment, 160)}")
        text.append(
            f"  {sanitize_line(said.who, 40)}"
            + (f", on {sanitize_line(said.response_id, 40)}" if said.response_id else ""),
            "dim",
        )
        text.append("\n")
    if not found.feedback:
        text.append("  none\n", "dim")
    _heading(text, f"Trajectories ({len(found.trajectories)})")
    signs = {"success": ("✓", "green"), "failure": ("✗", "red")}
    for became in found.trajectories:
        sign, style = signs.get(became.outcome, ("·", "dim"))
        text.append(f"  {sign} {became.outcome}", style).append(
            f"  reward {became.reward:g}, {became.messages} messages"
        )
        text.append(f"  {sanitize_line(became.model, 30)}  {sanitize_line(became.id, 60)}\n", "dim")
    if not found.trajectories:
        text.append("  none yet: one is made when it has been silent for serving.silence_s\n", "dim")
    if found.left_out:
        text.append(f"\n{found.left_out:,} older entries are left out\n", "yellow")
    text.rstrip()
    return text


def _decision(text: Text, decision: DecisionView | None) -> None:
    text.append("Decision", "bold")
    if decision is None:
        text.append("\n  none: a model was asked for by name, or no adapter was live\n", "dim")
        return
    text.append(f"\n  {sanitize_line(decision.model, 60)}", "bold green")
    text.append(f"  {decision.at:%Y-%m-%d %H:%M:%S} UTC, in {1000 * decision.seconds:.1f} ms")
    text.append("  ◔ takes part in a trial" if decision.trial is not None else "", "yellow").append("\n")
    if decision.why:
        text.append(f"  ! by default: {sanitize_line(decision.why, 200)}\n", "yellow")
    options = sorted(decision.logprobs.items(), key=lambda one: -likely(one[1]))
    for option, found in options:
        style = "bold" if option == decision.model else "dim"
        text.append(f"  {sanitize_line(option, 30):<24} ", style).append("▕", "dim").append(
            bar(likely(found), 16), "green"
        )
        text.append("▏", "dim").append(f" {100 * likely(found):5.1f} %   {logprob(found):>5} nats\n")


def _heading(text: Text, heading: str) -> None:
    text.append(f"\n{heading}\n", "bold")
