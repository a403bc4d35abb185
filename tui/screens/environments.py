"""The Environments screen: a list, newest first, and for each one its admissions, its source and an episode to play.

Invariants: a person enters the seed of an episode, and confirms its end before leaving. A source is shown as safe text,
coloured by a lexer that executes nothing. Only its visible lines are rendered, so that a long source scrolls as fast as
a short one. Not covered: source in other languages than Python.
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
from traced.client.environments import AdmissionStatus, EnvironmentCase, EnvironmentView
from tui.screens.environment_dialogs import AskSeed
from tui.screens.environment_play import Play
from tui.screens.environment_report import Report
from tui.screens.live_screen import Live
from tui.text import cell, sanitize_block, sanitize_line
from tui.widgets.dialogs import Question
from tui.widgets.tables import KeyedTable, OpenableTable, Row

PAGE = 200  # environments of one request
# Characters of a source that are shown. Admission accepts 256 KiB, so this cuts nothing that was admitted.
SOURCE_LIMIT = 400_000
FOCUS = {"report-tab": "#report", "source-tab": "#source", "play-tab": "#talk"}  # the widget to focus in each tab
UNCHECKED = "No admission has checked it yet."
STYLES: dict[AdmissionStatus, str] = {"admitted": "green", "refused": "bold red", "unchecked": "dim"}
MARKS: dict[AdmissionStatus, str] = {"admitted": "✓", "refused": "✗", "unchecked": "·"}
NONE_YET = "No environments yet: the stage “synthesize” of a cycle writes them."


class Environments(Live):
    """The screen of all environments: a table, and a summary of the environment under the cursor."""

    TITLE_TEXT = "Environments"
    CONCERNS = ("stage", "cycle", "upkeep", "missed")
    BINDINGS: ClassVar[list[BindingType]] = [Binding("m", "more", "More")]
    DEFAULT_CSS = "Environments #environment { height: 5; }"

    def __init__(self) -> None:
        super().__init__()
        self._environments: dict[str, EnvironmentView] = {}
        self._limit = PAGE
        self._has_more = False

    def contents(self) -> ComposeResult:
        """Yield the table, and the summary of the environment under the cursor."""
        yield OpenableTable(
            "status", "capability", "environment", "failed", "adapters", "cycle", "created", "by", id="environments"
        )
        yield Static("", id="environment", classes="panel")

    async def load(self, client: Client) -> list[EnvironmentView]:
        """Request environments page by page, up to the limit."""
        environments: list[EnvironmentView] = []
        self._has_more = True
        while self._has_more and len(environments) < self._limit:
            page = await client.environments.page(PAGE, after=environments[-1].hash if environments else None)
            environments += page
            self._has_more = len(page) == PAGE
        return environments

    def show(self, data: list[EnvironmentView]) -> None:
        """Show the environments in the table."""
        self._environments = {environment.hash: environment for environment in data}
        self.query_one("#environments", KeyedTable).put([_row(environment) for environment in data])
        self.note("" if data else NONE_YET)
        self.refresh_bindings()
        self.on_data_table_row_highlighted()

    def on_data_table_row_highlighted(self) -> None:
        """Summarise the selected environment."""
        environment = self._environments.get(self.query_one("#environments", KeyedTable).selected or "")
        panel = self.query_one("#environment", Static)
        panel.display = environment is not None
        if environment is not None:
            panel.update(_summary(environment))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Enable only the keys that work now."""
        return self._has_more if action == "more" else True

    def on_data_table_row_selected(self) -> None:
        """Open the selected environment."""
        selected = self.query_one("#environments", KeyedTable).selected
        if selected in self._environments:
            self.app.push_screen(Environment(selected))

    def action_more(self) -> None:
        """Load one page more."""
        self._limit += PAGE
        self.changed()


