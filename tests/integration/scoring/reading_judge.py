"""A judge that reads: the script of a model's server."""

import json
from typing import Any


def verdict(outcome: str, reason: str = "I saw it") -> str:
    """An answer in form."""
    return json.dumps({"reason": reason, "outcome": outcome})


def by_words(body: dict[str, Any], nth: int) -> str:
    """An agent that is sorry failed."""
    text = body["messages"][1]["content"]
    return verdict("failure" if "sorry" in text else "success" if "done" in text else "unclear")
