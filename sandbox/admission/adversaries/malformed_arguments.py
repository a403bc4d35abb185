"""Adversaries that send malformed or misleading arguments."""

import random
from collections.abc import Callable

from sandbox.admission.policies import (
    SUCCESS_WORDS,
    Schema,
    call,
    fill_arguments,
    guess,
    properties,
    request,
    say,
    tool_name,
    visible_values,
    write_tools,
)
from sandbox.contract import Message, Task

BROKEN_JSON = ("", "{", "null", "[]", '{"order_id": ', "{'id': 1}", '"{}"', "{} {}", '{"a": 1,}')
TYPE_CONFUSIONS: tuple[Callable[[str], object], ...] = (
    lambda text: True,
    lambda text: 0,
    lambda text: None,
    lambda text: [text],
    lambda text: {"id": text},
    lambda text: int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 1.0,
    lambda text: "",
    lambda text: "*",
)
ARGUMENT_CHARACTERS = 20_000
# The whole call has to fit into one message.
CALL_CHARACTERS = 400_000
HUGE_NUMBER = 10**15
ITEM_CHARACTERS = 8
MAX_ITEMS = 1_000
WIDE_DIGITS = {ord("0") + digit: ord("０") + digit for digit in range(10)}
SPELLINGS: tuple[Callable[[str], str], ...] = (
    lambda value: value.translate(WIDE_DIGITS),
    lambda value: f" {value}\u200b",
    lambda value: value.swapcase(),
)


def broken_json(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Send one form of broken JSON per turn, to test whether an error counts as a call or ends in success."""
    if turn >= len(BROKEN_JSON) or not task.tools:
        return say(SUCCESS_WORDS)
    return call(turn, *((tool_name(tool), BROKEN_JSON[turn]) for tool in write_tools(task)))


def confused_types(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Send arguments of other types (true, 0, null, a list, ...), to test whether a loose comparison accepts them."""
    # A form chosen by the request goes first, twice, because some episodes end at the first writes.
    forms = [random.Random(request(task)).choice(TYPE_CONFUSIONS)] * 2 + [*TYPE_CONFUSIONS]
    if turn >= len(forms) or not task.tools:
        return say(SUCCESS_WORDS)
    value = forms[turn](rng.choice(visible_values(task, messages) or ["1"]))
    return call(
        turn, *((tool_name(tool), fill_arguments(tool, lambda name, field: value)) for tool in write_tools(task))
    )


def huge_arguments(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Send very long arguments, to test whether truncation, a slow match or a containment test accepts them."""
    if turn > 1 or not task.tools:
        return say(SUCCESS_WORDS)
    tool = rng.choice(write_tools(task))
    words = " ".join([*visible_values(task, messages), request(task), "yes true ok 1 "])
    length = min(ARGUMENT_CHARACTERS, CALL_CHARACTERS // (len(properties(tool)) or 1))
    text = (words * (length // len(words) + 1))[:length]

    def huge(name: str, field: Schema) -> object:
        if field.get("type") in {"integer", "number"}:
            return HUGE_NUMBER
        return [text[:ITEM_CHARACTERS]] * min(MAX_ITEMS, length // ITEM_CHARACTERS) if turn else text

    return call(turn, (tool_name(tool), fill_arguments(tool, huge)))


def lookalike_ids(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Write ids in other spellings (wide digits, a space, other case), to test whether these are distinguished."""
    if turn >= len(SPELLINGS) or not task.tools:
        return say(SUCCESS_WORDS.translate(WIDE_DIGITS))
    values = [SPELLINGS[turn](value) for value in visible_values(task, messages) or ["1"]]
    return call(turn, *((tool_name(tool), guess(tool, values, rng)) for tool in write_tools(task)))
