"""A campaign: cycles under ``traced up``, and processes of it killed at node boundaries and at random moments.

Invariants: what is killed when follows from the seed and from what runs; a service or Docker engine that was killed is
started again as it stands, nothing is repaired by hand; adapters that wait are approved through the control API, and an
approval whose answer was lost is asked for again. After the last kill the cycle at work has to finish by itself, then
the service is stopped in order and ``violations`` looks.
How it fails: what is not done within the time is a violation ("unfinished"), not an exception.
"""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
from sqlalchemy import Engine
from sqlmodel import col, func, select

from benchmarks.chaos.dockerd import Dockerd
from benchmarks.chaos.place import Place
from benchmarks.chaos.victims import kinds, present
from benchmarks.chaos.violations import Remembered, Violation, remember, violations
from store.database import reading
from store.records import CycleState
from store.repositories.cycles import ENDED, list_cycles
from store.tables import StageEventRow
from traced.client import Client, NoDaemon, Refused

LOOK_S = 0.05
BOUNDARY_S = 90.0  # without a new boundary for so long, the kill comes anyway
LONGEST_WAIT_S = 8.0  # before a kill at a random moment
NEVER_KILLED_S = 600.0  # how long a kind that was never killed is waited for, at the end: a cycle and more
MOMENTS = {"boundary": 0.6, "random": 0.2, "presence": 0.2}  # when to kill, and how often so
APPROVER = "the campaign approves what passes"


@dataclass(frozen=True)
class Kill:
    """One kill: whom, at which of the ``MOMENTS``, and the newest stage event at that time."""

    victim: str
    moment: str
    after: str


