"""The Trajectories screen: a filtered list, loaded page by page, to open, select and export trajectories.

Invariants: further pages are requested as the cursor nears an end of the window (``tui.widgets.tables.Window``), which
is bounded. If the daemon stopped searching before a page was full, the search continues only when the user requests
it. Selected trajectories stay selected under any filter. Not covered: the total number of trajectories.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.events import Resize
from textual.widgets import DataTable, Input, Select, Static

from traced.client import Client, ClientError
from traced.client.models import EventView
from traced.client.trajectories import EVERYTHING, TrajectoryChoices, TrajectoryQuery, TrajectorySummary
from tui.connection import tells_of_conversations
from tui.screens.conversation import Conversation
from tui.screens.live_screen import Live
from tui.text import OUTCOMES, VERDICTS, cell, sanitize_line
from tui.widgets.dialogs import export
from tui.widgets.tables import KeyedTable, Row, Window

NEAR = 25  # rows from an end at which the next page is requested
# The daemon bounds the search of one request, so a continued search sends up to this many requests.
FURTHER = 10
# Short forms of names that are too long for the table.
ABBREVIATIONS = {"infrastructure": "infra"}
COLUMNS = (" ", "outcome", "id", "the user asked", "reward", "msgs", "model", "task", "trial", "source")
PROMPT_WIDTHS = (22, 110)  # minimum and maximum columns for the prompt
IDS, IDS_WIDE = 20, 36  # maximum columns for ids, on narrow and on wide screens
FIRST, MODEL, REST = 35, 24, 40  # of the other columns: always, from 110 columns on, from 150 on


@dataclass
class TrajectoriesData:
    """The daemon's response: the trajectories that match a filter, and the choices of the filters."""

    filter: TrajectoryQuery
    window: Window
    choices: TrajectoryChoices


