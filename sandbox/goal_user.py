"""The user that speaks where a model is not asked: it states its goal, and then ends the conversation.

This file is copied into the sandbox container, where it speaks to the oracle, so it imports nothing beyond the standard
library. Equal requests get equal replies, which the checks of admission need.
"""

from collections.abc import Mapping
from typing import Any

# Messages of the user between two messages of the agent.
MAX_USER_TURNS = 4
GREETING = "Hello."


def goal_reply(request: Mapping[str, Any]) -> str:
    """Return the goal of a request (``sandbox.user.User``) first, and then the first text that ends a conversation."""
    is_greeted = any(message["role"] == "assistant" for message in request["messages"])
    if is_greeted and request.get("stops"):
        return str(request["stops"][0])
    return str(request.get("goal") or GREETING)
