"""Environments: the list, newest first, and for each one its admission report, its source and an episode to play.

Invariants: an episode needs a seed from a person, and leaving while one runs needs a confirmation. A source is shown as
safe text, coloured by a lexer that runs nothing. Only its lines in sight are rendered, so that a long one scrolls as
fast as a short one. Not covered: source in other languages than Python.
"""

from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Size
from textual.highlight import highlight
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.visual import Visual
from textual.widgets import Static, TabbedContent, TabPane

from traced.client import Client
from traced.client.environments import EnvironmentCase, EnvironmentView, Standing
from tui.screens.environment_dialogs import AskSeed
from tui.screens.environment_play import Play
from tui.screens.environment_report import Report
from tui.screens.live_screen import Live
from tui.text import cell, sanitize_block, sanitize_line
from tui.widgets.dialogs import Question
from tui.widgets.tables import KeyedTable, Opening, Row

PAGE = 200  # environments of one request
LONGEST = 400_000  # characters of a source that are shown; admission takes 256 KiB
FOCUS = {"report-tab": "#report", "source-tab": "#source", "play-tab": "#talk"}  # what has the focus in each tab
UNCHECKED = "No admission has judged it yet."
STYLES: dict[Standing, str] = {"admitted": "green", "refused": "bold red", "unchecked": "dim"}
MARKS: dict[Standing, str] = {"admitted": "✓", "refused": "✗", "unchecked": "·"}
NONE_YET = "No environment has been made yet: a cycle's stage “synthesize” makes them."


