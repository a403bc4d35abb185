"""The line at the top of every screen: the connection, the service's state, and how many decisions wait."""

from typing import TYPE_CHECKING

from rich.text import Text
from textual.widgets import Static

from tui.plain import line

if TYPE_CHECKING:
    from tui.app import TracedApp


class TopLine(Static):
    """One line; ``tell`` writes it anew from what the app knows."""

    DEFAULT_CSS = "TopLine { height: 1; padding: 0 1; background: $panel; }"
    app: "TracedApp"

    def on_mount(self) -> None:
        """Say what is known."""
        self.tell()

    def tell(self) -> None:
        """Write the line."""
        app, told = self.app, Text(no_wrap=True, overflow="ellipsis")
        told.append("traced ", "bold")
        if app.linked is None:
            told.append(f"… connecting to {line(app.where.name, 60)}")
        elif not app.linked:
            told.append(f"✗ {app.trouble}", "bold red")
        else:
            told.append("● connected", "green")
        if app.read_only:
            told.append("  ⊘ read-only", "yellow")
        status = app.status
        if status is not None:
            told.append(f"  {line(status.target.name, 40)}")
            if status.state != "ready":
                told.append("  ‖ stopping" if status.state == "draining" else "  … starting", "bold yellow")
            if status.target.paused_at is not None:
                told.append(f"  ‖ paused by {line(status.target.paused_by, 40)}", "yellow")
            elif status.running:
                told.append(f"  ▶ {line(status.running, 40)}")
                told.append(f": {line(', '.join(status.doing), 80)}" if status.doing else "")
            else:
                told.append("  · idle")
            if status.waiting:
                told.append(f"  ! {len(status.waiting)} to decide", "bold yellow")
        self.update(told)
