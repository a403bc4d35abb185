"""Training on a leased device: wait for one, train, give way when it is wanted, and go on later.

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
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import sqlalchemy

from sandbox.docker_engine import process_ids
from store.errors import StoreUnavailable
from traced.devices.cpu import CpuProbe
from traced.devices.hours import why_closed
from traced.devices.idle import Rules, intrusions, rules
from traced.devices.lease import Clocks, Hold, Wish, held
from traced.devices.nvml import NvmlProbe
from traced.devices.probe import DeviceReading, Probe, Probes
from traced.devices.processes import trees
from traced.devices.settings import DevicesSection
from traced.executor.errors import Yielded
from traced.executor.job import Report
from traced.executor.ledger import Ledger, OnReport, waiting
from traced.host.holder import this_holder

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
