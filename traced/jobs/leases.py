"""Holding a device for as long as a stage uses it: wait until it is idle, lease it, keep it, give it back.

Invariants: ``held`` yields only while this holder has the lease; ``wanted`` is set, for good, as soon as somebody asks
for the device back, the lease is lost, or no heartbeat has reached the store for ``LOST_AT`` of its time to live, which
is before anybody else may take it; the lease is given back however the body ends, cancelled at any moment too.
A lease that lapsed is taken over only after it was also seen without a heartbeat for its whole time to live by this
process's monotonic clock: a clock stepped forward, a machine that slept, or two machines whose clocks differ take no
device from a live holder.

Fails: what the store raises while waiting goes to the caller. Once the lease is held a store that fails is asked again
until it answers; where even giving back fails, the lease lapses by itself and a warning is logged.
Not covered: stopping the body: it watches ``wanted`` and ends at its next safe point. Fairness between waiters.

Training on a leased device: wait for one, train, give way when it is wanted, and go on later.

Invariants: a trainer runs only while its device is leased, and has ended before the lease is given back. Giving way
costs nothing that was done: the trainer saves a checkpoint after the iteration at work (``TrainingJob.pause``) and its
attempt ends as stopped, which no input is blamed for. It gives way to whoever asks for the device back, to quiet hours,
and to foreign load that lasts ``devices.busy_s``; training's own load, that of its containers too, is none.
A trainer that has no checkpoint after ``devices.yield_s`` is stopped and begins again at its last one, as is one whose
lease was lost, at once. Being cancelled (the service drains, the cycle is stopped) waits for that checkpoint as well,
while it gives way too; cancelled once more, it does not.

How it fails: as the work does; a store that fails while waiting is asked again. Not covered: which model serves
meanwhile.
"""

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import sqlalchemy
from sqlalchemy import Engine

from sandbox.docker_engine import process_ids
from store.database import session
from store.errors import LeaseLost, StoreError, StoreUnavailable
from store.repositories.leases import Lease, acquire, get_lease, heartbeat, release
from traced.config.service_sections import DevicesSection
from traced.core.ownership import this_holder
from traced.core.time_windows import why_closed
from traced.jobs.devices import CpuProbe, DeviceReading, NvmlProbe, Probe, Probes, Readings, trees
from traced.jobs.idleness import Rules, Watch, intrusions, observe, rules, suitable, why_not_begin
from traced.jobs.retry import Ledger, OnReport, waiting
from traced.processes.job import Report, Yielded

BEAT_AT = 0.25  # heartbeats come at least this often, as a share of the time to live
LOST_AT = 0.75  # without any success for this share of it, the lease counts as lost

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Clocks:
    """``now`` in UTC, ``monotonic`` and ``sleep`` in seconds."""

    now: Callable[[], datetime]
    monotonic: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(frozen=True)
class Wish:
    """Who wants a device for what; ``holder`` names this use (``traced.core.ownership``)."""

    holder: str
    purpose: str
    cycle_id: str | None
    ttl: timedelta


@dataclass
class Hold:
    """A device in use; ``reason`` says who wants it back or how the lease was lost, "" while ``wanted`` is not set.

    ``kept_at`` is the monotonic second at which the last heartbeat that reached the store was sent.
    """

    device: DeviceReading
    lease: Lease
    kept_at: float
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""
    lost: bool = False

    def give_up(self, reason: str, *, lost: bool = False) -> None:
        """Tell the body to end; the first reason stays. ``lost``: somebody else may have the device any moment."""
        self.reason = self.reason or reason
        self.lost = self.lost or lost
        self.wanted.set()


@asynccontextmanager
async def held(
    engine: Engine,
    probe: Probe,
    limits: Callable[[], Rules],
    wish: Wish,
    clocks: Clocks,
    *,
    on_wait: Callable[[Mapping[str, str]], None],
) -> AsyncIterator[Hold]:
    """Wait for a suitable device to be idle, and hold its lease; ``limits`` are asked anew at every look.

    ``on_wait`` gets, at every look in vain, why each suitable device cannot be had (key "" where none is seen).
    """
    hold = await _Waiting(engine, probe, limits, wish, clocks).until_idle(on_wait)
    pause_s = min(limits().poll_s, BEAT_AT * hold.lease.ttl.total_seconds())
    keepers = [asyncio.create_task(keep) for keep in (_beat(engine, hold, clocks, pause_s), _doubt(hold, clocks))]
    try:
        yield hold
    finally:
        for keeper in keepers:
            keeper.cancel()
        await _to_the_end(_give_back, engine, hold.device.id, wish.holder)
    for keeper in keepers:
        if not keeper.cancelled() and keeper.done():
            keeper.result()  # a defect in keeping the lease is not passed over


