"""The servers that the entries of ``engine.urls`` stand for.

    http://HOST:PORT, https://HOST:PORT    this server
    dns+http://NAME:PORT                   every address of the name, such as that of a headless service of Kubernetes
    store                                  the list in the store (``traced engines``)

The router follows names and the list while it runs (``traced.gateway.engine_sources``). Every other stage takes the
servers of its start (``engine_urls``).
"""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from store.database import open_store, read_session
from store.errors import StoreError
from store.repositories.routers import list_engines
from traced.config.engine_section import DNS_SCHEME, STORE, entry_problem
from traced.config.settings import Settings
from traced.core.errors import ConfigError
from traced.core.redaction import redacted_text
from traced.inference.errors import EngineError, EngineStartError

RESOLVE_S = 5.0
HTTP_PORT = 80
# A resolver that hangs must not take the threads of other work.
_EXECUTOR = ThreadPoolExecutor(4, thread_name_prefix="resolver")


def server_root(url: str) -> str:
    """Return the server's root; users also write the URL with the /v1 of OpenAI's clients."""
    return url.rstrip("/").removesuffix("/v1")


def listed_url(url: str) -> str:
    """Return the form in which the list in the store has the URL of a server; raises ``ConfigError`` for others."""
    if url == STORE or url.startswith(DNS_SCHEME):
        problem = "it stands for several servers: set it in engine.urls, the list has single servers only"
    elif not url.lower().startswith(("http://", "https://")):
        problem = "its form is http://HOST:PORT or https://HOST:PORT"
    else:
        problem = entry_problem(url)
    if problem:
        raise ConfigError(
            f"{redacted_text(url)!r} cannot be in the list of engines: {problem}", hint="http://HOST:PORT"
        )
    parts = urlsplit(server_root(url))
    # Scheme and host are the same in upper case.
    return parts._replace(netloc=parts.netloc.lower()).geturl()


async def resolve(entry: str) -> list[str]:
    """Return the URLs of all addresses that a ``dns+http`` entry resolves to at the moment, sorted.

    A host with addresses of both families counts once: those of IPv6 are left out where IPv4 has any.

    Raises:
        EngineError: The name has no address, or no resolver answers within ``RESOLVE_S``.
    """
    parts = urlsplit(server_root(entry))
    name, port = parts.hostname or "", parts.port or HTTP_PORT
    call = asyncio.get_running_loop().run_in_executor(_EXECUTOR, _addresses, name, port)
    try:
        async with asyncio.timeout(RESOLVE_S):
            hosts = await call
    # A ``UnicodeError`` is raised for a name that no domain can have.
    except (OSError, UnicodeError) as error:
        reason = f"no answer within {RESOLVE_S:g} s" if isinstance(error, TimeoutError) else str(error)
        raise EngineError(f"the name {name!r} of engine.urls cannot be resolved: {reason}") from error
    return [f"http://{host}:{port}{parts.path}" for host in hosts]


def _addresses(name: str, port: int) -> list[str]:
    """Return the addresses of a name as the hosts of URLs."""
    answers = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    families = {family for family, *_ in answers}
    family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    hosts = sorted({str(address[0]) for answer_family, *_, address in answers if answer_family == family})
    return hosts if family == socket.AF_INET else [f"[{host}]" for host in hosts]


async def engine_urls(settings: Settings) -> list[str]:
    """Return the servers that ``engine.urls`` stands for at this moment, each once; [] if it is empty.

    Raises:
        EngineStartError: A name cannot be resolved, or the list in the store is empty or cannot be read.
    """
    urls: list[str] = []
    for entry in settings.engine.urls:
        if entry == STORE:
            urls += await asyncio.to_thread(_list_urls, settings)
        elif urlsplit(entry).scheme == DNS_SCHEME:
            try:
                urls += await resolve(entry)
            except EngineError as error:
                raise EngineStartError(error.message, hint="engine.urls: is the name right?") from error
        else:
            urls.append(server_root(entry))
    return list(dict.fromkeys(urls))


def _list_urls(settings: Settings) -> list[str]:
    try:
        store = open_store(settings.store_url)
        try:
            with read_session(store) as session:
                engines = list_engines(session)
        finally:
            store.dispose()
    except StoreError as error:
        raise EngineStartError(f"the list of engines cannot be read: {error}", hint="store.url") from error
    if not engines:
        raise EngineStartError("the list of engines in the store is empty", hint="traced engines add URL")
    return [engine.url for engine in engines]