class Trajectories(Live):
    """The screen of stored trajectories, with its filters."""

    TITLE_TEXT = "Trajectories"
    CONCERNS = ("stage finished", "cycle", "import", "outcomes")
    DEFAULT_CSS = """
    Trajectories #filters { height: 1; padding: 0 1; }
    Trajectories #filters Select { width: 1fr; margin-right: 1; }
    Trajectories #filters SelectCurrent { padding: 0 1; background: $surface; }
    Trajectories #filters Select:focus SelectCurrent { background: $primary; }
    Trajectories #filters SelectOverlay { width: auto; min-width: 100%; max-width: 60; }
    Trajectories #text { padding: 0 1; }
    Trajectories #found { height: 1; padding: 0 1; color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "choose", "Choose", tooltip="Select or deselect the trajectory under the cursor"),
        Binding("a", "choose_all", "All", tooltip="Select all loaded trajectories, or none"),
        Binding(
            "e,x", "export", "Export", tooltip="Write the selected trajectories to a file, or the one under the cursor"
        ),
        Binding("slash", "search", "Search", key_display="/"),
        Binding("f", "filter", "Filter", tooltip="Go to the filters; Enter opens a filter, Tab moves to the next"),
        Binding("r", "reset", "Reset", tooltip="Remove all filters"),
        Binding("m", "further", "Further", tooltip="Continue the search for matches"),
        Binding("escape", "back", "Back to the table", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._window = Window()
        self._filter = EVERYTHING
        self._choices: TrajectoryChoices | None = None
        self._selected_ids: dict[str, None] = {}
        self._loading = False

    def contents(self) -> ComposeResult:
        """Yield the filters, the table, and a line on what is loaded."""
        yield Input(placeholder="/ Search in messages, ids, tasks, models", id="text", compact=True, max_length=500)
        with Horizontal(id="filters"):
            outcomes = [(f"{mark} {name}", name) for name, (mark, _) in OUTCOMES.items()]
            verdicts = [(f"{mark} {name}", name) for name, (mark, _) in VERDICTS.items()]
            yield _select("outcome", outcomes)
            yield _select("source", [])
            yield _select("cycle", [])
            yield _select("capability", [])
            yield _select("label", verdicts)
        yield Listing(*COLUMNS, id="trajectories")
        yield Static("", id="found", markup=False)

    def news(self, events: list[EventView]) -> None:
        """Refresh after settled conversations and feedback too, but not after other traffic of the router."""
        if any(map(tells_of_conversations, events)):
            self.changed()
        super().news(events)

    async def load(self, client: Client) -> TrajectoriesData:
        """Request the filter choices, and the loaded pages again."""
        query = self._filter
        previous = self._window if query == self._shown_filter else Window()
        window = Window(previous.starts[: previous.first + 1], [], previous.first)
        for _ in range(max(len(previous.pages), 1)):
            window.put_below(await client.trajectories.page(query, after=window.starts[-1]))
            if window.below is None:
                break
        return TrajectoriesData(query, window, await client.trajectories.choices())

    _shown_filter: TrajectoryQuery | None = None

    def show(self, data: TrajectoriesData) -> None:
        """Show the pages, unless the filter changed during the request."""
        self._offer(data.choices)
        if data.filter == self._filter:
            fresh = self._shown_filter != data.filter
            self._window, self._shown_filter = data.window, data.filter
            self._put(top=fresh)

    def on_mount(self) -> None:
        """Watch the scroll position: scrolling requests further pages as the cursor does."""
        self.watch(self._table, "scroll_y", self._near_an_end, init=False)

    def on_resize(self, event: Resize) -> None:
        """Fit the prompts to the new width."""
        if self.is_loaded:
            self._put()

    def on_data_table_row_highlighted(self) -> None:
        """Request the next page when the cursor nears an end."""
        self._near_an_end()

    def on_data_table_row_selected(self, message: DataTable.RowSelected) -> None:
        """Open the trajectory under the cursor."""
        key = self._table.selected
        if key in self._rows():
            self.app.push_screen(Conversation(str(key), capability=self._filter.capability or None))

    def on_input_changed(self, message: Input.Changed) -> None:
        """Request the trajectories that match the changed filter."""
        self._ask_for(self._filter.model_copy(update={"text": message.value.strip()}))

    def on_input_submitted(self) -> None:
        """Focus the table."""
        self._table.focus()

    def on_select_changed(self, message: Select.Changed) -> None:
        """Request the trajectories that match the changed filter."""
        name = str(message.select.id)
        value = getattr(EVERYTHING, name) if message.value is Select.NULL else message.value
        if name == "cycle" and self._choices is not None:
            self._offer_capabilities(self._choices)
        self._ask_for(self._filter.model_copy(update={name: value}))

    def action_back(self) -> None:
        """Focus the table."""
        self._table.focus()

    def action_search(self) -> None:
        """Focus the search field."""
        self.query_one("#text").focus()

    def action_filter(self) -> None:
        """Focus the first filter."""
        self.query_one("#outcome").focus()

    def action_reset(self) -> None:
        """Clear all filters."""
        self.query_one("#text", Input).value = ""
        for select in self.query(Select):
            select.clear()

    def action_choose(self) -> None:
        """Select or deselect the trajectory under the cursor, and move the cursor to the next one."""
        key = self._table.selected
        if key is None or key not in self._rows():
            return
        if key in self._selected_ids:
            del self._selected_ids[key]
        else:
            self._selected_ids[key] = None
        self._put()
        self._table.move_cursor(row=self._table.cursor_row + 1, animate=False)

    def action_choose_all(self) -> None:
        """Select all loaded trajectories; if all of them are selected already, clear the selection."""
        loaded = self._rows()
        if all(key in self._selected_ids for key in loaded):
            self._selected_ids = {}
        else:
            self._selected_ids |= dict.fromkeys(loaded)
        self._put()

    def action_export(self) -> None:
        """Export the selected trajectories, or the one under the cursor."""
        key = self._table.selected
        ids = list(self._selected_ids) or ([key] if key in self._rows() and key else [])
        if ids:
            export(self.app, ids)

    def action_further(self) -> None:
        """Continue the search where the daemon stopped."""
        if self._window.below is not None:
            self._load_below(FURTHER)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Enable only the keys that have an effect now."""
        if action == "further":
            return self._window.gave_up
        if action in ("choose", "choose_all", "export") and not self._window.rows and not self._selected_ids:
            return False
        return not self.app.is_web if action == "export" else True

    @property
    def _table(self) -> KeyedTable:
        return self.query_one("#trajectories", KeyedTable)

    def _rows(self) -> dict[str, TrajectorySummary]:
        return {row.id: row for row in self._window.rows}

    def _ask_for(self, query: TrajectoryQuery) -> None:
        if query != self._filter:
            self._filter = query
            self.changed()

    def _near_an_end(self, *_: Any) -> None:
        if self._loading or self._shown_filter != self._filter:
            return
        table, window = self._table, self._window
        positions = (table.cursor_row, round(table.scroll_y))
        at_end = max(positions[0], positions[1] + table.size.height) >= table.row_count - NEAR
        if at_end and window.below is not None and not window.gave_up:
            self._load_below(1)
        elif min(positions) < NEAR and window.first > 0:
            self._load_above()

    @work(group="further")
    async def _load_below(self, requests: int) -> None:
        """Load the next page; a continued search stops at the first page with rows."""
        if self._loading:
            return
        self._loading = True
        try:
            for _ in range(requests):
                query, window = self._filter, self._window
                page = await self.app.client.trajectories.page(query, after=window.below)
                if query != self._filter or window is not self._window:
                    break
                window.put_below(page)
                self._put()
                if page.rows or page.next is None:
                    break
        except ClientError as error:
            # The next cursor movement requests the page again.
            self.note(sanitize_line(error.message))
        else:
            # The cursor may have reached the next end meanwhile.
            self.call_after_refresh(self._near_an_end)
        finally:
            self._loading = False

    @work(group="further")
    async def _load_above(self) -> None:
        if self._loading:
            return
        self._loading = True
        try:
            query, window = self._filter, self._window
            page = await self.app.client.trajectories.page(query, after=window.starts[window.first - 1])
            if query == self._filter and window is self._window:
                window.put_above(page)
                self._put()
        except ClientError as error:
            # The next cursor movement requests the page again.
            self.note(sanitize_line(error.message))
        else:
            # The cursor may have reached the next end meanwhile.
            self.call_after_refresh(self._near_an_end)
        finally:
            self._loading = False

    def _put(self, *, top: bool = False) -> None:
        """Show the loaded rows; the row under the cursor keeps its place on the screen."""
        table, rows = self._table, self._window.rows
        previous_row, offset = table.cursor_row, table.scroll_offset.y
        ids = min(max((len(row.id) for row in rows), default=0), IDS_WIDE if self.size.width >= 150 else IDS)
        widths = _ColumnWidths(ids, _prompt_width(self.size.width, ids))
        table.put([_row(row, row.id in self._selected_ids, widths) for row in rows])
        if top:
            table.move_cursor(row=0, animate=False)
            table.scroll_to(y=0, animate=False)
        # At the very top, new rows above should come into view instead.
        elif table.cursor_row != previous_row and offset:
            table.scroll_to(y=max(offset + table.cursor_row - previous_row, 0), animate=False)
        self._show_state()
        self.refresh_bindings()

    def _show_state(self) -> None:
        window, rows = self._window, self._window.rows
        filtered = self._filter != EVERYTHING
        self.note("" if rows or window.below else _nothing(filtered=filtered))
        text = Text(f"{len(rows):,} loaded", no_wrap=True, overflow="ellipsis")
        if window.first:
            text.append(", more above")
        if window.below:
            text.append(", more below" if not window.gave_up else "")
        if window.gave_up:
            text.append(f" · {window.looked_at:,} searched, page not full; m: search on", "yellow")
        if window.pages and window.pages[-1].cycle_id:
            text.append(f" · labelled by {sanitize_line(window.pages[-1].cycle_id, 40)}")
        if self._selected_ids:
            text.append(f" · ● {len(self._selected_ids):,} selected", "bold")
        self.query_one("#found", Static).update(text)

    def _offer(self, choices: TrajectoryChoices) -> None:
        if choices == self._choices:
            return
        self._choices = choices
        _set(self.query_one("#source", Select), choices.sources)
        _set(self.query_one("#cycle", Select), [cycle.cycle_id for cycle in choices.cycles])
        self._offer_capabilities(choices)

    def _offer_capabilities(self, choices: TrajectoryChoices) -> None:
        cycle = self.query_one("#cycle", Select).value
        cycles = [choice for choice in choices.cycles if choice.cycle_id == cycle] or choices.cycles[:1]
        _set(self.query_one("#capability", Select), cycles[0].capabilities if cycles else [])


