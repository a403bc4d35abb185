"""Upkeep inside the service: once a day, at ``retention.prune_at``, what ``traced prune`` would delete is deleted.

Invariants: the store's events say when it was done last, so that a restart neither repeats nor forgets a day; a day on
which the service did not run is made up for when it starts; whatever goes wrong is logged and told as an event, and the
next day tries again. Stopped containers of ours go with it (``traced.upkeep.prune``).
How it fails: never. Not covered: deciding when cycles begin.
"""

import asyncio
import logging
from datetime import UTC, datetime, time, timedelta, tzinfo

from store.database import reading, session
from store.errors import StoreError
from store.repositories.events import last_event, save_event
from store.service_records import Event
from traced.devices.hours import parse_zone
from traced.host.owner import sandbox_owner
from traced.service.control import Control
from traced.upkeep.prune import prune

LOOK_S = 60.0
DONE = "upkeep"  # the kind of its events

log = logging.getLogger(__name__)


def is_due(at: str, last: datetime, now: datetime, zone: tzinfo | None = None) -> bool:
    """Whether a clock of ``zone`` has shown ``at`` ("03:30"; "" is never) since ``last``."""
    if not at:
        return False
    local = now.astimezone(zone)
    moment = datetime.combine(local.date(), time.fromisoformat(at), local.tzinfo)
    if moment.astimezone(UTC) > now:  # compared in UTC: clocks are changed at night
        moment = datetime.combine(local.date() - timedelta(days=1), moment.time(), local.tzinfo)
    return last < moment.astimezone(UTC)


async def keep_up(control: Control) -> None:
    """Look every minute, for ever."""
    last: datetime | None = None
    while True:
        try:
            if last is None:
                last = await asyncio.to_thread(_last, control)
            last = await asyncio.to_thread(upkeep_if_due, control, last)
        except StoreError as error:
            log.warning("upkeep waits: %s", error)
        await asyncio.sleep(LOOK_S)


def upkeep_if_due(control: Control, last: datetime) -> datetime:
    """Prune when it is time; returns when it was done last. Raises the store's errors when it cannot be noted."""
    now, kept = control.now(), control.settings
    last = min(last, now)
    if not is_due(kept.retention.prune_at, last, now, parse_zone(kept.devices.time_zone)):
        return last
    detail = _pruned(control, now)
    with session(control.store) as opened:
        save_event(opened, Event(control.now(), DONE, "prune", detail=detail))
    return now


def _pruned(control: Control, now: datetime) -> dict[str, object]:
    try:
        gone = prune(control.settings, control.store, now=now, owner=sandbox_owner(control.settings.data_dir))
    except Exception as error:  # a failure of upkeep is no reason to stop the service
        log.exception("upkeep failed; it is tried again tomorrow, or by hand: traced prune")
        return {"failed": f"{type(error).__name__}: {error}"}
    pruned = {one.kind: one.count for one in gone if one.count}
    size, notes = sum(one.size for one in gone), [one.note for one in gone if one.note]
    log.info("upkeep: %s", pruned or "nothing to delete", extra={"bytes": size, "notes": notes})
    return {"pruned": pruned, "bytes": size, "notes": notes}


def _last(control: Control) -> datetime:
    with reading(control.store) as opened:
        done = last_event(opened, DONE)
    return control.since if done is None else min(done.at, control.now())  # a clock that was ahead holds up nothing
