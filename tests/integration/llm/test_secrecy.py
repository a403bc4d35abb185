"""The key goes to its server in one header and nowhere else, whatever the server does with it."""

import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from agents.errors import ModelError
from store.database import open_store, read_session, sqlite_url, write_session
from store.repositories.cycles import save_cycle
from store.repositories.llm_replies import list_replies
from tests.guard.sitecustomize import NetworkForbidden
from tests.integration.llm.llm_client import ANSWER, GOOD, KEY, ask, model, question, run
from tests.scripted_model import (
    Dropped,
    Message,
    NotJson,
    RecordedResponse,
    Refusal,
    ScriptedReply,
    Silence,
    Status,
    Text,
    Tool,
    Truncated,
    scripted_server,
)
from tests.unit.store.chain import CYCLE, T0
from traced.llm.connection import StoreLedger

BEARER = f"Bearer {KEY}"
EVENT = f'data: {{"error": {{"message": "{BEARER}", "code": 500}}}}\n\n'
ECHOES: list[ScriptedReply] = [
    *(Status(code, message=f"You sent {BEARER}.") for code in (307, 400, 401, 403, 404, 413, 422, 429, 500, 503)),
    Status(401, message="x" * 490 + KEY),  # a message that is cut in the middle of it
    Status(400, message=f"{KEY} is no model", error_code=KEY),
    Status(302, location=f"http://127.0.0.1:9/{KEY}/v1"),
    Status(429, message=BEARER, error_code="insufficient_quota"),
    RecordedResponse(f'{{"error": "{BEARER}"}}'.encode(), 401, "application/json"),
    RecordedResponse(BEARER.encode(), 502, "text/plain"),
    NotJson(BEARER.encode()),
    NotJson(EVENT.encode()),
    Refusal(f"I will not answer {KEY}."),
    Text(f"Your key is {KEY}, is it not?"),
    Text("x" * 30 + KEY),  # over two pieces
    Tool(f'{{"fault": "{KEY}", "message": 3}}'),
    Truncated(f'{{"fault": "{KEY}'),
    Message('{"fault": "nobody", "message": 3}', finish_reason=KEY),
    Dropped(source=BEARER * 20),
]


def with_locals(error: BaseException) -> str:
    """A traceback as tools show it that tell every variable; without the tests' own frames."""
    text = traceback.TracebackException.from_exception(error, capture_locals=True)
    text.stack = traceback.StackSummary([item for item in text.stack if "/tests/" not in item.filename])
    assert text.stack
    return "".join(text.format())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    model = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(model) as llm:
        save_cycle(llm, CYCLE)
    yield model
    model.dispose()


@pytest.mark.parametrize("echo", ECHOES, ids=lambda reply: f"{type(reply).__name__}-{getattr(reply, 'code', '')}")
def test_a_key_echoed_by_the_server_is_never_shown(
    echo: ScriptedReply, store: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with scripted_server(echo, key=KEY) as server:
        llm = model(server, ledger=StoreLedger(store, lambda: T0), patience_s=3.0)
        with pytest.raises(ModelError) as raised:
            ask(llm)
        assert server.headers[0]["authorization"] == BEARER
        assert KEY not in str(server.requests)  # it does not go back with a complaint either
    error = raised.value
    displayed = {
        "the error": f"{error} {error!r} {error.hint} {error.args}",
        "its traceback": with_locals(error),
        "the log": caplog.text,
        "the model": f"{llm!r} {vars(llm)} {llm.endpoint} {llm.transport!r} {vars(llm.transport)}",
    }
    assert [place for place, text in displayed.items() if KEY in text or KEY[:10] in text] == []
    store.dispose()
    assert [file.name for file in tmp_path.iterdir() if KEY.encode() in file.read_bytes()] == []


def test_a_stored_answer_has_the_key_redacted(store: Engine) -> None:
    with scripted_server(f"import os\nKEY = '{KEY}'\n") as server:
        ledger = StoreLedger(store, lambda: T0)
        assert run(model(server, ledger=ledger), lambda llm: llm.write(question())) == "import os\nKEY = '***'\n"
    with read_session(store) as llm:
        [retained] = list_replies(llm, "c1")
    assert retained.text == "import os\nKEY = '***'\n"


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_detour_is_not_followed(code: int) -> None:
    with (
        scripted_server(GOOD) as elsewhere,
        scripted_server(Status(code, location=f"{elsewhere.url}/chat/completions")) as server,
    ):
        with pytest.raises(ModelError, match=rf"status {code}.*redirects to {elsewhere.url}.*llm.base_url"):
            ask(model(server))
        assert (len(server.requests), elsewhere.connections) == (1, 0)


def test_an_interrupted_request_shows_no_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def stopped(llm: Any) -> None:
        raise KeyboardInterrupt

    with scripted_server(Silence(60)) as server, pytest.raises(KeyboardInterrupt) as raised:
        run(model(server), stopped)
    assert KEY not in with_locals(raised.value) + caplog.text


def test_a_key_goes_to_its_own_server_alone() -> None:
    with scripted_server(GOOD, key=KEY) as server:
        assert ask(model(server)) == ANSWER
        [headers] = server.headers
        assert [name for name, value in headers.items() if KEY in value] == ["authorization"]
        with pytest.raises(NetworkForbidden):
            ask(model(server, base_url="http://192.0.2.7/v1"))
