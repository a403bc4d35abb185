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
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TypeVar

from sqlalchemy import Engine

from store.database import session
from store.errors import LeaseLost, StoreError
from store.repositories.leases import Lease, acquire, get_lease, heartbeat, release
from traced.devices.idle import Rules, Watch, observe, suitable, why_not_begin
from traced.devices.probe import DeviceReading, Probe, Readings

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
    """Who wants a device for what; ``holder`` names this use (``traced.host.holder``)."""

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
