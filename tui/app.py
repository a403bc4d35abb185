"""The application: one screen per mode, one connection, and what all screens know.

Invariants: the daemon is asked through one client; acts go through ``act``, which tells how they went and never raises.
Nothing is asked of the daemon when the app ends. Not covered: which contents a screen has (``tui.screens``).
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ClassVar

from textual import work
from textual.app import App, SystemCommand
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.screen import Screen

from traced.client import ClientError, Refused
from traced.client.models import DOING, PRESENT, Done, Status
from tui.connection import Ended, Link, Linked, Lost, News, Where
from tui.screens.approvals import Approvals
from tui.screens.capabilities import Capabilities
from tui.screens.environments import Environment, Environments
from tui.screens.live_screen import Live
from tui.screens.log import Log
from tui.screens.overview import Overview
from tui.screens.serving import Serving
from tui.screens.training import Training
from tui.screens.trajectories import Trajectories
from tui.text import line
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


class TracedApp(App[None]):
    """What `traced tui` runs."""

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

    def __init__(self, where: Where) -> None:
        super().__init__()
        self.where = where
        self.client = where.client()
        self.link = Link(self.client, self.post_message)
        self.linked: bool | None = None  # None until the first answer
        self.trouble = ""
        self.status: Status | None = None
        self._status_stale = self._status_asked = False

    @property
    def read_only(self) -> bool:
        """Whether no act is offered: so asked for at the start, or all that the daemon lets this caller do."""
        return self.where.read_only or (self.status is not None and self.status.role == "read-only")

    @property
    def titles(self) -> list[str]:
        """The screens' names, in the order of their keys."""
        return [kind.TITLE_TEXT for kind in SCREENS.values()]

    def on_mount(self) -> None:
        """Begin to listen."""
        self.run_worker(self.link.follow(), name="link")

    async def on_unmount(self) -> None:
        """Let go of the connection."""
        await self.client.__aexit__()

    def on_linked(self, message: Linked) -> None:
        """It answers: whatever is shown may be out of date."""
        self.linked, self.trouble = True, ""
        self._know()
        for screen in self.shown():
            screen.changed()
        if message.again:
            self.notify("The daemon answers again.", timeout=4)

    def on_ended(self, _: Ended) -> None:
        """It may be about to stop."""
        self._know()

    def on_lost(self, message: Lost) -> None:
        """It does not."""
        self.linked = False
        doing = "refused" if isinstance(message.error, Refused) else "no answer"
        why, hint = self.where.refusal(message.error)
        self.trouble = f"{doing}, asked again in {message.pause_s:g} s: {line(why)}" + (
            f"; {line(hint)}" if hint else ""
        )
        self._tell()

    def on_news(self, message: News) -> None:
        """Tell the screens."""
        if any(event.kind not in PRESENT or event.kind == DOING for event in message.events):
            self._know()
        for screen in self.shown():
            screen.news(message.events)

    def pop_screen(self) -> AwaitComplete:
        """A screen that goes asks no more: its answer would find it half gone."""
        self.workers.cancel_node(self.screen)
        return super().pop_screen()

    async def _shutdown(self) -> None:
        """The same for all of them; Textual's ``run`` does so, its ``run_test`` does not."""
        self.workers.cancel_all()
        await super()._shutdown()

    def shown(self) -> list[Live]:
        """All screens that have been opened, the one in front among them; one that is being made asks by itself."""
        every = (one for stack in self._screen_stacks.values() for one in stack)
        return [one for one in every if isinstance(one, Live) and one.is_mounted]

    def _know(self) -> None:
        """Ask for the status: one request is on its way at a time, and what happens meanwhile leads to one more."""
        self._status_stale = True
        if not self._status_asked:
            self._ask_status()

    @work(group="status")
    async def _ask_status(self) -> None:
        if self._status_asked:
            return
        self._status_asked = True
        try:
            while self._status_stale:
                self._status_stale = False
                before = self.read_only
                self.status = await self.client.status()
                self._tell()
                if self.read_only != before:
                    for screen in self.shown():
                        screen.refresh_bindings()
        except ClientError:
            return  # the link tells of it
        finally:
            self._status_asked = False

    def _tell(self) -> None:
        for top in self.screen.query(TopLine):
            top.tell()

    async def act(self, asked: Awaitable[Done], refused: Callable[[str], bool]) -> Done | None:
        """Do what a person has confirmed; says how it went, None where it was refused.

        ``refused`` is told why, and says whether it shows that to the person.
        """
        try:
            done = await asked
        except ClientError as error:
            why, hint = self.where.refusal(error)
            told = line(why, 400) + (f"\n{line(hint)}" if hint else "")
            if not refused(told):
                self.notify(told, severity="error", timeout=12, markup=False)
            return None
        self.notify(line(done.said, 400), markup=False)
        self._know()
        return done

    async def action_quit(self) -> None:
        """Leave; an episode that is played is asked about first."""
        every = (one for stack in self._screen_stacks.values() for one in stack)
        if not any(isinstance(one, Environment) and one.is_busy for one in every):
            self.exit()
            return
        told = "Its container goes by itself once it was idle for ten minutes."
        asked = Question("Leave while an episode is played?", told)
        await self.push_screen(asked, lambda yes: self.exit() if yes else None)

    def action_show(self, mode: str) -> None:
        """Bring a screen to the front."""
        self.switch_mode(mode)

    def has(self, mode: str) -> bool:
        """Whether there is a screen of this name."""
        return mode in SCREENS

    def go(self, mode: str, key: str) -> bool:
        """Bring the thing of this key to the front, on the screen that shows such things; False without that screen."""
        if not self.has(mode):
            return False
        self._go(mode, key)
        return True

    @work(exclusive=True, group="go")
    async def _go(self, mode: str, key: str) -> None:
        await self.switch_mode(mode)
        if any(isinstance(one, Environment) and one.is_busy for one in self._screen_stacks[mode]):
            self.notify("An episode is played there: end it first.", severity="warning", timeout=5)
            return
        while len(self._screen_stacks[mode]) > 1:  # a page that is open over the screen is of something else
            await self.pop_screen()
        for screen in self._screen_stacks[mode]:
            if isinstance(screen, Live):
                screen.point_at(key)

    def action_help(self) -> None:
        """The keys that work here."""
        self.push_screen(Help(self.screen))

    def action_jump(self) -> None:
        """Labels on everything that can be focused."""
        self.push_screen(Jump(self.screen))

    def action_light_or_dark(self) -> None:
        """The other one."""
        self.theme = DARK if self.theme == LIGHT else LIGHT

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Every screen by its name, beside Textual's own."""
        yield from super().get_system_commands(screen)
        for name, kind in SCREENS.items():
            yield SystemCommand(kind.TITLE_TEXT, f"Go to {kind.TITLE_TEXT}", lambda name=name: self.action_show(name))
