"""Cut the power at seeded points, start again, and look for what was acknowledged (``--profile power``).

Two recordings: a service and a router with clients, and cycles with scripted stages. Each point is a sync of one of
them; the disk of that moment is put in the place of the folder, and then, without any repair by hand:

- the database is sound, the audit chain holds, every adapter in the store has its files;
- every acknowledged act, span, response, feedback, import, adapter and cycle is there;
- ``traced up`` answers (a service), or the cycle goes on to its end with its rows (cycles);
- ``traced doctor`` calls the store sound before the start, and never one for which the checks above find something.

On PostgreSQL the files of the server are recorded and cut too. Not covered: see ``recording``.
"""

import asyncio
import random
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, text
from sqlmodel import Session, func, select

from benchmarks.chaos import postgres
from benchmarks.chaos.place import Place
from benchmarks.chaos.power import workloads
from benchmarks.chaos.power.recording import Point, Recording
from benchmarks.chaos.violations import processes
from store.database import open_store, read_session
from store.errors import StoreError
from store.records import AdapterVersion, CycleState
from store.repositories.adapters import list_adapters
from store.repositories.capabilities import list_capabilities
from store.repositories.cycles import list_cycles
from store.repositories.events import check_audit
from store.service_tables import AuditRow, ExchangeRow, FeedbackRow, ResponseRow
from store.tables import AdapterRow, CycleRow, TrajectoryRow
from tests.integration.service.place import Place as CyclePlace
from traced.cli.setup import check_integrity
from traced.core.errors import TracedError
from traced.gateway.recorder import Recorder
from traced.registry.integrity import check_files

RECORDS_OF_IMPORT = 3
CYCLE_S = 60.0
# How much is recorded.
SERVICE_S, CYCLES = 20.0, 4
LOSS = "lost:"
CAPABILITIES = ["alpha", "beta"]
COLUMNS: Mapping[str, Any] = {
    "act": AuditRow.reason,
    "span": ExchangeRow.id,
    "response": ResponseRow.id,
    "feedback": FeedbackRow.comment,
    "adapter": AdapterRow.name,
}


Plan = tuple[int, int]  # points and seed


@dataclass
class Disk:
    """The folder that loses its power, with the place of the service in it and its database server, if it has one."""

    folder: Path
    place: Place
    server: postgres.Server | None = None

    def put(self, point: Point) -> None:
        """Replace the folder by the disk of a point, and start the database server on it."""
        if self.server is not None:
            with suppress(subprocess.CalledProcessError):  # it does not run before the first point
                self.server.stop()
        shutil.rmtree(self.folder)
        point.image.write(self.folder)
        self.folder.chmod(0o755)
        if self.server is not None:
            self.server.take_ownership()
            self.server.start()


@dataclass
class Result:
    """The violations at the points of a recording, and how much had been acknowledged at the last one."""

    points: int = 0
    wrongly_sound: int = 0  # states that ``traced doctor`` calls sound and that are not
    acknowledged: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


@contextmanager
def disk(store: str) -> Iterator[Disk]:
    """Provide a folder with a place on that kind of store."""
    with tempfile.TemporaryDirectory(prefix="tw-", dir="/tmp") as name, ExitStack() as stack:
        folder = Path(name) / "disk"
        folder.mkdir()
        for path in (folder, folder.parent):
            path.chmod(0o755)
        server = stack.enter_context(postgres.server(parent=folder)) if store == "postgres" else None
        settings = '[log]\nlevel = "warning"\n'
        place = Place(folder, {"NO_COLOR": "1"}, server.url("postgres") if server else "", settings)
        place.data_dir.chmod(0o700)
        stack.callback(place.kill)
        yield Disk(folder, place, server)


def cut_service(store: str, points: int, seed: int, seconds: float, log: Callable[[str], None]) -> Result:
    """Record a service with clients and cut its power at so many points."""
    with disk(store) as current:
        workloads.seed(current.place)
        recording = _recording(current)
        asyncio.run(workloads.serve(current.place, recording, seconds, seed))

        def check(breaches: list[str]) -> None:
            with _store_of(current.place) as engine:
                Recorder(current.place.read_settings(), engine).run_once()
            try:
                current.place.start()
                if code := current.place.stop():
                    breaches.append(f"traced up ended with exit code {code}")
            except RuntimeError as error:
                breaches.append(f"traced up: {error}")

        return _cut(current, recording, (points, seed), check, log)


def cut_cycles(store: str, points: int, seed: int, cycles: int, log: Callable[[str], None]) -> Result:
    """Record cycles with scripted stages and cut their power at so many points."""
    with disk(store) as current:
        current.place.open_store().dispose()
        recording = _recording(current)
        workloads.run_cycles(current.place.data_dir, recording, cycles)

        def check(breaches: list[str]) -> None:
            with _store_of(current.place) as engine:
                place = workloads.cycle_place(current.place.data_dir, engine)
                asyncio.run(_go_on(place))
                breaches += _unfinished(engine)

        return _cut(current, recording, (points, seed), check, log)


async def _go_on(place: CyclePlace) -> None:
    is_unfinished = any(cycle.state not in workloads.END_STATES for cycle in place.cycles())
    if is_unfinished or place.control.status().target.requested:
        async with asyncio.timeout(CYCLE_S):
            await workloads.finish_cycle(place)


