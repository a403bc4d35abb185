"""The parts that all screens share: the state line, the list of screens, the help and the jump labels."""

from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Key
from textual.geometry import Offset
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import Static

from tui.connection import ConnectedApp
from tui.text import sanitize_line

MIN_LETTERS = 3  # least number of letters of a name that is cut
# Modal screens do not inherit the app's keys.
READER_BINDINGS: list[BindingType] = [
    Binding("question_mark", "app.help", "Help", key_display="?"),
    Binding("ctrl+o", "app.jump", "Jump", show=False),
]


class TopLine(Static):
    """A line with the connection, the service's state and the number of pending decisions; ``tell`` updates it."""

    DEFAULT_CSS = "TopLine { height: 1; padding: 0 1; background: $panel; }"
    app: ConnectedApp

    def on_mount(self) -> None:
        """Write the line for the first time."""
        self.tell()

    def tell(self) -> None:
        """Update the line from the app's connection and status."""
        app, text = self.app, Text(no_wrap=True, overflow="ellipsis")
        text.append("traced ", "bold")
        if app.linked is None:
            text.append(f"… connecting to {sanitize_line(app.address.name, 60)}")
        elif not app.linked:
            text.append(f"✗ {app.trouble}", "bold red")
        else:
            text.append("● connected", "green")
        if app.read_only:
            text.append("  ⊘ read-only", "yellow")
        status = app.status
        if status is not None:
            text.append(f"  {sanitize_line(status.target.name, 40)}")
            if status.state != "ready":
                text.append("  ‖ stopping" if status.state == "draining" else "  … starting", "bold yellow")
            if status.target.paused_at is not None:
                text.append(f"  ‖ paused by {sanitize_line(status.target.paused_by, 40)}", "yellow")
            elif status.running:
                text.append(f"  ▶ {sanitize_line(status.running, 40)}")
                text.append(f": {sanitize_line(', '.join(status.doing), 80)}" if status.doing else "")
            else:
                text.append("  · idle")
            if status.waiting:
                text.append(f"  ! {len(status.waiting)} pending", "bold yellow")
        self.update(text)


class Modes(Static):
    """A line of all screens with their keys; the current one is marked, and names are cut to fit the width."""

    DEFAULT_CSS = "Modes { height: 1; padding: 0 1; background: $panel; }"
    app: ConnectedApp

    def __init__(self, names: Sequence[str], current: str) -> None:
        super().__init__()
        self._names, self._current_name = names, current

    def on_resize(self) -> None:
        """Cut the names as far as the width requires, but never the current screen's name."""
        width = self.content_size.width
        limit = max(map(len, self._names))
        while limit > MIN_LETTERS and sum(len(self._short_name(name, limit)) + 4 for name in self._names) > width:
            limit -= 1
        text = Text(no_wrap=True, overflow="crop", end="")
        for number, name in enumerate(self._names, 1):
            is_current = name == self._current_name
            text.append(f" {number} ", "bold" if is_current else "dim")
            text.append(self._short_name(name, limit), "bold reverse" if is_current else "")
            text.append(" ")
        self.update(text)

    def _short_name(self, name: str, limit: int) -> str:
        return name if name == self._current_name else name[:limit]


class Help(ModalScreen[None]):
    """A dialog with the keys that work on a screen, taken from its bindings."""

    DEFAULT_CSS = """
    Help { align: center middle; }
    Help > VerticalScroll { width: 64; max-width: 90%; height: auto; max-height: 90%; padding: 0 1; }
    Help > VerticalScroll { border: round $accent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "dismiss", "Close")]

    def __init__(self, screen: Screen[Any]) -> None:
        super().__init__()
        self._keys = _keys(screen)

    def compose(self) -> ComposeResult:
        """Yield a table of keys."""
        table = Table(box=None, show_header=False, pad_edge=False)
        for key, action in self._keys:
            table.add_row(Text(key, "bold"), Text(action))
        with VerticalScroll() as frame:
            frame.border_title = "Keys of this screen (Esc: close)"
            yield Static(table)


class Jump(ModalScreen[None]):
    """An overlay with a letter on every widget that can be focused; typing the letter focuses the widget."""

    DEFAULT_CSS = """
    Jump { background: transparent; }
    Jump > Static { position: absolute; width: 3; height: 1; background: $warning; color: $text; text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Close")]

    def __init__(self, screen: Screen[Any]) -> None:
        super().__init__()
        self._target_screen = screen
        self._targets: dict[str, Widget] = dict(zip(ascii_lowercase, screen.focus_chain, strict=False))

    def compose(self) -> ComposeResult:
        """Yield one label for each widget."""
        for letter, widget in self._targets.items():
            label = Static(f" {letter} ", markup=False)
            label.absolute_offset = Offset(*widget.region.offset)
            yield label

    def on_key(self, event: Key) -> None:
        """Focus the widget with the typed letter."""
        if event.key in self._targets:
            event.stop()
            self.dismiss()
            self._target_screen.set_focus(self._targets[event.key])


def _keys(screen: Screen[Any]) -> list[tuple[str, str]]:
    keys_by_action: dict[str, list[str]] = {}
    for active in screen.active_bindings.values():
        binding = active.binding
        action = binding.tooltip or binding.description
        if action and not binding.system and active.enabled:
            keys_by_action.setdefault(action, []).append(screen.app.get_key_display(binding))
    return [(" ".join(keys), action) for action, keys in keys_by_action.items()]