@dataclass
class _Waiting:
    """One wait for a device, and what it has seen so far of the devices' rest and of others' leases."""

    engine: Engine
    probe: Probe
    limits: Callable[[], Rules]
    wish: Wish
    clocks: Clocks
    watches: dict[str, Watch] = field(default_factory=dict)
    sightings: dict[str, tuple[Lease, float]] = field(default_factory=dict)

    async def until_idle(self, on_wait: Callable[[Mapping[str, str]], None]) -> Hold:
        while True:
            readings, limits = await asyncio.to_thread(self.probe.read), self.limits()
            waits = {}
            for device in self._looked_at(readings, limits):
                answer = await self._take(device, limits)
                if isinstance(answer, Hold):
                    return answer
                waits[device.id] = answer
            on_wait(waits or {"": "; ".join(readings.problems) or f"no device {limits.train_on!r} is seen"})
            await self.clocks.sleep(limits.poll_s)

    def _looked_at(self, readings: Readings, limits: Rules) -> list[DeviceReading]:
        """The suitable devices, each with its watch up to date; the watch of one no longer seen is forgotten."""
        at, devices = self.clocks.monotonic(), suitable(readings.devices, limits.train_on)
        self.watches = {
            device.id: observe(self.watches.get(device.id, Watch()), device, limits, at) for device in devices
        }
        return devices

    async def _take(self, device: DeviceReading, limits: Rules) -> Hold | str:
        """The device, or why it cannot be had now."""
        asked_at = self.clocks.monotonic()
        why_not = why_not_begin(self.watches[device.id], limits, asked_at, self.clocks.now())
        if why_not:
            return why_not
        try:
            lease = await _to_the_end(self._ask, device.id)
        except asyncio.CancelledError:
            await _to_the_end(_give_back, self.engine, device.id, self.wish.holder)
            raise
        if lease is None:
            return "it was given back in this moment"
        if lease.holder == self.wish.holder:
            return Hold(device, lease, asked_at)
        return f"{lease.holder} has it since {lease.acquired_at:%Y-%m-%d %H:%M:%S} UTC for {lease.purpose}"

    def _ask(self, device: str) -> Lease | None:
        """The device's lease after asking for it: ours, or the one that stands in the way."""
        wish, now = self.wish, self.clocks.now()
        with session(self.engine) as opened:
            standing = get_lease(opened, device)
            if standing is not None and not self._was_silent(standing) and not standing.live(now):
                return standing
            taken = acquire(opened, device, wish.holder, wish.purpose, wish.cycle_id, at=now, ttl=wish.ttl)
            return taken or get_lease(opened, device)

    def _was_silent(self, lease: Lease) -> bool:
        """Whether no heartbeat of this lease was seen for its whole time to live, by the monotonic clock."""
        at = self.clocks.monotonic()
        seen, since = self.sightings.get(lease.device, (None, at))
        if seen is None or (seen.holder, seen.heartbeat_at) != (lease.holder, lease.heartbeat_at):
            self.sightings[lease.device] = lease, at
            return False
        return at - since >= lease.ttl.total_seconds()


async def _beat(engine: Engine, hold: Hold, clocks: Clocks, pause_s: float) -> None:
    """Heartbeats until the lease is lost; a store that fails is asked again."""
    while True:
        await clocks.sleep(pause_s)
        sent_at = clocks.monotonic()
        try:
            hold.lease = await asyncio.to_thread(_say_alive, engine, hold.lease, clocks.now())
        except LeaseLost as lost:
            hold.give_up(str(lost), lost=True)
            return
        except StoreError as error:
            log.warning("no heartbeat for the lease on %s: %s", hold.device.id, error)
            continue
        hold.kept_at = sent_at
        if hold.lease.wanted_by:
            hold.give_up(f"{hold.lease.wanted_by} asks for it back")


async def _doubt(hold: Hold, clocks: Clocks) -> None:
    """Counts the lease as lost once no heartbeat has come through for too long, a database that hangs included."""
    patience = LOST_AT * hold.lease.ttl.total_seconds()
    while (left := hold.kept_at + patience - clocks.monotonic()) > 0:
        await clocks.sleep(left)
    hold.give_up(f"no heartbeat has reached the store for {patience:g} s", lost=True)


def _say_alive(engine: Engine, lease: Lease, at: datetime) -> Lease:
    with session(engine) as opened:
        return heartbeat(opened, lease.device, lease.holder, at)


def _give_back(engine: Engine, device: str, holder: str) -> None:
    try:
        with session(engine) as opened:
            release(opened, device, holder)
    except StoreError as error:
        log.warning("the lease on %s could not be given back and lapses by itself: %s", device, error)


async def _to_the_end(call: Callable[..., Answer], *arguments: object) -> Answer:
    """``call`` in a thread, waited for even when this task is cancelled meanwhile; the cancellation is raised after."""
    running = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        running.exception()  # seen, so that asyncio does not report it as forgotten
        raise cancelled
    return running.result()