class Environment(Live):
    """The screen of one environment, with a tab each for the report, the source and play."""

    AUTO_FOCUS = "#report"
    TITLE_TEXT = "Environment"
    CONCERNS = ("stage", "missed")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "tab('report-tab')", "Report"),
        Binding("s", "tab('source-tab')", "Source"),
        Binding("p", "play", "Play"),
        Binding("ctrl+t,f2", "call", "Call a tool", key_display="^t", tooltip="F2 does the same: browsers reserve ^t"),
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
        self._admission = 0  # index of the shown admission; 0 is the newest

    def contents(self) -> ComposeResult:
        """Yield the environment's facts, and the tabs."""
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
        """Request the environment with its admissions and its source."""
        return await client.environments.case(self._environment)

    def show(self, data: EnvironmentCase) -> None:
        """Show the environment; its source never changes, so it is drawn once."""
        if self._case is None:
            self.query_one(Source).put(data.source_code)
        self._case = data
        self.query_one("#case", Static).update(_title(data))
        self._show_admission()
        self.refresh_bindings()

    def _show_admission(self) -> None:
        assert self._case is not None
        label, admissions = self.query_one("#admission", Static), self._case.admissions
        if not admissions:
            label.update(UNCHECKED)
            return
        self._admission = min(self._admission, len(admissions) - 1)
        admission = admissions[self._admission]
        position = "" if len(admissions) == 1 else f" ({self._admission + 1} of {len(admissions)}, newest first)"
        passed = sum(check.passed for check in admission.checks)
        seconds = sum(check.seconds for check in admission.checks)
        label.update(
            f"Admission in {sanitize_line(admission.cycle_id, 40)}, {admission.at:%Y-%m-%d %H:%M}{position}: "
            f"{passed} of {len(admission.checks)} checks passed in {seconds:.0f} s"
        )
        self.query_one(Report).put(admission)

    @property
    def is_busy(self) -> bool:
        """Whether an episode is being played on this screen."""
        return any(play.running for play in self.query(Play))

    @property
    def _play(self) -> Play:
        return self.query_one(Play)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Enable only the keys that work now."""
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
        """Update the keys, and focus the input of a running episode when the play tab is shown."""
        self.refresh_bindings()
        if event.pane.id == "play-tab" and self._play.running:
            self._play.take_focus()

    def action_tab(self, tab: str) -> None:
        """Bring a tab to the front."""
        self.query_one(TabbedContent).active = tab
        self.query_one(FOCUS[tab]).focus()

    def action_older(self) -> None:
        """Show the next older admission, or after the oldest one the newest."""
        assert self._case is not None
        self._admission = (self._admission + 1) % len(self._case.admissions)
        self._show_admission()

    @work(group="asked")
    async def action_play(self) -> None:
        """Open the play tab, and begin an episode if none is running."""
        self.action_tab("play-tab")
        if self._play.running:
            self._play.take_focus()
            return
        seed = await self.app.push_screen_wait(AskSeed(self._play.seed))
        if seed is not None:
            await self._play.begin(seed)

    @work(group="asked")
    async def action_call(self) -> None:
        """Compose a tool call as the agent."""
        await self._play.call()

    @work(group="asked")
    async def action_end(self) -> None:
        """End the episode after a confirmation."""
        if await self.app.push_screen_wait(
            Question("End the episode?", "The container is removed. The score is that of the present state.")
        ):
            await self._play.end()

    def action_back(self) -> None:
        """Return to the table of environments."""
        self.app.pop_screen()


class Source(ScrollView, can_focus=True):
    """A view of source code of any length, with line numbers and the theme's colours; ``put`` sets the source."""

    DEFAULT_CSS = "Source { height: 1fr; text-wrap: nowrap; }"

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines: list[Content] = []

    @work(thread=True, exclusive=True)
    def put(self, source: str) -> None:
        """Show the source; a thread does it, because highlighting a long source takes half a second."""
        text = sanitize_block(source, SOURCE_LIMIT).removesuffix("\n")
        coloured = highlight(text, language="python", tab_size=4).split("\n", allow_blank=True)
        digits = len(str(len(coloured)))
        lines = [
            Content.assemble((f" {number:>{digits}}  ", "$text-muted"), line) for number, line in enumerate(coloured, 1)
        ]
        self.app.call_from_thread(self._show, lines)

    def _show(self, lines: list[Content]) -> None:
        self._lines = lines
        self.virtual_size = Size(max((line.cell_length for line in lines), default=0), len(lines))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return line ``y`` of the visible part."""
        across, down = self.scroll_offset
        width = self.scrollable_content_region.width
        if y + down >= len(self._lines):
            return Strip.blank(width, self.rich_style)
        line_width = max(self.virtual_size.width, width)
        [strip] = Visual.to_strips(self, self._lines[y + down], line_width, 1, self.visual_style, pad=True)
        return strip.crop(across, across + width)


def _row(environment: EnvironmentView) -> Row:
    style = STYLES[environment.standing]
    cells = [
        cell(f"{MARKS[environment.standing]} {environment.standing}", style),
        cell(environment.capability, limit=24),
        cell(environment.hash[:12]),
        cell(", ".join(environment.failed) or "–", "red" if environment.failed else "dim", limit=40),
        cell(_versions(environment) or "–", "" if environment.adapters else "dim", limit=40),
        cell(environment.cycle_id, limit=24),
        cell(f"{environment.at:%Y-%m-%d %H:%M}"),
        cell(environment.synthesizer, limit=24),
    ]
    return Row(environment.hash, cells)


def _versions(environment: EnvironmentView) -> str:
    return ", ".join(name.removeprefix(environment.capability) for name in environment.adapters)


def _summary(environment: EnvironmentView) -> Text:
    text = Text()
    text.append(f"{MARKS[environment.standing]} {environment.standing}", STYLES[environment.standing])
    text.append(
        f"  {sanitize_line(environment.capability, 80)}, written by {sanitize_line(environment.synthesizer, 40)}"
        f" in {sanitize_line(environment.cycle_id, 40)}\n"
    )
    text.append(f"{sanitize_line(environment.hash)}\n", "dim")
    failed = f"failed: {sanitize_line(', '.join(environment.failed), 160)}" if environment.failed else "no check failed"
    verdict = failed if environment.standing != "unchecked" else "no admission has checked it yet"
    training = (
        f"trained on it: {sanitize_line(', '.join(environment.adapters), 160)}"
        if environment.adapters
        else "no adapter was trained on it"
    )
    text.append(f"{verdict}; {training}")
    return text


def _title(case: EnvironmentCase) -> Text:
    first, *other_origins = case.origins
    text = Text(no_wrap=True, overflow="ellipsis")
    state: AdmissionStatus = (
        "unchecked" if not case.admissions else "admitted" if case.admissions[0].admitted else "refused"
    )
    text.append(f"{MARKS[state]} {state}", STYLES[state])
    text.append(f"  {sanitize_line(first.capability, 60)}", "bold")
    text.append(f"  {sanitize_line(case.hash)[:12]}", "dim")
    text.append(f"  trained on it: {sanitize_line(', '.join(case.adapters), 120) or 'no adapter'}\n")
    suffix = (
        f", again in {sanitize_line(', '.join(origin.cycle_id for origin in other_origins), 60)}"
        if other_origins
        else ""
    )
    text.append(
        f"Written by {sanitize_line(first.synthesizer, 30)} in {sanitize_line(first.cycle_id, 30)} (seed {first.seed}) "
    )
    text.append(f"{first.at:%Y-%m-%d %H:%M}{suffix}")
    return text
