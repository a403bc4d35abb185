"""Dialogs over a screen: a yes-or-no question, the confirmation of an action with its reason, the path of an export.

Invariants of a confirmation: Enter alone does nothing. The cursor starts in the reason, where Enter only moves on, and
the button that acts carries the action's name (``ctrl+y`` presses it). The dialog closes once the action is done. If
the daemon refuses or does not answer, the dialog says so and keeps the typed text. The user can always leave the
dialog: a request that was sent continues, otherwise nothing happens. No key binding has Textual's ``priority``, because
such a key would overtake text that was typed before it and cut the reason short.

Invariants of an export: an existing file is replaced only after a second Enter on the same path, and only by a complete
new file. One trajectory is in memory at a time. After a failure the dialog stays open with the reason, and no partial
file is left. Not covered: browsers, whose users must not write files on the daemon's machine.
"""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Button, Input, Static
from textual.widgets._button import ButtonVariant

from traced.client import ClientError
from traced.client.models import Done
from tui.connection import ConnectedApp
from tui.text import sanitize_line

REQUESTED = "… sent. Esc closes; the request continues."
REASON = 2000  # maximum characters of a reason that the daemon accepts


class Question(ModalScreen[bool]):
    """A yes-or-no question with the consequences; y answers yes, n and Escape answer no."""

    DEFAULT_CSS = """
    Question { align: center middle; }
    Question > Vertical { width: auto; max-width: 90%; height: auto; padding: 0 2; border: round $warning; }
    Question Static { width: auto; max-width: 100%; }
    Question #asked { text-style: bold; }
    Question #keys { color: $text-muted; margin-top: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape", "dismiss(False)", "No"),
    ]

    def __init__(self, question: str, detail: str = "") -> None:
        super().__init__()
        self._question, self._detail = question, detail

    def compose(self) -> ComposeResult:
        """Yield the question, the consequences, and the keys."""
        with Vertical():
            yield Static(self._question, markup=False, id="asked")
            yield Static(self._detail, markup=False)
            yield Static("y yes   n no", id="keys", markup=False)


class ReasonDialog(ModalScreen[Done | None]):
    """A dialog that confirms an action ("Stop the training") with its reason, performs it, and returns the result."""

    app: ConnectedApp
    AUTO_FOCUS = "#why"
    DEFAULT_CSS = """
    ReasonDialog { align: center middle; }
    ReasonDialog > VerticalScroll { width: 76; max-width: 96%; height: auto; max-height: 96%; padding: 0 2; }
    ReasonDialog > VerticalScroll { border: round $accent; background: $surface; }
    ReasonDialog Static { height: auto; }
    ReasonDialog #told { display: none; margin-top: 1; }
    ReasonDialog #told.-refused { color: $text-error; }
    ReasonDialog Horizontal { height: auto; margin-top: 1; }
    ReasonDialog Button { margin-right: 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Cancel"),
        Binding("ctrl+y", "confirm", "Confirm"),
    ]

    def __init__(self, title: str, variant: ButtonVariant = "warning", *, after_reason: str = "#confirm") -> None:
        super().__init__()
        self._title, self._variant = sanitize_line(title, 80), variant
        self._after_reason = after_reason  # selector of the widget that Enter focuses

    def details(self) -> Iterable[Widget]:
        """Return widgets that describe the effect of the action."""
        return ()

    def choices(self) -> Iterable[Widget]:
        """Return widgets for further choices."""
        return ()

    def do(self, reason: str) -> Awaitable[Done]:
        """Return the request that performs the action."""
        raise NotImplementedError

    def compose(self) -> ComposeResult:
        """Yield the effect, the reason, further choices, and the two buttons."""
        with VerticalScroll(can_focus=False) as frame:
            frame.border_title = Text(self._title)
            frame.border_subtitle = "Tab: next · ^y: confirm · Esc: close"
            yield from self.details()
            yield Static("Reason (stored with the decision):", classes="title")
            yield Input(placeholder="what others should know about it", id="why", compact=True, max_length=REASON)
            yield from self.choices()
            yield Static("", id="told", markup=False)
            with Horizontal():
                yield Button("Cancel", id="leave", compact=True)
                label = Text(f" {self._title} ", no_wrap=True)
                yield Button(label, id="confirm", variant=self._variant, compact=True)

    def on_input_submitted(self) -> None:
        """Move the focus on: Enter in the reason must not confirm."""
        self.query_one(self._after_reason).focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Confirm the action, or leave the dialog."""
        if event.button.id == "confirm":
            self.action_confirm()
        else:
            self.action_leave()

    def action_confirm(self) -> None:
        """Send the confirmed action, with the typed reason."""
        if not self.query_one("#confirm", Button).disabled:
            self._show_message(REQUESTED)
            action = self._do(self.do(self.query_one("#why", Input).value.strip()))
            # The app runs the worker: a worker of the dialog would be cancelled when the dialog is left.
            self.app.run_worker(action, group="act")

    def action_leave(self) -> None:
        """Close the dialog; a request that was sent continues."""
        self.dismiss()

    async def _do(self, request: Awaitable[Done]) -> None:
        done = await self.app.act(request, self._show_refusal)
        if done is not None and self.is_attached:
            self.dismiss(done)

    def _show_refusal(self, reason: str) -> bool:
        """Show the cause and keep the typed text; return False if the dialog is closed."""
        if self.is_attached:
            self._show_message(f"✗ {reason}", is_refusal=True)
        return self.is_attached

    def _show_message(self, text: str, *, is_refusal: bool = False) -> None:
        label, confirm = self.query_one("#told", Static), self.query_one("#confirm", Button)
        label.update(text)
        label.set_class(is_refusal, "-refused")
        label.display, confirm.disabled = True, not is_refusal


class ActQuestion(ReasonDialog):
    """A dialog that confirms an action: ``effect`` is safe text, ``send`` performs it with the typed reason or ""."""

    def __init__(self, title: str, effect: Text, send: Callable[[str], Awaitable[Done]]) -> None:
        super().__init__(title)
        self._effect, self._send = effect, send

    def details(self) -> Iterable[Widget]:
        """Return a text on the effect of the action."""
        yield Static(self._effect, id="what")

    def do(self, reason: str) -> Awaitable[Done]:
        """Return the request, with the typed reason."""
        return self._send(reason)


class Export(ModalScreen[None]):
    """A dialog that asks for a path and writes trajectories to it as JSON Lines."""

    DEFAULT_CSS = """
    Export { align: center middle; }
    Export > Vertical { width: 70; max-width: 95%; height: auto; border: round $accent; padding: 0 1; }
    Export #why { height: auto; min-height: 1; color: $text-warning; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Close")]
    app: ConnectedApp

    def __init__(self, ids: Sequence[str]) -> None:
        super().__init__()
        self._ids = list(ids)
        self._may_replace: Path | None = None
        self._busy = False

    def compose(self) -> ComposeResult:
        """Yield an input for the path, and a line for errors."""
        count_text = "1 trajectory" if len(self._ids) == 1 else f"{len(self._ids):,} trajectories"
        with Vertical() as frame:
            frame.border_title = f"Write {count_text} as JSON Lines"
            frame.border_subtitle = "Enter writes, Esc closes"
            yield Input("trajectories.jsonl", compact=True, id="path")
            yield Static(f"in {sanitize_line(Path.cwd(), 400)}", id="why", markup=False)

    def on_input_changed(self) -> None:
        """Withdraw the permission to replace a file, because the path has changed."""
        self._may_replace = None

    def on_input_submitted(self, message: Input.Submitted) -> None:
        """Write the file, or show why it cannot be written."""
        if self._busy:
            return
        try:
            path = Path(message.value.strip()).expanduser()
            is_folder, is_there = path.is_dir(), path.exists()
        # No such user, no permission, a name that is too long, or a NUL in it.
        except (OSError, RuntimeError, ValueError) as error:
            self._say(f"Not written: {sanitize_line(getattr(error, 'strerror', None) or error, 200)}.")
            return
        if not message.value.strip() or is_folder:
            self._say("Enter a file name.")
        elif is_there and self._may_replace != path:
            self._may_replace = path
            self._say(
                f"{sanitize_line(path.name, 100)} already exists. Enter again to replace it, or enter another name."
            )
        else:
            self._write(path, replace=self._may_replace == path)

    def _say(self, text: str) -> None:
        self.query_one("#why", Static).update(text)

    @work(exclusive=True)
    async def _write(self, path: Path, *, replace: bool) -> None:
        self._busy = True
        try:
            await write_lines(path, self._lines(), replace=replace)
        except FileExistsError:
            self._say(f"{sanitize_line(path.name, 100)} was created in the meantime. Enter again to replace it.")
            self._may_replace = path
        except OSError as error:
            self._say(f"Not written: {sanitize_line(error.strerror or error, 200)}.")
        except ClientError as error:
            self._say(f"Not written: {sanitize_line(error.message, 200)}.")
        else:
            self.app.notify(f"{len(self._ids):,} written to {sanitize_line(path, 200)}", markup=False)
            self.dismiss()
        finally:
            self._busy = False

    async def _lines(self) -> AsyncIterator[str]:
        for number, key in enumerate(self._ids, 1):
            yield (await self.app.client.trajectories.get(key)).model_dump_json()
            if len(self._ids) > 1:
                self._say(f"{number:,} of {len(self._ids):,}")


def export(app: ConnectedApp, ids: Sequence[str]) -> None:
    """Open the dialog that writes these trajectories to a file."""
    app.push_screen(Export(ids))


async def write_lines(path: Path, lines: AsyncIterator[str], *, replace: bool) -> None:
    """Write a file completely or not at all; raises ``FileExistsError`` if it exists and ``replace`` is False."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    if not replace:
        # Reserve the name, so that no other process takes it meanwhile.
        path.open("x").close()
    try:
        with part.open("x", encoding="utf-8") as file:
            async for line in lines:
                file.write(f"{line}\n")
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        if not replace:
            with suppress(OSError):
                path.unlink()
        raise
