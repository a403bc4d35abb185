"""Device leases: wait until devices are idle, lease them, train on them, and give them back on preemption.

Invariants: a trainer runs only while its devices are leased and has ended before the leases are released, however the
body ends. Several GPUs are leased in one transaction or not at all, so that two trainings never wait for each other.
Preemption (a request for a device, quiet hours, foreign load for ``devices.busy_s``) loses no work: the trainer saves a
checkpoint and continues later, also on another device. A trainer that saves none within ``devices.yield_s``, or whose
lease has lapsed, is stopped at once and resumes at its last checkpoint.

Errors: those of the store while waiting, and those of the work; while a lease is held, a failing store is retried. Not
covered: fairness between waiters; which model serves meanwhile.
"""

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from sqlalchemy import Engine
from sqlmodel import Session

from sandbox.docker_engine import process_ids
from store.database import write_session
from store.errors import LeaseLost, StoreError, StoreUnavailable
from store.records import Event
from store.repositories.events import save_event
from store.repositories.leases import Lease, acquire, get_lease, heartbeat, lock_all, release
from traced.config.service_sections import DevicesSection
from traced.core.ownership import own_identity
from traced.core.time_windows import closed_reason
from traced.inference.shared_engine import engine_owners
from traced.jobs.devices import DeviceReading, Probe, Readings, machine_probe, process_trees
from traced.jobs.idleness import IdleWatch, Rules, blocking_reason, foreign_load, observe, rules, suitable_devices
from traced.jobs.memory_return import MemoryUse, memory_use
from traced.jobs.retry import AttemptLedger, OnReport, run_to_completion, waiting_report
from traced.processes.job import Preempted, Report

# Heartbeats come at least this often, as a share of the lease's time to live.
HEARTBEAT_SHARE = 0.25
# After this share without a successful heartbeat the holder treats the lease as lapsed. Below 1, so that the holder
# stops before anybody else may acquire the device.
LAPSE_SHARE = 0.75
# The value of "after" in the report of a wait for a device; such a wait is no failure and raises no alarm.
FOR_DEVICE = "device"
# Seconds in which the memory of a training that has ended must come back.
RETURN_S = 10.0
MEMORY_EVENT = "memory not returned"

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
    """A request to use devices for a purpose.

    Args:
        holder: Identifies this use (``traced.core.ownership``).
        count: The number of GPUs; of the CPU, one lease is enough for any number of processes.
    """

    holder: str
    purpose: str
    cycle_id: str | None
    ttl: timedelta
    count: int = 1


@dataclass
class DeviceLease:
    """The leased devices: one, or several GPUs.

    Args:
        heartbeat_sent_at: Monotonic second at which the last successful heartbeat was sent.
        preempted: Set when the holder has to stop, and never cleared.
        reason: Why it has to stop; "" while ``preempted`` is not set.
        lapsed: Whether somebody else may acquire the device at any moment.
        memory_peaks: The most bytes in use on each device that were measured.
    """

    devices: tuple[DeviceReading, ...]
    leases: tuple[Lease, ...]
    heartbeat_sent_at: float
    preempted: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""
    lapsed: bool = False
    memory_peaks: dict[str, int] = field(default_factory=dict)

    @property
    def ids(self) -> str:
        """Return the ids of the devices, for messages."""
        return ", ".join(device.id for device in self.devices)

    @property
    def ttl_s(self) -> float:
        """Return the time to live in seconds."""
        return self.leases[0].ttl.total_seconds()

    def revoke(self, reason: str, *, lapsed: bool = False) -> None:
        """Ask the body to stop; the first reason is kept."""
        self.reason = self.reason or reason
        self.lapsed = self.lapsed or lapsed
        self.preempted.set()


@dataclass(frozen=True)
class DeviceAccess:
    """What a training needs to lease devices; ``limits`` is called at every use, because settings may change."""

    store: Engine
    probe: Probe
    limits: Callable[[], Rules]
    request: LeaseRequest
    clocks: Clocks


def device_access(
    devices: Callable[[], DevicesSection],
    store: Engine,
    ledger: AttemptLedger,
    cycle_id: str,
    purpose: str,
    *,
    data_dir: Path,
    count: int = 1,
) -> DeviceAccess:
    """Build the device access of a training on ``count`` GPUs from the current settings."""
    return DeviceAccess(
        store=store,
        probe=machine_probe(partial(_service_pids, data_dir)),
        limits=lambda: rules(devices()),
        request=LeaseRequest(own_identity(purpose), purpose, cycle_id, timedelta(seconds=devices().lease_ttl_s), count),
        clocks=Clocks(ledger.now, monotonic, ledger.sleep),
    )


