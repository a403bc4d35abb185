"""A request that is repeated with its idempotency key changes nothing, whatever other people did in the meantime."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, text

from store.database import read_session, write_session
from store.repositories.events import list_audit
from store.repositories.promotions import live_adapters
from store.repositories.requests import end_request
from tests.integration.service.api_server import expect_refusal, serve_api
from tests.integration.service.conftest import RecordingLoop
from traced.api.control import Control
from traced.api.queries import DECISIONS
from traced.client import Client, NoDaemon

ADAPTER = "date-reasoning@v1"  # it is live


def live(control: Control) -> list[str]:
    with read_session(control.store) as session:
        return [promotion.adapter for promotion in live_adapters(session)]


def actions(control: Control) -> list[str]:
    with read_session(control.store) as session:
        return [entry.action for entry in list_audit(session)][::-1]


async def send(client: Client, path: str, key: str, **body: Any) -> dict[str, Any]:
    return dict((await client._daemon.ask("POST", path, body=body, key=key)).json())


async def test_a_repeated_approval_does_not_undo_the_rollback_of_another_person(control: Control, path: Path) -> None:
    async with serve_api(control, path) as client:
        await client.roll_back(ADAPTER)
        tag = (await client.approvals.case(ADAPTER)).tag
        first = await send(client, f"/adapters/{ADAPTER}/approve", "k1", reason="good", tag=tag)
        assert live(control) == [ADAPTER]
        await client.roll_back(ADAPTER, "complaints", "bob")
        assert await send(client, f"/adapters/{ADAPTER}/approve", "k1", reason="good", tag=tag) == first
    assert live(control) == []
    assert actions(control) == ["rollback", "approve", "rollback"]


async def test_a_repeated_rollback_does_not_undo_a_later_approval(control: Control, path: Path) -> None:
    async with serve_api(control, path) as client:
        first = await send(client, "/rollback", "k1")
        assert first["subject"] == ADAPTER
        await client.approve(ADAPTER, tag=(await client.approvals.case(ADAPTER)).tag)
        assert await send(client, "/rollback", "k1") == first
    assert live(control) == [ADAPTER]


async def test_a_repeated_request_that_changed_nothing_changes_nothing_either(control: Control, path: Path) -> None:
    async with serve_api(control, path) as client:
        await send(client, f"/adapters/{ADAPTER}/approve", "k1")  # it is live already
        await client.roll_back(ADAPTER)
        assert (await send(client, f"/adapters/{ADAPTER}/approve", "k1"))["live"] == [ADAPTER]
    assert (live(control), actions(control)) == ([], ["rollback"])


async def test_a_repeated_pause_does_not_stop_a_cycle_that_was_resumed(
    control: Control, path: Path, loop: RecordingLoop
) -> None:
    loop.running = "c1"
    async with serve_api(control, path) as client:
        await send(client, "/pause", "k1")
        await client.resume()
        loop.running = "c1"
        await send(client, "/pause", "k1")
        assert (await client.status()).target.paused_at is None
    assert loop.calls == ["stop c1", "wake"]


async def test_a_response_that_version_0_1_0_has_stored_is_returned(control: Control, path: Path) -> None:
    async with serve_api(control, path) as client:
        first = await send(client, "/pause", "k1")
        with write_session(control.store) as session:
            end_request(session, "k1", {"said": first["message"], "subject": first["subject"]})
        assert await send(client, "/pause", "k1") == first


async def test_a_key_belongs_to_one_request(control: Control, path: Path) -> None:
    async with serve_api(control, path) as client:
        await send(client, f"/adapters/{ADAPTER}/rollback", "k1", reason="complaints")
        for target, reason in (("/rollback", "complaints"), (f"/adapters/{ADAPTER}/rollback", "other")):
            refusal = await expect_refusal(send(client, target, "k1", reason=reason))
            assert (refusal.status, refusal.hint) == (422, "Idempotency-Key")
            assert "was used for another request" in refusal.message
        assert (await expect_refusal(send(client, "/rollback", "k" * 201))).status == 422


async def test_concurrent_repetitions_are_one_act(on_either: Engine, control: Control, path: Path) -> None:
    control = replace(control, store=on_either)
    async with serve_api(control, path) as client:
        answers = await asyncio.gather(*(send(client, "/cycles", "k1", reason="now") for _ in range(20)))
    assert {answer["message"] for answer in answers} == {answers[0]["message"]}
    assert actions(control) == ["start"]


async def test_a_refused_request_stays_refused(control: Control, path: Path) -> None:
    async with serve_api(control, path) as client:
        await client.pause()
        first = await expect_refusal(send(client, "/cycles", "k1"))
        await client.resume()
        # A repetition may arrive after the answer, when the state would permit it.
        second = await expect_refusal(send(client, "/cycles", "k1"))
        assert (second.status, second.message, second.hint) == (409, first.message, first.hint)
        assert (await expect_refusal(send(client, "/adapters/nothing@v1/approve", "k2"))).status == 404
        assert (await expect_refusal(send(client, "/adapters/nothing@v1/approve", "k2"))).status == 404
        assert "starts" in (await send(client, "/cycles", "k3"))["message"]
    assert actions(control) == ["pause", "resume", "start"]


async def test_the_clients_own_repetition_after_a_lost_connection_is_one_act(control: Control, tmp_path: Path) -> None:
    """A proxy carries the first request out and then drops its connection without the response."""
    requests = 0

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        request = await reader.read(65_536)
        to_daemon, from_daemon = await asyncio.open_unix_connection(tmp_path / "daemon.sock")
        from_daemon.write(request)
        response = await to_daemon.read(65_536)
        if requests:
            writer.write(response)
            await writer.drain()
        requests += 1
        from_daemon.close()
        writer.close()

    async with serve_api(control, tmp_path / "daemon.sock"):
        proxy = await asyncio.start_unix_server(forward, tmp_path / "proxy.sock")
        async with proxy, Client(tmp_path / "proxy.sock") as client:
            assert "starts" in (await client.start_cycle("now")).message
    assert (requests, actions(control)) == (2, ["start"])


async def test_requests_whose_clients_have_gone_do_not_keep_the_service_busy(control: Control, path: Path) -> None:
    """The store is locked, and clients give up and repeat: reading goes on, and what nobody waits for is dropped."""
    async with serve_api(control, path) as client:
        with write_session(control.store) as session:
            session.execute(text("SELECT 1"))  # takes the lock
            async with Client(path, timeout_s=0.2) as hasty:
                requests = [send(hasty, "/cycles", f"k{number}") for number in range(60)]
                outcomes = await asyncio.gather(*requests, return_exceptions=True)
            assert all(isinstance(outcome, NoDaemon) for outcome in outcomes)
            async with asyncio.timeout(5):
                assert (await client.status()).state == "ready"
        assert "starts" in (await send(client, "/cycles", "last"))["message"]
    # Only those that had a slot when the lock was taken are carried out.
    assert len(actions(control)) <= DECISIONS + 1
