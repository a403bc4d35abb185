"""An environment's admission, check by check: failed ones first and expanded, with measured and required values.

Evidence of any shape is shown in full, with two exceptions: texts are cut at ``TEXT`` characters, and if some policies
exceed a bound, the others are only counted. Records with the same fields form columns. The verdicts and their wording
are those of the admission report.
"""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text
from textual.events import Resize
from textual.widgets import Tree

from traced.client.environments import AdmissionView, BoundView, CheckView, ExampleView, PanelView
from tui.text import cell, sanitize_block, sanitize_line

TEXT = 6000
INDENT = 6  # columns left of a line of evidence


class Report(Tree[str]):
    """A tree of the checks of one admission; Enter expands or collapses a check."""

    DEFAULT_CSS = "Report { padding: 0 1; } Report > .tree--guides { color: $panel-lighten-2; }"
    ICON_NODE = "▸ "
    ICON_NODE_EXPANDED = "▾ "

    def __init__(self) -> None:
        super().__init__("", id="report")
        self.show_root = False
        self.show_guides = False
        self.guide_depth = 2
        self._admission: AdmissionView | None = None
        self._width = 0

    def put(self, admission: AdmissionView) -> None:
        """Show this admission; if it is shown already, nothing changes."""
        if self._admission is None or self._admission.id != admission.id:
            self._admission = admission
            self._fill({check.name for check in admission.checks if not check.passed}, "")

    def on_resize(self, event: Resize) -> None:
        """Wrap long texts to the new width."""
        if self._admission is not None and event.size.width != self._width:
            node = self.cursor_node
            while node is not None and node.parent is not None and node.parent is not self.root:
                node = node.parent
            at = "" if node is None else node.data or ""
            self._fill({node.data or "" for node in self.root.children if node.is_expanded}, at)

    def _fill(self, open_names: set[str], at: str) -> None:
        """Rebuild the tree, expand the checks in ``open_names``, and put the cursor on the check ``at``."""
        assert self._admission is not None
        self._width = self.size.width
        self.clear()
        # The sort is stable: checks of one verdict stay in the order of the admission.
        checks = sorted(self._admission.checks, key=lambda check: check.passed)
        name_width = max((len(sanitize_line(check.name, 24)) for check in checks), default=0)
        for check in checks:
            node = self.root.add(
                _label(check, name_width, self._width), data=check.name, expand=check.name in open_names
            )
            for line in check_lines(check, max(self._width - INDENT - 2, 40)):
                node.add_leaf(line)
        self.root.expand()
        selected = next((node for node in self.root.children if node.data == at), None)
        if selected is None:
            self.cursor_line = 0
        else:
            self.call_after_refresh(self.move_cursor, selected)


def _label(check: CheckView, name_width: int, width: int) -> Text:
    label = Text(no_wrap=True)
    label.append("✓ " if check.passed else "✗ ", "green" if check.passed else "bold red")
    label.append(f"{sanitize_line(check.name, 24):<{name_width}}", "" if check.passed else "bold")
    label.append(f"  {check.seconds:7.2f} s  ", "dim")
    label.append(_figures_line(check) if check.passed else "failed", "dim" if check.passed else "red")
    label.truncate(max(width - INDENT, 40), overflow="ellipsis")
    return label


def _figures_line(check: CheckView) -> str:
    bounds = {bound.key for bound in check.bounds.values()}
    figures = [
        f"{sanitize_line(name, 30)} {_value(value)}"
        for name, value in check.evidence.items()
        if name not in bounds and isinstance(value, str | int | float) and len(str(value)) < 40
    ]
    return sanitize_line(" · ".join(figures), 100)


def check_lines(check: CheckView, width: int) -> Iterator[Text]:
    """Yield the lines on a check: what it is about, what to change, what was measured and what happened."""
    if check.means:
        yield Text(sanitize_line(check.means), "dim italic")
    for sentence in check.advice:
        for number, part in enumerate(_wrapped(sanitize_line(sentence, TEXT), width - 2)):
            yield Text.assemble(("  " if number else "→ ", "yellow"), part.strip())
    evidence = {name: value for name, value in check.evidence.items() if name != "examples" or not check.examples}
    if check.panel is not None:
        yield from _panel(check.panel)
        evidence = {name: value for name, value in evidence.items() if not isinstance(value, dict)}
    if evidence or check.panel is None:
        yield from evidence_lines(evidence, check.bounds, width)
    for example in check.examples:
        yield from _example(example, width)


