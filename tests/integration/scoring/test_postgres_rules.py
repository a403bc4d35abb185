"""Rules that ask a real PostgreSQL, started for these tests (no password, local socket only)."""

from pathlib import Path

import pytest
from sqlalchemy import text

from benchmarks.chaos.postgres import missing
from store.database import connect
from traced.scoring.databases import Database, Databases, QueryFailed

pytestmark = [pytest.mark.optional, pytest.mark.skipif(bool(missing()), reason=missing())]


def test_queries_are_read_only_single_and_limited_in_time(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = connect(url)
    with engine.begin() as connection:
        connection.execute(text("create table orders (id integer, price numeric, at timestamptz default now())"))
        connection.execute(text("insert into orders values (7, 12.50)"))
        connection.execute(text("create sequence numbers"))
    monkeypatch.setenv("SHOP_URL", url)
    clock = [0.0]
    databases = Databases({"shop": Database(url_env="SHOP_URL", timeout_s=2.0)}, tmp_path, lambda: clock[0])
    assert databases.ask("shop", "select price from orders where id = :id", {"id": 7}) == 12.5
    assert databases.ask("shop", "select id::text from orders where id = :id", {"id": "7"}) == "7"
    for query in (
        "delete from orders returning id",
        "insert into orders values (1, 1)",
        "select nextval('numbers')",
        "commit; delete from orders",
        "set transaction read write; delete from orders",
        "select * from nowhere",
        "select 1/0",
    ):
        with pytest.raises(QueryFailed, match="shop: "):
            databases.ask("shop", query, {})
    with engine.begin() as connection:
        assert connection.execute(text("select count(*) from orders")).scalar_one() == 1
    with pytest.raises(QueryFailed, match="statement timeout"):
        databases.ask("shop", "select pg_sleep(20)", {})
    with pytest.raises(QueryFailed, match="statement timeout"):
        databases.ask("shop", "select 1", {})  # it is left alone for a while
    clock[0] = 60.0
    assert databases.ask("shop", "select count(*) from orders", {}) == 1
    engine.dispose()
