"""Deliver due notices to the configured hooks.

Hooks are served concurrently, each of them in the order of its notices, up to its first failure. A failed delivery is
retried with exponential back-off, at most ``notify.tries`` times; the tries are counted in the store.

Invariants: delivery is at least once, under the same id: if the process is killed between a hook's answer and its
record, the notice is delivered again. Errors: only those of the store; a hook's failure is logged and stored with the
notice. Not covered: hooks that were removed from the settings; their notices keep waiting.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from operator import attrgetter

import structlog
from sqlalchemy import Engine

from store.database import read_session, write_session
from store.repositories.events import Notice, begin_delivery, due_notices, end_delivery
from traced.config.service_sections import Hook, NotifySection, WebhookSettings
from traced.core.redaction import redacted_text
from traced.notifications.hooks import NoticeError, post_webhook, run_command

log = structlog.get_logger(__name__)

Clock = Callable[[], datetime]


@dataclass(frozen=True)
class DeliveryResult:
    """The number of notices that were delivered and that failed."""

    delivered: int = 0
    failed: int = 0


async def deliver_due(engine: Engine, settings: NotifySection, *, now: Clock) -> DeliveryResult:
    """Try to deliver every due notice once."""
    hooks = {hook.name: hook for hook in settings.hooks}
    if not hooks:
        return DeliveryResult()
    notices = await asyncio.to_thread(_due_notices, engine, settings, now())
    grouped = groupby(sorted(notices, key=attrgetter("hook", "seq")), key=attrgetter("hook"))
    queues = [_deliver_in_order(engine, settings, hooks[name], list(group), now) for name, group in grouped]
    results = await asyncio.gather(*queues)
    return DeliveryResult(sum(result.delivered for result in results), sum(result.failed for result in results))


def backoff(settings: NotifySection, tries: int) -> timedelta:
    """Return the wait after a failed try; ``tries`` is the number of tries so far, including this one."""
    # The limit keeps the power below the largest float.
    doublings = min(tries - 1, 64)
    return timedelta(seconds=min(settings.backoff_s * 2.0**doublings, settings.backoff_cap_s))


def _due_notices(engine: Engine, settings: NotifySection, at: datetime) -> list[Notice]:
    # A date further ahead than any back-off means that the clock was set back.
    longest_wait = timedelta(seconds=2 * max(settings.backoff_s, settings.backoff_cap_s))
    with read_session(engine) as session:
        return due_notices(session, settings.names, at=at, longest_wait=longest_wait)


async def _deliver_in_order(
    engine: Engine, settings: NotifySection, hook: Hook, notices: list[Notice], now: Clock
) -> DeliveryResult:
    for delivered, notice in enumerate(notices):
        # Later notices wait for a failed one, so that a hook always sees them in order.
        if not await _deliver(engine, settings, hook, notice, now):
            return DeliveryResult(delivered, 1)
    return DeliveryResult(len(notices), 0)


async def _deliver(engine: Engine, settings: NotifySection, hook: Hook, notice: Notice, now: Clock) -> bool:
    tries = notice.tries + 1
    last = tries >= settings.tries
    # Written first: a delivery that crashes the process must not be repeated immediately after the restart.
    await asyncio.to_thread(_begin, engine, notice, None if last else now() + backoff(settings, tries))
    try:
        body = json.dumps(notice.body).encode()
        if isinstance(hook, WebhookSettings):
            await post_webhook(hook, notice.key, body, timeout_s=settings.timeout_s, now=now())
        else:
            await run_command(hook, body, timeout_s=settings.timeout_s)
    except NoticeError as error:
        text = redacted_text(str(error))
        log.warning("notice not delivered", hook=hook.name, key=notice.key, tries=tries, given_up=last, error=text)
        await asyncio.to_thread(_end, engine, notice, None, text)
        return False
    await asyncio.to_thread(_end, engine, notice, now(), "")
    return True


def _begin(engine: Engine, notice: Notice, next_at: datetime | None) -> None:
    with write_session(engine) as session:
        begin_delivery(session, notice.seq, next_at=next_at)


def _end(engine: Engine, notice: Notice, delivered_at: datetime | None, error: str) -> None:
    with write_session(engine) as session:
        end_delivery(session, notice.seq, delivered_at=delivered_at, error=error)