class Environments(Live):
    """The screen of all environments: a table, and the one under the cursor in a few lines."""

    TITLE_TEXT = "Environments"
    CONCERNS = ("stage", "cycle", "upkeep", "missed")
    BINDINGS: ClassVar[list[BindingType]] = [Binding("m", "more", "More")]
    DEFAULT_CSS = "Environments #environment { height: 5; }"

    def __init__(self) -> None:
        super().__init__()
        self._known_ones: dict[str, EnvironmentView] = {}
        self._wanted = PAGE
        self._more = False

    def contents(self) -> ComposeResult:
        """The table above, the one under the cursor below."""
        yield Opening(
            "standing", "capability", "environment", "failed", "adapters", "cycle", "made", "by", id="environments"
        )
        yield Static("", id="environment", classes="panel")

    async def load(self, client: Client) -> list[EnvironmentView]:
        """As many as are wanted, page by page."""
        found: list[EnvironmentView] = []
        self._more = True
        while self._more and len(found) < self._wanted:
            page = await client.environments.page(PAGE, after=found[-1].hash if found else None)
            found += page
            self._more = len(page) == PAGE
        return found

    def show(self, found: list[EnvironmentView]) -> None:
        """All of them."""
        self._known_ones = {one.hash: one for one in found}
        self.query_one("#environments", KeyedTable).put([_row(one) for one in found])
        self.note("" if found else NONE_YET)
        self.refresh_bindings()
        self.on_data_table_row_highlighted()

    def on_data_table_row_highlighted(self) -> None:
        """Say more of the one under the cursor."""
        one = self._known_ones.get(self.query_one("#environments", KeyedTable).selected or "")
        there = self.query_one("#environment", Static)
        there.display = one is not None
        if one is not None:
            there.update(_summary(one))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What works now."""
        return self._more if action == "more" else True

    def on_data_table_row_selected(self) -> None:
        """The one under the cursor in full."""
        chosen = self.query_one("#environments", KeyedTable).selected
        if chosen in self._known_ones:
            self.app.push_screen(Environment(chosen))

    def action_more(self) -> None:
        """Older ones too."""
        self._wanted += PAGE
        self.changed()


class Environment(Live):
    """One environment on a screen of its own: report, source and play, a tab each."""

    AUTO_FOCUS = "#report"
    TITLE_TEXT = "Environment"
    CONCERNS = ("stage", "missed")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "tab('report-tab')", "Report"),
        Binding("s", "tab('source-tab')", "Source"),
        Binding("p", "play", "Play"),
        Binding(
            "ctrl+t,f2", "call", "Call a tool", key_display="^t", tooltip="F2 too: browsers keep ^t for themselves"
        ),
        Binding("a", "older", "Other admission"),
        Binding("escape", "end", "End the episode"),
        Binding("escape", "back", "Back"),
    ]
    DEFAULT_CSS = """
    Environment #case { height: auto; padding: 0 1; }
    Environment TabbedContent { height: 1fr; }
    Environment TabPane { padding: 0; }
    Environment #admission { height: 1; padding: 0 1; color: $text-muted; }
    """

    def __init__(self, environment: str) -> None:
        super().__init__()
        self._environment = environment
        self._case: EnvironmentCase | None = None
        self._admission = 0  # which of them, from the newest

    def contents(self) -> ComposeResult:
        """What it is above, the tabs below."""
        yield Static("", id="case")
        with TabbedContent(id="tabs"):
            with TabPane("Report", id="report-tab"):
                yield Static("", id="admission", markup=False)
                yield Report()
            with TabPane("Source", id="source-tab"):
                yield Source(id="source")
            with TabPane("Play", id="play-tab"):
                yield Play(self._environment)

    async def load(self, client: Client) -> EnvironmentCase:
        """All of it."""
        return await client.environments.case(self._environment)

    def show(self, found: EnvironmentCase) -> None:
        """All of it; the source never changes."""
        if self._case is None:
            self.query_one(Source).put(found.source_code)
        self._case = found
        self.query_one("#case", Static).update(_title(found))
        self._show_admission()
        self.refresh_bindings()

    def _show_admission(self) -> None:
        assert self._case is not None
        there, admissions = self.query_one("#admission", Static), self._case.admissions
        if not admissions:
            there.update(UNCHECKED)
            return
        self._admission = min(self._admission, len(admissions) - 1)
        one = admissions[self._admission]
        which = "" if len(admissions) == 1 else f" ({self._admission + 1} of {len(admissions)}, newest first)"
        passed = sum(check.passed for check in one.checks)
        spent = sum(check.seconds for check in one.checks)
        there.update(
            f"Admission in {sanitize_line(one.cycle_id, 40)}, {one.at:%Y-%m-%d %H:%M}{which}: "
            f"{passed} of {len(one.checks)} checks passed in {spent:.0f} s"
        )
        self.query_one(Report).put(one)

    @property
    def is_busy(self) -> bool:
        """Whether an episode is played here."""
        return any(play.running for play in self.query(Play))

    @property
    def _play(self) -> Play:
        return self.query_one(Play)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What works now."""
        if not self.query(Play):
            return True
        if action == "play":
            return not self.app.read_only
        if action in ("call", "end"):
            return self._play.running and (action == "end" or self.query_one(TabbedContent).active == "play-tab")
        if action == "older":
            return self._case is not None and len(self._case.admissions) > 1
        return not self._play.running if action == "back" else True

    def on_tabbed_content_tab_activated(self, event: TabbedContent.TabActivated) -> None:
        """Keys go to what is shown."""
        self.refresh_bindings()
        if event.pane.id == "play-tab" and self._play.running:
            self._play.take_focus()

    def action_tab(self, tab: str) -> None:
        """Bring a tab to the front."""
        self.query_one(TabbedContent).active = tab
        self.query_one(FOCUS[tab]).focus()

    def action_older(self) -> None:
        """The admission before this one, and the newest after the oldest."""
        assert self._case is not None
        self._admission = (self._admission + 1) % len(self._case.admissions)
        self._show_admission()

    @work(group="asked")
    async def action_play(self) -> None:
        """To the episode; begin one where none runs."""
        self.action_tab("play-tab")
        if self._play.running:
            self._play.take_focus()
            return
        seed = await self.app.push_screen_wait(AskSeed(self._play.seed))
        if seed is not None:
            await self._play.begin(seed)

    @work(group="asked")
    async def action_call(self) -> None:
        """Say a tool call."""
        await self._play.call()

    @work(group="asked")
    async def action_end(self) -> None:
        """End the episode, once a person has said so."""
        if await self.app.push_screen_wait(
            Question("End the episode?", "Its container is removed. The score is as it stands now.")
        ):
            await self._play.end()

    def action_back(self) -> None:
        """To the table."""
        self.app.pop_screen()


