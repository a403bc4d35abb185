"""Tokens that are changed while somebody is there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from store.database import write_session
from store.records import Event
from store.repositories.events import save_event
from tests.integration.service.api_server import OPERATOR, READER, expect_refusal
from tests.unit.store.chain import T0
from traced.api.application import control_api
from traced.api.auth import by_token, listening, tcp_socket
from traced.api.control import Control
from traced.api.monitoring import Parts, prometheus
from traced.app.service import Tokens, tokens_of
from traced.client import Client
from traced.config.settings import Settings, load_settings


@pytest.fixture
def tokens(control: Control, tmp_path: Path) -> Tokens:
    """Tokens in the files named by the settings; a reload of the settings reads them again."""
    files = {"operator": OPERATOR, "read": READER}
    overrides = {f"api.{name}_token_file": str(tmp_path / name) for name in files}
    for name, token in files.items():
        (tmp_path / name).write_text(token)
    daemon_tokens = Tokens(tokens_of(load_settings(tmp_path, overrides).api))

    def read_again(settings: Settings) -> list[str]:
        daemon_tokens.roles = tokens_of(settings.api)
        return ["tokens"]

    control.reread = lambda: load_settings(tmp_path, overrides)
    control.apply = read_again
    return daemon_tokens


@asynccontextmanager
async def on_tcp(control: Control, tokens: Tokens) -> AsyncIterator[tuple[Client, Client]]:
    """Serve the API on a TCP port and yield the clients of an operator and a reader."""
    app = control_api(control, by_token(lambda: tokens.roles), Parts({}), partial(prometheus, control))
    listener = tcp_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with (
        listening(app, listener),
        Client(url=url, token=OPERATOR) as operator,
        Client(url=url, token=READER) as reader,
    ):
        yield operator, reader


def happen(control: Control, kind: str) -> None:
    with write_session(control.store) as session:
        save_event(session, Event(T0, kind, "desk"))


async def test_a_door_takes_the_tokens_of_the_moment(control: Control, tokens: Tokens, tmp_path: Path) -> None:
    async with on_tcp(control, tokens) as (operator, reader):
        await reader.status()
        (tmp_path / "read").write_text("n" * 30)
        assert (await operator.reload()).detail["read_again"] == ["tokens"]
        assert (await expect_refusal(reader.status())).status == 401
        await operator.status()


@pytest.mark.parametrize("busy", [False, True])
def test_a_token_that_is_taken_back_hears_nothing_more(
    control: Control, tokens: Tokens, tmp_path: Path, *, busy: bool
) -> None:
    async def follow() -> list[str]:
        async with on_tcp(control, tokens) as (operator, reader):
            happen(control, "before")
            async with aclosing(reader.listen(0, present=True)) as stream, aclosing(operator.listen(0)) as other:
                kinds = [(await anext(stream)).kind]
                (tmp_path / "read").write_text("n" * 30)
                await operator.reload()
                happening = asyncio.create_task(without_end()) if busy else None
                happen(control, "after")
                kinds += [event.kind async for event in stream]
                while (await anext(other)).kind != "after":
                    pass  # a client with a valid token stays connected
                if happening is not None:
                    happening.cancel()
            assert (await expect_refusal(anext(reader.events(0)))).status == 401
        return kinds

    async def without_end() -> None:
        while True:
            await asyncio.to_thread(happen, control, "noise")

    kinds = asyncio.run(asyncio.wait_for(follow(), 60))
    assert kinds[0] == "before"
    assert {"after", "noise"}.isdisjoint(kinds)
