"""The Serving screen: models with their traffic, a canary's progress, the router's decisions and the conversations.

Invariants: decisions are added as they arrive and kept up to ``MAX_DECISIONS``. The next page starts after the last
decision shown, so that none is missing in between. A rollback needs a confirmation, where a reason can be given, and a
read-only connection does not offer it. An open conversation is requested again with each event and keeps its scroll
position; if the request is refused, the page shows the refusal instead. Not covered: the messages of a conversation
(its trajectories have them).
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
    ACTIVE_STATES,
    bar,
    canary_text,
    decision_cells,
    legend,
    letters,
    likely,
    logprob,
    model_cells,
    model_text,
    rollback_effect,
    router_text,
)
from tui.text import sanitize_line
from tui.widgets.dialogs import ActQuestion
from tui.widgets.navigation import READER_BINDINGS
from tui.widgets.tables import KeyedTable, Row

# The list is bounded: a busy router makes thousands of decisions a day.
PAGE, MAX_DECISIONS = 50, 1000
WIDE = [(0, "-narrow"), (160, "-wide")]  # the least columns for each CSS class; wide: parts are side by side


@dataclass(frozen=True)
class ServingData:
    """The daemon's response; ``model_filter`` is the model whose decisions these are, "" for all."""

    models: Models
    router: RouterView
    page: DecisionPage
    model_filter: str


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
        self._router_state: object = None
        self._models: dict[str, ModelView] = {}
        self._partial = False
        self._decisions: dict[str, DecisionView] = {}  # newest first
        self._next: str | None = None
        self._model_filter = ""
        self._open: ServedConversation | None = None

    def contents(self) -> Iterable[Widget]:
        """Yield the router, the models with the details of the selected one, and the decisions."""
        yield Static("", id="router")
        with Container(id="above"):
            columns = ("model", "state", "day %", "hour/day", "p50/p99 s", "failed", "feedback", "success")
            yield ModelTable(*columns, id="models")
            with VerticalScroll(id="chosen"):
                yield Static("", id="told")
        yield Static("Decisions", classes="title", id="decisions-title")
        yield DecisionTable("at", "model", "log-probs", "took", "trial", "conversation", id="decisions")

    async def load(self, client: Client) -> ServingData:
        """Request the models, the router and the newest decisions in parallel."""
        model = self._model_filter
        requests = (
            client.serving.models(),
            client.serving.router(),
            client.serving.decisions(limit=PAGE, model=model),
        )
        models, router, page = await asyncio.gather(*requests)
        return ServingData(models, router, page, model)

    def news(self, events: list[EventView]) -> None:
        """Refresh the open conversation too; of health events only the router's state matters here."""
        super().news(events)
        for event in events:
            if event.kind == HEALTH and event.detail.get("router") != self._router_state:
                self._router_state = event.detail.get("router")
                self.changed()
        if self._open is not None and self._open.is_current:
            self._open.ask()

    def show(self, data: ServingData) -> None:
        """Show the router, the models and the newest decisions."""
        self._models = {model.name: model for model in data.models.models}
        self.query_one("#router", Static).update(router_text(data.router, data.models.by_default))
        self._partial = data.models.partial
        self.query_one("#models", ModelTable).put([Row(model.name, model_cells(model)) for model in data.models.models])
        self._show_selected()
        if data.model_filter == self._model_filter:
            self._add_newest(data.page)
            self._show_decisions()

    def _add_newest(self, page: DecisionPage) -> None:
        decisions = {decision.id: decision for decision in page.decisions}
        if self._decisions.keys() & decisions.keys():
            self._decisions = decisions | {
                key: decision for key, decision in self._decisions.items() if key not in decisions
            }
        else:
            # These are the first decisions, or more than a page has arrived: keeping older ones would leave a gap.
            self._decisions, self._next = decisions, page.next
        if len(self._decisions) > MAX_DECISIONS:
            self._decisions = dict(list(self._decisions.items())[:MAX_DECISIONS])
        if len(self._decisions) >= MAX_DECISIONS:
            self._next = None

    def _show_decisions(self) -> None:
        decisions = list(self._decisions.values())
        option_letters = letters(decisions)
        newest_at = max((decision.at for decision in decisions), default=None)
        rows = (
            [Row(decision.id, decision_cells(decision, option_letters, newest_at)) for decision in decisions]
            if newest_at
            else []
        )
        self.query_one("#decisions", DecisionTable).put(rows)
        title = Text("Decisions", no_wrap=True, overflow="ellipsis")
        if self._model_filter:
            title.append(f" of {sanitize_line(self._model_filter, 40)} only", "yellow")
        if not decisions:
            title.append(": none yet; requests for the model auto are routed", "dim")
        else:
            title.append(f" {len(decisions):,}{' and older' if self._next else ''} ", "dim")
        title.append_text(legend(option_letters))
        self.query_one("#decisions-title", Static).update(title)

    def _show_selected(self) -> None:
        model = self._selected_model()
        text = Text()
        if model is not None:
            bases = {other.base_model for other in self._models.values() if other.base_model}
            text.append_text(model_text(model, self._partial, several_bases=len(bases) > 1))
            if model.canary is not None:
                text.append("\n").append_text(canary_text(model.canary))
        text.rstrip()
        self.query_one("#told", Static).update(text)
        self.refresh_bindings()

    def _selected_model(self) -> ModelView | None:
        return self._models.get(self.query_one("#models", ModelTable).selected or "")

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Show the model under the cursor; load older decisions when the cursor is on the last one."""
        if event.data_table.id == "models":
            self._show_selected()
        elif event.data_table.has_focus and event.cursor_row == event.data_table.row_count - 1:
            self._load_older()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open the conversation of a decision, or show the decisions of a model."""
        if event.data_table.id == "models":
            self._show_only(event.row_key.value or "")
            self.query_one("#decisions").focus()
        elif event.row_key.value is not None:
            self._open = ServedConversation(event.row_key.value)
            self.app.push_screen(self._open, self._left)

    def _left(self, _: None) -> None:
        self._open = None

    def action_only(self) -> None:
        """Show only the decisions of the model under the cursor, or those of all models again."""
        model = self._selected_model()
        self._show_only("" if self._model_filter or model is None else model.name)

    def _show_only(self, name: str) -> None:
        if name != self._model_filter:
            self._model_filter, self._decisions, self._next = name, {}, None
            self.changed()

    @work(exclusive=True, group="older")
    async def _load_older(self) -> None:
        cursor, model = self._next, self._model_filter
        if cursor is None:
            return
        try:
            page = await self.app.client.serving.decisions(limit=PAGE, before=cursor, model=model)
        except ClientError:
            # The link reports the failure, and the next key requests the page again.
            return
        if (cursor, model) == (self._next, self._model_filter):
            self._decisions |= {
                decision.id: decision for decision in page.decisions if decision.id not in self._decisions
            }
            self._next = page.next if len(self._decisions) < MAX_DECISIONS else None
            self._show_decisions()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer a rollback of active adapters only, and not on a read-only connection."""
        if action == "roll_back":
            model = self._selected_model() if self.is_loaded else None
            return model is not None and model.state in ACTIVE_STATES and not self.app.read_only
        return super().check_action(action, parameters)

    def action_roll_back(self) -> None:
        """Roll back the selected model after a confirmation, where a reason can be given."""
        model = self._selected_model()
        if model is None:
            return
        title = f"Roll back {sanitize_line(model.name, 40)}"
        send = partial(self.app.client.roll_back, model.name)
        self.app.push_screen(ActQuestion(title, rollback_effect(model), send))


class ModelTable(KeyedTable):
    """The table of models; Enter goes to the decisions of one."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Its decisions")]