class Listing(KeyedTable):
    """The table of trajectories; Enter opens one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "Open", tooltip="Read the conversation under the cursor")
    ]


def _select(name: str, options: list[tuple[str, str]]) -> Select[str]:
    entries = [(Text(text), value) for text, value in options]
    return Select(entries, prompt=name, id=name, compact=True)


def _set(select: Select[str], names: list[str]) -> None:
    """Replace the options; the selected value stays, even if it is no longer offered."""
    selected = select.value
    options = [*names, selected] if isinstance(selected, str) and selected not in names else names
    with select.prevent(Select.Changed):
        select.set_options([(cell(name, limit=60), name) for name in options])
        if isinstance(selected, str):
            select.value = selected


def _nothing(*, filtered: bool) -> str:
    if filtered:
        return "No trajectory matches the filters; r removes them."
    return "No trajectories yet. They come from cycles, from traced import and from the router."


@dataclass(frozen=True)
class _ColumnWidths:
    """Column widths of the texts that are cut to fit."""

    id: int
    prompt: int


def _prompt_width(width: int, id_width: int) -> int:
    """Return the prompt's width: what the other columns leave of a screen that does not scroll sideways."""
    other_columns = FIRST + id_width + (MODEL if width >= 110 else 0) + (REST if width >= 150 else 0)
    return min(max(width - other_columns, PROMPT_WIDTHS[0]), PROMPT_WIDTHS[1])


