"""Dialogs for an episode that a person plays: the seed, the tool, and the tool's arguments as JSON."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static, TextArea
from textual.widgets.option_list import Option

from traced.client.environments import PlayedCall
from tui.text import sanitize_line

# Schemas may be recursive, so a skeleton follows nested objects to a bounded depth only.
MAX_DEPTH = 4
EMPTY_VALUES: dict[str, Any] = {"string": "", "integer": 0, "number": 0, "boolean": False, "array": []}


class AskSeed(ModalScreen[int | None]):
    """A dialog that asks for a seed; returns None if the user leaves it."""

    DEFAULT_CSS = """
    AskSeed { align: center middle; }
    AskSeed > Vertical { width: 60; max-width: 90%; height: auto; padding: 0 2; border: round $accent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Not now")]

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def compose(self) -> ComposeResult:
        """Yield an input with the last seed."""
        with Vertical() as frame:
            frame.border_title = "Play an episode by hand"
            frame.border_subtitle = "Enter starts, Esc closes"
            yield Static("The episode runs in its own sandbox container. Seed:", markup=False)
            yield Input(str(self._seed), type="integer", max_length=18, compact=True, id="seed")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Return the typed seed, if it is an integer."""
        if event.value.lstrip("+-").isdecimal():
            self.dismiss(int(event.value))


class ChooseTool(ModalScreen[int | None]):
    """A dialog to choose one of the tools; returns its index, or None if the user leaves it."""

    DEFAULT_CSS = """
    ChooseTool { align: center middle; }
    ChooseTool > OptionList { width: 90; max-width: 90%; height: auto; max-height: 80%; }
    ChooseTool > OptionList, ChooseTool > OptionList:focus { border: round $accent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "None")]

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__()
        self._tools = tools

    def compose(self) -> ComposeResult:
        """Yield the tools with their names and descriptions."""
        options = OptionList(*(Option(tool_line(tool)) for tool in self._tools))
        options.border_title = "Choose a tool to call"
        options.border_subtitle = "Enter: choose, Esc: back"
        yield options

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Return the chosen tool's index."""
        self.dismiss(event.option_index)


class FillCall(ModalScreen[tuple[PlayedCall, bool] | None]):
    """A dialog that asks for a call's arguments; returns the call, and whether the message is complete with it."""

    DEFAULT_CSS = """
    FillCall { align: center middle; }
    FillCall > Vertical { width: 100; max-width: 95%; height: 90%; max-height: 24; padding: 0 1; }
    FillCall > Vertical { border: round $accent; }
    FillCall TextArea { height: 1fr; min-height: 5; margin-top: 1; }
    FillCall VerticalScroll { height: auto; max-height: 40%; }
    FillCall #wrong { height: auto; color: $text-error; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "give(True)", "Send"),
        Binding("ctrl+n,f3", "give(False)", "Add, then another"),
        Binding("escape", "dismiss(None)", "Back"),
    ]

    def __init__(self, tool: Mapping[str, Any]) -> None:
        super().__init__()
        self._tool_name = str(tool["function"]["name"])
        self._tool = tool

    def compose(self) -> ComposeResult:
        """Yield the tool's parameters, a skeleton of the arguments, and the error line."""
        with Vertical() as frame:
            frame.border_title = "A tool call"
            frame.border_subtitle = "^s: send, ^n: add another call, Esc: back"
            with VerticalScroll(can_focus=False):
                yield Static(_tool_text(self._tool))
            yield TextArea(skeleton(_parameters(self._tool)), tab_behavior="focus", compact=True, id="arguments")
            yield Static("", id="wrong", markup=False)

    def on_mount(self) -> None:
        """Focus the text area."""
        self.query_one(TextArea).focus()

    def action_give(self, complete: bool) -> None:
        """Return the call, or show why the text is no JSON object."""
        text = self.query_one(TextArea).text
        try:
            wrong = "" if isinstance(json.loads(text), dict) else "the arguments must be a JSON object in braces"
        except (ValueError, RecursionError) as error:
            wrong = str(error)
        self.query_one("#wrong", Static).update(f"✗ {sanitize_line(wrong)}" if wrong else "")
        if not wrong:
            self.dismiss((PlayedCall(name=self._tool_name, arguments=text), complete))


def tool_line(tool: Mapping[str, Any]) -> Text:
    """Return a tool as one line: its name, its parameters, its description."""
    function, parameters = tool["function"], _parameters(tool)
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(sanitize_line(function["name"], 60), "bold")
    line.append(f"({sanitize_line(', '.join(map(str, _properties(parameters))), 80)})")
    if function.get("description"):
        line.append(f"  {sanitize_line(function['description'], 120)}", "dim")
    return line


def _tool_text(tool: Mapping[str, Any]) -> Text:
    parameters = _parameters(tool)
    required = parameters.get("required")
    text = Text(sanitize_line(tool["function"]["name"], 100), "bold")
    if tool["function"].get("description"):
        text.append(f"  {sanitize_line(tool['function']['description'], 400)}", "not bold")
    for name, schema in _properties(parameters).items():
        is_required = isinstance(required, list) and name in required
        text.append(f"\n{'•' if is_required else '◦'} {sanitize_line(name, 60)}  ", "not bold")
        text.append(_kind(schema), "not bold dim")
    text.append("\n• required  ◦ optional" if _properties(parameters) else "\nIt takes no arguments.", "not bold dim")
    return text


def _kind(schema: Any) -> str:
    if not isinstance(schema, dict):
        return sanitize_line(schema, 60)
    among = schema.get("enum")
    kind = (
        f"one of {sanitize_line(', '.join(map(str, among)), 200)}"
        if isinstance(among, list)
        else sanitize_line(schema.get("type", ""))
    )
    description = schema.get("description")
    return f"{kind}  {sanitize_line(description, 300)}" if description else kind


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = tool["function"].get("parameters")
    return parameters if isinstance(parameters, dict) else {}


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def skeleton(schema: Mapping[str, Any]) -> str:
    """Return JSON text with every required argument of a tool, in ASCII so that it is safe for the terminal."""
    return json.dumps(_sketch({**schema, "type": "object"}, MAX_DEPTH), indent=2)


def _sketch(schema: Any, depth: int) -> Any:
    if not isinstance(schema, dict):
        return None
    for keyword in ("const", "default"):
        if keyword in schema:
            return schema[keyword]
    among = schema.get("enum")
    if isinstance(among, list) and among:
        return among[0]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object" and depth:
        required = schema.get("required")
        names = required if isinstance(required, list) else []
        return {
            name: _sketch(property_schema, depth - 1)
            for name, property_schema in _properties(schema).items()
            if name in names
        }
    return {} if kind == "object" else EMPTY_VALUES.get(str(kind))
