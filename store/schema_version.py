"""The newest schema of this traced, what to say of a store that has another, and the patience with one that is silent.

It imports nothing, so anyone may ask.

Invariant: ``HEAD`` is the newest migration in ``store/migrations`` (a test holds it to them).
"""

from typing import Any

from store.errors import StoreVersionError

HEAD = "0007"
PATIENCE = {  # with PostgreSQL, where the URL does not say: a host that vanishes would hold a connection for minutes
    "connect_timeout": 10,  # seconds
    "keepalives_idle": 20,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 40_000,  # milliseconds
}


def patience(url: str) -> dict[str, Any]:
    """What of ``PATIENCE`` the URL does not say itself."""
    return {name: value for name, value in PATIENCE.items() if f"{name}=" not in url}


def mismatch(store: str, found: str) -> StoreVersionError:
    """The error of the ``store`` (as shown to a person) whose schema is not ``HEAD``: which of the two is older."""
    if found < HEAD:  # revisions are numbers of one width
        return StoreVersionError(f"{store} has schema {found!r}, this traced needs {HEAD!r}; run `traced db upgrade`")
    return StoreVersionError(f"{store} has schema {found!r}, which this traced does not know; upgrade traced")