def _panel(panel: PanelView) -> Iterator[Text]:
    """Yield the policies that exceed a bound and the number of the others, or all policies if none does."""
    rows = panel.over or panel.others
    names = {name: sanitize_line(name, 30) for name in rows}
    name_width = max([len("policy"), *map(len, names.values())])
    columns = [sanitize_line(column, 24) for column in panel.columns]
    yield Text(f"{'policy':<{name_width}}" + "".join(f"  {column:>8}" for column in columns), "dim")
    for name, rates in rows.items():
        line = Text(f"{names[name]:<{name_width}}", no_wrap=True)
        for column, rate in zip(columns, rates, strict=False):
            line.append(
                f"  {sanitize_line(rate.value, 24):>{max(len(column), 8)}}", "red" if rate.kept is False else ""
            )
        yield line
    if panel.over and panel.told:
        yield Text(sanitize_line(panel.told), "dim")


def _example(example: ExampleView, width: int) -> Iterator[Text]:
    title = f"seed {example.seed}: {example.what}" if example.seed else example.what
    yield from (Text(part) for part in _wrapped(sanitize_block(title, TEXT), width))
    for turn in example.transcript:
        for number, part in enumerate(_wrapped(sanitize_block(turn.text, TEXT), width - 14)):
            yield Text.assemble((f"  {'' if number else sanitize_line(turn.role, 10):<10}  ", "dim"), part)


def evidence_lines(evidence: Mapping[str, Any], bounds: Mapping[str, BoundView], width: int) -> Iterator[Text]:
    """Yield the lines on what was measured, wrapped to ``width`` characters."""
    records = {name: value for name, value in evidence.items() if isinstance(value, dict) and value}
    columns = list(next(iter(records.values()), {}))
    is_table = len(records) > 1 and all(list(value) == columns for value in records.values())
    if is_table and all(not isinstance(figure, dict | list) for value in records.values() for figure in value.values()):
        yield from _table(records, columns)
    else:
        records = {}
    bound_keys = {bound.key for bound in bounds.values()}
    rest = {name: value for name, value in evidence.items() if name not in records and name not in bound_keys}
    name_width = min(max((len(sanitize_line(name, 30)) for name in rest), default=0), 30)
    for name, value in rest.items():
        bound = bounds.get(name)
        needs = f"  needs {bound.sign} {_value(evidence.get(bound.key))}" if bound else ""
        yield from _entry(name, value, needs, name_width, width)
    if not evidence:
        yield Text("no figures were measured", "dim")


def _table(records: Mapping[str, Mapping[str, Any]], columns: list[str]) -> Iterator[Text]:
    names = {name: sanitize_line(name, 30) for name in records}
    name_width = max(map(len, names.values()))
    widths = {column: max(len(sanitize_line(column, 20)), 8) for column in columns}
    yield Text(
        " " * name_width + "".join(f"  {sanitize_line(column, 20):>{widths[column]}}" for column in columns), "dim"
    )
    for name, values in records.items():
        figures = "".join(f"  {_value(values[column]):>{widths[column]}}" for column in columns)
        yield Text(f"{names[name]:<{name_width}}{figures}", "bold" if name == "allowed" else "", no_wrap=True)


def _entry(name: str, value: Any, needs: str, name_width: int, width: int) -> Iterator[Text]:
    label = f"{sanitize_line(name, 30):<{name_width}}  "
    if isinstance(value, dict) and value:
        yield cell(sanitize_line(name, 30))
        for inner in evidence_lines(value, {}, width - 2):
            yield Text.assemble("  ", inner)
    elif isinstance(value, list) and len(_value(value)) > width - name_width:
        yield cell(f"{label}{len(value)}:")
        for item in value:
            yield from (Text(f"  {part}") for part in _wrapped(_value(item), width - 2))
    elif isinstance(value, str) and ("\n" in value or len(value) > width - name_width - 2):
        yield cell(sanitize_line(name, 30))
        yield from (Text(f"  {part}") for part in _wrapped(sanitize_block(value, TEXT), width - 2))
    else:
        yield Text.assemble(label + _value(value), (needs, "dim"), no_wrap=True)


def _wrapped(text: str, width: int) -> Iterator[str]:
    for line in text.split("\n"):
        yield from textwrap.wrap(line, max(width, 20), subsequent_indent="  ", replace_whitespace=False) or [""]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) >= 0.001 or not value else f"{value:.6f}".rstrip("0").rstrip(".")
    if value is None or value in ("", [], {}):
        return "none"
    if isinstance(value, list):
        return sanitize_line(", ".join(map(_value, value)), TEXT)
    if isinstance(value, dict):
        return sanitize_line(", ".join(f"{name} {_value(inner)}" for name, inner in value.items()), TEXT)
    return sanitize_line(value, TEXT)
