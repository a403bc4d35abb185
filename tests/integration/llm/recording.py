"""What a real server answers to each form of asking, recorded byte by byte; test_recorded.py replays it.

    KEY=... python -m tests.integration.llm.recording URL MODEL SERVER     writes tests/data/llm/CASE.json

URL ends in /v1; SERVER says in words what it is. Each file has the request as ``agents.llm`` makes it, and status, type
and body of the answer. The key is sent on and kept nowhere. Not covered: how a server behaves in time.
"""

import asyncio
import contextlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, SecretStr

from agents.errors import ModelError
from agents.llm.endpoint import Endpoint
from agents.llm.question import ChatMessage, Purpose, Question, Reply
from agents.llm.server import RawResponse, UnsupportedRequest
from agents.llm.transport import Transport
from tests.integration.llm.llm_client import Fault
from tests.scripted_model import RecordedResponse, ScriptedReply, scripted_server

FILES = Path(__file__).parents[2] / "data" / "llm"
SYSTEM = "You read a conversation and say whose fault its failure was, and the number of the message that shows it."
TEXT = 'm1 user: A blue cup, please.\nm2 agent: {"ordered": "red cup"}\nm3 user: I said blue.'


@dataclass(frozen=True)
class Case:
    """One request; ``way`` is a position in ``forms.OUTPUT_MODES``."""

    way: int = 0
    form: type[BaseModel] | None = Fault
    text: str = TEXT
    model: str = ""  # another than the server's
    max_tokens: int = 60


CASES = {
    "json_schema": Case(),
    "tool_call": Case(way=1),
    "json_in_text": Case(way=2),
    "text": Case(form=None, text="Write one sentence about cups.", max_tokens=40),
    "cut_off": Case(max_tokens=4),
    "too_long": Case(text="cup " * 6000),
    "no_such_model": Case(model="no-such-model"),
    "wrong_key": Case(),
}


def read_recording(name: str) -> dict[str, Any]:
    """A recording."""
    result: dict[str, Any] = json.loads((FILES / f"{name}.json").read_text("utf-8"))
    return result


async def send(url: str, model: str, case: Case, key: str = "none") -> tuple[Reply, RawResponse]:
    """Ask as ``agents.llm`` does, once."""
    line = Transport(Endpoint(url, case.model or model, SecretStr(key), patience_s=0.0))
    message = (ChatMessage("system", SYSTEM), ChatMessage("user", case.text))
    schema = case.form.model_json_schema() if case.form else None
    return await line.send_in_mode(
        case.way, Question(Purpose("", "record"), message, max_tokens=case.max_tokens), schema
    )


def record(url: str, model: str, server: str, name: str, key: str) -> None:
    """Pass a case's request on to a real server and keep what it answers."""

    def pass_on(body: dict[str, Any], nth: int) -> ScriptedReply:
        headers = {"Authorization": f"Bearer {'wrong' if name == 'wrong_key' else key}"}
        result = httpx.post(f"{url}/chat/completions", json=body, headers=headers, timeout=600)
        kind = result.headers["content-type"]
        retained = {"server": server, "request": body, "status": result.status_code, "type": kind, "body": result.text}
        FILES.mkdir(parents=True, exist_ok=True)
        (FILES / f"{name}.json").write_text(json.dumps(retained, indent=1, ensure_ascii=False) + "\n", "utf-8")
        return RecordedResponse(result.content, result.status_code, kind)

    with scripted_server(pass_on) as between, contextlib.suppress(ModelError, UnsupportedRequest):
        print(name, asyncio.run(send(between.url, model, CASES[name]))[0])


if __name__ == "__main__":
    url, model, server = sys.argv[1:4]
    for case in CASES:
        record(url, model, server, case, os.environ.get("KEY", "none"))
