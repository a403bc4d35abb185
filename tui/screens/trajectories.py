"""Trajectories: a filtered list, loaded page by page, to open, choose and export.

Invariants: further pages are requested as the cursor nears an end of the window (``tui.widgets.tables.Window``), which
is bounded. Where the daemon stopped searching before a page was full, only a person continues the search. Chosen
trajectories stay chosen under any filter. Not covered: the total number of trajectories.
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

NEAR = 25  # rows from an end at which the next page is asked for
FURTHER = 10  # requests of a search that a person has asked to go on
SHORT = {"infrastructure": "infra"}  # names that the table has no room for
COLUMNS = (" ", "outcome", "id", "the user asked", "reward", "msgs", "model", "task", "trial", "source")
ASKED = (22, 110)  # columns of the screen for the user's words
IDS, IDS_WIDE = 20, 36  # columns of the screen for ids, and on wide screens
FIRST, MODEL, REST = 35, 24, 40  # for the other columns in view: always, on wide screens, on wider ones


@dataclass
class Found:
    """What the daemon said to a filter."""

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
        Binding("space", "choose", "Choose", tooltip="Choose the one under the cursor, or not"),
        Binding("a", "choose_all", "All", tooltip="Choose all that are loaded, or none"),
        Binding("e,x", "export", "Export", tooltip="Write the chosen ones to a file, or the one under the cursor"),
        Binding("slash", "search", "Search", key_display="/"),
        Binding("f", "filter", "Filter", tooltip="Go to the filters: Enter opens one, Tab goes on"),
        Binding("r", "reset", "Reset", tooltip="Filter nothing"),
        Binding("m", "further", "Further", tooltip="Look further for what fits"),
        Binding("escape", "back", "Back to the table", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._window = Window()
        self._filter = EVERYTHING
        self._choices: TrajectoryChoices | None = None
        self._chosen: dict[str, None] = {}
        self._loading = False

    def contents(self) -> ComposeResult:
        """The filters, the table, what it holds."""
        yield Input(
            placeholder="/ Search what was said, and ids, tasks, models", id="text", compact=True, max_length=500
        )
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
        """Of the router's traffic only what became of conversations, and what was said of them, concerns this."""
        if any(map(tells_of_conversations, events)):
            self.changed()
        super().news(events)

    async def load(self, client: Client) -> Found:
        """What there is to filter by, and the pages that are held, anew."""
        wanted = self._filter
        known = self._window if wanted == self._shown_filter else Window()
        window = Window(known.starts[: known.first + 1], [], known.first)
        for _ in range(max(len(known.pages), 1)):
            window.put_below(await client.trajectories.page(wanted, after=window.starts[-1]))
            if window.below is None:
                break
        return Found(wanted, window, await client.trajectories.choices())

    _shown_filter: TrajectoryQuery | None = None

    def show(self, found: Found) -> None:
        """Unless something else was asked for meanwhile."""
        self._offer(found.choices)
        if found.filter == self._filter:
            fresh = self._shown_filter != found.filter
            self._window, self._shown_filter = found.window, found.filter
            self._put(top=fresh)

    def on_mount(self) -> None:
        """Scrolling asks for further pages as the cursor does."""
        self.watch(self._table, "scroll_y", self._near_an_end, init=False)

    def on_resize(self, event: Resize) -> None:
        """The user's words take what room there is."""
        if self.known:
            self._put()

    def on_data_table_row_highlighted(self) -> None:
        """Have what comes next."""
        self._near_an_end()

    def on_data_table_row_selected(self, message: DataTable.RowSelected) -> None:
        """Read the one under the cursor."""
        key = self._table.selected
        if key in self._rows():
            self.app.push_screen(Conversation(str(key), capability=self._filter.capability or None))

    def on_input_changed(self, message: Input.Changed) -> None:
        """Ask for what fits now."""
        self._ask_for(self._filter.model_copy(update={"text": message.value.strip()}))

    def on_input_submitted(self) -> None:
        """Back to the table."""
        self._table.focus()

    def on_select_changed(self, message: Select.Changed) -> None:
        """Ask for what fits now."""
        name = str(message.select.id)
        value = getattr(EVERYTHING, name) if message.value is Select.NULL else message.value
        if name == "cycle" and self._choices is not None:
            self._offer_capabilities(self._choices)
        self._ask_for(self._filter.model_copy(update={name: value}))

    def action_back(self) -> None:
        """To the table."""
        self._table.focus()

    def action_search(self) -> None:
        """Type a text."""
        self.query_one("#text").focus()

    def action_filter(self) -> None:
        """Choose what to see."""
        self.query_one("#outcome").focus()

    def action_reset(self) -> None:
        """Show everything."""
        self.query_one("#text", Input).value = ""
        for select in self.query(Select):
            select.clear()

    def action_choose(self) -> None:
        """Choose the one under the cursor, or not; and the next one is under it."""
        key = self._table.selected
        if key is None or key not in self._rows():
            return
        if key in self._chosen:
            del self._chosen[key]
        else:
            self._chosen[key] = None
        self._put()
        self._table.move_cursor(row=self._table.cursor_row + 1, animate=False)

    def action_choose_all(self) -> None:
        """All that are loaded; none where all of them are chosen already."""
        loaded = self._rows()
        if all(key in self._chosen for key in loaded):
            self._chosen = {}
        else:
            self._chosen |= dict.fromkeys(loaded)
        self._put()

    def action_export(self) -> None:
        """Write what is chosen, or the one under the cursor."""
        key = self._table.selected
        ids = list(self._chosen) or ([key] if key in self._rows() and key else [])
        if ids:
            export(self.app, ids)

    def action_further(self) -> None:
        """Look on where the daemon gave up."""
        if self._window.below is not None:
            self._more(FURTHER)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys are offered where they do something."""
        if action == "further":
            return self._window.gave_up
        if action in ("choose", "choose_all", "export") and not self._window.rows and not self._chosen:
            return False
        return not self.app.is_web if action == "export" else True

    @property
    def _table(self) -> KeyedTable:
        return self.query_one("#trajectories", KeyedTable)

    def _rows(self) -> dict[str, TrajectorySummary]:
        return {row.id: row for row in self._window.rows}

    def _ask_for(self, wanted: TrajectoryQuery) -> None:
        if wanted != self._filter:
            self._filter = wanted
            self.changed()

    def _near_an_end(self, *_: Any) -> None:
        if self._loading or self._shown_filter != self._filter:
            return
        table, window = self._table, self._window
        seen = (table.cursor_row, round(table.scroll_y))
        at_end = max(seen[0], seen[1] + table.size.height) >= table.row_count - NEAR
        if at_end and window.below is not None and not window.gave_up:
            self._more(1)
        elif min(seen) < NEAR and window.first > 0:
            self._before()

    @work(group="further")
    async def _more(self, requests: int) -> None:
        """The next page; of several requests the last is the one that finds something."""
        if self._loading:
            return
        self._loading = True
        try:
            for _ in range(requests):
                wanted, window = self._filter, self._window
                page = await self.app.client.trajectories.page(wanted, after=window.below)
                if wanted != self._filter or window is not self._window:
                    break
                window.put_below(page)
                self._put()
                if page.rows or page.next is None:
                    break
        except ClientError as error:
            self.note(sanitize_line(error.message))  # the next move of the cursor asks again
        else:
            self.call_after_refresh(self._near_an_end)  # somebody may have gone on meanwhile
        finally:
            self._loading = False

    @work(group="further")
    async def _before(self) -> None:
        if self._loading:
            return
        self._loading = True
        try:
            wanted, window = self._filter, self._window
            page = await self.app.client.trajectories.page(wanted, after=window.starts[window.first - 1])
            if wanted == self._filter and window is self._window:
                window.put_above(page)
                self._put()
        except ClientError as error:
            self.note(sanitize_line(error.message))  # the next move of the cursor asks again
        else:
            self.call_after_refresh(self._near_an_end)  # somebody may have gone on meanwhile
        finally:
            self._loading = False

    def _put(self, *, top: bool = False) -> None:
        """Show what is held; the row under the cursor stays where it is on the screen."""
        table, rows = self._table, self._window.rows
        before, offset = table.cursor_row, table.scroll_offset.y
        ids = min(max((len(one.id) for one in rows), default=0), IDS_WIDE if self.size.width >= 150 else IDS)
        room = _Room(ids, _for_words(self.size.width, ids))
        table.put([_row(one, one.id in self._chosen, room) for one in rows])
        if top:
            table.move_cursor(row=0, animate=False)
            table.scroll_to(y=0, animate=False)
        elif table.cursor_row != before and offset:  # at the top, what comes above is to be seen
            table.scroll_to(y=max(offset + table.cursor_row - before, 0), animate=False)
        self._tell()
        self.refresh_bindings()

    def _tell(self) -> None:
        window, rows = self._window, self._window.rows
        filtered = self._filter != EVERYTHING
        self.note("" if rows or window.below else _nothing(filtered=filtered))
        told = Text(f"{len(rows):,} loaded", no_wrap=True, overflow="ellipsis")
        if window.first:
            told.append(", more above")
        if window.below:
            told.append(", more below" if not window.gave_up else "")
        if window.gave_up:
            told.append(f" · looked through {window.looked_at:,} without filling the page: m looks further", "yellow")
        if window.pages and window.pages[-1].cycle_id:
            told.append(f" · labelled by {sanitize_line(window.pages[-1].cycle_id, 40)}")
        if self._chosen:
            told.append(f" · ● {len(self._chosen):,} chosen", "bold")
        self.query_one("#found", Static).update(told)

    def _offer(self, choices: TrajectoryChoices) -> None:
        if choices == self._choices:
            return
        self._choices = choices
        _set(self.query_one("#source", Select), choices.sources)
        _set(self.query_one("#cycle", Select), [one.cycle_id for one in choices.cycles])
        self._offer_capabilities(choices)

    def _offer_capabilities(self, choices: TrajectoryChoices) -> None:
        cycle = self.query_one("#cycle", Select).value
        of = [one for one in choices.cycles if one.cycle_id == cycle] or choices.cycles[:1]
        _set(self.query_one("#capability", Select), of[0].capabilities if of else [])


class Listing(KeyedTable):
    """The table; Enter is its own key."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "Open", tooltip="Read the conversation under the cursor")
    ]


