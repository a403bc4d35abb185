"""A decision of the command line: asked of the service that holds the data directory, else made in the store.

Invariants: the one function of ``traced.acts`` decides either way, so that audit, event and answer are the same; a
service is asked, because it goes on at once and knows who asks.
How it fails: ``ServiceSilent`` when somebody holds the directory and no service answers (it starts or stops just now,
or a restore or an upgrade is at work): nothing was decided then. What the service refuses is said in its own words.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from sqlmodel import Session

from traced.acts import Act
from traced.client import Client, NoDaemon, default_socket
from traced.client.models import Done
from traced.commands.stored import changing
from traced.config import Settings
from traced.host.errors import ServiceSilent
from traced.host.holder import this_user
from traced.host.lock import holder


def decided(
    settings: Settings,
    ask: Callable[[Client], Awaitable[Done]],
    make: Callable[[Session, Act], Done],
    *,
    who: str,
    reason: str,
) -> Done:
    """What was decided: by ``ask`` where a service holds the data directory, else by ``make``."""
    held_by = holder(settings.data_dir)
    if held_by is not None:
        try:
            return asyncio.run(_asked(settings, ask))
        except NoDaemon as error:
            raise ServiceSilent(
                f"{settings.data_dir} is held by {held_by}, which does not answer; nothing was decided",
                hint="the same command again in a moment",
            ) from error
    user = this_user()
    with changing(settings) as opened:
        act = Act(who or user, "local", datetime.now(UTC), reason, by="" if who in ("", user) else user)
        return make(opened, act)


async def _asked(settings: Settings, ask: Callable[[Client], Awaitable[Done]]) -> Done:
    async with Client(default_socket(settings.data_dir)) as client:
        return await ask(client)
