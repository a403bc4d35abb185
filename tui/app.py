"""The application that `traced tui` runs: one screen per mode, the keys, and the navigation between screens.

Invariant: no request is in flight when a screen is removed or the app ends. Not covered: the connection to the daemon
(``tui.connection.ConnectedApp``) and the contents of the screens (``tui.screens``).
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from textual import work
from textual.app import SystemCommand
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.screen import Screen

from tui.connection import ConnectedApp, Linked, News
from tui.screens.approvals import Approvals
from tui.screens.capabilities import Capabilities
from tui.screens.environments import Environment, Environments
from tui.screens.live_screen import Live
from tui.screens.log import Log
from tui.screens.overview import Overview
from tui.screens.serving import Serving
from tui.screens.training import Training
from tui.screens.trajectories import Trajectories
from tui.widgets.dialogs import Question
from tui.widgets.navigation import Help, Jump, TopLine

SCREENS: dict[str, type[Live]] = {
    "overview": Overview,
    "capabilities": Capabilities,
    "trajectories": Trajectories,
    "environments": Environments,
    "training": Training,
    "approvals": Approvals,
    "serving": Serving,
    "log": Log,
}
LIGHT, DARK = "textual-light", "textual-dark"


class TracedApp(ConnectedApp):
    """The application with its eight screens."""

    TITLE = "traced"
    CSS_PATH = "traced.tcss"
    ENABLE_COMMAND_PALETTE = True
    DEFAULT_MODE = "overview"
    MODES: ClassVar[dict[str, str | Callable[[], Screen[Any]]]] = dict(SCREENS)
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"show('{name}')", kind.TITLE_TEXT, show=False)
            for number, (name, kind) in enumerate(SCREENS.items(), 1)
        ),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("ctrl+o", "jump", "Jump", show=False),
        Binding("t", "light_or_dark", "Theme", show=False),
        Binding("q", "quit", "Quit"),
    ]

    @property
    def titles(self) -> list[str]:
        """The screens' names, in the order of their keys."""
        return [kind.TITLE_TEXT for kind in SCREENS.values()]

    # Textual calls the handlers of ``ConnectedApp`` after these two.

    def on_linked(self, _: Linked) -> None:
        """Refresh all screens after a reconnection."""
        for screen in self.opened_screens():
            screen.changed()

    def on_news(self, message: News) -> None:
        """Pass the events to the screens."""
        for screen in self.opened_screens():
            screen.news(message.events)

    def status_changed(self) -> None:
        """Update the line at the top."""
        for top in self.screen.query(TopLine):
            top.tell()

    def read_only_changed(self) -> None:
        """Update the keys that the screens offer."""
        for screen in self.opened_screens():
            screen.refresh_bindings()

    def pop_screen(self) -> AwaitComplete:
        """Remove the top screen and cancel its requests: a response must not reach a half-removed screen."""
        self.workers.cancel_node(self.screen)
        return super().pop_screen()

    async def _shutdown(self) -> None:
        """Cancel all workers, as Textual's ``App.run`` does and ``App.run_test`` does not."""
        self.workers.cancel_all()
        await super()._shutdown()

    def opened_screens(self) -> list[Live]:
        """Return all mounted screens; a screen that is being mounted requests its data by itself."""
        screens = (screen for stack in self._screen_stacks.values() for screen in stack)
        return [screen for screen in screens if isinstance(screen, Live) and screen.is_mounted]

    async def action_quit(self) -> None:
        """Quit; while an episode is being played, only after a confirmation."""
        screens = (screen for stack in self._screen_stacks.values() for screen in stack)
        if not any(isinstance(screen, Environment) and screen.is_busy for screen in screens):
            self.exit()
            return
        detail = "The service removes its container after ten minutes without a message."
        dialog = Question("Quit although an episode is running?", detail)
        await self.push_screen(dialog, lambda yes: self.exit() if yes else None)

    def action_show(self, mode: str) -> None:
        """Bring a screen to the front."""
        self.switch_mode(mode)

    def has(self, mode: str) -> bool:
        """Return whether a screen of this name exists."""
        return mode in SCREENS

    def go(self, mode: str, key: str) -> bool:
        """Switch to the screen ``mode`` and select the item with this key; return False if there is no such screen."""
        if not self.has(mode):
            return False
        self._go(mode, key)
        return True

    @work(exclusive=True, group="go")
    async def _go(self, mode: str, key: str) -> None:
        await self.switch_mode(mode)
        if any(isinstance(candidate, Environment) and candidate.is_busy for candidate in self._screen_stacks[mode]):
            self.notify("An episode is running on this screen: end it first.", severity="warning", timeout=5)
            return
        # A page that was pushed over the screen shows another subject.
        while len(self._screen_stacks[mode]) > 1:
            await self.pop_screen()
        for screen in self._screen_stacks[mode]:
            if isinstance(screen, Live):
                screen.point_at(key)

    def action_help(self) -> None:
        """Show the keys that work on this screen."""
        self.push_screen(Help(self.screen))

    def action_jump(self) -> None:
        """Show a label on every widget that can be focused."""
        self.push_screen(Jump(self.screen))

    def action_light_or_dark(self) -> None:
        """Switch between the light and the dark theme."""
        self.theme = DARK if self.theme == LIGHT else LIGHT

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Yield Textual's own commands, and one command per screen that goes there."""
        yield from super().get_system_commands(screen)
        for name, kind in SCREENS.items():
            yield SystemCommand(kind.TITLE_TEXT, f"Go to {kind.TITLE_TEXT}", lambda name=name: self.action_show(name))
