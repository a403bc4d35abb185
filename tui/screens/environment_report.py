"""An admission check by check: what failed first and open, each with what was measured beside what was required.

Invariants: evidence is shown whole but for texts beyond ``TEXT`` characters, whatever its shape; records of the same
fields stand in columns; nothing is judged here, the verdict is the report's own.
"""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text
from textual.events import Resize
from textual.widgets import Tree

from traced.client.environments import AdmissionView, CheckView
from tui.plain import block, cell, line

TEXT = 6000
INDENT = 6  # columns left of a line of evidence
MEANS = {
    "source": "parses, is small, imports and calls only what an environment needs",
    "runs": "two seeds come through reset, step, score and oracle in two processes",
    "determinism": "the same seed gives the same bytes, also in another process and among other episodes",
    "oracle": "its own oracle ends every probed seed with reward 1 and success",
    "diversity": "seeds differ, and in more than names, ids and numbers",
    "floor": "policies that do not try stay at the floor",
    "exploits": "policies that want reward without work stay below the pass mark",
    "interface": "tools and the form of errors are those of the target",
    "leak": "the prompt does not hold the oracle's own words",
    "latency": "reset and step are quick",
    "effects": "no file, socket, process or thread was touched, nothing printed",
    "spread": "the base model's rewards leave room to learn, and differ within groups",
}
BOUNDS = {  # what was measured, the key of its bound, and how the two compare
    "distinct": ("distinct_required", "≥"),
    "shapes": ("shapes_required", "≥"),
    "commonest_shape": ("commonest_allowed", "≤"),
    "share": ("allowed", "≤"),
    "reset_p95": ("reset_allowed", "≤"),
    "step_p95": ("step_allowed", "≤"),
    "mean": ("mean_allowed", "within"),
    "mixed": ("mixed_required", "≥"),
}


class Report(Tree[str]):
    """The checks of one admission; Enter opens and closes one."""

    DEFAULT_CSS = "Report { padding: 0 1; } Report > .tree--guides { color: $panel-lighten-2; }"
    ICON_NODE = "▸ "
    ICON_NODE_EXPANDED = "▾ "

    def __init__(self) -> None:
        super().__init__("", id="report")
        self.show_root = False
        self.show_guides = False
        self.guide_depth = 2
        self._shown: AdmissionView | None = None
        self._width = 0

    def put(self, admission: AdmissionView) -> None:
        """Show this one; nothing moves where it is shown already."""
        if self._shown is None or self._shown.id != admission.id:
            self._shown = admission
            self._fill({check.name for check in admission.checks if not check.passed}, "")

    def on_resize(self, event: Resize) -> None:
        """Long texts are broken for the width."""
        if self._shown is not None and event.size.width != self._width:
            node = self.cursor_node
            while node is not None and node.parent is not None and node.parent is not self.root:
                node = node.parent
            at = "" if node is None else node.data or ""
            self._fill({node.data or "" for node in self.root.children if node.is_expanded}, at)

    def _fill(self, opened: set[str], at: str) -> None:
        """All checks anew, some of them open, with the cursor on one."""
        assert self._shown is not None
        self._width = self.size.width
        self.clear()
        checks = sorted(self._shown.checks, key=lambda check: check.passed)  # stable: in the order of the admission
        widest = max((len(line(check.name, 24)) for check in checks), default=0)
        for check in checks:
            node = self.root.add(_label(check, widest, self._width), data=check.name, expand=check.name in opened)
            if check.name in MEANS:
                node.add_leaf(Text(MEANS[check.name], "dim italic"))
            for told in evidence_lines(check.evidence, max(self._width - INDENT - 2, 40)):
                node.add_leaf(told)
        self.root.expand()
        chosen = next((node for node in self.root.children if node.data == at), None)
        if chosen is None:
            self.cursor_line = 0
        else:
            self.call_after_refresh(self.move_cursor, chosen)


