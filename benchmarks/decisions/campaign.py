"""A campaign: clients that decide, and faults of the service, at the same time.

The data directory lies on a small file system of its own (tmpfs), so that its disk can be full. The clock is
libfaketime's, under the service alone. Every client repeats a request that was not answered, with the same idempotency
key, until it is answered or the client gives up.
"""

import asyncio
import contextlib
import importlib.util
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import cast

from sqlalchemy import delete

from benchmarks.chaos.place import Place
from benchmarks.decisions.history import Entry, Operation, violations
from benchmarks.decisions.model import Decision, Policy, Verb
from benchmarks.engines.stored_versions import START, WEIGHTS, save_versions
from store.database import open_store, read_session, sqlite_url, write_session
from store.records import CycleState
from store.repositories.cycles import set_cycle_state
from store.repositories.events import check_audit, list_audit
from store.repositories.promotions import live_adapters
from store.tables import ApprovalRow
from traced.client import Client, NoDaemon, default_socket
from traced.client.models import Approval, DecisionRequest, Done
from traced.client.transport import RequestRefused, part

CLIENTS = 8
SKILLS, VERSIONS = 3, 3
DISK = 64 * 2**20  # bytes
TIMEOUT_S = 1.5  # of a request
PATIENCE_S = 30.0  # after which a client gives up
PAUSE_S = 0.15  # longest pause of a client between two operations
CALM_S = 1.0  # longest time between two faults
FAULTS = ("stop", "clock", "disk", "kill")
WEIGHT_OF_FAULT = (10, 6, 4, 1)
CLOCK_STEPS = ("+0", "+1d", "-1d", "+3h", "-2h")
VERBS: Sequence[Verb] = ("approve", "approve", "rollback", "reject")
POLICIES: Sequence[Policy] = ("immediate", "canary")
SETTINGS = "[serving]\nwith_service = false\n[target]\nname = 'desk'\n"


def clock_library() -> Path | None:
    """Return the path of libfaketime, None if it is not installed."""
    package = importlib.util.find_spec("libfaketime")
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"
    return path if path.exists() else None


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a file system of ``DISK`` bytes at ``folder`` during the block; False if this process may not."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=700", "tmpfs", str(folder)]
    is_mounted = os.geteuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def save_undecided_versions(place: Place) -> list[str]:
    """Save versions whose gates have passed and on which nobody has decided; return their names."""
    paths = {}
    for skill in range(SKILLS):
        for number in range(1, VERSIONS + 1):
            path = place.data_dir / "adapters" / f"skill-{skill}@v{number}"
            path.mkdir(parents=True)
            (path / WEIGHTS).write_bytes(f"{skill} {number}".encode())
            paths[f"skill-{skill}", number] = path
    store = open_store(sqlite_url(place.data_dir / "traced.db"))
    save_versions(store, paths)
    with write_session(store) as session:
        session.execute(delete(ApprovalRow))
        set_cycle_state(session, "c1", CycleState.FINISHED, at=START)
    store.dispose()
    return [path.name for path in paths.values()]