@dataclass
class Campaign:
    """What was done and what came of it."""

    place: Place
    dockerd: Dockerd | None
    kills: int
    seed: int
    timeout_s: float
    say: Callable[[str], None] = lambda _: None
    done: list[Kill] = field(default_factory=list)
    cycles: Counter[str] = field(default_factory=Counter)
    approvals: int = 0
    found: list[Violation] = field(default_factory=list)
    remembered: Remembered = field(default_factory=dict)
    deadline: float = 0.0

    def run(self) -> None:
        """Kill, let the last cycle finish, stop the service, and look."""
        self.deadline = time.monotonic() + self.timeout_s
        rng = random.Random(self.seed)
        store = self.place.open_store()
        try:
            while len(self.done) < self.kills and time.monotonic() < self.deadline:
                self._keep_going(store)
                self._one(store, rng)
            self._finish(store)
            code = self.place.stop()
            self.found = violations(store, self.place.data_dir, self.remembered, self.place.marks)
            self.found += [Violation("unfinished", f"the service ended with exit code {code}")] if code else []
            with reading(store) as opened:
                self.cycles = Counter(cycle.state.value for cycle in list_cycles(opened))
        finally:
            self.place.kill()
            store.dispose()

    def _one(self, store: Engine, rng: random.Random) -> None:
        """Wait for the moment, then kill one process; those killed least are likeliest, and no kind is left out."""
        (moment,) = rng.choices([*MOMENTS], [*MOMENTS.values()])
        counts = Counter(kill.victim for kill in self.done)
        sought = min(kinds(self.dockerd), key=lambda kind: (counts[kind], rng.random()))
        patience_s = BOUNDARY_S
        if sum(not counts[kind] for kind in kinds(self.dockerd)) >= self.kills - len(self.done):
            moment, patience_s = "presence", NEVER_KILLED_S
        if moment == "boundary":
            self._until_boundary(store)
        elif moment == "random":
            time.sleep(rng.uniform(0, LONGEST_WAIT_S))
        soon = moment == "presence"
        running = self._until_present(store, sought, patience_s) if soon else present(self.place, self.dockerd)
        if not running:
            return
        victim = min(sorted(running), key=lambda kind: (counts[kind] + rng.random() * 2, kind))
        kill = Kill(victim, moment, _newest(store))
        remember(store, self.remembered)
        with contextlib.suppress(psutil.NoSuchProcess):
            rng.choice(sorted(running[victim], key=lambda process: process.pid)).kill()
            self.done.append(kill)
            self.say(f"{len(self.done)} of {self.kills}: {victim} ({kill.moment}, after {kill.after})")

    def _until_present(self, store: Engine, kind: str, patience_s: float) -> dict[str, list[psutil.Process]]:
        """Until there is a process of ``kind``, for some live but a few seconds of a cycle; what runs then of it."""
        patience = min(time.monotonic() + patience_s, self.deadline)
        while kind not in (running := present(self.place, self.dockerd)):
            if time.monotonic() > patience:
                return running
            self._keep_going(store)
            time.sleep(5 * LOOK_S)
        return {kind: running[kind]}

    def _until_boundary(self, store: Engine) -> None:
        """Until a boundary is passed after which nothing was killed yet, so that the kills spread over the nodes."""
        before, patience = _count(store), time.monotonic() + BOUNDARY_S
        hit = {kill.after for kill in self.done if kill.moment == "boundary"}
        while _count(store) == before or _newest(store) in hit:
            if time.monotonic() > min(patience, self.deadline):
                return
            self._keep_going(store)
            time.sleep(LOOK_S)

    def _keep_going(self, store: Engine) -> None:
        """Start again what was killed; ask for a cycle and decide about adapters, as a person would."""
        if self.dockerd is not None and not self.dockerd.alive:
            self.dockerd.kill()  # collects the dead process
            self.dockerd.start()
        if not self.place.alive:
            self.place.kill()
            self.place.start()
        with reading(store) as opened:
            newest = next(iter(list_cycles(opened, limit=1)), None)
        with contextlib.suppress(NoDaemon, Refused):
            if newest is None or (newest.state in ENDED and len(self.done) < self.kills):
                self.place.ask(lambda client: client.start_cycle("chaos"))
            elif newest.state is CycleState.WAITING:
                self._approve()

    def _approve(self) -> None:
        for adapter in self.place.status().waiting:
            self.place.ask(partial(Client.approve, adapter=adapter, reason=APPROVER))
            self.approvals += 1

    def _finish(self, store: Engine) -> None:
        """Until every cycle has ended, or the time is over."""
        while time.monotonic() < self.deadline:
            self._keep_going(store)
            with reading(store) as opened:
                open_ones = [cycle for cycle in list_cycles(opened) if cycle.state not in ENDED]
            if not open_ones:
                return
            time.sleep(10 * LOOK_S)

    def figures(self) -> dict[str, Any]:
        """The campaign in numbers."""
        kinds = Counter(one.kind for one in self.found)
        names = ("lost", "doubled", "half-written", "unfinished", "orphan", "damaged")
        return {
            "kills": len(self.done),
            "victims": dict(sorted(Counter(kill.victim for kill in self.done).items())),
            "moments": dict(sorted(Counter(kill.moment for kill in self.done).items())),
            "after": dict(sorted(Counter(kill.after for kill in self.done).items())),
            "cycles": dict(self.cycles),
            "approvals": self.approvals,
            "rows_remembered": {name: len(keys) for name, keys in self.remembered.items()},
            **{name: kinds[name] for name in names},
            "violations": [f"{one.kind}: {one.what}" for one in self.found],
        }


def _count(store: Engine) -> int:
    with reading(store) as opened:
        return opened.exec(select(func.count()).select_from(StageEventRow)).one()


def _newest(store: Engine) -> str:
    """The newest stage event, by stage and state."""
    query = select(StageEventRow).order_by(col(StageEventRow.seq).desc()).limit(1)
    with reading(store) as opened:
        row = opened.exec(query).first()
    return "nothing yet" if row is None else f"{row.stage.partition(' ')[0]} {row.state}"
