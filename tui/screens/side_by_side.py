"""Two episodes of the same task to read, the base's and the adapter's; one above the other where it is narrow."""

import json
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from traced.client.approvals import Episode
from tui.plain import block, line
from tui.screens.live import WIDTHS

TEXT = 4000  # characters of one message
MESSAGES = 200
ROLES = {"system": "dim", "user": "bold cyan", "assistant": "bold green", "tool": "yellow"}


class SideBySide(ModalScreen[None]):
    """Closed by Escape."""

    DEFAULT_CSS = """
    SideBySide > Container { height: 1fr; background: $surface; }
    SideBySide.-wide > Container { layout: horizontal; }
    SideBySide VerticalScroll { border: round $panel-lighten-2; padding: 0 1; height: 1fr; }
    SideBySide.-wide VerticalScroll { width: 1fr; }
    SideBySide VerticalScroll:focus { border: round $accent; }
    SideBySide Static { height: auto; }
    """
    HORIZONTAL_BREAKPOINTS = WIDTHS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close"),
        Binding("tab", "app.focus_next", "Other episode"),
    ]

    def __init__(self, title: str, *episodes: Episode) -> None:
        super().__init__()
        self._title, self._episodes = title, episodes

    def compose(self) -> ComposeResult:
        """A column each."""
        with Container():
            for one in self._episodes:
                with VerticalScroll() as column:
                    column.border_title = Text(f"{line(one.model, 60)} · {self._title}")
                    won = "✓" if one.outcome == "success" else "✗"
                    ended = f"{won} {line(one.outcome, 20)}, reward {one.reward:.2f}, {line(one.end_cause, 20)}"
                    column.border_subtitle = Text(ended)
                    yield Static(_told(one))
        yield Footer(compact=True)


def _told(episode: Episode) -> Text:
    told = Text()
    for message in episode.messages[:MESSAGES]:
        role = line(message.get("role", "?"), 20)
        told.append(f"{role}\n", ROLES.get(role, "bold"))
        if (content := _content(message.get("content"))) != "":
            told.append(f"{block(content, TEXT)}\n")
        for called in _calls(message):
            told.append(f"→ {line(called, TEXT)}\n", "magenta")
    if len(episode.messages) > MESSAGES:
        told.append(f"… {len(episode.messages) - MESSAGES} more messages\n", "dim")
    if episode.detail:
        told.append(block(episode.detail, TEXT), "red")
    return told


def _content(content: Any) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _calls(message: dict[str, Any]) -> list[str]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    functions = [one.get("function") if isinstance(one, dict) else None for one in calls]
    return [
        f"{one.get('name')}({one.get('arguments')})" if isinstance(one, dict) else "a call that is none"
        for one in functions
    ]