@dataclass
class Campaign:
    """So many faults with this seed; ``run`` fills ``operations`` and ``faults``."""

    place: Place
    count: int
    seed: int
    has_disk: bool
    clock: Path | None
    operations: list[Operation] = field(default_factory=list)
    faults: "Counter[str]" = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)
    _stopping: bool = False

    async def run(self) -> None:
        """Let the clients decide until all faults have been made and undone."""
        names = save_undecided_versions(self.place)
        await asyncio.to_thread(self.place.start)
        clients = [asyncio.create_task(self._decide(number, names)) for number in range(CLIENTS)]
        try:
            await self._make_faults(random.Random(self.seed))
        finally:
            self._stopping = True
            await asyncio.gather(*clients)
        await asyncio.to_thread(self.place.stop)

    def violations(self) -> list[str]:
        """Return the violations of the history, and the errors that no service should answer with."""
        store = self.place.open_store()
        with read_session(store) as session:
            entries = [
                Entry(entry.reason, cast(Verb, entry.action), entry.subject, entry.detail["live"])
                for entry in reversed(list_audit(session, limit=10**6))
            ]
            live = [promotion.adapter for promotion in live_adapters(session)]
            chained = check_audit(session) is None
        store.dispose()
        return [*self.defects, *violations(self.operations, entries, live, chained=chained)]

    async def _make_faults(self, source: random.Random) -> None:
        while sum(self.faults.values()) < self.count:
            await asyncio.sleep(source.uniform(0.0, CALM_S))
            [kind] = source.choices(FAULTS, WEIGHT_OF_FAULT)
            if (kind == "disk" and not self.has_disk) or (kind == "clock" and self.clock is None):
                continue
            self.faults[kind] += 1
            if kind == "stop":
                os.kill(self.place.pid, signal.SIGSTOP)
                await asyncio.sleep(source.uniform(0.1, 2.5))
                os.kill(self.place.pid, signal.SIGCONT)
            elif kind == "clock":
                (self.place.folder / "offset").write_text(source.choice(CLOCK_STEPS))
            elif kind == "disk":
                await self._fill_disk(source.uniform(0.1, 1.0))
            else:
                await asyncio.to_thread(self.place.kill)
                await asyncio.to_thread(self.place.start)

    async def _fill_disk(self, seconds: float) -> None:
        path = self.place.data_dir / "fill"
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**16))
        await asyncio.sleep(seconds)
        path.unlink(missing_ok=True)

    async def _decide(self, number: int, names: list[str]) -> None:
        source = random.Random(f"{self.seed} {number}")
        async with Client(default_socket(self.place.data_dir), timeout_s=TIMEOUT_S) as client:
            while not self._stopping:
                await asyncio.sleep(source.uniform(0.0, PAUSE_S))
                await self._operate(client, f"{number}-{len(self.operations)}", source, names)

    async def _operate(self, client: Client, key: str, source: random.Random, names: list[str]) -> None:
        verb = source.choice(VERBS)
        name = None if verb == "rollback" and source.random() < 0.3 else source.choice(names)
        tag, read_at = "", (0.0, 0.0)
        if name is not None and source.random() < 0.6:
            started_at = time.monotonic()
            try:
                tag = (await client.approvals.case(name)).tag
            except (NoDaemon, RequestRefused):
                return
            read_at = (started_at, time.monotonic())
            await asyncio.sleep(source.uniform(0.0, 0.05))
        decision = Decision(verb, name, source.choice(POLICIES), bool(tag))
        operation = Operation(key, decision, time.monotonic(), read_at=read_at)
        self.operations.append(operation)
        await self._send(client, operation, tag)

    async def _send(self, client: Client, operation: Operation, tag: str) -> None:
        decision, path = operation.decision, "/rollback"
        if decision.adapter is not None:
            path = f"/adapters/{part(decision.adapter)}/{decision.verb}"
        body = DecisionRequest(reason=operation.key, tag=tag)
        if decision.verb == "approve":
            body = Approval(reason=operation.key, tag=tag, policy=decision.policy)
        while time.monotonic() - operation.invoked_at < PATIENCE_S:
            try:
                response = await client._daemon.ask("POST", path, body=body.model_dump(), key=operation.key)
            except NoDaemon:
                await asyncio.sleep(0.2)
            except RequestRefused as error:
                if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
                    await asyncio.sleep(0.2)
                    continue
                if error.status not in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND):
                    self.defects.append(f"status {error.status}: {error.message}; {operation}")
                operation.answer, operation.message, operation.ended_at = "refused", error.message, time.monotonic()
                return
            else:
                done = Done.model_validate_json(response.content)
                operation.answer, operation.live, operation.ended_at = "done", done.live, time.monotonic()
                return
