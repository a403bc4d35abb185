"""Tokens of persons, added and revoked while the service runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta

import pytest
from sqlalchemy import inspect, text

from store.database import read_session, write_session
from store.records import Event
from store.repositories.events import list_audit, save_event
from store.repositories.tokens import revoke_token
from tests.integration.service.api_server import OPERATOR, READER, expect_refusal, on_tcp
from tests.unit.store.chain import T0
from traced.api.control import Control
from traced.api.tokens import create_token, hash_token, withdraw_token
from traced.client import Client
from traced.client.models import Reason
from traced.registry.decision_rules import Action

ROOT = Action("root", "local", T0)


@asynccontextmanager
async def two_clients(control: Control) -> AsyncIterator[tuple[Client, Client]]:
    """Serve the API on a TCP port and yield the clients of an operator and a viewer."""
    async with on_tcp(control, OPERATOR) as operator, on_tcp(control, READER) as viewer:
        yield operator, viewer


def revoke(control: Control) -> None:
    with write_session(control.store) as session:
        revoke_token(session, "vic", at=T0)


def save(control: Control, kind: str) -> None:
    with write_session(control.store) as session:
        save_event(session, Event(T0, kind, "desk"))


async def test_a_token_is_valid_at_once_and_refused_once_it_is_revoked(control: Control) -> None:
    with write_session(control.store) as session:
        token = create_token(session, ROOT, "bob", "operator")
    async with on_tcp(control, token) as client:
        assert (await client.status()).role == "operator"
        await client.pause("lunch")
        with write_session(control.store) as session:
            withdraw_token(session, ROOT, "bob")
        assert (await expect_refusal(client.status())).status == 401
        assert (await expect_refusal(client.resume())).status == 401
        with write_session(control.store) as session:
            second_token = create_token(session, Action("root", "local", T0 + timedelta(hours=1)), "bob", "viewer")
        assert (await expect_refusal(client.status())).status == 401
    async with on_tcp(control, second_token) as client:
        assert (await expect_refusal(client.resume())).status == 403
    with read_session(control.store) as session:
        entries = [(entry.who, entry.role, entry.action, entry.subject) for entry in list_audit(session)][::-1]
    assert entries == [
        ("root", "local", "add token", "bob"),
        ("bob", "operator", "pause", control.target),
        ("root", "local", "revoke token", "bob"),
        ("root", "local", "add token", "bob"),
    ]


async def test_a_token_is_neither_stored_nor_logged(control: Control, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        with write_session(control.store) as session:
            token = create_token(session, ROOT, "bob", "admin")
        async with on_tcp(control, token) as client:
            await client.pause("lunch")
            await client.reload()
            await expect_refusal(client.cancel("c9"))
            await anext(client.events(0))
            responses = [str(view) for view in (await client.audit(), await client.status())]
    with control.store.connect() as connection:
        names = inspect(connection).get_table_names()
        rows = [str(connection.execute(text(f"SELECT * FROM {name}")).all()) for name in names]
    assert hash_token(token) in "".join(rows)
    assert not [content for content in (caplog.text, *responses, *rows) if token in content]


async def test_a_claimed_name_is_not_that_of_the_audit_log(control: Control) -> None:
    async with two_clients(control) as (operator, viewer):
        assert (await expect_refusal(viewer.reload(actor="ada"))).status == 403
        await operator._daemon.post("/pause", Reason(who="ada", reason="lunch"))
        [entry] = await operator.audit()
        assert (entry.who, entry.role, entry.detail) == ("olga", "operator", {"on_behalf_of": "ada"})
        assert (await operator.status()).target.paused_by == "olga, on behalf of ada"


@pytest.mark.parametrize("busy", [False, True])
def test_a_revoked_token_gets_no_further_events(control: Control, *, busy: bool) -> None:
    async def follow() -> list[str]:
        async with two_clients(control) as (operator, viewer):
            save(control, "before")
            async with aclosing(viewer.listen(0, present=True)) as stream, aclosing(operator.listen(0)) as other:
                kinds = [(await anext(stream)).kind]
                revoke(control)
                noise = asyncio.create_task(without_end()) if busy else None
                save(control, "after")
                kinds += [event.kind async for event in stream]
                while (await anext(other)).kind != "after":
                    pass  # a client with a valid token stays connected
                if noise is not None:
                    noise.cancel()
            assert (await expect_refusal(anext(viewer.events(0)))).status == 401
        return kinds

    async def without_end() -> None:
        while True:
            await asyncio.to_thread(save, control, "noise")

    kinds = asyncio.run(asyncio.wait_for(follow(), 60))
    assert kinds[0] == "before"
    assert {"after", "noise"}.isdisjoint(kinds)
