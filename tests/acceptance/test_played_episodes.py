"""A daemon that stops while an episode is played by hand leaves no container behind."""

import asyncio
from pathlib import Path

import pytest

from sandbox.docker_engine import connect
from sandbox.hashing import environment_hash
from sandbox.image import ensure_image
from sandbox.policy import LABEL_ENVIRONMENT
from store.database import open_store, session, sqlite_url
from store.records import CycleState, EnvironmentRecord
from store.repositories.cycles import set_cycle_state
from store.repositories.environments import save_environment
from tests.acceptance.test_acts_verbs import daemon
from tests.unit.gates.chain import seed_cycle
from traced.client import Client, default_socket
from traced.service.daemon import now

LAMP_SHOP = (Path(__file__).parents[1] / "data/environments/lamp_shop.py").read_text("utf-8")


@pytest.mark.docker
def test_the_container_goes_with_the_daemon(tmp_path: Path) -> None:
    ensure_image(build_missing=True)
    directory, source = tmp_path / "traced-data", f"{LAMP_SHOP}\nNUMBER = {id(tmp_path)}\n"
    name, store = environment_hash(source), open_store(sqlite_url(directory / "traced.db"))
    with session(store) as opened:
        seed_cycle(opened)
        set_cycle_state(opened, "c1", CycleState.FINISHED, at=now())
        save_environment(opened, EnvironmentRecord(name, source, "c1", "error-recovery", 7, "builtin", now()))
    store.dispose()

    async def play() -> None:
        async with Client(default_socket(directory)) as client:
            await client.environments.play(name, 7)

    engine = connect()
    try:
        marks = {"label": f"{LABEL_ENVIRONMENT}={name}"}
        with daemon(directory):
            asyncio.run(play())
            assert len(engine.containers.list(all=True, filters=marks, ignore_removed=True)) == 1
        assert engine.containers.list(all=True, filters=marks, ignore_removed=True) == []
    finally:
        engine.close()
