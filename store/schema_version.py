"""The schema version that this release needs, and the connection options of PostgreSQL.

This module imports nothing heavy, because ``traced status`` uses it without loading SQLAlchemy.
"""

from typing import Any

from store.errors import StoreVersionError

# Version of the newest migration in store/migrations; a test compares the two.
HEAD = "0017"
# Defaults for options that the URL does not set. Without them an unreachable host would block a connection for minutes.
DEFAULT_CONNECT_OPTIONS = {
    "connect_timeout": 10,  # seconds
    "keepalives_idle": 20,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 40_000,  # milliseconds
}
# A server or role may have "off", with which a crash loses the last commits. Stricter settings than "on" are kept.
COMMIT_SYNCHRONOUSLY = (
    "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
)


def connect_options(url: str) -> dict[str, Any]:
    """Return the default PostgreSQL connection options that the URL does not set itself."""
    return {name: value for name, value in DEFAULT_CONNECT_OPTIONS.items() if f"{name}=" not in url}


def version_error(store: str, version: str) -> StoreVersionError:
    """Return the error for a store whose schema is not ``HEAD``; ``store`` is its name in the message."""
    # Revisions are zero-padded numbers, so text order is version order.
    if version < HEAD:
        return StoreVersionError(f"{store} has schema {version!r}, this traced needs {HEAD!r}; run `traced db upgrade`")
    return StoreVersionError(f"{store} has schema {version!r}, which this traced does not know; upgrade traced")
