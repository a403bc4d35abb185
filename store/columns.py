"""Column types of the tables: how the domain's values look in SQLite and in PostgreSQL alike.

Invariants: times are UTC and timezone-aware on both sides; JSON keeps the order of keys (so PostgreSQL's ``json``, not
``jsonb``: the order of a tool schema's keys is part of the prompt); key text sorts by code point on both databases.
Fails: a naive time raises ``ValueError``.
"""

from datetime import UTC, datetime

from sqlalchemy import JSON, DateTime, Dialect, String, Text
from sqlalchemy.types import TypeDecorator

from store.text import free


class UtcTime(TypeDecorator[datetime]):
    """A moment, stored in UTC (SQLite has no time zones and gets the naive UTC value)."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuse naive times, turn the others to UTC."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"a time without a time zone cannot be stored: {value!r}; use datetime.now(UTC)")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Give the time zone back."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class FreeText(TypeDecorator[str]):
    """Text of unknown origin (error output): NUL and lone surrogates, which databases refuse, become U+FFFD."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Replace what cannot be stored."""
        return None if value is None else free(value)


KEY = String().with_variant(String(collation="C"), "postgresql")
ORDERED_JSON = JSON()
