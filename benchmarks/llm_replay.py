"""A model's server that answers from a file of replies, so that an analysis can be repeated without the model.

The file has one JSON object per line: ``key``, the SHA-256 of the request's roles and texts (``request_key``),
``kind``, the title of the requested schema, and ``reply``, the answer as a JSON object. Neither the model's name nor
the sampling is part of the key. A request that is not in the file is refused with its key: the prompt, the
conversations or the settings have changed, and the question has to be answered anew.

    with scripted_server(Replay(AIRLINE)) as server: ...    # set llm.base_url to server.url
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.scripted_model import ScriptedReply, Status

# 28 tau-bench conversations of the airline domain (see benchmarks.analyst_cost for their selection), read by a person's
# assistant in place of a model.
AIRLINE = Path(__file__).parent / "records" / "airline-analyst.jsonl"


def request_key(body: dict[str, Any]) -> str:
    """Return the key of a request of the chat completions protocol."""
    messages = [[message["role"], message["content"]] for message in body["messages"]]
    return hashlib.sha256(json.dumps(messages).encode()).hexdigest()


class Replay:
    """A script for ``tests.scripted_model.scripted_server``; ``unused`` has the keys that nobody asked for yet."""

    def __init__(self, path: Path) -> None:
        lines = path.read_text("utf-8").splitlines()
        self.replies: dict[str, dict[str, Any]] = {entry["key"]: entry for entry in map(json.loads, lines)}
        self.unused = set(self.replies)
        self.missing: list[str] = []

    def __call__(self, body: dict[str, Any], nth: int) -> ScriptedReply:
        """Return the reply to a request, or refuse it with its key."""
        key = request_key(body)
        self.unused.discard(key)
        if key not in self.replies:
            self.missing.append(key)
            ending = str(body["messages"][-1]["content"]).splitlines()[-1][:200]
            # Not 400, on which a client tries other ways to ask the same.
            return Status(404, message=f"no reply is recorded for the request {key}, which ends with: {ending}")
        reply: dict[str, Any] = self.replies[key]["reply"]
        return reply
