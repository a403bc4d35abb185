"""Verify the files of the adapter versions once a day, while the service runs.

Invariants: the files are read by a thread of the lowest priority, never on the event loop; the time of the last scrub
is in the store, so that one that fell due while the service was down is made up for. A version whose files differ is
put in quarantine (``traced.registry.integrity``); one in quarantine is not read.

How it fails: errors of the store are logged, and the scrub is repeated at the next check. Files that cannot be read are
logged, which is no evidence of a change. Not covered: copies in an object store (``traced verify`` reads them).
"""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import Engine

from store.database import read_session, write_session
from store.errors import StoreError
from store.records import Event
from store.repositories.events import last_event, save_event
from traced.core.errors import AdapterChanged, PromotionError
from traced.registry.integrity import check_files, quarantining
from traced.registry.verification import ordered_versions

SCRUBBED = "adapters verified"  # event kind
PERIOD = timedelta(days=1)
POLL_S = 60.0
LOWEST_PRIORITY = 19

log = logging.getLogger(__name__)


async def scrub_daily(store: Engine, hooks: Callable[[], Sequence[str]], now: Callable[[], datetime]) -> None:
    """Scrub whenever it is due, until cancelled; ``hooks`` returns the names of the notification hooks."""
    stopped = threading.Event()
    try:
        while True:
            try:
                if await asyncio.to_thread(is_due, store, now()):
                    await _at_low_priority(partial(scrub, store, hooks(), now, stopped.is_set))
            except StoreError as error:
                log.warning("the adapters are not verified, next attempt follows: %s", error)
            # No error of the scrub may stop the service.
            except Exception:
                log.exception("the adapters are not verified, next attempt follows")
            await asyncio.sleep(POLL_S)
    finally:
        stopped.set()


def is_due(store: Engine, at: datetime) -> bool:
    """Return whether the last scrub was a day ago, or there was none."""
    with read_session(store) as session:
        event = last_event(session, SCRUBBED)
    # A scrub in the future was recorded while the clock was ahead.
    return event is None or not timedelta(0) <= at - event.at < PERIOD


def scrub(
    store: Engine, hooks: Sequence[str], now: Callable[[], datetime], is_stopped: Callable[[], bool] = lambda: False
) -> None:
    """Verify every version that is not in quarantine, live ones first; raises ``StoreError``."""
    with read_session(store) as session:
        versions = [version for version in ordered_versions(session) if version.quarantined_at is None]
    changed, unreadable = [], []
    for version in versions:
        if is_stopped():
            return
        try:
            with quarantining(store, hooks, now):
                check_files(version)
        except AdapterChanged:
            changed.append(version.name)
        except PromotionError as error:
            log.warning("%s", error)
            unreadable.append(version.name)
    detail = {"checked": len(versions), "changed": changed, "unreadable": unreadable}
    with write_session(store) as session:
        save_event(session, Event(now(), SCRUBBED, "adapters", detail=detail))
    log.info("%d adapter versions were verified", len(versions), extra=detail)


async def _at_low_priority(work: Callable[[], None]) -> None:
    """Call ``work`` in a thread of the lowest priority; a thread that hangs does not hold up the end of the service."""
    future: Future[None] = Future()

    def run() -> None:
        # Linux has a priority for each thread.
        if sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        try:
            work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    future.set_running_or_notify_cancel()
    threading.Thread(target=run, daemon=True, name="scrub").start()
    await asyncio.wrap_future(future)