async def run_on_device(
    access: DeviceAccess, pause: Path, work: Callable[[tuple[DeviceReading, ...]], Awaitable[T]], on_report: OnReport
) -> T:
    """Run ``work`` on leased devices, again after every preemption, until it returns a value.

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
                try:
                    with suppress(Preempted):
                        return await _run_until_preempted(access, lease, pause, work)
                finally:
                    await _check_memory(access, lease)
            reporter.report(f"the lease on {lease.ids} was returned: {lease.reason}")
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
    """Wait for idle devices, as many as requested, and hold their leases while the body runs.

    The body is not stopped: it watches ``DeviceLease.preempted`` and ends at its next safe point.

    Args:
        on_wait: Called after each unsuccessful round with the reason per device (key "" if there is no device).
    """
    lease = await _DeviceWait(engine, probe, limits, request, clocks).until_idle(on_wait)
    pause_s = min(limits().poll_s, HEARTBEAT_SHARE * lease.ttl_s)
    tasks = [
        asyncio.create_task(_send_heartbeats(engine, lease, clocks, pause_s)),
        asyncio.create_task(_watch_lapse(lease, clocks)),
    ]
    try:
        yield lease
    finally:
        for task in tasks:
            task.cancel()
        await run_to_completion(_release, engine, lease.devices, request.holder)
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
            devices = self._observe(readings, limits)
            reasons = {} if devices else {"": _missing_device(readings, limits.train_on)}
            if devices:
                result = await self._acquire(devices, limits)
                if isinstance(result, DeviceLease):
                    return result
                reasons = result
            on_wait(reasons)
            await self.clocks.sleep(limits.poll_s)

    def _observe(self, readings: Readings, limits: Rules) -> list[DeviceReading]:
        """Update the watches and return the suitable devices; a device that disappeared loses its watch."""
        at = self.clocks.monotonic()
        devices = suitable_devices(readings.devices, limits.train_on, self.request.count)
        self.watches = {
            device.id: observe(self.watches.get(device.id, IdleWatch()), device, limits, at) for device in devices
        }
        return devices

    async def _acquire(self, devices: Sequence[DeviceReading], limits: Rules) -> DeviceLease | dict[str, str]:
        """Lease as many idle devices as requested, or return why each of them is not available."""
        at, now = self.clocks.monotonic(), self.clocks.now()
        reasons = {device.id: blocking_reason(self.watches[device.id], limits, at, now) for device in devices}
        idle = [device for device in devices if not reasons[device.id]]
        count = self.request.count if devices[0].kind == "cuda" else 1
        if len(idle) >= count:
            try:
                leases = await run_to_completion(self._acquire_in_store, [device.id for device in idle], count)
            except asyncio.CancelledError:
                # The transaction may have succeeded before the cancellation.
                await run_to_completion(_release, self.engine, idle, self.request.holder)
                raise
            acquired = {lease.device for lease in leases.values() if lease and lease.holder == self.request.holder}
            if len(acquired) == count:
                leased = [device for device in idle if device.id in acquired]
                rows = [row for device in leased if (row := leases[device.id])]
                return DeviceLease(tuple(leased), tuple(rows), at)
            reasons |= {device: _holder_text(lease) for device, lease in leases.items()}
        if len(devices) < count:
            reasons[""] = f"training.processes = {count} needs as many GPUs, and {len(devices)} can be used"
        elif count > 1:
            reasons |= {device: reason or f"idle, and {count} are needed at once" for device, reason in reasons.items()}
        return reasons

    def _acquire_in_store(self, devices: Sequence[str], count: int) -> dict[str, Lease | None]:
        """Acquire ``count`` of the devices or none, and return the leases of all that were tried: ours or others'."""
        leases: dict[str, Lease | None] = {}
        with write_session(self.engine) as session:
            lock_all(session)
            for device in devices:
                leases[device] = self._acquire_one(session, device)
                acquired = [name for name, lease in leases.items() if lease and lease.holder == self.request.holder]
                if len(acquired) == count:
                    return leases
            # Nobody holds a part while waiting for the rest.
            for device in acquired:
                release(session, device, self.request.holder)
        return {device: lease for device, lease in leases.items() if device not in acquired}

    def _acquire_one(self, session: Session, device: str) -> Lease | None:
        request, now = self.request, self.clocks.now()
        current = get_lease(session, device)
        # A lapsed lease is taken over only if its holder was also silent by our monotonic clock. Otherwise a clock
        # stepped forward, or two machines whose clocks differ, would take the device from a live holder.
        if current is not None and not self._was_silent(current) and not current.live(now):
            return current
        acquired = acquire(session, device, request.holder, request.purpose, request.cycle_id, at=now, ttl=request.ttl)
        return acquired or get_lease(session, device)

    def _was_silent(self, lease: Lease) -> bool:
        """Return whether this lease had no heartbeat for its whole time to live, by the monotonic clock."""
        now = self.clocks.monotonic()
        previous, first_seen = self.sightings.get(lease.device, (None, now))
        if previous is None or (previous.holder, previous.heartbeat_at) != (lease.holder, lease.heartbeat_at):
            self.sightings[lease.device] = lease, now
            return False
        return now - first_seen >= lease.ttl.total_seconds()


