"""Texts of tools as templates: what of an answer repeats the arguments of its call."""

import json
import re
from collections.abc import Sequence
from typing import Any

from agents.world.calls import AnsweredCall
from agents.world.values import at_path, fill, parts


def template_of(text: str, arguments: dict[str, Any]) -> str:
    """Return a text with the values of a call's arguments replaced by their paths."""
    values = []
    for path in parts(arguments, []):
        value = at_path(arguments, path)
        if isinstance(value, str | int | float) and not isinstance(value, bool) and len(str(value)) > 1:
            values.append((str(value), path))
    marks = {value: "{{" + json.dumps(path) + "}}" for value, path in values}
    # A text with braces of its own, such as a mail with "{{name}}", is no template.
    if not marks or "{{" in text:
        return text
    # Longest first, so that a value that contains another one is replaced as a whole.
    pattern = "|".join(re.escape(value) for value in sorted(marks, key=len, reverse=True))
    return re.sub(rf"(?<!\w)(?:{pattern})(?!\w)", lambda match: marks[match.group()], text)


def common_template(calls: Sequence[AnsweredCall]) -> str | None:
    """Return the template that gives the answer of every call, None if there is none."""
    for template in dict.fromkeys(template_of(call.text, call.arguments) for call in calls):
        if all(fill(template, call.arguments) == call.text for call in calls):
            return template
    return None
