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

from benchmarks.chaos.boundaries import BOUNDARIES, Watch
from benchmarks.chaos.dockerd import Dockerd
from benchmarks.chaos.place import Place
from benchmarks.chaos.victims import kinds, present
from benchmarks.chaos.violations import Remembered, Violation, remember, violations
from store.database import read_session
from store.records import CycleState
from store.repositories.cycles import ENDED_STATES, list_cycles
from traced.client import Client, NoDaemon, RequestRefused

LOOK_S = 0.02
BOUNDARY_S = 90.0  # a boundary where nothing was killed yet is waited for so long, then the kill comes anyway
AT_ONCE = 0.5  # how often the daemon is killed at a boundary before anybody looks at what else runs
CARE_S = 0.5  # between two looks at whether everything runs
LONGEST_WAIT_S = 8.0  # before a kill at a random moment
NEVER_KILLED_S = 600.0  # how long a kind that was never killed is waited for, at the end: a cycle and more
MOMENTS = {"boundary": 0.6, "random": 0.2, "presence": 0.2}  # when to kill, and how often so
APPROVER = "the campaign approves what passes"


@dataclass(frozen=True)
class Kill:
    """One kill: whom, at which of the ``MOMENTS``, and the newest boundary at that time."""

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
        watch = Watch(store)
        try:
            while len(self.done) < self.kills and time.monotonic() < self.deadline:
                self._keep_going(store)
                self._one(store, watch, rng)
            self._finish(store)
            code = self.place.stop()
            self.found = violations(store, self.place.data_dir, self.remembered, self.place.marks)
            self.found += [Violation("unfinished", f"the service ended with exit code {code}")] if code else []
            with read_session(store) as opened:
                self.cycles = Counter(cycle.state.value for cycle in list_cycles(opened))
        finally:
            self.place.kill()
            store.dispose()

    def _one(self, store: Engine, watch: Watch, rng: random.Random) -> None:
        """Wait for the moment, then kill one process; those killed least are likeliest, and no kind is left out."""
        (moment,) = rng.choices([*MOMENTS], [*MOMENTS.values()])
        counts = Counter(kill.victim for kill in self.done)
        sought = min(kinds(self.dockerd), key=lambda kind: (counts[kind], rng.random()))
        patience_s = BOUNDARY_S
        if sum(not counts[kind] for kind in kinds(self.dockerd)) >= self.kills - len(self.done):
            moment, patience_s = "presence", NEVER_KILLED_S
        at_once, after = moment == "boundary" and rng.random() < AT_ONCE, ""
        if moment == "boundary":
            after = self._until_boundary(store, watch)
        elif moment == "random":
            time.sleep(rng.uniform(0, LONGEST_WAIT_S))
        if at_once and self.place.alive:
            running = {"daemon": [psutil.Process(self.place.pid)]}
        elif moment == "presence":
            running = self._until_present(store, sought, patience_s)
        else:
            running = present(self.place, self.dockerd)
        if not running:
            return
        victim = min(sorted(running), key=lambda kind: (counts[kind] + rng.random() * 2, kind))
        remember(store, self.remembered)
        watch.look()
        kill = Kill(victim, moment if after or moment != "boundary" else "random", after or watch.newest)
        with contextlib.suppress(psutil.NoSuchProcess):
            rng.choice(sorted(running[victim], key=lambda process: process.pid)).kill()
            if victim == "dockerd" and self.dockerd is not None:
                self.dockerd.kill()  # until it is gone: who connects to one that dies leaks a socket (docker-py)
            self.done.append(kill)
            self.say(f"{len(self.done)} of {self.kills}: {victim} ({kill.moment}, after {kill.after})")

    def _until_present(self, store: Engine, kind: str, patience_s: float) -> dict[str, list[psutil.Process]]:
        """Until there is a process of ``kind``, for some live but a few seconds of a cycle; what runs then of it."""
        patience = min(time.monotonic() + patience_s, self.deadline)
        while kind not in (running := present(self.place, self.dockerd)):
            if time.monotonic() > patience:
                return running
            self._keep_going(store)
            time.sleep(CARE_S / 2)
        return {kind: running[kind]}

    def _until_boundary(self, store: Engine, watch: Watch) -> str:
        """Until a boundary is passed at which nothing was killed yet, so that the kills come to all; which it was."""
        wanted = set(self.boundaries_missed()) or {*BOUNDARIES}
        watch.look()
        patience, care = min(time.monotonic() + BOUNDARY_S, self.deadline), 0.0
        while time.monotonic() < patience:
            if hit := [name for name in watch.look() if name in wanted]:
                return hit[-1]
            if time.monotonic() > care:
                self._keep_going(store)
                care = time.monotonic() + CARE_S
            time.sleep(LOOK_S)
        return ""

    def boundaries_missed(self) -> list[str]:
        """The boundaries at which nothing was killed yet."""
        hit = {kill.after for kill in self.done if kill.moment == "boundary"}
        return [name for name in BOUNDARIES if name not in hit]

    def _keep_going(self, store: Engine) -> None:
        """Start again what was killed; ask for a cycle and decide about adapters, as a person would."""
        if self.dockerd is not None and not self.dockerd.alive:
            self.dockerd.kill()  # collects the dead process
            self.dockerd.start()
        if not self.place.alive:
            self.place.kill()
            self.place.start()
        with read_session(store) as opened:
            newest = next(iter(list_cycles(opened, limit=1)), None)
        with contextlib.suppress(NoDaemon, RequestRefused):
            if newest is None or (newest.state in ENDED_STATES and len(self.done) < self.kills):
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
            with read_session(store) as opened:
                open_ones = [cycle for cycle in list_cycles(opened) if cycle.state not in ENDED_STATES]
            if not open_ones:
                return
            time.sleep(CARE_S)

    def figures(self) -> dict[str, Any]:
        """The campaign in numbers."""
        kinds = Counter(one.kind for one in self.found)
        names = ("lost", "doubled", "half-written", "unfinished", "orphan", "damaged")
        return {
            "kills": len(self.done),
            "victims": dict(sorted(Counter(kill.victim for kill in self.done).items())),
            "moments": dict(sorted(Counter(kill.moment for kill in self.done).items())),
            "after": dict(sorted(Counter(kill.after for kill in self.done).items())),
            "boundaries_missed": self.boundaries_missed(),
            "cycles": dict(self.cycles),
            "approvals": self.approvals,
            "rows_remembered": {name: len(keys) for name, keys in self.remembered.items()},
            **{name: kinds[name] for name in names},
            "violations": [f"{one.kind}: {one.what}" for one in self.found],
        }
