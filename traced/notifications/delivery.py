"""Delivering what is due: the loop's turn of the notices.

Invariants: hooks are told side by side, and each of them in the order of the notices, up to its first failure; every
try has a time limit, so a turn ends. A failed try is repeated with exponential back-off up to ``notify.tries`` times,
counted in the store. Delivery is at least once: a process killed between a hook's answer and the note of it tells it
again, under the same id.

Fails: only as the store does. A hook's failure is logged and kept in the notice. Not covered: hooks that were taken out
of the settings; what waits for them goes on waiting.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
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
from traced.notifications.hooks import NoticeError

log = structlog.get_logger(__name__)

Clock = Callable[[], datetime]


@dataclass(frozen=True)
class DeliveryResult:
    """What one turn did, in notices."""

    delivered: int = 0
    failed: int = 0


async def deliver_due(engine: Engine, settings: NotifySection, *, now: Clock) -> DeliveryResult:
    """Make one try for every notice that is due."""
    hooks = {hook.name: hook for hook in settings.hooks}
    if not hooks:
        return DeliveryResult()
    due = await asyncio.to_thread(_due_notices, engine, settings, now())
    grouped = groupby(sorted(due, key=attrgetter("hook", "seq")), key=attrgetter("hook"))
    queues = [_deliver_in_order(engine, settings, hooks[name], list(group), now) for name, group in grouped]
    turns = await asyncio.gather(*queues)
    return DeliveryResult(sum(turn.delivered for turn in turns), sum(turn.failed for turn in turns))


def backoff(settings: NotifySection, tries: int) -> timedelta:
    """The wait after the try of this number (1 is the first)."""
    doublings = min(tries - 1, 64)
    return timedelta(seconds=min(settings.backoff_s * 2.0**doublings, settings.backoff_cap_s))


def _due_notices(engine: Engine, settings: NotifySection, at: datetime) -> list[Notice]:
    longest_wait = timedelta(seconds=2 * max(settings.backoff_s, settings.backoff_cap_s))
    with read_session(engine) as db_session:
        return due_notices(db_session, settings.names, at=at, longest_wait=longest_wait)


async def _deliver_in_order(
    engine: Engine, settings: NotifySection, hook: Hook, notices: list[Notice], now: Clock
) -> DeliveryResult:
    for delivered, notice in enumerate(notices):
        if not await _deliver(engine, settings, hook, notice, now):
            return DeliveryResult(delivered, 1)
    return DeliveryResult(len(notices), 0)


async def _deliver(engine: Engine, settings: NotifySection, hook: Hook, notice: Notice, now: Clock) -> bool:
    tries = notice.tries + 1
    last = tries >= settings.tries
    await asyncio.to_thread(_begin, engine, notice, None if last else now() + backoff(settings, tries))
    try:
        await _send(settings, hook, notice, now())
    except NoticeError as error:
        text = redacted_text(str(error))
        log.warning("notice not delivered", hook=hook.name, key=notice.key, tries=tries, given_up=last, error=text)
        await asyncio.to_thread(_end, engine, notice, None, text)
        return False
    await asyncio.to_thread(_end, engine, notice, now(), "")
    return True


def _send(settings: NotifySection, hook: Hook, notice: Notice, at: datetime) -> Awaitable[None]:
    from traced.notifications import hooks as command  # httpx is loaded only where somebody is told something
    from traced.notifications import hooks as webhook

    body = json.dumps(notice.body).encode()
    if isinstance(hook, WebhookSettings):
        return webhook.post_webhook(hook, notice.key, body, timeout_s=settings.timeout_s, now=at)
    return command.run_command(hook, body, timeout_s=settings.timeout_s)


def _begin(engine: Engine, notice: Notice, next_at: datetime | None) -> None:
    with write_session(engine) as db_session:
        begin_delivery(db_session, notice.seq, next_at=next_at)


def _end(engine: Engine, notice: Notice, delivered_at: datetime | None, error: str) -> None:
    with write_session(engine) as db_session:
        end_delivery(db_session, notice.seq, delivered_at=delivered_at, error=error)
