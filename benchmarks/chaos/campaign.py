"""A campaign: cycles under ``traced up``, and processes of it killed at node boundaries and at random moments.

Invariants: what is killed when follows from the seed and from what runs; a service or Docker engine that was killed is
started again as it stands, nothing is repaired by hand; adapters that wait are approved through the control API, and an
approval whose answer was lost is asked for again. Each of the first ``least_cycles`` cycles gets its share of the
kills: one that has had it finishes undisturbed, so that the next one begins with what it has promoted. After the last
kill the cycle at work has to finish by itself, then the service is stopped in order and ``violations`` looks.
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

from benchmarks.chaos.boundaries import BOUNDARIES, Watch, incumbent_models
from benchmarks.chaos.dockerd import Dockerd
from benchmarks.chaos.place import Place
from benchmarks.chaos.victims import kinds, running_processes
from benchmarks.chaos.violations import Remembered, Violation, remember, violations
from store.database import read_session
from store.records import CycleState
from store.repositories.cycles import ENDED_STATES, list_cycles
from traced.client import Client, NoDaemon, RequestRefused

POLL_S = 0.02
BOUNDARY_S = 90.0  # a boundary where nothing was killed yet is waited for so long, then the kill comes anyway
AT_ONCE = 0.5  # how often the daemon is killed at a boundary before anybody looks at what else runs
CARE_S = 0.5  # between two looks at whether everything runs
LONGEST_WAIT_S = 8.0  # before a kill at a random moment
NEVER_KILLED_S = 600.0  # how long a kind that was never killed is waited for, at the end: a cycle and more
MOMENTS = {"boundary": 0.6, "random": 0.2, "presence": 0.2}  # when to kill, and how often so
APPROVER = "the campaign approves what passes"


@dataclass(frozen=True)
class Kill:
    """One kill: the kind of process, one of the ``MOMENTS``, the last boundary passed, and the number of the cycle."""

    victim: str
    moment: str
    boundary: str
    cycle: int


@dataclass
class Campaign:
    """A series of kills and the violations that followed."""

    place: Place
    dockerd: Dockerd | None
    kills: int
    seed: int
    timeout_s: float
    least_cycles: int = 1
    log: Callable[[str], None] = lambda _: None
    done: list[Kill] = field(default_factory=list)
    cycles: Counter[str] = field(default_factory=Counter)
    incumbents: dict[int, list[str]] = field(default_factory=dict)  # adapters of the finished cycles', by number
    approvals: int = 0
    violations: list[Violation] = field(default_factory=list)
    remembered: Remembered = field(default_factory=dict)
    deadline: float = 0.0

    def run(self) -> None:
        """Kill processes, let the last cycle finish, stop the service, and collect the violations."""
        self.deadline = time.monotonic() + self.timeout_s
        rng = random.Random(self.seed)
        store = self.place.open_store()
        watch = Watch(store)
        try:
            while len(self.done) < self.kills and time.monotonic() < self.deadline:
                self._keep_going(store)
                if self.has_its_share(store):
                    time.sleep(CARE_S)
                else:
                    self._kill_process(store, watch, rng)
            self._finish(store)
            code = self.place.stop()
            self.violations = violations(store, self.place.data_dir, self.remembered, self.place.marks)
            self.violations += [Violation("unfinished", f"the service ended with exit code {code}")] if code else []
            self.read_cycles(store)
        finally:
            self.place.kill()
            store.dispose()

    def read_cycles(self, store: Engine) -> None:
        """Read in which states the cycles ended, and the incumbents of the finished ones."""
        with read_session(store) as session:
            cycles = list_cycles(session)[::-1]
            self.incumbents = {
                number: incumbent_models(session, cycle.id) or []
                for number, cycle in enumerate(cycles, 1)
                if cycle.state is CycleState.FINISHED
            }
        self.cycles = Counter(cycle.state.value for cycle in cycles)

    def _kill_process(self, store: Engine, watch: Watch, rng: random.Random) -> None:
        """Wait for a random moment, then kill one process; kinds with few kills are preferred, so that all occur."""
        (moment,) = rng.choices([*MOMENTS], [*MOMENTS.values()])
        counts = Counter(kill.victim for kill in self.done)
        rarest_kind = min(kinds(self.dockerd), key=lambda kind: (counts[kind], rng.random()))
        patience_s = BOUNDARY_S
        if sum(not counts[kind] for kind in kinds(self.dockerd)) >= self.kills - len(self.done):
            moment, patience_s = "presence", NEVER_KILLED_S
        at_once, boundary = moment == "boundary" and rng.random() < AT_ONCE, ""
        if moment == "boundary":
            boundary = self._until_boundary(store, watch)
        elif moment == "random":
            time.sleep(rng.uniform(0, LONGEST_WAIT_S))
        if at_once and self.place.alive:
            running = {"daemon": [psutil.Process(self.place.pid)]}
        elif moment == "presence":
            running = self._until_present(store, rarest_kind, patience_s)
        else:
            running = running_processes(self.place, self.dockerd)
        if not running:
            return
        victim = min(sorted(running), key=lambda kind: (counts[kind] + rng.random() * 2, kind))
        remember(store, self.remembered)
        watch.look()
        moment = moment if boundary or moment != "boundary" else "random"
        kill = Kill(victim, moment, boundary or watch.last_boundary, _newest_number(store))
        with contextlib.suppress(psutil.NoSuchProcess):
            rng.choice(sorted(running[victim], key=lambda process: process.pid)).kill()
            if victim == "dockerd" and self.dockerd is not None:
                self.dockerd.kill()  # until it is gone: who connects to one that dies leaks a socket (docker-py)
            self.done.append(kill)
            self.log(f"{len(self.done)} of {self.kills}: {victim} ({kill.moment}, cycle {kill.cycle}, {kill.boundary})")

    def _until_present(self, store: Engine, kind: str, patience_s: float) -> dict[str, list[psutil.Process]]:
        """Wait until a process of ``kind`` runs (some live for seconds only); returns the running processes by kind."""
        patience = min(time.monotonic() + patience_s, self.deadline)
        while kind not in (running := running_processes(self.place, self.dockerd)):
            if time.monotonic() > patience:
                return running
            self._keep_going(store)
            time.sleep(CARE_S / 2)
        return {kind: running[kind]}

    def _until_boundary(self, store: Engine, watch: Watch) -> str:
        """Wait until a boundary without a kill is passed; returns its name, or "" after the time limit."""
        targets = set(self.boundaries_missed()) or {*BOUNDARIES}
        watch.look()
        patience, care = min(time.monotonic() + BOUNDARY_S, self.deadline), 0.0
        while time.monotonic() < patience:
            if hit := [name for name in watch.look() if name in targets]:
                return hit[-1]
            if time.monotonic() > care:
                self._keep_going(store)
                care = time.monotonic() + CARE_S
            time.sleep(POLL_S)
        return ""

    def has_its_share(self, store: Engine) -> bool:
        """Return whether the newest cycle has had its kills; the last of ``least_cycles`` has all that are left."""
        number = _newest_number(store)
        kills = sum(kill.cycle == number for kill in self.done)
        return number < self.least_cycles and kills >= self.kills // self.least_cycles

    def boundaries_missed(self) -> list[str]:
        """The boundaries at which nothing was killed yet."""
        hit = {kill.boundary for kill in self.done if kill.moment == "boundary"}
        return [name for name in BOUNDARIES if name not in hit]

    def _keep_going(self, store: Engine) -> None:
        """Restart killed processes, start a cycle where none runs, and approve waiting adapters."""
        if self.dockerd is not None and not self.dockerd.alive:
            self.dockerd.kill()  # collects the dead process
            self.dockerd.start()
        if not self.place.alive:
            self.place.kill()
            self.place.start()
        with read_session(store) as session:
            cycle = next(iter(list_cycles(session, limit=1)), None)
        with contextlib.suppress(NoDaemon, RequestRefused):
            if cycle is None or (cycle.state in ENDED_STATES and len(self.done) < self.kills):
                self.place.ask(lambda client: client.start_cycle("chaos"))
            elif cycle.state is CycleState.WAITING:
                self._approve()

    def _approve(self) -> None:
        for adapter in self.place.status().waiting:
            self.place.ask(partial(Client.approve, adapter=adapter, reason=APPROVER))
            self.approvals += 1

    def _finish(self, store: Engine) -> None:
        """Wait until every cycle has ended or the deadline has passed."""
        while time.monotonic() < self.deadline:
            self._keep_going(store)
            with read_session(store) as session:
                open_cycles = [cycle for cycle in list_cycles(session) if cycle.state not in ENDED_STATES]
            if not open_cycles:
                return
            time.sleep(CARE_S)

    def figures(self) -> dict[str, Any]:
        """The counts of the campaign by name."""
        kinds = Counter(violation.kind for violation in self.violations)
        kills_by_cycle = Counter(kill.cycle for kill in self.done)
        names = ("lost", "doubled", "half-written", "unfinished", "orphan", "damaged")
        return {
            "kills": len(self.done),
            "victims": dict(sorted(Counter(kill.victim for kill in self.done).items())),
            "moments": dict(sorted(Counter(kill.moment for kill in self.done).items())),
            "after": dict(sorted(Counter(kill.boundary for kill in self.done).items())),
            "boundaries_missed": self.boundaries_missed(),
            "cycles": dict(self.cycles),
            "kills_by_cycle": dict(sorted(kills_by_cycle.items())),
            "cycles_without_kill": [n for n in range(1, self.least_cycles + 1) if not kills_by_cycle[n]],
            "incumbents": self.incumbents,
            "without_adapters": [number for number in [*self.incumbents][1:] if not self.incumbents[number]],
            "approvals": self.approvals,
            "rows_remembered": {name: len(keys) for name, keys in self.remembered.items()},
            **{name: kinds[name] for name in names},
            "violations": [f"{violation.kind}: {violation.subject}" for violation in self.violations],
        }


def _newest_number(store: Engine) -> int:
    """Return the number of the newest cycle, from 1; 0 without one."""
    with read_session(store) as session:
        return len(list_cycles(session))
