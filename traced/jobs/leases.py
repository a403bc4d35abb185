"""Device leases: wait until a device is idle, lease it, train on it, and give it back on preemption.

Invariants: a trainer runs only while its device is leased and has ended before the lease is released, however the body
ends. Preemption (a request for the device, quiet hours, foreign load for ``devices.busy_s``) loses no work: the trainer
saves a checkpoint and continues later. A trainer that saves none within ``devices.yield_s``, or whose lease has lapsed,
is stopped at once and resumes at its last checkpoint.

Errors: those of the store while waiting, and those of the work; while a lease is held, a failing store is retried. Not
covered: fairness between waiters; which model serves meanwhile.
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

from sqlalchemy import Engine

from sandbox.docker_engine import process_ids
from store.database import write_session
from store.errors import LeaseLost, StoreError, StoreUnavailable
from store.repositories.leases import Lease, acquire, get_lease, heartbeat, release
from traced.config.service_sections import DevicesSection
from traced.core.ownership import own_identity
from traced.core.time_windows import closed_reason
from traced.jobs.devices import DeviceReading, Probe, Readings, machine_probe, process_trees
from traced.jobs.idleness import IdleWatch, Rules, blocking_reason, foreign_load, observe, rules, suitable_devices
from traced.jobs.retry import AttemptLedger, OnReport, run_to_completion, waiting_report
from traced.processes.job import Preempted, Report

# Heartbeats come at least this often, as a share of the lease's time to live.
HEARTBEAT_SHARE = 0.25
# After this share without a successful heartbeat the holder treats the lease as lapsed. Below 1, so that the holder
# stops before anybody else may acquire the device.
LAPSE_SHARE = 0.75
# The value of "after" in the report of a wait for a device; such a wait is no failure and raises no alarm.
FOR_DEVICE = "device"

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Clocks:
    """Time sources: ``now`` in UTC, ``monotonic`` and ``sleep`` in seconds."""

    now: Callable[[], datetime]
    monotonic: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(frozen=True)
class LeaseRequest:
    """A request to use a device for a purpose; ``holder`` identifies this use (``traced.core.ownership``)."""

    holder: str
    purpose: str
    cycle_id: str | None
    ttl: timedelta


@dataclass
class DeviceLease:
    """A leased device.

    Args:
        heartbeat_sent_at: Monotonic second at which the last successful heartbeat was sent.
        preempted: Set when the holder has to stop, and never cleared.
        reason: Why it has to stop; "" while ``preempted`` is not set.
        lapsed: Whether somebody else may acquire the device at any moment.
    """

    device: DeviceReading
    lease: Lease
    heartbeat_sent_at: float
    preempted: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""
    lapsed: bool = False

    def revoke(self, reason: str, *, lapsed: bool = False) -> None:
        """Ask the body to stop; the first reason is kept."""
        self.reason = self.reason or reason
        self.lapsed = self.lapsed or lapsed
        self.preempted.set()


@dataclass(frozen=True)
class DeviceAccess:
    """What a training needs to lease a device; ``limits`` is called at every use, because settings may change."""

    store: Engine
    probe: Probe
    limits: Callable[[], Rules]
    request: LeaseRequest
    clocks: Clocks


def device_access(
    devices: Callable[[], DevicesSection], store: Engine, ledger: AttemptLedger, cycle_id: str, purpose: str
) -> DeviceAccess:
    """Build the device access of a training from the current settings."""
    return DeviceAccess(
        store=store,
        probe=machine_probe(_service_pids),
        limits=lambda: rules(devices()),
        request=LeaseRequest(own_identity(purpose), purpose, cycle_id, timedelta(seconds=devices().lease_ttl_s)),
        clocks=Clocks(ledger.now, monotonic, ledger.sleep),
    )


async def run_on_device(
    access: DeviceAccess, pause: Path, work: Callable[[DeviceReading], Awaitable[T]], on_report: OnReport
) -> T:
    """Run ``work`` on a leased device, again after every preemption, until it returns a value.

    Args:
        pause: The file whose existence asks the trainer to save a checkpoint and stop.
    """
    reporter = _WaitReporter(on_report, access.limits().poll_s)
    while True:
        try:
            async with device_lease(
                access.store, access.probe, access.limits, access.request, access.clocks, on_wait=reporter.report_waits
            ) as lease:
                # The file is left over if the last request came after its trainer had ended.
                pause.unlink(missing_ok=True)
                with suppress(Preempted):
                    return await _run_until_preempted(access, lease, pause, work)
            reporter.report(f"the lease on {lease.device.id} was returned: {lease.reason}")
        except StoreUnavailable as error:
            reporter.report(str(error))
            await access.clocks.sleep(access.limits().poll_s)


@asynccontextmanager
async def device_lease(
    engine: Engine,
    probe: Probe,
    limits: Callable[[], Rules],
    request: LeaseRequest,
    clocks: Clocks,
    *,
    on_wait: Callable[[Mapping[str, str]], None],
) -> AsyncIterator[DeviceLease]:
    """Wait for an idle device and hold its lease while the body runs.

    The body is not stopped: it watches ``DeviceLease.preempted`` and ends at its next safe point.

    Args:
        on_wait: Called after each unsuccessful round with the reason per device (key "" if there is no device).
    """
    lease = await _DeviceWait(engine, probe, limits, request, clocks).until_idle(on_wait)
    pause_s = min(limits().poll_s, HEARTBEAT_SHARE * lease.lease.ttl.total_seconds())
    tasks = [
        asyncio.create_task(_send_heartbeats(engine, lease, clocks, pause_s)),
        asyncio.create_task(_watch_lapse(lease, clocks)),
    ]
    try:
        yield lease
    finally:
        for task in tasks:
            task.cancel()
        await run_to_completion(_release, engine, lease.device.id, request.holder)
    # Raise a defect of the heartbeat or lapse task, which would otherwise pass unnoticed.
    for task in tasks:
        if not task.cancelled() and task.done():
            task.result()


@dataclass
class _DeviceWait:
    """A wait for a device, with the idle times of devices and the heartbeats of other leases observed so far."""

    engine: Engine
    probe: Probe
    limits: Callable[[], Rules]
    request: LeaseRequest
    clocks: Clocks
    watches: dict[str, IdleWatch] = field(default_factory=dict)
    sightings: dict[str, tuple[Lease, float]] = field(default_factory=dict)

    async def until_idle(self, on_wait: Callable[[Mapping[str, str]], None]) -> DeviceLease:
        while True:
            readings, limits = await asyncio.to_thread(self.probe.read), self.limits()
            reasons = {}
            for device in self._observe(readings, limits):
                result = await self._acquire(device, limits)
                if isinstance(result, DeviceLease):
                    return result
                reasons[device.id] = result
            on_wait(
                reasons
                or {"": "; ".join(readings.problems) or f"no device matches devices.train_on = {limits.train_on!r}"}
            )
            await self.clocks.sleep(limits.poll_s)

    def _observe(self, readings: Readings, limits: Rules) -> list[DeviceReading]:
        """Update the watches and return the suitable devices; a device that disappeared loses its watch."""
        at, devices = self.clocks.monotonic(), suitable_devices(readings.devices, limits.train_on)
        self.watches = {
            device.id: observe(self.watches.get(device.id, IdleWatch()), device, limits, at) for device in devices
        }
        return devices

    async def _acquire(self, device: DeviceReading, limits: Rules) -> DeviceLease | str:
        """Lease the device, or return why it is not available."""
        at = self.clocks.monotonic()
        reason = blocking_reason(self.watches[device.id], limits, at, self.clocks.now())
        if reason:
            return reason
        try:
            lease = await run_to_completion(self._acquire_in_store, device.id)
        except asyncio.CancelledError:
            # The transaction may have succeeded before the cancellation.
            await run_to_completion(_release, self.engine, device.id, self.request.holder)
            raise
        if lease is None:
            return "its lease was returned just now"
        if lease.holder == self.request.holder:
            return DeviceLease(device, lease, at)
        return f"leased to {lease.holder} since {lease.acquired_at:%Y-%m-%d %H:%M:%S} UTC for {lease.purpose}"

    def _acquire_in_store(self, device: str) -> Lease | None:
        """Try to acquire the lease and return the device's lease afterwards: ours or the holder's."""
        request, now = self.request, self.clocks.now()
        with write_session(self.engine) as session:
            current = get_lease(session, device)
            # A lapsed lease is taken over only if its holder was also silent by our monotonic clock. Otherwise a clock
            # stepped forward, or two machines whose clocks differ, would take the device from a live holder.
            if current is not None and not self._was_silent(current) and not current.live(now):
                return current
            acquired = acquire(
                session, device, request.holder, request.purpose, request.cycle_id, at=now, ttl=request.ttl
            )
            return acquired or get_lease(session, device)

    def _was_silent(self, lease: Lease) -> bool:
        """Return whether this lease had no heartbeat for its whole time to live, by the monotonic clock."""
        now = self.clocks.monotonic()
        previous, first_seen = self.sightings.get(lease.device, (None, now))
        if previous is None or (previous.holder, previous.heartbeat_at) != (lease.holder, lease.heartbeat_at):
            self.sightings[lease.device] = lease, now
            return False
        return now - first_seen >= lease.ttl.total_seconds()


async def _send_heartbeats(engine: Engine, lease: DeviceLease, clocks: Clocks, pause_s: float) -> None:
    """Send heartbeats until the lease is lost; errors of the store are retried."""
    while True:
        await clocks.sleep(pause_s)
        sent_at = clocks.monotonic()
        try:
            lease.lease = await asyncio.to_thread(_heartbeat, engine, lease.lease, clocks.now())
        except LeaseLost as error:
            lease.revoke(str(error), lapsed=True)
            return
        except StoreError as error:
            log.warning("the heartbeat of the lease on %s failed: %s", lease.device.id, error)
            continue
        lease.heartbeat_sent_at = sent_at
        if lease.lease.wanted_by:
            lease.revoke(f"{lease.lease.wanted_by} requested it back")


async def _watch_lapse(lease: DeviceLease, clocks: Clocks) -> None:
    """Revoke the lease after too long without a heartbeat, even if the heartbeat's transaction hangs."""
    limit_s = LAPSE_SHARE * lease.lease.ttl.total_seconds()
    while (remaining_s := lease.heartbeat_sent_at + limit_s - clocks.monotonic()) > 0:
        await clocks.sleep(remaining_s)
    lease.revoke(f"no heartbeat was stored for {limit_s:g} s", lapsed=True)


