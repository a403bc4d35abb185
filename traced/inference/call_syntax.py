"""The forms in which model families write tool calls and thinking, and their strict parsers.

A parser returns every call of a turn or none: if any call is malformed, the visible text is plain content as a whole,
so that no call runs with a part of its arguments. Thinking is split off first and is never part of the content. No
parser raises.

TRL's response templates (``trl.chat_template_utils``) are not used, because transformers' parser, version 5.19, accepts
what this project must refuse: it runs a Qwen3.5 call without the parameters that it cannot read, and a Llama call
inside other text; with a malformed call TRL returns the text with its thinking; it strips the spaces of arguments; it
does not know gpt-oss's own ``<|constrain|>json`` header. On well-formed turns both agree (tested).
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sandbox.contract import Tool

THINK, END_THINK = "<think>", "</think>"
Call = tuple[str, dict[str, Any]]
# Reads the block of calls that begins at an index: its calls and the index after it, or None if it is malformed.
BlockReader = Callable[[str, int, Sequence[Tool] | None], tuple[list[Call], int] | None]


@dataclass
class ParsedTurn:
    """An assistant turn: the visible text, the thinking, and the calls (none if any of them is malformed)."""

    content: str
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


class TurnSyntax(Protocol):
    """The form of a family's assistant turns."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the control tokens that the parser needs in the text."""
        ...

    @property
    def single_call(self) -> bool:
        """Return whether a turn holds one call at most."""
        ...

    def read(self, text: str, *, is_thinking: bool, has_thinking: bool, tools: Sequence[Tool] | None) -> ParsedTurn:
        """Parse a turn's text.

        Args:
            text: The text up to the end of the turn.
            is_thinking: Whether the prompt ends in an open thinking part.
            has_thinking: Whether the model's template knows thinking; if not, <think> is plain text.
            tools: The tools that the model was offered, None if unknown. With none, calls are plain text.
        """
        ...


@dataclass(frozen=True)
class BlockSyntax:
    """Calls in blocks between two markers, with text before, between and after them; thinking in <think> tags."""

    start_mark: str
    end_mark: str
    read_block: BlockReader
    single_call: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the markers of calls and of thinking."""
        return (self.start_mark, self.end_mark, THINK, END_THINK)

    def read(self, text: str, *, is_thinking: bool, has_thinking: bool, tools: Sequence[Tool] | None) -> ParsedTurn:
        """Parse a turn's text."""
        marks = self.markers if has_thinking else self.markers[:2]
        return _BlockScanner(self, text, tools, is_thinking).scan(re.compile("|".join(map(re.escape, marks))))


class _BlockScanner:
    """Goes through a turn mark by mark; what a well-formed call contains is not looked at for marks."""

    def __init__(self, syntax: BlockSyntax, text: str, tools: Sequence[Tool] | None, is_thinking: bool) -> None:
        self.syntax, self.text, self.tools, self.is_thinking = syntax, text, tools, is_thinking
        # Visible text (False) and the raw text of calls (True), in order.
        self.visible: list[tuple[bool, str]] = []
        self.reasoning: list[str] = []
        self.calls: list[Call] = []
        self.malformed = False
        # A model may begin its thinking again although the prompt has.
        self.start = len(text) - len(text.lstrip().removeprefix(THINK)) if is_thinking else 0

    def scan(self, mark: re.Pattern[str]) -> ParsedTurn:
        position = 0
        while match := mark.search(self.text, position):
            position = self._thinking(match) if self.is_thinking else self._visible(match)
        self._take(len(self.text), len(self.text))
        if self.malformed or _offers_none(self.tools):
            return ParsedTurn("".join(text for _, text in self.visible), _joined(self.reasoning))
        content = "".join(text for is_call, text in self.visible if not is_call)
        return ParsedTurn(content, _joined(self.reasoning), self.calls)

    def _thinking(self, match: re.Match[str]) -> int:
        if match[0] == END_THINK:
            self._take(match.start(), match.end())
            self.is_thinking = False
        return match.end()

    def _visible(self, match: re.Match[str]) -> int:
        if match[0] == self.syntax.start_mark:
            block = self.syntax.read_block(self.text, match.start(), self.tools)
            if block is not None:
                calls, end = block
                self._take(match.start(), end)
                self.visible.append((True, self.text[match.start() : end]))
                self.calls += calls
                return end
        if match[0] == THINK:
            self._take(match.start(), match.end())
            self.is_thinking = True
        elif match[0] == END_THINK:
            # Without an opening mark everything before it was thinking, calls included.
            self._take(match.start(), match.end())
            self.reasoning.append("".join(text for _, text in self.visible))
            self.visible, self.calls, self.malformed = [], [], False
        else:
            self.malformed = True
        return match.end()

    def _take(self, end: int, next_start: int) -> None:
        text = self.text[self.start : end]
        if self.is_thinking:
            self.reasoning.append(text)
        else:
            self.visible.append((False, text))
        self.start = next_start


