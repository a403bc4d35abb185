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
    with write_session(store) as session:
        save_chain(session)
        for name, at in (("old", 20), ("cited", 20), ("young", 10**6)):
            conversation = trajectory(f"router-{name}", cycle_id=None, task_id=name)
            save_trajectories(session, [conversation])
            exchange = Exchange(f"e-{name}", name, later(at), "base", 200, 0.1)
            serving.save_exchanges(session, [exchange])
            serving.settle_exchanges(session, {exchange.id: conversation.id}, at=later(at))
            serving.save_routes(session, [ConversationRoute(name, "base", {}, 0.0, "", later(10))])
        routing.save_routing(session, [RoutingChoice("router-cited", "base", {}, 0.1)])
    retention_settings, now = (
        settings.model_copy(update={"retention": RetentionSection(conversations_days=5)}),
        later(30) + timedelta(days=5),
    )
    counts = {
        item.kind: item.count
        for item in prune(retention_settings, store, now=now, owner=NO_OWNER, dry_run=True)
        if item.count
    }
    # conv-1 is the chain's: its exchange is not settled yet
    assert counts == {"reported": 1, "exchanges": 2, "decisions": 3, "feedback": 1}
    assert {
        item.kind: item.count for item in prune(retention_settings, store, now=now, owner=NO_OWNER) if item.count
    } == counts
    with read_session(store) as session:
        assert set(serving.find_routes(session, ["old", "cited", "young", "conv-1"])) == {"young"}
        assert [item.id for item in serving.list_exchanges(session, "conv-1")] == ["exchange-1"]
        trajectory_ids = [item.id for item in list_trajectories(session) if item.id.startswith("router-")]
    assert trajectory_ids == ["router-cited", "router-young"]
    store.dispose()
