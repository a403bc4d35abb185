"""What runs while the syncs are recorded: a service and a router with clients, or cycles with scripted stages.

Every answer that promises something is noted in the recording. Kinds of acknowledgements and their keys:

    act         the reason of a decision, a pause or a resume, in an answer of the control API
    span        the id of the exchange of a span that ``/v1/traces`` has confirmed
    response    the id of an answer of ``/v1/responses``
    feedback    the comment of feedback that the router has accepted
    import      the agent of an import that has ended with exit code 0
    adapter     a version that waits for its decision
    cycle       a cycle that has finished
"""

import asyncio
import itertools
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic

import httpx
from sqlalchemy import Engine

from benchmarks.chaos.place import Place
from benchmarks.chaos.power.recording import Recording, acknowledge
from benchmarks.engines.installation import ROOT, serving
from benchmarks.seeded import seed_store
from store.database import open_store, write_session
from store.records import CycleState
from store.repositories.cycles import pause_target
from tests.integration.gateway.upstream import upstreams
from tests.integration.service.place import Place as CyclePlace
from tests.integration.service.scripted import Scripted
from tests.unit.ingest.otlp.spans import TRACE, call, request
from traced.api.auth import Caller
from traced.client import Client, NoDaemon, RequestRefused, default_socket
from traced.client.models import Reason
from traced.config.settings import load_settings
from traced.core.ownership import is_alive, sandbox_owner
from traced.jobs.attempts import recover_lost_attempts
from traced.maintenance.orphans import sweep
from traced.registry import decisions

IMPORTED = ROOT / "tests" / "data" / "tau-bench" / "three-records.json"
ADA = Caller("ada", "local")
END_STATES = (CycleState.FINISHED, CycleState.FAILED, CycleState.CANCELLED)
PAUSE_S = 0.02
SILENT_S = 600.0


def seed(place: Place) -> None:
    """Fill the store of a place with adapters to decide on; its target is paused, so that no cycle begins."""
    store = place.open_store()
    seed_store(store, place.data_dir, datetime.now(UTC), trajectories=60)
    with write_session(store) as session:
        pause_target(session, "desk", actor="ada", at=datetime.now(UTC))
    store.dispose()


async def serve(place: Place, recording: Recording, seconds: float, seed_number: int) -> None:
    """Run the service and a router on ``place`` with clients for so many seconds, then kill them."""
    async with upstreams(1) as engines:
        settings = [f'engine.urls=["{engines[0].url}"]', *([f"store.url={place.store_url}"] if place.store_url else [])]
        with recording.running():
            await asyncio.to_thread(place.start)
            async with _router(place.data_dir, settings) as url, httpx.AsyncClient(base_url=url, timeout=30) as http:
                deadline = monotonic() + seconds
                rng = random.Random(seed_number)
                await asyncio.gather(
                    _decide(place, recording, rng, deadline),
                    _send_spans(http, recording, deadline),
                    _respond(http, recording, deadline),
                    _import(place, recording, deadline),
                )
                place.kill()


@asynccontextmanager
async def _router(data_dir: Path, settings: list[str]) -> AsyncIterator[str]:
    context = serving(data_dir, settings)
    router = await asyncio.to_thread(context.__enter__)
    try:
        yield router.url
        router.process.kill()
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


async def _decide(place: Place, recording: Recording, rng: random.Random, deadline: float) -> None:
    async with Client(default_socket(place.data_dir), timeout_s=30) as client:
        for number in itertools.count():
            if monotonic() > deadline:
                return
            adapter = rng.choice(await client.adapters())
            reason = f"act {number}"
            decision = rng.choice((client.approve, client.reject, client.roll_back))
            with suppress(RequestRefused, NoDaemon):
                case = await client.approvals.case(adapter.name)
                done = await decision(adapter.name, reason, tag=case.tag)
                # An act that finds its result already there changes nothing.
                if done.detail.get("decision", {}).get("reason", reason) == reason and "before" not in done.message:
                    recording.acknowledge("act", reason)
            await asyncio.sleep(PAUSE_S)