def _heartbeat(engine: Engine, lease: Lease, at: datetime) -> Lease:
    with write_session(engine) as session:
        return heartbeat(session, lease.device, lease.holder, at)


def _release(engine: Engine, device: str, holder: str) -> None:
    try:
        with write_session(engine) as session:
            release(session, device, holder)
    except StoreError as error:
        log.warning("the lease on %s could not be returned, it expires: %s", device, error)


async def _run_until_preempted(
    access: DeviceAccess, lease: DeviceLease, pause: Path, work: Callable[[DeviceReading], Awaitable[T]]
) -> T:
    working = asyncio.ensure_future(work(lease.device))
    preempted = asyncio.ensure_future(lease.preempted.wait())
    watching = asyncio.ensure_future(_watch_device(access, lease))
    try:
        try:
            await asyncio.wait({working, preempted}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await _pause(access, lease, pause, working)
        except asyncio.CancelledError:
            # Cancellation (the service drains) waits for the checkpoint. A second cancellation does not wait.
            await _pause(access, lease, pause, working)
            raise
        if working.cancelled():
            raise Preempted(lease.reason)
        return working.result()
    finally:
        for task in (working, preempted, watching):
            task.cancel()
        await asyncio.gather(working, preempted, watching, return_exceptions=True)


async def _pause(access: DeviceAccess, lease: DeviceLease, pause: Path, working: "asyncio.Future[Any]") -> None:
    """Request a checkpoint and return when the work has ended; cancel the work after ``yield_s``."""
    # On a lapsed lease somebody else may use the device, so there is no time for a checkpoint.
    if not lease.lapsed:
        pause.parent.mkdir(parents=True, exist_ok=True)
        pause.touch()
        timeout = asyncio.ensure_future(access.clocks.sleep(access.limits().yield_s))
        try:
            await asyncio.wait({working, timeout}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timeout.cancel()
    if not working.done():
        working.cancel()
        await asyncio.wait({working})


async def _watch_device(access: DeviceAccess, lease: DeviceLease) -> None:
    """Revoke the lease when quiet hours begin or foreign load lasts for ``busy_s``."""
    busy_since: float | None = None
    while True:
        await access.clocks.sleep(access.limits().poll_s)
        limits = access.limits()
        quiet_hours = closed_reason((), limits.quiet_windows, access.clocks.now(), limits.zone)
        if quiet_hours:
            return lease.revoke(quiet_hours)
        devices = (await asyncio.to_thread(access.probe.read)).devices
        loads = [foreign_load(device, limits.of(device)) for device in devices if device.id == lease.device.id]
        at = access.clocks.monotonic()
        if not any(loads):
            busy_since = None
        elif busy_since is None:
            busy_since = at
        if busy_since is not None and at - busy_since >= limits.busy_s:
            return lease.revoke("; ".join(loads[0]))


@dataclass
class _WaitReporter:
    """Reports why a training waits, without repeating a reason."""

    on_report: Callable[[Report], None]
    poll_s: float
    last: str = ""

    def report_waits(self, reasons: Mapping[str, str]) -> None:
        self.report("; ".join(f"{device}: {reason}".removeprefix(": ") for device, reason in reasons.items()))

    def report(self, text: str) -> None:
        # A reason in which only the number of seconds changes is the same reason.
        key = re.sub(r"\d+", "", text)
        if key != self.last:
            self.last = key
            self.on_report(waiting_report(self.poll_s, text, FOR_DEVICE))


def _service_pids() -> frozenset[int]:
    """Return the ids of this service's processes and of those in its containers, whose parent is the Docker engine."""
    pids = process_trees([os.getpid()])
    return pids | process_trees(process_ids(pids))