def _label(check: CheckView, widest: int, width: int) -> Text:
    label = Text(no_wrap=True)
    label.append("✓ " if check.passed else "✗ ", "green" if check.passed else "bold red")
    label.append(f"{line(check.name, 24):<{widest}}", "" if check.passed else "bold")
    label.append(f"  {check.seconds:7.2f} s  ", "dim")
    label.append(_short(check.evidence) if check.passed else "failed", "dim" if check.passed else "red")
    label.truncate(max(width - INDENT, 40), overflow="ellipsis")
    return label


def _short(evidence: Mapping[str, Any]) -> str:
    bounds = {bound for bound, _ in BOUNDS.values()}
    told = [
        f"{line(name, 30)} {_value(value)}"
        for name, value in evidence.items()
        if name not in bounds and isinstance(value, str | int | float) and len(str(value)) < 40
    ]
    return line(" · ".join(told), 100)


def evidence_lines(evidence: Mapping[str, Any], width: int) -> Iterator[Text]:
    """What was measured, line by line, for a width."""
    records = {name: value for name, value in evidence.items() if isinstance(value, dict) and value}
    columns = list(next(iter(records.values()), {}))
    same = len(records) > 1 and all(list(value) == columns for value in records.values())
    if same and all(not isinstance(one, dict | list) for value in records.values() for one in value.values()):
        yield from _table(records, columns)
    else:
        records = {}
    rest = {name: value for name, value in evidence.items() if name not in records}
    bounds = {bound for name, (bound, _) in BOUNDS.items() if name in rest}
    widest = min(max((len(line(name, 30)) for name in rest if name not in bounds), default=0), 30)
    for name, value in rest.items():
        if name not in bounds:
            yield from _entry(name, value, rest, widest, width)
    if not evidence:
        yield Text("nothing was measured", "dim")


def _table(records: Mapping[str, Mapping[str, Any]], columns: list[str]) -> Iterator[Text]:
    names = {name: line(name, 30) for name in records}
    widest = max(map(len, names.values()))
    widths = {column: max(len(line(column, 20)), 8) for column in columns}
    yield Text(" " * widest + "".join(f"  {line(column, 20):>{widths[column]}}" for column in columns), "dim")
    for name, values in records.items():
        told = "".join(f"  {_value(values[column]):>{widths[column]}}" for column in columns)
        yield Text(f"{names[name]:<{widest}}{told}", "bold" if name == "allowed" else "", no_wrap=True)


def _entry(name: str, value: Any, all_of_it: Mapping[str, Any], widest: int, width: int) -> Iterator[Text]:
    shown = f"{line(name, 30):<{widest}}  "
    if isinstance(value, dict) and value:
        yield cell(line(name, 30))
        for told in evidence_lines(value, width - 2):
            yield Text.assemble("  ", told)
    elif isinstance(value, list) and len(_value(value)) > width - widest:
        yield cell(f"{shown}{len(value)}:")
        for one in value:
            yield from (Text(f"  {part}") for part in _broken(_value(one), width - 2))
    elif isinstance(value, str) and ("\n" in value or len(value) > width - widest - 2):
        yield cell(line(name, 30))
        yield from (Text(f"  {part}") for part in _broken(block(value, TEXT), width - 2))
    else:
        told = Text(shown + _value(value), no_wrap=True)
        bound, sign = BOUNDS.get(name, ("", ""))
        if bound in all_of_it:
            told.append(f"  needs {sign} {_value(all_of_it[bound])}", "dim")
        yield told


def _broken(text: str, width: int) -> Iterator[str]:
    for one in text.split("\n"):
        yield from textwrap.wrap(one, max(width, 20), subsequent_indent="  ", replace_whitespace=False) or [""]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) >= 0.001 or not value else f"{value:.6f}".rstrip("0").rstrip(".")
    if value is None or value in ("", [], {}):
        return "none"
    if isinstance(value, list):
        return line(", ".join(map(_value, value)), TEXT)
    if isinstance(value, dict):
        return line(", ".join(f"{name} {_value(one)}" for name, one in value.items()), TEXT)
    return line(value, TEXT)