async def _send_spans(http: httpx.AsyncClient, recording: Recording, deadline: float) -> None:
    for number in itertools.count(1):
        if monotonic() > deadline:
            return
        spans = request(call(2 * number), call(2 * number + 1))
        if (await http.post("/v1/traces", json=spans)).status_code == httpx.codes.OK:
            for identifier in (2 * number, 2 * number + 1):
                recording.acknowledge("span", f"otlp-{TRACE}-{identifier:016x}")
        await asyncio.sleep(PAUSE_S)


async def _respond(http: httpx.AsyncClient, recording: Recording, deadline: float) -> None:
    for number in itertools.count():
        if monotonic() > deadline:
            return
        answer = await http.post("/v1/responses", json={"model": "base", "input": f"Look up order {number}."})
        if answer.status_code != httpx.codes.OK:
            continue
        identifier = answer.json()["id"]
        recording.acknowledge("response", identifier)
        feedback = {"response_id": identifier, "label": "success", "comment": f"feedback {number}"}
        if (await http.post("/v1/feedback", json=feedback)).status_code == httpx.codes.OK:
            recording.acknowledge("feedback", feedback["comment"])


async def _import(place: Place, recording: Recording, deadline: float) -> None:
    for number in itertools.count():
        if monotonic() > deadline:
            return
        command = ["-m", "traced", "import", str(IMPORTED), "--agent", f"agent-{number}"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *command, "--data-dir", str(place.data_dir)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if await process.wait() == 0:
            recording.acknowledge("import", f"agent-{number}")


def run_cycles(data_dir: Path, recording: Recording, count: int) -> None:
    """Run so many cycles with scripted stages in a process that is recorded."""
    with recording.running():
        command = [sys.executable, "-m", "benchmarks.chaos.power.workloads"]
        subprocess.run([*command, str(data_dir), str(recording.log), str(count)], check=True, cwd=ROOT)


def cycle_place(data_dir: Path, store: Engine) -> CyclePlace:
    """Return the loop on a data directory with scripted stages."""
    place = CyclePlace(data_dir, store, Scripted(store, data_dir))
    # Cycle ids have the time of their beginning; a restarted process goes on behind those that exist.
    place.days = float(len(place.cycles()))
    # As the service does at its start.
    recover_lost_attempts(store, now=place.now, silent_s=SILENT_S)
    sweep(data_dir, store, is_alive, now=place.now(), owner=sandbox_owner(data_dir))
    return place


async def finish_cycle(place: CyclePlace, log: Path | None = None) -> None:
    """Run the unfinished or requested cycle to its end and approve what waits; ``log`` gets what is acknowledged."""

    def note(kind: str, key: str) -> None:
        if log is not None:
            acknowledge(log, kind, key)

    is_new = all(cycle.state in END_STATES for cycle in place.cycles())
    cycle = await place.run_until(CycleState.WAITING, *(() if is_new else END_STATES))
    if cycle.state is CycleState.WAITING:
        for name in (view.name for view in place.control.adapters() if view.cycle_id == cycle.id):
            note("adapter", name)
            decide = partial(decisions.approve, adapter=name)
            with suppress(RequestRefused):
                place.control.decide(ADA, Reason(reason=f"reads well: {name}"), decide)
            note("act", f"reads well: {name}")
        cycle = await place.run_until(*END_STATES)
    if cycle.state is CycleState.FINISHED:
        note("cycle", cycle.id)


async def _cycles(data_dir: Path, log: Path, count: int) -> None:
    store = open_store(load_settings(data_dir).store_url)
    place = cycle_place(data_dir, store)
    for _ in range(count):
        place.days += 1
        place.control.start(ADA, Reason(reason="the next one"))
        await finish_cycle(place, log)


if __name__ == "__main__":
    asyncio.run(_cycles(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