class DecisionTable(KeyedTable):
    """The table of decisions; Enter opens the conversation of one."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Conversation")]


class ServedConversation(ModalScreen[None]):
    """A page on one conversation of the router: the decision on it, its exchanges, its feedback, its trajectories."""

    DEFAULT_CSS = """
    ServedConversation { align: center middle; }
    ServedConversation > VerticalScroll { width: 110; max-width: 96%; height: auto; max-height: 90%; padding: 0 1; }
    ServedConversation > VerticalScroll { border: round $accent; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close", key_display="Esc"),
        *READER_BINDINGS,
    ]

    app: ConnectedApp

    def __init__(self, conversation_id: str) -> None:
        super().__init__()
        self._conversation_id = conversation_id

    def compose(self) -> ComposeResult:
        """Yield a scrolling page."""
        with VerticalScroll() as frame:
            frame.border_title = Text(f"Conversation {sanitize_line(self._conversation_id, 60)}")
            yield Static("Loading…", id="told", markup=False)
        yield Footer(compact=True)

    def on_mount(self) -> None:
        """Request the conversation."""
        self.ask()

    @work(exclusive=True)
    async def ask(self) -> None:
        """Request the conversation and show it."""
        try:
            text = conversation_text(await self.app.client.serving.conversation(self._conversation_id))
        except ClientError as error:
            text = Text(
                f"The conversation cannot be loaded: {sanitize_line(error.message)}\n{sanitize_line(error.hint)}"
            )
        self.query_one("#told", Static).update(text)


