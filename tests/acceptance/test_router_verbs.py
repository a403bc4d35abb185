"""The router's traffic as a user sees it: status, explain, show conversation."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from store.database import open_store, sqlite_url, write_session
from store.records import ConversationRoute, Exchange
from store.repositories import serving
from tests.acceptance.conftest import Traced
from tests.unit.store.chain import save_chain

ADAPTER = "date-reasoning@v1"


def test_what_the_router_did_is_shown(traced: Traced, tmp_path: Path) -> None:
    store = open_store(sqlite_url(tmp_path / "traced-data" / "traced.db"))
    now = datetime.now(UTC)
    with write_session(store) as session:
        save_chain(session)
        serving.save_routes(session, [ConversationRoute("conv-2", "base", {}, 2.0, "no decision within 2 s", now)])
        exchange = Exchange("exchange-2", "conv-2", now, "base", 200, 0.5, response_id="chatcmpl-7")
        serving.save_exchanges(session, [exchange, replace(exchange, id="exchange-3", status=502, response_id="")])
    store.dispose()
    result = traced("status")
    assert "Conversations of the last day (last hour): 1 base (1)" in result.out, result.err
    assert 'Served by the base model by default in the last day: 1, reason "no decision within 2 s"' in result.out
    assert f"Routing by label tokens; no classifier was fitted for {ADAPTER} yet" in result.out
    router = traced("status", "--json").json["router"]
    assert (router["failures"], router["unsettled"], router["spool"]["files"]) == ({"502": 1}, 3, 0)
    assert (
        "traffic      1 of 2 decided conversations, 50.0 %, the last one 2026-03-14" in traced("explain", ADAPTER).out
    )
    report = traced("show", "conversation", "chatcmpl-7", "--json").json
    assert (report["id"], report["route"]["why"]) == ("conv-2", "no decision within 2 s")
    assert [row["status"] for row in report["exchanges"]] == [200, 502]