def _row(trajectory: TrajectorySummary, is_chosen: bool, widths: _ColumnWidths) -> Row:
    mark, colour = OUTCOMES.get(trajectory.outcome, ("·", ""))
    outcome = cell(f"{mark} {ABBREVIATIONS.get(trajectory.outcome, sanitize_line(trajectory.outcome, 20))}", colour)
    labels = ", ".join(f"{name} {trajectory.verdicts[name]}" for name in VERDICTS if trajectory.verdicts.get(name))
    cells = [
        cell("●" if is_chosen else " ", "bold"),
        outcome.append(f" · {labels}", "default") if labels else outcome,
        cell(_shortened(trajectory.id, widths.id)),
        cell(_cut(trajectory.asked, widths.prompt)),
        Text(f"{trajectory.reward:6.2f}"),
        Text(f"{trajectory.messages:>4}"),
        cell(_shortened(trajectory.model, 28)),
        cell(_shortened(trajectory.task_id, 16)),
        Text(f"{trajectory.trial:>5}"),
        cell(f"{trajectory.source}/{trajectory.split}" if trajectory.split else trajectory.source, limit=40),
    ]
    return Row(trajectory.id, cells)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _shortened(name: str, width: int) -> str:
    """Return a name's beginning and end, because names that begin alike differ at their ends."""
    return name if len(name) <= width else f"{name[: width // 2]}…{name[len(name) - width + width // 2 + 1 :]}"
