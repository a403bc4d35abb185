"""A question before an act that one sentence says enough of: stopping a training, a rollback."""

from collections.abc import Awaitable, Callable, Iterable

from rich.text import Text
from textual.widget import Widget
from textual.widgets import Static

from traced.client.models import Done
from tui.widgets.reason_dialog import ReasonDialog


class ActQuestion(ReasonDialog):
    """Asks whether to do ``act``; ``what`` says, harmlessly, what comes of it, ``how`` does it for a reason or ""."""

    def __init__(self, act: str, what: Text, how: Callable[[str], Awaitable[Done]]) -> None:
        super().__init__(act)
        self._what, self._how = what, how

    def about(self) -> Iterable[Widget]:
        """What comes of it."""
        yield Static(self._what, id="what")

    def do(self, reason: str) -> Awaitable[Done]:
        """As it was given."""
        return self._how(reason)
