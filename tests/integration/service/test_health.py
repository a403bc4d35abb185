"""What the API says of the service to machines: readiness, figures, its own description."""

import os
import shutil
import socket
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine

from sandbox.docker_engine import reap_orphans
from sandbox.errors import EngineDown
from store.database import write_session
from store.records import Approval, CycleState, Decision
from store.repositories.adapters import get_adapter, save_adapter
from store.repositories.capabilities import get_capability, save_capabilities
from store.repositories.cycles import get_cycle, save_cycle
from store.repositories.gates import save_approval
from store.repositories.promotions import live_adapters, promote
from tests.integration.service.api_server import on_tcp, serve_api
from traced.api.control import Control
from traced.api.monitoring import Parts, parts_of
from traced.client.models import Readiness


async def test_a_dead_part_is_named(control: Control, path: Path) -> None:
    parts = parts_of(control).parts
    async with serve_api(control, path, {name: parts[name] for name in ("service", "store", "disk")}) as client:
        well = await client.ready()
        control.state = "draining"
        with locked(control.store):
            well, dead = [well, await client.ready()]
    assert well == Readiness(ready=True)
    assert dead == Readiness(ready=False, dead={"service": "the service is draining", "store": "no answer within 3 s"})


@contextmanager
def locked(store: Engine) -> Iterator[None]:
    """Hold the store's write lock in another connection."""
    other = sqlite3.connect(str(store.url.database), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    yield
    other.execute("ROLLBACK")
    other.close()


def test_a_docker_engine_that_hangs_or_is_gone_is_told(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"docker": parts_of(control).parts["docker"]}
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "docker.sock"))
        deaf.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
        probe = Parts(parts, patience_s=0.3)
        assert probe().dead == probe().dead == {"docker": "no answer within 0.3 s"}
        monkeypatch.setattr("sandbox.docker_engine.ORPHAN_TIMEOUT_SECONDS", 0.3)
        with pytest.raises(EngineDown):  # removing orphans does not hang either
            reap_orphans("nobody")
        assert sum(thread.name == "ready docker" for thread in threading.enumerate()) == 1  # not one per request
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    assert "No such file" in Parts(parts)().dead["docker"]


def test_a_full_or_read_only_disk_is_told(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Parts({"disk": parts_of(control).parts["disk"]})
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 * 2**20))
        assert disk().dead["disk"].endswith("has 5 MiB left, fewer than 32")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        assert disk().dead["disk"].endswith("cannot be written to")
    assert disk().ready


async def test_the_figures_are_what_prometheus_reads(control: Control, path: Path) -> None:
    with write_session(control.store) as session:
        # A version of another base model is live beside it, and routers of this one do not serve it.
        [live] = live_adapters(session)
        version = get_adapter(session, live.adapter)
        cycle = replace(get_cycle(session, version.cycle_id), id="other-base", model="larger")
        save_cycle(session, replace(cycle, state=CycleState.FINISHED))
        save_capabilities(session, cycle.id, [get_capability(session, version.cycle_id, version.capability)])
        other = replace(version, name=f"{version.capability}@v99", version=99, cycle_id=cycle.id)
        save_adapter(session, other)
        save_approval(session, Approval(other.name, Decision.APPROVED, "ann", live.at))
        promote(session, other.name, actor="ann", at=live.at)
        assert len(live_adapters(session)) == 2

    async def ask() -> tuple[str, str]:
        async with serve_api(control, path) as client:
            answer = await client._daemon.ask("GET", "/metrics")
            return answer.headers["content-type"], answer.text

    kind, text = await ask()
    assert kind.startswith("text/plain; version=")
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples[("traced_cycles", "running")] == 1
    assert samples[("traced_promotions_total", "live")] == 2
    assert samples[("traced_live_adapters",)] == 1
    assert (samples[("traced_waiting_adapters",)], samples[("traced_cycle_running",)]) == (0, 0)
    assert samples[("traced_up_seconds",)] > 0


async def test_the_api_describes_itself_with_its_token(control: Control) -> None:
    async def ask() -> dict[str, Any]:
        async with on_tcp(control, "") as client:
            return dict((await client._daemon.ask("GET", "/openapi.json")).json())

    schema = await ask()
    assert [scheme["scheme"] for scheme in schema["components"]["securitySchemes"].values()] == ["bearer"]
    open_ones = {
        path for path, methods in schema["paths"].items() for method in methods.values() if not method.get("security")
    }
    assert open_ones == {"/alive", "/ready", "/metrics"}
    assert schema["paths"]["/adapters/{adapter}/approve"]["post"]["requestBody"]["required"]
    assert all(method["summary"] for methods in schema["paths"].values() for method in methods.values())


async def test_health_and_metrics_need_no_token(control: Control) -> None:
    async def ask() -> list[int]:
        async with on_tcp(control, "") as client:
            http = client._daemon._http
            return [(await http.get(path)).status_code for path in ("/alive", "/ready", "/metrics", "/audit")]

    assert await ask() == [200, 200, 200, 401]
