"""Questions to a database: read-only, in time, and nothing told that should not be."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from store.types import Outcome
from tests.unit.scoring.conversations import CANCELLED, call, conversation
from traced.scoring.conditions import MISSING
from traced.scoring.databases import PAUSE_S, Database, Databases, QueryFailed
from traced.scoring.rule_file import read_rules

SLOW = "with recursive n(i) as (select 1 union all select i + 1 from n) select max(i) from n"
RULES = """
[databases.shop]
url = "sqlite:///shop.db"

[[rule]]
name = "gone from the shop's books"
outcome = "success"
when = {call = "cancel_*"}
[rule.check]
database = "shop"
query = "select status from orders where id = :order and :said <> '' and :seen = 'cancelled'"
expect = {eq = "cancelled"}
[rule.check.with]
order = {tool = "cancel_*", argument = "$.id"}
said = {conversation = true}
seen = {tool = "cancel_order", result = "$.status"}

[[rule]]
name = "still in them"
outcome = "failure"
[rule.check]
database = "shop"
query = "select status from orders where id = :order"
with = {order = {tool = "cancel_*", argument = "$.id", which = "first"}}
expect = {ne = "cancelled"}
"""


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(tmp_path / "shop.db")
    connection.execute("create table orders (id integer, status text)")
    connection.execute("insert into orders values (7, 'cancelled'), (8, 'open'), (9, null)")
    connection.commit()
    yield connection
    connection.close()


@pytest.fixture
def databases(tmp_path: Path, shop: sqlite3.Connection) -> Databases:
    return Databases({"shop": Database(url="sqlite:///shop.db", timeout_s=5.0)}, tmp_path)


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        ("select status from orders where id = 7", "cancelled"),
        ("select count(*), 1 from orders", 3),
        ("select status from orders where id = 9", None),
        ("select status from orders where id = 99", MISSING),
        ("select status from orders where id = :id", "open"),
    ],
)
def test_the_first_value_of_the_first_row(databases: Databases, query: str, answer: Any) -> None:
    assert databases.ask("shop", query, {"id": 8} if ":id" in query else {}) == answer


@pytest.mark.parametrize(
    "query",
    [
        "delete from orders",
        "insert into orders values (1, 'x')",
        "create table t (a)",
        "attach 'other.db' as other",
        "pragma user_version = 7",
        "begin exclusive",
        "select 1; delete from orders",
        "select nothing from nowhere",
        "",
    ],
)
def test_databases_are_read_only(databases: Databases, shop: sqlite3.Connection, tmp_path: Path, query: str) -> None:
    with pytest.raises(QueryFailed, match="shop"):
        databases.ask("shop", query, {})
    assert shop.execute("select count(*) from orders").fetchone() == (3,)
    assert shop.execute("pragma user_version").fetchone() == (0,)
    assert not (tmp_path / "other.db").exists()
    assert databases.ask("shop", "select 1", {}) == 1  # a bad query is no reason to leave the database alone


def test_a_slow_database_is_not_queried_for_a_while(tmp_path: Path, shop: sqlite3.Connection) -> None:
    clock = [0.0]
    by_name = {"shop": Database(url="sqlite:///shop.db", timeout_s=0.5)}
    databases = Databases(by_name, tmp_path, lambda: clock[0])
    with pytest.raises(QueryFailed, match="interrupted"):
        databases.ask("shop", SLOW, {})
    with pytest.raises(QueryFailed, match="interrupted"):
        databases.ask("shop", "select 1", {})
    clock[0] = PAUSE_S
    assert databases.ask("shop", "select 1", {}) == 1


def test_queries_of_locked_and_missing_databases_fail(tmp_path: Path, shop: sqlite3.Connection) -> None:
    by_name = {
        "locked": Database(url="sqlite:///shop.db", timeout_s=0.1),
        "missing": Database(url="sqlite:///none.db"),
        "unset": Database(url_env="SHOP_URL_THAT_IS_NOT_SET"),
    }
    databases = Databases(by_name, tmp_path)
    shop.execute("begin exclusive")
    with pytest.raises(QueryFailed, match="locked"):
        databases.ask("locked", "select * from orders", {})
    shop.rollback()
    with pytest.raises(QueryFailed, match=r"none\.db"):
        databases.ask("missing", "select 1", {})
    assert not (tmp_path / "none.db").exists()
    with pytest.raises(QueryFailed, match="SHOP_URL_THAT_IS_NOT_SET is not set"):
        databases.ask("unset", "select 1", {})


@pytest.mark.parametrize("url", ["postgresql://ada:s3cr3t@127.0.0.1:9/shop", "nonsense s3cr3t", "mysql://a:s3cr3t@h/x"])
def test_no_error_shows_the_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("SHOP_URL", url)
    databases = Databases({"shop": Database(url_env="SHOP_URL")}, tmp_path)
    with pytest.raises(QueryFailed) as error_info:
        databases.ask("shop", "select 1", {})
    assert "s3cr3t" not in str(error_info.value)
    assert error_info.value.__cause__ is None
    assert "s3cr3t" not in repr(databases.by_name)


def test_query_parameters_come_from_the_conversation(tmp_path: Path, shop: sqlite3.Connection) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(RULES)
    rules = read_rules(file)
    assert rules.decide(CANCELLED).rule == "gone from the shop's books"
    other = conversation(*call("cancel_order", {"id": 8}, {"status": "cancelled"}))
    assert (rules.decide(other).rule, rules.decide(other).outcome) == ("still in them", Outcome.FAILURE)
    assert rules.decide(conversation(*call("get_order", {"id": 7}, {}))).rule == ""  # nothing to ask with
    assert rules.decide(conversation(*call("cancel_order", {"id": [7]}, {"status": "cancelled"}))).rule == ""


def test_a_failed_check_means_unknown_and_stops_the_rules(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(RULES + '[[rule]]\nname = "else"\noutcome = "failure"\nwhen = {turns = {ge = 0}}\n')
    decision = read_rules(file).decide(CANCELLED)
    assert (decision.outcome, decision.failed, decision.rule) == (Outcome.UNKNOWN, True, "gone from the shop's books")
    assert "could not be checked: shop" in decision.reason
