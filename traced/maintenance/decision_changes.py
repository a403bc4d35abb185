"""What a restore would do to decisions of people: which it revives, and which it loses.

Invariants: only the tables in ``TABLES`` are read, by their column names, so that stores of every released schema can
be compared; nothing is written. How it fails: ``sqlite3.Error``, ``store.errors.StoreError`` or SQLAlchemy's errors if
a store cannot be read, and ``LookupError``, ``TypeError`` or ``ValueError`` for rows that traced never writes. Not
covered: decisions on prompts.
"""

import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import inspect, text

from store.database import connect
from store.text import sanitize_line

# Every table with the columns of its rows' identity, which are the same in a backup and in the store that it is of.
TABLES = {
    "approvals": ("id",),
    "promotions": ("adapter", "state", "at"),
    "adapters": ("name",),
    "router_keys": ("id",),
    "api_tokens": ("name",),
}
SERVING = ("live", "canary", "shadow")
COPY = re.compile(r"COPY (?:\S+\.)?(\w+) \((.*)\) FROM stdin;")
ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}

Rows = Mapping[str, list[dict[str, Any]]]


def decision_changes(current: Rows, backup: Rows) -> list[str]:
    """Return a line for each decision that replacing ``current`` by ``backup`` revives or loses, revivals first."""
    return [*_revived_adapters(current, backup), *_revived_keys(current, backup), *_lost_decisions(current, backup)]


def sqlite_rows(file: Path) -> Rows | None:
    """Read the decisions of a SQLite store; tables that it lacks are empty. None: it has no table of ``TABLES``."""
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if names.isdisjoint(TABLES):
            return None
        return {
            table: [dict(row) for row in connection.execute(f"SELECT * FROM {table}")] if table in names else []
            for table in TABLES
        }


def database_rows(url: str) -> Rows | None:
    """Read the decisions of the store in a database; tables that it lacks are empty. None: as ``sqlite_rows``."""
    engine = connect(url)
    try:
        with engine.connect() as connection:
            names = set(inspect(connection).get_table_names())
            if names.isdisjoint(TABLES):
                return None
            return {
                table: [dict(row) for row in connection.execute(text(f"SELECT * FROM {table}")).mappings()]
                if table in names
                else []
                for table in TABLES
            }
    finally:
        engine.dispose()


def script_rows(script: Path) -> Rows:
    """Read the decisions from the COPY statements of ``pg_restore --data-only``; nothing in the script is run."""
    rows: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
    with script.open(encoding="utf-8", newline="\n") as file:
        lines = iter(file)
        for line in lines:
            if copy := COPY.match(line):
                columns = [name.strip().strip('"') for name in copy[2].split(",")]
                rows.setdefault(copy[1], []).extend(_parse_rows(lines, columns))
    return rows


def _parse_rows(lines: Iterator[str], columns: list[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        text = line.removesuffix("\n")
        if text == "\\.":
            return
        yield dict(zip(columns, map(_unescape, text.split("\t")), strict=True))


def _unescape(field: str) -> str | None:
    if field == "\\N":
        return None
    return re.sub(r"\\(.)", lambda match: ESCAPES.get(match[1], match[1]), field)


def _revived_adapters(current: Rows, backup: Rows) -> Iterator[str]:
    entries, decisions = _newest_rows(current["promotions"]), _newest_rows(current["approvals"])
    versions = {row["name"]: row for row in current["adapters"]}
    for adapter, restored_entry in _newest_rows(backup["promotions"]).items():
        entry, decision, version = entries.get(adapter), decisions.get(adapter), versions.get(adapter, {})
        if restored_entry["state"] not in SERVING:
            continue
        if entry is not None and entry["state"] not in SERVING:
            verb = "rolled it back" if entry["state"] == "rolled_back" else f"made it {_line(entry['state'])}"
            objection = f"{_line(entry['who'])} {verb} on {_date(entry)}: {_line(entry['reason'])}"
        elif decision is not None and decision["decision"] == "rejected":
            objection = f"{_line(decision['who'])} rejected it on {_date(decision)}: {_line(decision['reason'])}"
        elif version.get("quarantined_at"):
            objection = f"it is in quarantine: {_line(version['quarantine_reason'])}"
        else:
            continue
        yield f"revives {_line(adapter)}: it would be {_line(restored_entry['state'])} again, although {objection}"


def _revived_keys(current: Rows, backup: Rows) -> Iterator[str]:
    for table, kind in (("router_keys", "API key"), ("api_tokens", "token")):
        old = _by_key(table, backup)
        for key in sorted(key for key in old.keys() - _by_key(table, current).keys() if not old[key]["revoked_at"]):
            yield f"adds the {kind} {_line(key[0])}, which this store does not have: whoever holds it gets in"
        for key, row in _by_key(table, current).items():
            if key not in old or old[key]["revoked_at"]:
                continue
            if row["revoked_at"]:
                revoked = f"was revoked on {_time(row['revoked_at']):%F %T}"
            elif row["hash"] != old[key]["hash"]:
                revoked = f"was replaced on {_time(row['created_at']):%F %T}"
            else:
                continue
            yield f"revives the {kind} {_line(key[0])}: it would be valid again, but {revoked}"


def _lost_decisions(current: Rows, backup: Rows) -> Iterator[str]:
    for table, column in (("approvals", "decision"), ("promotions", "state")):
        old = _by_key(table, backup)
        for key, row in _by_key(table, current).items():
            if key not in old:
                entry = "the decision" if table == "approvals" else "the entry"
                words = f"{_line(row['adapter'])} {_line(row[column])}"
                yield f"loses {entry} '{words}' by {_line(row['who'])} on {_date(row)}: {_line(row['reason'])}"


def _newest_rows(rows: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the newest row of each adapter."""
    return {row["adapter"]: row for row in sorted(rows, key=lambda row: int(row["seq"]))}


def _by_key(table: str, rows: Rows) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    return {
        tuple(_time(row[name]) if name == "at" else row[name] for name in TABLES[table]): row for row in rows[table]
    }


def _time(value: Any) -> datetime:
    # SQLite stores UTC without a zone, a script of PostgreSQL has text with one.
    moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _date(row: Mapping[str, Any]) -> str:
    return f"{_time(row['at']):%F %T}"


def _line(value: Any) -> str:
    return sanitize_line(value) or "no reason given"
