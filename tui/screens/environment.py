"""One synthetic environment: its admission, its source, and an episode played by hand.

Invariants: nothing is played without a seed that a person gave; leaving while an episode runs asks first; the source is
shown as harmless text, coloured by a lexer that runs nothing.
"""

from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static, TabbedContent, TabPane

from traced.client import Client
from traced.client.environments import EnvironmentCase
from tui.plain import line
from tui.screens.environment_asks import AskSeed
from tui.screens.environment_play import Play
from tui.screens.environment_report import Report
from tui.screens.live import Live
from tui.widgets.question import Question
from tui.widgets.source import Source

UNCHECKED = "No admission has judged it yet."
FOCUS = {"report-tab": "#report", "source-tab": "#source", "play-tab": "#talk"}


class Environment(Live):
    """Report, source and play, a tab each."""

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
        self.query_one("#case", Static).update(_told(found))
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
            f"Admission in {line(one.cycle_id, 40)}, {one.at:%Y-%m-%d %H:%M}{which}: "
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


def _told(case: EnvironmentCase) -> Text:
    first, *others = case.origins
    told = Text(no_wrap=True, overflow="ellipsis")
    standing = "unchecked" if not case.admissions else "admitted" if case.admissions[0].admitted else "refused"
    mark, style = {"admitted": ("✓", "green"), "refused": ("✗", "bold red"), "unchecked": ("·", "dim")}[standing]
    told.append(f"{mark} {standing}", style)
    told.append(f"  {line(first.capability, 60)}", "bold")
    told.append(f"  {line(case.hash)[:12]}", "dim")
    told.append(f"  trained on it: {line(', '.join(case.adapters), 120) or 'nothing'}\n")
    also = f", again in {line(', '.join(one.cycle_id for one in others), 60)}" if others else ""
    told.append(f"Made by {line(first.synthesizer, 30)} in {line(first.cycle_id, 30)} (seed {first.seed}) ")
    told.append(f"{first.at:%Y-%m-%d %H:%M}{also}")
    return told
