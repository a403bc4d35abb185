"""The graph's steps on a real PostgreSQL, beside the store's tables."""

from pathlib import Path

import pytest
from sqlalchemy import text

from benchmarks.chaos.postgres import Server, missing
from store.database import connect, open_store, write_session
from store.errors import StoreUnavailable
from tests.unit.maintenance.place import NOW
from tests.unit.pipeline.test_graph import CYCLE, PowerCut, Script, approved
from tests.unit.store.chain import save_chain
from traced.config.settings import load_settings
from traced.core.errors import CycleChanged
from traced.maintenance.backup import back_up
from traced.maintenance.prune import forget_steps
from traced.maintenance.restore import restore
from traced.pipeline import graph
from traced.pipeline.graph import CHECKPOINTS, CycleStatus, advance, build_graph, checkpoints

pytestmark = [pytest.mark.optional, pytest.mark.skipif(bool(missing()), reason=missing())]


async def run(script: Script, data_dir: Path, url: str) -> CycleStatus:
    async with checkpoints(data_dir, url) as saver:
        return await advance(build_graph(script.stages(), saver), CYCLE)


async def test_a_killed_cycle_goes_on_and_no_file_is_made(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(url).dispose()
    script = Script(decisions=approved("alpha", "beta"), cut_at="gate beta")
    with pytest.raises(PowerCut):
        await run(script, tmp_path, url)
    monkeypatch.setattr(graph, "GRAPH_VERSION", 2)
    with pytest.raises(CycleChanged, match="version 1"):
        await run(script, tmp_path, url)
    monkeypatch.setattr(graph, "GRAPH_VERSION", 1)
    status = await run(script, tmp_path, url)
    assert status.finished
    assert status.state["promoted"] == ["alpha@v1", "beta@v1"]
    assert script.calls.count("train alpha") == 1
    assert not (tmp_path / CHECKPOINTS).exists()
    async with checkpoints(tmp_path, url) as saver:
        cycle_graph = build_graph(script.stages(), saver)
        await graph.forget_checkpoints(cycle_graph, CYCLE)
        assert not (await graph.cycle_status(cycle_graph, CYCLE)).started


async def test_a_database_that_goes_away_is_told_and_the_cycle_goes_on_later(url: str, tmp_path: Path) -> None:
    script = Script(decisions=approved("alpha", "beta"))
    admin_engine = connect(url)

    async def cut(cycle_id: str) -> None:
        with admin_engine.connect() as connection:
            connection.execute(
                text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
            )

    async def live() -> None:
        stages = script.stages()
        object.__setattr__(stages, "collect", cut)
        async with checkpoints(tmp_path, url) as saver:
            await advance(build_graph(stages, saver), CYCLE)

    with pytest.raises(StoreUnavailable, match=r"the database postgresql://traced@/.* failed"):
        await live()
    assert (await run(script, tmp_path, url)).finished
    admin_engine.dispose()


async def test_the_steps_are_in_the_backup_and_come_back(url: str, postgres: Server, tmp_path: Path) -> None:
    store = open_store(url)
    with write_session(store) as session:
        save_chain(session)
    place = tmp_path / "data"
    place.mkdir()
    script = Script(decisions=approved("alpha", "beta"), cut_at="gate beta")
    with pytest.raises(PowerCut):
        await run(script, place, url)
    backup = back_up(load_settings(place, {"store.url": url}), now=NOW)
    admin = connect(postgres.url("postgres")).execution_options(isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text("CREATE DATABASE steps"))
    fresh = postgres.url("steps")
    try:
        restore(backup.path, tmp_path / "new", lambda folder: load_settings(folder, {"store.url": fresh}), now=NOW)
        calls = len(script.calls)
        assert (await run(script, tmp_path / "new", fresh)).finished
        assert "collect" not in script.calls[calls:]
        assert script.calls.count("train alpha") == 1
        assert (await run(Script(), tmp_path / "new", fresh)).finished
        settings, store_copy = load_settings(tmp_path / "new", {"store.url": fresh}), connect(fresh)
        assert forget_steps(settings, store_copy, [CYCLE]).rows > 5
        store_copy.dispose()
        assert (await run(Script(), tmp_path / "new", fresh)).finished
    finally:
        store.dispose()
        with admin.connect() as connection:
            connection.execute(text("DROP DATABASE steps WITH (FORCE)"))
        admin.dispose()


async def test_a_database_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="the database postgresql://") as error_info:
        await run(Script(), tmp_path, f"postgresql://traced:secret@/none?host={tmp_path}")
    assert "secret" not in str(error_info.value)
