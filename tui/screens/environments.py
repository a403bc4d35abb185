"""The synthetic environments: what became of each, newest first; Enter opens one."""

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from traced.client import Client
from traced.client.environments import EnvironmentView, Standing
from tui.plain import cell, line
from tui.screens.environment import Environment
from tui.screens.live import Live
from tui.widgets.keyed_table import KeyedTable, Opening, Row

PAGE = 200
STYLES: dict[Standing, str] = {"admitted": "green", "refused": "bold red", "unchecked": "dim"}
MARKS: dict[Standing, str] = {"admitted": "✓", "refused": "✗", "unchecked": "·"}
NONE_YET = "No environment has been made yet: a cycle's stage “synthesize” makes them."


class Environments(Live):
    """A table, and the one under the cursor in a few lines."""

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
            there.update(_told(one))

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


def _told(one: EnvironmentView) -> Text:
    told = Text()
    told.append(f"{MARKS[one.standing]} {one.standing}", STYLES[one.standing])
    told.append(f"  {line(one.capability, 80)}, made by {line(one.synthesizer, 40)} in {line(one.cycle_id, 40)}\n")
    told.append(f"{line(one.hash)}\n", "dim")
    failed = f"failed: {line(', '.join(one.failed), 160)}" if one.failed else "no check failed"
    judged = failed if one.standing != "unchecked" else "no admission has judged it yet"
    trained = f"trained on it: {line(', '.join(one.adapters), 160)}" if one.adapters else "nothing was trained on it"
    told.append(f"{judged}; {trained}")
    return told