@dataclass(frozen=True)
class BareJsonSyntax:
    """Llama 3's form: the whole turn is one JSON object with ``name`` and ``parameters``."""

    markers: tuple[str, ...] = ("<|python_tag|>",)
    single_call: bool = True

    def read(self, text: str, *, is_thinking: bool, has_thinking: bool, tools: Sequence[Tool] | None) -> ParsedTurn:
        """Parse a turn's text."""
        body = text.strip().removeprefix("<|python_tag|>")
        value = _json_value(body, 0)
        if value is not None and not body[value[1] :].strip() and not _offers_none(tools):
            call = _checked_call(_with_arguments(value[0]))
            if call is not None:
                return ParsedTurn("", calls=[call])
        return ParsedTurn(text.replace("<|python_tag|>", ""))


def _with_arguments(value: object) -> object:
    """Rename Llama's keys: it writes ``parameters``, sometimes with ``"type": "function"``."""
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        return None
    if "parameters" in value and "arguments" in value:
        return None
    return {("arguments" if key == "parameters" else key): item for key, item in value.items() if key != "type"}


@dataclass(frozen=True)
class HarmonySyntax:
    """gpt-oss's form: messages with a channel each; a call is a commentary message to ``functions.NAME``.

    The model also writes calls on the analysis channel, which otherwise has its thinking.
    """

    markers: tuple[str, ...] = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
    single_call: bool = True

    def read(self, text: str, *, is_thinking: bool, has_thinking: bool, tools: Sequence[Tool] | None) -> ParsedTurn:
        """Parse a turn's text; the prompt ends after ``<|start|>assistant``."""
        visible: list[str] = []
        reasoning: list[str] = []
        calls: list[Call] = []
        malformed = _offers_none(tools)
        for message in re.split(r"<\|start\|>(?:assistant)?", text):
            header, mark, rest = message.partition("<|message|>")
            body = re.split(r"<\|end\|>|<\|call\|>", rest)[0]
            channel, recipient = _channel(header), _recipient(header)
            call = _harmony_call(channel, recipient, header, body) if mark else None
            if call and not malformed:
                calls.append(call)
            elif mark and channel == "analysis":
                reasoning.append(body)
            elif mark and not recipient:
                visible.append(body)
            elif message.strip():
                # A header without a message, or a call that cannot run.
                malformed = malformed or bool(recipient)
                visible.append(_without_marks(header if not mark else f"{header} {body}", self.markers))
        return ParsedTurn("\n".join(filter(str.strip, visible)), _joined(reasoning), [] if malformed else calls)


def _channel(header: str) -> str:
    match = re.search(r"<\|channel\|>\s*(\w+)", header)
    return match[1] if match else ""


def _recipient(header: str) -> str:
    match = re.search(r"\bto=(\S+?)(?=<\||\s|$)", header)
    return match[1] if match else ""