def _select(name: str, options: list[tuple[str, str]]) -> Select[str]:
    shown = [(Text(text), value) for text, value in options]
    return Select(shown, prompt=name, id=name, compact=True)


def _set(select: Select[str], names: list[str]) -> None:
    """Offer these; what is chosen stays, offered or not any more."""
    chosen = select.value
    kept = [*names, chosen] if isinstance(chosen, str) and chosen not in names else names
    with select.prevent(Select.Changed):
        select.set_options([(cell(name, limit=60), name) for name in kept])
        if isinstance(chosen, str):
            select.value = chosen


def _nothing(*, filtered: bool) -> str:
    if filtered:
        return "Nothing fits: r shows everything again."
    return (
        "No trajectories are stored yet: a cycle records some, traced import takes in files, the router keeps its own."
    )


@dataclass(frozen=True)
class _Room:
    """Columns of the screen for what is cut to fit."""

    id: int
    asked: int


def _for_words(width: int, id_width: int) -> int:
    """For the user's words, beside what a screen of this width has in view without being moved sideways."""
    others = FIRST + id_width + (MODEL if width >= 110 else 0) + (REST if width >= 150 else 0)
    return min(max(width - others, ASKED[0]), ASKED[1])


def _row(one: TrajectorySummary, chosen: bool, room: _Room) -> Row:
    mark, colour = OUTCOMES.get(one.outcome, ("·", ""))
    outcome = cell(f"{mark} {SHORT.get(one.outcome, sanitize_line(one.outcome, 20))}", colour)
    said = ", ".join(f"{name} {one.verdicts[name]}" for name in VERDICTS if one.verdicts.get(name))
    cells = [
        cell("●" if chosen else " ", "bold"),
        outcome.append(f" · {said}", "default") if said else outcome,
        cell(_within(one.id, room.id)),
        cell(_cut(one.asked, room.asked)),
        Text(f"{one.reward:6.2f}"),
        Text(f"{one.messages:>4}"),
        cell(_within(one.model, 28)),
        cell(_within(one.task_id, 16)),
        Text(f"{one.trial:>5}"),
        cell(f"{one.source}/{one.split}" if one.split else one.source, limit=40),
    ]
    return Row(one.id, cells)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _within(name: str, width: int) -> str:
    """A name's beginning and end: names that begin alike differ at their ends."""
    return name if len(name) <= width else f"{name[: width // 2]}…{name[len(name) - width + width // 2 + 1 :]}"
