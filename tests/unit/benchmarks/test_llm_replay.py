"""Recorded replies: they are found by the request's hash, and a changed request is named by it."""

import asyncio
import json
from pathlib import Path

import pytest
from pydantic import SecretStr

from agents.analyst.llm.critique import Critiques
from agents.errors import ModelDenied
from agents.llm.endpoint import Endpoint
from agents.llm.model import Model
from agents.llm.question import ChatMessage, InMemoryLedger, Purpose, Question
from benchmarks.llm_replay import AIRLINE, Replay, request_key
from tests.scripted_model import scripted_server


def ask(url: str, text: str) -> Critiques:
    async def work() -> Critiques:
        async with Model(Endpoint(url, "any", SecretStr("key")), InMemoryLedger()) as model:
            return await model.ask(Question(Purpose("c", "analyze"), (ChatMessage("user", text),)), Critiques)

    return asyncio.run(work())


def test_a_reply_is_found_by_its_request_and_a_changed_request_is_named_by_its_hash(tmp_path: Path) -> None:
    key, changed = (request_key({"messages": [{"role": "user", "content": text}]}) for text in ("Why?", "Why not?"))
    file = tmp_path / "replies.jsonl"
    file.write_text(json.dumps({"key": key, "kind": "Critiques", "reply": {"critiques": []}}) + "\n")
    replay = Replay(file)
    with scripted_server(replay) as server:
        assert replay.unused == {key}
        assert ask(server.url, "Why?").critiques == []
        assert replay.unused == set()
        with pytest.raises(
            ModelDenied, match=f"no reply is recorded for the request {changed}, which ends with: Why not"
        ):
            ask(server.url, "Why not?")
    assert replay.missing == [changed]


def test_the_recorded_replies_are_whole() -> None:
    replay = Replay(AIRLINE)
    kinds = [entry["kind"] for entry in replay.replies.values()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"Critiques": 7, "Candidates": 1, "Rows": 16}
    assert all(len(key) == 64 for key in replay.replies)
