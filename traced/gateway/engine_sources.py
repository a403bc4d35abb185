"""Follow the engines that the settings name, the addresses of names, and the list in the store.

Invariants: a source that cannot be read keeps the engines that it had last, and is named in ``problems``, in the log
and by ``/ready``; a source that hangs delays no other. An engine that several sources name is used until the last of
them drops it. Not covered: a name whose resolver returns a part of its addresses at a time; its engines would come and
go.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from sqlalchemy import Engine

from store.database import read_session
from store.errors import StoreError
from store.repositories.routers import list_engines
from traced.config.engine_section import DNS_SCHEME, STORE
from traced.gateway.engines import Pool, Replica
from traced.gateway.store_calls import call_store
from traced.inference.engine_urls import resolve, server_root
from traced.inference.errors import ServingError

POLL_S = 2.0
log = logging.getLogger(__name__)


@dataclass
class EngineFollower:
    """Keeps the pool's engines up to date with their sources.

    Args:
        entries: The sources, in the form of ``engine.urls``.
        connect: Returns the replica of a URL, which is not in use yet.
        problems: Why sources cannot be read, by entry.
    """

    store: Engine
    pool: Pool
    entries: Sequence[str]
    connect: Callable[[str], Replica]
    problems: dict[str, str] = field(default_factory=dict)
    _urls: dict[str, list[str]] = field(default_factory=dict)

    async def run(self) -> None:
        """Follow the sources until cancelled."""
        # One task per source, so that a resolver that hangs does not delay the list.
        async with asyncio.TaskGroup() as group:
            for entry in self._sources:
                group.create_task(self._follow(entry))

    async def refresh(self) -> None:
        """Read every source once."""
        self._urls |= {entry: [server_root(entry)] for entry in self.entries if entry not in self._sources}
        await asyncio.gather(*(self._read(entry) for entry in self._sources))
        self._apply()

    @property
    def _sources(self) -> list[str]:
        """Return the entries that may stand for other engines later."""
        return [entry for entry in self.entries if entry == STORE or urlsplit(entry).scheme == DNS_SCHEME]

    async def _follow(self, entry: str) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self._read(entry)
            self._apply()

    async def _read(self, entry: str) -> None:
        try:
            urls = await call_store(self._list_urls) if entry == STORE else await resolve(entry)
        except (ServingError, StoreError) as error:
            problem = f"{error}; its last engines stay in use: {len(self._urls.get(entry, []))}"
            if self.problems.get(entry) != problem:
                log.warning("engines of %s: %s", entry, problem)
            self.problems[entry] = problem
            return
        if self.problems.pop(entry, ""):
            log.info("engines of %s: known again", entry)
        self._urls[entry] = urls

    def _list_urls(self) -> list[str]:
        with read_session(self.store) as session:
            return [engine.url for engine in list_engines(session)]

    def _apply(self) -> None:
        urls = [url for entry in self.entries for url in self._urls.get(entry, [])]
        self.pool.set_engines(list(dict.fromkeys(urls)), self.connect)
