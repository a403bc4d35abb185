"""How a conversation opens: what a router decides on."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

M = TypeVar("M", bound=Mapping[str, object])


def opening_messages(messages: Sequence[M]) -> list[M]:
    """The messages before the assistant first answers a user."""
    asked = False
    for index, message in enumerate(messages):
        if asked and message.get("role") == "assistant":
            return list(messages[:index])
        asked = asked or message.get("role") == "user"
    return list(messages)
