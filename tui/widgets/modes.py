"""The line that names all screens with their keys, the one in front marked; names are cut where there is no room."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text
from textual.widgets import Static

if TYPE_CHECKING:
    from tui.app import TracedApp

LEAST = 3  # letters of a name that is cut


class Modes(Static):
    """One line."""

    DEFAULT_CSS = "Modes { height: 1; padding: 0 1; background: $panel; }"
    app: "TracedApp"

    def __init__(self, names: Sequence[str], here: str) -> None:
        super().__init__()
        self._names, self._here = names, here

    def on_resize(self) -> None:
        """Cut the names as far as they have to be, never that of this screen."""
        room = self.content_size.width
        longest = max(map(len, self._names))
        while longest > LEAST and sum(len(self._shown(name, longest)) + 4 for name in self._names) > room:
            longest -= 1
        told = Text(no_wrap=True, overflow="crop", end="")
        for number, name in enumerate(self._names, 1):
            here = name == self._here
            told.append(f" {number} ", "bold" if here else "dim")
            told.append(self._shown(name, longest), "bold reverse" if here else "")
            told.append(" ")
        self.update(told)

    def _shown(self, name: str, longest: int) -> str:
        return name if name == self._here else name[:longest]