class Source(ScrollView, can_focus=True):
    """Source code with line numbers and the theme's colours, of any length; ``put`` shows one."""

    DEFAULT_CSS = "Source { height: 1fr; text-wrap: nowrap; }"

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines: list[Content] = []

    @work(thread=True, exclusive=True)
    def put(self, source: str) -> None:
        """Show it; colouring a long one takes half a second, beside the loop."""
        text = sanitize_block(source, LONGEST).removesuffix("\n")
        coloured = highlight(text, language="python", tab_size=4).split("\n", allow_blank=True)
        digits = len(str(len(coloured)))
        lines = [
            Content.assemble((f" {number:>{digits}}  ", "$text-muted"), one) for number, one in enumerate(coloured, 1)
        ]
        self.app.call_from_thread(self._show, lines)

    def _show(self, lines: list[Content]) -> None:
        self._lines = lines
        self.virtual_size = Size(max((line.cell_length for line in lines), default=0), len(lines))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """One of the lines in sight."""
        across, down = self.scroll_offset
        width = self.scrollable_content_region.width
        if y + down >= len(self._lines):
            return Strip.blank(width, self.rich_style)
        whole = max(self.virtual_size.width, width)
        [strip] = Visual.to_strips(self, self._lines[y + down], whole, 1, self.visual_style, pad=True)
        return strip.crop(across, across + width)


def _row(one: EnvironmentView) -> Row:
    style = STYLES[one.standing]
    cells = [
        cell(f"{MARKS[one.standing]} {one.standing}", style),
        cell(one.capability, limit=24),
        cell(one.hash[:12]),
        cell(", ".join(one.failed) or "–", "red" if one.failed else "dim", limit=40),
        cell(_versions(one) or "–", "" if one.adapters else "dim", limit=40),
        cell(one.cycle_id, limit=24),
        cell(f"{one.at:%Y-%m-%d %H:%M}"),
        cell(one.synthesizer, limit=24),
    ]
    return Row(one.hash, cells)


def _versions(one: EnvironmentView) -> str:
    return ", ".join(name.removeprefix(one.capability) for name in one.adapters)


def _summary(one: EnvironmentView) -> Text:
    told = Text()
    told.append(f"{MARKS[one.standing]} {one.standing}", STYLES[one.standing])
    told.append(
        f"  {sanitize_line(one.capability, 80)}, made by {sanitize_line(one.synthesizer, 40)}"
        f" in {sanitize_line(one.cycle_id, 40)}\n"
    )
    told.append(f"{sanitize_line(one.hash)}\n", "dim")
    failed = f"failed: {sanitize_line(', '.join(one.failed), 160)}" if one.failed else "no check failed"
    judged = failed if one.standing != "unchecked" else "no admission has judged it yet"
    trained = (
        f"trained on it: {sanitize_line(', '.join(one.adapters), 160)}" if one.adapters else "nothing was trained on it"
    )
    told.append(f"{judged}; {trained}")
    return told


def _title(case: EnvironmentCase) -> Text:
    first, *others = case.origins
    told = Text(no_wrap=True, overflow="ellipsis")
    standing: Standing = (
        "unchecked" if not case.admissions else "admitted" if case.admissions[0].admitted else "refused"
    )
    told.append(f"{MARKS[standing]} {standing}", STYLES[standing])
    told.append(f"  {sanitize_line(first.capability, 60)}", "bold")
    told.append(f"  {sanitize_line(case.hash)[:12]}", "dim")
    told.append(f"  trained on it: {sanitize_line(', '.join(case.adapters), 120) or 'nothing'}\n")
    also = f", again in {sanitize_line(', '.join(one.cycle_id for one in others), 60)}" if others else ""
    told.append(
        f"Made by {sanitize_line(first.synthesizer, 30)} in {sanitize_line(first.cycle_id, 30)} (seed {first.seed}) "
    )
    told.append(f"{first.at:%Y-%m-%d %H:%M}{also}")
    return told
