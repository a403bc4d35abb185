"""A question before an act that one sentence says enough of: stopping a training, a rollback."""

from collections.abc import Iterable

from rich.text import Text
from textual.widget import Widget
from textual.widgets import Static

from tui.widgets.reason_dialog import ReasonDialog


class ActQuestion(ReasonDialog[str | None]):
    """Asks whether to do ``act``; ``what`` says, harmlessly, what comes of it. Gives the reason, "" without one."""

    def __init__(self, act: str, what: Text) -> None:
        super().__init__(act)
        self._what = what

    def about(self) -> Iterable[Widget]:
        """What comes of it."""
        yield Static(self._what, id="what")

    def answer(self, reason: str) -> str:
        """The reason."""
        return reason
