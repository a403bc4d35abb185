"""A router on another machine: adapters come from an object store, to which an approval uploads them."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from store.database import open_store, read_session, sqlite_url, write_session
from store.repositories.promotions import live_adapters
from tests.integration.gateway.place import RunningGateway, until_offered
from tests.integration.gateway.upstream import upstreams
from tests.unit.registry.chain import seed_adapter, seed_cycle
from tests.waiting import eventually_async
from traced.cli.decisions import approve, rollback
from traced.config.settings import load_settings
from traced.core.errors import PromotionError
from traced.gateway.server import open_gateway

V1, V2 = "error-recovery@v1", "error-recovery@v2"
WEIGHTS = "adapter_model.safetensors"


class Cycles:
    """The machine with the cycles: its data directory, with two versions that passed their gate, and the bucket."""

    def __init__(self, tmp_path: Path) -> None:
        self.data_dir, self.bucket = tmp_path / "cycles", tmp_path / "bucket"
        self.url = f"file://{self.bucket}/traced"
        self.data_dir.mkdir()
        self.store = open_store(sqlite_url(self.data_dir / "traced.db"))
        with write_session(self.store) as session:
            seed_cycle(session)
            for number in (1, 2):
                seed_adapter(session, self.data_dir, number)

    async def approve(self, name: str) -> None:
        """Approve by the command, on the machine with the cycles."""
        overrides = [f"serving.adapters_root={self.url}"]
        await asyncio.to_thread(approve, name, yes=True, data_dir=self.data_dir, overrides=overrides)

    async def roll_back(self, name: str) -> None:
        await asyncio.to_thread(rollback, name, yes=True, data_dir=self.data_dir)

    def live(self) -> list[str]:
        with read_session(self.store) as session:
            return [promotion.adapter for promotion in live_adapters(session)]


@pytest.fixture
def cycles(tmp_path: Path) -> Any:
    cycles = Cycles(tmp_path)
    yield cycles
    cycles.store.dispose()


@asynccontextmanager
async def router(cycles: Cycles, data_dir: Path) -> AsyncIterator[RunningGateway]:
    """A router with a data directory of its own, which shares the database and the bucket with the cycles."""
    overrides = {"serving.port": 0, "routing.router": "labels", "serving.adapters_root": cycles.url}
    settings = load_settings(data_dir, {**overrides, "store.url": sqlite_url(cycles.data_dir / "traced.db")})
    store: Engine = open_store(settings.store_url)
    try:
        async with (
            upstreams(1) as engines,
            open_gateway(settings, store, [engine.url for engine in engines]) as url,
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http,
        ):
            yield RunningGateway(url, http, engines, store, settings)
    finally:
        store.dispose()


async def refused_adapters(gateway: RunningGateway) -> dict[str, str]:
    refusals: dict[str, str] = (await gateway.http.get("/ready")).json().get("refused_adapters", {})
    return refusals


@pytest.mark.slow
async def test_a_router_without_the_folder_serves_what_is_approved_elsewhere(cycles: Cycles, tmp_path: Path) -> None:
    await cycles.approve(V1)
    original = {path.name: path.read_bytes() for path in (cycles.data_dir / "adapters" / V1).iterdir()}
    # The router must not be able to read the cycles' folder, of which this test has the path.
    (cycles.data_dir / "adapters").rename(cycles.data_dir / "hidden")
    async with router(cycles, tmp_path / "router") as gateway:
        # The first request is served by it: the router fetched it before it listened.
        assert (await gateway.ask(V1)).headers["X-Traced-Model"] == V1
        folder = Path(gateway.engine.adapters[V1])
        assert folder.is_relative_to(tmp_path / "router")
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == original
        (cycles.data_dir / "hidden").rename(cycles.data_dir / "adapters")
        await cycles.approve(V2)
        (cycles.data_dir / "adapters").rename(cycles.data_dir / "hidden")
        await until_offered(gateway, V2)
        await cycles.roll_back(V2)
        await until_offered(gateway, V2, is_offered=False)
        await until_offered(gateway, V1)
        copies = tmp_path / "router" / "adapter-cache"
        await eventually_async(lambda: [path.name for path in copies.glob("[!.]*")] == [folder.name])
    # Restarted with an object store that has lost everything: the copy serves.
    shutil.rmtree(cycles.bucket)
    async with router(cycles, tmp_path / "router") as gateway:
        assert (await gateway.ask(V1)).headers["X-Traced-Model"] == V1


async def test_files_that_were_changed_are_refused_until_they_are_right(cycles: Cycles, tmp_path: Path) -> None:
    await cycles.approve(V1)
    (cycles.data_dir / "adapters").rename(cycles.data_dir / "hidden")
    (weights,) = cycles.bucket.rglob(WEIGHTS)
    original = weights.read_bytes()
    weights.write_bytes(original[:-1] + b"?")
    async with router(cycles, tmp_path / "router") as gateway:
        assert "are not those that were published" in (await refused_adapters(gateway))[V1]
        assert (await gateway.ask("auto")).headers["X-Traced-Model"] == "base"
        assert gateway.engine.loads == []
        weights.write_bytes(original)
        await until_offered(gateway, V1)
        assert await refused_adapters(gateway) == {}


async def test_an_approval_whose_upload_fails_changes_nothing(cycles: Cycles, tmp_path: Path) -> None:
    cycles.bucket.touch()  # no folder
    with pytest.raises(PromotionError, match=r"the object store file://.* failed"):
        await cycles.approve(V1)
    assert cycles.live() == []
    cycles.bucket.unlink()
    await cycles.approve(V1)
    assert cycles.live() == [V1]