def _missing_device(readings: Readings, train_on: str) -> str:
    """Return why there is no device to train on, with the next step."""
    problems = "; ".join(readings.problems) or "the machine has no such device"
    return f"devices.train_on = {train_on!r}: {problems}; see traced devices, or set devices.train_on = 'auto'"


def _holder_text(lease: Lease | None) -> str:
    if lease is None:
        return "its lease was returned just now"
    return f"leased to {lease.holder} since {lease.acquired_at:%Y-%m-%d %H:%M:%S} UTC for {lease.purpose}"


async def _send_heartbeats(engine: Engine, lease: DeviceLease, clocks: Clocks, pause_s: float) -> None:
    """Send heartbeats until the lease is lost; errors of the store are retried."""
    while True:
        await clocks.sleep(pause_s)
        sent_at = clocks.monotonic()
        try:
            lease.leases = await asyncio.to_thread(_heartbeat, engine, lease.leases, clocks.now())
        except LeaseLost as error:
            lease.revoke(str(error), lapsed=True)
            return
        except StoreError as error:
            log.warning("the heartbeat of the lease on %s failed: %s", lease.ids, error)
            continue
        lease.heartbeat_sent_at = sent_at
        if requester := next((row.wanted_by for row in lease.leases if row.wanted_by), ""):
            lease.revoke(f"{requester} requested it back")


async def _watch_lapse(lease: DeviceLease, clocks: Clocks) -> None:
    """Revoke the lease after too long without a heartbeat, even if the heartbeat's transaction hangs."""
    limit_s = LAPSE_SHARE * lease.ttl_s
    while (remaining_s := lease.heartbeat_sent_at + limit_s - clocks.monotonic()) > 0:
        await clocks.sleep(remaining_s)
    lease.revoke(f"no heartbeat was stored for {limit_s:g} s", lapsed=True)


def _heartbeat(engine: Engine, leases: Sequence[Lease], at: datetime) -> tuple[Lease, ...]:
    # In the order in which all others lock several rows.
    in_order = sorted(leases, key=lambda lease: lease.device)
    with write_session(engine) as session:
        return tuple(heartbeat(session, lease.device, lease.holder, at) for lease in in_order)


def _release(engine: Engine, devices: Sequence[DeviceReading], holder: str) -> None:
    try:
        with write_session(engine) as session:
            for device in sorted(devices, key=lambda device: device.id):
                release(session, device.id, holder)
    except StoreError as error:
        ids = ", ".join(device.id for device in devices)
        log.warning("the lease on %s could not be returned, it expires: %s", ids, error)


async def _run_until_preempted(
    access: DeviceAccess,
    lease: DeviceLease,
    pause: Path,
    work: Callable[[tuple[DeviceReading, ...]], Awaitable[T]],
) -> T:
    working = asyncio.ensure_future(work(lease.devices))
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
        ids = {device.id for device in lease.devices}
        for device in devices:
            # The trainer is a process of this service, so all memory counts here.
            lease.memory_peaks[device.id] = max(lease.memory_peaks.get(device.id, 0), device.memory_used)
        loads = [reason for device in devices if device.id in ids for reason in foreign_load(device, limits.of(device))]
        at = access.clocks.monotonic()
        if not loads:
            busy_since = None
        elif busy_since is None:
            busy_since = at
        if busy_since is not None and at - busy_since >= limits.busy_s:
            return lease.revoke("; ".join(loads))


async def _check_memory(access: DeviceAccess, lease: DeviceLease) -> None:
    """Log the memory of the leased GPUs, and record an event if it did not come back after the training."""
    if lease.devices[0].kind != "cuda":
        return
    give_up_at = access.clocks.monotonic() + RETURN_S
    while True:
        readings = await asyncio.to_thread(access.probe.read)
        uses = memory_use(lease.devices, lease.memory_peaks, readings.devices)
        missing = [use for use in uses if not use.is_returned]
        # The driver frees the memory of a process a moment after its end.
        if not missing or access.clocks.monotonic() >= give_up_at:
            break
        await access.clocks.sleep(min(1.0, access.limits().poll_s))
    for use in uses:
        log.log(logging.INFO if use.is_returned else logging.WARNING, "memory of %s", use.text)
    if missing:
        await asyncio.to_thread(_save_memory_events, access, missing)


def _save_memory_events(access: DeviceAccess, uses: Sequence[MemoryUse]) -> None:
    try:
        with write_session(access.store) as session:
            for use in uses:
                detail = {"warning": use.text, "remainder_bytes": use.remainder}
                save_event(
                    session, Event(access.clocks.now(), MEMORY_EVENT, use.device, access.request.cycle_id, detail)
                )
    except StoreError as error:
        log.warning("the event on the memory of a GPU cannot be stored: %s", error)


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


def _service_pids(data_dir: Path) -> frozenset[int]:
    """Return the ids of the processes of this service and of its router, also in containers of the Docker engine."""
    pids = process_trees([os.getpid(), *engine_owners(data_dir)])
    return pids | process_trees(process_ids(pids))
