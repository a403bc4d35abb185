"""The newest schema of this traced, what to say of a store that has another, and the patience with one that is silent.

It imports nothing, so anyone may ask.

Invariant: ``HEAD`` is the newest migration in ``store/migrations`` (a test holds it to them).
"""

from store.errors import StoreVersionError

HEAD = "0004"
CONNECT_S = 10  # for PostgreSQL's answer, where the URL does not say; a host that drops packets would hold for minutes


def mismatch(store: str, found: str) -> StoreVersionError:
    """The error of the ``store`` (as shown to a person) whose schema is not ``HEAD``: which of the two is older."""
    if found < HEAD:  # revisions are numbers of one width
        return StoreVersionError(f"{store} has schema {found!r}, this traced needs {HEAD!r}; run `traced db upgrade`")
    return StoreVersionError(f"{store} has schema {found!r}, which this traced does not know; upgrade traced")
