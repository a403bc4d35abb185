"""Records that a full disk did not take: counted on that disk, in the store, and shown until acknowledged."""

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner

from store.database import open_store, read_session, sqlite_url
from store.repositories.events import list_audit, list_events
from tests.integration.gateway.place import RunningGateway, running_gateway
from tests.waiting import eventually_async
from traced.cli.main import app
from traced.config.settings import load_settings
from traced.gateway.recorder import RECORDS_LOST, Recorder
from traced.ingest.losses import CALLS, EXCHANGES, LINES, read_losses


async def run(tmp_path: Path, check: Callable[[RunningGateway], Coroutine[Any, Any, None]], **kind: Any) -> None:
    async with running_gateway(tmp_path, **kind) as gateway:
        await check(gateway)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The spool of the data directory, on a small file system of its own."""
    spool = tmp_path / "spool"
    spool.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(spool)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield spool
    subprocess.run(["umount", "-l", str(spool)], check=True)


def fill(folder: Path) -> Path:
    path = folder / "fill"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as stream:
        while True:
            stream.write(b"\0" * 4096)
    return path


def run_command(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--data-dir", str(tmp_path), "--json"])
    assert result.exit_code in (0, 1), result.output
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


def doctor_finds(tmp_path: Path) -> bool:
    findings = {finding["name"]: finding for finding in run_command(tmp_path, "doctor")["findings"]}
    return not findings["records"]["ok"]


def event_details(store: Engine) -> list[dict[str, Any]]:
    with read_session(store) as session:
        return [dict(event.detail) for event in list_events(session) if event.kind == RECORDS_LOST]


@pytest.mark.slow
@pytest.mark.optional
async def test_losses_on_a_full_disk_outlive_the_router_until_acknowledged(tmp_path: Path, small_disk: Path) -> None:
    async def lose(gateway: RunningGateway) -> None:
        assert "losses" not in (await gateway.http.get("/ready")).json()
        filling = fill(small_disk)
        for _ in range(3):
            assert (await gateway.ask("base")).status_code == 200
        # On the full disk itself: a killed router has lost none of the count.
        assert read_losses(small_disk)[EXCHANGES].count == 3
        assert "No space left" in read_losses(small_disk)[EXCHANGES].reason
        await eventually_async(lambda: event_details(gateway.store))
        filling.unlink()

    async def after_a_restart(gateway: RunningGateway) -> None:
        assert (await gateway.ask("base")).status_code == 200
        losses = (await gateway.http.get("/ready")).json()["losses"]
        assert losses.startswith("3 exchanges lost, the last at ")
        assert "traced records acknowledge" in losses
        (detail,) = event_details(gateway.store)
        assert detail[EXCHANGES]["count"] == 3
        status = await asyncio.to_thread(run_command, tmp_path, "status")
        assert status["router"]["losses"].startswith("3 exchanges lost")
        assert await asyncio.to_thread(doctor_finds, tmp_path)
        answer = await asyncio.to_thread(run_command, tmp_path, "records", "acknowledge", "--reason", "disk replaced")
        assert answer == {"acknowledged": {EXCHANGES: 3}}
        assert "losses" not in (await gateway.http.get("/ready")).json()
        assert not await asyncio.to_thread(doctor_finds, tmp_path)
        with read_session(gateway.store) as session:
            (entry,) = (entry for entry in list_audit(session) if entry.action == "acknowledge losses")
        assert (entry.reason, str(entry.detail["losses"])[:16]) == ("disk replaced", "3 exchanges lost")

    await run(tmp_path, lose)
    await run(tmp_path, after_a_restart)


async def test_unusable_spans_and_damaged_lines_are_losses(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        span = {
            "traceId": "0" * 31 + "1",
            "spanId": "0" * 15 + "1",
            "name": "chat",
            "attributes": [{"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}}],
        }
        body = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
        assert (await gateway.http.post("/v1/traces", json=body)).status_code == 200
        (tmp_path / "spool" / "exchanges-1-dead-1.jsonl").write_text('{"id": "half\n')
        await eventually_async(lambda: {CALLS, LINES} <= set(read_losses(tmp_path / "spool")))
        losses = (await gateway.http.get("/ready")).json()["losses"]
        assert "1 unreadable recorded exchanges" in losses
        assert "1 unusable calls in spans" in losses
        metrics = (await gateway.http.get("/metrics")).text
        assert 'traced_router_unacknowledged_losses{kind="lines"} 1.0' in metrics

    await run(tmp_path, check, settings={"serving.span_wait_s": 0})


def test_losses_are_stored_once(tmp_path: Path) -> None:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    try:
        (tmp_path / "spool").mkdir()
        for number in range(2):
            (tmp_path / "spool" / f"exchanges-1-dead-{number}.jsonl").write_text("{\n" * (number + 1))
            recorder = Recorder(load_settings(tmp_path), store)
            for _ in range(2):
                recorder.run_once()
        assert [detail[LINES]["count"] for detail in event_details(store)] == [1, 2]
        assert read_losses(tmp_path / "spool")[LINES].count == 3
    finally:
        store.dispose()
