"""Trajectories into a file of JSON Lines whose path is typed in.

Invariants: a file that is there already is replaced only after a second Enter on the same path, and only by a whole
new one; what fails leaves no file behind. One trajectory is in memory at a time. How it fails: the prompt stays open
and says why. Not covered: a browser, whose user must not write files on the daemon's machine.
"""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from traced.client import ClientError
from tui.plain import line

if TYPE_CHECKING:
    from tui.app import TracedApp


def export(app: "TracedApp", ids: Sequence[str]) -> None:
    """Ask for a path, and write these."""
    app.push_screen(Export(ids))


class Export(ModalScreen[None]):
    """The prompt for the path."""

    DEFAULT_CSS = """
    Export { align: center middle; }
    Export > Vertical { width: 70; max-width: 95%; height: auto; border: round $accent; padding: 0 1; }
    Export #why { height: auto; min-height: 1; color: $text-warning; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Close")]
    app: "TracedApp"

    def __init__(self, ids: Sequence[str]) -> None:
        super().__init__()
        self._ids = list(ids)
        self._may_replace: Path | None = None
        self._busy = False

    def compose(self) -> ComposeResult:
        """A line to type in, and a line that says what is wrong."""
        many = "1 trajectory" if len(self._ids) == 1 else f"{len(self._ids):,} trajectories"
        with Vertical() as frame:
            frame.border_title = f"Write {many} as JSON Lines"
            frame.border_subtitle = "Enter writes, Esc closes"
            yield Input("trajectories.jsonl", compact=True, id="path")
            yield Static(f"in {line(Path.cwd(), 400)}", id="why", markup=False)

    def on_input_changed(self) -> None:
        """Another path needs another yes."""
        self._may_replace = None

    def on_input_submitted(self, message: Input.Submitted) -> None:
        """Write, or say what is in the way."""
        if self._busy:
            return
        try:
            path = Path(message.value.strip()).expanduser()
            is_folder, is_there = path.is_dir(), path.exists()
        except (OSError, RuntimeError, ValueError) as error:  # no such user, no way in, too long, a NUL
            self._say(f"Not written: {line(getattr(error, 'strerror', None) or error, 200)}.")
            return
        if not message.value.strip() or is_folder:
            self._say("Type a file's name.")
        elif is_there and self._may_replace != path:
            self._may_replace = path
            self._say(f"{line(path.name, 100)} is there already. Enter again replaces it; or type another name.")
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
            self._say(f"{line(path.name, 100)} has appeared meanwhile. Enter again replaces it.")
            self._may_replace = path
        except OSError as error:
            self._say(f"Not written: {line(error.strerror or error, 200)}.")
        except ClientError as error:
            self._say(f"Not written: {line(error.message, 200)}.")
        else:
            self.app.notify(f"{len(self._ids):,} written to {line(path, 200)}", markup=False)
            self.dismiss()
        finally:
            self._busy = False

    async def _lines(self) -> AsyncIterator[str]:
        for number, key in enumerate(self._ids, 1):
            yield (await self.app.client.trajectories.get(key)).model_dump_json()
            if len(self._ids) > 1:
                self._say(f"{number:,} of {len(self._ids):,}")


async def write_lines(path: Path, lines: AsyncIterator[str], *, replace: bool) -> None:
    """Write a file whole or not at all; raises ``FileExistsError`` where one is there that must stay."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    if not replace:
        path.open("x").close()  # nobody else takes the name meanwhile
    try:
        with part.open("x", encoding="utf-8") as file:
            async for one in lines:
                file.write(f"{one}\n")
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        if not replace:
            with suppress(OSError):
                path.unlink()
        raise
