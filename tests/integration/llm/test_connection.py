"""The model of the settings over real HTTP: those who ask at once share one line, and the context is the server's."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from agents.llm.budget import Budget
from agents.llm.question import ChatMessage, InMemoryLedger, Purpose, Question
from tests.integration.llm.llm_client import ANSWER, GOOD, Fault
from tests.scripted_model import Scripted, ScriptedReply, scripted_server
from traced.config.settings import Settings, load_settings
from traced.llm.connection import model


@pytest.fixture(autouse=True)
def clean_place(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def settings(server: Scripted, **extra: Any) -> Settings:
    selection = {"model": "scripted", "base_url": server.url, **extra}
    return load_settings(overrides={f"llm.{key}": value for key, value in selection.items()})


def purpose_question(capability: str, number: int) -> Question:
    message = (ChatMessage("user", f"{number} of {capability}"),)
    return Question(Purpose("c1", "synthesize", capability), message, max_tokens=100_000)


async def test_capabilities_that_ask_at_once_share_the_slots_and_no_budget() -> None:
    pair = threading.Barrier(2, timeout=60)

    def script(body: dict[str, Any], nth: int) -> ScriptedReply:
        pair.wait()  # until two are there
        return GOOD

    async def item(capability: str, with_settings: Settings, ledger: InMemoryLedger) -> None:
        async with model(with_settings, ledger, Budget(tokens=10**9)) as language_model:
            answers = await asyncio.gather(
                *(language_model.ask(purpose_question(capability, number), Fault) for number in range(4))
            )
        assert answers == [ANSWER] * 4

    async def all_at_once(server: Scripted) -> None:
        ledger, values = InMemoryLedger(), settings(server, concurrency=2)
        await asyncio.gather(*(item(name, values, ledger) for name in ("dates", "names", "sums")))
        await asyncio.gather(*(item(name, values, ledger) for name in ("tables", "words")))  # opened again
        assert ledger.usage(Purpose("c1", "synthesize", "dates")).calls == 4

    with scripted_server(script) as server:
        await all_at_once(server)
        assert (len(server.requests), server.most_at_once) == (20, 2)


async def test_the_servers_context_bounds_the_answer_once_it_is_available() -> None:
    async def repeat(server: Scripted) -> list[int]:
        for number in range(2):
            async with model(settings(server), InMemoryLedger()) as language_model:
                await language_model.ask(purpose_question("dates", number), Fault)
            server.models = [{"id": "scripted", "max_model_len": 1000}]
        return [body["max_completion_tokens"] for body in server.requests]

    with scripted_server(GOOD, models=[]) as server:
        unbounded, bounded = await repeat(server)
    assert unbounded == 100_000
    assert 500 < bounded < 1000


@pytest.mark.parametrize("limits", [{}, {"requests_per_minute": 1000}, {"tokens_per_minute": 10**6}])
async def test_a_pace_that_is_set_is_kept_beside_the_store_for_every_process(
    tmp_path: Path, limits: dict[str, int]
) -> None:
    async def single(server: Scripted) -> None:
        async with model(settings(server, **limits), InMemoryLedger()) as language_model:
            await language_model.ask(purpose_question("dates", 1), Fault)

    with scripted_server(GOOD) as server:
        await single(server)
    [*retained] = tmp_path.glob("traced-data/llm-pace-*.json")
    assert len(retained) == bool(limits)
    assert all([tokens for _, tokens, _ in json.loads(file.read_text())["begun"]] == [14] for file in retained)