T = TypeVar("T")
FOR_DEVICE = "device"  # what such a wait comes after: nothing is wrong, so nobody is told of it as of a trouble


@dataclass(frozen=True)
class Lending:
    """What a training needs to get a device, and when it gives it back; ``limits`` are asked whenever they count."""

    store: sqlalchemy.Engine
    probe: Probe
    limits: Callable[[], Rules]
    wish: Wish
    clocks: Clocks


def lending(
    devices: Callable[[], DevicesSection], store: sqlalchemy.Engine, ledger: Ledger, cycle_id: str, purpose: str
) -> Lending:
    """As the settings of devices say, which may change while a training waits or runs."""
    ttl = timedelta(seconds=devices().lease_ttl_s)
    return Lending(
        store=store,
        probe=Probes([NvmlProbe(_ours), CpuProbe(_ours)]),
        limits=lambda: rules(devices()),
        wish=Wish(this_holder(purpose), purpose, cycle_id, ttl),
        clocks=Clocks(ledger.now, monotonic, ledger.sleep),
    )


async def on_device(
    lent: Lending, pause: Path, work: Callable[[DeviceReading], Awaitable[T]], on_report: OnReport
) -> T:
    """The answer of ``work``, which is begun on a device as often as it has to give way; ``pause`` asks it to."""
    said = _Waits(on_report, lent.limits().poll_s)
    while True:
        try:
            async with held(lent.store, lent.probe, lent.limits, lent.wish, lent.clocks, on_wait=said.hear) as hold:
                pause.unlink(missing_ok=True)  # of a wish that came when the trainer had ended
                with suppress(Yielded):
                    return await _until_wanted(lent, hold, pause, work)
            said.say(f"{hold.device.id} was given back: {hold.reason}")
        except StoreUnavailable as error:
            said.say(str(error))
            await lent.clocks.sleep(lent.limits().poll_s)


async def _until_wanted(lent: Lending, hold: Hold, pause: Path, work: Callable[[DeviceReading], Awaitable[T]]) -> T:
    working = asyncio.ensure_future(work(hold.device))
    beside: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(hold.wanted.wait()),
        asyncio.ensure_future(_watch(lent, hold)),
    ]
    try:
        try:
            await asyncio.wait({working, beside[0]}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await _ask_to_pause(lent, hold, pause, working)
        except asyncio.CancelledError:  # the service drains: the same safe point; a second cancelling does not wait
            await _ask_to_pause(lent, hold, pause, working)
            raise
        if working.cancelled():
            raise Yielded(hold.reason)
        return working.result()
    finally:
        for each in (working, *beside):
            each.cancel()
        await asyncio.gather(working, *beside, return_exceptions=True)


async def _ask_to_pause(lent: Lending, hold: Hold, pause: Path, working: "asyncio.Future[Any]") -> None:
    """Return when the work has ended: at a checkpoint, or stopped where that takes too long."""
    if not hold.lost:
        pause.parent.mkdir(parents=True, exist_ok=True)
        pause.touch()
        patience = asyncio.ensure_future(lent.clocks.sleep(lent.limits().yield_s))
        try:
            await asyncio.wait({working, patience}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            patience.cancel()
    if not working.done():
        working.cancel()
        await asyncio.wait({working})


async def _watch(lent: Lending, hold: Hold) -> None:
    """Give the device up once quiet hours begin or others have used it for too long."""
    busy_since: float | None = None
    while True:
        await lent.clocks.sleep(lent.limits().poll_s)
        limits = lent.limits()
        quiet = why_closed((), limits.quiet, lent.clocks.now(), limits.zone)
        if quiet:
            return hold.give_up(quiet)
        seen = (await asyncio.to_thread(lent.probe.read)).devices
        found = [intrusions(device, limits.of(device)) for device in seen if device.id == hold.device.id]
        at = lent.clocks.monotonic()
        if not any(found):
            busy_since = None
        elif busy_since is None:
            busy_since = at
        if busy_since is not None and at - busy_since >= limits.busy_s:
            return hold.give_up("; ".join(found[0]))


@dataclass
class _Waits:
    """Tells why a training waits, each reason once in a row; the seconds in it are no other reason."""

    on_report: Callable[[Report], None]
    poll_s: float
    last: str = ""

    def hear(self, why: Mapping[str, str]) -> None:
        self.say("; ".join(f"{device}: {reason}".removeprefix(": ") for device, reason in why.items()))

    def say(self, what: str) -> None:
        same = re.sub(r"\d+", "", what)
        if same != self.last:
            self.last = same
            self.on_report(waiting(self.poll_s, what, FOR_DEVICE))


def _ours() -> frozenset[int]:
    """This service's processes, and those in its containers, whose parent is the Docker engine."""
    own = trees([os.getpid()])
    return own | trees(process_ids(own))