def _harmony_call(channel: str, recipient: str, header: str, body: str) -> Call | None:
    value = _json_value(body, 0)
    is_call = channel in {"commentary", "analysis"} and recipient.startswith("functions.") and header.count("to=") == 1
    if not is_call or value is None:
        return None
    arguments, end = value
    if body[end:].strip():
        return None
    return _checked_call({"name": recipient.removeprefix("functions."), "arguments": arguments})


def _without_marks(text: str, marks: Sequence[str]) -> str:
    return " ".join(re.sub("|".join(map(re.escape, marks)), " ", text).split())


def read_hermes(text: str, start: int, _: Sequence[Tool] | None) -> tuple[list[Call], int] | None:
    """Read ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""
    value = _json_value(text, start + len("<tool_call>"))
    if value is None:
        return None
    call = _checked_call(value[0])
    end = _end_of_mark(text, value[1], "</tool_call>")
    return None if call is None or end is None else ([call], end)


# A value that contains a mark of the form is refused: it can come from a parameter that was never closed.
_XML_MARK = re.compile(r"</?(?:parameter|function|tool_call)\b[=>]")
_XML_FUNCTION = re.compile(r"<tool_call>\s*<function=([^\s<>=]+)>\s*")
_XML_PARAMETER = re.compile(r"<parameter=([^\n<>]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_XML_END = re.compile(r"</function>\s*</tool_call>")


def read_xml(text: str, start: int, tools: Sequence[Tool] | None) -> tuple[list[Call], int] | None:
    """Read Qwen3-Coder's form: ``<function=NAME>`` with a ``<parameter=KEY>`` tag for each argument."""
    match = _XML_FUNCTION.match(text, start)
    if match is None:
        return None
    return _tagged_call(text, match.end(), match[1], (_XML_PARAMETER, _XML_END, _XML_MARK), tools)


_GLM_FUNCTION = re.compile(r"<tool_call>\s*([^\s<>]+)\s*")
_GLM_ARGUMENT = re.compile(r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
_GLM_END = re.compile(r"</tool_call>")
_GLM_MARK = re.compile(r"</?(?:arg_key|arg_value|tool_call)>")


def read_glm(text: str, start: int, tools: Sequence[Tool] | None) -> tuple[list[Call], int] | None:
    """Read GLM's form: the name, then ``<arg_key>`` and ``<arg_value>`` tags."""
    match = _GLM_FUNCTION.match(text, start)
    if match is None:
        return None
    return _tagged_call(text, match.end(), match[1], (_GLM_ARGUMENT, _GLM_END, _GLM_MARK), tools)


def _tagged_call(
    text: str, position: int, name: str, patterns: tuple[re.Pattern[str], ...], tools: Sequence[Tool] | None
) -> tuple[list[Call], int] | None:
    argument, end, mark = patterns
    properties = _properties(tools, name)
    arguments: dict[str, Any] = {}
    while match := argument.match(text, position):
        if match[1] in arguments or mark.search(match[2]):
            return None
        arguments[match[1]] = _typed(match[2], properties.get(match[1]), has_schema=bool(properties))
        position = match.end()
    last = end.match(text, position)
    call = _checked_call({"name": name, "arguments": arguments})
    return None if last is None or call is None else ([call], last.end())


def _properties(tools: Sequence[Tool] | None, name: str) -> Mapping[str, Any]:
    for tool in tools or ():
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def _typed(text: str, schema: object, *, has_schema: bool) -> object:
    """Return the value of an argument written as bare text: by its schema, else as JSON where it is JSON."""
    types = _types(schema)
    if has_schema and (not types or types == {"string"}):
        return text
    value: object = {"True": True, "False": False, "None": None}.get(text, text)
    if value is text:
        parsed = _json_value(text, 0)
        value = parsed[0] if parsed is not None and not text[parsed[1] :].strip() else text
    # A JSON string in quotes stays as it is written: the form writes texts without quotes.
    if isinstance(value, str):
        return text
    return value if not types or _type_names(value) & types else text


def _types(schema: object) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set(declared or [])
    for union in ("anyOf", "oneOf"):
        types = types.union(*map(_types, schema.get(union) or []))
    return types | ({"null"} if schema.get("nullable") else set())


def _type_names(value: object) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    names = {type(None): "null", float: "number", dict: "object", list: "array"}
    return {names.get(type(value), "string")}


_LFM_OPEN, _LFM_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_QUOTED = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)


