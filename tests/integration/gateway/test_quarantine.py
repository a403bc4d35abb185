"""A router and the bytes of its adapters: no changed file is loaded, and a version in quarantine takes no traffic."""

import logging
from datetime import UTC, datetime
from pathlib import Path

import pytest

from store.database import read_session, write_session
from store.records import PromotionState
from store.repositories import promotions
from store.repositories.adapters import end_quarantine, quarantined_adapters
from store.repositories.events import due_notices, list_events
from tests.integration.gateway.place import V1, V2, RunningGateway, running_gateway, until_offered
from tests.unit.registry.tampering import WEIGHTS, flip_byte, replace_weights
from tests.waiting import eventually_async
from traced.daemon.scrub import scrub
from traced.registry.integrity import QUARANTINED

HOOK = {"notify.commands": [{"name": "tell", "argv": ["true"]}]}


def now() -> datetime:
    return datetime.now(UTC)


async def model_of(gateway: RunningGateway, name: str) -> str:
    response = await gateway.ask(headers={"X-Traced-Conversation": name})
    return response.headers["X-Traced-Model"]


def quarantined(gateway: RunningGateway) -> dict[str, str]:
    with read_session(gateway.store) as session:
        return quarantined_adapters(session)


async def test_replaced_weights_are_not_loaded_when_the_router_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_gateway(tmp_path, live=V1, settings=HOOK) as gateway:
        assert await model_of(gateway, "before") == V1
    replace_weights(tmp_path / "adapters" / V1)
    with caplog.at_level(logging.ERROR):
        async with running_gateway(tmp_path, settings=HOOK) as gateway:
            assert (await model_of(gateway, "before"), await model_of(gateway, "after")) == ("base", "base")
            assert gateway.engine.loads == []
            assert WEIGHTS in quarantined(gateway)[V1]
            with read_session(gateway.store) as session:
                kinds = [event.kind for event in list_events(session)]
                notices = due_notices(session, ["tell"], at=now(), longest_wait=now() - now())
                assert promotions.list_promotions(session, V1)[-1].state is PromotionState.LIVE
            assert kinds.count(QUARANTINED) == 1
            assert [notice.body["subject"] for notice in notices] == [V1]
    assert f"{V1} is in quarantine and takes no traffic" in caplog.text


@pytest.mark.parametrize("is_readable", [True, False], ids=["where the cycles wrote it", "nowhere"])
async def test_a_folder_that_only_the_engines_see_is_verified_where_the_cycles_wrote_it(
    tmp_path: Path, is_readable: bool
) -> None:
    settings = {"serving.adapters_root": "/mnt/engines"}
    async with running_gateway(tmp_path, settings=settings) as gateway:
        if not is_readable:
            (tmp_path / "adapters").rename(tmp_path / "elsewhere")
        gateway.promote(V1)
        if is_readable:
            await until_offered(gateway, V1)
            assert gateway.engine.adapters == {V1: f"/mnt/engines/adapters/{V1}"}
            return

        async def refusal() -> str:
            return str((await gateway.http.get("/ready")).json().get("refused_adapters", {}).get(V1, ""))

        await eventually_async(refusal)
        assert "the router reads an adapter before an engine does" in await refusal()
        assert (gateway.engine.loads, quarantined(gateway)) == ([], {})


async def test_an_engine_that_was_restarted_gets_no_replaced_weights(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, live=V1) as gateway:
        assert await model_of(gateway, "c") == V1
        replace_weights(tmp_path / "adapters" / V1)
        gateway.engine.adapters.clear()
        await until_offered(gateway, V1, is_offered=False)
        await eventually_async(lambda: V1 in quarantined(gateway))
        assert await model_of(gateway, "c") == "base"
        assert gateway.engine.loads == [V1]


@pytest.mark.slow
async def test_what_the_scrub_finds_leaves_the_running_router_for_what_a_rollback_would_restore(
    tmp_path: Path,
) -> None:
    async with running_gateway(tmp_path, live=V1) as gateway:
        gateway.promote(V2)
        await until_offered(gateway, V2)
        assert await model_of(gateway, "c") == V2
        flip_byte(tmp_path / "adapters" / V2 / WEIGHTS)
        scrub(gateway.store, [], now)
        await until_offered(gateway, V2, is_offered=False)
        assert (await model_of(gateway, "c"), await model_of(gateway, "d")) == (V1, V1)
        assert (await gateway.ask(V2)).status_code == 404
        await eventually_async(lambda: list(gateway.engine.adapters) == [V1])
    # After a restart as well.
    async with running_gateway(tmp_path) as gateway:
        assert (await model_of(gateway, "c"), await model_of(gateway, "e")) == (V1, V1)
        assert gateway.engine.loads == [V1]
        flip_byte(tmp_path / "adapters" / V2 / WEIGHTS)
        with write_session(gateway.store) as session:
            end_quarantine(session, V2)
        await until_offered(gateway, V2)
        assert await model_of(gateway, "f") == V2