def _unfinished(store: Engine) -> Iterator[str]:
    with read_session(store) as session:
        for cycle in list_cycles(session):
            if cycle.state is not CycleState.FINISHED:
                yield f"cycle {cycle.id} is {cycle.state.value}"
            names = [capability.name for capability in list_capabilities(session, cycle.id)]
            adapters = sorted(version.capability for version in list_adapters(session, cycle_id=cycle.id))
            if names != CAPABILITIES or adapters != CAPABILITIES or not cycle.summary:
                yield f"cycle {cycle.id} is finished with {names}, {adapters} and the summary {cycle.summary}"


def _recording(current: Disk) -> Recording:
    if current.server is not None:
        current.server.stop()
    recording = Recording(current.folder, current.folder.parent / "log")
    if current.server is not None:
        with recording.running():
            current.server.start()
    return recording


def _cut(
    current: Disk, recording: Recording, plan: Plan, check: Callable[[list[str]], None], log: Callable[[str], None]
) -> Result:
    points, seed = plan
    if current.server is not None:
        current.server.stop()
    # What outlives its service by design, such as the recorder of a router.
    for process in processes({"SYNCED_LOG": str(recording.log)}):
        process.kill()
        process.wait()
    result, count = Result(), recording.count()
    numbers = set(random.Random(seed).sample(range(count + 1), min(points, count + 1)))
    log(f"{count} syncs were recorded; the power goes at {len(numbers)} of them")
    for point in recording.points(numbers):
        current.put(point)
        breaches: list[str] = []
        finding = check_integrity(current.place.read_settings())
        try:
            check(breaches)
            with _store_of(current.place) as engine, read_session(engine) as session:
                breaches += _damage(session)
                breaches += _losses(session, point.acknowledged)
        except (TracedError, StoreError, TimeoutError) as error:
            breaches.append(f"{type(error).__name__}: {error}")
        result.points += 1
        result.wrongly_sound += finding.ok and bool(breaches)
        if not finding.ok:
            breaches.append(f"traced doctor: {finding.seen}")
        result.acknowledged = Counter(kind for kind, _ in point.acknowledged)
        result.violations += [f"sync {point.number}: {violation}" for violation in breaches]
        if breaches or result.points % 20 == 0:
            log(f"{result.points} of {len(numbers)}, sync {point.number}: {breaches or 'nothing lost'}")
    return result


def _damage(session: Session) -> Iterator[str]:
    if session.get_bind().dialect.name == "sqlite":
        for row in session.connection().execute(text("PRAGMA integrity_check")):
            if tuple(row) != ("ok",):
                yield f"the database is damaged: {tuple(row)}"
    if (changed_seq := check_audit(session)) is not None:
        yield f"the audit chain is broken at {changed_seq}"
    for adapter in session.exec(select(AdapterRow)):
        try:
            check_files(AdapterVersion(**adapter.model_dump()))
        except TracedError as error:
            yield f"adapter {adapter.name}: {error}"


def _losses(session: Session, acknowledged: list[tuple[str, str]]) -> Iterator[str]:
    rows = {kind: set(session.exec(select(column))) for kind, column in COLUMNS.items()}
    count = func.count()
    rows["import"] = {
        model
        for model, trajectories in session.exec(select(TrajectoryRow.model, count).group_by(TrajectoryRow.model))
        if trajectories == RECORDS_OF_IMPORT
    }
    rows["cycle"] = set(session.exec(select(CycleRow.id).where(CycleRow.state == CycleState.FINISHED.value)))
    for kind, key in acknowledged:
        if key not in rows[kind]:
            yield f"{LOSS} {kind} {key}"


@contextmanager
def _store_of(place: Place) -> Iterator[Engine]:
    engine = open_store(place.read_settings().store_url)
    try:
        yield engine
    finally:
        engine.dispose()


def measure(stores: list[str], points: int, seed: int, log: Callable[[str], None]) -> dict[str, Any]:
    """Cut the power at so many points, shared by the kinds of stores; returns the figures."""
    figures: dict[str, Any] = {"seed": seed, "points": 0, "lost": 0, "wrongly_sound": 0, "violations": []}
    parts = [(store, workload) for store in stores for workload in ("service", "cycles")]
    for number, (store, workload) in enumerate(parts):
        share = points * (number + 1) // len(parts) - points * number // len(parts)
        if workload == "service":
            result = cut_service(store, share, seed, SERVICE_S, log)
        else:
            result = cut_cycles(store, share, seed, CYCLES, log)
        figures[f"{store} {workload}"] = {"points": result.points, "acknowledged": dict(result.acknowledged)}
        figures["points"] += result.points
        figures["wrongly_sound"] += result.wrongly_sound
        figures["violations"] += [f"{store} {workload}, {violation}" for violation in result.violations]
    figures["lost"] = sum(LOSS in violation for violation in figures["violations"])
    figures["aims"] = {"points": points, "lost": 0, "wrongly_sound": 0, "violations": []}
    figures["meets"] = figures["points"] >= points and not figures["violations"]
    return figures