def read_lfm(text: str, start: int, _: Sequence[Tool] | None) -> tuple[list[Call], int] | None:
    """Read LFM2's form: a list of Python calls with keyword arguments, ``[f(a='x'), g()]``."""
    end = text.find(_LFM_CLOSE, start)
    if end < 0:
        return None
    try:
        # LFM2.5's template writes line breaks in texts as they are.
        source = _QUOTED.sub(_escaped_lines, text[start + len(_LFM_OPEN) : end].strip())
        tree = ast.parse(source, mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else []
        calls = [_python_call(node) for node in nodes]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    results = [_checked_call(call) for call in calls]
    valid_calls = [call for call in results if call is not None]
    return None if not valid_calls or len(valid_calls) != len(results) else (valid_calls, end + len(_LFM_CLOSE))


def _escaped_lines(match: re.Match[str]) -> str:
    # A backslash that begins no escape is one: Python would warn.
    text = re.sub(r"\\(?![\\'\"nrtux])", r"\\\\", match[0])
    return text.replace("\n", "\\n").replace("\r", "\\r")


def _python_call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with keyword arguments")
    names = [keyword.arg for keyword in node.keywords]
    if None in names or len(set(names)) < len(names):
        raise ValueError("unpacked or repeated arguments")
    arguments = {keyword.arg: ast.literal_eval(_JsonNames().visit(keyword.value)) for keyword in node.keywords}
    return {"name": ast.unparse(node.func), "arguments": arguments}


class _JsonNames(ast.NodeTransformer):
    """Replaces JSON's constants, which the template writes inside objects, by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        constants = {"true": True, "false": False, "null": None}
        return ast.Constant(constants[node.id]) if node.id in constants else node


def _offers_none(tools: Sequence[Tool] | None) -> bool:
    return tools is not None and not tools


def _end_of_mark(text: str, position: int, mark: str) -> int | None:
    while position < len(text) and text[position].isspace():
        position += 1
    return position + len(mark) if text.startswith(mark, position) else None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Of a repeated key json keeps the last value only, so a part of the arguments would be lost.
    items = dict(pairs)
    if len(items) < len(pairs):
        raise ValueError("a key is repeated")
    return items


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)


def _json_value(text: str, position: int) -> tuple[object, int] | None:
    while position < len(text) and text[position].isspace():
        position += 1
    try:
        return _DECODER.raw_decode(text, position)
    except (ValueError, RecursionError):
        return None


def _checked_call(call: object) -> Call | None:
    """Return a call that consists of a name and an object of arguments that can be written as JSON text."""
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        return None
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        return None
    try:
        # Refuses NaN, infinite numbers and lone surrogates, which neither JSON nor UTF-8 can carry.
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        return None
    return name, arguments


def _joined(reasoning: Sequence[str]) -> str:
    return "\n".join(text.strip() for text in reasoning if text.strip())


HERMES: TurnSyntax = BlockSyntax("<tool_call>", "</tool_call>", read_hermes)
XML: TurnSyntax = BlockSyntax("<tool_call>", "</tool_call>", read_xml)
GLM: TurnSyntax = BlockSyntax("<tool_call>", "</tool_call>", read_glm)
LFM: TurnSyntax = BlockSyntax(_LFM_OPEN, _LFM_CLOSE, read_lfm)
BARE_JSON: TurnSyntax = BareJsonSyntax()
HARMONY: TurnSyntax = HarmonySyntax()
