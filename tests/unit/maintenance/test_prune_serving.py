"""Retention of the router's conversations."""

from datetime import timedelta
from pathlib import Path

from store.database import open_store, read_session, sqlite_url, write_session
from store.records import ConversationRoute, Exchange, RoutingChoice
from store.repositories import serving
from store.repositories import serving as routing
from store.repositories.trajectories import list_trajectories, save_trajectories
from tests.unit.store.chain import later, save_chain, trajectory
from traced.config.service_sections import RetentionSection
from traced.config.settings import load_settings
from traced.maintenance.prune import prune

NO_OWNER = "nobody in these tests"


def test_the_routers_conversations_go_by_their_age_and_evidence_stays(tmp_path: Path) -> None:
    store, settings = open_store(sqlite_url(tmp_path / "traced.db")), load_settings(tmp_path)
    with write_session(store) as opened:
        save_chain(opened)
        for name, at in (("old", 20), ("cited", 20), ("young", 10**6)):
            made = trajectory(f"router-{name}", cycle_id=None, task_id=name)
            save_trajectories(opened, [made])
            exchange = Exchange(f"e-{name}", name, later(at), "base", 200, 0.1)
            serving.save_exchanges(opened, [exchange])
            serving.settle_exchanges(opened, {exchange.id: made.id}, at=later(at))
            serving.save_routes(opened, [ConversationRoute(name, "base", {}, 0.0, "", later(10))])
        routing.save_routing(opened, [RoutingChoice("router-cited", "base", {}, 0.1)])
    kept, now = (
        settings.model_copy(update={"retention": RetentionSection(conversations_days=5)}),
        later(30) + timedelta(days=5),
    )
    told = {one.kind: one.count for one in prune(kept, store, now=now, owner=NO_OWNER, dry_run=True) if one.count}
    # conv-1 is the chain's: its exchange is not settled yet
    assert told == {"reported": 1, "exchanges": 2, "decisions": 3, "feedback": 1}
    assert {one.kind: one.count for one in prune(kept, store, now=now, owner=NO_OWNER) if one.count} == told
    with read_session(store) as opened:
        assert set(serving.find_routes(opened, ["old", "cited", "young", "conv-1"])) == {"young"}
        assert [one.id for one in serving.list_exchanges(opened, "conv-1")] == ["exchange-1"]
        found = [one.id for one in list_trajectories(opened) if one.id.startswith("router-")]
    assert found == ["router-cited", "router-young"]
    store.dispose()