def conversation_text(conversation: ConversationView) -> Text:
    """Return a text on a conversation's decision, exchanges, feedback and trajectories."""
    text = Text()
    _decision(text, conversation.decision)
    _heading(text, f"Exchanges ({len(conversation.exchanges)})")
    for exchange in conversation.exchanges:
        failed = exchange.status != HTTPStatus.OK
        text.append(f"  {exchange.at:%m-%d %H:%M:%S}  ")
        text.append(f"{'✗' if failed else '✓'} {exchange.status}", "bold red" if failed else "green")
        text.append(
            f"  {exchange.seconds:6.2f} s  {exchange.prompt_tokens:>5} + {exchange.completion_tokens:<5} tokens  "
        )
        text.append(sanitize_line(exchange.model, 30)).append("  ◌ shadow" if exchange.shadow_of else "", "cyan")
        text.append(f"\n      {sanitize_line(exchange.detail, 160)}" if exchange.detail else "", "yellow").append("\n")
    _heading(text, f"Feedback ({len(conversation.feedback)})")
    for feedback in conversation.feedback:
        score = "" if feedback.score is None else f"score {feedback.score:g}  "
        label = f"label {sanitize_line(feedback.label, 40)}  " if feedback.label else ""
        text.append(f"  {feedback.at:%m-%d %H:%M:%S}  {score}{label}{sanitize_line(feedback.comment, 160)}")
        text.append(
            f"  {sanitize_line(feedback.who, 40)}"
            + (f", on {sanitize_line(feedback.response_id, 40)}" if feedback.response_id else ""),
            "dim",
        )
        text.append("\n")
    if not conversation.feedback:
        text.append("  none\n", "dim")
    _heading(text, f"Trajectories ({len(conversation.trajectories)})")
    signs = {"success": ("✓", "green"), "failure": ("✗", "red")}
    for trajectory in conversation.trajectories:
        sign, style = signs.get(trajectory.outcome, ("·", "dim"))
        text.append(f"  {sign} {trajectory.outcome}", style).append(
            f"  reward {trajectory.reward:g}, {trajectory.messages} messages"
        )
        text.append(f"  {sanitize_line(trajectory.model, 30)}  {sanitize_line(trajectory.id, 60)}\n", "dim")
    if not conversation.trajectories:
        text.append("  none yet: it is created serving.silence_s seconds after the last request\n", "dim")
    if conversation.left_out:
        text.append(f"\n{conversation.left_out:,} older entries are not shown\n", "yellow")
    text.rstrip()
    return text


def _decision(text: Text, decision: DecisionView | None) -> None:
    text.append("Decision", "bold")
    if decision is None:
        text.append("\n  none: the client named a model, or no adapter was live\n", "dim")
        return
    text.append(f"\n  {sanitize_line(decision.model, 60)}", "bold green")
    text.append(f"  {decision.at:%Y-%m-%d %H:%M:%S} UTC, in {1000 * decision.seconds:.1f} ms")
    text.append("  ◔ part of a trial" if decision.trial is not None else "", "yellow").append("\n")
    if decision.why:
        text.append(f"  ! by default: {sanitize_line(decision.why, 200)}\n", "yellow")
    options = sorted(decision.logprobs.items(), key=lambda item: -likely(item[1]))
    for option, value in options:
        style = "bold" if option == decision.model else "dim"
        text.append(f"  {sanitize_line(option, 30):<24} ", style).append("▕", "dim").append(
            bar(likely(value), 16), "green"
        )
        text.append("▏", "dim").append(f" {100 * likely(value):5.1f} %   {logprob(value):>5} nats\n")


def _heading(text: Text, heading: str) -> None:
    text.append(f"\n{heading}\n", "bold")
